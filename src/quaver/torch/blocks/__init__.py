"""The blocks of a Transformer: norms, activations, MLP, attention, loss, the layer; no whole model and no mesh."""

"""The blocks of a model: norms, activations, MLP, attention, experts, state spaces, loss, layers; no mesh."""

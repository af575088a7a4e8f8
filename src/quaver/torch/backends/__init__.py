"""Fast implementations of the operations, one package per kind of device; no layers and no autograd."""

"""Floating-point operations of products, counted where torch's own counter fails."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Flops(TorchDispatchMode):
    """Count FLOPs as FlopCounterMode does, without its hooks, which fail on leaves in torch.autograd.grad."""

    total = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        formula = flop_registry.get(operator._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out

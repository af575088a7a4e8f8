"""Detect parameters between a `ColwiseParallel` and a `RowwiseParallel` whose gradients would differ between ranks.

Such a parameter, for instance of a norm over the features of each head, is applied only to this rank's features or
heads, so each rank computes only part of its gradient. Outputs are still right, so the error would go unnoticed.
`SequenceParallel()` sums such gradients over the ranks.
"""

import gc
import weakref
from typing import Any

from torch import Tensor, nn

from quaver.torch.linear.plan import LinearCall

#: Autograd nodes whose backward yields complete gradients: `SequenceParallel` parameters, DTensors and embeddings.
_SUMS = ("_AllReduceGradBackward", "_ToTorchTensor", "_VocabEmbeddingFunctionBackward")
#: Layers whose input graph was already checked.
_seen: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def why_partial(layer: nn.Module, name: str, x: Tensor) -> str:
    """Return an error message if parameters between the column layers and this `RowwiseParallel` get partial gradients,
    or "".

    The autograd graph of the input is walked once per layer, back to the sharded layers.

    Args:
        layer: the `RowwiseParallel` layer.
        name: its name for the message.
        x: its input.
    """
    if x.grad_fn is None or layer in _seen:
        return ""
    found: dict[int, Any] = {}
    nodes, known = [x.grad_fn], {x.grad_fn}
    while nodes:
        node: Any = nodes.pop()
        if node.name().startswith(_SUMS) or _is_sharded_linear(node):
            continue
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            found[id(leaf)] = leaf
        for after, _ in node.next_functions:
            if after is not None and after not in known:
                known.add(after)
                nodes.append(after)
    if not found:
        _seen.add(layer)
        return ""
    every = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    shown, keys = [], []
    for p in found.values():
        owner = next((m for m in every if any(q is p for q in m.__dict__.get("_parameters", {}).values())), None)
        key = next((key for m in every for key, child in m.__dict__.get("_modules", {}).items() if child is owner), "")
        keys.append(key)
        shown.append(f"{type(owner).__name__} {key!r} of shape {list(p.shape)}")
    plan = ", ".join(f'"...{key}": SequenceParallel()' for key in sorted(set(keys)))
    return (
        f"{name} under RowwiseParallel follows parameters that act on this rank's features or heads only: "
        f"{'; '.join(sorted(set(shown)))}. Their gradients would differ between ranks. Add {{{plan}}} to the plan, "
        "which sums them over the ranks, or leave these layers out of it"
    )


def _is_sharded_linear(node: Any) -> bool:
    """Return True if an autograd node is that of tensor-parallel linear layers."""
    if node.name() != "LinearFunctionBackward":
        return False
    call = node.constants[0]
    calls = (call,) if isinstance(call, LinearCall) else call[1] or ()
    return any(call.comm is not None for call in calls)

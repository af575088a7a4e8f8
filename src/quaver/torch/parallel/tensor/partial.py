"""Parameters that are used on a rank's features or heads alone, between a `ColwiseParallel` and a `RowwiseParallel`:
they are refused.

Each rank's gradient of such a parameter, of a norm of the heads' features for instance, is of its own heads. Outputs
are right all the same, so nothing else would tell. `SequenceParallel()` sums such gradients over the ranks.
"""

import gc
import weakref
from typing import Any

from torch import Tensor, nn

#: Functions whose backward gives whole gradients: layers in parts, parameters of `SequenceParallel`, and DTensors.
_SUMS = (
    "TensorParallelLinearFunctionBackward",
    "TensorParallelNormLinearFunctionBackward",
    "_AllReduceGradBackward",
    "_ToTorchTensor",
    "_VocabEmbeddingFunctionBackward",
)
#: Layers whose input was looked at.
_seen: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def why_partial(layer: nn.Module, name: str, x: Tensor) -> str:
    """Why gradients of parameters that the input of a `RowwiseParallel` follows from would be of this rank's part
    alone, or "".

    The graph of the input is walked once a layer, to the layers in parts that it comes from.
    """
    if x.grad_fn is None or layer in _seen:
        return ""
    found: dict[int, Any] = {}
    nodes, known = [x.grad_fn], {x.grad_fn}
    while nodes:
        node: Any = nodes.pop()
        if node.name().startswith(_SUMS):
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

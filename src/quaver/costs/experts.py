"""Cost model of a grouped linear layer, such as the experts of a mixture of experts, on a GPU.

As `quaver.costs.ledger`, with the grouped GEMMs that a GPU has:

    row       E4M3 by E4M3 with scales of rows or groups: torch, on Hopper
    mx, nvfp4 torch, on datacenter Blackwell
    codes     FP8 with scales of rows or groups, or in blocks of 128: a Triton kernel, from Ada on
    bf16      of values, for everything else
"""

from quaver.costs import hardware, ledger
from quaver.costs.hardware import Gpu
from quaver.costs.ledger import LAUNCH, Cost, GemmCost, LinearCost, moving
from quaver.recipes.formats import E4M3
from quaver.recipes.spec import GemmSpec, Recipe

#: Fraction of the tensorwise rate that the Triton kernel is assumed to reach. Its instructions allow 0.75 on an H200;
#: tiles of 128 × 128 also read a byte from the L2 cache for every 128 operations. Not measured.
CODES = 0.6


def kind(spec: GemmSpec, gpu: Gpu) -> str:
    """Return the kind of grouped GEMM that a GPU runs: "row", "mx", "nvfp4", "codes" or "bf16"."""
    dense, major = ledger.kind(spec), gpu.capability[0]
    if spec.a is None or spec.b is None:
        return "bf16"
    if dense in ("tensor", "row") and spec.a.format == spec.b.format == E4M3 and major == 9:
        return "row"
    if dense in ("mx", "nvfp4") and major == 10 and dense in gpu.rates:
        return dense
    if dense in ("tensor", "row", "block") and gpu.capability >= (8, 9) and "tensor" in gpu.rates:
        return "codes"
    return "bf16"


def rate(kind: str, gpu: Gpu) -> float:
    """Return the rate of a kind of grouped GEMM in TFLOP/s."""
    return CODES * gpu.rates["tensor"].value if kind == "codes" else gpu.rates[kind].value


def _gemm(spec: GemmSpec, flops: float, moved: float, gpu: Gpu) -> GemmCost:
    chosen = kind(spec, gpu)
    seconds = max(flops / (rate(chosen, gpu) * 1e12), moved / (gpu.copy.value * 1e12)) + LAUNCH
    return GemmCost(chosen, chosen != "bf16" or spec.a is None, flops, seconds, Cost())


def layer(recipe: Recipe, groups: int, tokens: int, in_features: int, out_features: int, gpu: str | Gpu) -> LinearCost:
    """Predict the cost of a grouped linear layer's forward and backward under a recipe, without its bias.

    Args:
        recipe: recipe of the layer.
        groups: number of weights [out_features, in_features].
        tokens: rows of all groups, each multiplied by one of the weights.
        in_features: K.
        out_features: N.
        gpu: a name from `quaver.costs.hardware.GPUS`, or a Gpu.
    Raises:
        ValueError: an unknown GPU, or a size below 1.
    """
    for label, size in (("groups", groups), ("tokens", tokens), ("in_features", in_features)):
        if size < 1:
            raise ValueError(f"{label} is {size}; it must be at least 1")
    if out_features < 1:
        raise ValueError(f"out_features is {out_features}; it must be at least 1")
    card = hardware.get(gpu)
    flops = 2.0 * tokens * in_features * out_features
    elements = tokens * (in_features + out_features) + groups * in_features * out_features
    emulated = all(kind(gemm, card) == "bf16" for gemm in recipe.gemms.values()) and recipe.quantizes
    shapes = {
        "input": (tokens, in_features),
        "weight": (groups * out_features, in_features),
        "grad_output": (tokens, out_features),
    }
    tensors = {}
    for name, copies in ledger.copies(recipe, card).items():
        rows, columns = shapes[name]
        if emulated:
            tensors[name] = _values(name, copies, rows, columns, card)
        else:
            tensors[name] = ledger.quantization(copies, rows, columns, card)
    plain = GemmSpec(None, None)
    return LinearCost(
        tokens=tokens,
        in_features=in_features,
        out_features=out_features,
        gemms={name: _gemm(spec, flops, ledger.WIDE * elements, card) for name, spec in recipe.gemms.items()},
        tensors=tensors,
        bf16_seconds=3 * _gemm(plain, flops, ledger.WIDE * elements, card).seconds,
    )


def _values(name: str, copies: list[ledger.QuantizedCopy], rows: int, columns: int, gpu: Gpu) -> Cost:
    """Return the cost of bf16 values of a tensor in both directions, and of the input's codes for backward."""
    size, spec = rows * columns, copies[0].spec
    passes = 2 if spec.two_level else 1
    values = 1 if spec.block[0] != 1 else 2
    moved = float(ledger.WIDE * size * (passes + values))
    if name == "input" and len(copies) == 2:
        # The transposes are saved as codes, and decoded by backward.
        moved += 2 * ledger.saved_code_bytes(copies[1], rows, columns)
        passes += 1
    return moving(moved, passes, gpu)

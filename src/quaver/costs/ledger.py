"""What a linear layer costs under a recipe on a GPU: bytes, FLOPs and time, before anything has run.

Nothing here asks which recipe it is: kernels, copies and bytes follow from the table of operands.

    a GEMM           max(FLOPs / rate of its kind, operands and result / copy rate)
    a quantization   bytes read and written / copy rate
    a kernel         LAUNCH more

A GEMM that the GPU lacks runs in bf16. Where each tensor is quantized in one way of the kernels for that, they write
bf16 values in place of codes, and codes of what backward keeps, which a pass more decodes; elsewhere each operand is
decoded by a pass more. A product that does not fill the GPU is written in float32, and rounded by a pass more.

A tensor is read once to measure it where a scale needs values that no program has at hand (the whole tensor's amax, a
whole column's), and once to write the codes that could not be written then. A roofline: it knows no caches, no waves of
tiles and no host time, and is optimistic where a GEMM is too small to fill the GPU.

Source of the idea: torchao's `float8_roofline`; the bytes are those of this library's kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quaver.costs import hardware
from quaver.costs.hardware import Gpu
from quaver.recipes.formats import E4M3, E5M2
from quaver.recipes.spec import GemmSpec, QuantSpec, Recipe

#: Seconds that a kernel takes beyond its work (torchao testing/training/roofline_utils.py: one element on an H100).
LAUNCH = 2e-6
#: Bytes of an element that is not quantized, and of one of a product in float32.
WIDE, PRODUCT = 2, 4
#: Elements of an emulated GEMM's output that leaves no multiprocessor idle, so that the GEMM writes bf16 itself: as in
#: `quaver.torch.backends.gpu.scaled_mm`.
FILLS = 1 << 24
#: Widths of blocks whose values a kernel writes at once.
WIDTHS = 16, 32, 64, 128


class QuantizedCopy(NamedTuple):
    """A quantized copy of a tensor [rows, columns]: as it lies, or turned, so that a GEMM sums over its rows."""

    spec: QuantSpec
    transposed: bool = False


class Cost(NamedTuple):
    """What kernels that move memory cost, in bytes and seconds."""

    bytes: float = 0.0
    kernels: float = 0.0
    seconds: float = 0.0

    def __mul__(self, factor: object) -> "Cost":
        assert isinstance(factor, int | float)
        return Cost(self.bytes * factor, self.kernels * factor, self.seconds * factor)


class GemmCost(NamedTuple):
    """One GEMM."""

    #: A key of `Gpu.rates`, or "other".
    kind: str
    #: True if the GPU has this GEMM for these sizes; otherwise operands are decoded and it runs in bf16.
    native: bool
    flops: float
    seconds: float
    #: The cost of decoding operands of a GEMM that is not native, and of rounding its product.
    decoding: Cost


@dataclass(frozen=True)
class LinearCost:
    """A linear layer, forward and backward."""

    tokens: int
    in_features: int
    out_features: int
    #: By fprop, dgrad, wgrad.
    gemms: dict[str, GemmCost]
    #: The cost of quantization, by input, weight, grad_output.
    tensors: dict[str, Cost]
    #: What the three GEMMs cost in bf16.
    bf16_seconds: float

    @property
    def flops(self) -> float:
        return sum(gemm.flops for gemm in self.gemms.values())

    @property
    def bytes(self) -> float:
        """Bytes that quantization, and decoding where a GEMM is not native, move beyond those of a bf16 layer."""
        return sum(c.bytes for c in self.tensors.values()) + sum(g.decoding.bytes for g in self.gemms.values())

    @property
    def seconds(self) -> float:
        gemms = sum(gemm.seconds + gemm.decoding.seconds for gemm in self.gemms.values())
        return gemms + sum(cost.seconds for cost in self.tensors.values())

    @property
    def speedup(self) -> float:
        """How many times as fast as the same layer in bf16."""
        return self.bf16_seconds / self.seconds

    @property
    def emulated(self) -> list[str]:
        """GEMMs that the GPU does not have."""
        return [name for name, gemm in self.gemms.items() if not gemm.native]


def kind(spec: GemmSpec) -> str:
    """How a GEMM is scaled, by which its rate is known: bf16, tensor, row, block, mx, nvfp4; "other": no GPU has it."""
    if spec.a is None or spec.b is None:
        return "bf16"
    roles = {role(spec.a), role(spec.b)}
    both_square = spec.a.block == spec.b.block == (128, 128)
    if both_square or spec.a.format.name == spec.b.format.name == "e5m2":
        return "other"
    if roles == {"tensor", "row"}:
        return "row"
    return roles.pop() if len(roles) == 1 else "other"


def role(spec: QuantSpec) -> str:
    """What the scales of an operand are for."""
    rows, k = spec.block
    if spec.format not in (E4M3, E5M2):
        return "nvfp4" if spec.two_level and k == 16 and rows in (1, 16) else "other"
    if spec.scale == "e8m0":
        return "mx" if k == 32 and rows in (1, 32) else "other"
    if k is None:
        return {None: "tensor", 1: "row"}.get(rows, "other")
    return "block" if spec.block in ((1, 128), (128, 128)) else "other"


def on(spec: GemmSpec, gpu: Gpu) -> str:
    """The kind that a GPU runs: Blackwell runs a block of 128 as four of 32 where the scales are powers of two."""
    narrower = "mx" in gpu.rates and all(
        s is not None and role(s) == "block" and s.power_of_two for s in (spec.a, spec.b)
    )
    return "mx" if narrower else kind(spec)


def gemm(spec: GemmSpec, m: int, n: int, k: int, gpu: Gpu) -> GemmCost:
    """One NT GEMM [m, k] @ [n, k].T with a bf16 result; operands are quantized already."""
    wanted = on(spec, gpu)
    # cuBLASLt's eight-bit GEMMs take whole sixteens of columns; rows and k are padded.
    native = wanted == "bf16" or (wanted in gpu.rates and n % 16 == 0)
    flops = 2.0 * m * n * k
    bits = [16 if s is None or not native else s.format.stored_bits for s in (spec.a, spec.b)]
    moved = m * k * bits[0] / 8 + n * k * bits[1] / 8 + m * n * WIDE
    rate = gpu.rates[wanted if native else "bf16"].value
    seconds = max(flops / (rate * 1e12), moved / (gpu.copy.value * 1e12)) + LAUNCH
    decoding = Cost()
    if not native and spec.a is not None and spec.b is not None:
        a, b = spec.a.format.stored_bits / 8 + WIDE, spec.b.format.stored_bits / 8 + WIDE
        moved, kernels = rounding(m, n)
        decoding = moving(m * k * a + n * k * b + moved, 2 + kernels, gpu)
    return GemmCost(wanted, native, flops, seconds, decoding)


def rounding(m: int, n: int) -> tuple[float, int]:
    """Bytes and kernels that an emulated GEMM's output [m, n] takes beyond one write of it."""
    return (0.0, 0) if m * n >= FILLS else (2.0 * PRODUCT * m * n, 1)


def values_at_once(recipe: Recipe, gpu: Gpu, *sizes: int) -> bool:
    """True if a layer of these sizes is emulated by kernels that write bf16 values in place of codes: the GPU lacks all
    three GEMMs, and each tensor is quantized in blocks that share a power of two, or in two levels; to nearest, but for
    the gradient of the output in two levels."""
    if recipe.delayed is not None or any(size % 16 for size in sizes):
        return False
    if any(spec.a is None or on(spec, gpu) in gpu.rates for spec in recipe.gemms.values()):
        return False
    pairs = (recipe.fprop.a, recipe.wgrad.b), (recipe.fprop.b, recipe.dgrad.b), (recipe.dgrad.a, recipe.wgrad.a)
    if any(spec is not None and spec.rounding != "nearest" for pair in pairs[:2] for spec in pair):
        return False
    return all(_of_one_kernel(spec, other) for spec, other in pairs if spec is not None and other is not None)


def _of_one_kernel(spec: QuantSpec, other: QuantSpec) -> bool:
    height, width = spec.block
    plain = not spec.hadamard and (spec == other or spec.two_level)
    if spec.two_level:
        same = spec == other and spec.block == (16, 16) and spec.rounding == "nearest"
        return plain and spec.scale == other.scale == "two_level" and (same or spec.block == other.block == (1, 16))
    powers = spec.power_of_two and spec.scale != "unit" and width in WIDTHS and height in (1, width)
    return plain and powers and spec.rounding == "nearest"


def _of_values(recipe: Recipe, shapes: dict[str, tuple[int, int]], gpu: Gpu) -> dict[str, Cost]:
    """The cost of the bf16 values of each tensor [rows, columns], and of the codes of the input's that are kept."""
    costs = {}
    for name, wanted in copies(recipe, gpu).items():
        rows, columns = shapes[name]
        size, kept = rows * columns, name == "input" and len(wanted) == 2 and wanted[1].spec.block[0] == 1
        # One matrix of values serves both directions of square blocks.
        values = 1 if kept or wanted[0].spec.block[0] != 1 else 2
        passes = 2 if wanted[0].spec.two_level else 1
        moved = size * WIDE * (passes + values) + kept * kept_bytes(wanted[1], rows, columns)
        costs[name] = moving(moved, passes, gpu)
    return costs


def kept_bytes(copy: QuantizedCopy, rows: int, columns: int) -> float:
    """Bytes of the codes and scales that an emulated layer keeps of its input: eight bits, or NVFP4's four."""
    wide = 0.0 if copy.spec.two_level else 1 - copy.spec.format.stored_bits / 8
    scales = 0.0 if copy.spec.scale == "e8m0" or copy.spec.two_level else 3 * rows * columns / (copy.spec.block[1] or 1)
    return written(copy, rows, columns) + wide * rows * columns - scales


def _of_products(recipe: Recipe, sizes: dict[str, tuple[int, int, int]], gpu: Gpu) -> dict[str, GemmCost]:
    """The GEMMs of such values: wgrad decodes what was kept, and one launch rounds the products of both backward."""
    gemms = {}
    for name, spec in recipe.gemms.items():
        m, n, k = sizes[name]
        moved, kernels = rounding(m, n)
        if name == "wgrad":
            assert spec.b is not None
            if spec.b.block[0] == 1:
                moved, kernels = moved + kept_bytes(QuantizedCopy(spec.b, True), k, n) + k * n * WIDE, kernels + 1
            kernels -= bool(rounding(m, n)[1] and rounding(*sizes["dgrad"][:2])[1])
        gemms[name] = gemm(spec, m, n, k, gpu)._replace(decoding=moving(moved, kernels, gpu))
    return gemms


def moving(moved: float, kernels: float, gpu: Gpu) -> Cost:
    """Kernels that do nothing but read and write."""
    return Cost(moved, kernels, moved / (gpu.copy.value * 1e12) + kernels * LAUNCH)


def written(copy: QuantizedCopy, rows: int, columns: int) -> float:
    """Bytes of a quantized copy of [rows, columns] and its scales."""
    rows, k = (columns, rows) if copy.transposed else (rows, columns)
    spec, stored = copy.spec, copy.spec.padded(k)
    blocks = spec.blocks(rows, stored)
    scale = 4 if spec.scale in ("fp32", "power_of_two", "unit") else 1
    return rows * stored * spec.format.stored_bits / 8 + blocks[0] * blocks[1] * scale


def saved_bytes(recipe: Recipe, tokens: int, features: int, itemsize: int = 2) -> int:
    """Bytes of an input [tokens, features] that a layer keeps for backward.

    Args:
        recipe: of the layer.
        tokens: rows of the input.
        features: columns of the input.
        itemsize: bytes of one unquantized element.
    """
    spec, transposed = recipe.kept_input, recipe.wgrad.b is not None
    return (
        tokens * features * itemsize
        if spec is None
        else int(written(QuantizedCopy(spec, transposed), tokens, features))
    )


def measured_first(copy: QuantizedCopy, delayed: bool) -> bool:
    """True if a scale needs values that one program does not hold: of the whole tensor, or of a column."""
    spec = copy.spec
    if delayed or spec.scale == "unit":
        return False
    return spec.two_level or spec.block[1 if copy.transposed else 0] is None


def quantization(
    copies: Sequence[QuantizedCopy],
    rows: int,
    columns: int,
    gpu: Gpu,
    *,
    delayed: bool = False,
    produced: bool = False,
) -> Cost:
    """Quantize a bf16 tensor [rows, columns] into these copies.

    Args:
        copies: what GEMMs ask for.
        rows: of the tensor.
        columns: of the tensor.
        gpu: where.
        delayed: scales come from a history, and the amax is recorded on the way.
        produced: by the kernel that makes the tensor: it measures for nothing, and writes codes in place of bf16 where
            one pass is enough.
    """
    if not copies:
        return Cost()
    read = float(rows * columns * WIDE)
    later = [c for c in copies if measured_first(c, delayed)]
    codes = sum(written(c, rows, columns) for c in copies)
    if produced:
        return moving(codes + read, 1, gpu) if later else moving(max(codes - read, 0.0), 0, gpu)
    passes = 2 if later else 1
    return moving(codes + passes * read, passes, gpu)


def copies(recipe: Recipe, gpu: Gpu) -> dict[str, list[QuantizedCopy]]:
    """The quantized copies that the three GEMMs want of input [T, K], weight [N, K] and grad_output [T, N]."""
    wanted = {
        "input": (recipe.fprop.a, recipe.wgrad.b, recipe.plan.input),
        "weight": (recipe.fprop.b, recipe.dgrad.b, recipe.plan.weight),
        "grad_output": (recipe.dgrad.a, recipe.wgrad.a, recipe.plan.grad_output),
    }
    return {name: _copies(*row, gpu) for name, row in wanted.items()}


def _copies(plain: QuantSpec | None, transposed: QuantSpec | None, reusable: bool, gpu: Gpu) -> list[QuantizedCopy]:
    copies = [] if plain is None else [QuantizedCopy(plain)]
    # A GEMM that takes its operand in either layout needs no second copy of codes that are the same.
    if transposed is not None and not (reusable and transposed.per_tensor and gpu.any_layout):
        copies.append(QuantizedCopy(transposed, transposed=True))
    return copies


def layer(
    recipe: Recipe,
    tokens: int,
    in_features: int,
    out_features: int,
    gpu: str | Gpu,
    *,
    micro_batches: int = 1,
    produced: bool = False,
) -> LinearCost:
    """A linear layer's forward and backward under a recipe, without its bias.

    Args:
        recipe: of the layer.
        tokens: T, rows of its input in one micro-batch.
        in_features: K.
        out_features: N.
        gpu: a name from `quaver.costs.hardware.GPUS`, or a Gpu.
        micro_batches: that share one quantization of the weight.
        produced: input and gradient are quantized by the kernels that make them (a norm, an activation).
    Returns:
        The cost of one micro-batch.
    Raises:
        ValueError: an unknown GPU, or a size below 1.
    """
    for label, size in (("tokens", tokens), ("in_features", in_features), ("out_features", out_features)):
        if size < 1:
            raise ValueError(f"{label} is {size}; a layer has at least 1")
    if micro_batches < 1:
        raise ValueError(f"micro_batches is {micro_batches}; give 1 or more")
    card = hardware.get(gpu)
    sizes = {
        "fprop": (tokens, out_features, in_features),
        "dgrad": (tokens, in_features, out_features),
        "wgrad": (out_features, in_features, tokens),
    }
    shapes = {
        "input": (tokens, in_features, produced),
        "weight": (out_features, in_features, False),
        "grad_output": (tokens, out_features, produced),
    }
    delayed = recipe.delayed is not None
    tensors = {
        name: quantization(wanted, *shapes[name][:2], card, delayed=delayed, produced=shapes[name][2])
        for name, wanted in copies(recipe, card).items()
    }
    gemms = {name: gemm(spec, *sizes[name], card) for name, spec in recipe.gemms.items()}
    if values_at_once(recipe, card, tokens, in_features, out_features):
        tensors = _of_values(recipe, {name: shape[:2] for name, shape in shapes.items()}, card)
        gemms = _of_products(recipe, sizes, card)
    tensors["weight"] *= 1 / micro_batches
    plain = GemmSpec(None, None)
    return LinearCost(
        tokens=tokens,
        in_features=in_features,
        out_features=out_features,
        gemms=gemms,
        tensors=tensors,
        bf16_seconds=sum(gemm(plain, *size, card).seconds for size in sizes.values()),
    )

"""Cost model of a linear layer under a recipe on a GPU: bytes, FLOPs and time.

Nothing depends on the name of the recipe: kernels, copies and bytes follow from its operands.

    a GEMM           max(FLOPs / rate of its kind, bytes of operands and result / copy rate)
    a quantization   bytes read and written / copy rate
    each kernel      plus LAUNCH

A GEMM that the GPU lacks is emulated in bf16. If one kernel can quantize each tensor, it writes bf16 values instead of
codes, and codes for backward that a later pass decodes. Otherwise each operand is decoded by an additional pass. A GEMM
that does not fill the GPU writes float32, which an additional pass rounds.

A tensor is read once to measure its amax if a scale depends on values beyond one program (the whole tensor or a whole
column), and once to write the remaining codes. This is a roofline model: it ignores caches, waves of tiles and host
time, and is optimistic for GEMMs too small to fill the GPU.

Source of the idea: torchao's `float8_roofline`; the bytes are those of this library's kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quaver.costs import hardware
from quaver.costs.hardware import Gpu
from quaver.recipes.formats import E4M3, E5M2
from quaver.recipes.spec import GemmSpec, QuantSpec, Recipe

#: Seconds per kernel beyond its work (torchao testing/training/roofline_utils.py: one element on an H100).
LAUNCH = 2e-6
#: Bytes of an unquantized element, and of an element of a GEMM's float32 result.
WIDE, PRODUCT = 2, 4
#: Number of output elements from which an emulated GEMM fills the GPU and writes bf16 itself, as in
#: `quaver.torch.backends.gpu.scaled_mm`.
FILLS = 1 << 24
#: Block widths for which a kernel can write values directly.
WIDTHS = 16, 32, 64, 128


class QuantizedCopy(NamedTuple):
    """A quantized copy of a tensor [rows, columns], or of its transpose for a GEMM that sums over rows."""

    spec: QuantSpec
    transposed: bool = False


class Cost(NamedTuple):
    """Cost of memory-bound kernels, in bytes and seconds."""

    bytes: float = 0.0
    kernels: float = 0.0
    seconds: float = 0.0

    def __mul__(self, factor: object) -> "Cost":
        assert isinstance(factor, int | float)
        return Cost(self.bytes * factor, self.kernels * factor, self.seconds * factor)


class GemmCost(NamedTuple):
    """Cost of one GEMM."""

    #: Key of `Gpu.rates`, or "other".
    kind: str
    #: True if the GPU has this GEMM for these sizes; otherwise operands are decoded and it runs in bf16.
    native: bool
    flops: float
    seconds: float
    #: Cost of decoding the operands and rounding the result of an emulated GEMM.
    decoding: Cost


@dataclass(frozen=True)
class LinearCost:
    """Cost of a linear layer, forward and backward."""

    tokens: int
    in_features: int
    out_features: int
    #: GEMMs by name: fprop, dgrad, wgrad.
    gemms: dict[str, GemmCost]
    #: Cost of quantization by tensor: input, weight, grad_output.
    tensors: dict[str, Cost]
    #: Seconds of the three GEMMs in bf16.
    bf16_seconds: float

    @property
    def flops(self) -> float:
        return sum(gemm.flops for gemm in self.gemms.values())

    @property
    def bytes(self) -> float:
        """Bytes moved by quantization, and by decoding for emulated GEMMs, beyond those of a bf16 layer."""
        return sum(c.bytes for c in self.tensors.values()) + sum(g.decoding.bytes for g in self.gemms.values())

    @property
    def seconds(self) -> float:
        gemms = sum(gemm.seconds + gemm.decoding.seconds for gemm in self.gemms.values())
        return gemms + sum(cost.seconds for cost in self.tensors.values())

    @property
    def speedup(self) -> float:
        """Speed relative to the same layer in bf16."""
        return self.bf16_seconds / self.seconds

    @property
    def emulated(self) -> list[str]:
        """Names of the GEMMs that the GPU lacks."""
        return [name for name, gemm in self.gemms.items() if not gemm.native]


def kind(spec: GemmSpec) -> str:
    """Return the kind of scaling of a GEMM, a key of `Gpu.rates`: bf16, tensor, row, block, mx, nvfp4; "other" if no
    GPU has it.
    """
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
    """Return the kind of scaling of one operand."""
    rows, k = spec.block
    if spec.format not in (E4M3, E5M2):
        return "nvfp4" if spec.two_level and k == 16 and rows in (1, 16) else "other"
    if k is None and spec.scale != "e8m0":
        return {None: "tensor", 1: "row"}.get(rows, "other")
    if spec.format != E4M3:
        # cuBLASLt has E5M2 only with one scale per tensor or row.
        return "other"
    if spec.scale == "e8m0":
        return "mx" if k == 32 and rows in (1, 32) else "other"
    return "block" if spec.block in ((1, 128), (128, 128)) else "other"


def on(spec: GemmSpec, gpu: Gpu) -> str:
    """Return the kind of GEMM that a GPU runs: Blackwell runs blocks of 128 with power-of-two scales as four
    blocks of 32.
    """
    narrower = "mx" in gpu.rates and all(
        s is not None and role(s) == "block" and s.power_of_two for s in (spec.a, spec.b)
    )
    return "mx" if narrower else kind(spec)


def gemm(spec: GemmSpec, m: int, n: int, k: int, gpu: Gpu) -> GemmCost:
    """Return the cost of one NT GEMM [m, k] @ [n, k].T of quantized operands with a bf16 result."""
    wanted = on(spec, gpu)
    # cuBLASLt's 8-bit GEMMs need multiples of 16 columns; rows and k are padded.
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
    """Return the bytes and kernels for rounding an emulated GEMM's output [m, n], beyond writing it once."""
    return (0.0, 0) if m * n >= FILLS else (2.0 * PRODUCT * m * n, 1)


def values_at_once(recipe: Recipe, gpu: Gpu, *sizes: int) -> bool:
    """True if a layer of these sizes is emulated by kernels that write bf16 values instead of codes.

    The GPU must lack all three GEMMs. Each tensor must be quantized in blocks with power-of-two scales or in two
    levels, rounded to nearest, except for a two-level gradient of the output.
    """
    if recipe.delayed is not None or any(size % 16 for size in sizes):
        return False
    if any(spec.a is None or on(spec, gpu) in gpu.rates for spec in recipe.gemms.values()):
        return False
    pairs = (recipe.fprop.a, recipe.wgrad.b), (recipe.fprop.b, recipe.dgrad.b), (recipe.dgrad.a, recipe.wgrad.a)
    if any(spec is not None and spec.rounding != "nearest" for pair in pairs[:2] for spec in pair):
        return False
    return all(_in_one_kernel(spec, other) for spec, other in pairs if spec is not None and other is not None)


def _in_one_kernel(spec: QuantSpec, other: QuantSpec) -> bool:
    height, width = spec.block
    plain = not spec.hadamard and (spec == other or spec.two_level)
    if spec.two_level:
        same = spec == other and spec.block == (16, 16) and spec.rounding == "nearest"
        return plain and spec.scale == other.scale == "two_level" and (same or spec.block == other.block == (1, 16))
    powers = spec.power_of_two and spec.scale != "unit" and width in WIDTHS and height in (1, width)
    return plain and powers and spec.rounding == "nearest"


def _tensor_costs(recipe: Recipe, shapes: dict[str, tuple[int, int]], gpu: Gpu) -> dict[str, Cost]:
    """Return the cost of writing the bf16 values of each tensor [rows, columns], and the input's codes for backward."""
    costs = {}
    for name, wanted in copies(recipe, gpu).items():
        rows, columns = shapes[name]
        size, is_saved = rows * columns, name == "input" and len(wanted) == 2 and wanted[1].spec.block[0] == 1
        # With square blocks, the same values serve both directions.
        values = 1 if is_saved or wanted[0].spec.block[0] != 1 else 2
        passes = 2 if wanted[0].spec.two_level else 1
        moved = size * WIDE * (passes + values) + is_saved * saved_code_bytes(wanted[1], rows, columns)
        costs[name] = moving(moved, passes, gpu)
    return costs


def saved_code_bytes(copy: QuantizedCopy, rows: int, columns: int) -> float:
    """Return the bytes of codes and scales that an emulated layer saves of its input: 8 bits, or NVFP4's 4."""
    wide = 0.0 if copy.spec.two_level else 1 - copy.spec.format.stored_bits / 8
    scales = 0.0 if copy.spec.scale == "e8m0" or copy.spec.two_level else 3 * rows * columns / (copy.spec.block[1] or 1)
    return written(copy, rows, columns) + wide * rows * columns - scales


def _gemm_costs(recipe: Recipe, sizes: dict[str, tuple[int, int, int]], gpu: Gpu) -> dict[str, GemmCost]:
    """Return the GEMMs on such values: wgrad decodes the saved codes, and one launch rounds both results of
    backward.
    """
    gemms = {}
    for name, spec in recipe.gemms.items():
        m, n, k = sizes[name]
        moved, kernels = rounding(m, n)
        if name == "wgrad":
            assert spec.b is not None
            if spec.b.block[0] == 1:
                moved, kernels = moved + saved_code_bytes(QuantizedCopy(spec.b, True), k, n) + k * n * WIDE, kernels + 1
            kernels -= bool(rounding(m, n)[1] and rounding(*sizes["dgrad"][:2])[1])
        gemms[name] = gemm(spec, m, n, k, gpu)._replace(decoding=moving(moved, kernels, gpu))
    return gemms


def moving(moved: float, kernels: float, gpu: Gpu) -> Cost:
    """Return the cost of kernels that only read and write memory."""
    return Cost(moved, kernels, moved / (gpu.copy.value * 1e12) + kernels * LAUNCH)


def written(copy: QuantizedCopy, rows: int, columns: int) -> float:
    """Return the bytes of a quantized copy of [rows, columns] and its scales."""
    rows, k = (columns, rows) if copy.transposed else (rows, columns)
    spec, stored = copy.spec, copy.spec.padded(k)
    blocks = spec.blocks(rows, stored)
    scale = 4 if spec.scale in ("fp32", "power_of_two", "unit") else 1
    return rows * stored * spec.format.stored_bits / 8 + blocks[0] * blocks[1] * scale


def saved_bytes(recipe: Recipe, tokens: int, features: int, itemsize: int = 2) -> int:
    """Return the bytes that a layer saves of its input [tokens, features] for backward.

    Args:
        recipe: recipe of the layer.
        tokens: rows of the input.
        features: columns of the input.
        itemsize: bytes of an unquantized element.
    """
    spec, transposed = recipe.saved_input, recipe.wgrad.b is not None
    return (
        tokens * features * itemsize
        if spec is None
        else int(written(QuantizedCopy(spec, transposed), tokens, features))
    )


def measured_first(copy: QuantizedCopy, delayed: bool) -> bool:
    """True if a scale depends on values beyond one program: the whole tensor, or a whole column."""
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
    """Return the cost of quantizing a bf16 tensor [rows, columns] into several copies.

    Args:
        copies: the copies that GEMMs need.
        rows: rows of the tensor.
        columns: columns of the tensor.
        gpu: the GPU.
        delayed: scales come from a history, and the amax is recorded in the same pass.
        produced: the kernel that produces the tensor quantizes it. It measures the amax for free, and writes codes
            instead of bf16 if one pass is enough.
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
    """Return the quantized copies that the GEMMs need of input [T, K], weight [N, K] and grad_output [T, N]."""
    wanted = {
        "input": (recipe.fprop.a, recipe.wgrad.b, recipe.reuse.input),
        "weight": (recipe.fprop.b, recipe.dgrad.b, recipe.reuse.weight),
        "grad_output": (recipe.dgrad.a, recipe.wgrad.a, recipe.reuse.grad_output),
    }
    return {name: _copies(*row, gpu) for name, row in wanted.items()}


def _copies(plain: QuantSpec | None, transposed: QuantSpec | None, reusable: bool, gpu: Gpu) -> list[QuantizedCopy]:
    copies = [] if plain is None else [QuantizedCopy(plain)]
    # A GEMM that accepts either layout needs no second copy of the same codes.
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
    """Predict the cost of a linear layer's forward and backward under a recipe, without its bias.

    Args:
        recipe: recipe of the layer.
        tokens: T, rows of its input in one micro-batch.
        in_features: K.
        out_features: N.
        gpu: a name from `quaver.costs.hardware.GPUS`, or a Gpu.
        micro_batches: number of micro-batches that share one quantization of the weight.
        produced: the preceding kernels (a norm, an activation) quantize input and gradient.
    Returns:
        The cost of one micro-batch.
    Raises:
        ValueError: an unknown GPU, or a size below 1.
    """
    for label, size in (("tokens", tokens), ("in_features", in_features), ("out_features", out_features)):
        if size < 1:
            raise ValueError(f"{label} is {size}; it must be at least 1")
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
        tensors = _tensor_costs(recipe, {name: shape[:2] for name, shape in shapes.items()}, card)
        gemms = _gemm_costs(recipe, sizes, card)
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

"""Variants of kernels to compile, and how the C library chooses one of them for a call.

A kernel is compiled several times. Each variant assumes something about its arguments: that addresses and strides are
multiples of 16, and that no block is partial. The library checks these assumptions at run time and takes the first
variant whose assumptions hold. The last one of every key is the fallback: it assumes only what the C API requires.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from quaver.kernels.optim import codes
from quaver.torch.backends.gpu.launch import KernelLaunch

#: Values of quaver_dtype, by Triton's names.
DTYPES = {"bf16": 0, "fp16": 1, "fp32": 2, "fp8e4nv": 3, "fp8e5": 4}
E2M1 = 5
#: Values of the decode kernel's KIND.
KINDS = ("float32", "e8m0", "two_level")
#: Bits of a field of a key.
FIELD_BITS = 4

_CAST = ("x", "dtype", "POWER_OF_TWO")
_TWO_LEVELS = ("x", "POWER_OF_TWO", "SQUARE", "STOCHASTIC", "HADAMARD")
#: Kernels that the library launches, with the fields of their keys: constants, and arguments whose dtype varies.
FIELDS: dict[str, tuple[str, ...]] = {
    "amax": ("x", "TALL"),
    "cast": (*_CAST, "ROWS", "COLUMNS", "MEASURED"),
    "rowwise": (*_CAST, "AMAX_VALUES", "BN", "STEPS"),
    "long_rowwise": _CAST,
    "column_amax": ("x", "STEPS"),
    "columnwise": _CAST,
    "blockwise": (*_CAST, "ROWS", "COLUMNS"),
    "squares": (*_CAST, "ROWS", "COLUMNS"),
    "mxfp8_rows": ("x", "dtype", "SQUARE"),
    "mxfp8_columns": ("x", "dtype", "SQUARE", "ROWS"),
    "nvfp4_along": _TWO_LEVELS,
    "nvfp4_down": _TWO_LEVELS,
    "rotated_amax": ("x", "DOWN"),
    "decode": ("out", "CODES", "KIND", "BR", "BC", "POWER_OF_TWO"),
    "roll": ("LARGEST", "POWER0", "EMAX0", "EMAX1", "EMAX2", "BLOCK"),
    "activate": ("gate", "F", "GATED", "MODE", "q", "qt", "POWER_OF_TWO"),
    "activate_blocks": ("gate", "F", "GATED", "MODE", "POWER_OF_TWO"),
    "activate_backward": ("gate", "F", "GATED"),
    "norm": ("x", "gamma", "beta", "y", "CENTRED", "MODE", "BN", "CODES", "POWER_OF_TWO"),
    "norm_backward": ("x", "gamma", "CENTRED", "BETA", "BN"),
    "column_sums": ("x", "out", "second"),
    "rope": ("q", "k", "HALF", "INTERLEAVED", "BACK"),
    "cross_entropy": ("logits", "weights", "SMOOTHING", "Z_LOSS", "CAP", "GRADIENT"),
    "step": ("WEIGHT_TYPE", "GRADIENT_TYPE", "FIRST_KIND", "FACTORED", "EVEN"),
}
#: Arguments of the caller: a variant assumes that all of them are multiples of 16, or none.
ALIGNED_TOGETHER = {"x", "columns", "stride"}
ALIGNED_TOGETHER_IN = {
    "decode": {"out", "columns", "stride", "out_stride"},
    "activate": {"gate", "value", "y", "columns", "gate_stride", "value_stride"},
    "activate_blocks": {"gate", "value", "columns", "gate_stride", "value_stride"},
    "activate_backward": {
        "grad", "gate", "value", "of_gate", "of_value",
        "columns", "grad_stride", "gate_stride", "value_stride", "of_gate_stride", "of_value_stride",
    },
    "cross_entropy": {"logits", "columns", "buffer", "stride"},
    "column_sums": {"columns", "stride"},
    "rope": {
        "q", "k", "q_out", "k_out", "cos", "sin", "q_row", "k_row", "cos_outer", "cos_inner",
        "q_outer", "q_inner", "q_head", "k_outer", "k_inner", "k_head",
    },
    "roll": set(),
    "step": set(),
}  # fmt: skip
#: Kernels whose sums depend on what they assume: a variant keeps each of these assumptions that Python's launch has.
ALIGNED_SEPARATELY = {
    "norm": {"columns", "stride", "q_stride"},
    "norm_backward": {"columns", "grad_stride", "stride"},
}
#: Arguments that the C API guarantees to be multiples of 16 wherever Python's are: checked pointers, padded rows.
ALWAYS_ALIGNED = {"q", "qt", "s", "s4", "st", "scale", "transposed_scale", "work", "amax_values", "q_stride"}
#: Addresses that the C API requires to be multiples of 16 for these kernels.
ALWAYS_ALIGNED_IN = {
    "norm": {"x", "gamma", "beta", "y"},
    "norm_backward": {"grad", "x", "gamma", "dx", "partial"},
    "column_sums": {"x", "out", "second"},
    "step": {"chunks", "table", "scalars"},
}
#: Arguments that are multiples of 16 for most shapes whose blocks are whole.
ALIGNED_IF_INPUTS_ARE = {"qt_stride4", "q_stride4"}
#: Constants that may differ between variants of one key.
BLOCKS = {"BM", "BN", "STEPS", "EVEN", "EVEN_Q", "EVEN_K", "RAGGED", "VECTOR"}
#: Formulas of activations, in the order of their values in a key.
FORMULAS = (
    "linear", "gelu", "gelu_exact", "quick_gelu", "relu", "squared_relu", "silu", "sigmoid", "clamped_silu",
)  # fmt: skip
#: Values of the norms' and activations' MODE.
MODES = ("none", "tensor", "row", "blocks", "e8m0")
#: Value of an absent argument in a key.
ABSENT = 15
#: Optional arguments whose key field is only present or absent, since the dtype of codes depends on the GPU.
OPTIONAL = {"activate": ("q", "qt")}


@dataclass(frozen=True)
class Variant:
    """A kernel to compile, and the properties of its arguments that it requires."""

    launch: KernelLaunch
    key: int

    @property
    def kernel(self) -> str:
        return str(self.launch.fn.__name__)

    @property
    def arguments(self) -> list[str]:
        """Names of the arguments that are passed, in order."""
        return [name for name in self.launch.fn.arg_names if self.launch.signature[name] != "constexpr"]

    @property
    def assumes(self) -> int:
        """Bit i: argument i is a multiple of 16."""
        return sum(1 << self.arguments.index(name) for name in self.launch.divisible)

    @property
    def whole(self) -> bool:
        """True if the library must check that blocks cover the matrix exactly, which no key says."""
        constants = self.launch.constants
        if "EVEN" in FIELDS[self.kernel]:
            return False
        whole = constants.get("EVEN") or (constants.get("EVEN_Q") and constants.get("EVEN_K"))
        return bool(whole) or constants.get("RAGGED") is False

    @property
    def general(self) -> bool:
        """True if the C API guarantees all assumptions."""
        return not self.whole and set(self.launch.divisible) <= guaranteed(self.kernel)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that a program covers; 1 for an axis without blocks."""
        constants = self.launch.constants
        if self.kernel == "rope":  # heads of q and of k
            return constants["BH"], constants["BH"]
        columns = constants["BLOCK"] if self.kernel == "cross_entropy" else constants.get("BN", 1)
        return constants.get("BM", 1) * constants.get("STEPS", 1), columns


def guaranteed(kernel: str) -> set[str]:
    """Return the arguments of a kernel that are multiples of 16 wherever Python's are."""
    return ALWAYS_ALIGNED | ALWAYS_ALIGNED_IN.get(kernel, set())


def variants(launches: Iterable[KernelLaunch]) -> list[Variant]:
    """Return the variants of recorded launches, by kernel and key, those with most assumptions first.

    Raises:
        ValueError: a kernel is unknown, a key does not determine the kernel's constants, or has no general variant.
    """
    found: dict[Any, Variant] = {}
    for launch in launches:
        variant = _variant(launch)
        known = found.setdefault((variant.kernel, variant.key, variant.whole, variant.launch.divisible), variant)
        if known.launch.kernel != variant.launch.kernel:
            raise ValueError(f"{variant.kernel} has two variants of one key: {_difference(known, variant)}")
    order = sorted(found.values(), key=lambda v: (v.kernel, v.key, -v.whole - v.assumes.bit_count()))
    _check_keys(order)
    return order


def _variant(launch: KernelLaunch) -> Variant:
    name = launch.fn.__name__
    if name not in FIELDS:
        raise ValueError(f"{name} is no kernel of the C API; add the fields of its key to {__name__}.FIELDS")
    inputs = {one for one in ALIGNED_TOGETHER_IN.get(name, ALIGNED_TOGETHER) if launch.signature[one] != "constexpr"}
    aligned = guaranteed(name) | ALIGNED_SEPARATELY.get(name, set())
    if name not in ALIGNED_SEPARATELY and inputs <= set(launch.divisible):
        aligned |= inputs | ALIGNED_IF_INPUTS_ARE
    divisible = tuple(given for given in launch.divisible if given in aligned)
    return Variant(replace(launch, divisible=divisible), key_of(launch))


def key_of(launch: KernelLaunch) -> int:
    """Return the key of a launch, which C computes from its arguments."""
    fields = FIELDS[launch.fn.__name__]
    return sum(_value(launch, field) << FIELD_BITS * i for i, field in enumerate(fields))


#: Functions from a constant to its value in a key, for constants other than flags.
ENCODINGS: dict[str, Callable[[Any], int]] = {
    "dtype": lambda dtype: DTYPES[str(dtype)],
    "CODES": lambda dtype: E2M1 if dtype is None else DTYPES[str(dtype)],
    "KIND": KINDS.index,
    "WEIGHT_TYPE": lambda dtype: DTYPES[str(dtype)],
    "GRADIENT_TYPE": lambda dtype: DTYPES[str(dtype)],
    "FIRST_KIND": lambda kind: int(kind == codes.INT8.value),
    "BR": lambda side: side.bit_length(),
    "BC": lambda side: side.bit_length(),
    "BN": lambda side: side.bit_length() - 1,
    "STEPS": lambda steps: steps.bit_length() - 1,
    "BLOCK": lambda side: side.bit_length() - 1,
    "HALF": lambda side: side.bit_length() - 1,
    "F": lambda function: FORMULAS.index(function.__name__),
    "MODE": MODES.index,
    "EMAX0": lambda emax: int(emax > 8),
    "EMAX1": lambda emax: int(emax > 8),
    "EMAX2": lambda emax: int(emax > 8),
}


def _value(launch: KernelLaunch, field: str) -> int:
    kind = launch.signature[field]
    if field in OPTIONAL.get(launch.fn.__name__, ()):
        return int(kind != "constexpr")
    if kind != "constexpr":
        return DTYPES[kind.removeprefix("*")]
    value = launch.constants[field]
    if value is None and field not in ENCODINGS:
        return ABSENT
    code = ENCODINGS[field](value) if field in ENCODINGS else int(bool(value))
    assert 0 <= code < 1 << FIELD_BITS, f"{field} = {value} does not fit a field of a key"
    return code


def _check_keys(order: list[Variant]) -> None:
    by_key: dict[tuple[str, int], list[Variant]] = {}
    for variant in order:
        by_key.setdefault((variant.kernel, variant.key), []).append(variant)
    for (kernel, key), ones in by_key.items():
        if not any(one.general for one in ones):
            assumed = sorted(set(ones[-1].launch.divisible) - guaranteed(kernel)) or ["whole blocks"]
            raise ValueError(
                f"{kernel} has no general variant of key {key:#x}: its least special one assumes {', '.join(assumed)}"
            )
        for one in ones[1:]:
            if difference := _difference(ones[0], one):
                raise ValueError(f"no field of {kernel}'s key tells two launches apart: {difference}")


def _difference(one: Variant, other: Variant) -> str:
    """Return what differs between two launches of one key besides blocks and assumptions, or ""."""
    parts = []
    for name, kind in one.launch.signature.items():
        other_kind = other.launch.signature[name]
        value, other_value = one.launch.constants.get(name), other.launch.constants.get(name)
        if kind != other_kind or (name not in BLOCKS and value != other_value):
            one_text, other_text = (v if k == "constexpr" else k for v, k in ((value, kind), (other_value, other_kind)))
            parts.append(f"{name} is {one_text} and {other_text}")
    return ", ".join(parts)

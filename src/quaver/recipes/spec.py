"""Specs of quantized operands, GEMMs and recipes: frozen, hashable data that depends on no framework.

A linear layer is three GEMMs of two operands each, all in NT layout, `y[m, n] = a[m, k] @ b[n, k].T`:

    fprop   output      [T, N] = input         [T, K] @ weight   [N, K].T
    dgrad   grad_input  [T, K] = grad_output   [T, N] @ weight.T [K, N].T
    wgrad   grad_weight [N, K] = grad_output.T [N, T] @ input.T  [K, T].T

A `Recipe` says how each of the six is quantized. It has no subclasses, and no code depends on its name.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Literal, NamedTuple, ParamSpec, get_args

from quaver.recipes.formats import E4M3, E5M2, FORMATS, Format
from quaver.recipes.text import html_lines, html_table, suggest

# ---- specs ----

#: fp32: encode factor format.max / amax, correctly rounded. power_of_two: the largest power of two that does not
#: saturate. e8m0: the same power, stored as an exponent byte. two_level: an E4M3 scale per block and a power of two per
#: tensor (two_level_fp32: a correctly rounded tensor factor). unit: always 1, nothing is measured.
ScaleKind = Literal["fp32", "power_of_two", "e8m0", "two_level", "two_level_fp32", "unit"]
Rounding = Literal["nearest", "stochastic"]
#: Elements that share a scale, (rows, k); None is the whole axis. A partial block at the end has its own scale.
Block = tuple[int | None, int | None]


@dataclass(frozen=True)
class QuantSpec:
    """Quantization of one GEMM operand [rows, k]; k is the contraction axis."""

    format: Format
    block: Block = (None, None)
    scale: ScaleKind = "power_of_two"
    rounding: Rounding = "nearest"
    #: True to rotate groups of 16 along k first (k is padded with zeros to a multiple of 16).
    hadamard: bool = False
    two_level: bool = field(init=False, repr=False, compare=False)
    #: True if one scale serves the whole operand.
    per_tensor: bool = field(init=False, repr=False, compare=False)
    #: True if every decode scale is a power of two, so that rescaling is exact.
    power_of_two: bool = field(init=False, repr=False, compare=False)
    #: True if quantizing the transpose gives the transpose of the quantized operand.
    transposable: bool = field(init=False, repr=False, compare=False)
    #: The spec as one line of text, which `parse` reads.
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format) or not self.format.signed:
            raise ValueError(f"QuantSpec.format is {self.format!r}; give a signed Format such as quaver.E4M3")
        known = FORMATS.get(self.format.name)
        if known is not None and known != self.format:
            raise ValueError(
                f"QuantSpec.format is {self.format!r}, but quaver has another format of that name, {known!r}; give "
                "your format another name"
            )
        _member("QuantSpec.scale", self.scale, ScaleKind)
        _member("QuantSpec.rounding", self.rounding, Rounding)
        pair = isinstance(self.block, tuple) and len(self.block) == 2
        if not pair or any(not (b is None or (_whole(b) and b > 0)) for b in self.block):
            raise ValueError(
                f"QuantSpec.block is {self.block!r}; give (rows, k), each a positive int, or None for the axis"
            )
        if not isinstance(self.hadamard, bool):
            raise ValueError(f"QuantSpec.hadamard is {self.hadamard!r}; give True or False")
        two_level = self.scale in ("two_level", "two_level_fp32")
        if two_level and (not self.format.packed or None in self.block):
            raise ValueError(
                f"two-level scales are for e2m1 in finite blocks, not for {self.format} in {self.block}; "
                "use scale='power_of_two'"
            )
        # Plain attributes, because torch.compile cannot trace the lock of a cached property if a spec is built within a
        # graph.
        derived = {
            "two_level": two_level,
            "per_tensor": self.block == (None, None),
            "power_of_two": self.scale in ("power_of_two", "e8m0", "unit"),
            "transposable": self.block[0] == self.block[1] and not self.hadamard,
            "text": _text(self),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        # Launch caches use specs as keys, and a str caches its hash.
        return hash(self.text)

    def blocks(self, rows: int, k: int) -> tuple[int, int]:
        """Return the shape of the scales of an operand [rows, k], with k after the padding of the Hadamard rotation."""
        br, bk = self.block
        return (1 if br is None else -(-rows // br), 1 if bk is None else -(-k // bk))

    def padded(self, k: int) -> int:
        """Return the number of stored columns for k columns."""
        return -(-k // 16) * 16 if self.hadamard else k

    def check_factor(self, factor: object) -> None:
        """Raise ValueError if an encode factor is passed, but the operand has no single float32 scale to set by it."""
        if factor is not None and not (self.per_tensor and self.scale in ("fp32", "power_of_two")):
            raise ValueError(
                f"quantize: factor is for specs with one fp32 or power-of-two scale per tensor, and this is {self}; "
                "leave factor out, or give amax"
            )

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"QuantSpec({self.text})"

    @staticmethod
    @cache
    def parse(text: str) -> "QuantSpec":
        """Parse the text of a spec; compiled graphs pass specs as text."""
        head, scale, *options = text.split(":")
        name, _, block = head.rstrip("]").partition("[")
        rows, k = (None if b == "*" else int(b) for b in block.split("x"))
        rounding: Rounding = "stochastic" if "stochastic" in options else "nearest"
        return QuantSpec(Format.parse(name), (rows, k), scale, rounding, "hadamard" in options)  # type: ignore[arg-type]


def _text(spec: QuantSpec) -> str:
    rows, k = ("*" if b is None else str(b) for b in spec.block)
    tail = ":stochastic" * (spec.rounding == "stochastic") + ":hadamard" * spec.hadamard
    return f"{spec.format.text}[{rows}x{k}]:{spec.scale}{tail}"


@dataclass(frozen=True)
class GemmSpec:
    """The two operands of one NT GEMM; None leaves an operand in high precision."""

    a: QuantSpec | None
    b: QuantSpec | None
    #: True to let the hardware accumulate faster and less precisely where it can (Hopper and Ada keep 13 bits). Ignored
    #: by emulation.
    fast_accum: bool = False

    def __post_init__(self) -> None:
        for name, spec in (("a", self.a), ("b", self.b)):
            if spec is not None and not isinstance(spec, QuantSpec):
                raise ValueError(f"GemmSpec.{name} is {spec!r}; give a QuantSpec, or None for high precision")
        if (self.a is None) != (self.b is None):
            raise ValueError(
                "a GEMM quantizes both operands or neither: no GEMM takes one of each. "
                f"Here a is {self.a} and b is {self.b}; make both None or give both a QuantSpec"
            )
        if self.a is not None and self.b is not None and self.a.hadamard != self.b.hadamard:
            raise ValueError(
                "a GEMM rotates both operands or neither: the rotations cancel in the product. "
                f"Here a is {self.a} and b is {self.b}; give both hadamard=True, or neither"
            )
        if not isinstance(self.fast_accum, bool):
            raise ValueError(f"GemmSpec.fast_accum is {self.fast_accum!r}; give True or False")


def reusable(have: QuantSpec | None, want: QuantSpec | None) -> bool:
    """Return True if the transpose of an operand quantized by `have` equals the operand quantized by `want`."""
    return have is not None and have == want and have.transposable


class OperandReuse(NamedTuple):
    """Flags for quantized operands of one GEMM whose transpose serves another GEMM."""

    #: True if fprop's input serves wgrad: backward saves its codes.
    input: bool
    #: True if fprop's weight serves dgrad.
    weight: bool
    #: True if dgrad's grad_output serves wgrad.
    grad_output: bool


#: Longest history in steps (12 MB per layer), and largest margin.
LONGEST_HISTORY, WIDEST_MARGIN = 1_000_000, 512


@dataclass(frozen=True, kw_only=True)
class Delayed:
    """Delayed scaling: each tensor's encode factor comes from the amaxes of earlier steps."""

    #: Number of steps in the history.
    length: int = 1024
    #: Number of times to halve the encode factor, as headroom for growing amaxes.
    margin: int = 0
    #: "max" of the history, or its "most_recent" value.
    algorithm: Literal["max", "most_recent"] = "max"

    def __post_init__(self) -> None:
        if not _whole(self.length) or self.length < 1:
            raise ValueError(
                f"a delayed-scaling history of {self.length!r} steps cannot hold an amax; give history=1 or more, "
                "or use the recipe 'tensorwise', which keeps none"
            )
        if self.length > LONGEST_HISTORY:
            raise ValueError(
                f"a delayed-scaling history of {self.length} steps takes {12 * self.length / 1e6:,.0f} MB in every "
                f"layer; give at most history={LONGEST_HISTORY}"
            )
        if not _whole(self.margin) or abs(self.margin) > WIDEST_MARGIN:
            raise ValueError(
                f"margin is {self.margin!r}; give a whole number from -{WIDEST_MARGIN} to {WIDEST_MARGIN}: the factor "
                "is halved that often"
            )
        if self.algorithm not in ("max", "most_recent"):
            raise ValueError(f"algorithm is {self.algorithm!r}; give 'max' or 'most_recent'")


@dataclass(frozen=True)
class AttentionSpec:
    """Quantization of attention's operands, each (batch, head) being a matrix [rows, k] of its own.

    Probabilities need no spec: they are in [0, 1] and are stored as E4M3 times the fixed factor `PROBABILITY_FACTOR`.
    """

    #: Spec of q, k and v, and of their transposes in backward.
    input: QuantSpec
    #: Spec of the gradients of output and scores, and of their transposes.
    grad_output: QuantSpec

    def __post_init__(self) -> None:
        for name, spec in (("input", self.input), ("grad_output", self.grad_output)):
            if not isinstance(spec, QuantSpec):
                raise ValueError(f"AttentionSpec.{name} is {spec!r}; give a QuantSpec of an eight-bit format")
            if spec.format not in (E4M3, E5M2) or spec.rounding != "nearest" or spec.hadamard:
                raise ValueError(
                    f"AttentionSpec.{name} is {spec}; attention takes the eight-bit formats e4m3 and e5m2 rounded to "
                    "nearest, not rotated"
                )
            if not spec.per_tensor and spec.block[0] != 1:
                raise ValueError(
                    f"AttentionSpec.{name} is {spec}; its block is a whole matrix, (None, None), or lies within a "
                    "row, (1, k)"
                )


#: Factor of probabilities before they are rounded to E4M3.
PROBABILITY_FACTOR = 256.0


@dataclass(frozen=True)
class Recipe:
    """Quantization of the three GEMMs of a linear layer, and of attention if `attention` is given."""

    name: str
    fprop: GemmSpec
    dgrad: GemmSpec
    wgrad: GemmSpec
    #: Delayed scaling from a history, or None to measure every tensor (current scaling).
    delayed: Delayed | None = None
    #: Quantization of attention, or None for high precision.
    attention: AttentionSpec | None = None
    #: Operands of dgrad and wgrad where those are unquantized: False uses the weight and the input themselves; True
    #: uses fprop's operands dequantized, so that backward differentiates exactly what forward computed.
    dequantized_backward: bool = False

    #: True if any operand is quantized.
    quantizes: bool = field(init=False, repr=False, compare=False)
    #: Operands that backward reuses.
    reuse: OperandReuse = field(init=False, repr=False, compare=False)
    #: True if any operand is rounded stochastically; its layer then counts quantizations.
    stochastic: bool = field(init=False, repr=False, compare=False)
    #: The recipe as one unique line of text. Its hash is cached, unlike that of nested dataclasses, which would take
    #: longer than a small GEMM.
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ValueError(f"Recipe.name is {self.name!r}; give a string")
        for name, gemm in self.gemms.items():
            if not isinstance(gemm, GemmSpec):
                raise ValueError(f"recipe {self.name!r} has {name}={gemm!r}; give a GemmSpec")
        if self.attention is not None and not isinstance(self.attention, AttentionSpec):
            raise ValueError(
                f"recipe {self.name!r} has attention={self.attention!r}; give an AttentionSpec, or None to leave "
                "attention in high precision"
            )
        if self.delayed is not None and not isinstance(self.delayed, Delayed):
            raise ValueError(f"recipe {self.name!r} has delayed={self.delayed!r}; give a Delayed, or None")
        specs = [spec for spec in self.operands().values() if spec is not None]
        derived = {
            "quantizes": len(specs) > 0,
            "reuse": OperandReuse(
                input=reusable(self.fprop.a, self.wgrad.b),
                weight=reusable(self.fprop.b, self.dgrad.b),
                grad_output=reusable(self.dgrad.a, self.wgrad.a),
            ),
            "stochastic": any(spec.rounding == "stochastic" for spec in specs),
            "text": f"{self.name!r} {_fields_text(self)}",
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        _check_weight(self)
        _check_dequantized(self)
        if self.delayed is not None:
            _check_history(self)

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        # Rebuilt when unpickled, because another process hashes strings differently.
        fields = self.delayed, self.attention, self.dequantized_backward
        return Recipe, (self.name, self.fprop, self.dgrad, self.wgrad, *fields)

    @property
    def gemms(self) -> dict[str, GemmSpec]:
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    @property
    def history_specs(self) -> tuple[QuantSpec, QuantSpec, QuantSpec]:
        """Specs of the three columns of a delayed recipe's history: input, weight, grad_output."""
        assert self.fprop.a is not None and self.fprop.b is not None and self.dgrad.a is not None
        return self.fprop.a, self.fprop.b, self.dgrad.a

    @property
    def saved_input(self) -> QuantSpec | None:
        """Spec of the input saved for backward: wgrad's, or fprop's if dequantized; None for high precision."""
        return self.fprop.a if self.dequantized_backward and self.wgrad.b is None else self.wgrad.b

    def operands(self) -> dict[str, QuantSpec | None]:
        """Return the six operands' specs by "gemm.operand"."""
        return {f"{name}.{side}": getattr(gemm, side) for name, gemm in self.gemms.items() for side in "ab"}

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        """Return one line that distinguishes any two recipes: `Recipe(mxfp8: fprop, dgrad, wgrad e4m3[1x32]:e8m0)`."""
        by_text: dict[str, list[str]] = {}
        for name, gemm in self.gemms.items():
            by_text.setdefault(_gemm_text(gemm), []).append(name)
        parts = [f"{', '.join(names)} {text}" for text, names in by_text.items()]
        return f"Recipe({self.name}: {'; '.join([*parts, *self._options()])})"

    def _repr_html_(self) -> str:
        rows = [(name, gemm.a or HIGH, gemm.b or HIGH, "yes" * gemm.fast_accum) for name, gemm in self.gemms.items()]
        table = html_table(("GEMM", "a", "b", "fast accumulation"), rows, caption=f"recipe {self.name}")
        return table + html_lines(self._options())

    def _options(self) -> list[str]:
        """Return texts of the options beyond the GEMMs."""
        history, products = self.delayed, self.attention
        texts = []
        if history is not None:
            texts.append(f"history {history.length}, {history.algorithm}, margin {history.margin}")
        if products is not None:
            texts.append(f"attention {products.input}, grad_output {products.grad_output}")
        if self.dequantized_backward:
            texts.append("backward of what fprop consumed, dequantized")
        return texts


def _fields_text(recipe: Recipe) -> str:
    """Return all fields in which two recipes of one name may differ; written so that a compiler can trace it."""
    texts = []
    for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad):
        # Both operands are quantized, or neither.
        texts.append("" if gemm.a is None or gemm.b is None else f"{gemm.a.text} {gemm.b.text}")
        texts.append(" fast;" if gemm.fast_accum else ";")
    history, products = recipe.delayed, recipe.attention
    if history is not None:
        texts.append(f" {history.length} {history.margin} {history.algorithm}")
    if products is not None:
        texts.append(f" {products.input.text} {products.grad_output.text}")
    if recipe.dequantized_backward:
        texts.append(" dequantized")
    return "".join(texts)


#: Text for an unquantized operand.
HIGH = "high precision"


def _gemm_text(gemm: GemmSpec) -> str:
    """Return both operands in one line, named once if they are equal."""
    operands = dict.fromkeys(str(spec or HIGH) for spec in (gemm.a, gemm.b))
    return " @ ".join(operands) + " fast" * gemm.fast_accum


def _check_weight(recipe: Recipe) -> None:
    for label in ("fprop.b", "dgrad.b"):
        spec = recipe.operands()[label]
        if spec is not None and spec.rounding != "nearest":
            raise ValueError(
                f"recipe {recipe.name!r} rounds the weight stochastically ({label} is {spec}); a weight is quantized "
                "once for many forwards, so it must be rounded to nearest: use stochastic rounding for input and "
                "grad_output only"
            )


def _check_dequantized(recipe: Recipe) -> None:
    wanted, fprop = recipe.dequantized_backward, recipe.fprop
    if not isinstance(wanted, bool):
        raise ValueError(f"recipe {recipe.name!r} has dequantized_backward={wanted!r}; give True or False")
    if not wanted:
        return
    if fprop.a is None or (recipe.dgrad.a is not None and recipe.wgrad.a is not None):
        raise ValueError(
            f"recipe {recipe.name!r} has dequantized_backward=True, which needs a quantized fprop and an unquantized "
            "dgrad or wgrad: make one of them GemmSpec(None, None), or leave dequantized_backward out"
        )
    if fprop.a.hadamard:
        raise ValueError(
            f"recipe {recipe.name!r} has dequantized_backward=True and a rotated fprop: the dequantized operand would "
            "still be rotated, which gives wrong gradients; leave hadamard out of fprop"
        )


#: Operands that share a column of the history.
_COLUMNS = (("fprop.a", "wgrad.b"), ("fprop.b", "dgrad.b"), ("dgrad.a", "wgrad.a"))


def _check_history(recipe: Recipe) -> None:
    operands = recipe.operands()
    for label, spec in operands.items():
        if spec is None and label.startswith("wgrad.") and recipe.wgrad.a is recipe.wgrad.b is None:
            continue  # an unquantized wgrad reads no scale
        if spec is None or not spec.per_tensor or spec.scale not in ("fp32", "power_of_two") or spec.hadamard:
            raise ValueError(
                f"recipe {recipe.name!r} uses delayed scaling, which needs one fp32 or power-of-two scale per tensor "
                f"and no rotation, but {label} is {spec}; leave out `delayed` or make every operand per tensor"
            )
    for one, other in _COLUMNS:
        a, b = operands[one], operands[other]
        if a is not None and b is not None and (a.format, a.scale) != (b.format, b.scale):
            raise ValueError(
                f"recipe {recipe.name!r} uses delayed scaling, with one factor for both {one} and {other}, but they "
                f"are {a} and {b}; give both the same format and scale"
            )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _member(where: str, value: object, kind: object) -> None:
    if value not in get_args(kind):
        raise ValueError(f"{where} is {value!r}; give one of {', '.join(get_args(kind))}")


# ---- recipe functions ----

P = ParamSpec("P")

#: Recipes by text. torch.compile guards on identity, so an equal but distinct recipe would recompile. For a dict keyed
#: by text it guards only the entry that is looked up; keyed by recipes it would guard all, and each new recipe would
#: recompile code that builds one.
_interned: dict[str, Recipe] = {}
#: Classes of options that are distinguished by their repr.
PLAIN = frozenset((bool, int, float, str))


def intern(recipe: Recipe) -> Recipe:
    """Return the first recipe seen that equals this one."""
    first = _interned.get(recipe.text)
    if first is None:
        first = _interned[recipe.text] = recipe
    return first


def interned(text: str) -> Recipe | None:
    """Return the recipe that `intern` has returned for this text, which compiled graphs pass; None for other texts."""
    return _interned.get(text)


def recipe(function: Callable[P, Recipe]) -> Callable[P, Recipe]:
    """Decorate a recipe function: an unknown option raises with the nearest one, and equal results are one object."""
    known = list(inspect.signature(function).parameters)
    built: dict[str, Recipe] = {}

    @wraps(function)
    def build(*args: P.args, **options: P.kwargs) -> Recipe:
        for option in options:
            if option not in known:
                hint = suggest(option, known) if known else "it takes no options"
                raise ValueError(f"recipe {function.__name__!r} has no option {option!r}; {hint}")
        if args:
            raise ValueError(f"give the options of recipe {function.__name__!r} by name: {', '.join(known)}")
        if not all(type(value) in PLAIN for value in options.values()):
            return intern(function(*args, **options))
        # torch.compile traces only the lookup of a known recipe, but would trace the construction of a new one.
        option_text = ", ".join([f"{option}={value!r}" for option, value in options.items()])
        if option_text not in built:
            built[option_text] = intern(function(*args, **options))
        return built[option_text]

    return build


def check_flags(**values: object) -> None:
    """Raise ValueError for values other than True and False, such as the string "false" from a command line."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; give True or False")


def float32_scale(power_of_two: bool) -> ScaleKind:
    """Return the kind of a float32 scale for a recipe's option `power_of_two`."""
    check_flags(power_of_two=power_of_two)
    return "power_of_two" if power_of_two else "fp32"


def attention_spec(wanted: bool, input: QuantSpec | None, grad_output: QuantSpec | None) -> AttentionSpec | None:
    """Return a spec that quantizes attention like a recipe's input and grad_output, or None if not `wanted`."""
    check_flags(attention=wanted)
    if not wanted:
        return None
    assert input is not None and grad_output is not None
    return AttentionSpec(input, grad_output)

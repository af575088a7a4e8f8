"""Frequencies of rotary embeddings, with Hugging Face's names for the scaling methods.

`KINDS` is the table by `rope_type`; add a row for a new method. All computations are float32 in the order of
`transformers.modeling_rope_utils`: at position 100,000 an ulp of a frequency is a hundredth of a radian.

Source: Su et al. 2021, arXiv:2104.09864; linear: Chen et al. 2023, arXiv:2306.15595; dynamic NTK: bloc97 and emozilla
2023; YaRN: Peng et al. 2023, arXiv:2309.00071; LongRoPE: Ding et al. 2024, arXiv:2402.13753; llama3: Llama 3.1's code.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quaver.recipes.text import check_name, suggest


@dataclass(frozen=True, kw_only=True)
class Frequencies:
    """Parameters of a rotary embedding's frequencies."""

    #: Number of rotated features, two per frequency.
    dim: int
    #: Base of the frequencies.
    theta: float
    #: Name in `KINDS`.
    rope_type: str
    #: The keys of Hugging Face's `rope_parameters` that this kind reads, sorted.
    options: tuple[tuple[str, Any], ...] = ()
    #: Hugging Face's max_position_embeddings.
    max_positions: int | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """Return an option, or the default if it is missing or None, as in Hugging Face's configurations."""
        value = dict(self.options).get(key)
        return default if value is None else value

    def rows(self, device: Any = None) -> Tensor:
        """Return float32 [n, dim / 2] frequencies. Row 0 is for every length unless the kind depends on it. Exact:
        made on the CPU.
        """
        device = torch.get_default_device() if device is None else torch.device(device)
        if device.type == "meta":
            return torch.empty(KINDS[self.rope_type].count, self.dim // 2, dtype=torch.float32, device=device)
        return KINDS[self.rope_type].rows(self).to(device)

    def at(self, rows: Tensor, length: int | Tensor) -> Tensor:
        """Return float32 [dim / 2] frequencies for a sequence length; a tensor [] stays on its device without
        synchronization.
        """
        by_length = KINDS[self.rope_type].by_length
        return rows[0] if by_length is None else by_length(self, rows, length)

    @property
    def by_length(self) -> bool:
        """True if the frequencies depend on the longest sequence."""
        return KINDS[self.rope_type].by_length is not None

    @functools.cached_property
    def attention_factor(self) -> float:
        """Factor of cosines and sines."""
        return KINDS[self.rope_type].attention_factor(self)

    @property
    def text(self) -> str:
        """All fields as one string, which `parse` reads."""
        return json.dumps([self.dim, self.theta, self.rope_type, self.options, self.max_positions])


@functools.lru_cache(maxsize=64)
def parse(text: str) -> Frequencies:
    """Return the `Frequencies` of a string made by `Frequencies.text`."""
    dim, theta, rope_type, options, max_positions = json.loads(text)
    pairs = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in options)
    return Frequencies(dim=dim, theta=theta, rope_type=rope_type, options=pairs, max_positions=max_positions)


@dataclass(frozen=True, kw_only=True)
class RopeScalingKind:
    """One method of computing frequencies."""

    #: Function that returns float32 [count, dim / 2] on the CPU.
    rows: Callable[[Frequencies], Tensor]
    count: int = 1
    #: Required keys, and optional keys.
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    #: True if the factor may be omitted when both lengths are known: it is their ratio.
    factor_from_lengths: bool = False
    #: True if all features rotate and partial_rotary_factor is a parameter of the formula.
    whole: bool = False
    attention_factor: Callable[[Frequencies], float] = lambda _: 1.0
    #: Function that selects or computes the frequencies for a length, or None if they do not depend on it.
    by_length: Callable[[Frequencies, Tensor, int | Tensor], Tensor] | None = None


def frequencies(
    head_dim: int, theta: float, fraction: float, scaling: dict[str, Any] | None, max_positions: int | None
) -> Frequencies:
    """Validate Hugging Face's `rope_parameters` and return them as `Frequencies`.

    Args:
        head_dim: features of a head.
        theta, fraction: defaults if `scaling` has no rope_theta or partial_rotary_factor.
        scaling: the dict; its rope_type (or, in older files, type) is a name in `KINDS`.
        max_positions: max_position_embeddings; replaces a missing original_max_position_embeddings.
    Raises:
        ValueError: an unknown type, a missing, unknown or invalid key, or an odd number of rotated features.
    """
    if not isinstance(scaling, Mapping | None):
        raise ValueError(f"scaling is {scaling!r}; give Hugging Face's dict, {{'rope_type': 'linear', 'factor': 2.0}}")
    passed = {k: v for k, v in (scaling or {}).items() if v is not None}
    rope_type = passed.pop("rope_type", passed.get("type", "default"))
    passed.pop("type", None)
    check_name("rope_type", rope_type, KINDS)
    kind = KINDS[rope_type]
    theta = passed.pop("rope_theta", theta)
    fraction = passed.pop("partial_rotary_factor", fraction)
    if ORIGINAL in kind.required and max_positions is not None:
        passed.setdefault(ORIGINAL, max_positions)
    if rope_type == "dynamic" and max_positions is None:
        max_positions = passed.get(ORIGINAL)
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction is {fraction}; give the share of the features that rotates, above 0 and up to 1")
    if not theta > 0:
        raise ValueError(f"theta is {theta}; the base of the frequencies is above 0, 10000 for example")
    _check_keys(rope_type, kind, passed, max_positions)
    if kind.whole:
        passed["partial_rotary_factor"] = fraction
    dim = head_dim if kind.whole else int(head_dim * fraction)
    if dim % 2 or dim == 0:
        raise ValueError(
            f"rope rotates pairs of features, and {fraction} of {head_dim} is {dim}; make it an even number"
        )
    if rope_type == "dynamic" and dim < 4:
        raise ValueError(
            f"rope_type 'dynamic' keeps one frequency and stretches the others, but {dim} features have only one"
        )
    for key in ("short_factor", "long_factor"):
        if key in passed and len(passed[key]) != dim // 2:
            raise ValueError(f"{key} has {len(passed[key])} numbers; {dim} rotated features need {dim // 2}")
    options = tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in passed.items()))
    return Frequencies(dim=dim, theta=float(theta), rope_type=rope_type, options=options, max_positions=max_positions)


def _check_keys(rope_type: str, kind: RopeScalingKind, passed: dict[str, Any], max_positions: int | None) -> None:
    known = (*kind.required, *kind.optional)
    for key in passed:
        if key not in known and key != ORIGINAL:
            hint = suggest(key, known) if known else "it takes none"
            raise ValueError(f"rope_type {rope_type!r} has no key {key!r}; {hint}")
    for key in kind.required:
        derived = key == "factor" and kind.factor_from_lengths and max_positions is not None
        if key not in passed and not derived:
            raise ValueError(f"rope_type {rope_type!r} needs the key {key!r}; give it in scaling")
    if rope_type == "dynamic" and max_positions is None:
        raise ValueError("rope_type 'dynamic' stretches beyond max_positions; give it")
    if not isinstance(passed.get("factor", 1), int | float) or not passed.get("factor", 1) > 0:
        raise ValueError(f"factor is {passed['factor']!r}; give the factor by which sequences become longer, above 0")
    if passed.get("high_freq_factor", math.inf) <= passed.get("low_freq_factor", 0):
        raise ValueError(
            f"high_freq_factor is {passed['high_freq_factor']} and low_freq_factor {passed['low_freq_factor']}; "
            "the high one must be larger"
        )


# ---- methods; each follows the order of operations of the code whose checkpoints it reads ----


def _exponents(dim: int, device: Any = "cpu") -> Tensor:
    """Return 2 i / dim."""
    return torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim


def _plain(f: Frequencies) -> Tensor:
    return (1.0 / f.theta ** _exponents(f.dim))[None]


def _linear(f: Frequencies) -> Tensor:
    return _plain(f) / f.get("factor")


def _proportional(f: Frequencies) -> Tensor:
    """Return the first frequencies of a full set; the others are 0, so that their features do not rotate."""
    rotary_dim = int(f.get("partial_rotary_factor") * f.dim // 2)
    frequencies = _plain(f)
    frequencies[:, rotary_dim:] = 0
    return frequencies / f.get("factor", 1.0)


def _ntk_base(f: Frequencies, length: Any) -> Any:
    """Return theta increased so that only the lowest frequency is stretched by the full factor for `length`."""
    factor, original = f.get("factor"), f.max_positions
    return f.theta * ((factor * length / original) - (factor - 1)) ** (f.dim / (f.dim - 2))


def _dynamic(f: Frequencies) -> Tensor:
    return (1.0 / _ntk_base(f, f.max_positions) ** _exponents(f.dim))[None]


def _dynamic_at(f: Frequencies, rows: Tensor, length: int | Tensor) -> Tensor:
    assert f.max_positions is not None
    if isinstance(length, int):
        if length <= f.max_positions:
            return rows[0]
        length = torch.full((), length, dtype=torch.int64, device=rows.device)
    # An integer times a float would have torch's default dtype.
    grown = 1.0 / _ntk_base(f, length.float()) ** _exponents(f.dim, rows.device)
    return torch.where(length > f.max_positions, grown, rows[0])


def _llama3(f: Frequencies) -> Tensor:
    """Stretch long wavelengths, keep short ones, and interpolate between them."""
    plain, factor = _plain(f), f.get("factor")
    low, high, original = f.get("low_freq_factor"), f.get("high_freq_factor"), f.get(ORIGINAL)
    wave = 2 * math.pi / plain
    smooth = (original / wave - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    stretched = torch.where(wave > original / low, plain / factor, plain)
    return torch.where((wave >= original / high) & (wave <= original / low), between, stretched)


def _factor(f: Frequencies) -> float:
    factor: float = f.get("factor") or f.max_positions / f.get(ORIGINAL)
    return factor


def _yarn(f: Frequencies) -> Tensor:
    """Keep the frequency of features that rotate often, stretch slow ones, with a linear ramp in between."""
    original = f.get(ORIGINAL)

    def feature(rotations: float) -> float:
        """Return the feature index that makes this many rotations over the original length."""
        return f.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(f.theta))

    low, high = feature(f.get("beta_fast") or 32), feature(f.get("beta_slow") or 1)
    if f.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, f.dim - 1)
    width = high - low or 0.001
    unscaled = 1 - ((torch.arange(f.dim // 2, dtype=torch.int64, device="cpu").float() - low) / width).clamp(0, 1)
    powers = f.theta ** _exponents(f.dim)
    return (1.0 / (_factor(f) * powers) * (1 - unscaled) + 1.0 / powers * unscaled)[None]


def _yarn_attention(f: Frequencies) -> float:
    passed = f.get("attention_factor")
    if passed is not None:
        return float(passed)

    def growth(weight: float) -> float:
        return 1.0 if _factor(f) <= 1 else 0.1 * weight * math.log(_factor(f)) + 1.0

    both = f.get("mscale"), f.get("mscale_all_dim")
    return growth(both[0]) / growth(both[1]) if all(both) else growth(1)


def _longrope(f: Frequencies) -> Tensor:
    """Return row 0 for sequences up to the original length, and row 1 for longer ones."""
    stretch = torch.tensor([f.get("short_factor"), f.get("long_factor")], dtype=torch.float32, device="cpu")
    return 1.0 / (stretch * f.theta ** _exponents(f.dim))


def _longrope_at(f: Frequencies, rows: Tensor, length: int | Tensor) -> Tensor:
    original = f.get(ORIGINAL)
    if isinstance(length, int):
        return rows[int(length > original)]
    return torch.where(length > original, rows[1], rows[0])


def _longrope_attention(f: Frequencies) -> float:
    passed = f.get("attention_factor")
    if passed is not None:
        return float(passed)
    return 1.0 if _factor(f) <= 1 else math.sqrt(1 + math.log(_factor(f)) / math.log(f.get(ORIGINAL)))


ORIGINAL = "original_max_position_embeddings"

KINDS = {
    "default": RopeScalingKind(rows=_plain),
    "linear": RopeScalingKind(rows=_linear, required=("factor",)),
    "dynamic": RopeScalingKind(rows=_dynamic, required=("factor",), by_length=_dynamic_at),
    "yarn": RopeScalingKind(
        rows=_yarn,
        required=("factor", ORIGINAL),
        optional=("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        factor_from_lengths=True,
        attention_factor=_yarn_attention,
    ),
    "llama3": RopeScalingKind(rows=_llama3, required=("factor", ORIGINAL, "low_freq_factor", "high_freq_factor")),
    "longrope": RopeScalingKind(
        rows=_longrope,
        count=2,
        required=("factor", ORIGINAL, "short_factor", "long_factor"),
        optional=("attention_factor",),
        factor_from_lengths=True,
        attention_factor=_longrope_attention,
        by_length=_longrope_at,
    ),
    "proportional": RopeScalingKind(rows=_proportional, optional=("factor", "partial_rotary_factor"), whole=True),
}

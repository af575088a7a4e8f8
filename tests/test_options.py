"""Constructors with a dataclass's arguments: their signatures, and their errors for unknown arguments."""

import inspect
from dataclasses import KW_ONLY, dataclass
from typing import get_type_hints

import pytest

from quaver.options import checks, pick, shared, spreads, suggests, takes


@dataclass(frozen=True, kw_only=True)
class Norm:
    eps: float = 1e-5


@dataclass(frozen=True)
class Options(Norm):
    dim: int
    _: KW_ONLY
    bias: bool = True


class Layer:
    @takes(Options)
    def __init__(self, options: Options) -> None:
        self.options = options


class Wider(Layer):
    def __init__(self, dim: int, **options: float) -> None:
        super().__init__(2 * dim, **options)  # type: ignore[arg-type]


@suggests
@dataclass
class Own:
    dim: int
    bias: bool = True


@suggests
@dataclass
class OfFlax(Own):
    parent: object = None
    name: str | None = None
    _: KW_ONLY
    eps: float = 1e-5


class Written:
    @checks
    def __init__(self, dim: int, bias: bool = True, *, eps: float = 1e-5) -> None:
        self.options = dim, bias, eps


def test_a_constructor_is_called_with_the_records_arguments() -> None:
    assert Layer(8, bias=False, eps=1.0).options == Options(8, bias=False, eps=1.0)
    assert Wider(8, eps=1.0).options == Options(16, eps=1.0)
    assert Own(8, False).bias is False
    assert OfFlax(8, False, name="mlp", eps=1.0).name == "mlp"
    assert Written(8, eps=1.0).options == (8, True, 1.0)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Layer, ["dim", "eps", "bias"]),
        (Own, ["dim", "bias"]),
        (OfFlax, ["dim", "bias", "parent", "name", "eps"]),
        (Written, ["dim", "bias", "eps"]),
    ],
)
def test_help_shows_the_records_arguments(kind: type, names: list[str]) -> None:
    assert list(inspect.signature(kind).parameters) == names
    assert list(inspect.signature(kind.__init__).parameters) == ["self", *names]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "hints"),
    [
        (Layer, {"dim": int, "eps": float, "bias": bool}),
        (Own, {"dim": int, "bias": bool}),
        (Written, {"dim": int, "bias": bool, "eps": float}),
    ],
)
def test_type_hints_match_the_records_arguments(kind: type, hints: dict[str, type]) -> None:
    assert get_type_hints(kind.__init__) == hints | {"return": type(None)}  # type: ignore[misc]


@pytest.mark.parametrize("kind", [Layer, Wider, Own, OfFlax, Written])
def test_a_misspelt_option_suggests_the_nearest(kind: type) -> None:
    with pytest.raises(TypeError, match=f"^{kind.__name__} has no option 'biass'; did you mean 'bias'\\?$"):
        kind(8, biass=False)


@pytest.mark.parametrize("kind", [Layer, Own, OfFlax, Written])
def test_argument_errors_name_the_layer(kind: type) -> None:
    with pytest.raises(TypeError, match=f"^{kind.__name__}: missing a required argument: 'dim'$"):
        kind()
    first = "dim" if kind is Layer else "dim, bias"
    sentence = f"^{kind.__name__}: too many positional arguments; give all but {first} by name$"
    with pytest.raises(TypeError, match=sentence):
        kind(8, True, 1.0)


def test_a_parts_options_are_picked_from_the_wholes() -> None:
    assert pick(Norm, Options(8, eps=2.0)) == {"eps": 2.0}


class Spread:
    @spreads(Written, without=["bias"])
    def __init__(self, heads: int, *, scale: float = 1.0, **others: float) -> None:
        self.options = heads, scale, others

    @checks
    def __call__(self, x: int, *, times: int = 2) -> int:
        return x * times


def test_a_constructor_accepts_the_keywords_of_another() -> None:
    assert Spread(8, eps=1.0).options == (8, 1.0, {"eps": 1.0})
    # `dim` is taken by place there, and the call's own result comes back.
    assert list(inspect.signature(Spread).parameters) == ["heads", "scale", "eps"] and Spread(8)(3, times=3) == 9
    assert get_type_hints(Spread.__init__)["eps"] is float and get_type_hints(Spread.__call__)["return"] is int
    for wrong, sentence in (
        (lambda: Spread(8, epps=1.0), "Spread has no option 'epps'; did you mean 'eps'"),
        (lambda: Spread(8, bias=1.0), "Spread has no option 'bias'"),
        (lambda: Spread(8)(3, tmes=3), "Spread has no option 'tmes'; did you mean 'times'"),  # type: ignore[call-arg]
    ):
        with pytest.raises(TypeError, match=sentence):
            wrong()  # type: ignore[no-untyped-call]
    assert shared(Spread, {"eps": 1.0, "dim": 8}) == {"eps": 1.0}

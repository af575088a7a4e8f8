"""Test cases from the tables of recipes and formats, and values that break careless code."""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TypeVar

import numpy as np

from quaver.recipes import RECIPES
from quaver.recipes.spec import GemmSpec, QuantSpec, Recipe


def variants() -> dict[str, Recipe]:
    """Every recipe with its defaults, with each of its boolean options inverted, and with E5M2 gradients."""
    recipes = {}
    for name, function in RECIPES.items():
        recipes[name] = function()
        for option in inspect.signature(function).parameters.values():
            if isinstance(option.default, bool):
                recipes[f"{name}({option.name}={not option.default})"] = function(**{option.name: not option.default})
            elif option.name == "format" and option.default == "e4m3":
                recipes[f"{name}(format='hybrid')"] = function(format="hybrid")
    return recipes


def _distinct() -> tuple[dict[str, QuantSpec], dict[str, GemmSpec]]:
    specs: dict[QuantSpec, str] = {}
    gemms: dict[GemmSpec, str] = {}
    for name, recipe in variants().items():
        for gemm_name, gemm in recipe.gemms.items():
            if gemm.a is not None and gemm.b is not None:
                gemms.setdefault(GemmSpec(gemm.a, gemm.b), f"{name}.{gemm_name}")
        for operand, spec in recipe.operands().items():
            if spec is not None:
                specs.setdefault(spec, f"{name}.{operand}")
    return {label: spec for spec, label in specs.items()}, {label: gemm for gemm, label in gemms.items()}


#: Every distinct operand and GEMM of any recipe, named after the first that has it.
SPECS, GEMMS = _distinct()


def nasty(shape: tuple[int, int], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 operands of this shape: ordinary ones, and ones that are hard for a scale or a rounding."""
    return {name: x.copy() for name, x in _nasty(shape, seed).items()}


@lru_cache(maxsize=32)
def _nasty(shape: tuple[int, int], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=shape).astype(np.float32)
    hard = {
        "normal": normal,
        "wide": (normal * 10.0 ** rng.uniform(-38, 37, size=shape)).astype(np.float32),
        "sparse": np.where(rng.random(shape) < 0.8, np.float32(0), normal),
        "negative zeros": np.full(shape, -0.0, np.float32),
        "subnormal": (normal * 1e-39).astype(np.float32),
        "ties": (rng.integers(-64, 65, size=shape) / 4).astype(np.float32),
    }
    odd = {"NaN": np.nan, "infinity": np.inf, "-infinity": -np.inf, "huge": 3e38, "a subnormal": 1e-40}
    for name, value in odd.items() if normal.size else ():
        hard[name] = normal.copy()
        hard[name].flat[rng.integers(normal.size)] = value
    return hard


T = TypeVar("T")


def every_nth(operands: Mapping[str, T], at: int, of: int) -> dict[str, T]:
    """Every `of`-th operand, depending on `at`. Where `at` is the sum of the indices of two parameters of a test, all
    operands occur with each value of either parameter."""
    return {name: x for number, (name, x) in enumerate(operands.items()) if (number + at) % of == 0}


def powers(rng: np.random.Generator, low: float, high: float, shape: tuple[int, ...]) -> np.ndarray:
    return (10.0 ** rng.uniform(low, high, shape)).astype(np.float32)


def outlier(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flat[rng.integers(x.size)] = 1e4
    return x


def half_zeros(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x[:, : x.shape[1] // 2] = 0
    x[0] = 0
    return x


#: How normal a is changed; b stays normal, or compensates so that the result fits into float32.
MAGNITUDES: dict[str, tuple[Callable[[np.random.Generator, np.ndarray], np.ndarray], float]] = {
    "normal": (lambda rng, x: x, 1.0),
    "rows spread": (lambda rng, x: x * powers(rng, -3, 3, (len(x), 1)), 1.0),
    "tiny": (lambda rng, x: x * np.float32(1e-30), 1.0),
    "big": (lambda rng, x: x * np.float32(1e30), 1.0),
    "tiny twice": (lambda rng, x: x * np.float32(1e-30), 1e-5),
    "big and tiny": (lambda rng, x: x * np.float32(1e30), 1e-30),
    "wide": (lambda rng, x: x * powers(rng, -18, 18, x.shape), 1.0),
    "zeros": (half_zeros, 1.0),
    "all zeros": (lambda rng, x: x * np.float32(0), 1.0),
    "one outlier": (outlier, 1.0),
}


@lru_cache(maxsize=32)
def factors(magnitude: str, m: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """a [m, k] and b [n, k] of a product, float32, drawn once for all GEMMs; copy them before writing."""
    rng = np.random.default_rng(m * k * n)
    change, scale = MAGNITUDES[magnitude]
    a = change(rng, rng.normal(size=(m, k)).astype(np.float32))
    return a, rng.normal(size=(n, k)).astype(np.float32) * np.float32(scale)

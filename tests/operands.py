"""What the tables of recipes and formats give tests to run over, and values that break careless code."""

import inspect

import numpy as np

from quaver.core.spec import GemmSpec, QuantSpec, Recipe
from quaver.recipes import RECIPES


def variants() -> dict[str, Recipe]:
    """Every recipe as it comes, and with each of its switches turned over."""
    found = {}
    for name, function in RECIPES.items():
        found[name] = function()
        for option in inspect.signature(function).parameters.values():
            if isinstance(option.default, bool):
                found[f"{name}({option.name}={not option.default})"] = function(**{option.name: not option.default})
    return found


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
    """float32 operands of this shape: ordinary, and with what a scale or a rounding can trip over."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=shape).astype(np.float32)
    found = {
        "normal": normal,
        "wide": (normal * 10.0 ** rng.uniform(-38, 37, size=shape)).astype(np.float32),
        "sparse": np.where(rng.random(shape) < 0.8, np.float32(0), normal),
        "negative zeros": np.full(shape, -0.0, np.float32),
        "subnormal": (normal * 1e-39).astype(np.float32),
        "ties": (rng.integers(-64, 65, size=shape) / 4).astype(np.float32),
    }
    odd = {"NaN": np.nan, "infinity": np.inf, "-infinity": -np.inf, "huge": 3e38, "a subnormal": 1e-40}
    for name, value in odd.items() if normal.size else ():
        found[name] = normal.copy()
        found[name].flat[rng.integers(normal.size)] = value
    return found

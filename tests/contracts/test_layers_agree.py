"""A layer in torch and one in JAX have the same codes and scales for every operand of their three GEMMs."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import quaver.jax as qj
import quaver.torch as qt
from quaver.jax.linears import gemms
from quaver.jax.numerics.quantized import along
from quaver.recipes import RECIPES
from quaver.recipes.spec import Recipe
from quaver.torch.state import observer
from quaver.torch.state.layer_state import state_of
from tests.close import assert_bitwise, assert_close
from tests.operands import variants
from tests.xla_options import QUICKEST

T, K, N = 48, 80, 33
#: Operands by the shape of their matrix; a rotated one is padded.
SHAPES = {
    (T, K): "input",
    (N, K): "weight",
    (T, N): "grad_output",
    (K, N): "weight.T",
    (N, T): "grad_output.T",
    (K, T): "input.T",
}
#: Variants whose codes differ, with scales of exact bits.
OTHERS = ("mxfp8(weight_2d=True)", *(f"nvfp4({o}=False)" for o in ("stochastic_rounding", "hadamard", "weight_2d")))
#: Recipes that are also run in bfloat16, one of every kind of state.
NARROW = ("delayed", "mxfp8", "nvfp4")
#: Slow: recipes with the codes of another case, or of a recipe without one of two options.
REPEATED = ("tensorwise", "nvfp4(stochastic_rounding=False)", "nvfp4(hadamard=False)")
CASES = [
    pytest.param(recipe, dtype, id=f"{name}, {dtype}", marks=[pytest.mark.slow] if name in REPEATED else [])
    for name, recipe in variants().items()
    for dtype in ("float32", "bfloat16")
    if recipe.quantizes and name in (NARROW if dtype == "bfloat16" else (*RECIPES, *OTHERS))
]
Operands = dict[str, Any]


class Recorder(observer.Observer):
    """Records quantized tensors."""

    def __init__(self) -> None:
        self.operands: Operands = {}

    def observe_operand(
        self, layer: Any, recipe: Recipe, operand: str, x: torch.Tensor, q: Any, parameter: str = "weight"
    ) -> None:
        self.operands[operand] = q


def run_torch(recipe: Recipe, x: Any, w: Any, bias: Any, g: Any, dtype: torch.dtype) -> tuple[Operands, list[Any]]:
    """The operands of one step, and its output and gradients."""
    layer = qt.Linear(K, N)
    layer.__dict__["qualified_name"] = "layer"
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(w.T.copy()))
        layer.bias.copy_(torch.from_numpy(bias))
    tx, recorder = torch.from_numpy(x).to(dtype).requires_grad_(), Recorder()
    with observer.observing(recorder):
        with qt.autocast(recipe), torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            y = layer(tx)
        y.backward(torch.from_numpy(g).to(dtype))
    cached = state_of(layer).weights.entries
    operands = recorder.operands | {"weight": cached["fprop"].quantized}
    if "dgrad" in cached:
        operands["weight.T"] = cached["dgrad"].quantized
    assert tx.grad is not None and layer.weight.grad is not None
    return operands, [y, tx.grad, layer.weight.grad.t()]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operands]:
    """The operands that JAX's layer quantizes during tracing."""
    operands: Operands = {}
    original = gemms.quantize_shard

    def note(x: Any, spec: Any, *args: Any, **options: Any) -> qj.Quantized:
        q = original(x, spec, *args, **options)
        operands[SHAPES[along(options.get("axis", 1), x.shape)]] = q
        return q

    monkeypatch.setattr(gemms, "quantize_shard", note)
    yield operands


@pytest.mark.parametrize("recipe, dtype", CASES)
def test_every_operand_has_the_codes_and_scales_of_torchs(recipe: Recipe, dtype: str, recorded: Operands) -> None:
    rng = np.random.default_rng(0)
    x, w, bias, g = (rng.normal(size=s).astype(np.float32) for s in ((T, K), (K, N), (N,), (T, N)))
    expected, results = run_torch(recipe, x, w, bias, g, getattr(torch, dtype))
    wide = jnp.dtype(dtype)

    # test_frameworks_agree.py checks the bits of optimized programs; here only operands and specs are checked.
    @partial(jax.jit, compiler_options=QUICKEST)
    def step(x: Any, w: Any, state: Any, g: Any) -> Any:
        def layer(x: Any, w: Any, state: Any) -> Any:
            return qj.linear(x, w, jnp.asarray(bias), recipe=recipe, state=state, dtype=wide, name="layer")

        y, back = jax.vjp(layer, x, w, state)
        grad_x, grad_w, _ = back(g)
        return {name: (q.codes(), q.scales()) for name, q in recorded.items()}, (y, grad_x, grad_w)

    args = x.astype(wide), w, qj.state.init(recipe), g.astype(wide)
    got, ours = step(*args)
    assert set(got) == set(expected)
    assert ("weight.T" in got) != recipe.reuse.weight
    for name, (codes, scales) in got.items():
        assert_bitwise(scales, expected[name].scales(), f"{name}, scales")
        assert_bitwise(codes, expected[name].codes(), f"{name}, codes")
    one_rounding = 1e-6 if dtype == "float32" else 2.0**-8
    for what, a, b in zip(("output", "grad_x", "grad_w"), ours, results, strict=True):
        assert_close(what, np.asarray(a, np.float32), b, 1e-6 if what == "grad_w" else one_rounding)

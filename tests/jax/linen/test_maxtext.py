"""MaxText's interface for quantization, as its layers call it; its package is not on PyPI.

Source: AI-Hypercomputer/maxtext, layers/quantizations.py (`Quantization`) and layers/linears.py.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import quaver.jax as qj
import quaver.jax.linen as ql


class Quantization(ABC):
    """MaxText's base class."""

    @abstractmethod
    def dot_general_cls(self, mesh_axes: tuple[str, ...] = ()) -> Any: ...

    @abstractmethod
    def einsum(self, dtype: Any = jnp.float32) -> Any: ...


@dataclass(frozen=True)
class QuaverQuantization(Quantization):
    """The four lines of docs/guides/jax.md."""

    recipe: str
    quant_mode: str = "train"

    def dot_general_cls(self, mesh_axes: tuple[str, ...] = ()) -> Any:
        return ql.dot_general_cls(self.recipe)

    def einsum(self, dtype: Any = jnp.float32) -> Any:
        return ql.einsum_cls(self.recipe)()


class Layer(nn.Module):
    """A projection and an einsum, as MaxText's linear layer and its experts call their quantization."""

    quant: Quantization | None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (32, 2, 16))
        experts = self.param("experts", nn.initializers.lecun_normal(), (2, 16, 8))
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        dot = jax.lax.dot_general if self.quant is None else self.quant.dot_general_cls(("embed", "heads"))()
        x = dot(x, kernel, numbers, precision=None)
        einsum = jnp.einsum if self.quant is None else self.quant.einsum(jnp.float32)
        return einsum("bhd,hdf->bhf", x, experts)


def test_maxtexts_layers_train_under_a_recipe() -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 32)), jnp.float32)
    key = jax.random.key(0, impl="unsafe_rbg")
    for recipe in ("mxfp8", "delayed"):
        layer = Layer(QuaverQuantization(recipe))
        variables = layer.init(key, x)
        step = jax.jit(jax.value_and_grad(lambda v, layer=layer: jnp.square(layer.apply(v, x)).mean()))
        value, gradient = step(variables)
        plain = jnp.square(Layer(None).apply({"params": variables["params"]}, x)).mean()
        assert 0 < abs(float(value - plain)) < 0.05 * float(plain)
        assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(gradient["params"]))
        if recipe == "delayed":
            assert all((h[-1] > 0).all() for h in histories_of(gradient[ql.COLLECTION]))


def histories_of(states: Any) -> list[Any]:
    return [state["history"] for state in jax.tree.leaves(states, is_leaf=qj.state.is_state)]

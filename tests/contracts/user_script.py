"""A user's script, fully annotated: `mypy --strict` accepts it and it runs (test_user_types.py)."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from torch import Tensor, nn

import quaver
import quaver.jax as qj
import quaver.jax.linen as ql
import quaver.jax.nnx as qn
import quaver.torch as qt
from quaver import QuantSpec, Recipe

TABLE: dict[str, Recipe] = {"eight": quaver.recipes.mxfp8(), "four": quaver.recipes.nvfp4()}


class Net(nn.Module):
    """Two custom layers around one that `convert` replaces."""

    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__()
        self.first = qt.Linear(32, 64, recipe=recipe)
        self.middle = nn.Linear(64, 64)
        self.norm = qt.RMSNorm(64)
        self.last = qt.MLP(64, 128, activation="swiglu")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(qt.activate("gelu", self.middle(self.first(x)))))
        return y


def batches(steps: int) -> Iterator[Tensor]:
    for _ in range(steps):
        yield torch.randn(16, 32)


def train(model: Net, recipe: str | Recipe) -> float:
    optimizer = torch.optim.AdamW(model.parameters())
    loss = torch.zeros(())
    for x in batches(2):
        optimizer.zero_grad()
        with qt.autocast(recipe):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def narrow(name: str, in_features: int, out_features: int, recipe: Recipe) -> str:
    """A custom filter: why a layer is skipped, or ""."""
    return f"{name} is too narrow for {recipe}" if min(in_features, out_features) < 32 else ""


def train_torch() -> str:
    model = Net()
    rules = quaver.Rules([quaver.ModuleRule(pattern="*", recipe="rowwise", multiple_of=16)])
    report: qt.Report = qt.convert(model, rules, skip=["last.down_proj", narrow])
    spec: QuantSpec | None = TABLE["eight"].fprop.a
    assert spec is not None  # it is where a recipe leaves an operand in high precision
    operand: qt.Quantized = qt.quantize(torch.randn(4, 64), spec)
    product: Tensor = qt.matmul(operand, qt.quantize(torch.randn(8, 64), spec))
    with qt.count(model) as counters:
        train(model, TABLE["four"])
    names: list[str] = qt.revert(model)
    return f"{report}\n{counters}\n{names} {tuple(product.shape)}"


def train_jax() -> str:
    x = jnp.ones((16, 32))
    y: jax.Array = qj.linear(x, jnp.ones((32, 64)), recipe="mxfp8")
    model = ql.DenseGeneral(features=8)
    with qj.autocast(quaver.recipes.delayed(history=4)):
        variables = model.init(jax.random.key(0), x)
        layer = qn.DenseGeneral(32, 8, rngs=nnx.Rngs(0))
    report: qn.ConversionReport = qn.convert(layer, "tensorwise")
    return f"{report}\n{y.shape} {list(variables)}"


def main() -> None:
    print(train_torch())
    print(train_jax())


if __name__ == "__main__":
    main()

"""GroupedLinear is a Linear for each group: values, gradients, histories, counts, copies, checkpoints and refusals."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.state import weight_cache
from tests.close import assert_bitwise
from tests.torch.linear.grouped.test_function import G, K, N, T, ends, rows

#: Group sizes of each step; the last rows belong to no group. The second group has no token in the first two steps.
STEPS = [(5, 0, 40, 19), (33, 0, 0, 20), (1, 8, 32, 16)]
every_recipe = pytest.mark.parametrize("recipe", [*recipes.RECIPES, None], ids=str)


class Each(nn.Module):
    """The same computation with one linear layer per group."""

    def __init__(self, layer: qt.GroupedLinear) -> None:
        super().__init__()
        bias, dtype = layer.bias is not None, layer.weight_dtype or layer.weight.dtype
        self.experts = nn.ModuleList([nn.Linear(K, N, bias, dtype=dtype) for _ in range(G)])

    def forward(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        parts = x.split([*sizes, T - sum(sizes)])
        outputs = [layer(part) for layer, part in zip(self.experts, parts, strict=False) if len(part)]
        return torch.cat([*outputs, x.new_zeros(T - sum(sizes), N)])


class One(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.experts = qt.GroupedLinear(G, K, N, **how)

    def forward(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        y: Tensor = self.experts(x, ends(sizes))
        return y


def pair(recipe: Any, **how: Any) -> tuple[One, Each]:
    """Both with the same values, converted under the same names."""
    torch.manual_seed(0)
    one = One(**how)
    torch.manual_seed(0)
    each = Each(one.experts)
    if recipe is not None:
        for model in (one, each):
            qt.convert(model, recipe)
    return one, each


def assert_same(one: One, each: Each) -> None:
    """Gradients and state of every group; a layer without tokens has none yet."""
    layer: Any = one.experts
    for i, single in enumerate(each.experts):
        for name in ("weight", "bias"):
            p = getattr(single, name)
            if p is None:
                continue
            grad = getattr(layer, name).grad
            grad = layer.matrices(grad) if name == "weight" else grad
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            assert_bitwise(grad[i].contiguous(), expected.detach(), f"{name} of {i}")
        for name in ("history", "factor", "count"):
            if name in single._buffers:
                assert_bitwise(getattr(layer, name)[i].contiguous(), getattr(single, name).contiguous(), f"{name} {i}")


@every_recipe
@pytest.mark.parametrize("how", [{}, {"layout": "kn", "bias": False, "dtype": torch.bfloat16}], ids=["nk", "kn"])
def test_it_trains_as_a_linear_layer_for_each_group(recipe: str | None, how: dict[str, Any]) -> None:
    one, each = pair(recipe, **how)
    dtype = how.get("dtype", torch.float32)
    assert_bitwise(one.experts.matrices(one.experts.weight), torch.stack([m.weight for m in each.experts]))
    for step, sizes in enumerate(STEPS):
        (x, g), (z, _) = rows(step, dtype=dtype), rows(step, dtype=dtype)
        y, expected = one(x, sizes), each(z, sizes)
        assert_bitwise(y.detach(), expected.detach())
        for output in (y, expected):
            output.backward(g)
        assert x.grad is not None and z.grad is not None
        assert_bitwise(x.grad, z.grad)
        assert_same(one, each)
        for model in (one, each):
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 1e-2 * p.grad
                        p.grad = None


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "delayed"])
def test_a_weight_is_quantized_once_per_step_for_any_number_of_micro_batches(recipe: str) -> None:
    layer = qt.GroupedLinear(G, K, N, recipe=recipe)
    optimizer = torch.optim.SGD(layer.parameters(), 1e-3)
    sides = 1 if recipes.get(recipe).reuse.weight else 2
    with qt.count(layer) as counters:
        for step in range(2):
            with qt.autocast(recipe="bf16"):
                for batch in range(3):
                    x, g = rows(batch)
                    layer(x, ends(STEPS[0])).backward(g)
            counted = {row[1]: row[2] for row in counters._rows() if row[1].startswith("weight")}
            # Only three of four groups have tokens.
            assert list(counted.values()) == [3 * K * N * (step + 1)] * sides, step
            optimizer.step()
            optimizer.zero_grad()
    layer.weight.data.add_(1.0)
    before = layer(rows(0)[0], ends(STEPS[0]))
    weight_cache.drop(layer)
    assert_bitwise(before, layer(rows(0)[0], ends(STEPS[0])))


def through_a_file(layer: qt.GroupedLinear) -> qt.GroupedLinear:
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    fresh = qt.GroupedLinear(G, K, N, recipe=layer.recipe, layout=layer.layout)
    fresh.load_state_dict(torch.load(io.BytesIO(buffer.getvalue())))
    fresh.__dict__["qualified_name"] = layer.__dict__.get("qualified_name")
    return fresh


def pickled(layer: qt.GroupedLinear) -> qt.GroupedLinear:
    loaded: qt.GroupedLinear = pickle.loads(pickle.dumps(layer))
    return loaded


def assigned(layer: qt.GroupedLinear) -> qt.GroupedLinear:
    with torch.device("meta"):
        fresh = qt.GroupedLinear(G, K, N, recipe=layer.recipe, layout=layer.layout)
    fresh.load_state_dict({k: v.clone() for k, v in layer.state_dict().items()}, assign=True)
    return fresh


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("way", [copy.deepcopy, pickled, through_a_file, assigned])
def test_copies_continue_like_the_layer(recipe: str, way: Callable[[Any], qt.GroupedLinear]) -> None:
    layer = qt.GroupedLinear(G, K, N, recipe=recipe)

    def step(trained: qt.GroupedLinear, seed: int) -> list[Tensor]:
        x, g = rows(seed)
        with qt.autocast(recipe="bf16"):
            y = trained(x, ends(STEPS[seed]))
        y.backward(g)
        assert x.grad is not None and trained.weight.grad is not None
        grad, trained.weight.grad = trained.weight.grad, None
        return [y.detach(), x.grad, grad, *(b.clone() for b in trained.buffers())]

    step(layer, 0)
    copied = way(layer)
    for seed in (1, 2):
        for ours, expected in zip(step(copied, seed), step(layer, seed), strict=True):
            assert_bitwise(ours.contiguous(), expected.contiguous())


def test_moves_keep_histories_in_float32_and_counts_whole() -> None:
    for recipe in ("delayed", "nvfp4"):
        layer = qt.GroupedLinear(G, K, N, recipe=recipe)
        x, g = rows(0)
        layer(x, ends(STEPS[0])).backward(g)
        before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        layer.to(torch.bfloat16)
        assert layer.weight.dtype is torch.bfloat16
        for name, buffer in layer.named_buffers():
            assert_bitwise(buffer.contiguous(), before[name].contiguous())


@every_recipe
def test_meta_layers_run_and_are_filled(recipe: str | None) -> None:
    with torch.device("meta"):
        layer = qt.GroupedLinear(G, K, N, recipe=recipe)
    x = torch.empty(T, K, device="meta", requires_grad=True)
    y = layer(x, torch.empty(G, dtype=torch.int32, device="meta"))
    assert y.shape == (T, N) and y.is_meta
    y.sum().backward()
    assert x.grad is not None and layer.weight.grad is not None and layer.weight.grad.shape == (G, N, K)
    layer.zero_grad()
    torch.manual_seed(0)
    layer.to_empty(device="cpu").reset_parameters()
    torch.manual_seed(0)
    expected = qt.GroupedLinear(G, K, N)
    assert_bitwise(layer.weight, expected.weight)
    assert layer(rows(0)[0], ends(STEPS[0])).isfinite().all()


X, OFFSETS = torch.zeros(8, K), torch.tensor([3, 3, 8, 8], dtype=torch.int32)


@pytest.mark.parametrize(
    ("x", "offsets", "sentence"),
    [
        (X[None], OFFSETS, "flatten leading axes"),
        (X[:, :-1], OFFSETS, r"they are \[T, 48\]"),
        (X, OFFSETS[:3], r"they are int32 \[4\]"),
        (X, OFFSETS.long(), "dtype=torch.int32"),
        (X, OFFSETS - 4, "ascending"),
        (X, OFFSETS + 1, "among 8 rows"),
        (X.bfloat16(), OFFSETS, "enter torch.autocast"),
        (X.long(), OFFSETS, "convert"),
        (X.to("meta"), OFFSETS, "move them"),
    ],
)
def test_bad_rows_give_a_clear_error(x: Tensor, offsets: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        qt.GroupedLinear(G, K, N, recipe="mxfp8")(x, offsets)
    for given in ((X, OFFSETS.tolist()), (X, None), (X.numpy(), OFFSETS), (None, OFFSETS)):
        with pytest.raises(TypeError, match=r"GroupedLinear: (x|offsets) is a .*; give a Tensor, such as"):
            qt.GroupedLinear(G, K, N)(*given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"groups": -1}, "groups is -1"),
        ({"groups": 2.0}, "whole number"),
        ({"in_features": True}, "in_features is True"),
        ({"layout": "kmn"}, "'nk' for"),
        ({"recipe": "mxfp9"}, "mxfp8"),
    ],
)
def test_bad_options_give_a_clear_error(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        qt.GroupedLinear(**{"groups": G, "in_features": K, "out_features": N, **given})


def test_models_of_them_are_converted_counted_and_reverted() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(K, G), One(layout="kn", bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.experts(x, STEPS[0]) + self.gate(x).sum(1, keepdim=True)
            return y

    model, (x, _) = Model(), rows(0)
    report = qt.convert(model, {"*experts": "delayed"})
    assert list(report.converted) == ["experts.experts"] and report.converted_parameters == G * K * N
    with qt.count(model) as counters:
        model(x).sum().backward()
    counts = counters.table["experts.experts"]
    assert counts["input"].elements == sum(STEPS[0]) * K and counts["grad_output"].elements == sum(STEPS[0]) * N
    assert counts["weight"].elements == sum(map(bool, STEPS[0])) * K * N
    assert set(qt.scaling_state_dict(model)) == {"experts.experts.history", "experts.experts.factor"}
    assert set(qt.plain_state_dict(model)) == {"gate.weight", "gate.bias", "experts.experts.weight"}
    with pytest.warns(UserWarning, match="drops the state of the previous one"):
        qt.convert(model, {"*experts": "nvfp4"})
    model(x).sum().backward()
    layer: Any = model.experts.experts
    assert layer.count.shape == (G, 3) and "history" not in layer._buffers
    assert qt.revert(model) == ["experts.experts"] and not list(model.buffers())
    y = model(x)
    assert "GroupedLinear" in repr(model) and y.isfinite().all()

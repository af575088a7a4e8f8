"""Blocks in place beside what differs in private or is changed after convert: the module's own forward runs."""

import copy
import functools
import inspect
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quaver.torch as qt
from tests.torch.conversion.in_place import model_of, tokens

DIM = 32
#: Of the maximum, in float32.
BOUND = 1e-5


class Norm(nn.Module):
    """Norm with its eps as an attribute and a helper function, as in Gemma."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(torch.rand(DIM) + 0.5), eps

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (DIM,), eps=self._eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * self.weight


class MLP(nn.Module):
    """Gated by a module or a function."""

    scale = 1.0

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(DIM, 48), nn.Linear(DIM, 48), nn.Linear(48, DIM)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.function(self.gate(x)) * self.up(x)) * self.scale
        return y


def results(module: nn.Module) -> list[Tensor]:
    x = torch.randn(5, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = module(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= BOUND * b.abs().max()


def test_modules_that_differ_in_a_private_attribute_keep_their_own_numbers() -> None:
    plain = nn.ModuleList([Norm(1e-6), Norm(1e-2)])
    model = copy.deepcopy(plain)
    assert all(row.block for row in qt.convert(model, "bf16", blocks=True).blocks)
    for ours, theirs in zip(model, plain, strict=True):
        assert_same(results(ours), results(theirs))


def _set(**attributes: Any) -> Callable[[Any], None]:
    return lambda module: [setattr(module, name, value) for name, value in attributes.items()] and None


def _scaled() -> nn.Module:
    norm = nn.LayerNorm(DIM)
    nn.init.constant_(norm.weight, 2.0)
    return norm


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "eps": (lambda: nn.LayerNorm(DIM), _set(eps=0.5)),
    "a helper of the instance": (lambda: Norm(1e-6), _set(_norm=lambda x: x)),
    "no gamma": (_scaled, _set(weight=None, bias=None)),
    "another activation of the same class": (lambda: MLP(nn.GELU()), _set(function=nn.GELU("tanh"))),
    "the activation's attribute": (lambda: MLP(nn.GELU()), lambda m: setattr(m.function, "approximate", "tanh")),
    "another function": (lambda: MLP(F.silu), _set(function=torch.tanh)),
    "an attribute of the class": (lambda: MLP(F.silu), _set(scale=2.0)),
    "one part more": (
        lambda: nn.Sequential(nn.Linear(DIM, 48), nn.GELU(), nn.Linear(48, DIM)),
        lambda m: m.append(nn.Tanh()),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_convert_take_effect(change: str) -> None:
    make, apply = CHANGES[change]
    plain = make()
    model = copy.deepcopy(plain)
    assert qt.convert(model, "bf16", blocks=True).blocks[0].block
    before = results(model)
    assert_same(before, results(plain))
    for module in (model, plain):
        apply(module)
    after = results(plain)
    assert_same(results(model), after)
    assert (before[0] - after[0]).abs().max() > BOUND * after[0].abs().max(), "the change changes nothing"


def test_a_forward_that_keeps_a_tensor_is_left_unchanged() -> None:
    class Keeping(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x
            return super().forward(x)

    model = nn.Sequential(Keeping(DIM), nn.Linear(DIM, DIM))
    assert qt.convert(model, "bf16", blocks=True).blocks[0].why == "its forward changes it"


@pytest.mark.parametrize("value", [[2.0], {"by": 2.0}, torch.tensor(2.0)], ids=["list", "dict", "tensor"])
@pytest.mark.parametrize("where", ["norm", "mlp", "its activation"])
def test_modules_that_read_a_mutable_container_are_left_unchanged(value: Any, where: str) -> None:
    class Held(nn.GELU):
        factor: Any = None

        def forward(self, x: Tensor) -> Tensor:
            first = self.factor["by"] if isinstance(self.factor, dict) else self.factor
            return super().forward(x) * (first[0] if isinstance(first, list) else first)

    part: Any = {"norm": lambda: nn.LayerNorm(DIM), "mlp": lambda: MLP(nn.GELU())}.get(where, lambda: MLP(Held()))()
    (part.function if where == "its activation" else part).factor = value
    model = nn.Sequential(part, nn.Linear(DIM, DIM))
    (row,) = (row for row in qt.convert(model, "bf16", blocks=True).blocks if row.name == "0")
    assert row.why == f"its factor is a {type(value).__name__}, and a write to it could not be detected"
    assert not row.block


def loss_of(model: Any, **options: Any) -> list[Tensor]:
    x = tokens()
    loss = model(input_ids=x, **{"labels": x} | options).loss
    return [loss.detach(), *torch.autograd.grad(loss, [model.lm_head.weight, model.model.norm.weight])]


def placed_loss(family: str) -> tuple[Any, Any]:
    plain, model = model_of(family), model_of(family)
    blocks = qt.Blocks(norm=False, mlp=False, loss=True)
    assert qt.convert(model, "bf16", blocks=blocks).blocks[0].block
    return model, plain


def test_a_loss_called_with_other_options_equals_the_models_own() -> None:
    model, plain = placed_loss("granite")
    assert_same(loss_of(model, ignore_index=5), loss_of(plain, ignore_index=5))
    none = torch.full_like(tokens(), -100)
    for count in (0, torch.tensor(0)):
        loss, *gradients = loss_of(model, labels=none, num_items_in_batch=count)
        assert loss.isnan() and not any(g.any() for g in gradients)
    parameters = {name: p.detach() for name, p in plain.named_parameters()}
    theirs, ours = (
        torch.func.grad(lambda p, m=m: torch.func.functional_call(m, p, (tokens(),), {"labels": tokens()}).loss)(
            parameters
        )
        for m in (plain, model)
    )
    assert_same([ours["lm_head.weight"]], [theirs["lm_head.weight"]])
    for m in (model, plain):
        m.config.logits_scaling = 3.0
    assert_same(loss_of(model), loss_of(plain))


def test_a_forward_with_an_extra_option() -> None:
    plain = model_of("llama")
    kind: Any = type(plain)

    class Weighted(kind):
        def forward(self, input_ids: Any = None, weight: float | None = None, **options: Any) -> Any:
            outputs = super().forward(input_ids=input_ids, **options)
            if weight is not None:
                outputs.loss = outputs.loss * weight
            return outputs

    plain.__class__ = Weighted
    model = copy.deepcopy(plain)
    qt.convert(model, "bf16", blocks=qt.Blocks(loss=True))
    assert_same(loss_of(model, weight=3.0), loss_of(plain, weight=3.0))


@pytest.mark.parametrize("blocks", [qt.Blocks(eight_bit_activations=True, loss=True), qt.Blocks()])
def test_convert_leaves_the_generator_as_it_was(blocks: qt.Blocks) -> None:
    model = nn.ModuleList([model_of("llama"), Norm(1e-6), Norm(1e-6), MLP(F.silu), MLP(F.mish)])
    for _ in range(2):
        torch.manual_seed(7)
        before = torch.get_rng_state()
        report = qt.convert(model, "bf16", blocks=blocks)
        assert torch.equal(torch.get_rng_state(), before)
    assert {bool(row.block) for row in report.blocks} == {True, False}


def test_a_module_that_a_later_convert_leaves_alone_computes_by_itself() -> None:
    model = nn.ModuleDict({"mlp": MLP(F.silu), "norm": Norm(1e-6)})
    qt.convert(model, "bf16", blocks=True)
    report = qt.convert(model, "bf16", blocks=True, skip=["*mlp*"])
    assert {row.name: bool(row.block) for row in report.blocks} == {"mlp": False, "norm": True}
    assert type(model["mlp"]) is MLP


def test_a_loss_called_with_other_tensors_is_left_unchanged() -> None:
    model = model_of("llama")
    kind: Any = type(model)

    class Shifted(kind):
        def forward(self, input_ids: Any = None, labels: Any = None, **options: Any) -> Any:
            return super().forward(input_ids=(input_ids + 1) % 96, labels=labels, **options)

    model.__class__ = Shifted
    report = qt.convert(model, "bf16", blocks=qt.Blocks(loss=True))
    whys = {row.why for row in report.blocks if row.kind == "Shifted"}
    assert whys == {"its forward passes other tensors to its body than it receives"}


def test_float16_uses_the_original_module() -> None:
    class Clamped(MLP):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y.clamp(-0.01, 0.01) if y.dtype is torch.float16 else y

    plain = Clamped(F.silu)
    model = copy.deepcopy(plain)
    assert qt.convert(model, "bf16", blocks=True).blocks[0].block
    x = torch.randn(4, DIM)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(model(x), plain(x))
        assert torch.equal(compiled(x), plain(x))
    torch._dynamo.reset()
    assert torch.equal(model.half()(x.half()), plain.half()(x.half()))
    assert plain(x.half()).abs().max() <= 0.011


def test_a_wrapped_forward_counts_as_the_call_and_another_forward_does_not() -> None:
    """On the instance: one by functools.wraps has called the block; one that is no wrapper may want logits."""
    model, plain = placed_loss("llama")
    signature = inspect.signature(plain.forward)
    assert inspect.signature(model.forward) == signature
    called = model.forward

    @functools.wraps(called.__func__)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return called.__func__(self, *args, **kwargs)

    model.forward = types.MethodType(wrapper, model)
    assert inspect.signature(model.forward) == signature
    x = tokens()
    assert model(input_ids=x, labels=x).logits is None
    model.forward = lambda **kwargs: called(**kwargs)
    assert model(input_ids=x, labels=x).logits is not None
    del model.forward
    again = pickle.loads(pickle.dumps(model))
    assert inspect.signature(again.forward) == signature and again(input_ids=x, labels=x).logits is None


def test_an_attribute_of_the_model_that_scales_logits_counts() -> None:
    model, plain = placed_loss("cohere")
    for m in (model, plain):
        m.logit_scale = 3.0
    assert_same(loss_of(model), loss_of(plain))

"""What goes wrong in torchao's conversion, a test each, for every kind of module that ours reaches.

Source: torchao 0.18's `convert_to_float8_training`, run on a CPU; numbers are those of the list that was made of it.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

import quaver.torch as qt
from quaver.torch.conversion.convert import DDP_IGNORES
from quaver.torch.linear.linear import Quantizable
from tests.close import assert_bitwise
from tests.torch.conversion.families import tiny

#: The routing of the experts below.
IDS, WEIGHTS = torch.tensor([[0, 1], [2, 3], [1, 3]]), torch.tensor([[0.5, 0.25], [1.0, 0.5], [0.25, 2.0]])


def mixtral_experts() -> nn.Module:
    experts: nn.Module = tiny("mixtral").model.layers[0].mlp.experts
    return experts


def run(module: nn.Module, x: Tensor) -> Tensor:
    """The output of a module of any kind for x [T, 64]."""
    if isinstance(module, nn.MultiheadAttention):
        return module(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]
    if hasattr(module, "gate_up_proj"):
        return module(x, IDS[: len(x)], WEIGHTS[: len(x)])  # type: ignore[no-any-return]
    return module(x)  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(64, 64),
    "falcon": lambda: FalconLinear(64, 64),
    "conv1d": lambda: Conv1D(64, 64),
    "attention": lambda: nn.MultiheadAttention(64, 2),
    "experts": mixtral_experts,
}
EVERY = pytest.mark.parametrize("kind", KINDS)


def converted(kind: str, recipe: Any = "mxfp8") -> nn.Module:
    torch.manual_seed(0)
    module = KINDS[kind]()
    qt.convert(module, recipe)
    assert isinstance(module, Quantizable)
    return module


@EVERY
def test_1_backward_keeps_the_codes_and_not_the_input(kind: str) -> None:
    input_is_saved = []
    torch.manual_seed(0)
    for module in (KINDS[kind](), converted(kind)):
        own = {p.data_ptr() for p in module.parameters()}
        shapes: list[tuple[torch.dtype, torch.Size]] = []

        def pack(t: Tensor) -> Tensor:
            if t.data_ptr() not in own and not t.is_leaf:  # noqa: B023
                shapes.append((t.dtype, t.shape))  # noqa: B023
            return t

        x = torch.randn(3, 64, requires_grad=True) * 1
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            run(module, x)
        input_is_saved.append(
            any(dtype is torch.float32 and shape[-1:] == (64,) and len(shape) == 2 for dtype, shape in shapes)
        )
    if kind in ("linear", "falcon", "conv1d"):
        assert input_is_saved == [True, False]


@EVERY
@pytest.mark.parametrize("of_input", [True, False])
def test_2_a_gradient_that_is_not_needed_is_not_computed(kind: str, of_input: bool) -> None:
    module = converted(kind)
    for p in module.parameters():
        p.requires_grad_(not of_input)
    x = torch.randn(3, 64, requires_grad=of_input)
    run(module, x).sum().backward()
    assert (x.grad is not None) is of_input
    assert all((p.grad is None) is of_input for name, p in module.named_parameters())


@EVERY
def test_3_no_token_is_no_error(kind: str) -> None:
    if kind == "attention":
        pytest.skip("torch's attention of no token has no softmax")
    for recipe in ("tensorwise", "rowwise", "mxfp8", "nvfp4"):
        module = converted(kind, recipe)
        x = torch.zeros(0, 64, requires_grad=True)
        y = run(module, x)
        y.sum().backward()
        assert y.shape == (0, 64) and x.grad is not None
        assert all(p.grad is None or not p.grad.any() for p in module.parameters())


@EVERY
def test_4_hooks_attributes_and_training_mode_stay(kind: str) -> None:
    module = KINDS[kind]().eval()
    called: list[str] = []
    module.register_forward_hook(lambda m, a, y: called.append("forward"))
    module.register_forward_pre_hook(lambda m, a: called.append("pre"))
    module.register_full_backward_hook(lambda m, a, y: called.append("backward"))
    module.note = "kept"  # type: ignore[assignment]
    parameters, keys = list(module.parameters()), list(module.state_dict())
    qt.convert(module, "mxfp8")
    run(module, torch.randn(3, 64, requires_grad=True)).sum().backward()
    assert called == ["pre", "forward", "backward"] and module.note == "kept" and not module.training
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert list(module.state_dict()) == keys


def test_4_tied_weights_stay_tied() -> None:
    for make in (KINDS["linear"], KINDS["conv1d"], KINDS["falcon"]):
        model = nn.Sequential(make(), make())
        model[1].weight = model[0].weight
        qt.convert(model, "mxfp8")
        assert model[0].weight is model[1].weight
        y = model(torch.randn(3, 64))
        y.sum().backward()
        torch.optim.SGD(model.parameters(), 0.5).step()
        assert not torch.equal(model(torch.ones(3, 64)), y)


@EVERY
def test_4_a_module_used_twice_is_converted_at_both_places(kind: str) -> None:
    shared = KINDS[kind]()
    model = nn.ModuleDict({"a": shared, "b": nn.Linear(64, 64), "c": shared})
    report = qt.convert(model, "mxfp8")
    assert {"a", "b"} <= set(report.converted) and "c" not in report.converted
    assert model["a"] is model["c"] is shared and isinstance(shared, Quantizable)
    assert report.share == 1
    assert set(qt.revert(model)) == set(report.converted)


@pytest.mark.parametrize("kind", ["linear", "falcon", "conv1d"])
def test_4_a_parametrized_weight_is_no_error(kind: str) -> None:
    module = KINDS[kind]()
    with torch.no_grad():
        module.weight.normal_()  # type: ignore[operator, union-attr]
    parametrizations.weight_norm(module)
    x = torch.randn(3, 64)
    before = module(x)
    if kind == "falcon":
        # What makes its weight is a module in it, and its forward is its own: it is left alone.
        with pytest.warns(UserWarning, match="changed nothing"):
            qt.convert(module, "mxfp8")
        assert_bitwise(module(x), before)
        return
    qt.convert(module, "mxfp8")
    y = module(x)
    y.sum().backward()
    assert not torch.equal(y, before) and (y - before).norm() < 0.1 * before.norm()
    assert all(p.grad is not None and p.grad.any() for p in module.parameters())
    assert_bitwise(copy.deepcopy(module)(x), y)
    qt.revert(module)
    assert_bitwise(module(x), before)


def test_4_an_older_weight_norm_is_no_error() -> None:
    for make in (KINDS["linear"], KINDS["conv1d"]):
        module = make()
        with pytest.warns(FutureWarning, match="weight_norm"):
            nn.utils.weight_norm(module)
        x = torch.randn(3, 64)
        before = module(x)
        report = qt.convert(module, "mxfp8")
        assert report.share == 1 and report.converted_parameters >= 64 * 64
        module(x).sum().backward()
        assert module.weight_g.grad.any() and module.weight_v.grad.any()  # type: ignore[union-attr, operator]
        assert qt.explain(nn.Sequential(module), x)
        qt.revert(module)
        assert_bitwise(module(x), before)


def test_4_a_class_whose_forward_changes_is_checked_again() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias)

    assert qt.convert(Own(64, 64), "mxfp8").converted
    Own.forward = lambda self, x: 2 * F.linear(x, self.weight, self.bias)  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="Own overrides forward"):
        qt.convert(Own(64, 64), "mxfp8")


@EVERY
def test_6_sizes_of_no_multiple_are_no_error(kind: str) -> None:
    sizes: dict[str, nn.Module] = {
        "linear": nn.Linear(13, 7),
        "falcon": FalconLinear(13, 7),
        "conv1d": Conv1D(7, 13),
        "attention": nn.MultiheadAttention(14, 2),
        "experts": tiny("mixtral", hidden_size=28, intermediate_size=19, head_dim=14).model.layers[0].mlp.experts,
    }
    module = sizes[kind]
    features = {"attention": 14, "experts": 28}.get(kind, 13)
    for recipe in ("tensorwise", "mxfp8", "nvfp4"):
        qt.convert(module, recipe)
        x = torch.randn(3, features, requires_grad=True)
        run(module, x).sum().backward()
        assert x.grad is not None and x.grad.isfinite().all()


def test_15_converting_patches_nothing() -> None:
    import torch._inductor.config as inductor

    watched = [(nn.Linear, "forward"), (nn.MultiheadAttention, "forward"), (Conv1D, "forward"), (F, "linear")]
    watched += [(F, "multi_head_attention_forward"), (type(mixtral_experts()), "forward"), (FalconLinear, "forward")]
    before = [getattr(owner, name) for owner, name in watched], inductor.get_config_copy()
    for kind in KINDS:
        run(converted(kind), torch.randn(3, 64))
    assert ([getattr(owner, name) for owner, name in watched], inductor.get_config_copy()) == before


# Further: what a converted module of each kind survives.


@EVERY
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "nvfp4"])
def test_a_state_dict_round_trips_strictly(kind: str, recipe: str) -> None:
    module, other = converted(kind, recipe), KINDS[kind]()
    qt.convert(other, recipe)
    x = torch.randn(3, 64)
    for _ in range(2):
        run(module, x).sum().backward()
    other.load_state_dict(module.state_dict())
    results = []
    for m in (module, other):
        m.zero_grad()
        y = run(m, x)
        y.sum().backward()
        results.append([y, *(p.grad for p in m.parameters())])
    for a, b in zip(*results, strict=True):
        assert_bitwise(a, b)


@EVERY
def test_moves_casts_and_meta_are_survived(kind: str) -> None:
    module = converted(kind, "delayed")
    x = torch.randn(3, 64)
    run(module, x).sum().backward()
    half = copy.deepcopy(module).to(torch.bfloat16)
    assert run(half, x.bfloat16()).dtype is torch.bfloat16
    assert all(b.dtype in (torch.float32, torch.int64) for b in half.buffers())
    with torch.device("meta"):
        empty = KINDS[kind]()
    qt.convert(empty, "delayed")
    empty.to_empty(device="cpu")
    empty.load_state_dict(module.state_dict())
    with torch.no_grad():
        assert_bitwise(run(empty, x), run(module, x))


@EVERY
def test_ddp_knows_about_histories(kind: str) -> None:
    model = nn.ModuleDict({"part": KINDS[kind]()})
    qt.convert(model, "delayed")
    names = {name for name, _ in model.named_buffers() if name.endswith(("history", "factor"))}
    assert names and set(getattr(model, DDP_IGNORES)) == names


@EVERY
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_converted_module_compiles_to_the_same_bits(kind: str) -> None:
    module = converted(kind)
    x = torch.randn(3, 64)
    eager = run(module, x)
    compiled = torch.compile(lambda x: run(module, x), backend="aot_eager", fullgraph=True)
    assert_bitwise(compiled(x), eager)


@EVERY
def test_a_module_under_autocast_of_torch_computes_in_its_dtype(kind: str) -> None:
    module = converted(kind)
    x = torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(module, x)
    y.float().sum().backward()
    assert x.grad is not None and all(p.grad is None or p.grad.dtype is torch.float32 for p in module.parameters())
    assert y.dtype is (torch.float32 if kind == "experts" else torch.bfloat16)

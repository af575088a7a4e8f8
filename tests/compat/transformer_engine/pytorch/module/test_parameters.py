"""Parameters of blocks by Transformer Engine's names: attributes, state dicts, moves, copies, first values."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import quaver.compat.transformer_engine.pytorch as te
import quaver.torch as qt
from quaver.compat.transformer_engine.common.recipe import DelayedScaling, MXFP8BlockScaling
from tests.close import assert_bitwise, assert_close
from tests.pairs import alternating

ONE = {"single_grouped_weight": True, "single_grouped_bias": True}
SPLIT = {"query": 32, "key_": 16, "value": 16}
MADE: dict[str, Callable[..., Any]] = {
    "Linear": lambda **o: te.Linear(64, 64, **o),
    "Linear, divided": lambda **o: te.Linear(64, 64, parameters_split=SPLIT, **o),
    "LayerNormLinear": lambda **o: te.LayerNormLinear(64, 64, **o),
    "LayerNormLinear, divided": lambda **o: te.LayerNormLinear(64, 64, parameters_split=("query", "key"), **o),
    "LayerNormMLP": lambda **o: te.LayerNormMLP(64, 96, **o),
    "LayerNormMLP, gated": lambda **o: te.LayerNormMLP(64, 96, activation="swiglu", normalization="RMSNorm", **o),
    "GroupedLinear": lambda **o: _Grouped(te.GroupedLinear(3, 64, 64, **o)),
    "GroupedLinear, one": lambda **o: _Grouped(te.GroupedLinear(3, 64, 64, **ONE, **o)),
    "GroupedLinear, one weight": lambda **o: _Grouped(te.GroupedLinear(3, 64, 64, single_grouped_weight=True, **o)),
}
EACH = pytest.mark.parametrize("name", MADE)
#: How a module is copied or moved.
COPIES = ("copy", "pickle", "state dict", "assigned", "meta", "dtype")
NAMES = {
    "Linear": ["weight", "bias"],
    "Linear, divided": [f"{n}_{k}" for k in ("weight", "bias") for n in ("query", "key", "value")],
    "LayerNormLinear": ["layer_norm_weight", "layer_norm_bias", "weight", "bias"],
    "LayerNormLinear, divided": [
        *("layer_norm_weight", "layer_norm_bias", "query_weight", "key_weight", "query_bias", "key_bias"),
    ],
    "LayerNormMLP": ["layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"],
    "LayerNormMLP, gated": ["layer_norm_weight", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"],
    "GroupedLinear": [*(f"weight{i}" for i in range(3)), *(f"bias{i}" for i in range(3))],
    "GroupedLinear, one": ["weight", "bias"],
    "GroupedLinear, one weight": ["weight", "bias0", "bias1", "bias2"],
}


class _Grouped(nn.Module):
    """Grouped layer with the call signature of the others."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, [3, 0, x.shape[0] - 3])  # type: ignore[no-any-return]


def of(name: str, module: Any) -> Any:
    """What has the names."""
    return module.layer if name.startswith("GroupedLinear") else module


def run(module: Any, recipe: Any = None) -> Tensor:
    """A step's output, gradients left."""
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        dtype = next(module.parameters()).dtype
        y = module(x.to(dtype if dtype.itemsize > 1 else torch.float32))
    y.float().square().sum().backward()
    return y.detach()  # type: ignore[no-any-return]


@EACH
def test_parameters_and_state_have_the_original_names(name: str) -> None:
    module = of(name, MADE[name]())
    assert [n for n, _ in module.named_parameters()] == NAMES[name] == list(module.state_dict())
    # A weight of experts that gets no token keeps no gradient.
    run(_Grouped(module) if name.startswith("GroupedLinear") else module, MXFP8BlockScaling())
    without = {"weight1", "bias1"} if name == "GroupedLinear" else set()
    assert {n for n, p in module.named_parameters() if p.grad is None} in (set(), without)
    assert list(get_model_state_dict(module)) == NAMES[name]


@EACH
def test_initial_values_match_transformer_engine(name: str) -> None:
    torch.manual_seed(0)
    module = of(name, MADE[name]())
    for key, p in module.named_parameters():
        if key.endswith("bias") or "bias" in key:
            assert not p.any(), key
        elif "layer_norm" in key:
            assert (p == 1).all()
        else:
            assert 0.018 < p.std() < 0.028, key
    ones = of(name, MADE[name](init_method=nn.init.ones_))
    assert all((p == 1).all() for key, p in ones.named_parameters() if "weight" in key)


@EACH
def test_the_configured_options_take_effect(name: str) -> None:
    module, other = MADE[name](), MADE[name]()
    for key, p in of(name, other).named_parameters():
        setattr(of(name, module), key, p)
        assert getattr(of(name, module), key) is p
    assert_bitwise(run(module, MXFP8BlockScaling()), run(other, MXFP8BlockScaling()))
    for p in of(name, module).parameters():
        p.data = p.data * 0
    assert not run(module).any()


@pytest.mark.parametrize(("name", "how"), alternating(MADE, COPIES, ["Linear", "GroupedLinear, one"]))
def test_training_continues_from_a_copy(name: str, how: str) -> None:
    recipe, module = DelayedScaling(amax_history_len=4), MADE[name]()
    for _ in range(2):
        run(module, recipe)
    if how == "copy":
        other = copy.deepcopy(module)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(module))
    elif how == "dtype":
        other = copy.deepcopy(module).double().float()
    else:
        device = "meta" if how in ("meta", "assigned") else "cpu"
        other = MADE[name](device=device)
        if how == "meta":
            other.to_empty(device="cpu")
        run_first = how == "state dict"
        if run_first:
            run(other, recipe)
        other.load_state_dict(module.state_dict(), assign=how == "assigned")
    assert list(other.state_dict()) == list(module.state_dict())
    flattened = of(name, other)
    for key, (part, inner) in flattened.aliases.items():
        assert flattened._parameters[key] is flattened._modules[part]._parameters[inner], key
    first = [p.detach().clone() for p in module.parameters()]
    assert_bitwise(run(other, recipe), run(module, recipe))
    assert all(torch.equal(p, q) for p, q in zip(first, other.parameters(), strict=True))


def test_a_torch_file_and_strict_loading() -> None:
    module = te.LayerNormMLP(64, 96)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    del state["fc1_bias"]
    state["fc3_weight"] = torch.zeros(1)
    model = nn.Sequential(te.LayerNormMLP(64, 96), nn.LayerNorm(64))
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict({f"0.{k}": v for k, v in state.items()})
    message = str(error.value)
    assert 'Missing key(s) in state_dict: "0.fc1_bias", "1.weight", "1.bias"' in message and '"0.fc3_weight"' in message


def test_reset_and_meta() -> None:
    for name, make in MADE.items():
        torch.manual_seed(0)
        expected = of(name, make())
        module = of(name, make(device="meta")).to_empty(device="cpu")
        torch.manual_seed(0)
        module.reset_parameters()
        for (key, p), q in zip(module.named_parameters(), expected.parameters(), strict=True):
            assert abs(float(p.detach().std()) - float(q.detach().std())) < 0.005, key


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_a_bias_may_be_returned_beside_the_output(name: str) -> None:
    plain, separate = MADE[name](), MADE[name](return_bias=True)
    assert list(separate.state_dict()) == NAMES[name]
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(torch.randn_like(p))
    separate.load_state_dict(plain.state_dict())
    x = torch.randn(8, 64)
    y, bias = separate(x)
    assert_close("sum", y + bias, plain(x), 1e-6)
    y, bias = MADE[name](return_bias=True, bias=False)(x)
    assert not bias.numel()
    with pytest.raises(ValueError, match="fp8_output"):
        te.Linear(8, 8)(torch.zeros(1, 8), fp8_output=True)


def test_the_norm_output_is_returned() -> None:
    x = torch.randn(8, 64)
    for module in (
        te.LayerNormLinear(64, 64, return_layernorm_output=True),
        te.LayerNormMLP(64, 96, return_layernorm_output=True),
    ):
        y, normalized = module(x)
        assert_close("norm", normalized, nn.functional.layer_norm(x, (64,)), 1e-5)
        assert y.shape == (8, 64)
    y, bias, normalized = te.LayerNormLinear(64, 64, return_layernorm_output=True, return_bias=True)(x)
    assert bias.shape == (64,) and normalized.shape == x.shape


CODES = ["Linear", "LayerNormLinear", "LayerNormMLP, gated", "GroupedLinear", "GroupedLinear, one weight"]


@pytest.mark.parametrize("name", CODES)
def test_weights_that_exist_only_as_codes(name: str) -> None:
    with te.quantized_model_init(recipe=MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        module = MADE[name]()
    weights = [p for p in of(name, module).parameters() if p.dim() > 1]
    assert all(isinstance(p, qt.QuantizedTensor) for p in weights)
    first = qt.initial_value(next(m for m in module.modules() if isinstance(m, qt.Linear | qt.GroupedLinear)))
    assert first is not None and 0.018 < first.std() < 0.028
    y = run(module, MXFP8BlockScaling())
    module.to(torch.bfloat16)
    assert all(isinstance(p, qt.QuantizedTensor) for p in of(name, module).parameters() if p.dim() > 1)
    other = copy.deepcopy(module)
    other.load_state_dict(module.state_dict())
    plain = MADE[name]()
    plain.load_state_dict(qt.plain_state_dict(module.float()))
    assert_close("values", run(plain, MXFP8BlockScaling()), y, 1e-6)
    with pytest.raises(ValueError, match="leave parameters_split out"), te.quantized_model_init(recipe="mxfp8"):
        te.Linear(64, 64, parameters_split=SPLIT)


@pytest.mark.parametrize("name", CODES)
def test_gradients_of_weights_in_codes_have_params_dtype(name: str) -> None:
    """Whatever runs, and after copies, moves and loads; each is that of the same values in high precision."""

    def gradients(module: Any, recipe: Any, casts: bool = False) -> list[Tensor]:
        module.zero_grad()
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
        with te.autocast(enabled=recipe is not None, recipe=recipe), torch.autocast("cpu", enabled=casts):
            y = module(x)
        y.float().square().sum().backward()
        return [p.grad for p in of(name, module).parameters() if p.dim() > 1 and p.grad is not None]

    torch.manual_seed(0)
    with te.quantized_model_init(recipe=MXFP8BlockScaling()):
        module = MADE[name](params_dtype=torch.bfloat16)
    plain = MADE[name](params_dtype=torch.bfloat16)
    plain.load_state_dict(qt.plain_state_dict(module))
    for recipe, casts in ((None, False), (MXFP8BlockScaling(), False), (MXFP8BlockScaling(), True)):
        expected = gradients(plain, recipe, casts)
        for one, other in zip(gradients(module, recipe, casts), expected, strict=True):
            assert one.dtype is torch.bfloat16
            assert_close("gradient", one, other, 1e-2)
    loaded = pickle.loads(pickle.dumps(module))
    loaded.load_state_dict(module.state_dict())
    for other in (copy.deepcopy(module), loaded, copy.deepcopy(module).to_empty(device="meta").to_empty(device="cpu")):
        assert {g.dtype for g in gradients(other, None)} == {torch.bfloat16}
    module.float()
    assert {p.grad.dtype for p in of(name, module).parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("recipe", [None, DelayedScaling(amax_history_len=4), MXFP8BlockScaling()])
def test_one_weight_of_all_groups_computes_and_loads_what_several_do(recipe: Any) -> None:
    """Checkpoints of either form go into the other, histories in an `_extra_state` too."""
    several, whole, packed = (MADE[name]() for name in ("GroupedLinear", "GroupedLinear, one", CODES[-1]))
    with torch.no_grad():
        for p in several.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    saved = {n: p.detach().clone() for n, p in several.layer.named_parameters()}
    whole.layer.load_state_dict(saved)
    packed.layer.load_state_dict(whole.layer.state_dict() | {"bias": whole.layer.bias.detach()[:, None]})
    back = MADE["GroupedLinear"]()
    back.layer.load_state_dict(packed.layer.state_dict())
    back.layer.load_state_dict(whole.layer.state_dict())
    outputs = [run(module, recipe) for module in (several, whole, packed, back)]
    assert_bitwise(outputs[3], outputs[0])
    for y in outputs[1:3]:
        assert_close("output", y, outputs[0], 1e-6)
    for kind, form in (("weight", "whole"), ("bias", "whole"), ("weight", "packed")):
        grad = getattr({"whole": whole, "packed": packed}[form].layer, kind).grad
        for i, part in enumerate(grad):
            expected = getattr(several.layer, f"{kind}{i}").grad
            assert_close(kind, part, torch.zeros_like(part) if expected is None else expected, 1e-5)
    # A GPU's numbers of tokens are not read, and leading axes stay.
    y = whole.layer(torch.ones(2, 4, 64), torch.tensor([3, 0, 5]))
    assert y.shape == (2, 4, 64)
    with pytest.raises(ValueError, match="3 numbers that add up to 8 tokens"):
        whole.layer(torch.ones(8, 64), [3, 5])


def test_main_grad_and_delayed_gradients() -> None:
    plain = te.LayerNormMLP(64, 96)
    run(plain, MXFP8BlockScaling())
    module = te.LayerNormMLP(64, 96, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    module.load_state_dict(plain.state_dict())
    for p in (module.fc1_weight, module.fc2_weight):
        p.main_grad = torch.zeros(p.shape)
    run(module, MXFP8BlockScaling())
    assert not module.fc1_weight.main_grad.any()
    module.backward_dw()
    for name in ("fc1_weight", "fc2_weight"):
        assert_bitwise(getattr(module, name).main_grad, getattr(plain, name).grad)
        assert getattr(module, name).grad is None
    plain.backward_dw()


def test_compiled_it_has_the_same_bits() -> None:
    torch.compiler.reset()
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        module = te.LayerNormLinear(64, 64, parameters_split=("query", "key"))
        run(torch.compile(module, backend="aot_eager", fullgraph=True) if compiles else module, MXFP8BlockScaling())
        results.append([p.grad for p in module.parameters()])
    for one, other in zip(*results, strict=True):
        assert_bitwise(one, other)
    waiting = torch.compile(te.Linear(64, 64, delay_wgrad_compute=True), backend="aot_eager")
    with pytest.raises(ValueError, match="a compiled layer ran in weight_gradients"):
        run(waiting, MXFP8BlockScaling())


def test_unsupported_arguments_are_refused() -> None:
    for make, sentence in (
        (lambda: te.Linear(64, 64, tp_size=4), "Linear would be one rank's shard of 4"),
        (lambda: te.Linear(64, 64, parameters_split={"a": 3}), "parameters_split has 3 rows and the weight 64"),
        (lambda: setattr(te.Linear(8, 8), "linear", nn.Linear(8, 8)), "replace the module itself"),
        (lambda: te.GroupedLinear(2, 8, 8, return_bias=True), "return_bias is not supported"),
        (lambda: te.GroupedLinear(2, 8, 8, single_grouped_bias=True), "give single_grouped_weight=True"),
        (lambda: te.GroupedLinear(2, 8, 8, use_grouped_tensor=False, **ONE), "use_grouped_tensor=False excludes"),
        (lambda: te.GroupedLinear(2, 8, 8)(torch.zeros(4, 8), [1, 2]), "2 numbers that add up to 4 tokens"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make()  # type: ignore[no-untyped-call]
    with pytest.raises(TypeError, match="Linear has no option 'paramsdtype'; did you mean 'params_dtype'"):
        te.Linear(64, 64, paramsdtype=torch.bfloat16)


def test_norms() -> None:
    x = torch.randn(4, 64)
    assert_close("LayerNorm", te.LayerNorm(64)(x), nn.functional.layer_norm(x, (64,)), 1e-6)
    assert_close("RMSNorm", te.RMSNorm(hidden_size=64)(x), nn.functional.rms_norm(x, (64,), eps=1e-5), 1e-6)
    centered = te.RMSNorm((64,), zero_centered_gamma=True, params_dtype=torch.bfloat16)
    assert not centered.weight.any() and centered.weight.dtype is torch.bfloat16
    centered.load_state_dict({"weight": torch.ones(64), "_extra_state": torch.empty(0, dtype=torch.uint8)})


def test_rows_are_padded_and_unpadded() -> None:
    x = torch.randn(12, 8)
    padded, splits = te.Fp8Padding(3)(x, [5, 0, 7])
    assert padded.shape == (32, 8) and splits == [16, 0, 16] and not padded[5:16].any()
    assert_bitwise(te.Fp8Unpadding(3)(padded, [5, 0, 7]), x)


def test_positional_arguments_have_the_original_order() -> None:
    for kind in (te.LayerNormLinear, te.LayerNormMLP):
        given, named = kind(32, 64, 0.5), kind(32, 64, eps=0.5)
        named.load_state_dict(given.state_dict())
        x = torch.randn(8, 32)
        assert_bitwise(given(x).detach(), named(x).detach())
    # Behind them come arguments that are not here, or in another place.
    for make in (
        lambda: te.Linear(32, 64, False),  # type: ignore[call-arg]
        lambda: te.LayerNormLinear(32, 64, 1e-3, False),  # type: ignore[call-arg]
        lambda: te.GroupedLinear(2, 32, 64, False),  # type: ignore[call-arg]
        lambda: te.MultiheadAttention(32, 2, None, 0.0, 1e-5, None),  # type: ignore[call-arg]
        lambda: te.TransformerLayer(32, 64, 2, None, 1e-5, 0.0, 0.0, None),  # type: ignore[call-arg]
    ):
        with pytest.raises(TypeError, match=r"too many positional arguments; give all but .* by name"):
            make()

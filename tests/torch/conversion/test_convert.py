"""Test convert and revert: preserved attributes, skipped layers with reasons, and rolling of histories."""

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import quaver.torch as qt
from quaver import ModuleRule, Recipe, Rules, recipes
from quaver.torch.conversion.convert import DDP_IGNORES
from quaver.torch.state.history import roll as rolling
from tests.close import assert_bitwise

RECIPES = list(recipes.RECIPES)
QUANTIZING = [name for name in RECIPES if name != "bf16"]


class Plain(nn.Linear):
    """Subclass without its own forward."""

    def extra_repr(self) -> str:
        return super().extra_repr() + ", plain"


class Tied(nn.Module):
    """An embedding, two layers and a head with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.embed(tokens)).relu()))  # type: ignore[no-any-return]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))


def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """One SGD step; the gradients."""
    model.zero_grad()
    model(x).square().mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    torch.optim.SGD(model.parameters(), 0.1).step()
    return grads


# What a model keeps.


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_a_converted_layer_is_the_layer_that_was_built_with_the_recipe(recipe: str) -> None:
    built = qt.Linear(16, 24, recipe=recipe)
    layer = nn.Linear(16, 24)
    layer.load_state_dict({k: v for k, v in built.state_dict().items() if k in ("weight", "bias")})
    qt.convert(layer, recipe)
    built.qualified_name = ""  # type: ignore[assignment]
    x = torch.randn(5, 16)
    assert_bitwise(layer(x), built(x))
    for (name, a), b in zip(step(built, x).items(), step(layer, x).values(), strict=True):
        assert_bitwise(b, a, name)
    assert not torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_a_module_used_twice_is_matched_by_either_name() -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": shared, "b": nn.Linear(16, 16), "lm_head": shared})
    report = qt.convert(model, "mxfp8", skip=["lm_head"])
    assert list(report.converted) == ["b"] and list(report.skipped) == ["a"] and not report.unused
    report = qt.convert(model, Rules({"lm_head": "bf16", "*": "rowwise"}))
    assert {name: str(r) for name, r in report.converted.items()} == {"a": "bf16", "b": "rowwise"}


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm": parametrizations.spectral_norm,
}


@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
def test_a_parametrization_can_be_removed_or_added_after_converting(kind: str) -> None:
    model = mlp()
    PARAMETRIZATIONS[kind](model[0])
    qt.convert(model, "tensorwise")
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is qt.Linear
    x = torch.randn(6, 16)
    y = model[0](x)
    PARAMETRIZATIONS[kind](model[2])
    step(model, x)
    assert not torch.equal(y, model[0](x))
    assert qt.revert(model) == ["0", "2"]
    parametrize.remove_parametrizations(model[2], "weight")
    assert type(model[0]) is type(model[2]) is nn.Linear


# Subclasses, and what is left alone.


def test_subclasses_without_their_own_forward_are_converted_and_keep_their_class() -> None:
    model = nn.Sequential(Plain(16, 16), nn.ReLU(), Plain(16, 16))
    qt.convert(model, "mxfp8")
    assert isinstance(model[0], Plain) and isinstance(model[0], qt.Linear)
    assert type(model[0]) is type(model[2])
    assert "plain" in repr(model[0]) and "recipe=mxfp8" in repr(model[0]) and repr(model[0]).startswith("Plain(")
    x = torch.randn(5, 16)
    y = model(x)
    assert not torch.equal(y, nn.functional.linear(x, model[0].weight, model[0].bias))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), through_torch_save(model)):
        assert type(twin[0]) is type(model[0]) and twin[0].weight is not model[0].weight
        assert_bitwise(twin(x), y)
    qt.revert(model)
    assert type(model[0]) is Plain
    twin = copy.deepcopy(model)
    assert type(twin[0]) is Plain


def test_each_layer_left_alone_has_its_reason() -> None:
    class Odd(nn.Linear):
        def __init__(self) -> None:
            super().__init__(16, 16)
            self.register_buffer("count", torch.ones(1))

    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(16, 2),
            "lazy": nn.LazyLinear(16),
            "odd": Odd(),
            "replaced": nn.Linear(16, 16),
            "untouched": nn.Linear(16, 16),
            "small": nn.Linear(8, 8),
            "head": nn.Linear(16, 11),
            "good": nn.Linear(16, 16),
        }
    )
    model["replaced"].forward = lambda x: x
    rules = Rules(
        [
            ModuleRule(pattern="untouched", recipe=None),
            ModuleRule(pattern="attention", recipe=None),
            ModuleRule(recipe="mxfp8", min_in_features=16),
            ModuleRule(pattern="lazy", recipe="mxfp8"),
        ]
    )
    little, unknown = (
        pytest.warns(UserWarning, match=m) for m in ("reached less than half", "name that matches 'tail'")
    )
    with little, unknown:
        report = qt.convert(model, rules, skip=["head", "tail"])
    assert list(report.converted) == ["good"]
    # untouched, small, head and three matrices of the attention by choice; its fourth, odd and replaced out of reach.
    counted = report.converted_parameters, report.chosen_parameters, report.unreached_parameters
    assert counted == (256, 256 + 64 + 176 + 768, 256 + 512)
    assert report.skipped == {
        "attention": "rule 'attention' leaves it untouched",
        "attention.out_proj": "nn.MultiheadAttention reads its weight without calling it",
        "lazy": "its weight has no shape yet; run one forward first",
        "odd": "it already has a buffer named 'count'",
        "replaced": "its forward was replaced on the instance",
        "untouched": "rule 'untouched' leaves it untouched",
        "small": "no rule matches it",
        "head": "skip pattern 'head'",
    }
    assert report.unused == ["tail"]
    assert report.others == {"MultiheadAttention": 1}
    assert model["odd"].count == 1
    model["attention"](*[torch.randn(3, 2, 16)] * 3)
    model["lazy"](torch.randn(2, 16))
    assert list(qt.convert(model, rules, skip=["head", "attention*", "odd"]).converted) == ["lazy", "good"]
    report = qt.convert(model, "mxfp8", skip=["odd", "replaced"])
    assert "attention" in report.converted and "attention.out_proj" in report.converted


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("masked", [False, True])
def test_torchs_encoder_is_quantized_in_eval_mode_too(masked: bool) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
    model.eval()
    x = torch.randn(2, 5, 16)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if masked else None
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=mask)
        qt.convert(model, "mxfp8")
        quantized = model(x, src_key_padding_mask=mask)
    trained = model(x, src_key_padding_mask=mask).detach()
    seen = slice(0, 3)
    assert torch.allclose(quantized[:, seen], trained[:, seen], atol=1e-5)
    assert not torch.allclose(quantized[:, seen], plain[:, seen], atol=1e-3)
    qt.revert(model)
    with torch.no_grad():
        assert_bitwise(model(x, src_key_padding_mask=mask), plain)


# Rules and the report.


def test_rules_choose_recipes_by_name_and_size_and_unused_ones_are_reported() -> None:
    model = nn.ModuleDict(
        {f"layers_{i}": nn.ModuleDict({"k_proj": nn.Linear(16, 16), "up": nn.Linear(16, 64)}) for i in (0, 1)}
    )
    rules = Rules(
        [
            ModuleRule(pattern="*.k_porj", recipe=None),
            ModuleRule(pattern="layers_1.k_proj", recipe=None),
            ModuleRule(pattern="layers_0.*", recipe="bf16"),
            ModuleRule(recipe="mxfp8", min_out_features=64),
            ModuleRule(recipe="rowwise", multiple_of=32),
        ]
    )
    with pytest.warns(UserWarning, match=r"no layer has a name that matches '\*\.k_porj'"):
        report = qt.convert(model, rules)
    assert {name: str(r) for name, r in report.converted.items()} == {
        "layers_0.k_proj": "bf16",
        "layers_0.up": "bf16",
        "layers_1.up": "mxfp8",
    }
    assert list(report.skipped) == ["layers_1.k_proj"]
    assert type(model["layers_1"]["k_proj"]) is nn.Linear
    assert report.unused == ["*.k_porj", "* (multiple_of=32)"]
    text = str(report)
    assert "converted 2 to bf16, 1 to mxfp8" in text
    assert "matched nothing: *.k_porj; did you mean 'k_proj'?" in text
    assert "matched nothing: * (multiple_of=32)" in text


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ("mxpf8", "no recipe 'mxpf8'; did you mean 'mxfp8'"),
        (Rules({"0": "rowwise", "2": "tensorwize"}), "no recipe 'tensorwize'; did you mean 'tensorwise'"),
        (Rules({"0": "rowwise", "2": ["mxfp8"]}), "a recipe is a name or a quaver.Recipe"),  # type: ignore[dict-item]
    ],
)
def test_a_misspelt_recipe_raises_before_anything_changes(recipe: Any, sentence: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=sentence):
        qt.convert(model, recipe)
    assert not any(isinstance(m, qt.Linear) for m in model.modules())
    with pytest.raises(ValueError, match=r"give a list of patterns: skip=\['lm_head'\]"):
        qt.convert(model, "mxfp8", skip="lm_head")


def test_converting_twice_changes_the_recipe_and_only_then_forgets_the_state() -> None:
    model = mlp()
    x = torch.randn(4, 16)
    qt.convert(model, "delayed")
    for _ in range(2):
        step(model, x)
    factor = model[0].factor.clone()
    qt.convert(model, "delayed")
    assert factor.all() and torch.equal(model[0].factor, factor)
    with pytest.warns(
        UserWarning, match="changes the recipe of 0 and drops the state of the previous one, and that of 1 other layers"
    ):
        qt.convert(model, recipes.delayed(format="e4m3"))
    assert not model[0].factor.any()
    qt.convert(model, "nvfp4")
    assert set(model.state_dict()) - set(mlp().state_dict()) == {"0.count", "2.count"}
    assert not model._forward_pre_hooks and not hasattr(model, DDP_IGNORES)
    step(model, x)
    assert model[0].count.tolist()[1] == 1
    qt.convert(model, "bf16")
    assert set(model.state_dict()) == set(mlp().state_dict())
    assert_bitwise(model(x), mlp_like(model)(x))


def mlp_like(model: nn.Module) -> nn.Module:
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    return twin


@pytest.mark.parametrize("recipe", RECIPES)
def test_reverting_restores_classes_state_hooks_and_output_bits(recipe: str) -> None:
    model = Tied()
    model._ddp_params_and_buffers_to_ignore = ["embed.weight"]  # type: ignore[assignment]
    model.register_forward_pre_hook(lambda m, a: None)
    tokens = torch.randint(11, (2, 7))
    before, keys, attributes = model(tokens), list(model.state_dict()), set(model.up.__dict__)
    report = qt.convert(model, recipe)
    model(tokens).sum().backward()
    assert qt.revert(model) == list(report.converted)
    assert [type(m) for m in model.modules()] == [type(m) for m in Tied().modules()]
    assert list(model.state_dict()) == keys and set(model.up.__dict__) == attributes
    assert len(model._forward_pre_hooks) == 1
    assert model._ddp_params_and_buffers_to_ignore == ["embed.weight"]
    assert_bitwise(model(tokens), before)


# Attention.

ATTENDING = [recipes.get(name, attention=True) for name in QUANTIZING]


def layers() -> nn.ModuleList:
    rope = qt.RotaryEmbedding(8)
    return nn.ModuleList(qt.TransformerLayer(16, 2, 32, groups=1, rope=rope) for _ in range(2))


@pytest.mark.parametrize("recipe", ATTENDING, ids=str)
def test_attention_is_quantized_as_in_a_layer_built_with_the_recipe(recipe: Recipe) -> None:
    (model, _), (linears, _) = layers(), layers()
    built = qt.TransformerLayer(16, 2, 32, groups=1, rope=qt.RotaryEmbedding(8), recipe=recipe)
    for layer in (model, linears):
        layer.load_state_dict(
            {name: value for name, value in built.state_dict().items() if name.endswith(("weight", "bias"))}
        )
    report = qt.convert(model, recipe)
    assert report.attention == {"attention.core": recipe} and not report.other_attention and not report.unused
    assert f"attention quantized: 1 to {recipe}" in str(report)
    qt.convert(linears, recipe.name)
    x = torch.randn(2, 6, 16)
    y = model(x)
    if not recipe.stochastic:  # the noise of each layer is its own
        assert_bitwise(y, built(x))
        assert not torch.equal(y, linears(x))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.attention.core.recipe is recipe
    qt.revert(model)
    assert model.attention.core.recipe is None


def test_rules_and_skip_reach_attention_by_its_name() -> None:
    model = layers()
    wanted = recipes.mxfp8(attention=True)
    rules = Rules({"0.attention.core": None, "1.attention.core": "mxfp8", "*": wanted})
    report = qt.convert(model, rules)
    assert not report.attention and not report.unused and len(report.converted) == 8
    assert model[0].attention.core.recipe is None and model[1].attention.core.recipe is recipes.mxfp8()
    report = qt.convert(model, wanted, skip=["1.attention.core"])
    assert report.attention == {"0.attention.core": wanted} and not report.unused
    report = qt.convert(model, Rules([ModuleRule(recipe=wanted, min_in_features=32)]))
    assert not report.attention, "the features of all heads are 16"
    qt.convert(model, "tensorwise")
    assert all(layer.attention.core.recipe is recipes.tensorwise() for layer in model)


def test_unsupported_attention_stays_and_is_reported() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2), "up": nn.Linear(16, 16)})
    recipe = recipes.tensorwise(attention=True)
    with pytest.warns(UserWarning, match="the recipe's attention=True quantizes nothing here"):
        report = qt.convert(model, recipe)
    assert report.other_attention == {"MultiheadAttention": 1} and not report.attention
    message = "attention stays in high precision, because it is not a DotProductAttention: 1 MultiheadAttention"
    assert message in str(report)
    model["ours"] = layers()[0]
    report = qt.convert(model, recipe)
    assert report.other_attention == {"MultiheadAttention": 1} and list(report.attention) == ["ours.attention.core"]
    assert not qt.convert(model, "tensorwise").other_attention
    assert qt.convert(mlp(), recipe).other_attention == {}


# Copies and files.


def through_torch_save(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), through_torch_save])
def test_copies_train_bit_for_bit_the_same(recipe: str, copied: Callable[[nn.Module], nn.Module]) -> None:
    model = mlp()
    qt.convert(model, recipe)
    x = torch.randn(5, 16)
    for _ in range(2):
        step(model, x)
    twin = copied(model)
    for _ in range(2):
        for (name, a), b in zip(step(model, x).items(), step(twin, x).values(), strict=True):
            assert_bitwise(b, a, name)
    for (name, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert_bitwise(b, a, name)


# Delayed scaling: the root rolls.


@pytest.fixture
def rolls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each roll rolled."""
    seen: list[int] = []
    real = rolling.roll

    def roll(layers: Any, *args: Any) -> None:
        layers = list(layers)
        seen.append(len(layers))
        real(layers, *args)

    monkeypatch.setattr("quaver.torch.state.history.roll.roll", roll)
    return seen


def test_the_root_rolls_once_at_the_start_of_each_training_forward(rolls: list[int]) -> None:
    model = mlp()
    qt.convert(model, "delayed")
    x = torch.randn(4, 16)
    model(x).sum().backward()
    assert rolls == [2] and not model[0].factor.any() and model[0].history[0].all()
    model(x).sum().backward()
    assert rolls == [2, 2] and model[0].factor.all() and model[0].history[-1].all()


def test_inside_an_autocast_only_the_autocast_rolls(rolls: list[int]) -> None:
    model = mlp()
    qt.convert(model, "delayed")
    gc.collect()
    x = torch.randn(4, 16)
    for _ in range(2):
        with qt.autocast("tensorwise"):
            model(x)
            model(x).sum().backward()
    assert len(rolls) == 2
    assert model[0].history[-1].all() and not model[0].history[1:-1].any()


@pytest.mark.parametrize("outer_first", [True, False])
def test_only_the_outermost_converted_model_rolls(outer_first: bool, rolls: list[int]) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.last = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(self.inner(x)))  # type: ignore[no-any-return]

    model = Twice()
    for part in (model, model.inner) if outer_first else (model.inner, model):
        qt.convert(part, "delayed")
    x = torch.randn(4, 16)
    model(x).sum().backward()
    assert rolls == [3]
    model(x).sum().backward()
    assert rolls == [3, 3] and model.inner[0].factor.all()
    qt.revert(model)
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_root_rolls_once_a_step(reentrant: bool, rolls: list[int]) -> None:
    model = nn.Sequential(mlp(), mlp())
    qt.convert(model[0], "delayed")
    x = torch.randn(4, 16, requires_grad=True)
    for _ in range(2):
        model[1](checkpoint(model[0], x, use_reentrant=reentrant)).sum().backward()
    assert len(rolls) == (0 if reentrant else 2)
    assert model[0][0].history[0].all()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_converted_model_compiles_whole_and_rolls() -> None:
    model = mlp()
    qt.convert(model, "delayed")
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 16)
    for _ in range(3):
        for m in (compiled, eager):
            m(x).sum().backward()
    assert model[0].factor.all()
    for (name, a), b in zip(eager.state_dict().items(), model.state_dict().values(), strict=True):
        assert_bitwise(b, a, name)
    for (name, a), b in zip(eager.named_parameters(), model.parameters(), strict=True):
        assert a.grad is not None
        assert_bitwise(b.grad, a.grad, name)


# Models of other libraries.


class OwnAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(count, 32, 64))
        self.down_proj = nn.Parameter(torch.zeros(count, 32, 32))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(count, 64))
        self.positions = nn.Parameter(torch.zeros(1, 64, 64))


@pytest.mark.parametrize(
    ("other", "parameters"),
    [
        (lambda: nn.Embedding(1000, 64), 0),
        (lambda: nn.Conv2d(64, 64, 3), 0),
        (lambda: nn.LayerNorm((64, 64)), 0),
        (lambda: OwnAttention(32, 2), 4 * 32 * 32),
        (lambda: Experts(4), 4 * 32 * 96),
        (lambda: nn.LSTM(32, 32), 2 * 4 * 32 * 32),
    ],
    ids=["embedding", "convolution", "norm", "attention", "experts", "LSTM"],
)
def test_the_share_counts_all_parameters_read_by_gemms(other: Callable[[], nn.Module], parameters: int) -> None:
    for size, warned in ((128, False), (32, parameters > 1024)):
        model = nn.ModuleDict({"linear": nn.Linear(size, size), "other": other()})
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            report = qt.convert(model, "mxfp8")
        assert (report.converted_parameters, report.unreached_parameters) == (size * size, parameters)
        assert [str(w.message).startswith("convert reached less than half") for w in seen] == [True] * warned
        qt.revert(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert qt.convert(model, "mxfp8", skip=["other", "other.*"]).unreached_parameters == 0


def test_a_weight_quantized_by_another_library_gives_a_clear_error() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    block = qt.LayerNormMLP(64, 64, recipe="mxfp8")
    qt.convert(model, "mxfp8")
    for module in (model, block):
        quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
        for x in (torch.randn(4, 64), torch.randn(4, 64, requires_grad=True)):
            with pytest.raises(
                ValueError, match=r"Linear\(64 → 64\) has a weight of class \w+.*call quaver.torch.revert\(model\) "
            ):
                module(x)
    qt.revert(model)
    with pytest.warns(UserWarning, match="changed nothing(.|\n)*quantized by another library"):
        qt.convert(model, "mxfp8")
    assert model(torch.randn(4, 64)).isfinite().all()


def test_a_layer_made_with_its_recipe_draws_the_noise_of_its_name_once_converted() -> None:
    noises = []
    for recipe in ("nvfp4", None):
        model = nn.Sequential(qt.Linear(32, 32, bias=False, recipe=recipe))
        with torch.no_grad():
            model[0].weight.copy_(torch.eye(32))
        qt.convert(model, "nvfp4")
        assert int(model[0].count[2]) == -1
        x = torch.linspace(-1, 1, 16 * 32).view(16, 32).requires_grad_()
        model(x).backward(torch.linspace(-2, 3, 16 * 32).view(16, 32))
        noises.append(x.grad)
    assert torch.equal(*noises)

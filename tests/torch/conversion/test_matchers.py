"""What convert reaches beside nn.Linear, against their own forward: subclasses, Conv1D, packed attention, experts."""

import contextlib
import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

import quaver.torch as qt
from quaver import recipes
from quaver.torch.conversion.matchers import experts, linears
from quaver.torch.linear.linear import Quantizable
from tests.close import assert_bitwise
from tests.pairs import alternating, case_name, pairs
from tests.torch.conversion.families import tiny, tokens

QUANTIZING = [name for name in recipes.RECIPES if name != "bf16"]
STATELESS = [name for name in QUANTIZING if recipes.get(name).delayed is None]


def gradients(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """The output of a run, and all parameters' gradients for a fixed output gradient."""
    model.zero_grad()
    y = run(model)
    torch.manual_seed(3)
    y.backward(torch.randn_like(y))
    return {"": y.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def assert_near(a: dict[str, Tensor], b: dict[str, Tensor], bound: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        error = (a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=1e-30)
        assert error <= bound, f"{name}: {error:.2e}"


# Subclasses of nn.Linear that define `forward`.


class Same(nn.Linear):
    """Computes the same as nn.Linear, like FalconLinear."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.mT
        return y if self.bias is None else y + self.bias


class Rescaled(nn.Linear):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-1e3, 1e3))


class LoRA(nn.Linear):
    """Adds weights that start at zero, so that initial outputs equal nn.Linear's."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.up = nn.Parameter(torch.zeros(sizes[1], 4))
        self.down = nn.Parameter(torch.randn(4, sizes[0]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)


class InTraining(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else super().forward(x.relu())


class Detached(nn.Linear):
    """Computes the same outputs and other gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.detach(), self.weight, self.bias)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("kind", [FalconLinear, Same])
@pytest.mark.parametrize("bias", [True, False])
def test_a_subclass_that_computes_the_same_is_converted(kind: type[nn.Linear], bias: bool) -> None:
    layer, plain = kind(32, 16, bias=bias), nn.Linear(32, 16, bias=bias)
    plain.load_state_dict(layer.state_dict())
    for module in (layer, plain):
        assert list(qt.convert(module, "mxfp8").converted) == [""]
    assert isinstance(layer, kind) and isinstance(layer, qt.Linear)
    x = torch.randn(5, 32)
    run = lambda m: m(x)  # noqa: E731
    for (name, a), b in zip(gradients(layer, run).items(), gradients(plain, run).values(), strict=True):
        assert_bitwise(a, b, name)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is type(layer)
        assert_bitwise(twin(x), layer(x))
    assert qt.revert(layer) == [""] and type(layer) is kind


@pytest.mark.parametrize("kind", [Clamped, LoRA, InTraining, Detached, Counting])
def test_a_subclass_that_computes_something_else_is_left_unchanged(kind: type[nn.Linear]) -> None:
    layer = kind(32, 16)
    attributes, parameters = dict(layer.__dict__), {n: p.clone() for n, p in layer.named_parameters()}
    with pytest.warns(UserWarning, match=rf"changed nothing(.|\n)*{kind.__name__} overrides forward"):
        qt.convert(layer, "mxfp8")
    assert type(layer) is kind and layer.__dict__ == attributes
    assert all(torch.equal(p, parameters[n]) for n, p in layer.named_parameters())


@pytest.mark.parametrize(
    "around", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["inference", "autocast"]
)
def test_a_subclass_is_probed_independently_of_the_call_context(around: Callable[[], Any]) -> None:
    model = nn.Sequential(FalconLinear(32, 32))
    with around():
        report = qt.convert(model, "mxfp8")
    assert "0" in report.converted


def test_a_subclass_is_probed_through_its_instance() -> None:
    model = nn.Sequential(Rescaled(16, 16), Rescaled(16, 16))
    model[1].scale = 2.0
    report = qt.convert(model, "mxfp8")
    assert list(report.converted) == ["0"] and list(report.skipped) == ["1"]


# Conv1D.


def conv1d(n: int = 24, k: int = 32) -> tuple[Conv1D, nn.Linear]:
    """A Conv1D and an nn.Linear with the same weight."""
    conv, linear = Conv1D(n, k), nn.Linear(k, n)
    with torch.no_grad():
        conv.bias.normal_()
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    return conv, linear


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_a_conv1d_equals_the_linear_layer_of_its_transpose(recipe: str) -> None:
    conv, linear = conv1d()
    for module in (conv, linear):
        qt.convert(module, recipe)
    x = torch.randn(2, 5, 32)
    for _ in range(3):
        a, b = (gradients(module, lambda m: m(x)) for module in (conv, linear))
        a["weight"] = a["weight"].t()
        assert_near(a, b, 1e-6)
    for name in ("history", "factor", "count"):
        assert (name in conv._buffers) == (name in linear._buffers)
        if name in conv._buffers:
            assert torch.equal(conv._buffers[name], linear._buffers[name])
    assert conv.weight.grad.stride() == conv.weight.stride()


def test_a_conv1d_that_no_recipe_quantizes_is_its_own_bit_for_bit() -> None:
    conv, _ = conv1d()
    x = torch.randn(3, 32)
    before = gradients(conv, lambda m: m(x))
    qt.convert(conv, "bf16")
    for (name, a), b in zip(gradients(conv, lambda m: m(x)).items(), before.values(), strict=True):
        assert_bitwise(a, b, name)
    qt.convert(conv, "mxfp8")
    with qt.autocast(enabled=False):
        assert_bitwise(conv(x), before[""])
    assert not torch.equal(conv(x), before[""])
    assert qt.revert(conv) == [""] and type(conv) is Conv1D
    assert_bitwise(conv(x), before[""])


def test_a_conv1d_follows_autocast_and_refuses_another_dtype() -> None:
    conv, _ = conv1d()
    qt.convert(conv, "mxfp8")
    x = torch.randn(3, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert conv(x).dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"Conv1D has torch\.float32 weights and got a torch\.bfloat16 input"):
        conv(x.bfloat16())


# nn.MultiheadAttention.


def options() -> Iterator[dict[str, Any]]:
    for batch_first, bias in itertools.product((True, False), repeat=2):
        yield {"batch_first": batch_first, "bias": bias}
    yield {"kdim": 24, "vdim": 40}
    yield {"add_bias_kv": True}
    yield {"add_zero_attn": True, "add_bias_kv": True, "batch_first": True}
    yield {"kdim": 24, "vdim": 40, "bias": False, "batch_first": True}


def inputs_of(module: nn.MultiheadAttention, shared: str, batched: bool = True) -> list[Tensor]:
    """Query, key and value: one shared tensor, a shared key and value, or three tensors."""
    torch.manual_seed(1)
    lengths = (5, 7) if shared != "all" else (5, 5)
    shapes = [(lengths[0], module.embed_dim), (lengths[1], module.kdim), (lengths[1], module.vdim)]
    if batched:
        shapes = [(2, *s) if module.batch_first else (s[0], 2, s[1]) for s in shapes]
    q, k, v = (torch.randn(s) for s in shapes)
    if module.kdim == module.embed_dim == module.vdim:
        return {"all": [q, q, q], "two": [q, k, k], "none": [q, k, v]}[shared]
    return [q, k, v]


def attention(**given: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 2, **given)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return module


def masks(module: nn.MultiheadAttention, length: int, keys: int, batched: bool) -> Iterator[dict[str, Any]]:
    causal = torch.ones(length, keys, dtype=torch.bool).triu(1)
    padding = torch.zeros((2, keys) if batched else (keys,), dtype=torch.bool)
    padding[..., -1:] = True
    yield {}
    yield {"need_weights": False}
    yield {"attn_mask": causal, "need_weights": False}
    yield {"attn_mask": causal.float() * -3, "average_attn_weights": False}
    yield {"attn_mask": torch.randn((4 if batched else 2), length, keys)}
    yield {"key_padding_mask": padding, "attn_mask": causal}
    yield {"key_padding_mask": padding, "need_weights": False}
    if length == keys:
        yield {"attn_mask": causal, "is_causal": True, "need_weights": False}
        yield {"attn_mask": causal, "is_causal": True, "need_weights": True}


@pytest.mark.parametrize(
    ("batched", "shared", "given"), pairs((True, False), ("all", "two", "none"), list(options())), ids=case_name
)
def test_packed_attention_equals_torch(
    given: dict[str, Any], shared: str, batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With unquantized GEMMs, outputs, attention weights and all gradients equal torch's."""
    module = attention(**given)
    converted = copy.deepcopy(module)
    qt.convert(converted, "mxfp8")
    monkeypatch.setattr(linears, "product", lambda m, x, w, b, recipe: F.linear(x, w, b))
    converted.out_proj.recipe = recipes.get("bf16")
    qkv = inputs_of(module, shared, batched)
    lengths = [t.shape[-2 if module.batch_first or not batched else 0] for t in qkv]
    for mask in masks(module, lengths[0], lengths[1], batched):
        if mask.get("is_causal") and (given.get("add_bias_kv") or given.get("add_zero_attn")):
            continue
        outputs, grads = [], []
        for m in (converted, module):
            xs = {id(t): t.clone().requires_grad_() for t in qkv}
            m.zero_grad()
            y, weights = m(*[xs[id(t)] for t in qkv], **mask)
            (y.square().sum() + (0 if weights is None else weights.square().sum())).backward()
            outputs.append((y, weights))
            grads.append([*(x.grad for x in xs.values()), *(p.grad for p in m.parameters())])
        (y, weights), (expected, expected_weights) = outputs
        assert y.shape == expected.shape and (weights is None) == (expected_weights is None)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        if weights is not None:
            assert weights.shape == expected_weights.shape
            torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-5)
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", QUANTIZING)
def test_packed_attention_quantizes_its_projections_and_trains(recipe: str) -> None:
    module = attention(batch_first=True)
    plain = copy.deepcopy(module)
    report = qt.convert(module, recipe)
    assert list(report.converted) == ["", "out_proj"] and report.share == 1
    assert isinstance(module, nn.MultiheadAttention)
    for shared in ("all", "two", "none"):
        qkv = inputs_of(module, shared)
        for m in (module, plain):
            m.zero_grad()
            for _ in range(2):
                m(*qkv)[0].square().sum().backward()
        y, expected = module(*qkv)[0], plain(*qkv)[0]
        assert not torch.equal(y, expected)
        assert (y - expected).norm() < 0.35 * expected.norm()
        for (name, a), b in zip(module.named_parameters(), plain.parameters(), strict=True):
            if name != "in_proj_bias":
                assert (a.grad - b.grad).norm() < 0.6 * b.grad.norm(), name
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(twin) is type(module)
        if not recipes.get(recipe).stochastic:
            assert_bitwise(twin(*qkv)[0], module(*qkv)[0])
    assert qt.revert(module) == ["", "out_proj"] and type(module) is nn.MultiheadAttention
    assert list(module.state_dict()) == list(plain.state_dict())
    assert_bitwise(module(*qkv)[0], plain(*qkv)[0])


@pytest.mark.parametrize(
    ("recipe", "while_frozen", "bias"),
    pairs(("tensorwise", "rowwise", "mxfp8"), (False, True), (False, True)),
    ids=case_name,
)
def test_packed_attention_reads_the_rows_that_a_call_asks_for(recipe: str, while_frozen: bool, bias: bool) -> None:
    """Query rows start at row 0 of the weight; still, the cache of the full weight is not used for them."""
    attention = nn.MultiheadAttention(32, 4, batch_first=True, bias=bias)
    qt.convert(attention, recipe)
    fresh = copy.deepcopy(attention)
    x, other = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    with qt.frozen(attention) if while_frozen else contextlib.nullcontext():
        own = attention(x, x, x)[0]
        crossed = attention(x, other, other)[0]
        again = attention(x, x, x)[0]
    assert_bitwise(crossed, fresh(x, other, other)[0])
    assert_bitwise(again, own)


def test_packed_attention_that_no_recipe_quantizes_is_torchs_bit_for_bit() -> None:
    module = attention(batch_first=True)
    plain = copy.deepcopy(module)
    qt.convert(module, "bf16")
    qkv = inputs_of(module, "all")
    assert_bitwise(module(*qkv)[0], plain(*qkv)[0])
    qt.convert(module, "mxfp8")
    with qt.autocast(enabled=False):
        assert_bitwise(module(*qkv)[0], plain(*qkv)[0])


@pytest.mark.parametrize("rules", [{"a": "bf16", "*": "mxfp8"}, {"a": None, "*": "mxfp8"}], ids=str)
def test_the_output_projection_is_not_converted_where_torchs_formula_reads_it(rules: dict[str, Any]) -> None:
    model = nn.ModuleDict({"a": attention(batch_first=True), "up": nn.Linear(32, 32)})
    plain = copy.deepcopy(model)
    report = qt.convert(model, rules)
    assert "a.out_proj" not in report.converted and "without calling it" in report.skipped["a.out_proj"]
    qkv = inputs_of(model["a"], "all")
    assert_bitwise(model["a"](*qkv)[0], plain["a"](*qkv)[0])
    assert list(qt.convert(plain, "bf16").converted) == ["a", "a.out_proj", "up"]


def test_is_causal_without_a_mask_is_refused() -> None:
    module = attention()
    qt.convert(module, "mxfp8")
    with pytest.raises(ValueError, match="attn_mask is None; give both"):
        module(*inputs_of(module, "all"), is_causal=True)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"attn_mask": torch.ones(5, 5, dtype=torch.uint8)}, r"attn_mask is torch\.uint8; give bool"),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.int64)}, r"attn_mask is torch\.int64; give bool"),
        ({"key_padding_mask": torch.ones(2, 5, dtype=torch.uint8)}, r"key_padding_mask is torch\.uint8; give bool"),
        ({"attn_mask": torch.zeros(1, 5)}, r"attn_mask is \[1, 5\]; give \[5, 5\] or \[4, 5, 5\]"),
        ({"attn_mask": torch.zeros(2, 5, 5)}, r"attn_mask is \[2, 5, 5\]; give"),
        ({"attn_mask": torch.zeros(2, 2, 5, 5)}, r"attn_mask is \[2, 2, 5, 5\]; give"),
        ({"key_padding_mask": torch.zeros(1, 5, dtype=torch.bool)}, r"key_padding_mask is \[1, 5\]; give \[2, 5\]"),
        ({"key_padding_mask": torch.zeros(2, 1, dtype=torch.bool)}, r"key_padding_mask is \[2, 1\]; give \[2, 5\]"),
    ],
)
def test_a_mask_that_torch_refuses_is_refused(masks: dict[str, Tensor], message: str, need_weights: bool) -> None:
    module = attention(batch_first=True)
    qkv = inputs_of(module, "all")
    with pytest.raises((AssertionError, RuntimeError)):
        module(*qkv, need_weights=need_weights, **masks)
    qt.convert(module, "mxfp8")
    with pytest.raises(ValueError, match=message):
        module(*qkv, need_weights=need_weights, **masks)


# Stacked experts.

DECORATED = ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "aria_text", "jamba", "phimoe"]
UNDECORATED = ["llama4_text", "jetmoe", "dbrx"]


def stacks(model: nn.Module) -> list[Quantizable]:
    return [m for m in model.modules() if isinstance(m, Quantizable) and not isinstance(m, nn.Linear)]


@pytest.mark.parametrize("family", [*DECORATED, *UNDECORATED])
def test_experts_in_high_precision_equal_the_original_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sorted tokens and unquantized grouped GEMMs, the loss and all gradients equal the original model."""
    model, ours = tiny(family), tiny(family)
    x = tokens()
    qt.convert(ours, "mxfp8", skip=[n for n, m in ours.named_modules() if isinstance(m, nn.Linear)])
    assert len(stacks(ours)) >= 1 and not any(isinstance(m, qt.Linear) for m in ours.modules())
    called = []

    multiply = experts.multiply

    def unquantized(*args: Any) -> Tensor:
        called.append(args[-2])
        return multiply(*args[:-2], None, args[-1])

    monkeypatch.setattr(experts, "multiply", unquantized)
    results = []
    for m in (ours, model):
        m.zero_grad()
        # Routers may draw noise.
        torch.manual_seed(2)
        loss = m(input_ids=x, labels=x).loss
        loss.backward()
        results.append({"": loss.detach(), **{n: p.grad for n, p in m.named_parameters() if p.grad is not None}})
    assert called and all(recipe.name == "mxfp8" for recipe in called)
    assert_near(*results, 2e-5)


@pytest.mark.parametrize(
    ("recipe", "family"),
    alternating([*STATELESS, "delayed"], ["mixtral", "gpt_oss", "llama4_text"], ["mxfp8", "nvfp4", "delayed"]),
)
def test_experts_are_quantized_train_and_come_back(family: str, recipe: str) -> None:
    model, plain = (tiny(family, num_hidden_layers=1) for _ in range(2))
    x = tokens()
    report = qt.convert(model, recipe)
    assert report.share >= 0.9 and stacks(model)
    a, b = (m(input_ids=x, labels=x).loss for m in (model, plain))
    a.backward(), b.backward()
    assert not torch.equal(a, b) and abs(a - b) < 0.05 * abs(b)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if "experts" in name and q.grad is not None and "bias" not in name:
            assert p.grad is not None and (p.grad - q.grad).norm() < 0.8 * q.grad.norm(), name
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    back = tiny(family, num_hidden_layers=1)
    keys = list(back.state_dict())
    back.load_state_dict({k: v for k, v in model.state_dict().items() if k in keys})
    qt.revert(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in back.modules()] and list(model.state_dict()) == keys
    with torch.no_grad():
        assert_bitwise(model.eval()(input_ids=x).logits, back.eval()(input_ids=x).logits)


def test_experts_are_recognized_by_parameter_names_too() -> None:
    model = tiny("mixtral")
    report = qt.convert(model, "mxfp8", skip=["layers.0.mlp.experts.down_proj"])
    assert report.skipped["model.layers.0.mlp.experts"] == "skip pattern 'layers.0.mlp.experts.down_proj'"
    assert "model.layers.1.mlp.experts" in report.converted


def test_experts_noise_differs_from_step_to_step_and_repeats_with_the_count() -> None:
    model = tiny("mixtral")
    qt.convert(model, "nvfp4")
    layer = stacks(model)[0]
    assert layer.count.tolist() == [[0, 0, -1]] * 8
    x = tokens()

    def step() -> Tensor:
        model.zero_grad()
        model(input_ids=x, labels=x).loss.backward()
        return layer.down_proj.grad.clone()

    state = copy.deepcopy(model.state_dict())
    first, second = step(), step()
    assert not torch.equal(first, second)
    # Rotated transposes of inputs and gradients have drawn noise, for each matrix with tokens.
    assert (layer.count[:, 1] == 2).any() and set(layer.count[:, 2].tolist()) == {-1}
    model.load_state_dict(state)
    assert_bitwise(step(), first)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4_text", "jetmoe"])
def test_experts_are_copied_and_pickled(family: str) -> None:
    model = tiny(family)
    qt.convert(model, "mxfp8")
    model.eval()
    x = tokens()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        y = model(input_ids=x).logits
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
            assert_bitwise(twin(input_ids=x).logits, y)


def test_ids_of_other_ranks_experts_add_nothing() -> None:
    model = tiny("mixtral")
    qt.convert(model, "mxfp8")
    layer = stacks(model)[0]
    h, ids, weights = torch.randn(6, 64), torch.randint(4, (6, 2)), torch.rand(6, 2)
    plain = layer(h, ids, weights)
    elsewhere = torch.cat([ids, torch.full((6, 1), 4)], 1)
    y = layer(h, elsewhere, torch.cat([weights, torch.ones(6, 1)], 1))
    torch.testing.assert_close(y, plain)


def test_checkpointing_gives_experts_the_same_gradients() -> None:
    grads = []
    for checkpointed in (False, True):
        model = tiny("mixtral")
        qt.convert(model, "mxfp8")
        if checkpointed:
            model.activation_checkpointing_enable()
        model.train()
        x = tokens()
        model(input_ids=x, labels=x).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    for name in grads[0]:
        assert_bitwise(grads[1][name], grads[0][name], name)

"""Test weights stored only in eight (or four) bits: the layer equals one with the dequantized weight."""

import copy
import inspect
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import quaver.torch as qt
from quaver.recipes import RECIPES
from quaver.torch.linear import stored_weight
from quaver.torch.linear.linear import Linear
from quaver.torch.quantized_tensor import memory_of
from quaver.torch.state.layer_state import state_of
from tests.close import assert_bitwise, assert_close

NAMES = [
    name
    for name, build in RECIPES.items()
    if (spec := build().fprop.b) and spec.format.name in stored_weight.CODE_DTYPES
]
QUANTIZED = pytest.mark.parametrize("name", NAMES)
#: Their weights take no gradient.
FOUR_BITS = ("nvfp4", "mxfp4")
EIGHT = pytest.mark.parametrize("name", [n for n in NAMES if n not in FOUR_BITS])
N, K = 48, 80


def layer(
    name: str, *, keep: str | None = None, dtype: torch.dtype = torch.float32, seed: int = 0, k: int = K
) -> Linear:
    torch.manual_seed(seed)
    with qt.quantized_init(name, keep_initial=keep):
        return qt.Linear(k, N, dtype=dtype)


def plain(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, k: int = K) -> Linear:
    """A layer with an ordinary weight, the same as `layer` was initialized with."""
    torch.manual_seed(seed)
    return qt.Linear(k, N, dtype=dtype)


def run(net: nn.Module, name: str | None, x: Tensor) -> dict[str, Tensor]:
    """Output and gradients."""
    x = x.detach().requires_grad_()
    net.zero_grad()
    with qt.autocast(name) if name else qt.autocast(enabled=False):
        y = net(x)
    y.square().sum().backward()
    assert x.grad is not None
    grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    return {"output": y.detach(), "grad_input": x.grad, **grads}


# What it holds, and what it computes.


def test_a_format_without_a_torch_dtype_gives_a_clear_error() -> None:
    with pytest.raises(ValueError, match="'mxfp6' has weights in e2m3, for whose codes torch has no dtype"):
        qt.quantized_init("mxfp6")
    model = nn.Sequential(nn.Linear(64, 64))
    saved = qt.quantize_weights(model, "mxfp6")
    assert not saved.layers and "torch has no dtype" in saved.skipped["0"] and model[0].weight.dtype is torch.float32


@QUANTIZED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_parameter_holds_the_codes_of_nn_linears_initial_values(name: str, dtype: torch.dtype) -> None:
    one, other = layer(name, dtype=dtype), plain(name, dtype=dtype)
    spec = RECIPES[name]().fprop.b
    assert spec is not None
    q, expected = one.weight.unwrap(), qt.quantize(other.weight, spec)
    assert_bitwise(q.codes(), expected.codes())
    assert_bitwise(q.scales(), expected.scales())
    assert isinstance(one.weight, nn.Parameter) and isinstance(one.weight, qt.QuantizedTensor)
    assert one.weight.shape == (N, K) and one.weight.dtype is dtype
    assert set(one.state_dict()) - {"weight", "bias", "weight_scale", "weight_factor"} == set()
    held = one.weight.nbytes + sum(t.nbytes for t in one.buffers())
    assert held <= N * K * spec.format.bits / 8 * 1.15 + 4 * N
    assert_bitwise(one.bias, other.bias)


@EIGHT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward_equal_a_layer_quantized_at_each_step(name: str, dtype: torch.dtype) -> None:
    one, other, x = layer(name, dtype=dtype), plain(name, dtype=dtype), torch.randn(7, K, dtype=dtype)
    # Where dgrad's blocks lie otherwise, its operand is quantized from what fprop's dequantizes to.
    seen = copy.deepcopy(other)
    seen.set_weight(one.weight.dequantize().float())
    results, expected, at = run(one, name, x), run(other, name, x), run(seen, name, x)
    assert_bitwise(results["output"], expected["output"])
    assert_bitwise(results["bias"], expected["bias"])
    assert_bitwise(results["weight"].to(dtype), expected["weight"])
    assert_bitwise(results["grad_input"], at["grad_input"])
    assert results["weight"].dtype is torch.float32


def test_four_bits_run_forward_and_give_the_inputs_gradient() -> None:
    one, other, x = layer("nvfp4", k=64), plain("nvfp4", k=64), torch.randn(16, 64)
    other.weight.requires_grad_(False)
    results, expected = run(one, "nvfp4", x), run(other, "nvfp4", x)
    assert list(results) == list(expected) == ["output", "grad_input", "bias"]
    for key, value in expected.items():
        assert_bitwise(results[key], value, key)


@QUANTIZED
@pytest.mark.parametrize("other", ["tensorwise", "mxfp8", "rowwise_bf16_wgrad", "bf16", None])
def test_another_recipe_or_none_computes_with_the_decoded_codes(name: str, other: str | None) -> None:
    one, x = layer(name), torch.randn(7, K)
    reference = plain(name)
    reference.set_weight(one.weight.dequantize().float())
    results, expected = run(one, other, x), run(reference, other, x)
    for key in results:
        assert_close(key, results[key], expected[key], 1e-6)


@QUANTIZED
@pytest.mark.parametrize("recipe", [*NAMES, None])
def test_no_high_precision_copy_remains(name: str, recipe: str | None) -> None:
    """Neither by autograd, nor on the layer."""
    # Small operands remember their decoded values.
    one, saved = layer(name, k=128), []

    def pack(t: Tensor) -> Tensor:
        saved.append(memory_of(t))
        return t

    x = torch.randn(4, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), qt.autocast(recipe or "bf16"):
        y = one(x)
    y.sum().backward()
    assert not any(t.numel() == N * 128 and t.element_size() > 1 for t in saved)
    if state_of(one).weights is not None:
        rest = state_of(one).weights
        assert not rest.entries


# Where it goes.


@QUANTIZED
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_compute_the_same(name: str, how: str) -> None:
    one, x = layer(name, keep="cpu"), torch.randn(5, K)
    if how == "deepcopy":
        other = copy.deepcopy(one)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(one))
    else:
        buffer = io.BytesIO()
        torch.save(one, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    results, expected = run(other, name, x), run(one, name, x)
    assert list(results) == list(expected)
    for key, value in expected.items():
        assert_bitwise(results[key], value, key)
    assert memory_of(other.weight).data_ptr() != memory_of(one.weight).data_ptr() and qt.initial_value(other) is None


@QUANTIZED
def test_dtypes_and_devices_move_everything_but_the_codes(name: str) -> None:
    one = layer(name)
    before, parameter = {k: v.clone() for k, v in one.state_dict().items()}, one.weight
    one.bfloat16()
    assert one.weight is parameter and one.bias.dtype is torch.bfloat16 and one.weight_dtype is torch.bfloat16
    for key in set(before) - {"bias"}:
        assert_bitwise(one.state_dict()[key], before[key], key)
    assert run(one, name, torch.randn(3, K, dtype=torch.bfloat16))["output"].dtype is torch.bfloat16
    one.to("meta")
    assert all(t.is_meta for t in (*one.parameters(), *one.buffers()))


@QUANTIZED
def test_state_dicts_round_trip_through_safetensors(name: str, tmp_path: object) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    one, other = layer(name), layer(name, seed=1)
    data = safetensors.save(one.state_dict())
    other.load_state_dict(safetensors.load(data))
    for key, value in one.state_dict().items():
        assert_bitwise(other.state_dict()[key], value, key)
    x = torch.randn(3, K)
    with qt.autocast(name):
        assert_bitwise(other(x), one(x))


@QUANTIZED
@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_in_high_precision_is_quantized_on_load(name: str, assign: bool) -> None:
    one, other = plain(name, seed=1), layer(name, keep="cpu")
    with qt.autocast(name), torch.no_grad():
        other(torch.randn(2, K))
    other.load_state_dict({k: v.clone() for k, v in one.state_dict().items()}, assign=assign)
    x = torch.randn(3, K)
    with qt.autocast(name), torch.no_grad():
        assert_bitwise(other(x), one(x))
    assert_bitwise(qt.initial_value(other), one.weight.detach())
    if name not in FOUR_BITS:
        assert run(other, name, x)["weight"].dtype is torch.float32


@QUANTIZED
def test_a_quantized_checkpoint_for_an_ordinary_layer_gives_a_clear_error(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"quantized in the checkpoint.*quantize_weights"):
        plain(name).load_state_dict(layer(name).state_dict(), strict=False)


def test_scales_of_another_kind_in_the_checkpoint_are_an_error() -> None:
    # One block a row in both, exponents in the one and float32 in the other.
    with pytest.raises(RuntimeError, match=r"weight_scale.*uint8.*float32.*quantize_weights"):
        layer("rowwise", k=32).load_state_dict(layer("mxfp8", k=32).state_dict())


# What optimizers do.


@EIGHT
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_that_would_write_to_codes_is_stopped(name: str, kind: type[torch.optim.Optimizer]) -> None:
    one = layer(name)
    run(one, name, torch.randn(4, K))
    if kind is torch.optim.Adagrad:
        optimizer: torch.optim.Optimizer = torch.optim.SGD([one.weight], lr=0.1, momentum=0.9)
    else:
        optimizer = kind(one.parameters())
    before = memory_of(one.weight).view(torch.uint8).clone()
    with pytest.raises(ValueError, match=rf"{type(optimizer).__name__}.*set_weight"):
        optimizer.step()
    assert_bitwise(memory_of(one.weight).view(torch.uint8), before)


@EIGHT
def test_training_by_copies_in_high_precision(name: str) -> None:
    """Train like an optimizer of quantized weights: step a copy and write it back."""
    one, other = layer(name, keep="cpu"), plain(name)
    x, target = torch.randn(32, K), torch.randn(32, N)
    master = qt.initial_value(one.weight)
    assert master is not None
    master = master.clone().requires_grad_()
    qt.drop_initial_value(one)
    assert qt.initial_value(one) is None
    ours, theirs = torch.optim.AdamW([master], lr=1e-2), torch.optim.AdamW([other.weight], lr=1e-2)
    for _ in range(3):
        for net in (one, other):
            net.zero_grad()
            with qt.autocast(name):
                (net(x) - target).square().sum().backward()
        master.grad = one.weight.grad
        ours.step()
        one.set_weight(master)
        theirs.step()
        with qt.autocast(name):
            assert_bitwise(one(x), other(x))


@QUANTIZED
def test_set_weight_writes_in_place_and_the_next_forward_sees_it(name: str) -> None:
    one, x = layer(name), torch.randn(4, K)
    weight: Any = one.weight
    places = [t.data_ptr() for t in (*weight.tensors(), *one.buffers())]
    with qt.autocast(name), torch.no_grad():
        one(x)
        value = torch.randn(N, K) * 100
        one.set_weight(value)
        other = plain(name)
        other.set_weight(value)
        assert_bitwise(one(x), other(x))
    assert one.weight is weight and [t.data_ptr() for t in (*weight.tensors(), *one.buffers())] == places
    with pytest.raises(ValueError, match=r"shape \(3, 3\)"):
        one.set_weight(torch.randn(3, 3))


def test_codes_of_another_shape_are_refused_and_without_a_third_axis_accepted() -> None:
    with qt.quantized_init("tensorwise"):
        one, other, transposed = qt.Linear(16, 32), qt.Linear(16, 32), qt.Linear(32, 16, bias=False)
    state = one.state_dict()
    codes = state["weight"]
    assert (
        codes.dtype is torch.uint8
        and codes.shape == (32, 16, 1)
        and codes.data_ptr() == memory_of(one.weight).data_ptr()
    )
    for same in (codes, codes.squeeze(-1), memory_of(one.weight)):
        other.set_weight(torch.zeros(32, 16))
        other.load_state_dict(state | {"weight": same})
        assert torch.equal(other.weight, one.weight)
    del state["bias"]
    for same in (codes, codes.squeeze(-1)):
        with pytest.raises(RuntimeError, match="size mismatch for weight"):
            transposed.load_state_dict(state | {"weight": same})


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", None])
def test_unfrozen_four_bit_weights_give_a_clear_error(recipe: str | None) -> None:
    with qt.quantized_init("nvfp4"):
        one, block = qt.Linear(32, 16), qt.MLP(32, 64, normalization="RMSNorm")
    for net in (one, block):
        net.requires_grad_()
        with qt.autocast(recipe or "bf16"):
            with pytest.raises(ValueError, match=r"four bits has no gradient.*requires_grad_\(False\)"):
                net(torch.randn(4, 32))
            with torch.no_grad():
                net(torch.randn(4, 32))


# Meta, contexts and bad input.


def test_initial_values_are_dropped_for_a_whole_model_and_missing_for_other_layers() -> None:
    net = nn.Sequential(layer("mxfp8", keep="cpu"), layer("mxfp8", keep="cpu"))
    assert all(qt.initial_value(one) is not None for one in net)
    qt.drop_initial_value(net)
    assert all(qt.initial_value(one) is None for one in net)
    with pytest.raises(ValueError, match="not the weight of a layer"):
        qt.initial_value(torch.zeros(2))


@QUANTIZED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_a_weight_that_is_replaced_by_another_kind_raises(name: str, dtype: torch.dtype) -> None:
    one = layer(name)
    one.weight = nn.Parameter(torch.zeros(N, K).to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match=r"without scales.*set_weight"):
        one(torch.randn(3, K))


def test_bad_input_gives_a_clear_error() -> None:
    with pytest.raises(ValueError, match="bf16 quantizes no weight"):
        qt.quantized_init("bf16")
    with pytest.raises(ValueError, match="keep_initial"):
        qt.quantized_init("mxfp8", keep_initial="gpu")
    with qt.quantized_init("mxfp8"), pytest.raises(ValueError, match="float64"):
        qt.Linear(4, 4, dtype=torch.float64)


# Models that exist already.


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64)
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(self.embedding(ids)))
        return y


@pytest.fixture
def tied() -> Iterator[Tied]:
    torch.manual_seed(0)
    yield Tied()


@QUANTIZED
def test_quantizing_a_model_changes_no_output_and_says_what_it_saves(name: str, tied: Tied) -> None:
    ids = torch.arange(6)
    expected = copy.deepcopy(tied)
    qt.convert(expected, name, head=True)
    saved = qt.quantize_weights(tied, name, head=True)
    assert saved.layers == ["body.0", "body.2"] and "shared" in saved.skipped["head"]
    assert saved.before == 2 * 64 * 64 * 4 and 0 < saved.after < 0.3 * saved.before
    assert f"{saved.before:,} bytes became {saved.after:,}" in str(saved)
    with torch.no_grad():
        assert_bitwise(tied(ids), expected(ids))
    again = qt.quantize_weights(tied, name, head=True)
    assert again.before == again.after == saved.after
    assert qt.dequantize_weights(tied) == ["body.0", "body.2"]
    assert all(p.dtype is torch.float32 and p.requires_grad for p in tied.parameters()) or name in FOUR_BITS
    with torch.no_grad():
        assert_bitwise(tied(ids), expected(ids))


@QUANTIZED
def test_convert_and_revert_of_such_a_model(name: str, tied: Tied) -> None:
    qt.quantize_weights(tied, name, skip=["head"])
    qt.convert(tied, "tensorwise", skip=["head"])
    x = torch.randn(3, 64)
    reference = copy.deepcopy(tied)
    qt.dequantize_weights(reference)
    with torch.no_grad():
        assert_close("converted", tied.body(x), reference.body(x), 1e-6)
    qt.revert(tied)
    assert type(tied.body[0]) is nn.Linear and tied.body[0].weight.dtype is torch.float32
    assert tied.body(x).isfinite().all()


@QUANTIZED
def test_blocks_take_such_weights(name: str) -> None:
    with qt.quantized_init(name):
        net = qt.MLP(48, 96, "swiglu", normalization="RMSNorm")
    reference = copy.deepcopy(net)
    qt.dequantize_weights(reference)
    for one, other in zip(net.modules(), reference.modules(), strict=True):
        if isinstance(one, Linear) and isinstance(other, Linear):
            other.weight.requires_grad_(one.weight.requires_grad)
    x = torch.randn(5, 48)
    results, expected = run(net, name, x), run(reference, name, x)
    assert set(results) == set(expected)
    for key, value in expected.items():
        assert_close(key, results[key], value, 1e-6)


@pytest.mark.parametrize(
    "name, recipe, backend",
    [
        *(("mxfp8", "mxfp8", "aot_eager"), ("nvfp4", "nvfp4", "aot_eager"), ("nvfp4", "rowwise", "aot_eager")),
        # Three seconds for what the operators of the graph before it compute.
        pytest.param("nvfp4", "rowwise", "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_inference_gives_the_bits_of_eager(name: str, recipe: str, backend: str) -> None:
    torch.compiler.reset()
    one, x = layer(name).requires_grad_(False), torch.randn(4, K)
    compiled = torch.compile(one, backend=backend, fullgraph=True)
    with qt.autocast(recipe), torch.no_grad():
        assert_bitwise(compiled(x), one(x))


@pytest.mark.parametrize(
    ("name", "recipe"), [("tensorwise", None), ("blockwise", None), ("mxfp8", None), ("mxfp8", "bf16")]
)
def test_a_whole_graph_of_training_has_the_bits_of_eager_mode(name: str, recipe: str | None) -> None:
    torch.compiler.reset()
    one, x = layer(name), torch.randn(4, K)
    expected = {key: value.clone() for key, value in run(one, recipe or name, x).items()}
    results = run(torch.compile(one, backend="aot_eager", fullgraph=True), recipe or name, x)
    for key, value in expected.items():
        assert_bitwise(results.get(key, results.get(f"_orig_mod.{key}")), value, key)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own, at a break
@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_a_compiler_leaves_training_to_eager_mode_if_it_would_round_the_gradient(recipe: str) -> None:
    torch.compiler.reset()
    one, x = layer("mxfp8", dtype=torch.bfloat16), torch.randn(4, K, dtype=torch.bfloat16)
    expected = run(one, recipe, x)["weight"].clone()
    assert expected.dtype is torch.float32
    assert_bitwise(run(torch.compile(one, backend="aot_eager"), recipe, x)["_orig_mod.weight"], expected)


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_a_whole_graph_that_would_round_the_gradient_is_an_error_that_says_why(recipe: str) -> None:
    torch.compiler.reset()
    one = layer("mxfp8", dtype=torch.bfloat16)
    with qt.autocast(recipe), pytest.raises(Exception, match="rounds the float32 gradient"):
        torch.compile(one, backend="aot_eager", fullgraph=True)(torch.randn(4, K, dtype=torch.bfloat16))


@QUANTIZED
def test_peft_gets_the_weight_dtype_and_a_warning(name: str) -> None:
    one = layer(name)
    with pytest.warns(UserWarning, match="cannot be merged"):
        assert eval("layer.compute_dtype", {"__name__": "peft.tuners", "layer": one}) is one.weight_dtype
    # Who reads it otherwise adapts nothing, and warnings are errors here.
    assert ("compute_dtype", one.weight_dtype) in inspect.getmembers(one)
    qt.dequantize_weights(one)
    for other in (one, qt.Linear(4, 4)):
        assert not hasattr(other, "compute_dtype")


def test_the_output_projection_of_packed_attention_keeps_its_weight() -> None:
    """Torch's formula reads it raw where no recipe quantizes."""
    model = nn.ModuleDict({"a": nn.MultiheadAttention(64, 4, batch_first=True), "up": nn.Linear(64, 64)})
    plain, x = copy.deepcopy(model), torch.randn(2, 5, 64)
    saved = qt.quantize_weights(model, "mxfp8")
    assert saved.layers == ["up"] and "reads its weight" in saved.skipped["a.out_proj"]
    with qt.autocast(enabled=False):
        assert_bitwise(model["a"](x, x, x)[0], plain["a"](x, x, x)[0])
    assert not torch.equal(model["a"](x, x, x)[0], plain["a"](x, x, x)[0])


def test_explain_says_that_nothing_quantizes_the_weight() -> None:
    with qt.autocast("tensorwise"):
        rows = {row.what: row for row in qt.explain(layer("tensorwise"), torch.randn(4, K)).rows}
    assert rows["weight"].runs == rows["weight.T"].runs == "nothing" and "parameter" in rows["weight"].how


def test_a_conv1d_computes_quantized_and_is_not_stored_so() -> None:
    model = nn.ModuleDict({"conv": Conv1D(64, 64), "up": nn.Linear(64, 64)})
    saved = qt.quantize_weights(model, "mxfp8")
    assert saved.layers == ["up"] and saved.skipped["conv"].startswith("Conv1D computes quantized, but")

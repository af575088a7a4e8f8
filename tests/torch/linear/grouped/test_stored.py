"""Stacks of weights that exist only in eight (or four) bits: each matrix is what a Linear's in its place would be."""

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
from quaver.reference.optimizer_state import Preset, StateSpec
from quaver.torch import optim
from tests.close import assert_bitwise, assert_close

G, N, K, T = 3, 96, 64, 70
ENDS = torch.tensor([32, 32, 70], dtype=torch.int32)
NAMES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4", "mxfp4")
EIGHT = pytest.mark.parametrize("name", NAMES[:5])
LAYOUTS = pytest.mark.parametrize("layout", ["nk", "kn"])


def layer(name: str | None, layout: str = "nk", dtype: torch.dtype = torch.float32, **how: Any) -> qt.GroupedLinear:
    torch.manual_seed(0)
    if name is None:
        return qt.GroupedLinear(G, K, N, dtype=dtype, layout=layout, **how)  # type: ignore[arg-type]
    with qt.quantized_init(name, keep_initial="cpu"):
        return qt.GroupedLinear(G, K, N, dtype=dtype, layout=layout, **how)  # type: ignore[arg-type]


def linears(name: str, dtype: torch.dtype) -> nn.ModuleList:
    torch.manual_seed(0)
    with qt.quantized_init(name, keep_initial="cpu"):
        return nn.ModuleList([qt.Linear(K, N, dtype=dtype) for _ in range(G)])


def rows(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(T, size, generator=generator).to(dtype) for size in (K, N))
    return x.requires_grad_(), g


def value(of: qt.GroupedLinear, dtype: torch.dtype = torch.float32) -> Tensor:
    return of.weight.dequantize().to(dtype)


def run(of: nn.Module, name: str | None, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    x, g = rows(seed, dtype)
    of.zero_grad()
    with qt.autocast(name) if name else qt.autocast(enabled=False):
        y = of(x, ENDS)
    y.backward(g)
    assert x.grad is not None
    grads = {key: p.grad for key, p in of.named_parameters() if p.grad is not None}
    return {"output": y.detach(), "grad_input": x.grad, **grads}


@pytest.mark.parametrize("name", NAMES)
@LAYOUTS
def test_codes_match_each_linears_initial_values(name: str, layout: str) -> None:
    one, each = layer(name, layout, torch.bfloat16), linears(name, torch.bfloat16)
    for group, single in enumerate(each):
        ours, expected = one.weight.unwrap(group), single.weight.unwrap()
        assert_bitwise(ours.codes(), expected.codes())
        assert_bitwise(torch.as_tensor(ours.scales()), torch.as_tensor(expected.scales()))
    held = one.weight.nbytes + sum(b.numel() * b.element_size() for b in one.buffers())
    spec = recipes.get(name).fprop.b
    assert spec is not None and held <= G * N * K * spec.format.bits / 8 * 1.07
    initial = qt.initial_value(one)
    assert initial is not None and torch.equal(initial, layer(None, layout, torch.bfloat16).weight)
    qt.drop_initial_value(one.weight)
    assert qt.initial_value(one) is None


#: Rounded at random, noise would differ from that of one parameter a matrix.
_MOMENT = StateSpec(code="int8_softsign")
PRESETS = {
    "residual16": Preset(name="residual16", codes="residual16"),
    "residual8": Preset(name="residual8", codes="residual8", first=_MOMENT),
    "float32": Preset(name="float32"),
}


@EIGHT
@LAYOUTS
def test_they_train_as_linears_in_codes_do(name: str, layout: str) -> None:
    for preset in (PRESETS["residual16"], PRESETS["float32" if layout == "kn" else "residual8"]):
        one, each = layer(name, layout, torch.bfloat16, recipe=name), linears(name, torch.bfloat16)
        steppers = [optim.AdamW(model.parameters(), lr=1e-2, preset=preset) for model in (one, each)]
        for step in range(3):
            (x, g), (z, _) = rows(step, torch.bfloat16), rows(step, torch.bfloat16)
            with qt.autocast(name):
                y, parts = one(x, ENDS), z.split([32, 38])
                expected = torch.cat([each[0](parts[0]), each[2](parts[1])])
            assert_bitwise(y.detach(), expected.detach(), f"{preset.name} {step}")
            for output in (y, expected):
                output.backward(g)
            # The second sees no token, and steps by a gradient of zeros.
            each[1].weight.grad, each[1].bias.grad = torch.zeros(N, K), torch.zeros(N, dtype=torch.bfloat16)
            assert x.grad is not None and one.weight.grad is not None
            assert_bitwise(x.grad, z.grad)
            assert_bitwise(one.matrices(one.weight.grad), torch.stack([m.weight.grad for m in each]))
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad()
        for group, single in enumerate(each):
            assert_bitwise(one.weight.unwrap(group).dequantize(), single.weight.unwrap().dequantize())


@pytest.mark.parametrize("preset", ["balanced", "lean"])
@pytest.mark.parametrize(("name", "layout"), [("tensorwise", "nk"), ("mxfp8", "kn"), ("blockwise", "kn")])
def test_presets_that_round_at_random_step_and_come_back_from_a_file(name: str, layout: str, preset: str) -> None:
    def stepped(of: qt.GroupedLinear, by: optim.Optimizer, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            with qt.autocast(name):
                y = of(rows(step)[0], ENDS)
            y.square().mean().backward()
            by.step()
            by.zero_grad()

    one = layer(name, layout)
    before = value(one)
    by = optim.AdamW(one.parameters(), lr=1e-2, preset=preset, compile=False)
    stepped(one, by, 0, 2)
    moved = (value(one) - before).abs()
    # Each has moved by less than two updates of Adam and a rounding of what is the largest there.
    assert moved.amax((1, 2)).min() > 0 and moved.max() < 4e-2
    file = io.BytesIO()
    torch.save((one.state_dict(), by.state_dict()), file)
    file.seek(0)
    states = torch.load(file)
    other = layer(name, layout)
    other.load_state_dict(states[0])
    again = optim.AdamW(other.parameters(), lr=1e-2, preset=preset)
    again.load_state_dict(states[1])
    for of, stepper in ((one, by), (other, again)):
        stepped(of, stepper, 2, 2)
    assert_bitwise(value(one), value(other))
    with pytest.warns(UserWarning, match="converted to preset exact"):
        converted = optim.AdamW(other.parameters(), lr=1e-2, preset="exact")
        converted.load_state_dict(again.state_dict())
    config, new = (
        again.config(other.weight, again.param_groups[0]),
        converted.config(other.weight, converted.param_groups[0]),
    )
    assert (config.weight_format.kind, new.weight_format.kind) == (
        "residual16" if preset == "balanced" else "residual8",
        "float32",
    )
    # The master weight starts at the value of codes and residuals.
    assert (converted.state[other.weight]["master"] - value(other)).abs().max() < 1e-2


def test_presets_with_one_scale_for_all_matrices_are_refused() -> None:
    one = layer("mxfp8", recipe="mxfp8")
    with pytest.raises(ValueError, match="stack of matrices, and preset 'msamp' has one scale per parameter"):
        optim.AdamW(one.parameters(), preset="msamp")
    with pytest.raises(ValueError, match="stack of matrices, and preset 'msamp' has one scale per parameter"):
        optim.Muon(one.parameters(), preset="msamp")
    one(rows()[0], ENDS).sum().backward()
    with pytest.raises(ValueError, match="SGD got a weight that is stored as codes"):
        torch.optim.SGD(one.parameters(), 1e-3).step()


@pytest.mark.parametrize("name", NAMES)
@LAYOUTS
def test_another_recipe_or_none_computes_with_the_decoded_codes(name: str, layout: str) -> None:
    one, other = layer(name, layout, seed=1), layer(None, layout, seed=1)
    other.set_weight(value(one))
    other.weight.requires_grad_(one.weight.requires_grad)
    for recipe in ("tensorwise", "mxfp8", "rowwise_bf16_wgrad", "bf16", None):
        results, expected = run(one, recipe), run(other, recipe)
        assert list(results) == list(expected)
        for key in results:
            if recipe == name:
                assert_close(key, results[key], expected[key], 1e-6 if key in ("output", "bias") else 0.05)
            else:
                assert_bitwise(results[key], expected[key], f"{recipe} {key}")
    with torch.autocast("cpu", torch.bfloat16):
        x = rows()[0]
        assert_bitwise(one(x, ENDS).detach(), other(x, ENDS).detach())


def through_a_file(of: qt.GroupedLinear) -> qt.GroupedLinear:
    file = io.BytesIO()
    torch.save(of.state_dict(), file)
    file.seek(0)
    with qt.quantized_init("nvfp4" if of.weight.spec.format.packed else "mxfp8"):
        other = qt.GroupedLinear(G, K, N, layout=of.layout)
    other.load_state_dict(torch.load(file))
    return other


def from_high_precision(of: qt.GroupedLinear) -> qt.GroupedLinear:
    """The state dict of the original layer."""
    with qt.quantized_init("nvfp4" if of.weight.spec.format.packed else "mxfp8"):
        other = qt.GroupedLinear(G, K, N, layout=of.layout)
    other.load_state_dict(layer(None, of.layout).state_dict())
    return other


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@LAYOUTS
@pytest.mark.parametrize(
    "config", [copy.deepcopy, lambda of: pickle.loads(pickle.dumps(of)), through_a_file, from_high_precision]
)
def test_copies_have_the_codes(name: str, layout: str, config: Callable[[Any], qt.GroupedLinear]) -> None:
    one = layer(name, layout)
    other = config(one)
    assert other.weight is not one.weight and other.weight_spec == one.weight_spec
    assert_bitwise(value(other), value(one))
    results, expected = run(other, "bf16"), run(one, "bf16")
    for key in expected:
        assert_bitwise(results[key], expected[key], key)


@LAYOUTS
def test_moves_never_cast_codes(layout: str) -> None:
    one = layer("mxfp8", layout)
    other = copy.deepcopy(one).to(torch.float16)
    assert other.weight.codes.dtype is torch.float8_e4m3fn and other.weight_dtype is torch.float16
    assert_bitwise(value(other), value(one))
    assert copy.deepcopy(one).to("meta").weight.scale.is_meta


@pytest.mark.parametrize("name", ["tensorwise", "nvfp4"])
@LAYOUTS
def test_models_are_converted_to_codes_and_back(name: str, layout: str) -> None:
    model = nn.ModuleDict({"experts": layer(None, layout, torch.bfloat16), "head": nn.Linear(64, 64)})
    saved = qt.quantize_weights(model, name, skip=["head"])
    one: Any = model["experts"]
    assert saved.layers == ["experts"] and saved.after <= saved.before * (0.26 if name == "nvfp4" else 0.51)
    held = one.weight.codes.view(torch.uint8).clone()
    expected = value(layer(name, layout, torch.bfloat16), torch.bfloat16)
    assert_bitwise(value(one, torch.bfloat16), expected)
    plain = qt.plain_state_dict(model)
    assert set(plain) == {"experts.weight", "experts.bias", "head.weight", "head.bias"}
    assert_bitwise(plain["experts.weight"], expected)
    assert qt.dequantize_weights(model) == ["experts"]
    assert_bitwise(one.weight.detach(), expected)
    qt.quantize_weights(model, name, skip=["head"])
    assert torch.equal(one.weight.codes.view(torch.uint8), held)
    assert qt.revert(model) == ["experts"]
    assert one.recipe is None and one.weight_spec is None and not list(one.buffers())
    assert_bitwise(one.weight.detach(), expected)
    one(rows(dtype=torch.bfloat16)[0], ENDS)


def test_invalid_arguments_give_a_clear_error() -> None:
    one = layer("nvfp4", recipe="nvfp4")
    with pytest.raises(ValueError, match=r"got a weight of shape \(3, 64, 96\); it must be \(3, 96, 64\)"):
        one.set_weight(torch.zeros(G, K, N))
    one.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="in four bits has no gradient"):
        one(rows()[0], ENDS)
    with pytest.raises(RuntimeError, match="quantized in the checkpoint"):
        layer(None).load_state_dict(one.state_dict())


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "mxfp8"])
def test_codes_that_were_cast_as_numbers_are_refused(name: str) -> None:
    """As fully_shard casts them under a MixedPrecisionPolicy: results were a thousand times too large."""
    cases: list[tuple[nn.Module, tuple[Any, ...]]] = [
        (layer(name), (rows()[0].bfloat16(), ENDS)),
        (qt.Linear(32, 32), (torch.randn(4, 32).bfloat16(),)),
        (qt.MLP(32, 64), (torch.randn(4, 32).bfloat16(),)),
        (qt.MoE(32, 32, qt.MixtureConfig(experts=4, k=2)), (torch.randn(4, 32).bfloat16(),)),
    ]
    for module, given in cases:
        qt.quantize_weights(module, name)
        for part in module.modules():
            weight = part._parameters.get("weight")
            if weight is not None:
                stored = weight.codes if isinstance(weight, qt.QuantizedTensor) else weight
                part._parameters["weight"] = nn.Parameter(stored.detach().to(torch.bfloat16), requires_grad=False)
        with pytest.raises(ValueError, match=r"(came as|replaced by a) torch.bfloat16.*gather_quantized\(model\)"):
            module(*given)


def test_experts_in_codes_say_what_to_do_with_tokens_of_another_dtype() -> None:
    model = qt.MoE(32, 32, qt.MixtureConfig(experts=4, k=2))
    qt.quantize_weights(model, "mxfp8")
    with pytest.raises(ValueError, match=r"call model.to\(torch.bfloat16\) before it is sharded"):
        model(torch.randn(4, 32).bfloat16())
    assert model.to(torch.bfloat16)(torch.randn(4, 32).bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize(("name", "layout"), [("nvfp4", "kn"), ("mxfp8", "kn"), ("delayed", "nk")])
@pytest.mark.parametrize("recipe", [True, False])
def test_frozen_codes_compile_with_eager_bits(name: str, layout: str, recipe: bool) -> None:
    torch._dynamo.reset()
    one = layer(name, layout, recipe=name if recipe else "rowwise")
    one.weight.requires_grad_(False)
    other = copy.deepcopy(one)
    compiled = torch.compile(lambda x, offsets: other(x, offsets), backend="aot_eager", fullgraph=True, dynamic=True)
    outputs = []
    for of in (one, compiled):
        x, g = rows()
        y = of(x, ENDS)
        y.backward(g)
        assert x.grad is not None
        outputs.append((y.detach(), x.grad))
    for ours, expected in zip(*outputs, strict=True):
        assert_bitwise(ours, expected)


@pytest.mark.parametrize("name", ["tensorwise", "mxfp8", "nvfp4"])
@LAYOUTS
def test_the_gpu_path_accepts_codes_too(name: str, layout: str) -> None:
    one = layer(name, layout, recipe=name)
    other = copy.deepcopy(one)
    with qt.only("reference"):
        expected = run(one, name)
    with qt.only("decoded"):
        results = run(other, name)
    for key in expected:
        assert_close(key, results[key], expected[key], 1e-6)

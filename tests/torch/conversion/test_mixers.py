"""Test state-space mixers: no layer is quantized in name only, and ours equal theirs where both compute the same."""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quaver.torch as qt
from quaver.torch.conversion.replace.mixer import CalledMixer
from tests.close import assert_close
from tests.torch.conversion.families import tiny, tokens

BYPASSED = "multiplies by its weight without calling it"
#: The first mixer of a model of each kind.
MIXERS = {
    "mamba": lambda m: m.backbone.layers[0].mixer,
    "mamba2": lambda m: m.backbone.layers[0].mixer,
    "bamba": lambda m: m.model.layers[0].mamba,
    "nemotron_h": lambda m: m.model.layers[0].mixer,
    "zamba2": lambda m: m.model.layers[0].mamba,
    "falcon_mamba": lambda m: m.backbone.layers[0].mixer,
}
#: Kinds that Quaver replaces by its own block; `test_in_place.py` compares whole models of them.
SECOND = ("mamba2", "bamba", "nemotron_h", "zamba2")


# Layers whose weight is read without a call of the layer.


class Reads(nn.Module):
    """Passes one layer's weight to a function, reads another's dtype, and calls a third after reading its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.asked, self.both = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.read.weight, self.read.bias).to(self.asked.weight.dtype)
        scaled = self.both.weight.abs().sum()
        return self._rest(y) * scaled

    def _rest(self, y: Tensor) -> Tensor:
        z: Tensor = self.both(self.asked(y))
        return z


class Mixes(Reads):
    """Adds a decay, which marks a mixer: its forward may call layers in eval mode and read weights in training."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(4))


def test_a_layer_that_is_read_and_not_called_is_left_unchanged_and_named() -> None:
    model = nn.Sequential(Reads(), Mixes())
    report = qt.convert(model, "mxfp8")
    assert set(report.converted) == {"0.asked", "0.both", "1.asked"}
    assert report.skipped == {
        "0.read": f"Reads {BYPASSED}",
        "1.read": f"Mixes {BYPASSED}",
        "1.both": f"Mixes {BYPASSED}",
    }
    check = report.check(model, torch.randn(3, 4))
    assert not check.never_called and set(check.read_behind) == {"0.both"}, "which is read besides"
    assert not qt.convert(nn.Sequential(Reads()), "bf16").skipped, "unquantized there is nothing to tell"


@pytest.mark.parametrize("family", ["mamba", "jamba", "falcon_mamba"])
def test_the_first_mamba_reads_the_weight_of_its_steps(family: str) -> None:
    report = qt.convert(tiny(family), "mxfp8")
    left = {name.rpartition(".")[2]: why for name, why in report.skipped.items()}
    assert BYPASSED in left["dt_proj"]
    assert {name.rpartition(".")[2] for name in report.converted} >= {"in_proj", "x_proj", "out_proj"}


# A function that computes the whole mixer, as mamba-ssm has.


@pytest.fixture(params=["mamba", "mamba2"])
def whole(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, list[str]]]:
    """A model whose module provides a function that computes mixers without calling their layers, and its calls."""
    model, calls = tiny(request.param).train(), list[str]()
    mixer = MIXERS[request.param](model)
    names = inspect_globals(mixer)
    name = "mamba_inner_fn" if request.param == "mamba" else "mamba2_split_conv1d_scan_combined"

    @functools.wraps(names[name])
    def fused(projected: Tensor, *args: Any, outproj_weight: Tensor | None = None, **kwargs: Any) -> Tensor:
        calls.append(name)
        weight = args[4] if outproj_weight is None else outproj_weight
        tokens_last = request.param == "mamba"
        x = projected.transpose(1, 2) if tokens_last else projected
        return F.linear(x[..., : weight.shape[1]], weight)

    monkeypatch.setitem(names, name, fused)
    yield model, calls


def inspect_globals(mixer: nn.Module) -> dict[str, Any]:
    held: dict[str, Any] = type(mixer).forward.__wrapped__.__globals__  # type: ignore[attr-defined]
    return held


def test_a_converted_mixer_calls_its_layers_and_an_unconverted_one_keeps_its_function(whole: Any) -> None:
    model, calls = whole
    x = tokens()
    model(input_ids=x, use_cache=False)
    before = len(calls)
    assert before == 2, "each mixer hands its weights over"
    report = qt.convert(model, "mxfp8")
    assert any("out_proj" in name for name in report.converted)
    assert report.check(model, input_ids=x, use_cache=False), "in training all layers are called, and none is read"
    model(input_ids=x, use_cache=False, labels=x).loss.backward()
    assert len(calls) == before
    for recipe in (False, "bf16"):
        if recipe:
            qt.convert(model, recipe)
            model(input_ids=x, use_cache=False)
        else:
            with qt.autocast(enabled=False):
                model(input_ids=x, use_cache=False)
    assert len(calls) == before + 4, "what quantizes nothing keeps its fast path"
    qt.revert(model)
    assert not any(isinstance(m, CalledMixer) for m in model.modules())
    model(input_ids=x, use_cache=False)
    assert len(calls) == before + 6


# transformers' scan of the first Mamba does something that Dynamo warns about.
@pytest.mark.parametrize("whole", ["mamba2"], indirect=True)
def test_compiled_it_calls_its_layers_too(whole: Any) -> None:
    model, calls = whole
    torch.compiler.reset()
    qt.convert(model, "mxfp8")
    mixer = next(m for m in model.modules() if isinstance(m, CalledMixer))
    x = torch.randn(2, 5, 64)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    assert_close("compiled", compiled(x), mixer(x), 1e-6)
    assert not calls


# In place.


def model_of(family: str) -> Any:
    model = tiny(family).train()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def test_it_trains_under_recipes_and_keeps_less() -> None:
    model = model_of("mamba2")
    mixer, x = MIXERS["mamba2"](model), torch.randn(2, 64, 64, requires_grad=True)

    def saved_bytes() -> int:
        saved: dict[int, Tensor] = {}
        own = {p.untyped_storage().data_ptr() for p in mixer.parameters()}

        def pack(t: Tensor) -> Tensor:
            if t.untyped_storage().data_ptr() not in own:
                saved[t.untyped_storage().data_ptr()] = t.detach()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            mixer(x)
        return sum(t.untyped_storage().nbytes() for t in saved.values())

    before = saved_bytes()
    qt.convert(model, "mxfp8", blocks=True)
    assert saved_bytes() < 0.2 * before
    mixer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())


def test_cases_where_the_original_forward_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("mamba2")
    mixer, x = MIXERS["mamba2"](model), torch.randn(2, 9, 64)
    qt.convert(model, "bf16", blocks=True)
    ran = []
    own = type(mixer)._original.forward
    scan = inspect_globals_of(own)
    monkeypatch.setitem(scan, "mamba2_chunk_scan", noting(scan["mamba2_chunk_scan"], ran))

    def theirs(**given: Any) -> bool:
        ran.clear()
        mixer(x, **given)
        return bool(ran)

    assert not theirs()
    handle = mixer.norm.register_forward_hook(lambda *_: None)
    assert theirs(), "a hook on a part that our block does not call"
    handle.remove()
    mixer.norm.variance_epsilon = 1e-3
    assert theirs(), "an attribute of the norm"
    mixer.norm.variance_epsilon = 1e-5
    mixer.time_step_limit = (0.0, 1.0)
    assert theirs(), "an attribute of its own"
    mixer.time_step_limit = (0.0, float("inf"))
    numbers = torch.zeros(2, 9, dtype=torch.int32)
    assert not theirs(seq_idx=numbers)
    handle = mixer.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="keep packed sequences apart"):
        mixer(x, seq_idx=numbers)
    handle.remove()
    handle = mixer.in_proj.register_forward_hook(lambda *_: ran.append(1))
    mixer(x)
    assert ran, "hooks on the projections run in our block"
    handle.remove()
    assert not theirs()


def noting(function: Any, ran: list[Any]) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        ran.append(1)
        return function(*args, **kwargs)

    return run


def inspect_globals_of(forward: Any) -> dict[str, Any]:
    held: dict[str, Any] = forward.__wrapped__.__globals__
    return held


# A Quaver layer.


@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("mamba2", lambda m: m.backbone.layers[0]),
        ("bamba", lambda m: m.model.layers[0]),
        ("nemotron_h", lambda m: m.model.layers[0]),
        ("zamba2", lambda m: m.model.layers[0]),
    ],
    ids=SECOND,
)
def test_a_layer_of_transformers_as_ours(family: str, layer: Any) -> None:
    model = model_of(family)
    theirs = layer(model).eval()
    ours: Any = qt.from_huggingface(theirs)
    assert isinstance(ours, qt.Mamba2Layer) and not ours.training
    mixer = MIXERS[family](model)
    assert ours.mixer.in_proj.weight is mixer.in_proj.weight and ours.mixer.A_log is mixer.A_log
    x = torch.randn(2, 19, 64)
    runs = []
    for module in (theirs, ours):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y = y[0] if isinstance(y, tuple) else y
        runs.append([y.detach(), *torch.autograd.grad(y, [leaf, *mixer.parameters()], torch.ones_like(y))])
    for one, other in zip(*runs, strict=True):
        assert_close("outputs and gradients", one, other, 2e-6)
    block = qt.from_huggingface(mixer)
    assert isinstance(block, qt.Mamba2)
    assert_close("the block", block(x), mixer.eval()(x), 2e-6)


def test_an_unsupported_layer_gives_a_clear_error() -> None:
    model = model_of("mamba2")
    layer = model.backbone.layers[0]
    with pytest.raises(ValueError, match="leave out mask_type"):
        qt.from_huggingface(layer, mask_type="none")
    layer.extra_norm = copy.deepcopy(layer.norm)
    forward = type(layer).forward
    layer.forward = lambda x, **k: layer.extra_norm(forward(layer, x, **k))
    with pytest.raises(ValueError, match="a Mamba2Layer has one norm before the mixer"):
        qt.from_huggingface(layer)
    layer.mixer.register_buffer("scales", torch.ones(3))
    with pytest.raises(ValueError, match=r"Mamba2 cannot compute .*: it has a buffer 'scales'"):
        qt.from_huggingface(layer.mixer)
    falcon = tiny("falcon_h1").model.layers[0]
    for part in (falcon, falcon.mamba):
        with pytest.raises(ValueError, match="multiplies the output of in_proj by mup_vector"):
            qt.from_huggingface(part)
    qt.convert(model, "mxfp8")
    with pytest.raises(ValueError, match=r"is already converted; call quaver\.torch\.revert first"):
        qt.from_huggingface(layer.mixer)


def test_a_mixer_with_other_state_is_left_unchanged_and_reported() -> None:
    model = model_of("mamba2")
    MIXERS["mamba2"](model).extra = [1.0]
    why = {row.name: row.why for row in qt.convert(model, "bf16", blocks=True).blocks}
    assert "its extra is a list" in why["backbone.layers.0.mixer"]

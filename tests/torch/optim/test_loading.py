"""State dicts: what is saved comes back bit by bit, and what another preset or library saved is converted and said."""

import io
import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import quaver.torch as qt
from quaver.torch import optim
from quaver.torch.optim import weights

PAIRS = list(itertools.permutations(("float32", "exact", "balanced", "lean", "msamp"), 2))
KINDS = ("float32", "bfloat16", "tensorwise", "blockwise", "mxfp8")


def layer_of(kind: str) -> Any:
    torch.manual_seed(0)
    layer = qt.Linear(160, 136, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    if kind in KINDS[2:]:
        qt.quantize_weights(layer, kind)
    return layer


def gradients(number: int, first: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(first)
    return [torch.randn(136, 160, generator=draw) for _ in range(number)]


def run(layer: Any, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for gradient in gradients(steps, first):
        layer.weight.grad = gradient.to(layer.weight.grad_dtype or layer.weight.dtype)
        layer.bias.grad = gradient[:, 0].to(layer.bias.dtype)
        optimizer.step()
    layer.zero_grad()


def full_weight(optimizer: optim.Optimizer, p: Tensor) -> Tensor:
    way = optimizer.way(p, optimizer.param_groups[0])
    return weights.read(way.keeping, optimizer.parts_of_weight(p, way)).view(p.shape)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("preset", optim.PRESETS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_from_a_file_as_if_it_had_not_stopped(kind: str, preset: str) -> None:
    whole, layer = layer_of(kind), layer_of(kind)
    optimizer = optim.AdamW(whole.parameters(), lr=1e-3, preset=preset, seed=7)
    run(whole, optimizer, 2)
    saved = through_a_file((whole.state_dict(), optimizer.state_dict()))
    again = optim.AdamW(layer.parameters(), lr=1e-3, preset=preset)
    layer.load_state_dict(saved[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(saved[1])
    for (name, state), (_, want) in zip(again.state.items(), optimizer.state.items(), strict=True):
        for key in want:
            assert state[key].dtype is want[key].dtype, (name.shape, key)
    run(whole, optimizer, 2, first=1)
    run(layer, again, 2, first=1)
    for p, r in zip(layer.parameters(), whole.parameters(), strict=True):
        assert torch.equal(full_weight(again, p), full_weight(optimizer, r))


@pytest.mark.parametrize(("before", "after"), PAIRS)
@pytest.mark.parametrize("kind", ["bfloat16", "tensorwise"])
def test_presets_convert_into_each_other_and_say_so(kind: str, before: str, after: str) -> None:
    layer = layer_of(kind)
    optimizer = optim.AdamW(layer.parameters(), lr=1e-3, preset=before)
    run(layer, optimizer, 3)
    weight, codes = full_weight(optimizer, layer.weight), layer.weight.detach().clone()
    other = optim.AdamW(layer.parameters(), lr=1e-3, preset=after)
    with pytest.warns(UserWarning, match=f"states of preset {before} were converted to preset {after}"):
        other.load_state_dict(optimizer.state_dict())
    # What a GEMM reads stays, and what is beside it says the same weight to within the coarser of both.
    assert torch.equal(layer.weight.detach().view(torch.uint8), codes.view(torch.uint8))
    step = {"float32": 0.0, "exact": 0.0, "balanced": 2.0**-19, "lean": 2.0**-11, "msamp": 2.0**-10}
    scale = float(weight.abs().max())
    exact = kind == "bfloat16" and before in ("float32", "exact", "balanced", "msamp") and after != "lean"
    bound = 0.0 if exact else max(step[before], step[after], 2.0**-19 if kind == "bfloat16" else 0.0) * scale
    assert float((full_weight(other, layer.weight) - weight).abs().max()) <= bound
    for name in ("exp_avg", "exp_avg_sq"):
        pair = [moment(opt, layer.weight, name) for opt in (optimizer, other)]
        assert float((pair[0] - pair[1]).norm() / pair[0].norm()) < 0.05


def moment(optimizer: optim.Optimizer, p: Tensor, name: str) -> Tensor:
    way, state = optimizer.way(p, optimizer.param_groups[0]), optimizer.state[p]
    return optim.codes.decode(state[name], state.get(f"{name}_scale"), way.moments[way.rule.names.index(name)])


def test_eight_bits_become_sixteen_and_thirty_two_without_a_loss() -> None:
    layer = layer_of("tensorwise")
    optimizer = optim.AdamW(layer.parameters(), lr=1e-3, preset="lean")
    run(layer, optimizer, 5)
    weight = full_weight(optimizer, layer.weight)
    for preset in ("balanced", "float32"):
        finer = optim.AdamW(layer.parameters(), lr=1e-3, preset=preset)
        with pytest.warns(UserWarning, match="converted"):
            finer.load_state_dict(optimizer.state_dict())
        assert torch.equal(full_weight(finer, layer.weight), weight)
        optimizer = finer


@pytest.mark.parametrize("preset", ["float32", "lean"])
def test_torchs_states_load(preset: str) -> None:
    layer = layer_of("float32")
    theirs = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    run(layer, theirs, 3)
    ours = optim.AdamW(layer.parameters(), lr=5e-3, preset=preset)
    with pytest.warns(UserWarning, match="states of another library were converted"):
        ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == 1e-3
    for name in ("exp_avg", "exp_avg_sq"):
        want = theirs.state[layer.weight][name]
        error = float((moment(ours, layer.weight, name) - want).norm() / want.norm())
        assert error <= (0.0 if preset == "float32" else 0.02)
    assert float(ours.state[layer.weight]["step"]) == 3


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamWFp8"])
def test_torchaos_states_load(name: str) -> None:
    torchao = pytest.importorskip("torchao.optim")
    layer = nn.Linear(256, 128)
    theirs = getattr(torchao, name)(layer.parameters(), lr=1e-3)
    layer(torch.randn(4, 256)).square().sum().backward()
    # Warnings of its own, of a learning rate that is a tensor; and it compiles its step for each parameter.
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        theirs.step()
    ours = optim.AdamW(layer.parameters(), preset="torchao8")
    with pytest.warns(UserWarning, match="states of another library were converted"):
        ours.load_state_dict(theirs.state_dict())
    want = theirs.state[layer.weight]["exp_avg"].dequantize()
    # Where rows are of 256 our blocks are theirs. Their largest negative number has no code, so that scales are others.
    error = float((moment(ours, layer.weight, "exp_avg") - want).norm() / want.norm())
    assert error <= (0.02 if name == "AdamW8bit" else 0.05)


def test_msamps_states_load() -> None:
    """With stand-ins for its tensors, which have these attributes: MS-AMP itself builds on CUDA alone."""
    p = nn.Parameter(torch.randn(136, 160))
    first, second = torch.randn(136, 160), torch.rand(136, 160)
    m = SimpleNamespace(
        value=(first * 64).to(torch.float8_e4m3fn).view(torch.uint8),
        meta=SimpleNamespace(scale_inv=torch.tensor(1 / 64)),
    )
    v = SimpleNamespace(value=(second * 2048).half(), meta=SimpleNamespace(scale_inv=torch.tensor(1 / 2048)))
    state = {"state": {0: {"step": 5, "exp_avg": m, "exp_avg_sq": v}}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
    ours = optim.AdamW([p], preset="msamp")
    with pytest.warns(UserWarning, match="states of another library were converted"):
        ours.load_state_dict(state)
    assert float((moment(ours, p, "exp_avg") - first).norm() / first.norm()) < 0.04
    assert float((moment(ours, p, "exp_avg_sq") - second).norm() / second.norm()) < 1e-3


def test_integers_of_an_unknown_library_are_refused() -> None:
    p = nn.Parameter(torch.randn(136, 160))
    state = {"step": 1, "exp_avg": torch.zeros(136, 160, dtype=torch.uint8), "exp_avg_sq": torch.zeros(136, 160)}
    with pytest.raises(ValueError, match=r"a moment in the state dict is torch.uint8.*save them as float32"):
        optim.AdamW([p]).load_state_dict({"state": {0: state}, "param_groups": [{"params": [0]}]})


def test_a_preset_of_ones_own_is_saved_as_plain_data() -> None:
    own = optim.Preset(name="mine", first=optim.StateSpec(code="e4m3", block=32), codes="residual16")
    layer = layer_of("tensorwise")
    optimizer = optim.AdamW(layer.parameters(), preset=own)
    run(layer, optimizer, 2)
    other = optim.AdamW(layer.parameters(), preset=own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert torch.equal(other.state[layer.weight]["exp_avg"], optimizer.state[layer.weight]["exp_avg"])


@pytest.mark.parametrize("preset", ["float32", "exact", "balanced", "lean"])
@pytest.mark.parametrize("recipe", [None, "tensorwise", "mxfp8"])
def test_torchs_functions_read_an_optimizer_that_has_not_stepped(preset: str, recipe: str | None) -> None:
    model = nn.Sequential(qt.Linear(64, 128), qt.Linear(128, 64))
    if recipe is not None:
        qt.quantize_weights(model, recipe)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = optim.AdamW(model.parameters(), preset=preset)
    state: Any = get_optimizer_state_dict(model, optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8)), name
    assert state["state"].keys() == dict(model.named_parameters()).keys()
    assert all(each["step"] == 0 for each in state["state"].values())
    set_optimizer_state_dict(model, optimizer, state)
    assert all(p.grad is None for p in model.parameters())

"""Test state dicts: saved states load bit for bit, and states of other presets or libraries are converted with a
warning.
"""

import copy
import io
import itertools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import quaver.torch as qt
from quaver.torch import optim
from quaver.torch.optim.layout import key_of
from quaver.torch.quantized_tensor import memory_of
from tests.pairs import alternating
from tests.torch.optim.models import full_weight

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
        layer.weight.grad = gradient.to(layer.weight.grad_dtype or torch.float32)
        layer.bias.grad = gradient[:, 0].to(layer.bias.dtype)
        optimizer.step()
    layer.zero_grad()


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("preset", "kind"), alternating(optim.PRESETS, KINDS, ("lean", "balanced")))
def test_a_run_resumed_from_a_file_equals_an_uninterrupted_one(preset: str, kind: str) -> None:
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
def test_presets_convert_into_each_other_with_a_warning(kind: str, before: str, after: str) -> None:
    layer = layer_of(kind)
    optimizer = optim.AdamW(layer.parameters(), lr=1e-3, preset=before)
    run(layer, optimizer, 3)
    weight, codes = full_weight(optimizer, layer.weight), layer.weight.detach().clone()
    other = optim.AdamW(layer.parameters(), lr=1e-3, preset=after)
    with pytest.warns(UserWarning, match=f"states of preset {before} were converted to preset {after}"):
        other.load_state_dict(optimizer.state_dict())
    # The weight that GEMMs read is unchanged; the full weight agrees to the precision of the coarser preset.
    assert torch.equal(memory_of(layer.weight).view(torch.uint8), memory_of(codes).view(torch.uint8))
    step = {"float32": 0.0, "exact": 0.0, "balanced": 2.0**-19, "lean": 2.0**-11, "msamp": 2.0**-10}
    scale = float(weight.abs().max())
    exact = kind == "bfloat16" and before in ("float32", "exact", "balanced", "msamp") and after != "lean"
    bound = 0.0 if exact else max(step[before], step[after], 2.0**-19 if kind == "bfloat16" else 0.0) * scale
    assert float((full_weight(other, layer.weight) - weight).abs().max()) <= bound
    for name in ("exp_avg", "exp_avg_sq"):
        pair = [moment(opt, layer.weight, name) for opt in (optimizer, other)]
        assert float((pair[0] - pair[1]).norm() / pair[0].norm()) < 0.05


def moment(optimizer: optim.Optimizer, p: Tensor, name: str) -> Tensor:
    config, state = optimizer.config(p, optimizer.param_groups[0]), optimizer.state[p]
    spec = config.moments[config.rule.names.index(name)]
    return optim.codes.decode(state[key_of(name, spec)], state.get(f"{name}_scale"), spec)


@pytest.mark.parametrize("damage", ["scales", "dtype"])
def test_codes_without_scales_or_of_another_dtype_are_refused(damage: str) -> None:
    layer = layer_of("float32")
    optimizer = optim.AdamW(layer.parameters(), preset="lean")
    run(layer, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    if damage == "scales":
        del state["state"][0]["exp_avg_scale"]
    else:
        state["state"][0]["exp_avg_codes"] = state["state"][0]["exp_avg_codes"].float()
    with pytest.raises(ValueError, match=r"exp_avg was saved as .* is the file damaged"):
        optimizer.load_state_dict(state)


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
    # torchao warns about tensor learning rates, and compiles its step for each parameter.
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        theirs.step()
    ours = optim.AdamW(layer.parameters(), preset="torchao8")
    with pytest.warns(UserWarning, match="states of another library were converted"):
        ours.load_state_dict(theirs.state_dict())
    want = theirs.state[layer.weight]["exp_avg"].dequantize()
    # With rows of 256 both have the same blocks; their codes lack the largest negative number, so scales differ.
    error = float((moment(ours, layer.weight, "exp_avg") - want).norm() / want.norm())
    assert error <= (0.02 if name == "AdamW8bit" else 0.05)


def test_msamps_states_load() -> None:
    """Uses stand-ins with the attributes of MS-AMP's tensors, since MS-AMP builds only on CUDA."""
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


def adam_states(**more: Any) -> dict[str, Any]:
    state = {"step": 3, "exp_avg": torch.ones(136, 160), "exp_avg_sq": torch.ones(136, 160), **more}
    return {"state": {0: state}, "param_groups": [{"lr": 5.0, "params": [0]}]}


def schedule_free_states(**more: Any) -> dict[str, Any]:
    state = {"step": 3, "z_minus_y": torch.ones(136, 160), "exp_avg_sq": torch.ones(136, 160), **more}
    return {"state": {0: state}, "param_groups": [{"lr": 5.0, "weight_lr_power": 2.0, "params": [0]}]}


def torchs(name: str, **options: Any) -> Any:
    """A state dict of a torch optimizer after two steps."""
    p = nn.Parameter(torch.randn(136, 160, generator=torch.Generator().manual_seed(0)))
    optimizer = getattr(torch.optim, name)([p], lr=5.0, **options)
    for gradient in gradients(2):
        p.grad = gradient
        optimizer.step()
    return optimizer.state_dict()


OTHERS: dict[str, tuple[Any, Any, str]] = {
    "sgd": (lambda: torchs("SGD", momentum=0.9), optim.AdamW, "is that of SGD, and this optimizer is Adam"),
    "muon": (lambda: torchs("Muon"), optim.SGD, "is that of Muon, and this optimizer is SGD"),
    "adam into sgd": (lambda: torchs("AdamW"), optim.SGD, "is that of Adam, and this optimizer is SGD"),
    "nadam": (lambda: torchs("NAdam"), optim.AdamW, "is that of NAdam"),
    "adamax": (lambda: torchs("Adamax"), optim.AdamW, "parameter 0 has exp_inf, of Adamax, and Adam has exp_avg, exp_"),
    "amsgrad": (lambda: torchs("AdamW", amsgrad=True), optim.AdamW, "saved with amsgrad=True; it keeps a third moment"),
    "amsgrad unsaid": (lambda: adam_states(max_exp_avg_sq=torch.ones(136, 160)), optim.AdamW, "Adam with amsgrad=True"),
    "rounds": (lambda: torchs("Muon", ns_steps=7), optim.Muon, "saved with ns_steps=7, and Muon has 5 here"),
    "damaged": (lambda: adam_states(exp_avg_sq=None), optim.AdamW, "parameter 0 has no exp_avg_sq; nothing was loaded"),
    "no step": (lambda: adam_states(step=None), optim.AdamW, "parameter 0 has no step; nothing was loaded"),
    "shape": (lambda: adam_states(exp_avg_sq=torch.ones(160, 136)), optim.AdamW, "exp_avg_sq has shape"),
    "betas": (
        lambda: {"state": {}, "param_groups": [{"params": [0], "betas": (0.9, 1.5), "eps": 1e-8}]},
        optim.AdamW,
        r"betas\[1\]=1.5; give 0 or more, below 1",
    ),
    "lion": (lambda: ours("Lion"), optim.AdamW, "is that of Lion, and this optimizer is Adam"),
    "schedule-free": (
        lambda: ours("ScheduleFreeAdamW"),
        optim.AdamW,
        "is that of ScheduleFreeAdamW, and this optimizer is Adam",
    ),
    "adam into schedule-free": (lambda: torchs("AdamW"), optim.ScheduleFreeAdamW, "is that of Adam, and this"),
    "z": (
        lambda: schedule_free_states(z=torch.ones(136, 160)),
        optim.ScheduleFreeAdamW,
        "parameter 0 has z, of schedulefree's optimizers",
    ),
    "no sum": (lambda: schedule_free_states(lr_max=1.0), optim.ScheduleFreeAdamW, "parameter 0 has no weight_sum"),
    "sum is NaN": (
        lambda: schedule_free_states(weight_sum=float("nan")),
        optim.ScheduleFreeAdamW,
        "the weight_sum of parameter 0 is nan",
    ),
    "ours": (lambda: ours("AdamW"), optim.SGD, "is that of Adam, and this optimizer is SGD"),
}


def ours(name: str) -> Any:
    p = nn.Parameter(torch.randn(136, 160, generator=torch.Generator().manual_seed(0)))
    optimizer = getattr(optim, name)([p], lr=5.0)
    for gradient in gradients(2):
        p.grad = gradient.to(p.grad_dtype)
        optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("case", OTHERS)
def test_unloadable_states_are_named_and_nothing_is_loaded(case: str) -> None:
    make, kind, message = OTHERS[case]
    p = nn.Parameter(torch.randn(136, 160, generator=torch.Generator().manual_seed(0)))
    optimizer = kind([p], lr=1e-3, preset="lean")
    p.grad = gradients(1)[0]
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[p].items()}
    groups = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(make())
    assert optimizer.param_groups == groups and optimizer.state[p].keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in optimizer.state[p].items())
    optimizer.step()


DAMAGES: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "no state": (lambda state, group: state.clear(), "parameter 0 has no exp_avg"),
    "step is NaN": (lambda state, group: state.update(step=torch.tensor(float("nan"))), "the step of parameter 0"),
    "step is text": (lambda state, group: state.update(step="3"), "the step of parameter 0 is '3'"),
    "fewer columns of scales": (
        lambda state, group: state.update(exp_avg_scale=state["exp_avg_scale"][:, :1].clone()),
        r"exp_avg_scale has shape \(136, 1\).*of shape \(136, 3\)",
    ),
    "fewer rows of scales": (
        lambda state, group: state.update(exp_avg_sq_scale=state["exp_avg_sq_scale"][:3]),
        r"exp_avg_sq_scale has shape \(3, 3\)",
    ),
    "scales are integers": (
        lambda state, group: state.update(exp_avg_scale=state["exp_avg_scale"].int()),
        "exp_avg_scale has .* dtype torch.int32",
    ),
    "residual is float": (lambda state, group: state.update(residual=state["residual"].float()), "residual has shape"),
    "residual is short": (lambda state, group: state.update(residual=state["residual"][:3]), r"has shape \(3, 160\)"),
    "betas": (lambda state, group: group.update(betas=(0.9,)), "betas of the state dict is"),
}


@pytest.mark.parametrize(("damage", "preset"), alternating(DAMAGES, ("lean", "float32"), ()))
def test_a_damaged_state_dict_is_refused_by_name(damage: str, preset: str) -> None:
    spoil, message = DAMAGES[damage]
    starts = torch.randn(136, 160, generator=torch.Generator().manual_seed(0)).bfloat16()
    optimizers = [optim.AdamW([nn.Parameter(starts.clone())], preset=kind) for kind in ("lean", preset)]
    for optimizer in optimizers:
        (p,) = optimizer.param_groups[0]["params"]
        p.grad = gradients(1)[0].to(p.grad_dtype)
        optimizer.step()
    saved = copy.deepcopy(optimizers[0].state_dict())
    spoil(saved["state"][0], saved["param_groups"][0])
    with pytest.raises(ValueError, match=message):
        optimizers[1].load_state_dict(saved)
    for whole in ({}, {"state": [1], "param_groups": saved["param_groups"]}, {"state": saved["state"]}):
        with pytest.raises(ValueError, match="a dict `state` and a list `param_groups`"):
            optimizers[1].load_state_dict(whole)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("SGD", {"momentum": 0.9, "dampening": 0.5}),
        ("SGD", {}),
        ("Muon", {}),
        ("Muon", {"adjust_lr_fn": "match_rms_adamw"}),
        ("Adam", {}),
        ("AdamW", {"betas": (0.8, 0.95)}),
    ],
)
def test_a_run_resumed_from_a_torch_optimizer_equals_an_uninterrupted_one(name: str, options: dict[str, Any]) -> None:
    start = torch.randn(136, 160, generator=torch.Generator().manual_seed(0))
    p, r = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    theirs = getattr(torch.optim, name)([r], lr=1e-2, **options)
    mine = getattr(optim, name)([p], lr=1e-3, preset="float32")
    for gradient in gradients(3):
        r.grad = gradient
        theirs.step()
    p.data.copy_(r.data)
    begin = p.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine.load_state_dict(through_a_file(theirs.state_dict()))
    for gradient in gradients(3, first=1):
        p.grad, r.grad = gradient.clone(), gradient.clone()
        theirs.step()
        mine.step()
    # Muon multiplies in bfloat16.
    assert float(((p - r).norm() / (r - begin).norm()).detach()) < (0.02 if name == "Muon" else 1e-5)


@pytest.mark.parametrize(("preset", "name"), alternating(optim.PRESETS, ("AdamW", "SGD", "Muon"), ("lean",)))
def test_torchs_optimizer_never_steps_with_codes_for_numbers(preset: str, name: str) -> None:
    more: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    p = nn.Parameter(torch.randn(136, 160, generator=torch.Generator().manual_seed(0)))
    mine = getattr(optim, name)([p], lr=1e-2, preset=preset, **more)
    for gradient in gradients(2):
        p.grad = gradient.to(p.grad_dtype)
        mine.step()
    r = nn.Parameter(p.detach().clone())
    for foreach in (None, False) if name == "Muon" else (False, True):
        given = more | ({} if name == "Muon" else {"foreach": foreach})
        theirs = getattr(torch.optim, name)([r], lr=1e-2, **given)
        saved = through_a_file(mine.state_dict())
        theirs.load_state_dict(saved)
        r.grad = gradients(1)[0]
        before = r.detach().clone()
        if name != "Muon" and not mine.config(p, mine.param_groups[0]).moments[0].of.scaled:
            theirs.step()
            continue
        with pytest.raises((KeyError, RuntimeError)):
            theirs.step()
        assert torch.equal(r, before)


def test_codes_under_their_moments_names_load_as_they_did() -> None:
    p = nn.Parameter(torch.randn(136, 160, generator=torch.Generator().manual_seed(0)))
    optimizer = optim.AdamW([p], preset="lean")
    p.grad = gradients(1)[0]
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0] = {name.removesuffix("_codes"): value for name, value in saved["state"][0].items()}
    other = optim.AdamW([nn.Parameter(p.detach().clone())], preset="lean")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(saved)
    for name, value in other.state[other.param_groups[0]["params"][0]].items():
        assert torch.equal(value, optimizer.state[p][name]), name


def test_a_custom_preset_is_saved_as_plain_data() -> None:
    own = optim.Preset(name="mine", first=optim.StateSpec(code="e4m3", block=32), codes="residual16")
    layer = layer_of("tensorwise")
    optimizer = optim.AdamW(layer.parameters(), preset=own)
    run(layer, optimizer, 2)
    other = optim.AdamW(layer.parameters(), preset=own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(through_a_file(optimizer.state_dict()))
    assert torch.equal(other.state[layer.weight]["exp_avg_codes"], optimizer.state[layer.weight]["exp_avg_codes"])


@pytest.mark.parametrize(
    ("preset", "recipe"), [("float32", None), ("exact", None), ("balanced", "mxfp8"), ("lean", "tensorwise")]
)
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


@pytest.mark.parametrize("preset", ["float32", "lean"])
def test_hooks_around_state_dicts_see_and_change_whole_ones(preset: str) -> None:
    def optimizer_of() -> optim.Optimizer:
        p = nn.Parameter(torch.ones(64, 80))
        optimizer = optim.AdamW([p], preset=preset)
        p.grad = torch.ones(64, 80)
        optimizer.step()
        return optimizer

    def replace_steps(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {key: {**state, "step": torch.tensor(100.0)} for key, state in state_dict["state"].items()}
        return {**state_dict, "state": states}

    first, second = optimizer_of(), optimizer_of()
    saved: list[Any] = []
    first.register_state_dict_post_hook(lambda _, state_dict: saved.append(state_dict["param_groups"][0]["preset"]))
    seen: list[float] = []
    second.register_load_state_dict_pre_hook(replace_steps)
    second.register_load_state_dict_post_hook(
        lambda own: seen.extend(float(state["step"]) for state in own.state.values())
    )
    state_dict = first.state_dict()
    second.load_state_dict(state_dict)
    assert saved == [state_dict["param_groups"][0]["preset"]]
    assert seen == [100.0]
    assert [float(state["step"]) for state in second.state.values()] == [100.0]


@pytest.mark.parametrize("preset", ["lean", "lean/3", "balanced", "nothing"])
def test_states_in_another_layout_change_nothing(preset: str) -> None:
    layer = layer_of("tensorwise")
    optimizer = optim.AdamW(layer.parameters(), lr=1e-3, preset="lean")
    run(layer, optimizer, 1)
    saved = through_a_file(optimizer.state_dict())
    assert saved["param_groups"][0]["preset"] == "lean/2"
    saved["param_groups"][0] |= {"preset": preset, "lr": 5.0}
    before = {key: value.clone() for key, value in optimizer.state[layer.weight].items()}
    with pytest.raises(ValueError, match=r"in a layout of another version|is not known"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert all(torch.equal(value, before[key]) for key, value in optimizer.state[layer.weight].items())

"""States in the first form of `lean` and `balanced`: softsign and roots, and residuals in parts of half a step."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.reference import optim as reference
from quaver.reference.optimizer_state import PRESETS, StateSpec
from quaver.torch import optim
from quaver.torch.linear import stored_weight
from quaver.torch.optim.state_conversion import FIRST_FORM_PRESETS, packed, saved_preset
from quaver.torch.quantized_tensor import memory_of
from tests.torch.optim.test_loading import full_weight, layer_of, run, through_a_file

FIRST = {True: StateSpec(code="int8_softsign"), False: StateSpec(code="uint8_root", stochastic=True, floor=True)}
#: Of a residual how many parts half a step has.
PARTS = {torch.int8: 2.0**7, torch.int16: 2.0**15}
#: How far a weight may move, in halves of a code's step.
STEPS = {"lean": 2.0**-7, "balanced": 2.0**-15}


def value_and_half(p: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes' numbers, or bfloat16's, and half of the step at their power of two: float64, found by neighbours."""
    if stored_weight.holds_codes(p):
        layer: Any = stored_weight.owner(p)
        fmt = layer.weight_spec.format
        number = memory_of(p).detach().view(torch.float8_e4m3fn).double().numpy()
        power = np.maximum(np.floor(np.log2(np.maximum(np.abs(number), 1e-300))), fmt.emin)
        return number, 2.0 ** (power - fmt.mantissa_bits - 1)
    number = p.detach().double().numpy()
    return number, 2.0 ** (np.floor(np.log2(np.maximum(np.abs(number), 2.0**-117))) - 8)


def bits_of(p: Tensor) -> int:
    """A power of two is this power of two of halves of its step."""
    if not stored_weight.holds_codes(p):
        return 8
    layer: Any = stored_weight.owner(p)
    return int(layer.weight_spec.format.mantissa_bits) + 1


def in_first_form(optimizer: optim.Optimizer, p: Tensor, state: dict[str, Any]) -> dict[str, np.ndarray]:
    """Convert a parameter's state dict entry to the first format; return the represented values."""
    draw = np.random.default_rng(0)
    meant: dict[str, np.ndarray] = {}
    for name, signed in zip(("exp_avg", "exp_avg_sq"), (True, False), strict=True):
        x = (draw.standard_normal(p.shape) * 10.0 ** draw.integers(-4, 2, p.shape)).astype(np.float32)
        x = x if signed else np.abs(x)
        codes, scale = reference.encode(x, FIRST[signed], draw.integers(0, 2**15, p.shape))
        assert scale is not None
        meant[name] = reference.decode(codes, scale, FIRST[signed])
        del state[f"{name}_codes"]
        state[name] = torch.from_numpy(codes)
        state[f"{name}_scale"] = torch.from_numpy(scale).bfloat16()
    if "residual" in state:
        parts = PARTS[state["residual"].dtype]
        rest = draw.integers(-int(parts), int(parts), p.shape)
        number, half = value_and_half(p)
        # What rounding leaves: towards zero from a power of two half as much, from zero on the side of its sign alone.
        rest = np.where(np.signbit(number), -rest - 1, rest)
        lowest = np.where(np.abs(number) == half * 2.0 ** bits_of(p), -parts / 2, -parts)
        rest = np.maximum(rest, np.where(number == 0, 0, lowest)).astype(np.int64)
        rest = np.where(np.signbit(number), -rest, rest)
        rest = np.minimum(rest, int(parts) - 1)
        state["residual"] = torch.from_numpy(rest).to(state["residual"].dtype)
        meant["weight"], meant["half"] = number + rest * half / parts, half
    return meant


@pytest.mark.parametrize("preset", FIRST_FORM_PRESETS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("own", [False, True], ids=["named", "fields"])
def test_they_are_read_as_they_were_written_and_converted(kind: str, preset: str, own: bool) -> None:
    layer = layer_of(kind)
    chosen: Any = replace(PRESETS[preset], name="mine") if own else preset
    optimizer = optim.AdamW(layer.parameters(), lr=1e-3, preset=chosen)
    run(layer, optimizer, 1)
    saved = through_a_file(optimizer.state_dict())
    meant = in_first_form(optimizer, layer.weight, saved["state"][0])
    said = packed(
        replace(FIRST_FORM_PRESETS[preset], name="mine", codes=PRESETS[preset].codes, bfloat16=PRESETS[preset].bfloat16)
    )
    assert isinstance(said, dict) and said.pop("form") == 2
    saved["param_groups"][0]["preset"] = said if own else preset
    with pytest.warns(UserWarning, match=f"of preset {'mine' if own else preset}, in its first form, were converted"):
        optimizer.load_state_dict(saved)
    config, state = optimizer.config(layer.weight, optimizer.param_groups[0]), optimizer.state[layer.weight]
    for name, spec in zip(("exp_avg", "exp_avg_sq"), config.moments, strict=True):
        held = reference.decode(state[f"{name}_codes"].numpy(), state[f"{name}_scale"].float().numpy(), spec)
        wanted = meant[name]
        again = reference.decode(*reference.encode(wanted, replace(spec, stochastic=False)), spec)
        assert np.array_equal(held, again), name
    if "weight" in meant:
        scale = 1.0
        weight = full_weight(optimizer, layer.weight).double().numpy()
        if stored_weight.holds_codes(layer.weight):
            number, _ = value_and_half(layer.weight)
            dequantized = qt.dequantize_weights(layer)
            del dequantized
            values = layer.weight.detach().double().numpy()
            scale = np.divide(values, number, out=np.ones_like(values), where=number != 0)
        error = np.abs(weight - meant["weight"] * scale) / (meant["half"] * scale)
        assert error.max() <= STEPS[preset] * 1.001


def test_current_states_record_their_format() -> None:
    for name, preset in PRESETS.items():
        changed = any("mitchell" in spec.code for spec in (preset.first, preset.second))
        assert (name in FIRST_FORM_PRESETS) == changed == (packed(name) != name)
        assert saved_preset(packed(name)) == preset
        other = replace(preset, name="mine")
        assert saved_preset(packed(other)) == other
    with pytest.raises(ValueError, match="preset 'lean/3' is not known"):
        saved_preset("lean/3")


@pytest.mark.parametrize("preset", FIRST_FORM_PRESETS)
def test_an_unknown_format_changes_nothing(preset: str) -> None:
    layer = layer_of("tensorwise")
    optimizer = optim.AdamW(layer.parameters(), lr=1e-3, preset=preset)
    run(layer, optimizer, 1)
    saved = through_a_file(optimizer.state_dict())
    saved["param_groups"][0] |= {"preset": f"{preset}/3", "lr": 5.0}
    before = {key: value.clone() for key, value in optimizer.state[layer.weight].items()}
    with pytest.raises(ValueError, match="is not known"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert all(torch.equal(value, before[key]) for key, value in optimizer.state[layer.weight].items())


def test_converted_states_are_saved_in_the_second_format() -> None:
    layer = layer_of("bfloat16")
    optimizer = optim.AdamW(layer.parameters(), lr=1e-3, preset="lean")
    run(layer, optimizer, 1)
    saved = through_a_file(optimizer.state_dict())
    saved["param_groups"][0]["preset"] = "lean"
    with pytest.warns(UserWarning, match="in its first form"):
        optimizer.load_state_dict(saved)
    again = optim.AdamW(layer.parameters(), lr=1e-3, preset="lean")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(through_a_file(optimizer.state_dict()))
    for key, value in optimizer.state[layer.weight].items():
        assert torch.equal(again.state[layer.weight][key], value), key

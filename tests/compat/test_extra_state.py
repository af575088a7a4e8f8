"""Training continues from checkpoints of Transformer Engine, and code in their pickles does not run."""

import builtins
import collections
import enum
import io
import os
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quaver.compat.transformer_engine.pytorch as te
from quaver.compat import extra_state
from quaver.compat.transformer_engine.common.recipe import DelayedScaling
from tests.close import assert_close

LENGTH = 4


@pytest.fixture
def theirs() -> Iterator[Any]:
    """A recipe as the package's class pickles it, of modules that do not exist when it is read."""
    names = ["transformer_engine", "transformer_engine.common", "transformer_engine.common.recipe"]
    modules = [types.ModuleType(name) for name in names]
    sys.modules.update(dict(zip(names, modules, strict=True)))
    place = modules[-1]
    helper = collections.namedtuple("_FormatHelper", ["max_fwd", "max_bwd"], module=names[-1])  # type: ignore[misc]
    fmt = enum.Enum("Format", {"HYBRID": helper(448, 57344)}, module=names[-1])
    kind = type("DelayedScaling", (), {"__module__": names[-1]})
    place._FormatHelper, place.Format, place.DelayedScaling = helper, fmt, kind  # type: ignore[attr-defined]
    recipe = kind()
    recipe.__dict__.update(margin=0, fp8_format=fmt.HYBRID, amax_history_len=LENGTH)  # type: ignore[attr-defined]
    yield recipe
    for name in names:
        sys.modules.pop(name, None)


class Plain:
    """One linear layer by Transformer Engine's rule: scales from before the step, and amaxes recorded by it."""

    def __init__(self, weight: Tensor, bias: Tensor, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.weight, self.bias = weight.clone(), bias.clone()
        #: Of input, weight and grad_output: row 0 is the present step's, the newest of before is the last.
        self.history = torch.rand(LENGTH, 3, generator=rng) * torch.tensor([3.0, 0.1, 0.05]) + 0.01
        self.history[0] = 0
        self.scale = torch.tensor([448.0, 448.0, 57344.0]) / self.history.amax(0)

    def cast(self, x: Tensor, column: int, dtype: torch.dtype) -> Tensor:
        self.history[0, column] = x.abs().max()
        largest = torch.finfo(dtype).max
        return (x * self.scale[column]).clamp(-largest, largest).to(dtype).float() / self.scale[column]

    def forward(self, x: Tensor) -> Tensor:
        self.x = self.cast(x, 0, torch.float8_e4m3fn)
        self.w = self.cast(self.weight, 1, torch.float8_e4m3fn)
        return F.linear(self.x, self.w, self.bias)

    def backward(self, g: Tensor, lr: float) -> Tensor:
        bias_gradient, g = g.sum(0), self.cast(g, 2, torch.float8_e5m2)
        x_gradient = g @ self.w
        self.weight -= lr * (g.t() @ self.x)
        self.bias -= lr * bias_gradient
        self.scale = torch.tensor([448.0, 448.0, 57344.0]) / self.history.amax(0)
        self.history = self.history.roll(-1, 0)
        self.history[0] = 0
        return x_gradient


def state_of(layers: list[Plain], recipe: Any = None) -> dict[str, Any]:
    """State saved by the layers of a module. Without a recipe it is as in 1.x, where backward visits the last layer
    first.
    """
    back = layers if recipe is not None else layers[::-1]
    state: dict[str, Any] = {} if recipe is None else {"recipe": recipe}
    one, zero = torch.ones(1), torch.zeros(LENGTH, 1)
    state["scale_fwd"] = torch.cat([torch.cat((layer.scale[:2], one)) for layer in layers])
    state["amax_history_fwd"] = torch.cat([torch.cat((layer.history[:, :2], zero), 1) for layer in layers], 1)
    state["scale_bwd"] = torch.cat([torch.cat((layer.scale[2:], one)) for layer in back])
    state["amax_history_bwd"] = torch.cat([torch.cat((layer.history[:, 2:], zero), 1) for layer in back], 1)
    if recipe is None:
        state |= {name.replace("scale", "scale_inv"): 1 / state[name] for name in ("scale_fwd", "scale_bwd")}
    return state | {"extra_fp8_variables": {"fp8_max_fwd": 448, "num_gemms": len(layers), "async": (True, "x", [1.5])}}


def packed(state: Any, how: str = "bytes") -> Any:
    if how == "file":
        file = io.BytesIO()
        torch.save(state, file)
        return file
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


RECIPE = DelayedScaling(amax_history_len=LENGTH)


def test_groups_have_their_own_in_one_weight_too(theirs: Any) -> None:
    plains = [Plain(torch.randn(32, 64), torch.randn(32), seed) for seed in range(3)]
    parts = {f"weight{i}": plain.weight for i, plain in enumerate(plains)}
    saved = parts | {"_extra_state": packed(state_of(plains, theirs))}
    several = te.GroupedLinear(3, 64, 32, bias=False)
    one = te.GroupedLinear(3, 64, 32, bias=False, single_grouped_weight=True)
    for layer in (several, one):
        layer.load_state_dict(dict(saved))
    for name in ("history", "factor"):
        each = torch.stack([several.get_buffer(f"gemm{i}.{name}") for i in range(3)])
        assert torch.equal(one.get_buffer(f"grouped.{name}"), each)
    assert torch.equal(one.get_parameter("weight"), torch.stack([plain.weight for plain in plains]))


@pytest.mark.parametrize("how", ["2.x", "1.x", "1.x, in a file"])
def test_a_linear_layer_has_the_next_losses(how: str, theirs: Any) -> None:
    torch.manual_seed(0)
    plain = Plain(torch.randn(32, 64) * 0.02, torch.randn(32) * 0.1, seed=1)
    given = packed(state_of([plain], theirs if how == "2.x" else None), "file" if "file" in how else "bytes")
    layer = te.Linear(64, 32)
    layer.load_state_dict({"weight": plain.weight, "bias": plain.bias, "_extra_state": given})
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for step in range(6):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)) * (1 + step % 3)
        with te.autocast(recipe=RECIPE):
            y = layer(x)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        z = plain.forward(x)
        assert abs(loss.item() - z.square().mean().item()) <= 1e-6 * loss.item(), f"step {step}"
        plain.backward(2 * z / z.numel(), 0.1)
        assert_close("weight", layer.weight.detach(), plain.weight, 1e-6)
    assert layer.state_dict()["linear.history"].shape == (LENGTH, 3)


@pytest.mark.parametrize("version", ["2.x", "1.x"])
def test_an_mlps_layers_each_take_their_own(version: str, theirs: Any) -> None:
    torch.manual_seed(0)
    layers = [
        Plain(torch.randn(96, 64) * 0.05, torch.zeros(96), 1),
        Plain(torch.randn(64, 96) * 0.05, torch.zeros(64), 2),
    ]
    module = te.LayerNormMLP(64, 96, activation="relu")
    state = {"layer_norm_weight": torch.ones(64), "layer_norm_bias": torch.zeros(64)}
    for i, plain in enumerate(layers):
        state |= {f"fc{i + 1}_weight": plain.weight, f"fc{i + 1}_bias": plain.bias}
    given = packed(state_of(layers, theirs if version == "2.x" else None))
    module.load_state_dict({**state, "_extra_state": given})
    optimizer = torch.optim.SGD([p for n, p in module.named_parameters() if "fc" in n], 0.05)
    for step in range(4):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
        with te.autocast(recipe=RECIPE):
            loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        h = layers[0].forward(F.layer_norm(x, (64,)))
        z = layers[1].forward(h.relu())
        assert abs(loss.item() - z.square().mean().item()) <= 1e-5 * loss.item(), f"step {step}"
        layers[0].backward(layers[1].backward(2 * z / z.numel(), 0.05) * (h > 0), 0.05)


def test_state_without_recordings_is_unset() -> None:
    plain = Plain(torch.zeros(4, 4), torch.zeros(4), 1)
    plain.history[:, 2], plain.scale[2] = 0, 1.0
    (buffers,) = extra_state.histories(state_of([plain], object()), "x", 1)
    assert buffers["factor"][2] == 0 and (buffers["factor"][:2] == plain.scale[:2]).all()


def test_states_without_scales_are_accepted(theirs: Any) -> None:
    for given in (
        torch.empty(0, dtype=torch.uint8),
        None,
        packed(None),
        packed({"recipe": theirs}),
        packed({}, "file"),
    ):
        te.Linear(8, 8).load_state_dict({"weight": torch.zeros(8, 8), "bias": torch.zeros(8), "_extra_state": given})
    whole = te.TransformerLayer(32, 32, 2)
    state = whole.state_dict()
    names = ("self_attention.layernorm_qkv", "self_attention.core_attention", "self_attention.proj", "layernorm_mlp")
    state |= {f"{name}._extra_state": torch.empty(0, dtype=torch.uint8) for name in names}
    whole.load_state_dict(state)


class Gadget:
    """Calls a function where it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def gadgets(mark: Path) -> dict[str, bytes]:
    """Pickles that leave a mark where they run, by different ways to a function."""
    touch = f"open({str(mark)!r}, 'w')"
    inner = io.BytesIO()
    torch.save(Gadget(os.system, f"touch {mark}"), inner)
    legacy = io.BytesIO()
    torch.save(Gadget(os.system, f"touch {mark}"), legacy, _use_new_zipfile_serialization=False)
    hooks = collections.OrderedDict({0: Gadget(builtins.eval, touch)})
    gadgets_by_name = {
        "os.system": Gadget(os.system, f"touch {mark}"),
        "eval": Gadget(builtins.eval, touch),
        "exec": Gadget(builtins.exec, touch),
        "getattr": Gadget(builtins.getattr, "x", "upper"),
        "map": Gadget(builtins.map, os.system, [f"touch {mark}"]),
        "a function of torch's": Gadget(torch.load, io.BytesIO(inner.getvalue())),
        "a file within": Gadget(torch.storage._load_from_bytes, inner.getvalue()),
        "a legacy file within": Gadget(torch.storage._load_from_bytes, legacy.getvalue()),
        "hooks": Gadget(torch._utils._rebuild_tensor_v2, None, 0, (1,), (1,), False, hooks),  # type: ignore[attr-defined]
        "an importer": Gadget(__import__, "antigravity"),
    }
    raw = {
        "GLOBAL": b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.",
        "INST": b"(S'touch " + str(mark).encode() + b"'\nios\nsystem\n.",
        "STACK_GLOBAL": pickle.dumps(gadgets_by_name["os.system"], 4),
        "a name with dots": b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__reduce__\x93.",
        "a stand-in's attributes": (
            b"\x80\x04\x8c\x12transformer_engine\x8c\x06Recipe\x93)R}\x8c\x05value\x8c\x05posix\x8c\x06system\x93sb."
        ),
        "attributes of what builds": (
            b"\x80\x04\x8c\x0ctorch._utils\x8c\x12_rebuild_tensor_v2\x93N}\x8c\x08__call__K\x01s\x86b."
        ),
        "PERSID": b"Pos.system\n.",
        "OBJ": b"(cos\nsystem\nS'touch " + str(mark).encode() + b"'\no.",
        "NEWOBJ": b"\x80\x02cos\nsystem\n(S'touch " + str(mark).encode() + b"'\nt\x81.",
        "NEWOBJ_EX": b"\x80\x04cos\nsystem\n(S'touch " + str(mark).encode() + b"'\nt}\x92.",
        "EXT1": b"\x80\x02\x82\x01.",
        "a name of another's by dots": b"\x80\x04\x8c\x12transformer_engine\x8c\tos.system\x93\x8c\x04trueR.",
        "a function of a stand-in's": b"\x80\x04\x8c\x05numpy\x8c\x12core.multiarray.os\x93.",
        "a lookup by copyreg": b"\x80\x04\x8c\x08copyreg\x8c\x0b__newobj__\x93.",
    }
    return {name: pickle.dumps({"recipe": value}) for name, value in gadgets_by_name.items()} | raw


@pytest.mark.parametrize("name", gadgets(Path("nowhere")))
def test_a_planted_pickle_runs_nothing(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    data = gadgets(mark)[name]
    given = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    layer = te.Linear(8, 8)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    state = {"0.weight": torch.ones(8, 8), "0.bias": torch.ones(8), "0._extra_state": given}
    with pytest.raises(ValueError, match=r"cannot read 0\._extra_state: .*Leave it out of the state dict"):
        torch.nn.Sequential(layer).load_state_dict(state)
    assert not mark.exists() and "antigravity" not in sys.modules
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())


@pytest.mark.parametrize(("size", "stride"), [((1 << 40, 3), (0, 0)), ((1 << 40, 3), (3, 1)), ((2, 3), (0, 1))])
def test_a_few_values_do_not_become_many(size: tuple[int, int], stride: tuple[int, int]) -> None:
    storage = torch.zeros(3).untyped_storage()
    file = io.BytesIO()
    torch.save(torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True), file)
    within = Gadget(torch.storage._load_from_bytes, file.getvalue())
    tensor = Gadget(torch._utils._rebuild_tensor_v2, within, 0, size, stride, False, collections.OrderedDict())  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"cannot read x: it has a tensor \[.*\] of 12 bytes"):
        extra_state.read(pickle.dumps({"amax_history_fwd": tensor}), "x")


@pytest.mark.parametrize("how", ["zip", "legacy"])
def test_a_planted_file_runs_nothing(how: str, tmp_path: Path) -> None:
    file, mark = io.BytesIO(), tmp_path / "ran"
    torch.save({"x": Gadget(os.system, f"touch {mark}")}, file, _use_new_zipfile_serialization=how == "zip")
    with pytest.raises(ValueError, match="cannot read"):
        extra_state.read(file, "x._extra_state")
    assert not mark.exists()


def test_invalid_arguments_give_a_clear_error() -> None:
    plain = Plain(torch.zeros(8, 8), torch.zeros(8), 1)
    state = {"weight": torch.zeros(8, 8), "bias": torch.zeros(8)}
    old = state_of([plain])
    old["scale_fwd"], old["amax_history_fwd"] = old["scale_fwd"][:2], old["amax_history_fwd"][:, :2]
    for given, sentence in (
        (packed(old), r"_extra_state has amax_history_fwd \[4, 2\].*it is of another version"),
        (packed(state_of([plain, plain])), "3 columns forward and 2 backward for this module"),
        (packed([1, 2]), "holds a list"),
        (torch.tensor([1, 2, 3], dtype=torch.uint8), "cannot read"),
        (packed({"scale_fwd": 1.0}), "or of another module"),
    ):
        with pytest.raises(ValueError, match=sentence):
            te.Linear(8, 8).load_state_dict({**state, "_extra_state": given})

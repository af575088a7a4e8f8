"""Checkpoints of other libraries are read without running their code, and training continues with the same losses."""

import copy
import os
import pickle
import sys
import types
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quaver
import quaver.torch as qt
from quaver.compat.checkpoints import read
from tests.close import assert_bitwise
from tests.pairs import alternating

float8 = pytest.importorskip("torchao.float8")
pytestmark = pytest.mark.filterwarnings("ignore")


def theirs(**options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    return float8.convert_to_float8_training(
        model, config=float8.Float8LinearConfig(emulate=True, pad_inner_dim=False, **options)
    )


def step(model: nn.Module, steps: int = 1) -> list[float]:
    """Losses of some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for i in range(steps):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(i))
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.fixture(params=[True, False], ids=["with torchao", "without"])
def torchao_there(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether torch knows torchao's classes, as it does once torchao was imported."""
    known = torch.serialization.get_safe_globals()
    if not request.param:
        torch.serialization.clear_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(known)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.usefixtures("torchao_there")
def test_torchaos_weights_are_read_and_the_next_steps_are_its_own(gathers: bool, tmp_path: Path) -> None:
    trained = theirs()
    step(trained, 3)
    saved = trained
    if gathers:
        # Its weights are pickled as tensors of a class of its own.
        saved = theirs(enable_fsdp_float8_all_gather=True)
        for name, p in saved.named_parameters():
            value = trained.get_parameter(name).detach()
            with torch.no_grad():
                (p._tensor if name.endswith("weight") else p).copy_(value)
        assert type(saved[0].weight).__name__ == "WeightWithDynamicFloat8CastTensor"
    torch.save({"model": saved.state_dict(), "step": 3, "notes": ["a", (1, None)]}, tmp_path / "theirs.pt")
    content = read(tmp_path / "theirs.pt")
    assert content["step"] == 3 and content["notes"] == ["a", (1, None)]
    for name, value in content["model"].items():
        assert type(value) in (torch.Tensor, nn.Parameter)
        assert_bitwise(value.detach(), trained.get_parameter(name).detach(), name)
    ours = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    qt.convert(ours, quaver.recipes.tensorwise(power_of_two=False))
    ours.load_state_dict(content["model"])
    for a, b in zip(step(ours, 3), step(copy.deepcopy(trained), 3), strict=True):
        assert abs(a - b) < 1e-6 * b


# MS-AMP cannot be installed here: what its classes pickle, by their names and attributes in its source.


class QType:
    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value


class ScalingMeta:
    def __init__(self, qtype: QType, scale: torch.Tensor) -> None:
        self.qtype, self.scale, self.scale_inv = qtype, scale, 1.0 / scale
        self.amax, self.amax_counter = torch.zeros(1), torch.zeros((), dtype=torch.int32)
        self.window_size, self.locked = 1, False


class ScalingTensor:
    def __init__(self, value: torch.Tensor, meta: ScalingMeta) -> None:
        self.value, self.meta, self._requires_grad = value, meta, False


class ScalingParameter(ScalingTensor):
    pass


NAMES = {
    QType: "msamp.common.dtype.dtypes",
    ScalingMeta: "msamp.common.tensor.meta",
    ScalingTensor: "msamp.common.tensor.tensor",
    ScalingParameter: "msamp.nn.parameter",
}


@pytest.mark.parametrize("kind", [ScalingTensor, ScalingParameter])
@pytest.mark.parametrize(
    ("qtype", "dtype", "scale"),
    [
        (QType("kFloat8E4M3", 5), torch.float8_e4m3fn, 64.0),
        (QType("kFloat8E5M2", 6), torch.float8_e5m2, 4.0),
        (QType("kFloat16", 3), torch.float16, 1024.0),
    ],
    ids=["e4m3", "e5m2", "float16"],
)
def test_msamps_weights_are_codes_times_their_scale(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Any, qtype: QType, dtype: torch.dtype, scale: float
) -> None:
    weight = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
    codes = (weight * scale).clamp(-400, 400).to(dtype)
    value = codes if dtype is torch.float16 else codes.view(torch.uint8)
    saved = {"0.weight": kind(value, ScalingMeta(qtype, torch.tensor(scale))), "0.bias": torch.ones(48)}
    for one, module in NAMES.items():
        monkeypatch.setattr(one, "__module__", module)
        parts = module.split(".")
        for i in range(len(parts)):
            name = ".".join(parts[: i + 1])
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or types.ModuleType(name))
        monkeypatch.setattr(sys.modules[module], one.__name__, one, raising=False)
    torch.save({"model": saved}, tmp_path / "msamp.pt")
    monkeypatch.undo()
    content = read(tmp_path / "msamp.pt")["model"]
    assert_bitwise(content["0.weight"], codes.float() / scale)
    assert_bitwise(content["0.bias"], torch.ones(48))
    # Scales are powers of two: a weight that exists only in eight bits takes over the very numbers.
    if dtype is torch.float8_e4m3fn:
        with qt.quantized_init("tensorwise"):
            layer = nn.Sequential(qt.Linear(32, 48))
        layer.load_state_dict(content)
        assert_bitwise(qt.plain_state_dict(layer)["0.weight"], codes.float() / scale)


class Runs:
    """A pickle that calls a function where it is read."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def gadgets(mark: Path) -> dict[str, Any]:
    return {
        "os.system": Runs(os.system, f"touch {mark}"),
        "exec": Runs(exec, f"open({str(mark)!r}, 'w').close()"),
        "eval": Runs(eval, f"open({str(mark)!r}, 'w').close()"),
        "open": Runs(open, str(mark), "w"),
        "getattr": Runs(getattr, "x", "join"),
        "import": Runs(__import__, "antigravity"),
        "pickle in a pickle": Runs(pickle.loads, pickle.dumps(Runs(os.system, f"touch {mark}"))),
        "torch.load": Runs(torch.load, str(mark)),
        "as a state": {"model": {"weight": torch.ones(2), "hook": Runs(os.system, f"touch {mark}")}},
    }


@pytest.mark.parametrize(("kind", "zipped"), alternating(gadgets(Path("x")), [True, False], ["os.system"]))
def test_a_malicious_file_runs_nothing(kind: str, zipped: bool, tmp_path: Path) -> None:
    mark, file = tmp_path / "mark", tmp_path / "file.pt"
    torch.save({"state": gadgets(mark)[kind]}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match="None of its code was executed"):
        read(file)
    plain = tmp_path / "plain.pt"
    try:
        plain.write_bytes(pickle.dumps(gadgets(mark)[kind]))
    except TypeError:
        return
    with pytest.raises(ValueError, match="None of its code was executed"):
        read(plain)
    assert not mark.exists()


def test_cyclic_and_shared_references_are_read_once(tmp_path: Path) -> None:
    file, one = tmp_path / "nested.pt", [torch.ones(2)]
    for _ in range(64):
        one = [one, one]
    one.append(one)
    torch.save({"a": one, "b": (one, one)}, file)
    content = read(file)
    assert content["a"] is content["b"][0] is content["a"][2] and content["a"][0] is content["a"][1]
    # Pickle's reader has no recursion of its own that would end first.
    with zipfile.ZipFile(file) as before:
        parts = {name: before.read(name) for name in before.namelist()}
    with zipfile.ZipFile(file, "w") as after:
        for name, data in parts.items():
            after.writestr(
                name, data if not name.endswith("data.pkl") else b"\x80\x02" + b"]" * 10**5 + b"a" * 99_999 + b"."
            )
    with pytest.raises(ValueError, match=r"nested\.pt is nested deeper than any checkpoint"):
        read(file)


def test_tensors_of_another_class_that_the_process_has_registered_are_refused(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    quantization.quantize_(layer, quantization.Float8WeightOnlyConfig())
    torch.save({"model": [layer.state_dict()]}, tmp_path / "theirs.pt")
    with pytest.raises(ValueError, match=r"has a tensor of torchao\.quantization.*returns plain tensors"):
        read(tmp_path / "theirs.pt")


def test_files_are_read_in_several_threads_and_leave_no_names(tmp_path: Path) -> None:
    file = tmp_path / "theirs.pt"
    torch.save(theirs(enable_fsdp_float8_all_gather=True).state_dict(), file)
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with ThreadPoolExecutor(4) as pool:
            contents = list(pool.map(lambda _: read(file), range(24)))
        assert not torch.serialization.get_safe_globals()
    finally:
        torch.serialization.add_safe_globals(known)
    assert len(contents) == 24 and {type(c["0.weight"]) for c in contents} <= {torch.Tensor, nn.Parameter}


def test_truncated_files_and_other_versions_give_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "theirs.pt"
    saved = theirs(enable_fsdp_float8_all_gather=True).state_dict()
    torch.save(saved, file)
    data = file.read_bytes()
    for cut in (len(data) // 2, 100, 0):
        file.write_bytes(data[:cut])
        with pytest.raises(ValueError, match="truncated, no checkpoint"):
            read(file)
    weight = theirs(enable_fsdp_float8_all_gather=True).state_dict()["0.weight"]
    del weight._tensor
    weight.values = torch.ones(1)
    torch.save({"weight": weight}, file)
    with pytest.raises(ValueError, match="WeightWithDynamicFloat8CastTensor of another version"):
        read(file)
    with pytest.raises(ValueError, match="is no file"):
        read(tmp_path / "none.pt")
    (tmp_path / "a.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    with pytest.raises(ValueError, match="not a complete safetensors file"):
        read(tmp_path / "a.safetensors")

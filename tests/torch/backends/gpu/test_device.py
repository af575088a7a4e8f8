"""Why a device is not for the kernels: each reason is a sentence, found without a GPU."""

import sys

import pytest
import torch

from quaver.torch.backends.gpu import device


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = device._why_no_fp8, device._why_too_old, device.why_no_triton
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


CARD = torch.device("cuda", 0)


@pytest.mark.parametrize("arch", [70, 75])
def test_a_gpu_before_ampere_has_neither_kernels_nor_fp8_gemms(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    monkeypatch.setattr(device, "_architecture", lambda _: arch)
    assert f"compute capability 7.{arch - 70} has no FP8 GEMMs" in device.why_no_fp8(CARD, "native")
    why = device.why_no_kernels(CARD)
    assert f"7.{arch - 70} is below 8.0 (Ampere)" in why and "plain torch operations" in why


@pytest.mark.parametrize("arch", [80, 86, 87])
def test_ampere_has_kernels_and_no_fp8_gemms(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    monkeypatch.setattr(device, "_architecture", lambda _: arch)
    assert f"compute capability 8.{arch - 80} has no FP8 GEMMs" in device.why_no_fp8(CARD, "native")
    assert device.why_no_kernels(CARD) == ""


@pytest.mark.parametrize("arch", [89, 90, 100, 120])
def test_a_gpu_with_fp8_has_no_reason(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    monkeypatch.setattr(device, "_architecture", lambda _: arch)
    assert device.why_no_fp8(CARD, "native") == device.why_no_kernels(CARD) == ""


def test_rocm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_architecture", lambda _: 94)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm" in device.why_no_fp8(CARD, "native") and "ROCm" in device.why_no_kernels(CARD)


@pytest.mark.parametrize("name", ["native", "triton", "decoded"])
def test_the_cpu_is_used_only_when_requested_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert device.why_no_fp8(cpu, name) and device.why_no_kernels(cpu)
    monkeypatch.setattr(device, "forced_implementations", {name})
    assert not device.why_no_fp8(cpu, name)
    assert bool(device.why_no_kernels(cpu)) == (name != "triton")


def test_without_the_interpreter_a_cpu_runs_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "forced_implementations", {"triton"})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1" in device.why_no_kernels(torch.device("cpu"))


def test_windows_errors_name_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "platform", "win32")
    assert "pip install triton-windows" in device.why_no_triton()


@pytest.mark.parametrize("version", ["3.5.1", "2.3.0"])
def test_an_old_triton_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("triton.__version__", version)
    assert f"triton {version} is older than 3.6" in device.why_no_triton()


@pytest.mark.parametrize("version", ["3.10.0", "4.0.0+git12"])
def test_a_new_triton_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("triton.__version__", version)
    with pytest.warns(UserWarning, match="newer than 3.9"):
        assert device.why_no_triton() == ""
    assert device.why_no_triton() == ""

"""Every rate has a source and a plausible size; unknown cards are a sentence."""

import pytest

from quaver.costs import hardware
from quaver.costs.hardware import GPUS, TE_FLOPS, Gpu, GpuRate

KINDS = {"bf16", "tensor", "row", "block", "mx", "nvfp4"}
FIGURES = [(gpu, name, f) for gpu in GPUS.values() for name, f in {"copy": gpu.copy, **gpu.rates}.items()]


@pytest.mark.parametrize(("gpu", "name", "figure"), FIGURES, ids=[f"{g.name}-{n}" for g, n, _ in FIGURES])
def test_every_rate_has_a_source(gpu: Gpu, name: str, figure: GpuRate) -> None:
    assert figure.value > 0 and len(figure.source) > 20
    assert figure.how in ("measured", "published", "derived")
    assert name == "copy" or name in KINDS


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_kinds_are_those_that_the_architecture_has(gpu: Gpu) -> None:
    assert "bf16" in gpu.rates
    assert ("tensor" in gpu.rates) is ("row" in gpu.rates) is (gpu.capability >= (8, 9))
    assert ("block" in gpu.rates) is (gpu.capability == (9, 0))
    assert ("mx" in gpu.rates) is ("nvfp4" in gpu.rates) is gpu.any_layout
    assert gpu.any_layout is (gpu.capability >= (10, 0))


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_eight_bits_are_at_most_twice_as_fast_as_bf16_and_four_at_most_eight_times(gpu: Gpu) -> None:
    bf16 = gpu.rates["bf16"].value
    for name, figure in gpu.rates.items():
        assert 1 <= figure.value / bf16 <= (8 if name == "nvfp4" else 2), name


def test_the_calibration_matches_two_rows_of_one_table() -> None:
    nvl = GPUS["h200-nvl"].rates
    assert pytest.approx(nvl["bf16"].value, rel=1e-3) == TE_FLOPS / 32.014e-3 / 1e12
    assert pytest.approx(nvl["tensor"].value, rel=1e-3) == TE_FLOPS / 16.785e-3 / 1e12


def test_a_card_is_found_by_its_name_however_it_is_written() -> None:
    assert hardware.get("H200 NVL") is hardware.get("h200-nvl") is GPUS["h200-nvl"]
    assert hardware.get(GPUS["l4"]) is GPUS["l4"]
    assert hardware.get("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert hardware.get("NVIDIA A100-SXM4-80GB") is GPUS["a100"]
    with pytest.raises(ValueError, match="'NVIDIA H100 PCIe'"):
        hardware.get("NVIDIA H100 PCIe")


def test_no_two_cards_have_one_driver_name() -> None:
    names = [gpu.driver or gpu.about for gpu in GPUS.values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h20", "did you mean 'h200'"),
        ("v100", "no rates are known for the GPU 'v100'"),
        ("", "known: a100, rtx3090, l4, l40s"),
        (None, "GPU None"),
    ],
)
def test_an_unknown_gpu_lists_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        hardware.get(name)
    assert all(known in str(raised.value) for known in GPUS)

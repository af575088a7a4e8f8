"""A training step takes as many launches as docs/kernels.md says, and no recipe more than its ceiling."""

import pytest

from tests.torch.backends.gpu.launch_counts import EMULATED, NATIVE, counted, launches, llama_layer, rows

#: Of a Linear without a bias whose weight changes in each step, forward and backward, its three GEMMs included.
CEILINGS = {
    "tensorwise": 7,
    # One of them the roll of the history, which all layers share.
    "delayed": 6,
    "rowwise": 7,
    "rowwise_bf16_wgrad": 9,
    "blockwise": 6,
    "mxfp8": 6,
    # Eight of them the weight's, which the general way quantizes.
    "nvfp4": 15,
}


@pytest.mark.parametrize(("arch", "name"), [(arch, name) for arch, names in NATIVE.items() for name in names])
def test_a_linear_takes_as_many_launches_as_the_page_says(arch: int, name: str) -> None:
    *linear, _ = rows()[f"{name} sm_{arch}"]
    assert tuple(map(str, counted(arch, name))) == tuple(linear)
    assert int(linear[0]) <= CEILINGS[name]


@pytest.mark.parametrize(("arch", "name"), [(arch, name) for arch, names in EMULATED.items() for name in names])
def test_an_emulated_linear_takes_as_many_launches_as_the_page_says(arch: int, name: str) -> None:
    *linear, _ = rows()[f"{name} sm_{arch}"]
    counts = counted(arch, name)
    assert tuple(map(str, counts)) == tuple(linear)
    assert counts[0] <= 12 and counts[2] <= 10


@pytest.mark.parametrize(("arch", "name"), [(90, "tensorwise"), (90, "rowwise"), (90, "delayed"), (90, "nvfp4")])
def test_a_llama_layer_takes_as_many_launches_as_the_page_says(arch: int, name: str) -> None:
    names = launches(arch, name, *llama_layer())
    assert len(names) == int(rows()[f"{name} sm_{arch}"][-1])
    casts = {"torch._to_copy"} if name in NATIVE[arch] else set()
    assert not {"torch.zero_", "torch.zeros", "torch.copy_", *casts} & set(names), names

"""A training step takes as many launches as docs/design/kernels.md says, and no recipe more than its ceiling."""

import pytest
import torch

import quaver.torch as qt
from quaver import recipes
from quaver.torch.backends.gpu import ssm
from tests.torch.backends.gpu.launch_counts import (
    EMULATED,
    MODES_OF,
    NATIVE,
    PAGE,
    _Kernels,
    _Operations,
    by_mode,
    counted,
    launches,
    llama_layer,
    rows,
    rows_by_mode,
)
from tests.torch.backends.gpu.pretend import Driver, as_on_a_gpu, become

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

#: What docs/design/kernels.md says of a scan and of its convolution in bfloat16, forward and backward.
SCAN, CONVOLUTION = (4, 11), (1, 4)


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


@pytest.mark.parametrize("name", MODES_OF)
def test_an_emulated_linear_takes_as_few_launches_without_gradients_captured_and_compiled(name: str) -> None:
    counts = by_mode(90, name)
    assert tuple(map(str, counts)) == rows_by_mode()[name]
    training, without, captured, compiled = counts
    # A capture and a graph do not keep the weight's values from forward to backward; a graph also rounds each gradient
    # by itself. The counts of noise are copied and advanced by eight operations, which Inductor writes as two kernels.
    assert without <= training // 2 and captured <= training + 2
    assert compiled <= training + (10 if recipes.get(name).stochastic else 2)


@pytest.mark.parametrize(("arch", "name"), [(90, "tensorwise"), (90, "rowwise"), (90, "delayed"), (90, "nvfp4")])
def test_a_llama_layer_takes_as_many_launches_as_the_page_says(arch: int, name: str) -> None:
    names = launches(arch, name, *llama_layer())
    assert len(names) == int(rows()[f"{name} sm_{arch}"][-1])
    casts = {"torch._to_copy"} if name in NATIVE[arch] else set()
    assert not {"torch.zero_", "torch.zeros", "torch.copy_", *casts} & set(names), names


def test_a_scan_and_its_convolution_take_as_many_launches_as_the_page_says() -> None:
    heads, groups = 4, 2
    x, dt = (torch.randn(2, 130, heads, *end).bfloat16().requires_grad_() for end in ((16,), ()))
    B, C = (torch.randn(2, 130, groups, 16).bfloat16().requires_grad_() for _ in range(2))
    A, D, bias = (torch.randn(heads, requires_grad=True) for _ in range(3))
    channels = torch.randn(2, 130, 96).bfloat16().requires_grad_()
    taps, of_taps = torch.randn(96, 4, requires_grad=True), torch.randn(96, requires_grad=True)
    counts = []
    with pytest.MonkeyPatch.context() as patch, as_on_a_gpu(patch):
        become(90, patch)
        # As in a scan that fills a GPU: one program takes all heads of a group.
        patch.setattr(ssm, "PROGRAMS", 0)
        driver = Driver(patch, runs=False)
        for run in (
            lambda: qt.ssd(x, dt, A, B, C, D=D, dt_bias=bias)[0],
            lambda: qt.causal_conv1d(channels, taps, of_taps),
        ):
            for _ in range(2):
                driver.launched = recorded = _Kernels([])
                with _Operations(recorded.launched):
                    y = run()
                forward, recorded.launched = recorded.launched, []
                g = torch.ones_like(y)
                with _Operations(recorded.launched):
                    y.backward(g)
            back = [name for name in recorded.launched if name != "torch.add_"]
            counts.append((len(forward), len(back)))
            # Zeros are the gradient of last states that nothing used; taps' gradients are turned as the weight lies.
            assert {name for name in (*forward, *back) if name.startswith("torch.")} <= {"torch.zeros", "torch.clone"}
    assert counts == [SCAN, CONVOLUTION]
    for what, of in (("Scan", SCAN), ("Convolution before it", CONVOLUTION)):
        assert f"| {what} | {of[0]} | {of[1]} |" in PAGE.read_text()

"""Optimizer states in host memory: memory, copies and time of a step, for numbers that can be checked by hand."""

from dataclasses import replace

import pytest

from quaver.costs import hardware
from quaver.costs.host_optimizer import CPU_STEPS, PIECE_BYTES, TrainedParameter, buffers, place

#: A GPU of 1 TB/s, with 55.6 GB/s to the host.
GPU = replace(hardware.get("h100"), copy=hardware.GpuRate(1.0, "measured", "this test"))
MIB = 1 << 20


def parameter(mib: float, large: bool = True) -> TrainedParameter:
    """A float32 parameter with so many MiB of weights, and twice as many of states."""
    return TrainedParameter("float32", mib * MIB / 4, mib * MIB, mib * MIB, 2 * mib * MIB, large)


def test_only_large_parameters_leave_the_gpu() -> None:
    parameters = [parameter(8), parameter(1, large=False)]
    on_gpu, cpu, stream = (place(where, parameters, GPU, cores=1, memory=1e30) for where in ("device", "cpu", "stream"))
    assert (on_gpu.device, on_gpu.host, on_gpu.copying) == (36 * MIB, 0, 0)
    assert on_gpu.seconds == pytest.approx(7 / 4 * 36 * MIB / 1e12)
    # Weights and gradients of one piece are copied into a buffer on the host.
    assert (cpu.device, cpu.host, cpu.to_host, cpu.to_device) == (20 * MIB, 32 * MIB, 16 * MIB, 8 * MIB)
    assert cpu.copying == pytest.approx(24 * MIB / 55.6e9)
    assert cpu.stepping == pytest.approx(2 * MIB * 3.9e-9)
    assert (stream.device, stream.host, stream.to_host, stream.to_device) == (36 * MIB, 16 * MIB, 16 * MIB, 16 * MIB)
    assert stream.copying == pytest.approx(32 * MIB / 55.6e9) and stream.stepping == on_gpu.seconds


def test_the_longer_of_copies_and_steps_counts() -> None:
    parameters = [parameter(8)]
    slow, fast, starved = (
        place("cpu", parameters, GPU, cores=cores, memory=memory)
        for cores, memory in ((1, 1e30), (1000, 1e30), (1000, 1e9))
    )
    assert slow.seconds == slow.stepping > slow.copying
    assert fast.seconds == fast.copying > fast.stepping
    # Everything is read, weights and states are written, and copies pass through the same memory.
    assert starved.seconds == pytest.approx((56 + 24) * MIB / 1e9)


def test_two_buffers_have_the_size_of_their_largest_pieces() -> None:
    assert PIECE_BYTES["cpu"] == 64 * MIB and PIECE_BYTES["stream"] == 256 * MIB
    # Pieces of 16 + 16, 40 and 8 MiB of weights.
    parameters = [parameter(16), parameter(16), parameter(40), parameter(8)]
    assert buffers("cpu", parameters) == (64 * MIB, 80 * MIB)
    assert buffers("stream", parameters) == (160 * MIB, 0)
    assert buffers("cpu", []) == (0, 0)


def test_every_rate_names_its_source() -> None:
    assert all(rate.how == "measured" and "one thread" in rate.source for rate in CPU_STEPS.values())

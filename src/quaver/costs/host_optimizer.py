"""Cost model of optimizer states in host memory: memory, copies and time of a step with `offload=` of an optimizer.

    placement   copied to the host      copied to the GPU   stepped by
    "device"                                                GPU
    "cpu"       weights and gradients   weights             CPU
    "stream"    states                  states              GPU

Parameters are stepped in pieces, each while the next one is copied, so the longer of copies and steps counts; the first
copy and the last one, which nothing overlaps, are left out. A step on the GPU reads and writes its tensors at the rate
of a copy. A step on the CPU takes the time of its arithmetic on all cores, or that of its bytes in host memory,
whichever is longer.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from quaver.costs.hardware import Gpu, GpuRate

Where = Literal["device", "cpu", "stream"]
PLACEMENTS: tuple[Where, ...] = ("device", "cpu", "stream")
#: Bytes of states in a piece, as in `quaver.torch.optim`. A piece contains at least one parameter.
PIECE_BYTES = {"cpu": 1 << 26, "stream": 1 << 28}


def _cpu_step(nanoseconds: float, weights: str) -> GpuRate:
    source = (
        f"{nanoseconds} ns: AdamW with compile=True on ten matrices of 1024 x 1024 in {weights}, one thread of an "
        "Intel Xeon of 2.1 GHz with AVX-512, family 6, model 207; median of nine steps, mean of two runs"
    )
    return GpuRate(1 / nanoseconds, "measured", source)


#: 10^9 parameters a second that a core steps, by preset.
CPU_STEPS = {
    "lean": _cpu_step(8.7, "codes of tensorwise"),
    "balanced": _cpu_step(11.9, "codes of tensorwise"),
    "exact": _cpu_step(6.0, "bfloat16"),
    "float32": _cpu_step(3.9, "float32"),
}
#: TB/s of a node's memory.
HOST_MEMORY = GpuRate(0.6144, "derived", "peak of two sockets with eight channels of DDR5-4800 each")


class TrainedParameter(NamedTuple):
    """Bytes of a rank's share of a parameter, and number of its elements."""

    preset: str
    elements: float
    weight: float
    gradient: float
    #: Moments, and master or residual.
    states: float
    #: True if placements other than "device" store its states in host memory.
    large: bool

    @property
    def moved(self) -> float:
        """Bytes that a step reads and writes."""
        return 2 * (self.weight + self.states) + self.gradient


class StatePlacement(NamedTuple):
    """Memory of a rank, and the cost of its optimizer's step, under one placement of the states."""

    where: Where
    #: Bytes of weights, gradients, states and buffers on the GPU, and of states and buffers in host memory.
    device: float
    host: float
    #: Bytes that a step copies.
    to_host: float
    to_device: float
    #: Seconds of all copies, and of all steps.
    copying: float
    stepping: float

    @property
    def seconds(self) -> float:
        """Seconds of a whole step."""
        return max(self.copying, self.stepping)


def place(
    where: Where, parameters: Sequence[TrainedParameter], gpu: Gpu, *, cores: float, memory: float
) -> StatePlacement:
    """Predict memory and time of an optimizer's step.

    Args:
        where: placement of the states.
        parameters: parameters of a rank, in the optimizer's order.
        gpu: GPU of the rank.
        cores: CPU cores of the rank.
        memory: the rank's share of the rate of host memory, bytes a second.
    """
    device = sum(p.weight + p.gradient + p.states for p in parameters)
    on_gpu = sum(p.moved for p in parameters) / (gpu.copy.value * 1e12)
    if where == "device":
        return StatePlacement(where, device, 0.0, 0.0, 0.0, 0.0, on_gpu)
    large = [p for p in parameters if p.large]
    states, weights = sum(p.states for p in large), sum(p.weight for p in large)
    reserved = sum(buffers(where, large))
    if where == "stream":
        copying = 2 * states / (gpu.host.value * 1e12)
        return StatePlacement(where, device - states + reserved, states, states, states, copying, on_gpu)
    to_host = weights + sum(p.gradient for p in large)
    copied = to_host + weights
    arithmetic = sum(p.elements / (CPU_STEPS[p.preset].value * 1e9) for p in large) / cores
    in_memory = (sum(p.moved for p in large) + copied) / memory
    return StatePlacement(
        where,
        device - states,
        states + reserved,
        to_host,
        weights,
        copied / (gpu.host.value * 1e12),
        max(arithmetic, in_memory),
    )


def buffers(where: Where, parameters: Sequence[TrainedParameter]) -> tuple[float, float]:
    """Return the bytes of the two buffers that pieces of parameters are copied into in turn."""
    sizes, slot, states, copied = [0.0, 0.0], 0, 0.0, 0.0
    for p in parameters:
        if states and states + p.states > PIECE_BYTES[where]:
            slot, states, copied = 1 - slot, 0.0, 0.0
        states += p.states
        copied += p.states if where == "stream" else p.weight + p.gradient
        sizes[slot] = max(sizes[slot], copied)
    return sizes[0], sizes[1]

"""Achievable rates of GPUs and interconnects, each with its source, and meshes of GPUs.

A rate is measured (its source timed it), published (a data sheet) or derived (from the other two, as its source says).
A GPU lacks the kinds of GEMM for which it has no rate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from quaver.recipes.text import suggest

# ---- GPUs ----


class GpuRate(NamedTuple):
    """A rate in TB/s (bytes read plus written) or TFLOP/s (dense)."""

    value: float
    how: Literal["measured", "published", "derived"]
    source: str

    def times(self, factor: float, source: str) -> "GpuRate":
        """Return a rate derived from this one."""
        return GpuRate(self.value * factor, "derived", source)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Rates and properties of a GPU for the cost model."""

    name: str
    #: Full name.
    about: str
    #: Driver's name (`torch.cuda.get_device_name()`), if it differs from the full name and identifies this GPU.
    driver: str = ""
    #: Compute capability.
    capability: tuple[int, int]
    #: Rate of a large device-to-device copy.
    copy: GpuRate
    #: Rates of large GEMMs by kind (`quaver.costs.ledger.kind`): bf16, and the natively supported kinds of scaling.
    rates: Mapping[str, GpuRate]
    #: 10^12 exponentials a second; None: unknown, and not counted.
    exponentials: GpuRate | None = None

    @property
    def host(self) -> GpuRate:
        """Rate of copies from pinned host memory, or to it: PCIe 5.0 from Hopper on, 4.0 before."""
        return PCIE_5 if self.capability >= (9, 0) else PCIE_4

    @property
    def any_layout(self) -> bool:
        """True if 8-bit GEMMs accept both operands transposed or not; before Blackwell the contraction axis
        must be last.
        """
        return self.capability >= (10, 0)


PCIE_5 = GpuRate(0.0556, "measured", "NVIDIA's blog on nvbandwidth: host to device by copy engine, PCIe 5.0, 16 lanes")
PCIE_4 = PCIE_5.times(0.5, "half of what PCIe 5.0 reaches, which has twice the rate per lane")

TE = "Transformer Engine docs/examples/gemm_profiling, hidden 4096, ffn 16384, 15 872 tokens, 12 GEMMs"
#: Total FLOPs of that table's twelve GEMMs.
TE_FLOPS = 6 * 15_872 * 4096 * (3 * 4096 + 4096 + 2 * 16_384)

NVL_BF16 = GpuRate(599, "measured", f"{TE}, H200 NVL: 32.01 ms in bf16")
NVL_TENSOR = GpuRate(1142, "measured", f"{TE}, H200 NVL: 16.79 ms with operands quantized beforehand")
#: Reached fractions of the published 835.5 and 1671 TFLOP/s of the H200 NVL.
FRACTION_BF16, FRACTION_FP8 = 599 / 835.5, 1142 / 1671
H200_BF16 = GpuRate(788, "measured", "769 to 798 in runs of 8192 x 8192 x 8192 on random data, H200 SXM")
H200_COPY = GpuRate(4.3, "measured", "device-to-device copy, H200 SXM: 90 % of the published 4.8")
FRACTION_COPY = 4.3 / 4.8

ROW = 0.95, "0.9 to 1 of the tensorwise rate at most shapes (pytorch#147971): the middle"
BLOCK = 1.5, "1.25 to 1.75 of the bf16 rate (NVIDIA's blog on cuBLAS 12.9, Hopper): the middle"


def _scaled(bf16: GpuRate, tensor: GpuRate, **others: GpuRate) -> dict[str, GpuRate]:
    return {"bf16": bf16, "tensor": tensor, "row": tensor.times(*ROW), **others}


def _hopper(bf16: GpuRate, tensor: GpuRate) -> dict[str, GpuRate]:
    return _scaled(bf16, tensor, block=bf16.times(*BLOCK))


def _sheet(bf16: float, fp8: float, sheet: str, nvfp4: float | None = None) -> dict[str, GpuRate]:
    """Derive rates of a card from its data sheet: its peaks times the fraction that an H200 NVL reaches of its own."""
    source = f"{sheet}, times the fraction of its peak that the H200 NVL reaches in {TE}"
    rates = _scaled(
        GpuRate(bf16 * FRACTION_BF16, "derived", f"{bf16:g} of {source}"),
        GpuRate(fp8 * FRACTION_FP8, "derived", f"{fp8:g} of {source}"),
    )
    if nvfp4 is not None:
        rates["mx"] = rates["tensor"]
        rates["nvfp4"] = GpuRate(nvfp4 * FRACTION_FP8, "derived", f"{nvfp4:g} of {source}")
    return rates


def _copy(published: float, sheet: str) -> GpuRate:
    source = f"{published:g} TB/s ({sheet}) times 0.9, the fraction that an H200 reaches"
    return GpuRate(published * FRACTION_COPY, "derived", source)


def _exponentials(multiprocessors: int, gigahertz: float) -> GpuRate:
    return GpuRate(
        16 * multiprocessors * gigahertz / 1000,
        "derived",
        f"16 a cycle on each of {multiprocessors} multiprocessors (CUDA C++ Programming Guide, throughput of native "
        f"arithmetic instructions) at {gigahertz} GHz",
    )


def _b300(milliseconds: float, what: str) -> GpuRate:
    return GpuRate(TE_FLOPS / milliseconds / 1e9, "measured", f"{TE}, B300: {milliseconds} ms {what}")


NVL_TO_H200 = 1142 / 599, "the bf16 rate times 1.91, the ratio that the H200 NVL reaches in Transformer Engine's table"
SAME_CHIP = 1.0, "as measured on the H200 SXM: the same chip and power limit"
NVL_CHIP = 1.0, "as measured on the H200 NVL: the same chip, under a power limit too"
B300_RATES = _scaled(
    _b300(13.102, "in bf16"),
    _b300(6.812, "tensorwise, quantized beforehand"),
    mx=_b300(7.161, "in MXFP8, quantized beforehand"),
    nvfp4=_b300(3.764, "in NVFP4, quantized beforehand"),
)
SAME_PEAK = 1.0, "as measured on the B300: NVIDIA's HGX page gives both the same peak in 8 and 16 bits"

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="a100",
            about="NVIDIA A100 SXM, 80 GB HBM2e",
            driver="NVIDIA A100-SXM4-80GB",
            capability=(8, 0),
            copy=_copy(2.039, "A100 data sheet"),
            exponentials=_exponentials(108, 1.41),
            rates={
                "bf16": GpuRate(271.2, "measured", "stas00/ml-engineering, maximum achievable matmul FLOPS, torch 2.6")
            },
        ),
        Gpu(
            name="rtx3090",
            about="NVIDIA GeForce RTX 3090",
            capability=(8, 6),
            copy=_copy(0.936, "GA102 architecture paper"),
            exponentials=_exponentials(82, 1.695),
            rates={
                "bf16": GpuRate(
                    71,
                    "derived",
                    "all of the GA102 architecture paper's 71 (float32 accumulation): "
                    "an RTX 3090 Ti reaches 81 of its 80 in transformers-benchmarks",
                )
            },
        ),
        Gpu(
            name="l4",
            about="NVIDIA L4",
            capability=(8, 9),
            copy=_copy(0.3, "L4 data sheet"),
            exponentials=_exponentials(58, 2.04),
            rates=_sheet(121, 242.5, "the L4 data sheet"),
        ),
        Gpu(
            name="l40s",
            about="NVIDIA L40S",
            capability=(8, 9),
            copy=_copy(0.864, "L40S data sheet"),
            exponentials=_exponentials(142, 2.52),
            rates=_sheet(362.05, 733, "the L40S data sheet"),
        ),
        Gpu(
            name="rtx4090",
            about="NVIDIA GeForce RTX 4090",
            capability=(8, 9),
            copy=_copy(1.008, "Ada architecture paper"),
            exponentials=_exponentials(128, 2.52),
            rates=_sheet(165.2, 330.3, "the Ada architecture paper (float32 accumulation)"),
        ),
        Gpu(
            name="h100",
            about="NVIDIA H100 SXM, 80 GB HBM3",
            driver="NVIDIA H100 80GB HBM3",
            capability=(9, 0),
            copy=GpuRate(3.01, "measured", "QuACK's reductions, 90 % of the published 3.35 (its blog of July 2025)"),
            exponentials=_exponentials(132, 1.755),
            rates=_hopper(H200_BF16.times(*SAME_CHIP), H200_BF16.times(*NVL_TO_H200)),
        ),
        Gpu(
            name="h100-hbm2e",
            about="NVIDIA H100 with 2.4 TB/s of memory, which torchao's published figures come from",
            capability=(9, 0),
            copy=GpuRate(2.4 * 0.92, "measured", "2.4 TB/s, 92 % reached: torchao testing/training/roofline_utils.py"),
            exponentials=_exponentials(132, 1.755),
            rates=_hopper(NVL_BF16.times(*NVL_CHIP), NVL_TENSOR.times(*NVL_CHIP)),
        ),
        Gpu(
            name="h200",
            about="NVIDIA H200 SXM",
            driver="NVIDIA H200",
            capability=(9, 0),
            copy=H200_COPY,
            exponentials=_exponentials(132, 1.755),
            rates=_hopper(H200_BF16, H200_BF16.times(*NVL_TO_H200)),
        ),
        Gpu(
            name="h200-nvl",
            about="NVIDIA H200 NVL",
            capability=(9, 0),
            copy=H200_COPY.times(1.0, "as measured on the H200 SXM: the same memory"),
            exponentials=_exponentials(132, 1.755),
            rates=_hopper(NVL_BF16, NVL_TENSOR),
        ),
        Gpu(
            name="b200",
            about="NVIDIA B200",
            capability=(10, 0),
            copy=_copy(7.7, "NVIDIA's HGX page"),
            exponentials=_exponentials(148, 1.755),
            rates={
                **{kind: rate.times(*SAME_PEAK) for kind, rate in B300_RATES.items()},
                "nvfp4": B300_RATES["nvfp4"].times(
                    72 / 105, "the B300's by the dense FP4 peaks of NVIDIA's HGX page, 72 to 105"
                ),
            },
        ),
        Gpu(
            name="b300",
            about="NVIDIA B300",
            driver="NVIDIA B300 SXM6 AC",
            capability=(10, 3),
            copy=_copy(8.0, "NVIDIA's HGX page"),
            rates=B300_RATES,
        ),
        Gpu(
            name="rtx5090",
            about="NVIDIA GeForce RTX 5090",
            capability=(12, 0),
            copy=_copy(1.792, "RTX Blackwell architecture paper"),
            exponentials=_exponentials(170, 2.407),
            rates=_sheet(209.5, 419, "the RTX Blackwell architecture paper (float32 accumulation)", nvfp4=1676),
        ),
    )
}


def get(gpu: str | Gpu) -> Gpu:
    """Return the GPU of this name, or the given one.

    Args:
        gpu: a key of `GPUS`, the driver's name of a GPU, or a Gpu.
    Raises:
        ValueError: no rates are known for it; the message lists the known GPUs.
    """
    if isinstance(gpu, Gpu):
        return gpu
    key = gpu.lower().replace(" ", "-") if isinstance(gpu, str) else ""
    if key not in GPUS:
        key = next((card.name for card in GPUS.values() if gpu and gpu in (card.about, card.driver)), key)
    if key not in GPUS:
        near = suggest(key, GPUS) if key else ""
        hint = f"{near} " if near.startswith("did you mean") else ""
        raise ValueError(
            f"no rates are known for the GPU {gpu!r}; {hint}known: {', '.join(GPUS)}. For another one pass a "
            "quaver.costs.hardware.Gpu with its copy and GEMM rates"
        )
    return GPUS[key]


# ---- interconnects ----
# Achievable rates between the GPUs of a node and between nodes, each with its source.
#
#     all-gather, reduce-scatter    total bytes x (ranks - 1) / ranks / bus rate, plus start and hops
#     all-to-all                    bytes that a rank sends to others / rate of its link, plus start
#
# Collectives run as rings. A ring over several nodes crosses each border through as many network cards as the node has
# ranks of its group, and is no faster than the links inside. In an all-to-all each rank uses only its own network card.

#: Seconds to start a collective, and per hop of its ring inside a node and between nodes (from NCCL's tuning table,
#: src/graph/tuning.cc, for its protocol for large messages).
START, HOP_INSIDE, HOP_OUTSIDE = 8.4e-6, 3.4e-6, 14e-6


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """Interconnect of a cluster's GPUs. Rates are in GB/s per GPU and direction."""

    name: str
    full_name: str
    #: GPUs per node, which share the fast links.
    node: int
    #: Bus rate of a large all-gather inside a node.
    inside: GpuRate
    #: Rate of a GPU's network card.
    outside: GpuRate

    def in_a_node(self, ranks: int, stride: int) -> int:
        """Return how many ranks of a group share a node, if neighbours in the group are `stride` GPUs apart."""
        return max(1, min(ranks, self.node // stride))

    def bus(self, ranks: int, stride: int) -> float:
        """Return the bus rate of a ring in bytes per second."""
        here = self.in_a_node(ranks, stride)
        if ranks <= here:
            return self.inside.value * 1e9
        outside = here * self.outside.value * 1e9
        return outside if here == 1 else min(self.inside.value * 1e9, outside)

    def gather(self, total: float, ranks: int, stride: int) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of `total` bytes over all ranks."""
        if ranks == 1:
            return 0.0
        nodes = -(-ranks // self.in_a_node(ranks, stride))
        hops = (ranks - nodes) * HOP_INSIDE + (nodes - 1) * HOP_OUTSIDE
        return total * (ranks - 1) / ranks / self.bus(ranks, stride) + START + hops

    def all_to_all(self, sent: float, ranks: int, stride: int) -> float:
        """Return the seconds of an all-to-all in which each rank has `sent` bytes, in equal parts for each rank."""
        if ranks == 1:
            return 0.0
        here = self.in_a_node(ranks, stride)
        inside = sent * (here - 1) / ranks / (self.inside.value * 1e9)
        outside = sent * (ranks - here) / ranks / (self.outside.value * 1e9)
        return max(inside, outside) + START + (HOP_OUTSIDE if ranks > here else HOP_INSIDE)


def _links(line_rate: float, generation: str) -> GpuRate:
    source = f"{line_rate:g} GB/s of {generation}, less the fifth that NCCL's protocol takes (nccl-tests#212)"
    return GpuRate(line_rate * 0.8, "derived", source)


def _card(gigabits: float, what: str) -> GpuRate:
    source = f"{gigabits:g} Gb/s a GPU ({what}); 48 to 49 of 50 GB/s are reached (nccl-tests#267)"
    return GpuRate(gigabits / 8 * 0.97, "derived", source)


NVLINK4 = GpuRate(360, "measured", "all-gather on 8 H100, 16 GB (nccl-tests#326)")

INTERCONNECTS = {
    one.name: one
    for one in (
        Interconnect(
            name="hgx-h100",
            full_name="nodes of 8 H100 or H200 (NVLink 4), InfiniBand or RoCE of 400 Gb/s a GPU",
            node=8,
            inside=NVLINK4,
            outside=_card(400, "ConnectX-7 at NDR"),
        ),
        Interconnect(
            name="hgx-a100",
            full_name="nodes of 8 A100 (NVLink 3), InfiniBand of 200 Gb/s a GPU",
            node=8,
            inside=_links(300, "NVLink 3"),
            outside=_card(200, "ConnectX-6 at HDR"),
        ),
        Interconnect(
            name="hgx-b200",
            full_name="nodes of 8 B200 or B300 (NVLink 5), InfiniBand or RoCE of 400 Gb/s a GPU",
            node=8,
            inside=_links(900, "NVLink 5"),
            outside=_card(400, "ConnectX-7 at NDR"),
        ),
        Interconnect(
            name="nvl72",
            full_name="racks of 72 B200 or B300 (NVLink 5), InfiniBand or Ethernet of 400 Gb/s a GPU",
            node=72,
            inside=_links(900, "NVLink 5"),
            outside=_card(400, "ConnectX-7 at NDR"),
        ),
        Interconnect(
            name="ethernet",
            full_name="nodes of 8 H100 or H200 (NVLink 4), Ethernet of 100 Gb/s a GPU",
            node=8,
            inside=NVLINK4,
            outside=_card(100, "Ethernet"),
        ),
        Interconnect(
            name="pcie",
            full_name="nodes of 8 GPUs on PCIe 5.0 without NVLink, Ethernet of 100 Gb/s a GPU",
            node=8,
            inside=GpuRate(
                PCIE_5.value * 1e3, "derived", f"a GPU sends to another as fast as to the host ({PCIE_5.source})"
            ),
            outside=_card(100, "Ethernet"),
        ),
    )
}


def get_interconnect(name: str) -> Interconnect:
    """Return the interconnect of this name.

    Raises:
        ValueError: no rates are known for it; the message suggests the nearest name.
    """
    if name not in INTERCONNECTS:
        near = suggest(name[:100], INTERCONNECTS)
        raise ValueError(f"no rates are known for the interconnect {name[:100]!r}; {near}")
    return INTERCONNECTS[name]


# ---- meshes ----


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Number of ranks along each axis, from nearest to farthest: tensor, context, sharded data, replicated
    data, pipeline.
    """

    #: Tensor and sequence parallelism, and context parallelism.
    tp: int = 1
    cp: int = 1
    #: Ranks over which a weight is sharded, including those of context parallelism, and number of replicas of the
    #: shards.
    fsdp: int = 1
    replicas: int = 1
    #: Pipeline stages.
    pp: int = 1
    #: Ranks of the sharded axis over which experts are sharded.
    ep: int = 1

    def __post_init__(self) -> None:
        axes = {"tp": self.tp, "cp": self.cp, "fsdp": self.fsdp, "replicas": self.replicas, "pp": self.pp}
        for name, ranks in (axes | {"ep": self.ep}).items():
            if ranks < 1:
                raise ValueError(f"{name} is {ranks}; it must be at least 1")
        if self.fsdp % self.cp:
            raise ValueError(f"weights are also sharded over the {self.cp} ranks of cp; give fsdp a multiple of it")
        if self.fsdp % self.ep:
            raise ValueError(
                f"{self.ep} ranks of ep do not divide the {self.fsdp} ranks over which weights are sharded"
            )

    @property
    def gpus(self) -> int:
        return prod((self.tp, self.fsdp, self.replicas, self.pp))

    @property
    def data(self) -> int:
        """Number of ranks with different sequences."""
        return self.fsdp // self.cp * self.replicas


def over(gpus: int, *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, fsdp: int = 0) -> Mesh:
    """Return a mesh of `gpus` GPUs; those left by tp and pp are sharded over `fsdp` ranks, or all of them if that is 0.

    Raises:
        ValueError: axes do not multiply to `gpus`.
    """
    for name, ranks in (("gpus", gpus), ("tp", tp), ("cp", cp), ("pp", pp), ("ep", ep)):
        if ranks < 1:
            raise ValueError(f"{name} is {ranks}; give 1 or more")
    if gpus % (tp * pp):
        raise ValueError(f"{gpus} GPUs are no multiple of tp {tp} x pp {pp} = {tp * pp} ranks; give divisors of {gpus}")
    rest = gpus // (tp * pp)
    fsdp = fsdp or rest
    if fsdp < 1 or rest % fsdp:
        raise ValueError(f"tp {tp} and pp {pp} leave {rest} of {gpus} GPUs; fsdp is {fsdp}, which does not divide them")
    return Mesh(tp=tp, cp=cp, fsdp=fsdp, replicas=rest // fsdp, pp=pp, ep=ep)

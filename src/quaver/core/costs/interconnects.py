"""What interconnects reach: rates between the GPUs of a node and between nodes by name, each with where it comes from.

    all-gather, reduce-scatter    bytes of all ranks x (ranks - 1) / ranks / bus rate, and a start and its hops
    all-to-all                    what a rank sends to others / the rate of its way out, and a start

Collectives run as rings. A ring over several nodes crosses each border by as many network cards as the node has ranks
of its group, and is no faster than the links inside. In an all-to-all each rank has its own network card alone.
"""

from dataclasses import dataclass

from quaver.core.costs.gpus import Figure
from quaver.core.text.spelling import suggest

#: Seconds that a collective takes to start, and for each hop of its ring inside a node and between nodes (NCCL's own
#: table for its choice of algorithm, src/graph/tuning.cc, of its protocol for large messages).
START, HOP_INSIDE, HOP_OUTSIDE = 8.4e-6, 3.4e-6, 14e-6


@dataclass(frozen=True, kw_only=True)
class Interconnect:
    """What connects the GPUs of a cluster. Rates are in GB/s of one GPU and one direction."""

    name: str
    full_name: str
    #: GPUs that share the fast links.
    node: int
    #: The bus rate of a large all-gather inside a node.
    inside: Figure
    #: The rate of the network card that a GPU has.
    outside: Figure

    def in_a_node(self, ranks: int, stride: int) -> int:
        """Ranks of a group that lie in one node, where neighbours of the group are `stride` GPUs apart."""
        return max(1, min(ranks, self.node // stride))

    def bus(self, ranks: int, stride: int) -> float:
        """The bus rate of a ring, bytes a second."""
        here = self.in_a_node(ranks, stride)
        if ranks <= here:
            return self.inside.value * 1e9
        outside = here * self.outside.value * 1e9
        return outside if here == 1 else min(self.inside.value * 1e9, outside)

    def gather(self, total: float, ranks: int, stride: int) -> float:
        """Seconds of an all-gather or a reduce-scatter of `total` bytes of all ranks together."""
        if ranks == 1:
            return 0.0
        nodes = -(-ranks // self.in_a_node(ranks, stride))
        hops = (ranks - nodes) * HOP_INSIDE + (nodes - 1) * HOP_OUTSIDE
        return total * (ranks - 1) / ranks / self.bus(ranks, stride) + START + hops

    def all_to_all(self, sent: float, ranks: int, stride: int) -> float:
        """Seconds of an all-to-all in which each rank has `sent` bytes, an equal part for each rank."""
        if ranks == 1:
            return 0.0
        here = self.in_a_node(ranks, stride)
        inside = sent * (here - 1) / ranks / (self.inside.value * 1e9)
        outside = sent * (ranks - here) / ranks / (self.outside.value * 1e9)
        return max(inside, outside) + START + (HOP_OUTSIDE if ranks > here else HOP_INSIDE)


def _links(line_rate: float, generation: str) -> Figure:
    source = f"{line_rate:g} GB/s of {generation}, less the fifth that NCCL's protocol takes (nccl-tests#212)"
    return Figure(line_rate * 0.8, "derived", source)


def _card(gigabits: float, what: str) -> Figure:
    source = f"{gigabits:g} Gb/s a GPU ({what}); 48 to 49 of 50 GB/s are reached (nccl-tests#267)"
    return Figure(gigabits / 8 * 0.97, "derived", source)


NVLINK4 = Figure(360, "measured", "all-gather on 8 H100, 16 GB (nccl-tests#326)")

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
    )
}


def get(name: str) -> Interconnect:
    """The interconnect of this name.

    Raises:
        ValueError: no rates are known for it; the message says for which they are.
    """
    if name not in INTERCONNECTS:
        near = suggest(name[:100], INTERCONNECTS)
        raise ValueError(f"no rates are known for the interconnect {name[:100]!r}; {near}")
    return INTERCONNECTS[name]

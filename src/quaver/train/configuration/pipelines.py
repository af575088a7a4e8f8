"""The orders in which micro-batches go through a pipeline's stages, and which stages each of them gives a rank.

The names are torch.distributed.pipelining's, as its `get_schedule_class` takes them.
"""

from typing import NamedTuple


class Order(NamedTuple):
    """What a schedule of torch's asks of the stages."""

    #: How many a rank has at least, and at most.
    least: int
    most: int
    #: Whether those of the ranks go down and up again, so that the first rank has the first and the last one; else
    #: round and round.
    turns: bool
    #: Whether it runs the two parts of a backward apart.
    splits: bool
    #: Micro-batches of a step go by rounds of as many.
    rounds: bool = False
    #: There are as many micro-batches as stages at least; else as many as ranks.
    fills: bool = False


#: Stages of a rank where a schedule takes several and nothing is said.
SEVERAL = 2
_ANY = 1 << 20
ORDERS = {
    "1F1B": Order(1, 1, turns=False, splits=False),
    "GPipe": Order(1, 1, turns=False, splits=False),
    "Interleaved1F1B": Order(SEVERAL, _ANY, turns=False, splits=False, rounds=True),
    "InterleavedZeroBubble": Order(SEVERAL, _ANY, turns=False, splits=True, rounds=True),
    "ZBVZeroBubble": Order(SEVERAL, SEVERAL, turns=True, splits=True),
    "DualPipeV": Order(SEVERAL, SEVERAL, turns=True, splits=True, fills=True),
}


def stages_each(schedule: str, wanted: int) -> int:
    """Stages of each rank, of so many wanted or 0."""
    return wanted or min(SEVERAL, ORDERS[schedule].most)


def holders(schedule: str, ranks: int, each: int) -> list[int]:
    """The rank of each stage, from the first stage to the last."""
    down = [*range(ranks)]
    up = down[::-1] if ORDERS[schedule].turns else down
    return [rank for turn in range(each) for rank in (up if turn % 2 else down)]

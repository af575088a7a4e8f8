"""The path of a program through its machine code: which instructions it executes, and how often those of loops.

It is the longest path from the entry to an exit, with the longer one of two branches. Code that only one program of a
launch runs counts too; the slow path of a division, called where it would overflow, does not.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)([^;\n]*)", re.MULTILINE)
TARGET = re.compile(r"\b0x[0-9a-f]+\b")
ENDS = {"EXIT", "RET", "KILL"}
#: Iterations of loops, as `executed` takes them.
Trips = Sequence[int | tuple[int, ...]]


@dataclass(frozen=True)
class Instruction:
    """One line of a listing."""

    name: str
    #: False where the next instruction never follows it, as after a branch without a condition.
    goes_on: bool
    #: Where it branches to, counted in instructions from the start of the kernel; None for no branch.
    target: int | None


@dataclass(frozen=True)
class Block:
    """Instructions that are executed together."""

    count: int
    #: Bytes of a thread that its loads and stores of global memory move.
    moved: int
    #: The loops around it, the outermost first, each by its number among those that are nested as deep.
    loops: tuple[int, ...]
    #: Blocks that may follow, those of the next round of a loop left out.
    following: tuple[int, ...]


def instructions(listing: str, width: int, start: int) -> list[Instruction]:
    """The instructions of one kernel's listing, which begins `start` bytes into what was disassembled."""
    out = []
    for predicate, name, operands in LINE.findall(listing):
        kind = name.partition(".")[0]
        place = TARGET.search(operands) if kind in ("BRA", "CALL") else None
        # A branch may also name its condition among its operands.
        conditional = bool(predicate) or (kind == "BRA" and "," in operands)
        target = None if place is None else (int(place[0], 16) - start) // width
        out.append(Instruction(name, conditional or (kind not in ENDS and target is None), target))
    return [_called(at, out) for at in out]


def _called(at: Instruction, code: Sequence[Instruction]) -> Instruction:
    """Classify a call: of code that returns, no branch; of code that exits, as compilers leave loops, a branch."""
    if not at.name.startswith("CALL") or at.target is None:
        return at
    end = next((i for i in code[at.target :] if i.name.startswith(("RET", "EXIT")) and not i.goes_on), None)
    return Instruction("BRA", at.goes_on, at.target) if end and end.name == "EXIT" else Instruction(at.name, True, None)


def blocks(code: Sequence[Instruction], moved: Sequence[int]) -> list[Block]:
    """The blocks that can be reached from the first instruction, in the order of a walk that begins there.

    Args:
        moved: bytes that each instruction moves to or from global memory.
    """
    heads = {0, *(at.target for at in code if at.target is not None)}
    heads |= {i + 1 for i, at in enumerate(code[:-1]) if at.target is not None or not at.goes_on}
    starts = sorted(heads)
    number = {start: i for i, start in enumerate(starts)}
    ends = [*starts[1:], len(code)]
    after: list[list[int]] = []
    for end in ends:
        last = code[end - 1]
        after.append([number[end]] if last.goes_on and end < len(code) else [])
        if last.target is not None:
            after[-1].append(number[last.target])
    order, back = _walked(after)
    loops = _loops(after, back)
    forward = [[v for v in after[u] if (u, v) not in back] for u in range(len(starts))]
    for (latch, _), body in loops.items():
        # The last round ends where any of the loop's exits leads to.
        forward[latch] += [v for u in body for v in after[u] if v not in body]
    bodies: dict[int, set[int]] = {}
    for (_, head), body in loops.items():
        bodies.setdefault(head, set()).update(body)
    depths = {head: sum(head in body for body in bodies.values()) for head in bodies}
    level = {depth: sorted(head for head in depths if depths[head] == depth) for depth in depths.values()}
    place = {u: i for i, u in enumerate(order)}
    out = []
    for u in order:
        inside = range(starts[u], ends[u])
        called = any(code[i].name.startswith("CALL") for i in inside)
        around = sorted({head for (_, head), body in loops.items() if u in body}, key=lambda head: depths[head])
        numbers = tuple(level[depths[head]].index(head) for head in around)
        following = tuple(sorted({place[v] for v in forward[u]}))
        out.append(Block(0 if called else len(inside), sum(moved[i] for i in inside), numbers, following))
    return out


def executed(way: Sequence[Block], trips: Trips) -> tuple[int, int]:
    """Instructions of a thread on the longest path, and the bytes that it moves there.

    Args:
        trips: iterations of a loop, the outermost first, or of each loop at that depth, where the last number also
            applies to those that follow; loops without a number run once.
    """
    longest: dict[int, tuple[int, int]] = {}
    for i in _last_first(way):
        rounds = 1
        for trip, number in zip(trips, way[i].loops, strict=False):
            rounds *= trip if isinstance(trip, int) else trip[min(number, len(trip) - 1)]
        rest = max((longest[j] for j in way[i].following), default=(0, 0))
        longest[i] = way[i].count * rounds + rest[0], way[i].moved * rounds + rest[1]
    return longest[0]


def _walked(after: Sequence[Sequence[int]]) -> tuple[list[int], set[tuple[int, int]]]:
    """Blocks in the order of a depth-first walk from the first, and the edges back to a block of the current path."""
    order, back = [0], set()
    on_the_way, seen = [(0, iter(after[0]))], {0}
    path = {0}
    while on_the_way:
        u, rest = on_the_way[-1]
        v = next(rest, None)
        if v is None:
            on_the_way.pop()
            path.discard(u)
        elif v in path:
            back.add((u, v))
        elif v not in seen:
            seen.add(v)
            path.add(v)
            order.append(v)
            on_the_way.append((v, iter(after[v])))
    return order, back


def _loops(after: Sequence[Sequence[int]], back: set[tuple[int, int]]) -> dict[tuple[int, int], set[int]]:
    """By the edge that closes it, the blocks of a loop: from its head all that lead to that edge."""
    before: dict[int, list[int]] = {}
    for u, following in enumerate(after):
        for v in following:
            before.setdefault(v, []).append(u)
    loops = {}
    for latch, head in back:
        body, left = {head, latch}, [latch] if latch != head else []
        while left:
            for u in before.get(left.pop(), ()):
                if u not in body:
                    body.add(u)
                    left.append(u)
        loops[latch, head] = body
    return loops


def _last_first(way: Sequence[Block]) -> list[int]:
    """An order in which a block comes after all that follow it."""
    done: list[int] = []
    seen: set[int] = set()
    left = [(0, iter(way[0].following))] if way else []
    while left:
        u, rest = left[-1]
        v = next((v for v in rest if v not in seen), None)
        if v is None:
            left.pop()
            seen.add(u)
            if u not in done:
                done.append(u)
        else:
            left.append((v, iter(way[v].following)))
    return done

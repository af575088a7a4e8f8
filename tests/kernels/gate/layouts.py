"""How the threads of a warp are laid out over memory: the contiguous bytes that each access covers.

Read from Triton's own language, where every load and store has the layout of its pointers. Triton chooses the layout
such that addresses grow by one along the axis with the closest threads; the bytes that a thread moves at once are
read from the machine code.
"""

import re
from collections import Counter
from itertools import chain

NAMED = re.compile(r"^(#\w+) = (#ttg\.\w+<.*>)\s*$", re.MULTILINE)
ACCESS = re.compile(
    r"\b(tt\.load|tt\.store|ttg\.async_copy_global_to_local) .* : tensor<((?:\d+x)+)!tt\.ptr<(\w+)[^>]*>, (#.*?)>"
    r"(?: ->.*)?(?: loc\(.*\))?$",
    re.MULTILINE,
)
LIST = re.compile(r"(\w+) = \[((?:\[[\d, ]*\](?:, )?)*|[\d, ]*)\]")
SLICE = re.compile(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>")
#: The most bytes that one instruction of a thread moves.
WIDEST = 16

Basis = list[tuple[int, ...]]


def runs(ttgir: str) -> tuple[dict[int, int], dict[int, int]]:
    """For a kernel's loads and its stores: bytes moved, by the number of contiguous bytes in a warp's access.

    A thread stores up to 16 bytes at once; where it holds more contiguous bytes, the accesses of its warp have gaps. A
    load's gaps are filled by the next instruction of the same threads, from the first-level cache.
    """
    named = dict(NAMED.findall(ttgir))
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    for kind, sizes, element, layout in ACCESS.findall(ttgir):
        shape = tuple(int(n) for n in sizes.strip("x").split("x"))
        size = _bits(element) // 8
        registers, lanes, order = _bases(layout, named)
        store = kind == "tt.store"
        if store:
            registers = [b for b in registers if max(b) * size < WIDEST]
        elements = 1
        for n in shape:
            elements *= n
        (stores if store else loads)[size * _longest(shape, registers, lanes, order)] += elements * size
    return dict(loads), dict(stores)


def _longest(shape: tuple[int, ...], registers: Basis, lanes: Basis, order: tuple[int, ...]) -> int:
    """Contiguous elements of a warp along the axis on which its threads are closest."""
    axis = next((axis for axis in order if shape[axis] > 1), order[0])
    known = set(chain(registers, lanes))
    run = 1
    while run < shape[axis] and tuple(run if i == axis else 0 for i in range(len(shape))) in known:
        run *= 2
    return run


def _bases(layout: str, named: dict[str, str]) -> tuple[Basis, Basis, tuple[int, ...]]:
    """The steps of a thread's registers, those from a thread of a warp to others, and the axes, the closest first."""
    text = named.get(layout, layout)
    sliced = SLICE.fullmatch(text)
    if sliced:
        dim = int(sliced[1])
        *of_parent, axes = _bases(sliced[2], named)
        kept = [[b[:dim] + b[dim + 1 :] for b in part if not b[dim]] for part in of_parent]
        return kept[0], kept[1], tuple(axis - (axis > dim) for axis in axes if axis != dim)
    lists = dict(LIST.findall(text))
    if text.startswith("#ttg.linear"):
        steps = _vectors(lists["register"]), _vectors(lists["lane"])
        met = [axis for b in chain(*steps) for axis, step in enumerate(b) if step == 1]
        rank = len(next(chain(*steps)))
        return *steps, tuple(dict.fromkeys([*met, *range(rank)]))
    if text.startswith("#ttg.nvidia_mma"):
        return _of_a_product(_numbers(lists["instrShape"]))
    assert text.startswith("#ttg.blocked"), f"an access to memory has the layout {text}"
    of_thread, of_warp, order = (_numbers(lists[name]) for name in ("sizePerThread", "threadsPerWarp", "order"))
    registers: Basis = []
    lanes: Basis = []
    for axis in order:
        step = 1
        for size, into in ((of_thread[axis], registers), (of_warp[axis], lanes)):
            for _ in range(size.bit_length() - 1):
                into.append(tuple(step if i == axis else 0 for i in range(len(order))))
                step *= 2
    return registers, lanes, order


def _of_a_product(shape: tuple[int, ...]) -> tuple[Basis, Basis, tuple[int, ...]]:
    """The same for the result of a product, by instructions m, n(, k): pairs of neighbours in a row, four threads to
    eight of them, eight rows, and eight rows below.

    Source: PTX ISA, fragments of mma.m16n8k16 and of wgmma.m64nNk16.
    """
    rank = 3 if shape[0] == 1 else 2
    before = (0,) * (rank - 2)
    columns = range(3, shape[rank - 1].bit_length() - 1)
    registers = [(0, 1), (8, 0), *((0, 1 << bit) for bit in columns)]
    lanes = [(0, 2), (0, 4), (1, 0), (2, 0), (4, 0)]
    steps = [[(*before, *b) for b in part] for part in (registers, lanes)]
    return steps[0], steps[1], tuple(reversed(range(rank)))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())


def _vectors(text: str) -> Basis:
    return [_numbers(part) for part in re.findall(r"\[([\d, ]*)\]", text)]


def _bits(element: str) -> int:
    """Of a number of this type: bf16, f32, i8, f8E4M3FN."""
    digits = re.match(r"[a-z]+(\d+)", element)
    assert digits, f"a pointer to {element}"
    return max(8, int(digits[1]))

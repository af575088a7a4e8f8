"""The launches of every row, named, each once."""

from collections.abc import Sequence
from dataclasses import dataclass

from quaver.torch.backends.gpu import launch as launching
from quaver.torch.backends.gpu.launch import KernelLaunch
from tests.kernels.cases import Case

#: Those that kernels are compiled for, and what the others that kernels run on launch all the same.
ARCHITECTURES = 80, 86, 89, 90, 100, 120
SIBLINGS = {87: 80, 88: 86, 101: 100, 103: 100, 110: 100, 121: 120}


@dataclass(frozen=True)
class Recorded:
    """A launch, and the row it belongs to."""

    case: Case
    name: str
    launch: KernelLaunch

    @property
    def threads_an_element(self) -> float | None:
        """Threads of a program over its elements: instructions times this are thread-instructions per element."""
        constants = self.launch.constants
        own = constants.get("BM", 0) * constants.get("BN", 0)
        elements = self.case.elements or own
        return 32 * self.launch.warps / elements if elements else None

    @property
    def trips(self) -> tuple[int | tuple[int, ...], ...]:
        """How often a program goes round its loops: as its row says, or its constant STEPS."""
        steps = self.launch.constants.get("STEPS")
        beside = self.case.trips_beside
        told = beside.get(self.kernel, beside.get(self.launch.fn.__name__, self.case.trips))
        return told or (() if steps is None else (steps,))

    @property
    def kernel(self) -> str:
        """Its name, and which of the row's launches of that name it is, if not the first: "kernel #2"."""
        return self.name.partition(": ")[2]

    @property
    def products(self) -> float:
        """Multiply-adds, 0 where its row names none."""
        return self.case.products.get(self.kernel, 0)

    @property
    def bytes(self) -> int:
        """What the launch cannot but move: each tensor once, or as often as its row says, and what a table says."""
        return self.case.beside + sum(size * self.case.times.get(name, 1) for name, size in self.launch.sizes.items())

    @property
    def threads(self) -> int:
        """Of all programs."""
        x, y, z = self.launch.grid
        return 32 * self.launch.warps * x * y * z


def record(cases: Sequence[Case], arch: int) -> list[Recorded]:
    """What these rows launch on sm_`arch`, in order.

    Raises:
        ValueError: a row launches nothing, or two have one name.
    """
    recorded: list[Recorded] = []
    seen: set[str] = set()
    names: set[str] = set()
    for case in cases:
        with launching.recording(arch) as launches:
            case.launch()
        if not launches:
            raise ValueError(f"the row {case.name!r} of tests/kernels/cases.py launches nothing for sm_{arch}")
        for launch in launches:
            if identity(launch) in seen:
                continue
            seen.add(identity(launch))
            name = f"{case.name}: {launch.fn.__name__}"
            count = 1 + sum(n == name or n.startswith(f"{name} #") for n in names)
            name = name if count == 1 else f"{name} #{count}"
            names.add(name)
            recorded.append(Recorded(case, name, launch))
    repeated = {case.name for case in cases if [c.name for c in cases].count(case.name) > 1}
    if repeated:
        raise ValueError(f"two rows of tests/kernels/cases.py are called {', '.join(sorted(repeated))}")
    return recorded


def unlike_siblings(cases: Sequence[Case], launches: Sequence[Recorded], arch: int) -> list[str]:
    """What sm_`arch`, that has these launches, and its siblings do not launch both, a sentence each."""
    ours = {identity(recorded.launch): recorded.name for recorded in launches}
    sentences = []
    for sibling in (one for one, of in SIBLINGS.items() if of == arch):
        theirs = {identity(recorded.launch): recorded.name for recorded in record(cases, sibling)}
        sentences += [f"{theirs[one]}: sm_{sibling} launches it so, sm_{arch} does not" for one in theirs.keys() - ours]
        sentences += [f"{ours[one]}: sm_{sibling} does not launch it so" for one in ours.keys() - theirs]
    return sorted(sentences)


def identity(launch: KernelLaunch) -> str:
    """Launches with the same one are compiled to the same machine code."""
    fn = launch.fn
    parts = (fn.__module__, fn.__name__, launch.signature, launch.constants, launch.divisible, launch.options)
    return repr(parts)

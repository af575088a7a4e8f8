"""The launches of every row, named, each once."""

from collections.abc import Sequence
from dataclasses import dataclass

from quaver.torch.backends.gpu import launch as launching
from quaver.torch.backends.gpu.launch import KernelLaunch
from tests.kernels.cases import Case

#: Architectures that kernels are compiled for, and the others, which launch the same kernels as one of these.
ARCHITECTURES = 80, 86, 89, 90, 100, 120
SIBLINGS = {87: 80, 88: 86, 101: 100, 103: 100, 110: 100, 121: 120}


@dataclass(frozen=True)
class Recorded:
    """A launch, and the row it belongs to."""

    case: Case
    name: str
    launch: KernelLaunch

    @property
    def threads_per_element(self) -> float | None:
        """Threads of a program over its elements: instructions times this are thread-instructions per element."""
        constants = self.launch.constants
        own = constants.get("BM", 0) * constants.get("BN", 0)
        elements = self.case.elements or own
        return 32 * self.launch.warps / elements if elements else None

    @property
    def trips(self) -> tuple[int | tuple[int, ...], ...]:
        """Iterations of a program's loops: as given in its row, or its constant STEPS."""
        steps = self.launch.constants.get("STEPS")
        by_kernel = self.case.trips_by_kernel
        trips = by_kernel.get(self.kernel, by_kernel.get(self.launch.fn.__name__, self.case.trips))
        if callable(trips):
            return trips(self.launch.constants)
        return trips or (() if steps is None else (steps,))

    @property
    def rate(self) -> str:
        """The rate of the launch's products, in `quaver.costs.hardware`."""
        constants = self.launch.constants
        return "tensor" if constants.get("SCALES", "block") != "block" and constants["INTEGERS"] != 2 else "bf16"

    @property
    def kernel(self) -> str:
        """The kernel's name, with its number if the row launches it several times: "kernel #2"."""
        return self.name.partition(": ")[2]

    @property
    def products(self) -> float:
        """Multiply-adds, 0 where its row names none."""
        return self.case.products.get(self.kernel, 0)

    @property
    def bytes(self) -> int:
        """Bytes that the launch must move: each tensor as often as its row gives, and the row's `extra_bytes`."""
        return self.case.extra_bytes + sum(
            size * self.case.times.get(name, 1) for name, size in self.launch.sizes.items()
        )

    @property
    def threads(self) -> int:
        """Of all programs."""
        x, y, z = self.launch.grid
        return 32 * self.launch.warps * x * y * z


def record(cases: Sequence[Case], arch: int) -> list[Recorded]:
    """Record what these rows launch on sm_`arch`, in order.

    Raises:
        ValueError: a row launches nothing, or two have one name.
    """
    recorded: list[Recorded] = []
    seen: set[str] = set()
    names: set[str] = set()
    for case in (case for case in cases if case.compiles_from <= arch):
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


def differences_from_siblings(cases: Sequence[Case], launches: Sequence[Recorded], arch: int) -> list[str]:
    """Launches that differ between sm_`arch` and its siblings, a sentence each.

    Args:
        launches: those of sm_`arch`.
    """
    ours = {identity(recorded.launch): recorded.name for recorded in launches}
    sentences = []
    for sibling in (key for key, compiled_for in SIBLINGS.items() if compiled_for == arch):
        theirs = {identity(recorded.launch): recorded.name for recorded in record(cases, sibling)}
        sentences += [f"{theirs[key]}: sm_{sibling} launches it so, sm_{arch} does not" for key in theirs.keys() - ours]
        sentences += [f"{ours[key]}: sm_{sibling} does not launch it so" for key in ours.keys() - theirs]
    return sorted(sentences)


def identity(launch: KernelLaunch) -> str:
    """Launches with the same identity are compiled to the same machine code."""
    fn = launch.fn
    parts = (fn.__module__, fn.__name__, launch.signature, launch.constants, launch.divisible, launch.options)
    return repr(parts)

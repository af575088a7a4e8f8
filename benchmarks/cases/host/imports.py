"""Time of importing the library after torch, and the modules that `import quaver` loads."""

import statistics
import subprocess
import sys

from benchmarks.measuring.figure import Case, Figure, Target, at_most, exactly

ROUNDS = 5
#: Seconds of one import, after torch.
TIMED = "import time, torch; begun = time.perf_counter(); import {}; print(time.perf_counter() - begun)"
#: Prints how many frameworks a bare import loads.
FRAMEWORKS = "import sys, quaver; print(len({'torch', 'jax', 'jaxlib', 'triton', 'torchao'} & set(sys.modules)))"


def run(program: str) -> float:
    """Return the last number that a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure(quick: bool) -> list[Figure]:
    modules: dict[str, Target | None] = {"quaver.torch": at_most(0.3)} | ({} if quick else {"torchao.float8": None})
    times: dict[str, list[float]] = {module: [] for module in modules}
    for number in range(1 if quick else ROUNDS + 1):
        for module, own in times.items():
            seconds = run(TIMED.format(module))
            if number or quick:  # the first round reads the files from disk
                own.append(seconds)
    figures = [
        Figure(f"import {module}", "beyond torch", statistics.median(times[module]), "s", target)
        for module, target in modules.items()
    ]
    return [*figures, Figure("import quaver", "frameworks loaded", run(FRAMEWORKS), "modules", exactly(0))]


CASE = Case(
    name="imports",
    title="Import time",
    notes=f"Median of {ROUNDS} fresh interpreters that have imported torch already; the first round is not counted.",
    measure=measure,
)

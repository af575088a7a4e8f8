"""Forward and backward through one linear layer in JAX, compiled, as a ratio of a bf16 layer's time."""

from benchmarks.measuring.figure import Case, Figure, at_most
from benchmarks.measuring.timing import Timing, interleave
from quaver.recipes import RECIPES

FEATURES, QUICK_FEATURES = 1024, 64
ROUNDS, QUICK_ROUNDS = 9, 2
#: A recipe with a history; compiling takes four seconds per recipe.
QUICK_RECIPES = ("delayed",)
#: Largest ratios of the fastest other library's time: recipes with a counterpart there, in eight bits with scales of
#: tensors, channels or blocks, and NVFP4, which rotates and rounds stochastically.
TARGETS = {n: 0.9 for n, build in RECIPES.items() if build().quantizes and n not in ("mxfp4", "mxfp6")} | {"nvfp4": 1.6}


def measure(quick: bool) -> list[Figure]:
    from benchmarks.subjects import jax_linear as layers  # jax, flax and qwix, which no other case needs

    at = layers.arrays(QUICK_FEATURES if quick else FEATURES)
    some = slice(1 if quick else None)  # compiling takes seconds a subject
    peers = {name: layers.flax(at, op) for name, op in list(layers.FLAX.items())[some]}
    peers |= {name: layers.with_qwix(at, options) for name, options in list(layers.QWIX.items())[some]}
    steps = {"x @ w in bf16": layers.plain(at), **peers}
    names = QUICK_RECIPES if quick else RECIPES
    steps |= {f"quaver {name}": layers.ours(at, RECIPES[name]()) for name in names}
    timings = interleave(steps, rounds=QUICK_ROUNDS if quick else ROUNDS, steps=1)
    fastest = min(timings[name].ratio for name in peers)
    targets = {} if quick else TARGETS
    return [f for name, timing in timings.items() for f in figures(name, timing, fastest, targets)]


def figures(subject: str, timing: Timing, fastest: float, targets: dict[str, float]) -> list[Figure]:
    """Return the ratios to bf16 and to the fastest other library in the same run, and the time."""
    most = targets.get(subject.removeprefix("quaver "))
    return [
        Figure(subject, "of bf16", round(timing.ratio, 2), "x"),
        Figure(
            subject, "of fastest other", round(timing.ratio / fastest, 2), "x", None if most is None else at_most(most)
        ),
        Figure(subject, "time", timing.seconds * 1e3, "ms"),
    ]


CASE = Case(
    name="jax",
    title=f"Linear forward + backward in JAX, {FEATURES}³, bf16, against x @ w",
    notes=(
        "Compiled, without bias, one thread, processor time, interleaved; the median of each round's ratio. The output "
        "and the gradients of input, weight and state come from a given gradient of the output. The baseline is "
        "what XLA makes of a bf16 product: on a CPU it multiplies float32 copies, where ours multiply bf16. flax's ops "
        "are delayed scaling; qwix has E4M3 with E5M2 gradients, a scale for a channel or for 32. Targets are of the "
        "fastest of these four in the same run."
    ),
    measure=measure,
)

"""Bytes that XLA allocates for forward and backward of eight MLP blocks in JAX, as a ratio of bf16's."""

from collections.abc import Iterator

from benchmarks.measuring.figure import Case, Figure, at_most
from quaver.recipes import RECIPES

TOKENS, FEATURES = 4096, 256
QUICK_TOKENS, QUICK_FEATURES = 128, 32
#: The recipe whose noise and packed codes leave XLA the most to allocate.
QUICK_RECIPES = ("nvfp4",)


def measure(quick: bool) -> Iterator[Figure]:
    from benchmarks.subjects.jax_stack import compiled_bytes  # jax, which most cases do not need

    size = (QUICK_TOKENS, QUICK_FEATURES) if quick else (TOKENS, FEATURES)
    bf16 = compiled_bytes(RECIPES["bf16"](), *size)
    for name in ("bf16", *(QUICK_RECIPES if quick else [n for n in RECIPES if n != "bf16"])):
        own = bf16 if name == "bf16" else compiled_bytes(RECIPES[name](), *size)
        yield Figure(f"quaver {name}", "MiB", own / 2**20, "MiB")
        yield Figure(
            f"quaver {name}", "of bf16", round(own / bf16, 3), "x", None if quick or name == "bf16" else at_most(1.0)
        )


CASE = Case(
    name="jax-memory",
    title=f"Memory of eight MLP blocks in JAX, {TOKENS} tokens, {FEATURES} and {4 * FEATURES} features, bf16",
    notes=(
        "`compiled.memory_analysis()` of one program that computes a loss and the gradients of float32 parameters: its "
        "temporary buffers and outputs. XLA decides which arrays are live at once; nothing runs."
    ),
    measure=measure,
)

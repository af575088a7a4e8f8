"""How much memory a run needs at least, and how much there is: what cannot fit is said before it is tried.

The estimate is a lower bound: what it refuses cannot run; what it lets pass may still run out, which is a sentence too.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quaver.core.spec import Recipe
from quaver.core.states.footprint import NOTHING, SMALL, Footprint, of_matrix, plain
from quaver.core.states.presets import PRESETS
from quaver.train.configuration import optimizer_name, recipe_name
from quaver.train.configuration.config import TrainConfig
from quaver.train.configuration.parameter_table import flat, padded, parameters, projections
from quaver.train.configuration.sizes import MODELS, ModelConfig

#: Where Linux writes the limit of a container, version 2 and version 1.
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
#: How frameworks say that memory ran out.
WORDS = ("can't allocate memory", "not enough memory", "out of memory", "RESOURCE_EXHAUSTED", "Cannot allocate memory")


def available() -> int:
    """Bytes that this process may have in all: of the machine, of its container and by its own limit."""
    limits = [1 << 62]
    if hasattr(os, "sysconf"):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in CGROUPS:
        with suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text(encoding="ascii")))
    with suppress(ImportError):  # not on Windows
        import resource

        limits += [limit for limit in resource.getrlimit(resource.RLIMIT_AS)[:1] if limit != resource.RLIM_INFINITY]
    return min(limits)


def trained(
    sizes: ModelConfig, vocab: int, optimizer: str, recipe: Recipe, dtype: str, codes: bool = True
) -> Footprint:
    """What a model's weights take in training, with their gradients and all that the optimizer keeps.

    Args:
        codes: as `Chosen.weights` takes it.
    """
    chosen = optimizer_name.find(optimizer)
    layers, kept = projections(sizes), chosen.weights(recipe, dtype, codes)
    whole = NOTHING
    for name, shape in parameters(sizes, vocab).items():
        number = math.prod(shape)
        of_layer = name.removesuffix(".weight") in layers
        moments = chosen.moments[0 if of_layer else 1]
        of_codes = of_layer and kept == "codes"
        # No Linear holds a router or a convolution.
        apart = name == "embedding.weight" or name.endswith(("router.weight", "conv1d.weight"))
        small = len(shape) < 2 or (number < SMALL and not of_codes) or name == "embedding.weight"
        if chosen.preset is None or small:
            # A small matrix of a layer or head is a bfloat16 weight all the same.
            narrow = len(shape) > 1 and not apart and chosen.others(dtype) == "bfloat16"
            own = of_matrix(PRESETS["float32"], flat(shape), "bfloat16", None, moments) if narrow else None
            whole += own or plain(number, moments)
        else:
            how = kept if of_layer else "float32" if apart else chosen.others(dtype)
            *stack, rows, columns = shape
            for _ in range(math.prod(stack) if of_codes else 1):
                one = (rows, columns) if of_codes else flat(shape)
                whole += of_matrix(chosen.preset, one, how, recipe.fprop.b, moments)
    return whole


def check(config: TrainConfig, vocab: int, ranks: int = 1) -> None:
    """Raise a ValueError if training on a CPU needs more memory than there is.

    A micro-batch needs its ids, its logits and their gradient, and of every layer at least its input; each of several
    ranks has a part of it, and of the weights.
    """
    sizes = MODELS[config.model]
    first, *later = recipe_name.parts(config.recipe)
    codes = optimizer_name.may_be_codes(1 + len(later), config.tp)
    weights = trained(sizes, vocab, config.optimizer, first.recipe, config.dtype, codes).total
    tokens = config.batch * config.sequence
    at_once = min(tokens, config.loss_chunk or tokens)
    batch = 8 * config.accumulate * tokens + 8 * at_once * padded(vocab) + 2 * tokens * sizes.dim * sizes.layers
    if (weights + batch) // ranks > available():
        raise ValueError(
            f"this run needs at least {size(weights)} for the weights of {config.model} with their gradients and "
            f"moments and {size(batch)} for {config.accumulate} x {config.batch} sequences of {config.sequence}, and "
            f"there are {size(available())} of memory; take a smaller --model, --batch, --accumulate or --sequence"
        )


def size(bytes: int) -> str:
    return f"{bytes / 1e9:.3g} GB" if bytes < 10**30 else "beyond all measure"


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turn running out of memory into a ValueError that says what to make smaller."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or any(words in str(error) for words in WORDS):
            raise ValueError(f"there is not enough memory; take a smaller {what}") from error
        raise

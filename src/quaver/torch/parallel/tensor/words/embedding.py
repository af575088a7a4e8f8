"""An embedding of which each rank has some words: its class and its forward.

A rank looks up the tokens that are words of its own, and zeros stand for the others until ranks unite what they have:
no sum is rounded, so outputs and gradients have the bits of one process.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.torch.model.reach.exchanging import PUT_ABOVE
from quaver.torch.parallel import wire
from quaver.torch.parallel.tensor.tokens import Tokens, gathered
from quaver.torch.parallel.tensor.words.loss import loss_over_ranks
from quaver.torch.state.history.agreement import check_agreement, facts_of
from quaver.torch.state.recomputation import graph_task_id


class OverWords(NamedTuple):
    """On which ranks the words lie, and whether each gets some tokens of the output."""

    mesh: Any
    sequence: bool

    @property
    def name(self) -> str:
        """As the style is written."""
        return f"Vocabulary({'sequence=True' if self.sequence else ''})"

    @property
    def column(self) -> bool:
        """As a head it has some words on each rank."""
        return True


@cache
def over_words(kind: Any, words: OverWords) -> type:
    """The class of an embedding of a class once each rank has some words."""
    members = {"forward": _forward, "words_on_ranks": words, "__reduce_ex__": _reduce, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), {**members, "loss_over_ranks": loss_over_ranks, PUT_ABOVE: True})


def _reduce(module: Any, protocol: int) -> Any:
    """Pickle a module of a class that was made here: by the class that it stands above."""
    return _rebuild, (_bare(module), words_of(module)), module.__getstate__()


def _rebuild(kind: Any, words: OverWords) -> Any:
    exchanged: Any = over_words(kind, words)
    return exchanged.__new__(exchanged)


def _bare(module: Any) -> Any:
    """The class that the one made here stands above."""
    return next(kind for kind in type(module).__mro__ if "words_on_ranks" in vars(kind)).__bases__[0]


def words_of(module: Any) -> OverWords | None:
    """How an embedding's words lie; None for one without the style."""
    words: OverWords | None = getattr(type(module), "words_on_ranks", None)
    return words


@torch.compiler.disable
def _forward(module: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    words: Any = words_of(module)
    mesh, weight = words.mesh, module._parameters["weight"]
    number, group = mesh.size(), mesh.get_group()
    name = type(module).__name__
    each = weight.shape[0] // number
    why = ""
    if words.sequence and (not input.dim() or input.shape[-1] % number):
        why = (
            f"{name} under {words.name} got tokens of shape {tuple(input.shape)}: {number} ranks cannot share them; "
            "pad the last axis"
        )
    elif input.is_cpu and input.numel() and not 0 <= int(input.min()) <= int(input.max()) < weight.shape[0]:
        why = f"{name} has {weight.shape[0]} words, and the tokens go from {int(input.min())} to {int(input.max())}"
    what = {"tokens": facts_of(input), "weight": facts_of(weight), "gradients": torch.is_grad_enabled()}
    if graph_task_id() == -1:
        check_agreement(name, what, group, error=why)
    elif why:
        raise ValueError(why)
    place = input - each * mesh.get_local_rank()
    own = (place >= 0) & (place < each)
    held, padding = module._parameters, module.padding_idx
    module.__dict__["_parameters"] = {**held, "weight": weight.to_local()}
    if padding is not None:
        # It has no gradient, on the rank that has it.
        of_rank = padding - each * mesh.get_local_rank()
        module.__dict__["padding_idx"] = of_rank if 0 <= of_rank < each else None
    try:
        y = _bare(module).forward(module, torch.where(own, place, 0), *args, **kwargs)
    finally:
        module.__dict__["_parameters"] = held
        module.__dict__["padding_idx"] = padding
    return _United.apply(y.masked_fill(~own[..., None], 0), words)


class _United(torch.autograd.Function):
    """What each token's rank has, on every rank: all tokens, or this rank's."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, words: OverWords) -> Tensor:
        ctx.words, dim = words, y.dim() - 2
        united: Tensor = wire.unite(y, words.mesh.get_group(), dim if words.sequence else None)()
        return united

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        words: OverWords = ctx.words
        return gathered(g, g.dim() - 2, Tokens(words.mesh, False, False)) if words.sequence else g, None

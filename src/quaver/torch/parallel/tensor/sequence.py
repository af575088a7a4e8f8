"""Modules that work on each token by itself, such as norms, on this rank's tokens: their class and their forward.

Their parameters are whole on every rank, and the gradient of one is the sum over all tokens, in float32.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.torch.conversion.matchers.swap_class import PUT_ABOVE
from quaver.torch.parallel import comm
from quaver.torch.state.history.sync import check_agreement, facts_of
from quaver.torch.state.layer_state import graph_task_id

#: What drops whole channels, or leaves no zeros: of their noise nothing is known here.
OTHER_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class SequenceLayout(NamedTuple):
    """Which tokens a module takes and gives, and on which ranks."""

    mesh: Any
    #: Whether every rank has the whole input, and whether each gets the whole output.
    takes_whole: bool
    gives_whole: bool


@cache
def on_tokens(kind: Any, tokens: SequenceLayout) -> type:
    """The class of a module of a class once each rank has some tokens."""
    members = {"forward": _forward, "tokens_on_ranks": tokens, "__reduce_ex__": _reduce, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), {**members, PUT_ABOVE: True})


def _reduce(module: Any, protocol: int) -> Any:
    """Pickle a module of a class that was made here: by the class that it stands above."""
    return _rebuild, (bare(module), tokens_of(module)), module.__getstate__()


def _rebuild(kind: Any, tokens: SequenceLayout) -> Any:
    exchanged: Any = on_tokens(kind, tokens)
    return exchanged.__new__(exchanged)


def bare(module: nn.Module) -> Any:
    """The class that the one made here stands above."""
    return next(kind for kind in type(module).__mro__ if "tokens_on_ranks" in vars(kind)).__bases__[0]


def tokens_of(module: nn.Module) -> SequenceLayout | None:
    """Which tokens a module has; None for one without the style."""
    tokens: SequenceLayout | None = getattr(type(module), "tokens_on_ranks", None)
    return tokens


@torch.compiler.disable
def _forward(module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    tokens: Any = tokens_of(module)
    group = tokens.mesh.get_group()
    if graph_task_id() == -1:
        what: dict[str, Any] = {name: facts_of(p) for name, p in module._parameters.items()}
        what |= {"input": facts_of(x), "gradients": torch.is_grad_enabled(), "training": module.training}
        check_agreement(type(module).__name__, what, group)
    if tokens.takes_whole:
        # Numbers of tokens have no axis of features.
        dim = x.dim() - (2 if x.is_floating_point() else 1)
        if x.shape[dim] % tokens.mesh.size():
            raise ValueError(
                f"{type(module).__name__} under SequenceParallel(takes_whole=True) got an input of shape "
                f"{tuple(x.shape)}: "
                f"{tokens.mesh.size()} ranks cannot share {x.shape[dim]} tokens; pad them"
            )
        x = _ScatterTokens.apply(x, dim, tokens)
    kind, held = bare(module), module._parameters
    local = local_parameters(module)
    module.__dict__["_parameters"] = local
    try:
        if isinstance(module, nn.Dropout) and module.training:
            y = _dropped(x, module.p, tokens.mesh)
        else:
            y = kind.forward(module, x, *args, **kwargs)
    finally:
        module.__dict__["_parameters"] = held
    return _AllGatherTokens.apply(y, y.dim() - 2, tokens) if tokens.gives_whole else y


def local_parameters(module: nn.Module) -> dict[str, Any]:
    """A module's parameters as this rank has them, whose gradients go to all ranks' sums."""
    group = tokens_of(module).mesh.get_group()  # type: ignore[union-attr]
    held: dict[str, Any] = module._parameters
    return {name: p if p is None else _AllReduceGrad.apply(p.to_local(), group) for name, p in held.items()}


def _dropped(x: Tensor, p: float, mesh: Any) -> Tensor:
    """x without some of its elements, others than on other ranks though these have the same seed."""
    # The process's generator moves on alike on every rank.
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_()) + mesh.get_local_rank()
    kept = torch.empty_like(x).bernoulli_(1 - p, generator=torch.Generator(x.device).manual_seed(seed))
    return x * kept.div_(max(1 - p, torch.finfo(x.dtype).tiny))


class _AllReduceGrad(torch.autograd.Function):
    """A parameter as it is; its gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        total = g.contiguous() if g.dtype in (torch.float32, torch.float64) else g.float()
        total = total.clone() if total is g else total
        return comm.sum_parts(total, ctx.group, "gradients")().to(g.dtype), None


def _own(x: Tensor, dim: int, tokens: SequenceLayout) -> Tensor:
    return x.chunk(tokens.mesh.size(), dim)[tokens.mesh.get_local_rank()].contiguous()


def gathered(x: Tensor, dim: int, tokens: SequenceLayout) -> Tensor:
    """Every rank's part of [..., tokens, features] put together."""
    before = x.shape[:dim].numel()
    whole: Tensor = comm.gather(x.reshape(before * x.shape[dim], -1), 0, tokens.mesh.get_group(), max(before, 1))()
    return whole.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])


class _ScatterTokens(torch.autograd.Function):
    """This rank's tokens of what every rank has whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, tokens: SequenceLayout) -> Tensor:
        ctx.facts = dim, tokens
        return _own(x, dim, tokens)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return gathered(g, *ctx.facts), None, None


class _AllGatherTokens(torch.autograd.Function):
    """All tokens of what each rank has a part of, for what every rank computes alike: each has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, tokens: SequenceLayout) -> Tensor:
        ctx.facts = dim, tokens
        return gathered(x, dim, tokens)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _own(g, *ctx.facts), None, None

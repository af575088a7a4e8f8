"""Sequence parallelism for modules that process each token independently, such as norms and dropout.

Parameters are replicated, and the gradient of each is summed over all ranks in float32.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver.torch.parallel import comm
from quaver.torch.parallel.tensor.sharded_module import ShardedModule
from quaver.torch.state.history.sync import check_agreement, describe_tensor
from quaver.torch.state.layer_state import graph_task_id

#: Dropouts that drop whole channels or do not write zeros; their noise cannot be made different per rank here.
OTHER_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class SequenceLayout(NamedTuple):
    """How the input and output tokens of a module are distributed over a mesh."""

    mesh: Any
    #: True if every rank has the whole input, and True if every rank gets the whole output.
    replicated_input: bool
    gather_output: bool


class TokenShardedModule(ShardedModule):
    """A norm or dropout of this rank's tokens."""

    layout_on_ranks: SequenceLayout

    @torch.compiler.disable
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        tokens = self.layout_on_ranks
        group = tokens.mesh.get_group()
        if graph_task_id() == -1:
            what: dict[str, Any] = {name: describe_tensor(p) for name, p in self._parameters.items()}
            what |= {"input": describe_tensor(x), "gradients": torch.is_grad_enabled(), "training": self.training}
            check_agreement(type(self).__name__, what, group)
        if tokens.replicated_input:
            # Integer token ids have no feature axis.
            dim = x.dim() - (2 if x.is_floating_point() else 1)
            if x.shape[dim] % tokens.mesh.size():
                raise ValueError(
                    f"{type(self).__name__} under SequenceParallel(replicated_input=True) got an input of shape "
                    f"{tuple(x.shape)}: {tokens.mesh.size()} ranks cannot share {x.shape[dim]} tokens; pad them"
                )
            x = _ScatterTokens.apply(x, dim, tokens)
        parameters, local = self._parameters, local_parameters(self)
        self.__dict__["_parameters"] = local
        try:
            if isinstance(self, nn.Dropout) and self.training:
                y = _dropped(x, self.p, tokens.mesh)
            else:
                y = super().forward(x, *args, **kwargs)
        finally:
            self.__dict__["_parameters"] = parameters
        return _AllGatherTokens.apply(y, y.dim() - 2, tokens) if tokens.gather_output else y


def local_parameters(module: TokenShardedModule) -> dict[str, Any]:
    """Return a module's local parameters, wrapped so that their gradients are all-reduced."""
    group = module.layout_on_ranks.mesh.get_group()
    parameters: dict[str, Any] = module._parameters
    return {name: p if p is None else _AllReduceGrad.apply(p.to_local(), group) for name, p in parameters.items()}


def _dropped(x: Tensor, p: float, mesh: Any) -> Tensor:
    """Apply dropout with a different seed on each rank, even if all ranks have the same generator state."""
    # Drawing the seed advances the default generator equally on every rank.
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_()) + mesh.get_local_rank()
    keep_mask = torch.empty_like(x).bernoulli_(1 - p, generator=torch.Generator(x.device).manual_seed(seed))
    return x * keep_mask.div_(max(1 - p, torch.finfo(x.dtype).tiny))


class _AllReduceGrad(torch.autograd.Function):
    """Identity in forward; all-reduces the gradient of a parameter in backward."""

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
    """All-gather x [..., tokens, features] along its tokens."""
    before = x.shape[:dim].numel()
    whole: Tensor = comm.gather(x.reshape(before * x.shape[dim], -1), 0, tokens.mesh.get_group(), max(before, 1))()
    return whole.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])


class _ScatterTokens(torch.autograd.Function):
    """Take this rank's tokens of a replicated input; its backward all-gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, tokens: SequenceLayout) -> Tensor:
        ctx.facts = dim, tokens
        return _own(x, dim, tokens)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return gathered(g, *ctx.facts), None, None


class _AllGatherTokens(torch.autograd.Function):
    """All-gather tokens; its backward takes this rank's slice, since all ranks compute the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, tokens: SequenceLayout) -> Tensor:
        ctx.facts = dim, tokens
        return gathered(x, dim, tokens)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return _own(g, *ctx.facts), None, None

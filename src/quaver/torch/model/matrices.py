"""Which parameters of a model GEMMs read: those that a recipe could quantize, whatever module holds them.

Nothing in torch says so. It is told by what a parameter looks like: a matrix, or a stack of matrices as experts have,
that no embedding, convolution or norm owns and whose name is not that of a table or a bias.
"""

import re
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

#: Sides of a matrix below this are those of gates, ranks and tables.
SMALLEST_SIDE = 16
#: Classes that hold matrices and read them otherwise, by a part of their names.
OTHER_CLASSES = re.compile("embedding|conv[123]d$|convtranspose|norm", re.IGNORECASE)
OTHER_NAMES = re.compile("bias|embed|position|token|table|query_tokens|latent|norm|scale|_log", re.IGNORECASE)
#: Named like a convolution, and a linear layer [in, out]: transformers' of GPT-2.
LINEAR_CLASSES = {"Conv1D"}


def gemm_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module's own that GEMMs read; of an nn.Linear its weight, or what its weight is made of."""
    if isinstance(module, nn.Linear):
        weight = module._parameters.get("weight")
        parts = module.parameters() if weight is None else [weight]
        yield from (p for p in parts if not nn.parameter.is_lazy(p) and p.dim() == 2)
        return
    if isinstance(module, ParametrizationList):
        return
    kind = type(module).__name__
    if kind not in LINEAR_CLASSES and OTHER_CLASSES.search(kind):
        return
    for name, parameter in module.named_parameters(recurse=False):
        if not nn.parameter.is_lazy(parameter) and not OTHER_NAMES.search(name) and _is_operand(parameter):
            yield parameter


def _is_operand(parameter: torch.Tensor) -> bool:
    if parameter.dim() == 3 and parameter.shape[0] == 1:
        # One for all of a batch, such as positions that are learned.
        return False
    return parameter.dim() in (2, 3) and min(parameter.shape[-2:]) >= SMALLEST_SIDE

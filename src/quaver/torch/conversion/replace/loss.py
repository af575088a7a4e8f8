"""Replace the output head and loss of a causal language model by `linear_cross_entropy`, in training only.

The logits of all tokens are never stored; the outputs have None in their place. A trial on a small copy of the model
with a dummy body finds how the loss depends on hidden states, head and labels, including a scale or soft cap of the
logits.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.torch.conversion.probe import bare_copy, first_equal, neutral, random_tensor, reason_failed
from quaver.torch.conversion.replace.fused_module import DTYPES, FusedModule, Named, changed, fixed, patched
from quaver.torch.linear.fused_projections import is_bare
from quaver.torch.linear.linear import Linear
from quaver.torch.nn.loss import linear_cross_entropy
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.operations.autograd import forward_level, transforms_active
from quaver.torch.state.context import in_force

#: Label that is ignored by the loss.
IGNORED = -100
#: Arguments of a model's forward that its body does not take.
OF_THE_HEAD = {"labels", "logits_to_keep", "return_dict"}
#: Arguments of the loss besides labels, as Trainer passes them.
OF_THE_LOSS = {"num_items_in_batch", "shift_labels"}
#: Arguments of the forward that the replacement handles.
KNOWN = OF_THE_HEAD | OF_THE_LOSS | {"output_router_logits"}


@dataclass(frozen=True)
class LossFormula:
    """Formula of a model's loss: its body, head, scale, soft cap and loss function."""

    body: str
    head: str
    #: Name of the forward's first argument, which may be passed by position.
    first: str
    #: Names of arguments that the body takes; None for any.
    takes: frozenset[str] | None
    #: The loss function of logits that was compared, and the class of the outputs.
    loss: Callable[..., Tensor]
    output: type
    #: Fields of the outputs besides loss and logits.
    others: tuple[str, ...]
    scale: float = 1.0
    soft_cap: float | None = None
    #: Names of arguments that make the forward or the loss function compute another loss.
    other_arguments: frozenset[str] = frozenset()
    #: Attributes of the model and its configuration, as they were compared.
    attributes: Named = ()
    config_values: Named = ()

    def __str__(self) -> str:
        return "head and loss, without logits in training"

    def of(self, model: Any, hidden: Tensor, labels: Tensor, **loss_arguments: Any) -> Tensor:
        """Return the loss of hidden states [B, S, H] and labels [B, S]."""
        targets, count = loss_arguments.get("shift_labels"), loss_arguments.get("num_items_in_batch")
        if targets is None:
            targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        x = hidden if self.scale == 1 else hidden * self.scale
        targets = targets.reshape(x.shape[:-1]).to(x.device)
        head: nn.Linear = model._modules[self.head]
        reduction = "mean" if count is None else "sum"
        if _over_ranks(head):
            loss = linear_cross_entropy(x, head, targets, soft_cap=self.soft_cap, reduction=reduction)
        else:
            loss = linear_cross_entropy(x, head.weight, targets, head.bias, soft_cap=self.soft_cap, reduction=reduction)
        if count is None:
            return loss
        # With a count of 0, the loss is NaN and the gradients are zero, as in the original.
        if not isinstance(count, Tensor):
            return loss / count if count else loss.detach() / count + 0 * loss
        count = count.to(loss.device)
        return torch.where(count == 0, loss.detach() / count, loss / torch.where(count == 0, 1, count))


class FusedLoss(FusedModule):
    """Mixin above a causal language model's class that computes the loss without logits in training."""

    _formula: LossFormula

    @staticmethod
    def forward_like(kind: Any) -> Callable[..., Any]:
        """Return the forward with the signature of the original, from which Trainer reads the dataset's columns."""

        def forward(self: FusedLoss, *args: Any, **kwargs: Any) -> Any:
            return FusedLoss.forward(self, *args, **kwargs)

        forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
        return forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        formula = self._formula
        labels = kwargs.get("labels")
        if (
            labels is None
            or len(args) > 1
            or not self.training
            or not torch.is_grad_enabled()
            or _needs_original(self, kwargs)
        ):
            return super().forward(*args, **kwargs)
        if patched(self, called=True) or changed(self.__dict__, formula.attributes) or not _plain_head(self):
            return super().forward(*args, **kwargs)
        passed = dict(zip((formula.first,), args, strict=False)) | kwargs
        loss_arguments = {name: passed[name] for name in OF_THE_LOSS if name in passed}
        body_arguments = {
            name: value
            for name, value in passed.items()
            if name not in OF_THE_HEAD and (formula.takes is None or name in formula.takes)
        }
        outputs = self._modules[formula.body](**body_arguments)  # type: ignore[misc]
        loss = formula.of(self, outputs[0], labels, **loss_arguments)
        return formula.output(loss=loss, **{name: getattr(outputs, name, None) for name in formula.others})


def _needs_original(model: Any, kwargs: dict[str, Any]) -> bool:
    """Return True if a call needs the original forward.

    Reasons: logits or router outputs are requested, another loss or output type is requested, or the configuration
        changed.
    """
    config, formula = model.config, model._formula
    if not is_tracing() and (transforms_active() or forward_level() >= 0):
        return True
    keeps = kwargs.get("logits_to_keep", 0)
    return (
        isinstance(keeps, Tensor)
        or keeps != 0
        or kwargs.get("return_dict") is False
        or getattr(config, "return_dict", True) is False
        or bool(kwargs.get("output_router_logits") or getattr(config, "output_router_logits", False))
        or model.loss_function is not formula.loss
        or any(kwargs.get(name) is not None for name in formula.other_arguments)
        or changed(config.__dict__, formula.config_values)
    )


def _plain_head(model: Any) -> bool:
    """Return True if the head is a linear layer in high precision without hooks, so that it need not be called."""
    head = model._modules[model._formula.head]
    kind = type(head)
    if kind is not nn.Linear and kind is not Linear and not _over_ranks(head):
        return False
    recipe = in_force(head.recipe) if isinstance(head, Linear) else None
    return is_bare(head) and (recipe is None or not recipe.quantizes) and head.weight.dtype in DTYPES


def _over_ranks(head: nn.Module) -> bool:
    """Return True if the head is vocabulary-parallel and computes its loss across ranks."""
    return hasattr(type(head), "loss_over_ranks")


def is_causal(module: nn.Module) -> bool:
    """Return True if the model may be a causal language model: it has a body, an output head and a loss function."""
    kind = type(module)
    return hasattr(kind, "loss_function") and _names(module) is not None


def _names(model: Any) -> tuple[str, str] | None:
    """Return the names of body and head, or None."""
    body = getattr(type(model), "base_model_prefix", "")
    try:
        head = model.get_output_embeddings()
    except Exception:
        # Models without an output embedding raise various errors.
        return None
    names = [name for name, part in model._modules.items() if part is head]
    return (body, names[0]) if body in model._modules and names and isinstance(head, nn.Linear) else None


@neutral()
def formula_of(model: Any) -> tuple[LossFormula | None, str]:
    """Return how a model computes its loss, or None and the reason why it is not replaced."""
    try:
        return _formula_of(model)
    except Exception as error:
        return None, reason_failed(error)


def _formula_of(model: Any) -> tuple[LossFormula | None, str]:
    names = _names(model)
    assert names is not None
    output = _small(model, torch.float32)(input_ids=IDS, labels=IDS)
    fields = [field.name for field in dataclasses.fields(output)] if dataclasses.is_dataclass(output) else []
    if "loss" not in fields or "logits" not in fields:
        return None, "its outputs have an unknown class"
    others = tuple(name for name in fields if name not in ("loss", "logits"))
    parameters = inspect.signature(model._modules[names[0]].forward).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    takes = None if any_name else frozenset(parameters)
    own = inspect.signature(type(model).forward).parameters
    first = next(name for name in own if name != "self")
    lost = {n for n, p in own.items() if p.kind is p.POSITIONAL_OR_KEYWORD} - OF_THE_HEAD - OF_THE_LOSS - {"self"}
    if takes is not None and not lost <= takes:
        return None, f"its body does not take {', '.join(sorted(lost - takes))}"
    if own[first].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return None, "its forward names no input"
    if not _passes_inputs_on(model, frozenset(own)):
        return None, "its forward passes other tensors to its body than it receives"
    loss_parameters = inspect.signature(model.loss_function).parameters
    other_arguments = (
        frozenset({*own, *loss_parameters}) - {*parameters, "self", "kwargs", "logits", "vocab_size"} - KNOWN
    )
    config_values = fixed({name: value for name, value in model.config.__dict__.items() if "logit" in name})
    common = (*names, first, takes, model.loss_function, type(output), others)
    candidates = (
        LossFormula(*common, scale, cap, other_arguments, config_values=config_values) for scale, cap in _numbers(model)
    )
    return first_equal(
        candidates,
        lambda dtype: _small(model, dtype),
        # Each way to count tokens.
        lambda dtype: iter([({},), ({"num_items_in_batch": COUNT},), ({"shift_labels": IDS.roll(1, 1)},)]),
        "no scale or soft cap of its logits reproduces its loss",
        ours=lambda formula, copied, loss_arguments: formula.of(
            copied, copied._modules[names[0]].states, IDS, **loss_arguments
        )[None],
        theirs=lambda copied, more: copied(input_ids=IDS, labels=IDS, **more).loss[None],
    )


#: Labels of the small copy, a number of tokens, and its hidden size and vocabulary size.
IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, IGNORED, 10]], dtype=torch.int64, device="cpu")
COUNT = torch.tensor(7, dtype=torch.int64, device="cpu")
WIDTH, VOCABULARY = 8, 11


class _Outputs(tuple[Any, ...]):
    """Outputs of the dummy body: hidden states, and None for every other attribute."""

    @property
    def last_hidden_state(self) -> Tensor:
        hidden: Tensor = self[0]
        return hidden

    def __getattr__(self, name: str) -> None:
        return None


class _Body(nn.Module):
    def __init__(self, names: Sequence[str], dtype: torch.dtype) -> None:
        super().__init__()
        self.states = nn.Parameter(random_tensor((*IDS.shape, WIDTH), dtype, 1, scale=3.0))
        self.names = names
        #: Arguments of the last call, by name.
        self.passed: dict[str, Any] = {}

    def forward(self, *args: Any, **kwargs: Any) -> _Outputs:
        self.passed = dict(zip(self.names, args, strict=False)) | kwargs
        return _Outputs((self.states,))


def _small(model: Any, dtype: torch.dtype) -> Any:
    body, head = _names(model) or ("", "")
    bias = model._modules[head].bias is not None
    linear = nn.Linear(WIDTH, VOCABULARY, bias, device="cpu", dtype=dtype)
    with torch.no_grad():
        for i, p in enumerate(linear.parameters()):
            p.copy_(random_tensor(p.shape, torch.float32, 2 + i))
    taken = list(inspect.signature(model._modules[body].forward).parameters)
    copied: Any = bare_copy(model, {body: _Body(taken, dtype), head: linear}, {})
    copied.config = copy.copy(model.config)
    words = model._modules[head].out_features
    for holder in (copied.config.__dict__, copied.__dict__):
        holder.update({k: VOCABULARY for k, v in holder.items() if v == words and type(v) is int and "vocab" in k})
    return copied.train()


def _passes_inputs_on(model: Any, own: frozenset[str]) -> bool:
    """Return True if the forward passes its tensors to the body unchanged, and no others.

    Args:
        model: the language model.
        own: names of the forward's arguments.
    """
    others: dict[str, Tensor] = {
        name: IDS.ne(IGNORED).long() for name in ("attention_mask", "position_ids") if name in own
    }
    calls: list[dict[str, Tensor]] = [{"input_ids": IDS}, {"input_ids": IDS, **others}]
    if "inputs_embeds" in own:
        calls.append({"inputs_embeds": random_tensor((*IDS.shape, WIDTH), torch.float32, 4), **others})
    for passed in calls:
        copied = _small(model, torch.float32)
        copied(labels=IDS, **passed)
        body = next(part for part in copied._modules.values() if isinstance(part, _Body))
        received = {name: value for name, value in body.passed.items() if isinstance(value, Tensor)}
        if received.keys() != passed.keys() or any(received[name] is not value for name, value in passed.items()):
            return False
    return True


def _numbers(model: Any) -> Iterator[tuple[float, float | None]]:
    """Yield scales and soft caps of logits to try, from the attributes of the model and its configuration."""
    settings = {**model.config.__dict__, **model.__dict__}
    floats = {k: float(v) for k, v in settings.items() if type(v) in (int, float) and "logit" in k and v > 0}
    yield 1.0, None
    for name, value in floats.items():
        if "cap" in name:
            yield 1.0, value
        else:
            yield value, None
            yield 1 / value, None

"""One call of a layer, watched: in which order its norms, matrices and dropouts run, on what, and what they give."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quaver.torch.model.huggingface.roles import is_norm
from quaver.torch.model.reach.same import first_of

#: What attention begins with, and an MLP.
ATTENTION, MLP = ("qkv", "q", "k", "v", "q_down", "kv_down"), ("gate_up", "gate", "up", "mixture")


@dataclass(frozen=True)
class Event:
    """A module that ran."""

    #: Of `roles_of`, "norm" or "dropout".
    role: str
    name: str
    module: nn.Module
    input: Tensor
    output: Tensor


@dataclass(frozen=True)
class Watched:
    """What a call of a layer did."""

    input: Tensor
    output: Tensor
    events: tuple[Event, ...]

    def input_of(self, roles: tuple[str, ...]) -> Tensor:
        """What the first module of these roles read."""
        return next(event.input for event in self.events if event.role in roles)

    def output_of(self, role: str) -> Tensor:
        """What the module of this role gave."""
        return next(event.output for event in self.events if event.role == role)

    def head_norms(self) -> list[Event]:
        """Norms between the projections into attention and the one out: of queries, then of keys."""
        first, last = self._span(ATTENTION, "o")
        return [event for event in self.events[first:last] if event.role == "norm"]

    def stream_norms(self) -> list[Event]:
        """All other norms, in order."""
        first, last = self._span(ATTENTION, "o")
        return [e for i, e in enumerate(self.events) if e.role == "norm" and not first < i < last]

    def hidden_dropouts(self) -> list[Event]:
        """Dropouts of the MLP's hidden features: they run before its last matrix, on what is as wide as its input."""
        last = next((i for i, event in enumerate(self.events) if event.role == "down"), None)
        if last is None:
            return []
        first = next(i for i, event in enumerate(self.events) if event.role in MLP)
        width = self.events[last].input.shape[-1]
        return [e for e in self.events[first:last] if e.role == "dropout" and e.input.shape[-1] == width]

    def order(self) -> str:
        """The order of norms ("n"), attention ("a") and MLP ("m")."""
        first, last = self._span(ATTENTION, "o")
        marks = []
        for i, event in enumerate(self.events):
            if event.role == "norm" and not first < i < last:
                marks.append("n")
            elif i == first:
                marks.append("a")
            elif event.role in MLP and "m" not in marks:
                marks.append("m")
        return "".join(marks)

    def _span(self, begin: tuple[str, ...], end: str) -> tuple[int, int]:
        roles = [event.role for event in self.events]
        return next(i for i, role in enumerate(roles) if role in begin), roles.index(end)


def watched(layer: nn.Module, roles: Mapping[str, str], x: Tensor, arguments: Mapping[str, Any]) -> Watched:
    """Call the layer in evaluation mode, without gradients and without noise of the outside's.

    Args:
        roles: of `roles_of`.
        x: [B, S, dim]; arguments: what its forward takes beside.
    Raises:
        ValueError: a module that was named did not run.
    """
    names = {name: role for role, name in roles.items()}
    events: list[Event] = []
    was_training = [(module, module.training) for module in layer.modules()]
    with ExitStack() as stack:
        for name, module in layer.named_modules():
            role = names.get(name) or _kind(module)
            if role is not None and not any(name.startswith(f"{other}.") for other in names):
                hook = _noted(events, role, name)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        stack.callback(_restore, was_training)
        layer.eval()
        stack.enter_context(torch.no_grad())
        output = layer(x, **arguments)
    missing = [name for name, role in names.items() if all(event.role != role for event in events)]
    if missing:
        raise ValueError(f"a call of {type(layer).__name__} runs no {', '.join(missing)}: another path computes it")
    return Watched(x, first_of(output), tuple(events))


def _kind(module: nn.Module) -> str | None:
    """What a module is that has no role by its name."""
    if isinstance(module, nn.Dropout):
        return "dropout"
    return "norm" if is_norm(module) else None


def _noted(events: list[Event], role: str, name: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        given = args[0] if args else next(iter(options.values()))
        # Falcon's layers add to what their MLP gave, in place.
        events.append(Event(role, name, module, given.clone(), first_of(output).clone()))

    return hook


def _restore(was_training: list[tuple[nn.Module, bool]]) -> None:
    for module, training in was_training:
        module.training = training

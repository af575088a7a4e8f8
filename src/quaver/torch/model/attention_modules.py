"""The attention of a model that `convert` gives recipes, and the attention that it cannot reach."""

from collections import Counter
from typing import TypeVar

from torch import nn

from quaver.torch.blocks.attention.dot_product import DotProductAttention

Module = TypeVar("Module", bound=nn.Module)


def instances(model: nn.Module, kind: type[Module]) -> list[tuple[Module, list[str]]]:
    """Each module of a class once, with all its names."""
    modules: dict[int, tuple[Module, list[str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kind):
            modules.setdefault(id(module), (module, []))[1].append(name)
    return list(modules.values())


def others(model: nn.Module) -> dict[str, int]:
    """Modules of other classes that are attention by their name, the innermost ones, counted by class."""
    return Counter(type(module).__name__ for module in model.modules() if _named(module) and not _holds_another(module))


def _named(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() and not isinstance(module, DotProductAttention)


def _holds_another(module: nn.Module) -> bool:
    """True if a module inside attends, one of ours or of another class."""
    return any(isinstance(part, DotProductAttention) or _named(part) for part in module.modules() if part is not module)

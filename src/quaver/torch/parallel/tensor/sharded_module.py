"""Classes of sharded modules: a subclass of the module's own class that says how ranks share it.

So a style applies to any kind of module, whose hooks, attributes and isinstance checks remain. Parameters become
DTensors, which know the mesh; a sharded module has no further state.
"""

from functools import cache
from typing import Any

from torch import nn

from quaver.torch.conversion.matchers.swap_class import PUT_ABOVE


class ShardedModule(nn.Module):
    """Base of classes that are put above a module's own class; `super()` refers to that class."""

    #: How ranks share the module, hashable.
    layout_on_ranks: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (*_bases(self), self.layout_on_ranks), self.__getstate__()


def shard(module: Any, over: Any, layout: Any) -> None:
    """Put the class `over` above a module's own class."""
    kind: Any = type(module)
    module.__class__ = _sharded(over, kind, layout)


@cache
def _sharded(over: Any, kind: Any, layout: Any) -> Any:
    members = {"layout_on_ranks": layout, "__module__": kind.__module__, PUT_ABOVE: True}
    return type(kind.__name__, (over, kind), members)


def _rebuild(over: Any, kind: Any, layout: Any) -> Any:
    sharded = _sharded(over, kind, layout)
    return sharded.__new__(sharded)


def _bases(module: ShardedModule) -> Any:
    return next(kind for kind in type(module).__mro__ if "layout_on_ranks" in vars(kind)).__bases__


def own_class(module: ShardedModule) -> Any:
    """Return the class that a sharded module had before."""
    return _bases(module)[1]

"""Blocks that expose the parameters of their submodules under other names, such as another library's or a
checkpoint's.
"""

from typing import Any

from torch import nn


class AliasedParameters(nn.Module):
    """Mixin for a block that exposes parameters of its submodules as its own, under other names.

    The state dict and `named_parameters` use these names, and setting an attribute sets the submodule's parameter.
    State without an alias, such as scaling histories, keeps the submodule's name.
    """

    #: (submodule, parameter name in it) by alias.
    aliases: dict[str, tuple[str, str]]
    #: Names of submodules that must not be replaced.
    fixed: tuple[str, ...] = ()

    def rename(self, names: dict[str, tuple[str, str]], fixed: tuple[str, ...] = ()) -> None:
        """Set up the aliases; call it at the end of the constructor.

        Args:
            names: (submodule, parameter name in it) by alias; absent parameters are skipped.
            fixed: submodules that must not be replaced, because users read their parameters from the block.
        """
        has = {name: (part, key) for name, (part, key) in names.items() if self.parameter_of(part, key) is not None}
        self.__dict__.update(aliases=has, fixed=fixed)
        self._update_aliases()
        self.register_state_dict_post_hook(_rename)
        self.register_load_state_dict_post_hook(_loaded)

    def parameter_of(self, part: str, key: str) -> nn.Parameter | None:
        """Return a submodule's parameter, or None if it is absent."""
        module = self._modules.get(part)
        return None if module is None else module._parameters.get(key)

    def _update_aliases(self) -> None:
        for name, (part, key) in self.aliases.items():
            self._parameters[name] = self.parameter_of(part, key)

    def __setattr__(self, name: str, value: Any) -> None:
        at = self.__dict__.get("aliases", {}).get(name)
        if at is None:
            if name in self.__dict__.get("fixed", ()) and self._modules.get(name) is not value:
                raise ValueError(f"{type(self).__name__}.{name} has the module's weight: replace the module itself")
            super().__setattr__(name, value)
        else:
            setattr(self._modules[at[0]], at[1], value)
            self._update_aliases()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._parameters.clear()
        try:
            return super()._apply(fn, recurse)
        finally:
            self._update_aliases()

    def __getstate__(self) -> dict[str, Any]:
        # The submodules pickle the parameters, including quantized ones.
        return {**self.__dict__, "_parameters": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._update_aliases()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *args: Any
    ) -> None:
        for name, (part, key) in self.aliases.items():
            if prefix + name not in state_dict:
                missing.append(prefix + name)
            # A missing parameter keeps its value.
            state_dict[f"{prefix}{part}.{key}"] = state_dict.pop(prefix + name, self.parameter_of(part, key))
        self._parameters.clear()
        try:
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *args)
        finally:
            self._update_aliases()


def _rename(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, (part, key) in module.aliases.items():
        inner = f"{prefix}{part}.{key}"
        if inner in state:
            state[prefix + name] = state.pop(inner)


def _loaded(module: Any, _: Any) -> None:
    module._update_aliases()

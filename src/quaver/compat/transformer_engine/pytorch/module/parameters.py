"""What Transformer Engine's modules have in common: arguments, first values, and parameters by its names."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quaver.compat.transformer_engine.pytorch.module import extra_state
from quaver.torch.linear.layer import Linear
from quaver.torch.model.weights.gradients import weight_gradients
from quaver.torch.state.layer import state_of

#: What gives a weight its first values; None is a normal distribution of this deviation.
Init = Callable[[Tensor], Any] | None
DEVIATION = 0.023


class Common:
    """Arguments that modules share; a device "cuda" is a GPU where there is one.

    Those of tensor parallelism (tp_group, ub_* and the like) are for one rank: several are refused. `seq_length`,
    `micro_batch_size`, `get_rng_state_tracker`, `rng_tracker_name`, `save_original_input` say what is not needed.
    """

    def __init__(
        self, *, init_method: Init = None, bias: bool = True, return_bias: bool = False, device: Any = "cuda",
        params_dtype: torch.dtype | None = None, fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False, tp_group: Any = None, tp_size: int = 1,
        # Nothing here reads what follows.
        name: str | None = None, sequence_parallel: bool = False, get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None, ub_overlap_ag: bool = False, ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False,
        ub_name: str | None = None, symmetric_ar_type: str | None = None, save_original_input: bool = False,
        seq_length: int | None = None, micro_batch_size: int | None = None,
    ) -> None:  # fmt: skip
        self.init_method, self.bias, self.return_bias = init_method, bias, return_bias
        self.like = {"device": place(device), "dtype": params_dtype}
        self.main_grad, self.later = fuse_wgrad_accumulation, delay_wgrad_compute
        self.ranks = tp_size if tp_group is None else dist.get_world_size(tp_group)

    @property
    def added(self) -> bool:
        """Whether there is a bias that a layer adds, and does not give beside its output."""
        return self.bias and not self.return_bias


class Stateless(nn.Module):
    """Mixed into a module whose `_extra_state` says nothing that is needed here."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def place(device: Any) -> Any:
    """A device; the CPU for "cuda" where there is no GPU."""
    return "cpu" if str(device).startswith("cuda") and not torch.cuda.is_available() else device


class Module(nn.Module):
    """Mixed into a block of ours: the parameters of its parts are its own, too, by Transformer Engine's names.

    A state dict and `named_parameters` have those names, and setting an attribute sets the part's parameter. What
    recipes record is the parts' own, by our names; an `_extra_state` that is loaded becomes that.
    """

    #: The part and the name in it of each parameter.
    lent: dict[str, tuple[str, str]]
    #: The linear layers, in Transformer Engine's order.
    gemms: tuple[str, ...] = ()

    def lend(
        self, options: Common, gemms: tuple[str, ...], names: dict[str, tuple[str, str]], bias: str = "", rows: int = 0
    ) -> None:
        """Begin, with the names of parameters, and where they are; and of the bias that may be given beside the output.

        Raises:
            ValueError: options of one rank's part of a layer, with what to do.
        """
        if options.ranks > 1:
            raise ValueError(
                f"{type(self).__name__} is one rank's part of {options.ranks}: make it whole, without tp_group and "
                "tp_size, and apply torch's parallelize_module with Column(), Row() or Heads() of quaver.torch.parallel"
            )
        self.__dict__["return_bias"] = options.return_bias
        if options.return_bias and options.bias:
            self.apart = Bias(rows, options.like)
            names = names | {bias: ("apart", "bias")}
        has = {name: (part, key) for name, (part, key) in names.items() if self._held(part, key) is not None}
        self.__dict__.update(lent=has, gemms=gemms, init_method=options.init_method)
        if options.main_grad or options.later:
            self.__dict__["taker"] = weight_gradients(main_grad=options.main_grad, later=options.later)
        self._borrow()
        self.register_state_dict_post_hook(_rename)
        self.register_load_state_dict_post_hook(_loaded)
        self.fill()

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Any:
        """(output, bias, the norm's output), as much of it as is asked for; a bias that is not there has no elements.

        `is_first_microbatch` tells what is known here.

        Raises:
            ValueError: fp8_output or fp8_grad, which ask for codes.
        """
        refuse_codes(fp8_output, fp8_grad)
        with self.takes:
            y: Any = super().forward(inp)
        y, *others = y if isinstance(y, tuple) else (y,)
        if self.__dict__["return_bias"]:
            bias = self._held("apart", "bias")
            others.insert(0, y.new_empty(0) if bias is None else bias.to(y.dtype))
        return (y, *others) if others else y

    def fill(self) -> None:
        """First values: weights as `init_method`, or normally distributed; biases 0."""
        for name in self.gemms:
            layer: Any = self._modules[name]
            fill(layer, self.__dict__["init_method"])

    def reset_parameters(self, defer_init: bool = False) -> None:
        if not defer_init:
            super().reset_parameters()  # type: ignore[misc]
            self.fill()

    @property
    def takes(self) -> Any:
        """What a forward runs in: gradients of weights may be for `main_grad`, or for `backward_dw`."""
        return self.__dict__.get("taker") or nullcontext()

    def backward_dw(self) -> None:
        """Compute the gradients of weights that wait."""
        taker = self.__dict__.get("taker")
        if taker is not None:
            taker.compute()

    def _held(self, part: str, key: str) -> nn.Parameter | None:
        module = self._modules.get(part)
        return None if module is None else module._parameters.get(key)

    def _borrow(self) -> None:
        for name, (part, key) in self.lent.items():
            self._parameters[name] = self._held(part, key)

    def __setattr__(self, name: str, value: Any) -> None:
        at = self.__dict__.get("lent", {}).get(name)
        if at is None:
            if name in self.__dict__.get("gemms", ()) and self._modules.get(name) is not value:
                raise ValueError(f"{type(self).__name__}.{name} has the module's weight: replace the module itself")
            super().__setattr__(name, value)
        else:
            setattr(self._modules[at[0]], at[1], value)
            self._borrow()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._parameters.clear()
        try:
            return super()._apply(fn, recurse)
        finally:
            self._borrow()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._borrow()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], *args: Any
    ) -> None:
        where = f"{prefix}_extra_state"
        state = extra_state.read(state_dict.pop(where, None), where)
        of_layers = [] if state is None else extra_state.histories(state, where, len(self.gemms))
        for part, buffers in zip(self.gemms, of_layers, strict=False):
            state_dict.update({f"{prefix}{part}.{name}": value for name, value in buffers.items()})
        for name, (part, key) in self.lent.items():
            if prefix + name not in state_dict:
                missing.append(prefix + name)
            # What is missing stays as it is.
            state_dict[f"{prefix}{part}.{key}"] = state_dict.pop(prefix + name, self._held(part, key))
        self._parameters.clear()
        try:
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, *args)
        finally:
            self._borrow()


class Assembled(nn.Module):
    """Mixed into a module that is made of others."""

    def backward_dw(self) -> None:
        """Compute the gradients of weights that wait."""
        for module in self.modules():
            if isinstance(module, Module):
                module.backward_dw()


def refuse_codes(fp8_output: bool | None, fp8_grad: bool = False) -> None:
    """Raise the ValueError for what is to be given as codes."""
    if fp8_output or fp8_grad:
        raise ValueError("fp8_output and fp8_grad are not there: values between layers are in high precision")


@torch.no_grad()
def fill(layer: Linear, init_method: Init) -> None:
    """First values of a linear layer."""
    for name, p in layer._parameters.items():
        if p is None:
            continue
        value = p if layer.weight_spec is None else torch.empty_like(p, dtype=layer.weight_dtype)
        if name.endswith("bias"):
            nn.init.zeros_(p)
        elif init_method is None:
            nn.init.normal_(value, 0.0, DEVIATION)
        else:
            init_method(value)
        if value is not p and name == "weight" and not value.is_meta:
            layer.set_weight(value)
            if state_of(layer).initial is not None:
                state_of(layer).initial = value.cpu()


class Bias(nn.Module):
    """A bias that a module gives beside its output, and does not add."""

    def __init__(self, features: int, like: dict[str, Any]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features, **like))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)


def _rename(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, (part, key) in module.lent.items():
        inner = f"{prefix}{part}.{key}"
        if inner in state:
            state[prefix + name] = state.pop(inner)


def _loaded(module: Any, _: Any) -> None:
    module._borrow()

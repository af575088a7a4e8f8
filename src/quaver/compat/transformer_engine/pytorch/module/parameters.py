"""What Transformer Engine's modules have in common: arguments, first values, and parameters by its names."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quaver.compat import extra_state
from quaver.torch.conversion.quantized_weights import fill
from quaver.torch.conversion.weight_gradients import weight_gradients
from quaver.torch.linear import store_weight
from quaver.torch.nn.parameter_names import AliasedParameters
from quaver.torch.operations.ops import DTYPES, autocast_device

#: What gives a weight its first values; None is the normal distribution here.
Init = Callable[[Tensor], Any] | None
NORMAL = partial(nn.init.normal_, mean=0.0, std=0.023)


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


def cast_to_autocast(x: Tensor) -> Tensor:
    """x in torch.autocast's dtype where that is enabled: what Transformer Engine's modules compute in."""
    device = autocast_device(x)
    if torch.is_autocast_enabled(device) and x.dtype in DTYPES:
        return x.to(torch.get_autocast_dtype(device))
    return x


class Module(AliasedParameters):
    """Mixed into a block of ours: the parameters of its parts are its own, too, by Transformer Engine's names.

    What recipes record is the parts' own, by our names; an `_extra_state` that is loaded becomes that.
    """

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
                "tp_size, and apply torch's parallelize_module with ColwiseParallel(), RowwiseParallel() or "
                "HeadParallel() of quaver.torch.parallel"
            )
        self.__dict__["return_bias"] = options.return_bias
        if options.return_bias and options.bias:
            self.apart = Bias(rows, options.like)
            names = names | {bias: ("apart", "bias")}
        self.__dict__.update(gemms=gemms, init_method=options.init_method)
        if options.main_grad or options.later:
            self.__dict__["taker"] = weight_gradients(main_grad=options.main_grad, later=options.later)
        for name in gemms:
            store_weight.narrow_gradient(self._modules[name])
        self.rename(names, gemms)
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
        if "norm" in self._modules:
            # A linear layer alone casts by itself, so that layers of one input share its codes.
            inp = cast_to_autocast(inp)
        with self.takes:
            y: Any = super().forward(inp)
        y, *others = y if isinstance(y, tuple) else (y,)
        if self.__dict__["return_bias"]:
            bias = self.held("apart", "bias")
            others.insert(0, y.new_empty(0) if bias is None else bias.to(y.dtype))
        return (y, *others) if others else y

    def fill(self) -> None:
        """First values: weights as `init_method`, or normally distributed; biases 0."""
        for name in self.gemms:
            layer: Any = self._modules[name]
            fill(layer, self.__dict__["init_method"] or NORMAL)

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

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        where = f"{prefix}_extra_state"
        state = extra_state.read(state_dict.pop(where, None), where)
        for part, buffers in zip(self.gemms, self._recorded(state, where), strict=False):
            state_dict.update({f"{prefix}{part}.{name}": value for name, value in buffers.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _recorded(self, state: Any, where: str) -> list[dict[str, Tensor]]:
        """What an `_extra_state` says of each part of `gemms`, by the names of our buffers."""
        return [] if state is None else extra_state.histories(state, where, len(self.gemms))


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


class Bias(nn.Module):
    """A bias that a module gives beside its output, and does not add."""

    def __init__(self, features: int, like: dict[str, Any]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features, **like))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

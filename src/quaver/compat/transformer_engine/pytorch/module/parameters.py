"""Base classes of Transformer Engine's modules: common arguments, initialization, and its parameter names."""

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
from quaver.torch.linear import stored_weight
from quaver.torch.nn.parameter_names import AliasedParameters
from quaver.torch.operations.ops import DTYPES, autocast_device

#: Initializer of a weight; None means the normal distribution below.
Init = Callable[[Tensor], Any] | None
NORMAL = partial(nn.init.normal_, mean=0.0, std=0.023)


class Common:
    """Arguments common to all modules; device "cuda" means a GPU if there is one.

    Arguments of tensor parallelism (tp_group, ub_* and the like) are supported for a single rank only. `seq_length`,
    `micro_batch_size`, `get_rng_state_tracker`, `rng_tracker_name` and `save_original_input` are accepted without
    effect.
    """

    def __init__(
        self, *, init_method: Init = None, bias: bool = True, return_bias: bool = False, device: Any = "cuda",
        params_dtype: torch.dtype | None = None, fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False, tp_group: Any = None, tp_size: int = 1,
        # Accepted without effect.
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
        """True if the layer adds a bias itself instead of returning it."""
        return self.bias and not self.return_bias


class Stateless(nn.Module):
    """Mixin for a module whose `_extra_state` can be ignored."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def place(device: Any) -> Any:
    """Return a device, or the CPU for "cuda" without a GPU."""
    return "cpu" if str(device).startswith("cuda") and not torch.cuda.is_available() else device


def cast_to_autocast(x: Tensor) -> Tensor:
    """Cast x to torch.autocast's dtype if enabled, as Transformer Engine's modules do."""
    device = autocast_device(x)
    if torch.is_autocast_enabled(device) and x.dtype in DTYPES:
        return x.to(torch.get_autocast_dtype(device))
    return x


class Module(AliasedParameters):
    """Mixin for a Quaver block that exposes the parameters of its submodules under Transformer Engine's names.

    Recipe state stays in the submodules under Quaver's names; a loaded `_extra_state` is converted to it.
    """

    #: Names of the linear layers, in Transformer Engine's order.
    gemms: tuple[str, ...] = ()

    def lend(
        self, options: Common, gemms: tuple[str, ...], names: dict[str, tuple[str, str]], bias: str = "", rows: int = 0
    ) -> None:
        """Set up parameter names and options; called at the end of the constructor.

        Args:
            options: common arguments.
            gemms: names of the linear layers.
            names: locations of parameters by Transformer Engine's names.
            bias: name of the bias that may be returned next to the output.
            rows: size of that bias.
        Raises:
            ValueError: options for one rank's shard of a layer.
        """
        if options.ranks > 1:
            raise ValueError(
                f"{type(self).__name__} would be one rank's shard of {options.ranks}: build it unsharded, "
                "without tp_group and tp_size, and apply torch's parallelize_module with ColwiseParallel(), "
                "RowwiseParallel() or HeadParallel() of quaver.torch.parallel"
            )
        self.__dict__["return_bias"] = options.return_bias
        if options.return_bias and options.bias:
            self.apart = Bias(rows, options.like)
            names = names | {bias: ("apart", "bias")}
        self.__dict__.update(gemms=gemms, init_method=options.init_method)
        if options.main_grad or options.later:
            self.__dict__["taker"] = weight_gradients(main_grad=options.main_grad, later=options.later)
        for name in gemms:
            stored_weight.narrow_gradient(self._modules[name])
        self.rename(names, gemms)
        self.fill()

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, fp8_grad: bool = False
    ) -> Any:
        """Return (output, bias, norm output), of which the last two are optional; a missing bias is an empty tensor.

        `is_first_microbatch` has no effect, because the weight cache tracks weights itself.

        Raises:
            ValueError: fp8_output or fp8_grad, which would return codes.
        """
        refuse_codes(fp8_output, fp8_grad)
        if "norm" in self._modules:
            # A single linear layer casts itself, so that layers with the same input share its codes.
            inp = cast_to_autocast(inp)
        with self.takes:
            y: Any = super().forward(inp)
        y, *others = y if isinstance(y, tuple) else (y,)
        if self.__dict__["return_bias"]:
            bias = self.parameter_of("apart", "bias")
            others.insert(0, y.new_empty(0) if bias is None else bias.to(y.dtype))
        return (y, *others) if others else y

    def fill(self) -> None:
        """Initialize weights by `init_method` or a normal distribution, and biases with 0."""
        for name in self.gemms:
            layer: Any = self._modules[name]
            fill(layer, self.__dict__["init_method"] or NORMAL)

    def reset_parameters(self, defer_init: bool = False) -> None:
        if not defer_init:
            super().reset_parameters()  # type: ignore[misc]
            self.fill()

    @property
    def takes(self) -> Any:
        """Context of a forward that redirects weight gradients to `main_grad` or delays them until `backward_dw`."""
        return self.__dict__.get("taker") or nullcontext()

    def backward_dw(self) -> None:
        """Compute the delayed weight gradients."""
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
        """Return the recipe state in an `_extra_state` for each layer in `gemms`, by the names of Quaver's buffers."""
        return [] if state is None else extra_state.histories(state, where, len(self.gemms))


class Assembled(nn.Module):
    """Mixin for a module that contains several of these modules."""

    def backward_dw(self) -> None:
        """Compute the delayed weight gradients of all submodules."""
        for module in self.modules():
            if isinstance(module, Module):
                module.backward_dw()


def refuse_codes(fp8_output: bool | None, fp8_grad: bool = False) -> None:
    """Raise a ValueError if codes are requested as outputs or gradients."""
    if fp8_output or fp8_grad:
        raise ValueError("fp8_output and fp8_grad are not supported: values between layers are in high precision")


class Bias(nn.Module):
    """A bias that a module returns next to its output without adding it."""

    def __init__(self, features: int, like: dict[str, Any]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features, **like))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

"""Expert parallelism as a `ParallelStyle` for torch's `parallelize_module`.

Each rank has some of the experts, whose weights are shards of DTensors, and its own tokens, which are sent to the ranks
of their experts. The style puts the classes made here above those of the modules.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from quaver.recipes.spec import QuantSpec
from quaver.torch.linear import stored_weight
from quaver.torch.linear.linear import recipe_of
from quaver.torch.nn.moe.layers import Experts, MoE
from quaver.torch.nn.moe.permutation import moves, sum_choices
from quaver.torch.operations.ops import DTYPES
from quaver.torch.parallel.moe.dispatch import DispatchedRows, DispatchPlan, WireFormat, sent_back, why_no_spec
from quaver.torch.parallel.tensor.sharded_module import ShardedModule, shard
from quaver.torch.state import weight_cache
from quaver.torch.state.buffers import STATE
from quaver.torch.state.history.sync import check_agreement
from quaver.torch.state.layer_state import graph_task_id


class ExpertParallel(ParallelStyle):
    """Shard the experts of a `quaver.torch.MoE` or its `Experts` over a mesh dimension, in order.

    Weights and biases become DTensors with placement Shard(0). Each rank has its own tokens, in any number. A token's
    rows go to the ranks of its experts and return to be summed. The return trip overlaps with the shared expert,
    forward and backward. Router and shared expert stay replicated; their gradients are those of this rank's tokens, to
    be averaged like those of any layer. An expert's gradient covers the tokens of all ranks. So with `fully_shard` over
    the other mesh dimensions, call `experts.set_gradient_divide_factor(n)` with the number of ranks over which the loss
    is averaged.

    Args:
        dispatch: wire format of tokens. "recipe" uses the recipe's input spec if its scales lie within a row, else
            sends tokens unquantized; or a spec; or None for unquantized. With the recipe's spec the GEMM uses the
            received codes, and the first weight's gradient is computed from the dequantized values, as with
            `codes_alone` in one process.
        combine: wire format of expert outputs: a spec, a dtype, or None for unquantized.
        gradients: wire format of the gradients of both, with the same choices as `combine`.
    Raises:
        ValueError: on application or in a call, if something does not fit; on a CPU on all ranks.
    Exact: codes, scales and GEMMs of experts, and their noise, are those of one process that has the tokens of all
        ranks one after the other. Bounded: the order of sums over ranks.
    """

    def __init__(
        self,
        *,
        dispatch: QuantSpec | Literal["recipe"] | None = "recipe",
        combine: WireFormat | None = None,
        gradients: WireFormat | None = None,
    ) -> None:
        for name, wire_format in (("dispatch", dispatch), ("combine", combine), ("gradients", gradients)):
            why = _why_no_wire_format(wire_format) if wire_format is not None and wire_format != "recipe" else ""
            if why or (wire_format == "recipe" and name != "dispatch"):
                raise ValueError(
                    f"{name} of ExpertParallel is {wire_format!r}: {why or 'give a QuantSpec, a dtype or None'}"
                )
        self.ways = dispatch, combine, gradients

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        experts: Any = module.experts if isinstance(module, MoE) else module
        _check(experts, type(module).__name__, device_mesh)
        for layer in experts.children():
            _divide(layer, device_mesh, self.src_data_rank)
        shard(experts, _ShardedExperts, self.ways)
        if isinstance(module, MoE):
            module.register_forward_pre_hook(_check_input, prepend=True)
        return module

    def __repr__(self) -> str:
        return f"ExpertParallel{self.ways}"


def _check_input(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Raise on all ranks if the MoE input on one of them does not fit; the router itself does not communicate."""
    if not args or not isinstance(args[0], Tensor) or graph_task_id() != -1:
        return
    mixture: Any = module
    x, own = args[0], dict(mixture.named_parameters())
    first_projection = mixture.experts._modules[mixture.experts._first_projections]
    error = ""
    if not x.dim() or x.shape[-1] != mixture.dim:
        error = f"MoE({mixture.dim}) got an input of shape {tuple(x.shape)}; its last axis must be {mixture.dim}"
    what = {
        "dtype": x.dtype,
        "gradient of the input": x.requires_grad,
        "gradients": torch.is_grad_enabled(),
        "gradients of parameters": [name for name, p in own.items() if p.requires_grad],
    }
    check_agreement("MoE with experts on ranks", what, _expert_mesh(first_projection).get_group(), error=error)


def _why_no_wire_format(wire_format: Any) -> str:
    if isinstance(wire_format, QuantSpec):
        return why_no_spec(wire_format)
    return "" if wire_format in DTYPES else "rows are sent in a QuantSpec, or as float32, bfloat16 or float16"


def _check(experts: Any, style: str, mesh: Any) -> None:
    """Raise a ValueError if these experts cannot be sharded over the mesh."""
    if not isinstance(experts, Experts):
        raise ValueError(
            f"ExpertParallel is a style for quaver.torch.MoE and Experts, and {style} is neither: convert a "
            "layer of transformers by quaver.torch.from_huggingface"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"ExpertParallel got a mesh of {mesh.ndim} dimensions, {mesh.mesh_dim_names}: give one of them, "
            "such as mesh['ep']"
        )
    if any(hasattr(p, "device_mesh") for p in experts.parameters()):
        raise ValueError(
            "these experts are already sharded: name them once in the plan, and call parallelize_module "
            "before fully_shard"
        )
    if experts.experts % mesh.size():
        raise ValueError(
            f"{mesh.size()} ranks cannot share {experts.experts} experts: give a multiple of {mesh.size()} of them, or "
            "a mesh dimension that divides them"
        )
    if any(map(stored_weight.holds_codes, experts.parameters())):
        raise ValueError(
            "these experts' weights are stored only as codes: call quaver.torch.dequantize_weights(model) first"
        )


def _divide(layer: Any, mesh: Any, source: int | None) -> None:
    """Reduce a GroupedLinear to this rank's experts: weights and biases, recipe state, and noise identifiers."""
    weight_cache.free(layer)
    own = layer.groups // mesh.size()
    first = own * mesh.get_local_rank()
    for name in ("weight", "bias"):
        parameter = layer._parameters[name]
        if parameter is not None:
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=source)
            layer._parameters[name] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    for name in STATE:
        if name in layer._buffers:
            layer._buffers[name] = layer._buffers[name][first : first + own].clone()
    layer.groups = own
    state = layer._state
    state.members = state.members[first : first + own]
    shard(layer, _ShardedGroups, None)


class _ShardedGroups(ShardedModule):
    """Put above a `GroupedLinear` class: parameters are DTensors sharded over experts."""

    _parameters: Any
    groups: int

    def forward(self, *args: Any) -> Any:
        return self._with_local_parameters(super().forward, *args)

    def project(self, *args: Any) -> Any:
        above: Any = super()
        return self._with_local_parameters(above.project, *args)

    def _with_local_parameters(self, method: Any, *args: Any) -> Any:
        """Call a method of the original class, which sees the local tensors of the DTensor parameters."""
        parameters = self._parameters
        local = {key: p.to_local() if isinstance(p, DTensor) else p for key, p in parameters.items()}
        self.__dict__["_parameters"] = local
        try:
            return method(*args)
        finally:
            self.__dict__["_parameters"] = parameters

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save like the original class, with recipe state as DTensors, so that a checkpoint has the state of all
        ranks.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in STATE:
            value = destination.get(prefix + name)
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                destination[prefix + name] = DTensor.from_local(value, _expert_mesh(self), [Shard(0)], run_check=False)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load like the original class, from a state dict with this rank's experts or with all of them."""
        mesh = _expert_mesh(self)
        own = self.groups
        rows = slice(own * mesh.get_local_rank(), own * (mesh.get_local_rank() + 1))
        for name in STATE:
            value = state_dict.get(prefix + name)
            if isinstance(value, DTensor):
                value = value.to_local()
            elif isinstance(value, Tensor) and value.shape[0] == own * mesh.size():
                value = value[rows]
            if value is not None:
                state_dict[prefix + name] = value
        for name in ("weight", "bias"):
            value, parameter = state_dict.get(prefix + name), self._parameters[name]
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and isinstance(parameter, DTensor):
                state_dict[prefix + name] = distribute_tensor(
                    value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
                )
        super()._load_from_state_dict(state_dict, prefix, *args)


def _expert_mesh(layer: Any) -> Any:
    """Return the mesh dimension over which experts are sharded; fully_shard adds others before it."""
    mesh = layer._parameters["weight"].device_mesh
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]


class _ShardedExperts(ShardedModule):
    """Put above an `Experts` class: dispatches tokens to other ranks, in the wire formats of `layout_on_ranks`."""

    @torch.compiler.disable
    def forward(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        capacity: int | None = None,
        meanwhile: Any = None,
    ) -> Any:
        """`Experts.forward` for this rank's tokens and the experts of all ranks.

        Args:
            capacity: maximum number of this rank's choices per expert.
        """
        experts: Any = self
        first_projection = experts._modules[experts._first_projections]
        mesh = _expert_mesh(first_projection)
        group, number = mesh.get_group(), experts.experts * mesh.size()
        recipe = recipe_of(first_projection, False)
        why: str | Exception = ""
        try:
            if recipe is not None and recipe.delayed is not None:
                raise ValueError(
                    f"recipe {recipe} uses scaling histories, which ranks reduce layer by layer, but ranks have "
                    "different experts in the same layer: for experts on ranks use a recipe with current "
                    "scaling, such as tensorwise"
                )
            x = experts.checked(x, indices, capacity, number)
        except Exception as error:
            # Catch any exception: the other ranks wait.
            why = error
        spec = None if recipe is None else recipe.fprop.a
        dispatch, combine, gradients = (
            x.dtype if wire_format is None else wire_format for wire_format in experts.layout_on_ranks
        )
        if dispatch == "recipe":
            dispatch = spec if spec is not None and moves(spec) and not why_no_spec(spec) else x.dtype
        # All ranks must raise if one does, or they would wait for its rows.
        what = {
            "experts": number,
            "width": experts.dim,
            "dtype": x.dtype,
            "recipe": None if recipe is None else recipe.text,
            "dispatch": dispatch,
            "combine": combine,
            "gradients by": gradients,
            "gradients": torch.is_grad_enabled(),
            "gradient of tokens, of weights": (x.requires_grad, weights.requires_grad),
            "gradients of parameters": [p.requires_grad for p in experts.parameters()],
        }
        check_agreement("experts on ranks", what, group, error=why, forward=True)
        dispatch_plan = DispatchPlan.of(indices, number, experts.pad, capacity, group)
        arriving = DispatchedRows(dispatch_plan, dispatch, gradients)
        rows = experts.on_rows(arriving, (x,), dispatch_plan.offsets)
        came, other = sent_back(rows, dispatch_plan, combine, gradients, meanwhile)
        y = sum_choices(came, dispatch_plan.sources, dispatch_plan.places, indices.shape[1], weights)
        return y if meanwhile is None else (y, other)

"""`OptimizerBase`: creates, loads and saves the state of each parameter in the formats of its preset."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from quaver.reference.optimizer_state import PRESETS, Preset
from quaver.torch.linear import stored_weight
from quaver.torch.optim import codes, master_weights, state_conversion
from quaver.torch.optim.checks import check_group
from quaver.torch.optim.gradients import Gradients
from quaver.torch.optim.quantized_gradient import local_quantized
from quaver.torch.optim.rules import UpdateRule
from quaver.torch.optim.state_conversion import CODES, convert_state, key_of, packed, preset_of, saved_preset
from quaver.torch.optim.step import layout, ranks
from quaver.torch.optim.step.step import ParameterTensors, StepConfig

# ---- states and state dicts ----

#: Tensors with fewer elements have float32 states, unless their weight is stored as codes.
SMALL = 4096


class OptimizerBase(torch.optim.Optimizer):
    """Part of `Optimizer` that creates, loads and saves states, without the step."""

    #: Gradients that are quantized between backward and step.
    gradients: Gradients
    #: True if clamped updates are counted.
    statistics: bool
    #: Sharded weights whose state "amax" covers only the rows of this rank.
    _local_amax: set[Tensor]
    #: `layout.versions` after the last step, by weight stored as codes.
    _stepped: dict[Tensor, Any]

    def rule(self, group: Mapping[str, Any], preset: Preset) -> UpdateRule:
        """Return the update rule of a parameter group."""
        raise NotImplementedError

    def preset(self, p: Tensor, group: Mapping[str, Any]) -> Preset:
        """Return the preset of a parameter: that of its group, or "float32" for vectors and small tensors."""
        small = p.dim() < 2 or p.numel() < SMALL
        return PRESETS["float32"] if small and not stored_weight.holds_codes(p) else preset_of(group["preset"])

    def config(self, p: Tensor, group: Mapping[str, Any]) -> StepConfig:
        """Return a parameter's step configuration: rule, and formats of weight, states and gradient."""
        preset = self.preset(p, group)
        rule = self.rule(group, preset)
        specs = tuple(preset.first if signed else preset.second for signed in rule.signed)
        weight_format = master_weights.weight_format_of(p, preset)
        predicts_scale = (
            weight_format.kind.startswith("residual")
            and weight_format.code_spec is not None
            and None in weight_format.code_spec.block
        )
        quantized = local_quantized(p.grad)
        spec = None if quantized is None else quantized.contents.spec
        return StepConfig(rule, weight_format, specs, spec, predicts_scale and rule.has_weight_bound, self.statistics)

    def _ensure_amax(self, p: Tensor, config: StepConfig) -> None:
        """Add the amaxes of the weight's blocks to its state if its scales are predicted; else remove them."""
        if not config.predicts_scale:
            self.state[p].pop("amax", None)
        elif "amax" not in self.state[p]:
            self.state[p]["amax"] = self._amax(p, config, self.parts_of_weight(p, config))

    def _amax(self, p: Tensor, config: StepConfig, tensors: tuple[Tensor, ...]) -> Tensor:
        """Return the amaxes of the weight's blocks, sharded like its rows; for a sharded weight, those of this rank's
        rows.
        """
        assert config.weight_format.code_spec is not None
        if layout.is_stack(p, config.weight_format.code_spec):
            each = [
                ranks.of_segment(ParameterTensors(tensors, (), ()), segment).weight
                for segment in ranks.segments(p, config)
            ]
            amaxes = [
                master_weights.block_amax(
                    config.weight_format.code_spec, master_weights.read(config.weight_format, own)
                )
                for own in each
            ]
            return layout.together(amaxes, p)
        amax = master_weights.block_amax(
            config.weight_format.code_spec, master_weights.read(config.weight_format, tensors)
        )
        if not layout.shardings(p):
            return amax
        self._local_amax.add(p)
        height = config.weight_format.code_spec.block[0]
        return amax if height is None else layout.like(p, amax, (-(-p.shape[0] // height), amax.shape[1]))

    def parts(self, p: Tensor, config: StepConfig) -> ParameterTensors:
        """Return all tensors that a parameter's step reads and writes: this rank's shards, as matrices."""
        state = self.state[p]
        moments = tuple(
            tuple(layout.local(state[key]) for key in (key_of(name, spec), f"{name}_scale") if key in state)
            for name, spec in zip(config.rule.names, config.moments, strict=True)
        )
        quantized = local_quantized(p.grad)
        gradient = (layout.gradient(p),) if quantized is None else quantized.contents.codes or ()
        num_leading_dims = layout.num_leading_dims(p, config.rule.needs_matrix)
        # Nonzero only if trailing dimensions are flattened, and 0 for a shard without rows.
        number = prod(layout.local(p).shape[:num_leading_dims]) if num_leading_dims < p.dim() - 1 else 0
        return layout.as_rows(ParameterTensors(self.parts_of_weight(p, config), moments, gradient), number)

    def parts_of_weight(self, p: Tensor, config: StepConfig) -> tuple[Tensor, ...]:
        """Return the tensors that represent a parameter's weight: this rank's shards, as matrices, in `WeightFormat`'s
        order.
        """
        states = [layout.local(self.state[p][name]) for name in config.weight_format.states]
        return tuple(layout.rows(t) for t in (*layout.weight_of(p, config), *states))

    def state_dict(self) -> dict[str, Any]:
        """Like `torch.optim.Optimizer.state_dict`, with codes in their dtypes and presets as plain data."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if not len(self.state) and all(p.grad is None for p in parameters):
            # torch.distributed.checkpoint loads into the tensors of this state dict, so create them.
            self.state.update({p: self._initial_state(p) for p in parameters})
        # Run before the user's hooks, which should see the saved form.
        handle = self.register_state_dict_post_hook(_pack_groups, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state dict of any preset, or of torch.optim, torchao.optim or MS-AMP. Load the model first.

        Groups keep their presets; states in other formats are converted, with a warning.

        Raises:
            ValueError: a state dict of another rule, with other groups or shapes, or with unsupported options. Nothing
                is loaded then.
        """
        before = self.param_groups, self.state, set(self._local_amax)
        try:
            self._load(state_dict)
        except BaseException:
            # torch replaces groups and state by new objects, so the old ones are unchanged.
            self.param_groups, self.state, self._local_amax = before
            raise

    def _load(self, state_dict: Any) -> None:
        """`load_state_dict` without rollback: it may have loaded a part when it raises."""
        own, loaded = self.param_groups, dict[str, Any]()
        messages: Counter[str] = Counter()

        def check(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            missing = [name for name in ("state", "param_groups") if not isinstance(state_dict.get(name), dict | list)]
            if missing or not isinstance(state_dict["state"], Mapping):
                raise ValueError(
                    f"a state dict has a dict `state` and a list `param_groups`; {state_conversion.DAMAGED}"
                )
            for mine, group in zip(own, state_dict["param_groups"], strict=False):
                state_conversion.check_group(group, mine)
            loaded.update(state_dict)
            return {**state_dict, "state": {}}

        def convert(_: torch.optim.Optimizer) -> None:
            messages.update(self._convert(loaded, own))

        # Run after the user's pre-hooks, which may change the state dict, and before post-hooks, which see loaded
        # states.
        handles = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(convert, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()
        for message, number in messages.items():
            warnings.warn(f"{number} parameters: {message}", stacklevel=3)

    def _convert(self, loaded: Mapping[str, Any], own: list[dict[str, Any]]) -> list[str]:
        """Complete the groups that torch has loaded, and load the states.

        Args:
            loaded: the state dict.
            own: the groups before.
        Returns:
            Warnings, one per parameter concerned.
        """
        names = [group.get("preset") for group in loaded["param_groups"]]
        saved_presets = [None if preset is None else saved_preset(preset) for preset in names]
        for group, mine in zip(self.param_groups, own, strict=True):
            group["preset"] = mine["preset"]
            for name, value in (self.defaults | {"rule": mine["rule"]} if "rule" in mine else self.defaults).items():
                group.setdefault(name, value)
            if group.get("adjust_lr_fn", "") is None:
                group["adjust_lr_fn"] = "original"
            if "betas" in group:
                # Other libraries do not record whether betas were constant. Schedulers that change them add
                # max_momentum.
                steady = () if "max_momentum" in group else tuple(group["betas"])
                group.setdefault("steady_betas", steady)
            check_group(type(self).__name__, group)
        messages = []
        for group, saved, preset in zip(self.param_groups, loaded["param_groups"], saved_presets, strict=True):
            for p, key in zip(group["params"], saved["params"], strict=True):
                if key in loaded["state"]:
                    state_conversion.check_state(key, loaded["state"][key], self.rule(group, self.preset(p, group)))
                    messages += self._load_state(p, group, loaded["state"][key], preset)
        return messages

    def _load_state(
        self, p: Tensor, group: Mapping[str, Any], saved: Mapping[str, Any], preset: Preset | None
    ) -> list[str]:
        """Load one parameter's state.

        Args:
            p: the parameter.
            group: its parameter group.
            saved: its entry of the state dict.
            preset: the preset that wrote it; None for another library.
        Returns:
            Warnings about missing and converted states.
        """
        config, saved_way = self.config(p, group), None
        if preset is not None:
            saved_way = self.config(p, {**group, "preset": preset})
            specs = (preset.first if signed else preset.second for signed in config.rule.signed)
            found = {name: saved.get(name + CODES, saved.get(name)) for name in config.rule.names}
            saved_specs = tuple(
                own if moment is None else state_conversion.spec_of(name, moment, saved.get(f"{name}_scale"), spec)
                for (name, moment), own, spec in zip(found.items(), saved_way.moments, specs, strict=True)
            )
            saved_way = replace(saved_way, moments=saved_specs)
        # A shard may start within a block of scales: read it with one scale per row.
        weight_format, tensors = layout.in_own_rows(p, config.weight_format)
        by_rows = (
            None
            if saved_way is None
            else replace(saved_way, weight_format=layout.in_own_rows(p, saved_way.weight_format)[0])
        )
        weight = tuple(layout.rows(t) for t in tensors)
        state, missing = convert_state(p, saved, replace(config, weight_format=weight_format), by_rows, weight)
        first = self.first_state(p, group)
        self.state[p] = {**first, **{name: value for name, value in state.items() if name in first}}
        self.state[p]["step"] = first["step"] + state["step"].to(first["step"].device)
        self.state[p].pop("amax", None)
        self._ensure_amax(p, config)
        self._stepped.pop(p, None)
        messages = [missing] if missing else []
        if saved_way is None or saved_way.moments != config.moments or saved_way.weight_format != config.weight_format:
            source = "another library" if preset is None else f"preset {preset.name}"
            messages.append(f"states of {source} were converted to preset {self.preset(p, group).name}")
        return messages

    def _initial_state(self, p: Tensor) -> dict[str, Tensor]:
        """`first_state` of a parameter; {} for a tensor that is not a parameter of this optimizer, as in torch."""
        groups = [group for group in self.param_groups if any(p is each for each in group["params"])]
        return self.first_state(p, groups[0]) if groups else {}

    def first_state(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Create the state of a parameter before its first step."""
        config = self.config(p, group)
        device = p.device
        state = {"step": torch.zeros((), dtype=torch.float32, device=device if device.type == "cuda" else "cpu")}
        own, num_leading_dims = layout.local(p), layout.num_leading_dims(p, config.rule.needs_matrix)
        for name, spec in zip(config.rule.names, config.moments, strict=True):
            moment = torch.zeros(own.shape, dtype=codes.code_dtype(spec.of), device=own.device)
            state[key_of(name, spec)] = layout.like(p, moment, p.shape)
            if spec.of.scaled:
                shape, full_shape = (
                    codes.scale_shape(layout.flat(t.shape, num_leading_dims), spec.block, spec.of.numbers)
                    for t in (own, p)
                )
                scale = torch.zeros(shape, dtype=codes.SCALE_DTYPES[spec.scale], device=own.device)
                state[f"{name}_scale"] = layout.like(p, scale, full_shape)
        value = layout.value_of(p) if config.weight_format.master else None
        weight_states = master_weights.first_states(config.weight_format, own, value)
        initial = layout.initial_of(p, config)
        if initial is not None:
            # The layer stores its value from before quantization: start from that instead of the codes.
            weight_format, tensors = layout.in_own_rows(p, config.weight_format)
            states = master_weights.around(
                weight_format, layout.rows(initial), (*tensors, *map(layout.rows, weight_states))
            )
            weight_states = tuple(t.view(own.shape) if t.dim() else t for t in states)
        for name, tensor in zip(config.weight_format.states, weight_states, strict=True):
            state[name] = layout.like(p, tensor, p.shape) if tensor.shape == own.shape else tensor
        if config.predicts_scale:
            tensors = [layout.rows(t) for t in (*layout.weight_of(p, config), *weight_states)]
            state["amax"] = self._amax(p, config, tuple(tensors))
        return state

    def _check_state(self, p: Tensor, group: Mapping[str, Any]) -> None:
        """Create moments that the rule newly needs, and validate the other states.

        Raises:
            ValueError: a moment, its scales or the state beside the weight is missing or has another shape or dtype.
        """
        state = self.state[p]
        config, own = self.config(p, group), tuple(layout.local(p).shape)
        if not any(name in state or name + CODES in state for name in config.rule.names):
            # Restart the step count, because the first step of a momentum differs.
            first = self.first_state(p, group)
            state.update(
                {name: first[name] for name in first if name not in config.weight_format.states or name not in state}
            )
        flat = layout.flat(own, layout.num_leading_dims(p, config.rule.needs_matrix))
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, spec in zip(config.rule.names, config.moments, strict=True):
            expected[key_of(name, spec)] = own, codes.code_dtype(spec.of)
            if spec.of.scaled:
                scales = codes.scale_shape(flat, spec.block, spec.of.numbers)
                expected[f"{name}_scale"] = scales, codes.SCALE_DTYPES[spec.scale]
        for name in config.weight_format.states[:1]:
            expected[name] = own, config.weight_format.dtype
        for name, (shape, dtype) in expected.items():
            found_state = None if name not in state else layout.local(state[name])
            if found_state is None or (tuple(found_state.shape), found_state.dtype) != (shape, dtype):
                found = (
                    "is missing"
                    if found_state is None
                    else f"has shape {tuple(found_state.shape)} and dtype {found_state.dtype}"
                )
                raise ValueError(
                    f"{name} of a parameter of shape {tuple(p.shape)} and {p.dtype} {found}, where {dtype} of shape "
                    f"{shape} was expected: the parameter or its group's preset changed after the state was made. Take "
                    "state_dict() before such a change and load it after it, or begin anew by `del optimizer.state[p]`"
                )


def _pack_groups(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Replace presets by plain data in a state dict, in place."""
    for group in state["param_groups"]:
        group["preset"] = packed(group["preset"])
    # torch's SGD would silently start from zero momentum if it found no buffer; with an empty one its step fails.
    for key, own in state["state"].items():
        if f"momentum_buffer{CODES}" in own:
            state["state"][key] = {**own, "momentum_buffer": torch.empty(0, dtype=torch.float32, device="cpu")}


def groups_of(params: Any) -> Any:
    """Split a model into parameter groups, with preset "float32" for embeddings; anything but a module is returned
    unchanged.
    """
    if not isinstance(params, nn.Module):
        return params
    embeddings = {id(p) for module in params.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    trained = [p for p in params.parameters() if p.requires_grad]
    table = [p for p in trained if id(p) in embeddings]
    others = [p for p in trained if id(p) not in embeddings]
    groups: list[dict[str, Any]] = [{"params": others}] if others else []
    return groups + ([{"params": table, "preset": "float32"}] if table else [])


# ---- lazy states ----
# Optimizer states that are created at the first access, so that checkpoints can be loaded before the first step.
#
# If `optimizer.state` is empty, torch.distributed.checkpoint creates states by a step with zero gradients. Here that
# step would fail for weights stored as codes, because such a gradient has the parameter's dtype, and it would count as
# a step. `LazyStates` is truthy even if it is empty, so that torch skips that step.


class LazyStates(defaultdict[Tensor, Any]):
    """State of each parameter, created at the first access.

    Args:
        initial_state: method of the optimizer that creates a parameter's state; only a weak reference is stored.
    """

    def __init__(self, initial_state: Callable[[Tensor], dict[str, Tensor]]) -> None:
        super().__init__(dict)
        self._initial_state = WeakMethod(initial_state)

    def __bool__(self) -> bool:
        return True

    def __missing__(self, p: Tensor) -> dict[str, Tensor]:
        initial_state = self._initial_state()
        assert initial_state is not None
        state = self[p] = initial_state(p)
        return state

    def __reduce__(self) -> Any:
        # A copy or pickle belongs to another optimizer, which wraps it again.
        return defaultdict, (dict,), None, None, iter(self.items())

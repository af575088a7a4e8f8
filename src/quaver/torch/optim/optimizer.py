"""`Optimizer`, the base class of all optimizers: torch's interface, the formats of each parameter, and the step."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from quaver.reference.optimizer_state import PRESETS, SMALL, Preset, packed, preset_of
from quaver.torch.linear import stored_weight
from quaver.torch.operations.ops import no_kernels
from quaver.torch.optim import gpu, layout, master_weights, ranks
from quaver.torch.optim.checks import (
    check_group,
    check_options,
    check_parameter,
    check_sharded,
    check_stack,
    check_tied,
)
from quaver.torch.optim.compiled import CompiledSteps
from quaver.torch.optim.gradients import GradientRelease, Gradients, check_gradient
from quaver.torch.optim.host import OFFLOAD, HostStates
from quaver.torch.optim.rules import UpdateRule
from quaver.torch.optim.state_dict import load
from quaver.torch.optim.step import ParameterTensors, RngKey, StepConfig, step_parameter, write
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state.history.sync import check_agreement

NONFINITE = ("keep", "skip", "raise")


class Optimizer(torch.optim.Optimizer):
    """Base class of `AdamW` and the other optimizers.

    A parameter group may have its own `preset`. Norms, biases and tensors of fewer than 4096 elements have float32
    states with any preset.
    """

    #: Returns the update rule of a parameter group under a preset.
    rule: Callable[[Mapping[str, Any], Preset], UpdateRule]
    #: GradScaler passes `grad_scale` and `found_inf` as attributes, without a device synchronization.
    _step_supports_amp_scaling = True
    #: This optimizer writes the codes and scales of weights stored in 8 bits.
    writes_quantized_weights = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        seed: int = 0,
        statistics: bool = False,
        nonfinite: str = "keep",
        compile: bool = False,
        offload: str | None = None,
        _transfers: Any = None,
        **torch_options: Any,
    ) -> None:
        check_options(type(self).__name__, torch_options)
        if nonfinite not in NONFINITE:
            raise ValueError(
                f"nonfinite is {nonfinite!r}; give 'keep' (NaN propagates, as in torch), 'skip' (skip and count "
                "such a step) or 'raise'"
            )
        if offload not in OFFLOAD:
            raise ValueError(
                f"offload is {offload!r}; give 'cpu' (states in host memory, stepped by the CPU), 'stream' (states in "
                "host memory, stepped on the device) or None"
            )
        #: Where states are, "cpu" and "stream" in host memory.
        self.offload = offload
        self._host = None if offload is None else HostStates(offload, _transfers)
        self.nonfinite = nonfinite
        self.statistics = statistics
        #: True if large parameters are stepped by torch.compile.
        self.compile = compile
        self._programs = CompiledSteps() if compile else None
        #: Prepared kernel arguments by device and piece, and the reported reasons for not using kernels.
        self._kernels: dict[tuple[torch.device, Tensor | None], Any] = {}
        self._reported: set[str] = set()
        #: Number of steps skipped because of gradients that were not finite, if `nonfinite` is "skip": int64 [].
        self.skipped = torch.zeros((), dtype=torch.int64, device="cpu")
        #: For each parameter, the number of clamped updates and of all updates.
        self.counted: dict[Tensor, tuple[Tensor, int]] = {}
        self.gradients = Gradients()
        self._release: GradientRelease | None = None
        #: Sharded weights whose state "amax" covers only the rows of this rank.
        self._local_amax: set[Tensor] = set()
        #: `layout.versions` after the last step, by weight stored as codes.
        self._stepped: dict[Tensor, Any] = {}
        #: Number of parameter groups whose options ranks have compared.
        self._compared = 0
        #: Tensors of the piece that is stepped, all on one device, if states are in host memory.
        self._staged: Mapping[Tensor, ParameterTensors] = {}
        self._warned = False
        self._resolution: list[float] = []
        defaults["seed"] = seed
        super().__init__(groups_of(params), defaults)
        self.state = LazyStates(self._initial_state)

    def __getstate__(self) -> dict[str, Any]:
        self._finish_steps()
        names = ("nonfinite", "statistics", "compile", "offload", "skipped", "_warned", "_resolution")
        own = {name: getattr(self, name) for name in names}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        old_states, self.state = self.state, LazyStates(self._initial_state)
        self.state.update(old_states)
        if "gradients" in self.__dict__:
            return
        # A copied or unpickled optimizer starts without gradients, counts and stepping in backward.
        self.gradients, self._release, self.counted = Gradients(), None, {}
        self._programs = CompiledSteps() if self.compile else None
        self._kernels, self._reported, self._local_amax, self._stepped, self._compared = {}, set(), set(), {}, 0
        self._host, self._staged = None if self.offload is None else HostStates(self.offload), {}
        for p, own in self.state.items() if self._host is not None else ():
            own.update({name: self._pinned(p, value) for name, value in own.items() if isinstance(value, Tensor)})
        for group in self.param_groups:
            for p in group["params"]:
                self._prepare(p, group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        preset_of(param_group.get("preset", self.defaults["preset"]))
        check_group(type(self).__name__, {**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_parameters(group)
        except ValueError:
            self.param_groups.pop()
            raise
        for p in group["params"]:
            self._prepare(p, group)

    def _prepare(self, p: Tensor, group: Mapping[str, Any]) -> None:
        """Set up the storage of a parameter's gradients that its preset asks for."""
        preset = self.preset(p, group)
        self.gradients.prepare(p, preset.gradient, self.rule(group, preset).needs_matrix)

    def _check_parameters(self, group: dict[str, Any]) -> None:
        """Raise a ValueError for unsupported parameters of a group, before anything is changed."""
        rule = self.rule(group, preset_of(group["preset"]))
        check_tied(group["params"])
        for p in group["params"]:
            check_parameter(p, rule.name, rule.needs_matrix)
            if self._host is not None:
                self._host.check(p)
            if p.requires_grad and layout.shardings(p):
                check_sharded(p, self.config(p, group), self.preset(p, group).name)
            elif p.requires_grad and p.dim() == 3:
                check_stack(p, self.config(p, group), self.preset(p, group).name)

    # ---- formats ----

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
        quantized = layout.local_quantized(p.grad)
        spec = None if quantized is None else quantized.contents.spec
        return StepConfig(rule, weight_format, specs, spec, predicts_scale and rule.has_weight_bound, self.statistics)

    # ---- states ----

    def first_state(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Create the state of a parameter before its first step."""
        config = self.config(p, group)
        state = layout.first_state(p, config, self.device_of_states(p))
        if self._host is not None and self._host.offloads(p):
            state = {name: self._pinned(p, value) for name, value in state.items()}
            for name in ("step", *config.rule.numbers):
                state[name] = state[name].to(self.device_of_step(p))
        if config.predicts_scale:
            state["amax"] = self._amax(p, config, state)
        return state

    def _return_states(self, p: Tensor, config: StepConfig) -> None:
        """Move states back to where the optimizer placed them, after a trainer has moved all to the device."""
        state, numbers = self.state[p], ("step", *config.rule.numbers)
        for name, value in state.items():
            device = self.device_of_step(p) if name in ("amax", *numbers) else self.device_of_states(p)
            if layout.local(value).device != device:
                moved = layout.like(p, layout.local(value).to(device), value.shape)
                state[name] = self._pinned(p, moved)

    def _pinned(self, p: Tensor, state: Tensor) -> Tensor:
        """Return a parameter's state, in pinned memory if it is streamed."""
        return state if self._host is None or not self._host.offloads(p) else self._host.pinned(p, state)

    def device_of_states(self, p: Tensor) -> torch.device:
        """Return the device of a parameter's moments and of its master or residual."""
        offloads = self._host is not None and self._host.offloads(p)
        return torch.device("cpu") if offloads else layout.local(p).device

    def device_of_step(self, p: Tensor) -> torch.device:
        """Return the device that steps a parameter."""
        return self.device_of_states(p) if self.offload == "cpu" else layout.local(p).device

    def parts(self, p: Tensor, config: StepConfig) -> ParameterTensors:
        """Return all tensors that a parameter's step reads and writes: this rank's shards, as matrices."""
        staged = self._staged.get(p)
        return layout.tensors_of(p, config, self.state[p]) if staged is None else staged

    def set_state(self, p: Tensor, group: Mapping[str, Any], loaded: Mapping[str, Tensor]) -> None:
        """Replace the state of a parameter by a loaded one; what it lacks is created."""
        first = self.first_state(p, group)
        taken = {name: value for name, value in loaded.items() if name in first}
        self.state[p] = {**first, **{name: self._pinned(p, value) for name, value in taken.items()}}
        self.state[p]["step"] = first["step"] + loaded["step"].to(first["step"].device)
        for name in self.config(p, group).rule.numbers:
            self.state[p][name] = loaded[name].to(first[name].device, copy=True)
        self.state[p].pop("amax", None)
        self._ensure_amax(p, self.config(p, group))
        self._stepped.pop(p, None)

    def _initial_state(self, p: Tensor) -> dict[str, Tensor]:
        """`first_state` of a parameter; {} for a tensor that is not a parameter of this optimizer, as in torch."""
        groups = [group for group in self.param_groups if any(p is each for each in group["params"])]
        return self.first_state(p, groups[0]) if groups else {}

    def _ensure_amax(self, p: Tensor, config: StepConfig) -> None:
        """Add the amaxes of the weight's blocks to its state if its scales are predicted; else remove them."""
        if not config.predicts_scale:
            self.state[p].pop("amax", None)
        elif "amax" not in self.state[p]:
            self.state[p]["amax"] = self._amax(p, config, self.state[p])

    def _amax(self, p: Tensor, config: StepConfig, state: Mapping[str, Tensor]) -> Tensor:
        if layout.shardings(p):
            self._local_amax.add(p)
        device = self.device_of_step(p)
        return layout.amaxes(p, config, tuple(t.to(device) for t in layout.tensors_of_weight(p, config, state)))

    def _check_state(self, p: Tensor, group: Mapping[str, Any]) -> None:
        """Create moments that the rule newly needs, and check the other states. Raises: ValueError."""
        config, state = self.config(p, group), self.state[p]
        if not any(name in state or name + layout.CODES in state for name in config.rule.names):
            # Restart the step count, because the first step of a momentum differs.
            first, weight_states = self.first_state(p, group), config.weight_format.states
            state.update({name: first[name] for name in first if name not in weight_states or name not in state})
        layout.check_state(p, config, state)

    def state_dict(self) -> dict[str, Any]:
        """Like `torch.optim.Optimizer.state_dict`, with codes in their dtypes and presets as plain data."""
        self._finish_steps()
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if not len(self.state) and all(p.grad is None for p in parameters):
            error = self._claim_host_memory(parameters)
            if error:
                raise ValueError(error)
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
        self._finish_steps()
        before = self.param_groups, self.state, set(self._local_amax)
        try:
            self._load(state_dict)
        except BaseException:
            # torch replaces groups and state by new objects, so the old ones are unchanged.
            self.param_groups, self.state, self._local_amax = before
            raise

    def _load(self, state_dict: Any) -> None:
        """`load_state_dict` without rollback: it may have loaded a part when it raises."""
        error = self._claim_host_memory(p for group in self.param_groups for p in group["params"] if p.requires_grad)
        if error:
            raise ValueError(error)
        load(self, state_dict, super().load_state_dict)

    # ---- step ----

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def _step(self) -> None:
        """`step` after the closure, with no hooks of torch around it."""
        if hasattr(self, "grad_scale") and self._release is not None:
            raise ValueError(
                "torch.amp.GradScaler does not see gradients that are stepped in backward; train in bfloat16"
            )
        overflow, factor = self._scaling()
        parameters = [p for group in self.param_groups for p in group["params"]]
        check_replaced(parameters)
        self._finish_steps()
        parameters = [p for p in parameters if p.grad is not None]
        for p in parameters:
            self.gradients.convert(p)
        if self._release is not None:
            # No hook reported gradients of parameters frozen when `step_in_backward` was called, or assigned by hand.
            self._release.end(parameters)
            parameters = []
        self._update(parameters, factor, overflow)
        if factor is not None:
            # The step has applied `factor` already. Leave unscaled values in p.grad, as GradScaler does otherwise.
            for p in parameters:
                layout.local(p.grad).mul_(factor.to(p.grad.device))
        if self._host is not None:
            self._host.finish()

    @torch.compiler.disable
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, as in torch."""
        self._finish_steps()
        super().zero_grad(set_to_none)

    def _finish_steps(self) -> None:
        """Wait for a step in a thread, and for copies of states to host memory. Raises: the error of that step."""
        try:
            if self._release is not None:
                self._release.join()
        finally:
            if self._host is not None:
                self._host.finish()

    def _scaling(self) -> tuple[Tensor | None, Tensor | None]:
        """Return torch.amp.GradScaler's overflow flag and the factor that unscales gradients, each None without one."""
        overflow, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        # A GradScaler that has seen no gradient passes the number 0; after unscale_ the scale is None.
        overflow = overflow if isinstance(overflow, Tensor) else None
        return overflow, None if scale is None else scale.float().reciprocal().reshape(())

    def _update(self, parameters: list[Tensor], factor: Tensor | None, overflow: Tensor | None = None) -> None:
        """Step the given parameters.

        Args:
            parameters: those with a gradient.
            factor: multiplier of their gradients, float32 [], or None.
            overflow: tensor; nonzero means that nothing may change.
        """
        if self._host is not None:
            self._host.check_capture(parameters)
        for p in parameters:
            check_gradient(p)
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for p in parameters:
            if self.state.get(p):
                self._check_state(p, groups[p])
        self._compare_ranks(parameters, self._claim_host_memory(parameters))
        if self.nonfinite != "keep" and parameters:
            overflow = self._not_finite(parameters, overflow)
        if overflow is not None and (overflow.is_cpu or self.offload == "cpu"):
            if overflow.item():
                return
            overflow = None
        apply_step = None if overflow is None else overflow.reshape(()) == 0
        for p in parameters:
            if not self.state[p]:
                self.state[p] = self.first_state(p, groups[p])
            elif self._host is not None and self._host.offloads(p):
                self._return_states(p, self.config(p, groups[p]))
            if stored_weight.holds_codes(p):
                self._follow_writes(p, self.config(p, groups[p]))
        host = self._host
        if host is None:
            sharded = self._step_parameters(parameters, factor, apply_step)
        else:
            sharded = list[ranks.SteppingParameter]()
            configs = {p: self.config(p, groups[p]) for p in parameters if host.offloads(p)}

            def step_piece(staged: Mapping[Tensor, ParameterTensors]) -> None:
                self._staged = staged
                try:
                    sharded.extend(self._step_parameters(list(staged), factor, apply_step))
                finally:
                    self._staged = {}

            host.run(
                [*host.pieces(list(configs), lambda p: layout.bytes_of_states(p, configs[p]))],
                lambda p: (layout.tensors_of(p, configs[p], self.state[p]), configs[p].weight_format),
                step_piece,
            )
            sharded += self._step_parameters([p for p in parameters if p not in configs], factor, apply_step)
        if sharded:
            ranks.gather_scales(sharded)
        for p in parameters:
            if stored_weight.holds_codes(p):
                if isinstance(p, QuantizedTensor):
                    # Its codes were written, which autograd and caches must notice.
                    torch.autograd.graph.increment_version(p)
                self._stepped[p] = layout.versions(p)

    def _step_parameters(
        self, parameters: list[Tensor], factor: Tensor | None, apply_step: Tensor | None
    ) -> list[ranks.SteppingParameter]:
        """Step parameters whose tensors are on one device each.

        Returns:
            Those whose scales ranks must exchange afterwards.
        """
        chosen = {id(p) for p in parameters}
        index, launches = 0, list[gpu.Launch]()
        stepping: list[ranks.SteppingParameter] = []
        for group in self.param_groups:
            numbered = [(index + i, p) for i, p in enumerate(group["params"]) if id(p) in chosen]
            index += len(group["params"])
            if numbered:
                stepping += self._begin_group(group, numbered, apply_step, factor, launches)
        sharded = [one for one in stepping if one.parts is not None]
        agreed = ranks.agree_on_amaxes(sharded, self._local_amax) if sharded else {}
        for one in stepping:
            if one.scalars:
                self._step_parameter(one, agreed.get(one.p, {}), apply_step)
        if launches:
            self._launch(launches, apply_step)
        return sharded

    def _follow_writes(self, p: Tensor, config: StepConfig) -> None:
        """Update the master or the amaxes of a weight stored as codes that was written since the last step.

        Such a write comes for instance from `load_state_dict`.
        """
        if not self._written(p):
            return
        if self._host is not None:
            # The CPU may read states here that a step in backward has not copied back yet.
            self._host.finish()
        state = self.state[p]
        if config.weight_format.master:
            weight_format, codes = layout.in_own_rows(p, config.weight_format)
            states = [layout.local(state[name]) for name in config.weight_format.states]
            tensors = (*(t.to(self.device_of_states(p)) for t in codes), *map(layout.rows, states))
            for old, new in zip(states, master_weights.master_after_write(weight_format, tensors), strict=True):
                old.copy_(new.view(old.shape))
        elif config.predicts_scale and "amax" in state:
            # In place, because a CUDA graph reads this tensor.
            layout.local(state["amax"]).copy_(layout.local(self._amax(p, config, state)))

    def _written(self, p: Tensor) -> bool:
        """True if a weight stored as codes may have been written since this optimizer stepped it."""
        return stored_weight.holds_codes(p) and self._stepped.get(p) != layout.versions(p)

    def _claim_host_memory(self, parameters: Iterable[Tensor]) -> str:
        """Return why host memory cannot store states that these parameters still lack, or ""."""
        if self._host is None:
            return ""
        groups = {p: group for group in self.param_groups for p in group["params"]}
        missing = [p for p in parameters if not self.state.get(p) and self._host.offloads(p)]
        sizes = [layout.bytes_of_states(p, self.config(p, groups[p])) for p in missing]
        return self._host.claim(missing, sum(sizes)) if missing else ""

    def _compare_ranks(self, parameters: list[Tensor], error: str = "") -> None:
        """Check that ranks which share parameters agree: options at the first step; gradients and new groups in steps
            that communicate.

        Args:
            parameters: those with a gradient.
            error: error of this rank, or "".
        Raises:
            ValueError: on all ranks that communicate.
        """
        every = [p for group in self.param_groups for p in group["params"]]
        groups = list(dict.fromkeys(group for p in every for group in layout.sharing(p)))
        communicates = self.nonfinite != "keep" or any(stored_weight.holds_codes(p) for p in every)
        if not groups or (self._compared and not communicates):
            if error:
                raise ValueError(error)
            return
        stepping = {id(p) for p in parameters}
        facts: dict[str, Any] = {"nonfinite": self.nonfinite}
        facts["parameters with gradients"] = (
            [i for i, p in enumerate(every) if id(p) in stepping] if communicates else "any"
        )
        facts["weights written since the last step"] = [
            i for i, p in enumerate(every) if id(p) in stepping and self._written(p)
        ]
        if self._compared != len(self.param_groups):
            # Scales of stored weights are exchanged in the order of parameters, so that order must match too.
            in_codes = [
                f"{part.name_of_codes}.weight" for part in map(stored_weight.code_shard, every) if part is not None
            ]
            options = [
                {name: _option(value) for name, value in group.items() if name != "params"}
                for group in self.param_groups
            ]
            facts |= {"optimizer": type(self).__name__, "options": options, "weights in codes": in_codes}
        check_agreement("an optimizer's step", facts, *groups, error=error)
        self._compared = len(self.param_groups)

    def _not_finite(self, parameters: list[Tensor], overflow: Tensor | None) -> Tensor:
        """Return 1 if any gradient is not finite, else 0, float32 []. Raise a ValueError if `nonfinite` is "raise"."""
        finite = ranks.all_finite([self.gradients.finite(p) for p in parameters], parameters)
        if self.nonfinite == "raise":
            bad = [p for p, ok in zip(parameters, finite, strict=True) if not ok]
            if bad:
                shapes = ", ".join(str(tuple(p.shape)) for p in bad[:3])
                raise ValueError(
                    f"the gradients of {len(bad)} parameters are not finite, the first of shapes {shapes}; nothing was "
                    "changed: lower the learning rate, clip gradients, or give nonfinite='skip'"
                )
        nonfinite = ~torch.stack([ok.to(finite[0].device) for ok in finite]).all()
        self.skipped = self.skipped.to(nonfinite.device)
        # In place, so that a CUDA graph counts at each replay.
        self.skipped += nonfinite
        return nonfinite.float() if overflow is None else nonfinite.float() + overflow.to(nonfinite.device)

    def _begin_group(
        self,
        group: dict[str, Any],
        numbered: list[tuple[int, Tensor]],
        apply_step: Tensor | None,
        factor: Tensor | None,
        launches: "list[gpu.Launch]",
    ) -> list[ranks.SteppingParameter]:
        """Prepare the step of a group's parameters: count steps, hand parameters to kernels.

        Returns:
            Every parameter that kernels do not step, or that needs amaxes agreed between ranks.
        """
        rule = self.rule(group, preset_of(group["preset"]))
        self._check_rate(group, [p for _, p in numbered])
        without_kernel = self._for_kernels(group, rule, numbered, factor, launches)
        scalars: dict[Tensor, tuple[Tensor, ...]] = {}
        if without_kernel:
            steps = [self.state[p]["step"] for p in without_kernel]
            for count in steps:
                count += 1 if apply_step is None else apply_step.to(count.device)
            counted = torch.stack(steps).double()
            numbers = self._count_numbers(group, rule, without_kernel, counted, apply_step)
            scalars_of_each = zip(*(s.unbind() for s in rule.scalars(group, counted, *numbers)), strict=True)
            scalars = dict(zip(without_kernel, scalars_of_each, strict=True))
        prepared = []
        for index, p in numbered:
            config = self.config(p, group)
            needs_amax_sync = config.weight_format.code_spec is not None and layout.shardings(p)
            if p in scalars or needs_amax_sync:
                self._ensure_amax(p, config)
                parts = self.parts(p, config) if needs_amax_sync else None
                amax = layout.local(self.state[p]["amax"]) if config.predicts_scale else None
                own = scalars.get(p, ())
                prepared.append(
                    ranks.SteppingParameter(p, index, group, config, parts, own, self._factor(p, factor), amax)
                )
        return prepared

    def _count_numbers(
        self,
        group: Mapping[str, Any],
        rule: UpdateRule,
        parameters: list[Tensor],
        steps: Tensor,
        apply_step: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Update the numbers that the rule has in each parameter's state; returns them, each float64 [parameters]."""
        stored = [[self.state[p][name] for p in parameters] for name in rule.numbers]
        new = rule.next_numbers(group, steps, tuple(map(torch.stack, stored)))
        for targets, values in zip(stored, new, strict=True):
            write(targets, values.unbind(), None if apply_step is None else apply_step.to(steps.device))
        return new

    def _for_kernels(
        self,
        group: dict[str, Any],
        rule: UpdateRule,
        numbered: list[tuple[int, Tensor]],
        factor: Tensor | None,
        launches: "list[gpu.Launch]",
    ) -> list[Tensor]:
        """Collect the parameters that GPU kernels can step into `launches`; return the others."""
        without_kernel, rows = [], dict[torch.device, list[Any]]()
        for index, p in numbered:
            weight, state = layout.local(p).detach(), self.state[p]
            if self.device_of_step(p).type == "cpu" and (not weight.is_cpu or no_kernels(weight)):
                without_kernel.append(p)
                continue
            config = self.config(p, group)
            self._ensure_amax(p, config)
            place = layout.flat_place(p, layout.num_leading_dims(p, rule.needs_matrix))
            arguments = config, self.parts(p, config), place
            if gpu.HAS_KERNEL(weight, *arguments, state["step"]):
                row = gpu.kernel_parameter(*arguments, group["seed"], index, state, self._factor(p, factor))
                row.owner = p
                rows.setdefault(weight.device, []).append(row)
            else:
                gpu.warn_once(self._reported, weight, *arguments, state["step"])
                without_kernel.append(p)
        for device_rows in rows.values():
            # The kernel increments the step itself if the step is applied.
            steps = torch.stack([row.tensors["step"] for row in device_rows]).double() + 1
            launches.append((device_rows, torch.stack(rule.scalars(group, steps))))
        return without_kernel

    def _launch(self, launches: "list[gpu.Launch]", apply_step: Tensor | None) -> None:
        """Launch the kernels for the collected parameters."""
        piece = next(iter(self._staged), None)
        for rows, counts in gpu.launch(launches, self._kernels, piece, apply_step, self.statistics):
            for i, row in enumerate(rows):
                # Caches that compare version counters must notice these writes.
                torch.autograd.graph.increment_version([row.owner, *(t for t in row.written if not t.is_inference())])
                if counts is not None and row.form.clamp:
                    self._count(row.owner, counts[i], layout.local(row.owner).numel())

    def _factor(self, p: Tensor, factor: Tensor | None) -> Tensor | None:
        """Return the factor of a parameter's gradient, float32 [] on the device of its step: the common one times that
        of its quantized gradient.
        """
        quantized = layout.local_quantized(p.grad)
        own = None if quantized is None else quantized.contents.factor
        both = factor if own is None else own if factor is None else own * factor
        return both.to(self.device_of_step(p)) if self.offload == "cpu" and both is not None else both

    def _check_rate(self, group: Mapping[str, Any], parameters: list[Tensor]) -> None:
        """Warn once if the learning rate is too small for 8-bit residuals."""
        if self._warned or isinstance(group["lr"], Tensor):
            return
        fine = [
            p
            for p in parameters
            if self.config(p, group).weight_format.kind == "residual8" and stored_weight.holds_codes(p)
        ]
        if fine and not self._resolution:
            here = [p for p in fine if layout.local(p).is_cpu and layout.local(p).numel()]
            self._resolution = [master_weights.resolution(layout.value_of(p)) for p in here]
        self._warned = warn_of_rate(group["lr"], self._resolution, preset_of(group["preset"]).stochastic)

    def _step_parameter(
        self, one: ranks.SteppingParameter, agreed: Mapping[int, Tensor], apply_step: Tensor | None
    ) -> None:
        """Step a parameter, segment by segment.

        Args:
            one: the parameter.
            agreed: amaxes that ranks agreed on for it, see `ranks.agree_on_amaxes`.
            apply_step: bool []; False leaves everything unchanged; None always steps.
        """
        p, config, own = one.p, one.config, layout.local(one.p)
        place = layout.flat_place(p, layout.num_leading_dims(p, config.rule.needs_matrix))
        tensors = one.parts or self.parts(p, config)
        for segment in layout.segments(p, config):
            parts = layout.slice_segment(tensors, segment)
            at = layout.at_segment(place, segment)
            amax = one.amax if one.amax is None or segment.group is None else one.amax[segment.group]
            new_amax, clamped = step_parameter(
                config,
                parts,
                one.scalars,
                one.factor,
                RngKey(one.group["seed"], one.number, self.state[p]["step"].long(), at),
                amax,
                apply_step,
                None if self._programs is None else self._programs.step,
                tuple(agreed[ranks.OF_RULE].unbind()) if ranks.OF_RULE in agreed else None,
                None if segment.crosses_shards is None else agreed[segment.crosses_shards],
            )
            if new_amax is not None:
                assert amax is not None
                write([amax], [new_amax], apply_step)
            if self.statistics and clamped is not None:
                self._count(p, clamped, parts.weight[0].numel())
        if layout.in_rows(own) is not own:
            # The parameter's memory is not row-major, so the step worked on a copy.
            own.copy_(tensors.weight[0].view(own.shape))

    def _count(self, p: Tensor, clamped: Tensor, elements: int) -> None:
        """Add to the numbers of clamped updates and of all updates of a parameter."""
        before, total = self.counted.get(p, (torch.zeros_like(clamped), 0))
        self.counted[p] = before + clamped, total + elements

    def step_in_backward(self, outstanding_bytes: int = 1 << 25, max_norm: float = float("inf")) -> None:
        """From now on step parameters during backward; `step()` then only finishes the step.

        Gradients accumulate until they take `outstanding_bytes`. Then their parameters are stepped and the gradients
        freed. On a GPU this runs on a separate stream, and with offload="cpu" in a thread, which backward waits for at
        its end. Run all micro-batches except the last inside `accumulating()`.

        Args:
            outstanding_bytes: bytes of gradients to collect before a partial step.
            max_norm: scale gradients by the factor that would have clipped the previous step's norm to this; all
                gradients of this step never exist together.
        Raises:
            ValueError: parameters are sharded, or `nonfinite` is not "keep".
        """
        if outstanding_bytes < 1:
            raise ValueError(f"outstanding_bytes is {outstanding_bytes}; give at least 1")
        every = [p for group in self.param_groups for p in group["params"]]
        if any(map(layout.shardings, every)):
            raise ValueError(
                "parameters are sharded, and ranks with different numbers of bytes would step different "
                "numbers of parameters at a time; under fully_shard gradients are sharded anyway: leave "
                "step_in_backward out"
            )
        if self.nonfinite != "keep":
            raise ValueError(
                f"nonfinite is {self.nonfinite!r}, which needs all gradients of a step before its first "
                "update, and step_in_backward steps some parameters earlier; leave one of the two out"
            )
        in_thread = self.offload == "cpu" and self._host is not None and any(map(self._host.offloads, every))
        self._release = GradientRelease(self.gradients, self._update, outstanding_bytes, max_norm, in_thread)
        self.gradients.watch(every)
        self.gradients.arrived = self._release.arrived

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context manager in which backward accumulates into `p.grad`; the first backward after it yields the step's
        gradient.

        Without it, a second backward adds to the dequantized gradient of the first in high precision. That costs one
        more rounding, and the gradient is not quantized at the step.

            with optimizer.accumulating():
                for batch in batches[:-1]:
                    loss(batch).backward()
            loss(batches[-1]).backward()
            optimizer.step()
        """
        before, self.gradients.accumulating = self.gradients.accumulating, True
        try:
            yield
        finally:
            self.gradients.accumulating = before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their total norm is at most `max_norm`; returns the norm before, float32 [].

        Like `torch.nn.utils.clip_grad_norm_`, but it also supports parameters on several meshes and ranks without rows.

        Raises:
            ValueError: gradients are stepped in backward.
        """
        if self._release is not None:
            raise ValueError(
                "gradients are already stepped in backward and freed: give step_in_backward a max_norm, "
                "which clips by the norm of the step before"
            )
        parameters = [p for group in self.param_groups for p in group["params"]]
        return self.gradients.clip(parameters, max_norm, norm_type)


def _option(value: Any) -> Any:
    """Return a group option in a form that ranks can compare; a GPU tensor by its shape only, to avoid a
    synchronization.
    """
    if not isinstance(value, Tensor):
        return value if isinstance(value, str | int | float | tuple) else type(value).__name__
    return value.tolist() if value.is_cpu else tuple(value.shape)


def check_replaced(parameters: list[Tensor]) -> None:
    """Raise a ValueError for parameters that the model has replaced or that belong to no layer."""
    for p in parameters:
        by = getattr(p, stored_weight.REPLACED, None)
        if by is not None:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} was replaced by {by} after the optimizer was created, "
                "which would step a parameter that the model no longer has: create the optimizer afterwards"
            )
    for p in stored_weight.without_layer(parameters):
        raise ValueError(
            f"a parameter of {p.dtype} and shape {tuple(p.shape)} belongs to no layer, as in an optimizer "
            "that was pickled, or copied without its model, and gets no gradient: create an optimizer of the "
            "model's parameters, and load this one's state_dict() into it"
        )


def warn_of_rate(lr: float, resolutions: Iterable[float], stochastic: bool) -> bool:
    """Warn if steps of a learning rate are too small for 8-bit residuals. Returns True if it warned.

    Args:
        lr: learning rate.
        resolutions: for each parameter, the mean distance between neighbouring values that weight and residual can
            represent.
        stochastic: residuals are rounded stochastically, so that no step is lost on average.
    """
    coarse = sorted(resolutions)
    if not coarse or lr == 0:
        return False
    middle = coarse[len(coarse) // 2]
    # Adam's updates have about the size of the learning rate.
    if lr >= middle * (1 / 16 if stochastic else 1 / 2):
        return False
    lost = (
        "stochastic rounding adds noise sixteen times as large"
        if stochastic
        else "steps below half of that are rounded away"
    )
    warnings.warn(
        f"the learning rate is {lr:.2g}, and for half of the weights 8-bit residuals have a resolution of "
        f"{middle:.2g}: {lost}; use preset balanced, whose residuals have 16 bits, from here on",
        stacklevel=4,
    )
    return True


def _pack_groups(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Replace presets by plain data in a state dict, in place."""
    for group in state["param_groups"]:
        group["preset"] = packed(group["preset"])
    # torch's SGD would silently start from zero momentum if it found no buffer; with an empty one its step fails.
    for key, own in state["state"].items():
        if f"momentum_buffer{layout.CODES}" in own:
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

"""`Optimizer`, the base class of all optimizers: torch's interface and the step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quaver.torch.linear import stored_weight
from quaver.torch.operations.ops import no_kernels
from quaver.torch.optim import master_weights
from quaver.torch.optim.checks import (
    check_gradient,
    check_group,
    check_nonfinite,
    check_options,
    check_parameter,
    check_replaced,
    check_scaler,
    check_tied,
    warn_of_rate,
)
from quaver.torch.optim.gradients import GradientRelease, Gradients
from quaver.torch.optim.quantized_gradient import local_quantized
from quaver.torch.optim.rules import UpdateRule
from quaver.torch.optim.state_conversion import preset_of
from quaver.torch.optim.state_format import LazyStates, OptimizerBase, groups_of
from quaver.torch.optim.step import gpu, layout, ranks
from quaver.torch.optim.step.compiled import CompiledSteps
from quaver.torch.optim.step.step import ParameterStepResult, RngKey, StepConfig, begin
from quaver.torch.quantized_tensor import QuantizedTensor
from quaver.torch.state.history.sync import check_agreement

#: Largest number of elements whose steps may be in progress together, because some of them are copies.
MAX_PENDING_ELEMENTS = 1 << 24


class Optimizer(OptimizerBase):
    """Base class of `AdamW` and the other optimizers.

    A parameter group may have its own `preset`. Norms, biases and tensors of fewer than 4096 elements have float32
    states with any preset.
    """

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
        **torchs: Any,
    ) -> None:
        check_options(type(self).__name__, torchs)
        check_nonfinite(nonfinite)
        self.nonfinite = nonfinite
        self.statistics = statistics
        #: True if large parameters are stepped by torch.compile.
        self.compile = compile
        self._programs = CompiledSteps() if compile else None
        #: Prepared kernel arguments by device, and the reasons for not using kernels that were already reported.
        self._kernels: dict[torch.device, Any] = {}
        self._said: set[str] = set()
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
        self._warned = False
        self._resolution: list[float] = []
        defaults["seed"] = seed
        super().__init__(groups_of(params), defaults)
        self.state = LazyStates(self._initial_state)

    def __getstate__(self) -> dict[str, Any]:
        names = ("nonfinite", "statistics", "compile", "skipped", "_warned", "_resolution")
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
        self._kernels, self._said, self._local_amax, self._stepped, self._compared = {}, set(), set(), {}, 0
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
            if p.requires_grad and layout.shardings(p):
                layout.check_divided(p, self.config(p, group), self.preset(p, group).name)
            elif p.requires_grad and p.dim() == 3:
                layout.check(p, self.config(p, group), self.preset(p, group).name)

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
        if hasattr(self, "grad_scale"):
            # Set by GradScaler; None after unscale_.
            check_scaler(self._release is not None)
        overflow, factor = self._scaling()
        parameters = [p for group in self.param_groups for p in group["params"]]
        check_replaced(parameters)
        parameters = [p for p in parameters if p.grad is not None]
        for p in parameters:
            self.gradients.convert(p)
        if self._release is not None:
            # Step gradients that no hook reported: of parameters frozen when `step_in_backward` was called, or assigned
            # by hand.
            for p in parameters:
                self._release.arrived(p)
            self._release.end()
            parameters = []
        self._update(parameters, factor, overflow)
        if factor is not None:
            # The step has applied `factor` already. Leave unscaled values in p.grad, as GradScaler does otherwise.
            for p in parameters:
                layout.local(p.grad).mul_(factor.to(p.grad.device))

    def _update(self, parameters: list[Tensor], factor: Tensor | None, overflow: Tensor | None = None) -> None:
        """Step the given parameters.

        Args:
            parameters: those with a gradient.
            factor: multiplier of their gradients, float32 [], or None.
            overflow: tensor; nonzero means that nothing may change.
        """
        chosen = {id(p) for p in parameters}
        for p in parameters:
            check_gradient(p)
        for group in self.param_groups:
            for p in group["params"]:
                if id(p) in chosen and self.state.get(p):
                    self._check_state(p, group)
        self._compare_ranks(parameters)
        if self.nonfinite != "keep" and parameters:
            overflow = self._not_finite(parameters, overflow)
        if overflow is not None and overflow.is_cpu:
            if overflow.item():
                return
            overflow = None
        apply_step = None if overflow is None else overflow.reshape(()) == 0
        param_count, launches = 0, gpu.Launches(self._kernels)
        prepared: list[tuple[int, Mapping[str, Any], ranks.SteppingParameter]] = []
        for group in self.param_groups:
            numbered = [(param_count + i, p) for i, p in enumerate(group["params"]) if id(p) in chosen]
            param_count += len(group["params"])
            if numbered:
                prepared += self._begin_group(group, numbered, apply_step, factor, launches)
        stepping_parameters = [stepping for _, _, stepping in prepared]
        agreed_amaxes = ranks.agree_on_amaxes(stepping_parameters, self._local_amax)
        waiting: list[Callable[[], object]] = []
        elements = 0
        for param_index, param_group, stepping in prepared:
            if stepping.scalars:
                waiting += self._begin_parameter(
                    stepping, param_group, param_index, agreed_amaxes.get(stepping.p, {}), apply_step
                )
                elements += stepping.p.numel()
            if self._programs is None or elements > MAX_PENDING_ELEMENTS:
                elements = _finish(waiting)
        _finish(waiting)
        self._launch(launches, apply_step)
        ranks.gather_scales(stepping_parameters)
        for p in parameters:
            if stored_weight.holds_codes(p):
                if isinstance(p, QuantizedTensor):
                    # Its codes were written, which autograd and caches must notice.
                    torch.autograd.graph.increment_version(p)
                self._stepped[p] = layout.versions(p)

    def _follow_writes(self, p: Tensor, config: StepConfig) -> None:
        """Update the master or the amaxes of a weight stored as codes that was written since the last step.

        Such a write comes for instance from `load_state_dict`.
        """
        if not self._written(p):
            return
        state = self.state[p]
        if config.weight_format.master:
            weight_format, codes = layout.in_own_rows(p, config.weight_format)
            states = [layout.local(state[name]) for name in config.weight_format.states]
            for old, new in zip(
                states,
                master_weights.master_after_write(weight_format, (*codes, *map(layout.rows, states))),
                strict=True,
            ):
                old.copy_(new.view(old.shape))
        elif config.predicts_scale and "amax" in state:
            # In place, because a CUDA graph reads this tensor.
            layout.local(state["amax"]).copy_(layout.local(self._amax(p, config, self.parts_of_weight(p, config))))

    def _written(self, p: Tensor) -> bool:
        """True if a weight stored as codes may have been written since this optimizer stepped it."""
        return stored_weight.holds_codes(p) and self._stepped.get(p) != layout.versions(p)

    def _compare_ranks(self, parameters: list[Tensor]) -> None:
        """Check that ranks which share parameters agree: options at the first step; gradients and new groups in steps
            that communicate.

        Raises:
            ValueError: on all ranks.
        """
        every = [p for group in self.param_groups for p in group["params"]]
        groups = list(dict.fromkeys(group for p in every for group in layout.sharing(p)))
        communicates = self.nonfinite != "keep" or any(stored_weight.holds_codes(p) for p in every)
        if not groups or (self._compared and not communicates):
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
        check_agreement("an optimizer's step", facts, *groups)
        self._compared = len(self.param_groups)

    def _not_finite(self, parameters: list[Tensor], overflow: Tensor | None) -> Tensor:
        """Return 1 if any gradient is not finite, else 0, float32 []. Raise a ValueError if `nonfinite` is "raise"."""
        finite = [self.gradients.finite(p) for p in parameters]
        finite = layout.agreed(finite, parameters)
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

    def step_in_backward(self, outstanding_bytes: int = 1 << 25, max_norm: float = float("inf")) -> None:
        """From now on step parameters during backward; `step()` then only finishes the step.

        Gradients accumulate until they take `outstanding_bytes`. Then their parameters are stepped and the gradients
        freed. On a GPU this runs on a separate stream. Run all micro-batches except the last inside `accumulating()`.

        Args:
            outstanding_bytes: bytes of gradients to collect before a partial step.
            max_norm: scale gradients by the factor that would have clipped the previous step's norm to this; all
                gradients of this step never exist together.
        Raises:
            ValueError: parameters are sharded, or `nonfinite` is not "keep".
        """
        if outstanding_bytes < 1:
            raise ValueError(f"outstanding_bytes is {outstanding_bytes}; give at least 1")
        if any(layout.shardings(p) for group in self.param_groups for p in group["params"]):
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
        self._release = GradientRelease(self.gradients, self._update, outstanding_bytes, max_norm)
        self.gradients.watch(p for group in self.param_groups for p in group["params"])
        self.gradients.arrived = self._release.arrived

    def _scaling(self) -> tuple[Tensor | None, Tensor | None]:
        """Return torch.amp.GradScaler's overflow flag and the factor that unscales gradients, each None without one."""
        overflow, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        # A GradScaler that has seen no gradient passes the number 0.
        overflow = overflow if isinstance(overflow, Tensor) else None
        return overflow, None if scale is None else scale.float().reciprocal().reshape(())

    def _begin_group(
        self,
        group: dict[str, Any],
        numbered: list[tuple[int, Tensor]],
        apply_step: Tensor | None,
        factor: Tensor | None,
        launches: gpu.Launches,
    ) -> list[tuple[int, Mapping[str, Any], ranks.SteppingParameter]]:
        """Prepare the step of a group's parameters: create states, count steps, hand parameters to kernels.

        Returns:
            Index, group and step data of every parameter that kernels do not step, or that needs amaxes agreed between
            ranks.
        """
        for _, p in numbered:
            if not self.state[p]:
                self.state[p] = self.first_state(p, group)
            if stored_weight.holds_codes(p):
                self._follow_writes(p, self.config(p, group))
        rule = self.rule(group, preset_of(group["preset"]))
        self._check_rate(group, [p for _, p in numbered])
        without_kernel = self._for_kernels(group, rule, numbered, factor, launches)
        scalars: dict[Tensor, tuple[Tensor, ...]] = {}
        if without_kernel:
            steps = [self.state[p]["step"] for _, p in without_kernel]
            for count in steps:
                count += 1 if apply_step is None else apply_step.to(count.device)
            scalars_of_each = zip(*(s.unbind() for s in rule.scalars(group, torch.stack(steps).double())), strict=True)
            scalars = dict(zip((p for _, p in without_kernel), scalars_of_each, strict=True))
        prepared: list[tuple[int, Mapping[str, Any], ranks.SteppingParameter]] = []
        for param_index, p in numbered:
            config = self.config(p, group)
            needs_amax_sync = config.weight_format.code_spec is not None and layout.shardings(p)
            if p in scalars or needs_amax_sync:
                self._ensure_amax(p, config)
                amax = layout.local(self.state[p]["amax"]) if config.predicts_scale else None
                # Other tensors are looked up later, when the parameter is stepped, since some are copies.
                parts, own_factor = self.parts(p, config) if needs_amax_sync else None, self._factor(p, factor)
                prepared.append(
                    (
                        param_index,
                        group,
                        ranks.SteppingParameter(p, config, parts, scalars.get(p, ()), own_factor, amax),
                    )
                )
        return prepared

    def _for_kernels(
        self,
        group: dict[str, Any],
        rule: UpdateRule,
        numbered: list[tuple[int, Tensor]],
        factor: Tensor | None,
        launches: gpu.Launches,
    ) -> list[tuple[int, Tensor]]:
        """Collect the parameters that GPU kernels can step into `launches`; return the others."""
        without_kernel, rows = [], dict[torch.device, list[Any]]()
        for param_index, p in numbered:
            weight, state = layout.local(p).detach(), self.state[p]
            if weight.is_cpu and no_kernels(weight):
                without_kernel.append((param_index, p))
                continue
            config = self.config(p, group)
            self._ensure_amax(p, config)
            arguments = (
                config,
                self.parts(p, config),
                layout.flat_place(p, layout.num_leading_dims(p, rule.needs_matrix)),
            )
            if gpu.HAS_KERNEL(weight, *arguments, state["step"]):
                row = gpu.kernel_parameter(*arguments, group["seed"], param_index, state, self._factor(p, factor))
                row.owner = p
                rows.setdefault(weight.device, []).append(row)
            else:
                gpu.warn_once(self._said, weight, *arguments, state["step"])
                without_kernel.append((param_index, p))
        for of_device in rows.values():
            # The kernel increments the step itself if the step is applied.
            steps = torch.stack([row.tensors["step"] for row in of_device]).double() + 1
            launches.add(of_device, torch.stack(rule.scalars(group, steps)))
        return without_kernel

    def _launch(self, launches: gpu.Launches, apply_step: Tensor | None) -> None:
        """Launch the kernels for the collected parameters."""
        for where, counts in launches.run(apply_step, self.statistics).items():
            for i, row in enumerate(launches.rows[where]):
                # Caches that compare version counters must notice these writes.
                torch.autograd.graph.increment_version([row.owner, *(t for t in row.written if not t.is_inference())])
                if counts is not None and row.form.clamp:
                    before, total = self.counted.get(row.owner, (torch.zeros_like(counts[i]), 0))
                    self.counted[row.owner] = before + counts[i], total + layout.local(row.owner).numel()

    def _factor(self, p: Tensor, factor: Tensor | None) -> Tensor | None:
        """Return the factor of a parameter's gradient, float32 [] on its device: the common one times that of its
        quantized gradient.
        """
        quantized = local_quantized(p.grad)
        own = None if quantized is None else quantized.contents.factor
        return factor if own is None else own if factor is None else own * factor

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

    def _begin_parameter(
        self,
        stepping: ranks.SteppingParameter,
        group: Mapping[str, Any],
        param_index: int,
        agreed_amaxes: Mapping[int, Tensor],
        apply_step: Tensor | None,
    ) -> Iterator[Callable[[], object]]:
        """Start the step of each segment of a parameter; yields a function that finishes it."""
        p, config, amax, own = stepping.p, stepping.config, stepping.amax, layout.local(stepping.p)
        place = layout.flat_place(p, layout.num_leading_dims(p, config.rule.needs_matrix))
        tensors = stepping.parts or self.parts(p, config)
        for segment in ranks.segments(p, config):
            parts = ranks.of_segment(tensors, segment)
            rng_key = RngKey(group["seed"], param_index, self.state[p]["step"].long(), ranks.at_segment(place, segment))
            global_amax = ranks.agreed_for(agreed_amaxes, segment)
            segment_amax = amax if amax is None or segment.group is None else amax[segment.group]
            finish = begin(
                config,
                parts,
                stepping.scalars,
                stepping.factor,
                rng_key,
                segment_amax,
                apply_step,
                self._programs,
                global_amax,
            )
            yield partial(self._finish_segment, p, finish, parts.weight[0].numel(), segment_amax, apply_step)
        if layout.in_rows(own) is not own:
            # The parameter's memory is not row-major, so the step worked on a copy.
            yield lambda: own.copy_(tensors.weight[0].view(own.shape))

    def _finish_segment(
        self,
        p: Tensor,
        finish: Callable[[], ParameterStepResult],
        elements: int,
        amax: Tensor | None,
        apply_step: Tensor | None,
    ) -> None:
        outcome = finish()
        if outcome.amax is not None:
            assert amax is not None
            amax.copy_(outcome.amax if apply_step is None else torch.where(apply_step, outcome.amax, amax))
        if self.statistics and outcome.clamped is not None:
            before, total = self.counted.get(p, (torch.zeros_like(outcome.clamped), 0))
            self.counted[p] = before + outcome.clamped, total + elements

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


def _finish(waiting: list[Callable[[], object]]) -> int:
    """Finish all steps that have started; returns 0, the number of elements still in progress."""
    while waiting:
        waiting.pop(0)()
    return 0

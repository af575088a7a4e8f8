"""What an optimizer keeps of each parameter: in how many bits, what it begins with, and the state dicts of it."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from quaver.core.states.presets import PRESETS, Preset
from quaver.torch.linear.stored import storing
from quaver.torch.optim import codes, weights
from quaver.torch.optim.gradients.held import Gradients
from quaver.torch.optim.loading import moments, rules
from quaver.torch.optim.loading.converting import states_of
from quaver.torch.optim.loading.earlier import written_by
from quaver.torch.optim.loading.presets import packed, preset_of
from quaver.torch.optim.loading.rules import CODES, key_of
from quaver.torch.optim.quantized_gradient import local_quantized
from quaver.torch.optim.refusals import check_group
from quaver.torch.optim.rules.rule import Rule
from quaver.torch.optim.stepping import layout, ranks, stacks
from quaver.torch.optim.stepping.pieces import Parts, Way

#: Tensors below are kept in high precision.
SMALL = 4096


class Kept(torch.optim.Optimizer):
    """An optimizer that does not step yet: presets say what it keeps."""

    #: Gradients that are kept in few bits.
    gradients: Gradients
    statistics: bool
    #: Weights of codes of which a rank knows the largest magnitude of its own rows alone.
    _alone: set[Tensor]
    #: Of weights of codes: what `layout.versions` was after the last step.
    _stepped: dict[Tensor, Any]

    def rule(self, group: Mapping[str, Any], preset: Preset) -> Rule:
        """The formula of a group."""
        raise NotImplementedError

    def preset(self, p: Tensor, group: Mapping[str, Any]) -> Preset:
        """What is kept for a parameter: the group's preset, or that of high precision."""
        small = p.dim() < 2 or p.numel() < SMALL
        return PRESETS["float32"] if small and not storing.holds_codes(p) else preset_of(group["preset"])

    def way(self, p: Tensor, group: Mapping[str, Any]) -> Way:
        """How a parameter steps."""
        preset = self.preset(p, group)
        rule = self.rule(group, preset)
        specs = tuple(preset.first if signed else preset.second for signed in rule.signed)
        keeping = weights.keeping_of(p, preset)
        predicts = keeping.kind.startswith("residual") and keeping.spec is not None and None in keeping.spec.block
        held = local_quantized(p.grad)
        spec = None if held is None else held.contents.spec
        return Way(rule, keeping, specs, spec, predicts and rule.bounded, self.statistics)

    def _know_amax(self, p: Tensor, way: Way) -> None:
        """Have the largest magnitudes of a weight's blocks in its state, if its scales are predicted, and only then."""
        if not way.predicts:
            self.state[p].pop("amax", None)
        elif "amax" not in self.state[p]:
            self.state[p]["amax"] = self._amax(p, way, self.parts_of_weight(p, way))

    def _amax(self, p: Tensor, way: Way, tensors: tuple[Tensor, ...]) -> Tensor:
        """The largest magnitudes of a weight's blocks, which lie as its rows do; on ranks, of this one's rows."""
        assert way.keeping.spec is not None
        if stacks.is_stack(p, way.keeping.spec):
            each = [ranks.of_segment(Parts(tensors, (), ()), segment).weight for segment in ranks.segments(p, way)]
            amaxes = [weights.block_amax(way.keeping.spec, weights.read(way.keeping, own)) for own in each]
            return stacks.together(amaxes, p)
        amax = weights.block_amax(way.keeping.spec, weights.read(way.keeping, tensors))
        if not layout.divided(p):
            return amax
        self._alone.add(p)
        height = way.keeping.spec.block[0]
        return amax if height is None else layout.like(p, amax, (-(-p.shape[0] // height), amax.shape[1]))

    def parts(self, p: Tensor, way: Way) -> Parts:
        """All that a parameter's step reads and writes, this rank's part, as matrices."""
        state = self.state[p]
        moments = tuple(
            tuple(layout.local(state[key]) for key in (key_of(name, spec), f"{name}_scale") if key in state)
            for name, spec in zip(way.rule.names, way.moments, strict=True)
        )
        held = local_quantized(p.grad)
        gradient = (layout.gradient(p),) if held is None else held.contents.codes or ()
        rows_of = layout.leading(p, way.rule.whole)
        # A rank may have no rows at all.
        number = prod(layout.local(p).shape[:rows_of]) if rows_of < p.dim() - 1 else 0
        return layout.as_rows(Parts(self.parts_of_weight(p, way), moments, gradient), number)

    def parts_of_weight(self, p: Tensor, way: Way) -> tuple[Tensor, ...]:
        """All that says a parameter's weight, this rank's part, as matrices."""
        beside = [layout.local(self.state[p][name]) for name in way.keeping.states]
        return tuple(layout.rows(t) for t in (*layout.weight_of(p, way), *beside))

    def state_dict(self) -> dict[str, Any]:
        """As torch's. Codes keep their dtypes, and groups name their presets as plain data."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        if not len(self.state) and all(p.grad is None for p in parameters):
            # Room for what torch.distributed.checkpoint loads.
            self.state.update({p: self._begun(p) for p in parameters})
        # Before hooks of the user's, which see what is saved.
        handle = self.register_state_dict_post_hook(_packed_groups, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def load_state_dict(self, state_dict: Any) -> None:
        """Take up a state dict of any preset, of torch.optim, torchao.optim or MS-AMP; load the model before it.

        The groups keep their presets: states that were kept otherwise, or in the first form of theirs, are converted,
        which a warning says. Where it raises nothing was loaded.
        Raises:
            ValueError: a state dict of another rule, of other groups or shapes, or with options that are not honoured.
        """
        before = self.param_groups, self.state, set(self._alone)
        try:
            self._load(state_dict)
        except BaseException:
            # torch has made new groups and a new state, and left these as they were.
            self.param_groups, self.state, self._alone = before
            raise

    def _load(self, state_dict: Any) -> None:
        """`load_state_dict`, which may leave some of it loaded where it raises."""
        taken: dict[str, Any] = {}
        own, lost = self.param_groups, dict[str, int]()

        def check(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            missing = [name for name in ("state", "param_groups") if not isinstance(state_dict.get(name), dict | list)]
            if missing or not isinstance(state_dict["state"], Mapping):
                raise ValueError(f"a state dict has a dict `state` and a list `param_groups`; {rules.DAMAGED}")
            for mine, group in zip(own, state_dict["param_groups"], strict=False):
                rules.check_group(group, mine)
            said = [group.get("preset") for group in state_dict["param_groups"]]
            taken.update(state_dict, before=[None if preset is None else written_by(preset) for preset in said])
            return {**state_dict, "state": {}}

        def take(_: torch.optim.Optimizer) -> None:
            self._take(taken, own, lost)

        # Behind and before hooks of the user's: these see whole state dicts, and states that are loaded.
        handles = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(take, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()
        for sentence, number in lost.items():
            warnings.warn(f"{number} parameters: {sentence}", stacklevel=3)

    def _take(self, taken: Mapping[str, Any], own: list[dict[str, Any]], lost: dict[str, int]) -> None:
        """Complete loaded groups, and convert states.

        Args:
            taken: a state dict, and under `before` the presets that wrote it.
            own: the groups before.
            lost: sentences to warn of, and of how many parameters; added to.
        """
        for group, mine in zip(self.param_groups, own, strict=True):
            group["preset"] = mine["preset"]
            for name, value in (self.defaults | {"rule": mine["rule"]} if "rule" in mine else self.defaults).items():
                group.setdefault(name, value)
            if group.get("adjust_lr_fn", "") is None:
                group["adjust_lr_fn"] = "original"
            if "betas" in group:
                # Others do not say whether their betas stayed; schedulers that cycle them leave this in the group.
                steady = () if "max_momentum" in group else tuple(group["betas"])
                group.setdefault("steady_betas", steady)
            check_group(type(self).__name__, group)
        for group, saved, written in zip(self.param_groups, taken["param_groups"], taken["before"], strict=True):
            for p, key in zip(group["params"], saved["params"], strict=True):
                if key in taken["state"]:
                    rules.check_state(key, taken["state"][key], self.rule(group, self.preset(p, group)))
                    self._load_state(p, group, taken["state"][key], written, lost)

    def _load_state(
        self,
        p: Tensor,
        group: Mapping[str, Any],
        saved: Mapping[str, Any],
        written: Preset | None,
        said: dict[str, int],
    ) -> None:
        way, old = self.way(p, group), None
        if written is not None:
            old = self.way(p, {**group, "preset": written})
            specs = (written.first if signed else written.second for signed in way.rule.signed)
            found = {name: saved.get(name + CODES, saved.get(name)) for name in way.rule.names}
            old = replace(
                old,
                moments=tuple(
                    was if kept is None else moments.spec_of(name, kept, saved.get(f"{name}_scale"), spec)
                    for (name, kept), was, spec in zip(found.items(), old.moments, specs, strict=True)
                ),
            )
        keeping, tensors = layout.in_own_rows(p, way.keeping)
        before = None if old is None else replace(old, keeping=layout.in_own_rows(p, old.keeping)[0])
        weight = tuple(layout.rows(t) for t in tensors)
        state, lost = states_of(p, saved, replace(way, keeping=keeping), before, weight)
        first = self.first_state(p, group)
        self.state[p] = {**first, **{name: value for name, value in state.items() if name in first}}
        self.state[p]["step"] = first["step"] + state["step"].to(first["step"].device)
        self.state[p].pop("amax", None)
        self._know_amax(p, way)
        self._stepped.pop(p, None)
        if lost:
            said[lost] = said.get(lost, 0) + 1
        if old is None or old.moments != way.moments or old.keeping != way.keeping:
            wrote = "another library" if written is None else f"preset {written.name}"
            sentence = f"states of {wrote} were converted to preset {self.preset(p, group).name}"
            said[sentence] = said.get(sentence, 0) + 1

    def _begun(self, p: Tensor) -> dict[str, Tensor]:
        """What a parameter starts with; nothing of one that is not this optimizer's, as torch's have it."""
        groups = [group for group in self.param_groups if any(p is each for each in group["params"])]
        return self.first_state(p, groups[0]) if groups else {}

    def first_state(self, p: Tensor, group: Mapping[str, Any]) -> dict[str, Tensor]:
        """What a parameter starts with."""
        way = self.way(p, group)
        device = p.device
        state = {"step": torch.zeros((), dtype=torch.float32, device=device if device.type == "cuda" else "cpu")}
        own, rows_of = layout.local(p), layout.leading(p, way.rule.whole)
        for name, spec in zip(way.rule.names, way.moments, strict=True):
            held = torch.zeros(own.shape, dtype=codes.code_dtype(spec.of), device=own.device)
            state[key_of(name, spec)] = layout.like(p, held, p.shape)
            if spec.of.scaled:
                shape, every = (
                    codes.scale_shape(layout.flat(t.shape, rows_of), spec.block, spec.of.numbers) for t in (own, p)
                )
                scale = torch.zeros(shape, dtype=codes.SCALE_DTYPES[spec.scale], device=own.device)
                state[f"{name}_scale"] = layout.like(p, scale, every)
        value = layout.value_of(p) if way.keeping.kind in ("float32", "float16") else None
        beside = weights.first_states(way.keeping, own, value)
        initial = layout.initial_of(p, way)
        if initial is not None:
            keeping, tensors = layout.in_own_rows(p, way.keeping)
            written = weights.around(keeping, layout.rows(initial), (*tensors, *(layout.rows(t) for t in beside)))
            beside = tuple(t.view(own.shape) if t.dim() else t for t in written)
        for name, tensor in zip(way.keeping.states, beside, strict=True):
            state[name] = layout.like(p, tensor, p.shape) if tensor.shape == own.shape else tensor
        if way.predicts:
            state["amax"] = self._amax(p, way, tuple(layout.rows(t) for t in (*layout.weight_of(p, way), *beside)))
        return state

    def _check_state(self, p: Tensor, group: Mapping[str, Any]) -> None:
        """Begin moments that the rule had no use for so far, and refuse a state that is not this parameter's.

        Raises:
            ValueError: a moment, its scales or what is kept beside the weight has another shape or dtype, or none.
        """
        state = self.state[p]
        way, own = self.way(p, group), tuple(layout.local(p).shape)
        if not any(name in state or name + CODES in state for name in way.rule.names):
            # Steps count from there: the first one of a momentum differs.
            first = self.first_state(p, group)
            state.update({name: first[name] for name in first if name not in way.keeping.states or name not in state})
        flat = layout.flat(own, layout.leading(p, way.rule.whole))
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, spec in zip(way.rule.names, way.moments, strict=True):
            expected[key_of(name, spec)] = own, codes.code_dtype(spec.of)
            if spec.of.scaled:
                scales = codes.scale_shape(flat, spec.block, spec.of.numbers)
                expected[f"{name}_scale"] = scales, codes.SCALE_DTYPES[spec.scale]
        for name in way.keeping.states[:1]:
            expected[name] = own, way.keeping.dtype
        for name, (shape, dtype) in expected.items():
            held = None if name not in state else layout.local(state[name])
            if held is None or (tuple(held.shape), held.dtype) != (shape, dtype):
                found = "is missing" if held is None else f"has shape {tuple(held.shape)} and dtype {held.dtype}"
                raise ValueError(
                    f"{name} of a parameter of shape {tuple(p.shape)} and {p.dtype} {found}, where {dtype} of shape "
                    f"{shape} was expected: the parameter or its group's preset changed after the state was made. Take "
                    "state_dict() before such a change and load it after it, or begin anew by `del optimizer.state[p]`"
                )


def _packed_groups(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Have a state dict name presets as plain data."""
    for group in state["param_groups"]:
        group["preset"] = packed(group["preset"])
    # torch's SGD begins a buffer anew that it does not find: at one without elements its step fails.
    for key, own in state["state"].items():
        if f"momentum_buffer{CODES}" in own:
            state["state"][key] = {**own, "momentum_buffer": torch.empty(0, dtype=torch.float32, device="cpu")}


def groups_of(params: Any) -> Any:
    """Parameter groups of a model: embeddings are kept in float32; what is no model stays as it is."""
    if not isinstance(params, nn.Module):
        return params
    embeddings = {id(p) for module in params.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    trained = [p for p in params.parameters() if p.requires_grad]
    table = [p for p in trained if id(p) in embeddings]
    others = [p for p in trained if id(p) not in embeddings]
    groups: list[dict[str, Any]] = [{"params": others}] if others else []
    return groups + ([{"params": table, "preset": "float32"}] if table else [])

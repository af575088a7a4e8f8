"""Load state dicts of any preset and of other libraries: states in other formats are converted through float32."""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from quaver.reference.optimizer_state import FLOAT32, Preset, StateSpec, saved_preset
from quaver.torch.optim import codes, layout, master_weights, rules
from quaver.torch.optim.checks import UNSUPPORTED, check_group
from quaver.torch.optim.layout import CODES, key_of
from quaver.torch.optim.master_weights import WeightFormat
from quaver.torch.optim.rules import UpdateRule
from quaver.torch.optim.step import StepConfig

# ---- loading ----


def load(optimizer: Any, state_dict: Any, load_groups: Callable[[Any], None]) -> None:
    """Load a state dict, converting states; it may have loaded a part when it raises.

    Args:
        optimizer: the `Optimizer` to load into.
        state_dict: state dict of this or another library.
        load_groups: torch's `load_state_dict`.
    """
    own, loaded = optimizer.param_groups, dict[str, Any]()
    messages: Counter[str] = Counter()

    def check(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        missing = [name for name in ("state", "param_groups") if not isinstance(state_dict.get(name), dict | list)]
        if missing or not isinstance(state_dict["state"], Mapping):
            raise ValueError(f"a state dict has a dict `state` and a list `param_groups`; {DAMAGED}")
        for mine, group in zip(own, state_dict["param_groups"], strict=False):
            check_saved_group(group, mine)
        loaded.update(state_dict)
        return {**state_dict, "state": {}}

    def convert(_: torch.optim.Optimizer) -> None:
        messages.update(_convert(optimizer, loaded, own))

    # Run after the user's pre-hooks, which may change the state dict, and before post-hooks, which see loaded
    # states.
    handles = [
        optimizer.register_load_state_dict_pre_hook(check),
        optimizer.register_load_state_dict_post_hook(convert, prepend=True),
    ]
    try:
        load_groups(state_dict)
    finally:
        for handle in handles:
            handle.remove()
    for message, number in messages.items():
        warnings.warn(f"{number} parameters: {message}", stacklevel=4)


def _convert(optimizer: Any, loaded: Mapping[str, Any], own: list[dict[str, Any]]) -> list[str]:
    """Complete the groups that torch has loaded, and load the states.

    Args:
        loaded: the state dict.
        own: the groups before.
    Returns:
        Warnings, one per parameter concerned.
    """
    names = [group.get("preset") for group in loaded["param_groups"]]
    saved_presets = [None if preset is None else saved_preset(preset) for preset in names]
    for group, mine in zip(optimizer.param_groups, own, strict=True):
        group["preset"] = mine["preset"]
        for name, value in (
            optimizer.defaults | {"rule": mine["rule"]} if "rule" in mine else optimizer.defaults
        ).items():
            group.setdefault(name, value)
        if group.get("adjust_lr_fn", "") is None:
            group["adjust_lr_fn"] = "original"
        if "betas" in group:
            # Other libraries do not record whether betas were constant. Schedulers that change them add
            # max_momentum.
            steady = () if "max_momentum" in group else tuple(group["betas"])
            group.setdefault("steady_betas", steady)
        check_group(type(optimizer).__name__, group)
    messages = []
    for group, saved, preset in zip(optimizer.param_groups, loaded["param_groups"], saved_presets, strict=True):
        for p, key in zip(group["params"], saved["params"], strict=True):
            if key in loaded["state"]:
                check_saved_state(key, loaded["state"][key], optimizer.config(p, group).rule)
                messages += _load_state(optimizer, p, group, loaded["state"][key], preset)
    return messages


def _load_state(
    optimizer: Any, p: Tensor, group: Mapping[str, Any], saved: Mapping[str, Any], preset: Preset | None
) -> list[str]:
    """Load one parameter's state.

    Args:
        optimizer: the `Optimizer` to load into.
        p: the parameter.
        group: its parameter group.
        saved: its entry of the state dict.
        preset: the preset that wrote it; None for another library.
    Returns:
        Warnings about missing and converted states.
    """
    config, saved_config = optimizer.config(p, group), None
    if preset is not None:
        saved_config = optimizer.config(p, {**group, "preset": preset})
        specs = []
        for name, signed, own in zip(config.rule.names, config.rule.signed, saved_config.moments, strict=True):
            moment = saved.get(name + CODES, saved.get(name))
            spec = preset.first if signed else preset.second
            specs.append(own if moment is None else spec_of(name, moment, saved.get(f"{name}_scale"), spec))
        saved_config = replace(saved_config, moments=tuple(specs))
    # A shard may start within a block of scales: read it with one scale per row.
    weight_format, tensors = layout.in_own_rows(p, config.weight_format)
    device = optimizer.device_of_states(p)
    weight = tuple(layout.rows(t) for t in tensors)
    saved_format = None if saved_config is None else layout.in_own_rows(p, saved_config.weight_format)[0]
    state, missing = convert_state(
        p, saved, replace(config, weight_format=weight_format), saved_config, saved_format, weight, device
    )
    optimizer.set_state(p, group, state)
    messages = [missing] if missing else []
    if saved_config is None or (saved_config.moments, saved_config.weight_format) != (
        config.moments,
        config.weight_format,
    ):
        source = "another library" if preset is None else f"preset {preset.name}"
        messages.append(f"states of {source} were converted to preset {optimizer.preset(p, group).name}")
    return messages


# ---- rules ----
# Check that a state dict was written by the same update rule (Adam, Lion, SGD, Muon, Schedule-Free AdamW) and is
# undamaged.

#: Rules of torch.optim by an option that only they have.
RULE_OF_OPTION = {
    **{"adjust_lr_fn": "Muon", "dampening": "SGD", "momentum_decay": "NAdam", "centered": "RMSprop", "rho": "Adadelta"},
    "weight_lr_power": "ScheduleFreeAdamW",
    **{"lr_decay": "Adagrad", "lambd": "ASGD", "etas": "Rprop", "beta2_decay": "Adafactor"},
}
#: Optimizers by a key of their states; the error names the first key that this optimizer's rule lacks.
OWNER_OF_MOMENT = {
    **{"max_exp_avg_sq": "Adam with amsgrad=True", "mu_product": "NAdam", "exp_inf": "Adamax", "row_var": "Adafactor"},
    **{"acc_delta": "Adadelta", "square_avg": "RMSprop", "sum": "Adagrad", "ax": "ASGD", "prev": "Rprop"},
    "z": "schedulefree's optimizers",
    "z_minus_y": "ScheduleFreeAdamW",
    **{"exp_avg_sq": "Adam", "exp_avg": "Adam or Lion", "momentum_buffer": "SGD or Muon"},
}
#: End of errors about state dicts that no optimizer writes.
DAMAGED = "nothing was loaded: is the file damaged?"


def check_saved_group(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check a parameter group of a state dict.

    Args:
        saved: the group in the state dict.
        own: the group of this optimizer.
    Raises:
        ValueError: another rule, an option that is not supported, or one that is not a number.
    """
    for option, value in saved.items():
        mine = own.get(option)
        no_pair = option == "betas" and not (isinstance(value, tuple | list) and len(value) == 2)
        if no_pair or (type(mine) is float and not isinstance(value, Tensor | Real)):
            raise ValueError(f"{option} of the state dict is {value!r}, and of this optimizer {mine!r}; {DAMAGED}")
    theirs, ours = rule_of(saved), rule_of(own)
    if theirs and theirs != ours:
        raise ValueError(
            f"the state dict is that of {theirs}, and this optimizer is {ours}, which has other moments; nothing was "
            f"loaded: load it into {theirs}, or start {ours} without it"
        )
    if saved.get("amsgrad"):
        raise ValueError(f"the state dict was saved with amsgrad=True; {UNSUPPORTED['amsgrad']}")
    # Options of torch's Muon that have one value here.
    fixed = {"ns_steps": 5, "ns_coefficients": rules.COEFFICIENTS} | ({"eps": 1e-7} if "ns_steps" in saved else {})
    for option, value in fixed.items() if ours == "Muon" else ():
        saved_value = saved.get(option, value)
        if (tuple(saved_value) if isinstance(saved_value, list) else saved_value) != value:
            raise ValueError(
                f"the state dict was saved with {option}={saved_value!r}, and Muon has {value!r} here; nothing was "
                "loaded: start without it"
            )


def rule_of(group: Mapping[str, Any]) -> str:
    """Return the rule that a parameter group belongs to, from its options, or "" if unclear. AdamW counts as "Adam"."""
    if group.get("rule") == "adamw":
        return "Adam"
    for option, rule in RULE_OF_OPTION.items():
        if option in group:
            return rule
    return ("Adam" if "eps" in group else "Lion") if "betas" in group else ""


def check_saved_state(key: object, saved: Mapping[str, Any], rule: UpdateRule) -> None:
    """Check a parameter's state in a state dict.

    Args:
        key: key of the parameter in the state dict, for the error.
        saved: the state.
        rule: this optimizer's rule.
    Raises:
        ValueError: the state is damaged or of another rule.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"the state of parameter {key} is of type {type(saved).__name__}, not a dict; {DAMAGED}")
    for number in ("step", *rule.numbers):
        value = 0.0 if saved.get(number) is None else saved[number]
        count = value.numel() if isinstance(value, Tensor) else int(isinstance(value, int | float))
        if count != 1 or not 0 <= float(value) < float("inf"):
            raise ValueError(f"the {number} of parameter {key} is {value!r}, not a number of 0 or more; {DAMAGED}")
    name, present = rule.name, {key.removesuffix(CODES) for key, value in saved.items() if value is not None}
    others = [moment for moment in OWNER_OF_MOMENT if moment in present and moment not in rule.names]
    if others:
        raise ValueError(
            f"the state of parameter {key} has {others[0]}, of {OWNER_OF_MOMENT[others[0]]}, and {name} has "
            f"{', '.join(rule.names) or 'no moments'}; nothing was loaded: load it into an optimizer of that rule"
        )
    missing = [moment for moment in (*rule.names, "step", *rule.numbers) if moment not in present]
    # torch's SGD and Muon do not count steps, and create a missing momentum buffer from the next gradient.
    if missing and name in ("Adam", "ScheduleFreeAdamW"):
        raise ValueError(f"the state of parameter {key} has no {missing[0]}; {DAMAGED}")


# ---- moments ----
# Read moments of a state dict as float32, whichever library wrote them.
#
# torch.optim     float tensors
# torchao.optim   tensor subclasses with `codes` and `dequantize()`, version 0.18
# MS-AMP          objects with `value`, FP8 codes or float16, times `meta.scale_inv` (msamp/optim/adamw.py)
# Quaver          codes and scales in the format of the preset

#: FP8 dtypes of MS-AMP's codes by their integer storage dtype; MS-AMP predates torch's FP8 dtypes.
MSAMP = {torch.uint8: torch.float8_e4m3fn, torch.int8: torch.float8_e5m2}


def spec_of(name: str, saved: Any, scale: Any, spec: StateSpec) -> StateSpec:
    """Return the format of a moment that Quaver wrote: `spec`, or float32 for a small tensor.

    Args:
        name: name of the moment, for the error.
        saved: the moment in the state dict.
        scale: its scales, or None.
        spec: the format of the preset.
    Raises:
        ValueError: the dtype and presence of scales match neither.
    """
    dtype = getattr(saved, "dtype", type(saved).__name__)
    if dtype == codes.code_dtype(spec.of) and spec.of.scaled == (scale is not None):
        return spec
    if dtype is torch.float32 and scale is None:
        return FLOAT32
    raise ValueError(
        f"{name} was saved as {dtype} {'without' if scale is None else 'with'} scales, where its preset "
        f"stores {spec.text} or float32; {DAMAGED}"
    )


def check_scales(name: str, saved: Tensor, scale: Tensor, spec: StateSpec) -> None:
    """Check the shape and dtype of scales against their codes. Raises: ValueError."""
    # How many trailing dimensions are one depends on how the parameter was sharded.
    flat = [layout.flat(saved.shape, num_leading_dims) for num_leading_dims in range(max(saved.dim(), 1))]
    shapes = {codes.scale_shape(shape, spec.block, spec.of.numbers) for shape in flat}
    dtype = codes.SCALE_DTYPES[spec.scale]
    if tuple(scale.shape) not in shapes or scale.dtype != dtype:
        raise ValueError(
            f"{name}_scale has shape {tuple(scale.shape)} and dtype {scale.dtype}; codes {tuple(saved.shape)} of "
            f"{spec.text} need {dtype} scales of shape {' or '.join(map(str, sorted(shapes)))}; {DAMAGED}"
        )


def values(saved: Any, scale: Tensor | None, spec: StateSpec | None) -> Tensor:
    """Return a moment in float32 with the parameter's shape.

    Args:
        saved: the moment in the state dict.
        scale: its scales, if Quaver wrote it as codes.
        spec: its format, if Quaver wrote it; None for another library.
    Raises:
        ValueError: integers or objects that no supported library writes.
    """
    if spec is not None:
        # Blocks may run along several trailing dimensions, which are one dimension of the scales.
        flattened = scale is not None and 0 < scale.dim() < saved.dim()
        data = saved.flatten(scale.dim() - 1) if flattened else saved  # type: ignore[union-attr]
        return codes.decode(data, scale, spec).view(saved.shape)
    meta = getattr(saved, "meta", None)
    if meta is not None and hasattr(meta, "scale_inv"):
        value: Tensor = saved.value
        floats = value.view(MSAMP[value.dtype]) if value.dtype in MSAMP else value
        return floats.float() * meta.scale_inv.float()
    if type(saved) is not Tensor and hasattr(saved, "codes") and hasattr(saved, "dequantize"):
        decoded: Tensor = saved.dequantize()
        return decoded.float()
    if not isinstance(saved, Tensor) or not saved.is_floating_point():
        kind = saved.dtype if isinstance(saved, Tensor) else type(saved).__name__
        raise ValueError(
            f"a moment in the state dict is {kind}, and its group names no preset. Quaver reads states of torch.optim, "
            "torchao.optim, MS-AMP and its own: with another library save them as float32"
        )
    return saved.float()


# ---- conversion ----


def convert_state(
    p: Tensor,
    saved: Mapping[str, Any],
    config: StepConfig,
    saved_config: StepConfig | None,
    saved_format: WeightFormat | None,
    weight: tuple[Tensor, ...],
    device: torch.device,
) -> tuple[dict[str, Tensor], str]:
    """Convert a parameter's state to the formats of this optimizer.

    Args:
        p: the parameter, with its weight already loaded.
        saved: its entry of the state dict.
        config: step configuration of this optimizer for p, with the formats of its states.
        saved_config: the same for the optimizer that wrote the state dict; None for another library's.
        saved_format: format of the weight and its states in the state dict; None for another library's.
        weight: the weight and its scales, as matrices.
        device: device of the states.
    Returns:
        The state, and a warning if a part of it was not saved, else "".
    Raises:
        ValueError: a state of another shape.
    """
    num_leading_dims = layout.num_leading_dims(p, config.rule.needs_matrix)
    saved_moments = {name: saved.get(name + CODES, saved.get(name)) for name in config.rule.names}
    complete = all(moment is not None for moment in saved_moments.values())
    # Moments without a step count were stepped before, so the next step is not the first.
    step = saved.get("step", 1.0) if complete else 0.0
    state = {"step": torch.as_tensor(step, dtype=torch.float32, device="cpu").clone()}
    for name in config.rule.numbers:
        state[name] = torch.as_tensor(saved[name], dtype=torch.float64, device="cpu").clone()
    for index, ((name, moment), spec) in enumerate(zip(saved_moments.items(), config.moments, strict=True)):
        if moment is not None:
            saved_spec = None if saved_config is None else saved_config.moments[index]
            converted = _convert_moment(p, name, moment, saved.get(f"{name}_scale"), spec, saved_spec, num_leading_dims)
            state |= {
                key: layout.like(p, value.to(device, copy=True), shape) for key, (value, shape) in converted.items()
            }
    if saved_format is not None:
        state |= _convert_weight_states(p, saved, config.weight_format, saved_format, weight, device)
    missing = ""
    if config.weight_format.states and config.weight_format.states[0] not in state:
        missing = (
            f"no {config.weight_format.states[0]} was saved for weights that are stored as "
            f"{config.weight_format.kind}: it is created from the weight"
        )
    return state, missing


def _convert_moment(
    p: Tensor, name: str, moment: Any, scale: Any, spec: StateSpec, saved_spec: StateSpec | None, num_leading_dims: int
) -> dict[str, tuple[Tensor, Sequence[int]]]:
    """Convert a moment and its scale to the format `spec`; returns this rank's shard and the whole shape of each by
    their keys in the state.

    Args:
        p: the parameter.
        name: name of the moment.
        moment: the saved moment.
        scale: its saved scale, or None.
        spec: target format.
        saved_spec: its format; None for another library's.
        num_leading_dims: number of leading dimensions of p that form the rows of the matrix which blocks divide.
    """
    moment, scale = layout.local(moment), None if scale is None else layout.local(scale)
    if saved_spec is not None and scale is not None:
        check_scales(name, moment, scale, saved_spec)
    own = layout.local(p)
    local_shape, full_shape = (layout.flat(t.shape, num_leading_dims) for t in (own, p))
    # The same spec has other blocks if other trailing dimensions were flattened.
    converts = saved_spec != spec or (
        scale is not None and scale.shape != codes.scale_shape(local_shape, spec.block, spec.of.numbers)
    )
    if converts:
        moment = values(moment, scale, saved_spec)
    if tuple(moment.shape) != tuple(own.shape):
        raise ValueError(
            f"{name} has shape {tuple(moment.shape)}, and its parameter {tuple(own.shape)}; nothing was loaded: give "
            "the state dict of the same model"
        )
    if converts:
        # Round to nearest: loading must not add noise.
        moment, scale = codes.encode(moment.reshape(local_shape), replace(spec, stochastic=False))
        moment = moment.reshape(own.shape)
    state: dict[str, tuple[Tensor, Sequence[int]]] = {key_of(name, spec): (moment, p.shape)}
    if scale is not None:
        state[f"{name}_scale"] = scale, codes.scale_shape(full_shape, spec.block, spec.of.numbers)
    return state


def _convert_weight_states(
    p: Tensor,
    saved: Mapping[str, Any],
    weight_format: WeightFormat,
    saved_weight_format: WeightFormat,
    weight: tuple[Tensor, ...],
    device: torch.device,
) -> dict[str, Tensor]:
    """Convert the master, remainder or residual of a weight; returns them by name, {} if the state dict has none to
    use.
    """
    if not all(name in saved for name in saved_weight_format.states):
        return {}
    tensors = [layout.local(saved[name]).to(device, copy=True) for name in saved_weight_format.states]
    for name, tensor in zip(saved_weight_format.states[:1], tensors, strict=False):
        if tensor.dtype != saved_weight_format.dtype or tensor.numel() != layout.local(p).numel():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; a parameter of shape "
                f"{tuple(layout.local(p).shape)} needs one in {saved_weight_format.dtype}; {DAMAGED}"
            )
    if (weight_format.kind, weight_format.code_spec) != (saved_weight_format.kind, saved_weight_format.code_spec):
        if not _determines_weight(saved_weight_format, p):
            return {}
        weight = tuple(t.to(device) for t in weight)
        value = master_weights.read(saved_weight_format, (*weight, *(layout.rows(tensor) for tensor in tensors)))
        first = master_weights.first_states(weight_format, layout.local(p), value.view(layout.local(p).shape), device)
        # The loaded weight is unchanged; only its additional states are computed from the value.
        tensors = [*master_weights.around(weight_format, value, (*weight, *(layout.rows(tensor) for tensor in first)))]
    shapes = [t.shape if t.dim() == 0 else p.shape for t in tensors]
    own = layout.local(p).shape
    return {
        name: layout.like(p, t if t.dim() == 0 else t.reshape(own), shape)
        for name, t, shape in zip(weight_format.states, tensors, shapes, strict=True)
    }


def _determines_weight(saved_weight_format: WeightFormat, p: Tensor) -> bool:
    """True if saved states determine the weight in high precision.

    A master does so alone. A remainder or residual extends a weight in bfloat16 or in codes, so p must still be in that
    format.
    """
    return saved_weight_format.master or (saved_weight_format.code_spec is None) == (p.dtype is torch.bfloat16)

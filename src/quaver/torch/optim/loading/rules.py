"""Check that a state dict was written by the same update rule (Adam, Lion, SGD, Muon) and is undamaged."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from quaver.core.states.codes import StateSpec
from quaver.torch.optim.refusals import TORCHS
from quaver.torch.optim.rules import muon
from quaver.torch.optim.rules.rule import Rule

#: Rules of torch.optim by an option that only they have.
RULE_OF_OPTION = {
    **{"adjust_lr_fn": "Muon", "dampening": "SGD", "momentum_decay": "NAdam", "centered": "RMSprop", "rho": "Adadelta"},
    **{"lr_decay": "Adagrad", "lambd": "ASGD", "etas": "Rprop", "beta2_decay": "Adafactor"},
}
#: Optimizers by a key of their states. The first key that the own rule lacks is named in the error.
OWNER_OF_MOMENT = {
    **{"max_exp_avg_sq": "Adam with amsgrad=True", "mu_product": "NAdam", "exp_inf": "Adamax", "row_var": "Adafactor"},
    **{"acc_delta": "Adadelta", "square_avg": "RMSprop", "sum": "Adagrad", "ax": "ASGD", "prev": "Rprop"},
    **{"exp_avg_sq": "Adam", "exp_avg": "Adam or Lion", "momentum_buffer": "SGD or Muon"},
}
#: The suffix of keys of moments stored as codes. torch does not know such keys, so it never reads codes as values.
CODES = "_codes"
#: The end of errors about state dicts that no optimizer writes.
DAMAGED = "nothing was loaded: is the file damaged?"


def key_of(moment: str, spec: StateSpec) -> str:
    """The key of a moment in a parameter's state."""
    return moment + CODES if spec.of.scaled else moment


def check_group(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
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
        raise ValueError(f"the state dict was saved with amsgrad=True; {TORCHS['amsgrad']}")
    # Options of torch's Muon that have one value here.
    fixed = {"ns_steps": 5, "ns_coefficients": muon.COEFFICIENTS} | ({"eps": 1e-7} if "ns_steps" in saved else {})
    for option, value in fixed.items() if ours == "Muon" else ():
        saved_value = saved.get(option, value)
        if (tuple(saved_value) if isinstance(saved_value, list) else saved_value) != value:
            raise ValueError(
                f"the state dict was saved with {option}={saved_value!r}, and Muon has {value!r} here; nothing was "
                "loaded: start without it"
            )


def rule_of(group: Mapping[str, Any]) -> str:
    """The rule that a parameter group belongs to, by its options; "" if they do not tell. AdamW is "Adam"."""
    if group.get("rule") == "adamw":
        return "Adam"
    for option, rule in RULE_OF_OPTION.items():
        if option in group:
            return rule
    return ("Adam" if "eps" in group else "Lion") if "betas" in group else ""


def check_state(key: object, saved: Mapping[str, Any], rule: Rule) -> None:
    """Check a parameter's state of a state dict.

    Args:
        key: of the parameter in the state dict, for the error.
    Raises:
        ValueError: a state of another rule, or a damaged one.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"the state of parameter {key} is of type {type(saved).__name__}, not a dict; {DAMAGED}")
    step = 0.0 if saved.get("step") is None else saved["step"]
    numbers = step.numel() if isinstance(step, Tensor) else int(isinstance(step, int | float))
    if numbers != 1 or not 0 <= float(step) < float("inf"):
        raise ValueError(f"the step of parameter {key} is {step!r}, not a number of steps; {DAMAGED}")
    name, present = type(rule).__name__, {key.removesuffix(CODES) for key, value in saved.items() if value is not None}
    others = [moment for moment in OWNER_OF_MOMENT if moment in present and moment not in rule.names]
    if others:
        raise ValueError(
            f"the state of parameter {key} has {others[0]}, of {OWNER_OF_MOMENT[others[0]]}, and {name} has "
            f"{', '.join(rule.names) or 'no moments'}; nothing was loaded: load it into an optimizer of that rule"
        )
    missing = [moment for moment in (*rule.names, "step") if moment not in present]
    # torch's SGD and Muon do not count steps, and create a missing momentum buffer from the next gradient.
    if missing and name == "Adam":
        raise ValueError(f"the state of parameter {key} has no {missing[0]}; {DAMAGED}")

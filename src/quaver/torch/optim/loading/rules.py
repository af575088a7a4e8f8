"""Which rule wrote a state dict, and whether another one can go on from it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quaver.core.states.codes import StateSpec
from quaver.torch.optim.refusals import TORCHS
from quaver.torch.optim.rules import muon
from quaver.torch.optim.rules.rule import Rule

#: Options that one rule of torch.optim has alone.
OPTIONS = {
    **{"adjust_lr_fn": "Muon", "dampening": "SGD", "momentum_decay": "NAdam", "centered": "RMSprop", "rho": "Adadelta"},
    **{"lr_decay": "Adagrad", "lambd": "ASGD", "etas": "Rprop", "beta2_decay": "Adafactor"},
}
#: What rules keep beside the moments that Adam, Lion, SGD and Muon have.
MOMENTS = {
    **{"max_exp_avg_sq": "Adam with amsgrad=True", "mu_product": "NAdam", "exp_inf": "Adamax", "row_var": "Adafactor"},
    **{"acc_delta": "Adadelta", "square_avg": "RMSprop", "sum": "Adagrad", "ax": "ASGD", "prev": "Rprop"},
    **{"exp_avg_sq": "Adam", "exp_avg": "Adam or Lion", "momentum_buffer": "SGD or Muon"},
}
#: Of moments that are codes: under keys that torch does not use, so that it does not take codes for numbers.
CODES = "_codes"
#: How an error about a state dict that no optimizer writes ends.
DAMAGED = "nothing was loaded: is the file damaged?"


def key_of(moment: str, spec: StateSpec) -> str:
    """What a moment is called in a parameter's state."""
    return moment + CODES if spec.of.scaled else moment


def check_group(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a group of another rule, and options that are not honoured or no numbers. Raises: ValueError."""
    for option, value in saved.items():
        mine = own.get(option)
        pair = option == "betas" and not (isinstance(value, tuple | list) and len(value) == 2)
        if pair or (type(mine) is float and not isinstance(value, Tensor | int | float)):
            raise ValueError(f"{option} of the state dict is {value!r}, and here {mine!r}; {DAMAGED}")
    theirs, ours = rule_of(saved), rule_of(own)
    if theirs and theirs != ours:
        raise ValueError(
            f"the state dict is that of {theirs}, and this optimizer is {ours}, which has other moments; nothing was "
            f"loaded: load it into {theirs}, or begin anew"
        )
    if saved.get("amsgrad"):
        raise ValueError(f"the state dict was saved with amsgrad=True; {TORCHS['amsgrad']}")
    fixed = {"ns_steps": 5, "ns_coefficients": muon.COEFFICIENTS} | ({"eps": 1e-7} if "ns_steps" in saved else {})
    for option, value in fixed.items() if ours == "Muon" else ():
        given = saved.get(option, value)
        if (tuple(given) if isinstance(given, list) else given) != value:
            raise ValueError(f"the state dict was saved with {option}={given!r}, and Muon has {value!r} here")


def rule_of(group: Mapping[str, Any]) -> str:
    """The rule that a parameter group's options name; "" if they do not. Adam and AdamW have the same states."""
    if group.get("rule") == "adamw":
        return "Adam"
    for option, rule in OPTIONS.items():
        if option in group:
            return rule
    return ("Adam" if "eps" in group else "Lion") if "betas" in group else ""


def check_state(key: object, saved: Mapping[str, Any], rule: Rule) -> None:
    """Refuse a parameter's state that is another rule's, or damaged. Raises: ValueError.

    Args:
        key: of the parameter in the state dict.
    """
    if not isinstance(saved, Mapping):
        raise ValueError(f"the state of parameter {key} is of type {type(saved).__name__}, not a dict; {DAMAGED}")
    step = 0.0 if saved.get("step") is None else saved["step"]
    numbers = torch.as_tensor(step).numel() if isinstance(step, Tensor | int | float) else 0
    if numbers != 1 or not 0 <= float(step) < float("inf"):
        raise ValueError(f"the step of parameter {key} is {step!r}, not a number of steps; {DAMAGED}")
    name, held = type(rule).__name__, {key.removesuffix(CODES) for key, value in saved.items() if value is not None}
    others = [moment for moment in MOMENTS if moment in held and moment not in rule.names]
    if others:
        raise ValueError(
            f"the state of parameter {key} has {others[0]}, of {MOMENTS[others[0]]}, and {name} has "
            f"{', '.join(rule.names) or 'no moments'}; nothing was loaded: load it into an optimizer of that rule"
        )
    missing = [moment for moment in (*rule.names, "step") if moment not in held]
    # torch's SGD and Muon count no steps, and a buffer that is not there begins with the next gradient.
    if missing and name == "Adam":
        raise ValueError(f"the state of parameter {key} has no {missing[0]}; {DAMAGED}")

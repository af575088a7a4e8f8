"""Names of exported experts for model families whose checkpoints store all experts of a layer as one tensor.

Checkpoints of most families have a tensor for each expert, and transformers splits its stacks when it saves them. For
the other families `STACKS` says under which names servers read quantized experts, as found in the servers' source code.
Export refuses quantized experts of a family that is in neither group.
"""

from collections.abc import Mapping
from typing import NamedTuple

#: {suffix of a stack's name in the checkpoint: suffixes of the layers that an expert's rows are split into equally}.
#: "{}" is replaced by the number of the expert.
SplitNames = Mapping[str, tuple[str, ...]]

_GATE_UP: SplitNames = {
    ".experts.gate_up_proj": (".experts.{}.gate_proj", ".experts.{}.up_proj"),
    ".experts.down_proj": (".experts.{}.down_proj",),
}
_GRANITE: SplitNames = {
    ".input_linear.weight": (".experts.{}.gate_proj", ".experts.{}.up_proj"),
    ".output_linear.weight": (".experts.{}.down_proj",),
}


class ServedExperts(NamedTuple):
    """Names and format in which servers read the quantized experts of a model family."""

    #: The names of each expert's layers; None if servers read one tensor for all experts, in format "mxfp4".
    split: SplitNames | None
    #: The servers, and the file or pull request in which this was found.
    source: str


#: By `config.model_type` of transformers.
STACKS: dict[str, ServedExperts] = {
    "gpt_oss": ServedExperts(None, "vLLM and SGLang, models/gpt_oss.py; transformers, integrations/mxfp4.py"),
    "granitemoe": ServedExperts(_GRANITE, "SGLang, pull request 37679"),
    "granitemoehybrid": ServedExperts(_GRANITE, "vLLM, models/granitemoehybrid.py: get_expert_mapping"),
    **dict.fromkeys(
        ("llama4", "llama4_text"), ServedExperts(_GATE_UP, "vLLM, models/llama4.py: make_expert_params_mapping")
    ),
    **dict.fromkeys(
        ("qwen3_5_moe", "qwen3_5_moe_text"), ServedExperts(_GATE_UP, "vLLM, models/qwen3_5.py: get_expert_mapping")
    ),
}


def expert_layers(family: str, key: str) -> tuple[str, ...]:
    """Return the names of the layers that servers read for one expert of a stack.

    Args:
        family: `config.model_type`.
        key: the name of the stack in the checkpoint.
    Returns:
        Names with "{}" for the number of the expert, in the order of the expert's rows; () if servers do not read this
        stack split by expert.
    """
    served = STACKS.get(family)
    for suffix, names in ((served and served.split) or {}).items():
        if key.endswith(suffix):
            return tuple(key.removesuffix(suffix) + name for name in names)
    return ()

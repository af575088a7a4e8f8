"""Experts that a family's checkpoints hold as one tensor: under which names servers read their codes.

Most families have a tensor for each expert there, and transformers cuts its stacks apart. For the others this table
says what was found in sources of servers; codes of a family without a row are refused.
"""

from collections.abc import Mapping
from typing import NamedTuple

#: By the end of the name of a stack in the checkpoint: the layers of expert {}, with equal parts of its rows, in order.
Pieces = Mapping[str, tuple[str, ...]]

_SPLIT: Pieces = {
    ".experts.gate_up_proj": (".experts.{}.gate_proj", ".experts.{}.up_proj"),
    ".experts.down_proj": (".experts.{}.down_proj",),
}
_GRANITE: Pieces = {
    ".input_linear.weight": (".experts.{}.gate_proj", ".experts.{}.up_proj"),
    ".output_linear.weight": (".experts.{}.down_proj",),
}


class Served(NamedTuple):
    """How servers read the experts of a family."""

    #: None: as one tensor, in format "mxfp4".
    pieces: Pieces | None
    #: Servers, and where it was read.
    source: str


#: By `model_type`.
STACKS: dict[str, Served] = {
    "gpt_oss": Served(None, "vLLM and SGLang, models/gpt_oss.py; transformers, integrations/mxfp4.py"),
    "granitemoe": Served(_GRANITE, "SGLang, pull request 37679"),
    "granitemoehybrid": Served(_GRANITE, "vLLM, models/granitemoehybrid.py: get_expert_mapping"),
    **dict.fromkeys(("llama4", "llama4_text"), Served(_SPLIT, "vLLM, models/llama4.py: make_expert_params_mapping")),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), Served(_SPLIT, "vLLM, models/qwen3_5.py: get_expert_mapping")),
}


def layers_of(served: Served, key: str) -> tuple[str, ...]:
    """The names of the layers of expert {} that a stack of this name in a checkpoint becomes; none if it has no row."""
    for end, names in (served.pieces or {}).items():
        if key.endswith(end):
            return tuple(key.removesuffix(end) + name for name in names)
    return ()

"""Which module of a layer does what, by the names that families of transformers give them."""

import re

from torch import nn

from quaver.torch.model.reach.transposed import is_transposed

#: Ends of a path inside of a layer; the first that fits decides.
ROLES: dict[str, re.Pattern[str]] = {
    role: re.compile(rf"(?:^|\.)(?:{names})$")
    for role, names in {
        "qkv": "qkv_proj|query_key_value|Wqkv|c_attn|qkv",
        "q": "q_proj|query|q_lin|q",
        "k": "k_proj|key|k_lin|k",
        "v": "v_proj|value|v_lin|v",
        "o": r"o_proj|out_proj|out_lin|SelfAttention\.o|attn\.c_proj|attention\.output\.dense"
        r"|(?:self_|)att(?:ention|n)\.dense",
        "q_down": "q_a_proj",
        "q_up": "q_b_proj",
        "kv_down": "kv_a_proj_with_mqa|kv_a_proj",
        "kv_up": "kv_b_proj",
        "gate_up": "gate_up_proj",
        "gate": "gate_proj|wi_0",
        "up": r"up_proj|wi_1|wi|fc1|fc_in|lin1|mlp\.c_fc|dense_h_to_4h|intermediate\.dense",
        "down": r"down_proj|wo|fc2|fc_out|lin2|mlp\.c_proj|dense_4h_to_h|output\.dense",
    }.items()
}
#: Where a layer attends to something else than its input.
CROSS = re.compile(r"(^|\.)(encoder_attn|crossattention|cross_attn|EncDecAttention)(\.|$)")
#: What stands where an MLP would.
MLPS = re.compile(r"^(mlp|feed_forward|ffn|moe|block_sparse_moe)$")
#: What a mixture of experts holds.
EXPERTS = re.compile(r"expert|router", re.IGNORECASE)


def roles_of(layer: nn.Module) -> dict[str, str]:
    """The name of the module for each role there is; "mixture" is a mixture of experts.

    Raises:
        ValueError: cross attention, or two modules of one role.
    """
    roles: dict[str, str] = {}
    mixture = next((name for name, child in layer.named_children() if MLPS.match(name) and _has_experts(child)), None)
    for name, module in layer.named_modules():
        if CROSS.search(name):
            raise ValueError(f"{name} attends to a memory, which is not read yet; make a TransformerLayer by hand")
        if mixture is not None and f"{name}.".startswith(f"{mixture}."):
            continue
        if not isinstance(module, nn.Linear) and not is_transposed(module):
            continue
        role = next((role for role, names in ROLES.items() if names.search(name)), None)
        if role is None:
            continue
        if role in roles:
            raise ValueError(
                f"{roles[role]} and {name} both look like a layer's {role!r}; make a TransformerLayer by hand"
            )
        roles[role] = name
    return roles if mixture is None else roles | {"mixture": mixture}


def is_norm(module: nn.Module) -> bool:
    """True for what is a norm by its class's name."""
    return "norm" in type(module).__name__.lower() and not module._modules


def _has_experts(module: nn.Module) -> bool:
    return any(EXPERTS.search(name) for name, _ in module.named_children())

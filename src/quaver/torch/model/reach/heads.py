"""Which layers are output heads: they make logits, and published recipes leave them in high precision.

Sources: DeepSeek-V3 (arXiv:2412.19437, section 3.3.1) and NVIDIA's NVFP4 pre-training (arXiv:2509.25149).
"""

from collections.abc import Iterator

from torch import nn

#: What heads are called that nothing else tells, by the last part of the name; their rows are an embedding's.
NAMES = {
    "lm_head",
    "head",
    "output",
    "output_layer",
    "output_projection",
    "embed_out",
    "unembed",
    "to_logits",
    "logits",
}

LEFT = "the output head stays in high precision; convert(..., head=True) or a rule that names it converts it"


def output_heads(model: nn.Module) -> set[nn.Module]:
    """The linear layers that a model names its output embeddings, that share an embedding's weight, or that have a
    head's name and as many outputs as an embedding has rows."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    tied, rows = {id(m.weight) for m in embeddings}, {m.num_embeddings for m in embeddings}
    heads = set(_named(model))
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not model:
            by_name = name.rpartition(".")[2] in NAMES and module.out_features in rows
            if by_name or id(module._parameters.get("weight")) in tied:
                heads.add(module)
    return heads


def _named(model: nn.Module) -> Iterator[nn.Module]:
    """What models of transformers answer."""
    for module in model.modules():
        ask = getattr(type(module), "get_output_embeddings", None)
        if ask is None:
            continue
        try:
            head = ask(module)
        except (AttributeError, NotImplementedError):
            # It has none, and says so in its way.
            continue
        if isinstance(head, nn.Module):
            yield from (part for part in head.modules() if isinstance(part, nn.Linear))

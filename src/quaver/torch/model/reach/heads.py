"""Which layers are output heads: they make logits, and published recipes leave them in high precision.

Sources: DeepSeek-V3 (arXiv:2412.19437, section 3.3.1) and NVIDIA's NVFP4 pre-training (arXiv:2509.25149).
"""

from collections import Counter

from torch import nn

#: What heads are called that nothing else tells, by the last part of the name; their rows are the vocabulary's.
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
    """The linear layers that a model names its output embeddings, and those that share an embedding's weight.

    Where it names none, also the one that alone has a head's name, with as many outputs as the vocabulary has rows.
    """
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not model}
    answers = _answers(model, "get_output_embeddings")
    heads: set[nn.Module] = {part for head in answers for part in head.modules() if isinstance(part, nn.Linear)}
    if not answers:
        often, rows = Counter(map(_last, linear)), _vocabularies(model)
        for name, module in linear.items():
            if _last(name) in NAMES and often[_last(name)] == 1 and module.out_features in rows:
                heads.add(module)
    return heads | {module for module in linear.values() if id(module._parameters.get("weight")) in tied}


def _vocabularies(model: nn.Module) -> set[int]:
    """Rows of the tables that a model names its input embeddings; without an answer of all that hold no positions."""
    tables = [m for m in _answers(model, "get_input_embeddings") if isinstance(m, nn.Embedding)]
    if not tables:
        named = [(_last(name), m) for name, m in model.named_modules() if isinstance(m, nn.Embedding)]
        tables = [m for last, m in named if "pos" not in last and last != "wpe"]
    return {table.num_embeddings for table in tables}


def _answers(model: nn.Module, method: str) -> list[nn.Module]:
    """What the modules that have such a method, as models of transformers do, answer."""
    answers = []
    for module in model.modules():
        ask = getattr(type(module), method, None)
        if ask is None:
            continue
        try:
            answer = ask(module)
        except Exception:
            # It has none, and each says so in its way.
            continue
        if isinstance(answer, nn.Module):
            answers.append(answer)
    return answers


def _last(name: str) -> str:
    return name.rpartition(".")[2]

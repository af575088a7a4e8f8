"""Which layers stay in high precision unless a rule names them: output heads, and adapters of PEFT.

Heads make logits, and published recipes leave them out; adapters are few, and are trained beside a base that is not.

Sources: DeepSeek-V3 (arXiv:2412.19437, section 3.3.1), NVIDIA's NVFP4 pre-training (arXiv:2509.25149), and QLoRA
(arXiv:2305.14314, section 3), whose adapters are in bfloat16 over a base of four bits.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

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

#: The attribute by which PEFT's layers name their adapters.
ADAPTERS = "adapter_layer_names"
ADAPTER = "an adapter of PEFT stays in high precision; a rule that names it converts it"


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


def wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """PEFT's layers around a layer of the model, by the attributes that all of them have."""
    for module in model.modules():
        if isinstance(getattr(type(module), ADAPTERS, None), tuple) and "base_layer" in module._modules:
            yield module


def adapter_layers(model: nn.Module) -> set[nn.Module]:
    """All modules inside of those that PEFT's layers name their adapters."""
    layers: set[nn.Module] = set()
    for wrapper in wrappers(model):
        names: Any = getattr(type(wrapper), ADAPTERS)
        held = [wrapper._modules.get(name) for name in names]
        layers.update(part for adapter in held if adapter is not None for part in adapter.modules())
    return layers

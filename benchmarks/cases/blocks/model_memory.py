"""Bytes that autograd keeps of a Hugging Face Llama between forward and backward, as `convert` leaves it.

Every tensor saved for backward is seen by `torch.autograd.graph.saved_tensors_hooks`; each storage counts once,
parameters do not count.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import quaver.torch as qt
from benchmarks.cases.linear.memory import SAVING
from benchmarks.measuring.figure import Case, Figure, NotMeasurable, Target, at_most
from benchmarks.subjects import peer

#: Features, of the MLP too, layers, batch and tokens.
SIZE, QUICK_SIZE = (512, 1408, 4, 4, 256), (128, 256, 1, 2, 64)
#: Highest shares of the bf16 model's bytes.
BY_TENSOR, BY_BLOCKS = at_most(93.0), at_most(93.5)
TARGETS = dict.fromkeys(("tensorwise", "delayed"), BY_TENSOR) | dict.fromkeys(
    ("rowwise", "blockwise", "mxfp8"), BY_BLOCKS
)
#: With blocks in place: norms and MLPs; and all that there is.
IN_PLACE = {"blocks": qt.Blocks(), "all blocks": qt.Blocks(loss=True, eight_bit_activations=True)}
OF_BLOCKS = dict.fromkeys(TARGETS, at_most(65.0)) | dict.fromkeys(("tensorwise", "delayed"), at_most(60.0))
OF_ALL = dict.fromkeys(("tensorwise", "delayed"), at_most(50.0))
HEAD = "lm_head"


def llama(features: int, hidden: int, layers: int) -> nn.Module:
    """In bf16, of random weights, 64 features a head, two heads on one of keys."""
    try:
        with peer.silence():
            from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise NotMeasurable(f"not measurable here: {error}; pip install 'transformers>=5'") from error
    heads = {"num_attention_heads": features // 64, "num_key_value_heads": features // 128}
    sizes = {"hidden_size": features, "intermediate_size": hidden, "num_hidden_layers": layers, "vocab_size": 2048}
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=512))
    return model.to(torch.bfloat16)


def kept(model: nn.Module, tokens: Tensor) -> int:
    """Bytes of one forward."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    # Held until they are counted: an address that is used again would count once.
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    assert loss.requires_grad
    return sum(t.untyped_storage().nbytes() for address, t in storages.items() if address not in parameters)


def measure(quick: bool) -> list[Figure]:
    """The shares, judged unless quick."""
    features, hidden, layers, batch, length = QUICK_SIZE if quick else SIZE
    base = llama(features, hidden, layers)
    tokens = torch.randint(0, 2048, (batch, length), generator=torch.Generator().manual_seed(1))
    plain = kept(base, tokens)
    figures = row("bf16", plain, plain)
    for name in peer.RECIPES:
        converted = peer.convert(copy.deepcopy(base), name, skip=HEAD)
        figures += row(f"torchao {name}", kept(converted, tokens), plain)
    for name in SAVING:
        model = copy.deepcopy(base)
        qt.convert(model, name, skip=[HEAD])
        figures += row(f"quaver {name}", kept(model, tokens), plain, None if quick else TARGETS.get(name))
    for subject, blocks in IN_PLACE.items():
        targets = OF_ALL if blocks.loss else OF_BLOCKS
        for name in ("bf16", *SAVING):
            model = copy.deepcopy(base)
            qt.convert(model, name, skip=[HEAD], blocks=blocks)
            target = None if quick else targets.get(name)
            figures += row(f"quaver {name}, {subject}", kept(model, tokens), plain, target)
    return figures


def row(subject: str, count: int, base: int, target: Target | None = None) -> list[Figure]:
    return [Figure(subject, "kept", count / 2**20, "MiB"), Figure(subject, "of bf16", 100 * count / base, "%", target)]


CASE = Case(
    name="memory-llama",
    title="Activation bytes saved for backward: a Hugging Face Llama, eager",
    notes=(
        f"transformers' LlamaForCausalLM in bf16, {SIZE[2]} layers of {SIZE[0]} features, MLP {SIZE[1]}, 2048 words, "
        f"{SIZE[3]} sequences of {SIZE[4]} tokens, converted but for its head; q, k and v quantize their input once, "
        "and so do gate and up. Norms, activations and attention are transformers' own and keep what they keep, "
        "but in the rows of blocks: there norms and MLPs are computed in place (`blocks=True`), and in those of all "
        "blocks the head with its loss too, with eight-bit activations. Each storage saved for backward counts once, "
        "parameters apart."
    ),
    measure=measure,
)

"""Bytes that autograd keeps of a Hugging Face Llama between forward and backward, as `convert` leaves it.

Every tensor saved for backward is seen by `torch.autograd.graph.saved_tensors_hooks`; each storage counts once,
parameters do not count.
"""

import copy

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import quaver.torch as qt
from benchmarks.cases.linear.memory import SAVING
from benchmarks.measuring.figure import Case, Figure, Target, at_most
from benchmarks.subjects import peer
from benchmarks.subjects.llama import HEAD, IN_PLACE, QUICK_SIZE, SIZE, llama, loss_of, texts

#: Highest shares of the bf16 model's bytes.
BY_TENSOR, BY_BLOCKS = at_most(93.0), at_most(93.5)
TARGETS = dict.fromkeys(("tensorwise", "delayed"), BY_TENSOR) | dict.fromkeys(
    ("rowwise", "blockwise", "mxfp8"), BY_BLOCKS
)
OF_BLOCKS = dict.fromkeys(TARGETS, at_most(65.0)) | dict.fromkeys(("tensorwise", "delayed"), at_most(60.0))
#: Under which blocks are put in place when it is quick: scales of a tensor, of a row and of a block, and a history.
QUICK_RECIPES = "tensorwise", "delayed", "rowwise", "mxfp8"
OF_ALL = dict.fromkeys(("tensorwise", "delayed"), at_most(50.0))


def kept(model: nn.Module, tokens: Tensor) -> int:
    """Bytes of one forward."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    # Held until they are counted: an address that is used again would count once.
    storages: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, tokens)
    assert loss.requires_grad
    return sum(t.untyped_storage().nbytes() for address, t in storages.items() if address not in parameters)


def measure(quick: bool) -> list[Figure]:
    """The shares, judged unless quick."""
    features, hidden, layers, batch, length = QUICK_SIZE if quick else SIZE
    base = llama(features, hidden, layers)
    (tokens,) = texts(1, batch, length)
    plain = kept(base, tokens)
    figures = row("bf16", plain, plain)
    for name in peer.RECIPES:
        converted = peer.convert(copy.deepcopy(base), name, skip=HEAD)
        figures += row(f"torchao {name}", kept(converted, tokens), plain)
    for name in SAVING:
        model = copy.deepcopy(base)
        qt.convert(model, name, skip=[HEAD])
        figures += row(f"quaver {name}", kept(model, tokens), plain, None if quick else TARGETS.get(name))
    for subject, blocks in list(IN_PLACE.items())[1:]:
        targets = OF_ALL if blocks.loss else OF_BLOCKS
        for name in ("bf16", *(QUICK_RECIPES if quick else SAVING)):
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

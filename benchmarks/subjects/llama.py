"""A Hugging Face Llama with random weights: plain, with other libraries' layers, converted, with replaced blocks."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import quaver.torch as qt
from benchmarks.measuring.figure import NotMeasurable
from benchmarks.subjects import peer

#: Features, of the MLP too, layers, batch and tokens.
SIZE, QUICK_SIZE = (512, 1408, 4, 4, 256), (128, 256, 1, 2, 16)
HEAD, WORDS = "lm_head", 2048
PLAIN = "bf16"
#: Recipes that the rows of steps have.
RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8")
#: Arguments `in_place` of `convert` by name of the row: norms and MLPs, or everything.
IN_PLACE: dict[str, Any] = {
    "": False,
    "blocks": qt.Blocks(),
    "all blocks": qt.Blocks(loss=True, eight_bit_activations=True),
}


def llama(features: int, hidden: int, layers: int) -> nn.Module:
    """Return a Llama in bf16 with random weights, 64 features per head and two query heads per key head."""
    try:
        with peer.silence():
            from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise NotMeasurable(f"not measurable here: {error}; pip install 'transformers>=5'") from error
    heads = {"num_attention_heads": features // 64, "num_key_value_heads": features // 128}
    sizes = {"hidden_size": features, "intermediate_size": hidden, "num_hidden_layers": layers, "vocab_size": WORDS}
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=512))
    return model.to(torch.bfloat16)


def texts(count: int, batch: int, length: int) -> list[Tensor]:
    """Return batches of random tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (batch, length), generator=generator) for _ in range(count)]


@dataclass(frozen=True)
class Subject:
    """A conversion of the plain model."""

    shown: str
    of: Callable[[Any], Any]
    #: Recipe of our conversion, and a key of `IN_PLACE`.
    recipe: str = ""
    blocks: str = ""

    @property
    def alone(self) -> str:
        """Name of the row of the same recipe without blocks, or ""."""
        return f"quaver {self.recipe}" if self.blocks and self.recipe != PLAIN else ""

    def reason_unsupported(self) -> str:
        """Return why a step of another library does not run on a CPU, or ""."""
        if self.recipe or self.shown == PLAIN:
            return ""
        model = self.of(llama(*QUICK_SIZE[:3]))
        try:
            loss_of(model, texts(1, 1, 8)[0]).backward()
        except Exception as error:
            return f"does not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return ""


def subjects(recipes: Sequence[str] = RECIPES) -> Iterator[Subject]:
    """transformers' own first; then peers, ours as `convert` leaves it, and ours with blocks in place."""
    yield Subject(PLAIN, lambda model: model)
    for name in peer.RECIPES:
        yield Subject(f"torchao {name}", lambda model, name=name: peer.convert(model, name, skip=HEAD))
    with contextlib.suppress(ImportError):
        yield Subject("liger", _liger())
    for blocks in IN_PLACE:
        for recipe in (PLAIN, *recipes) if blocks else recipes:
            yield Subject(f"quaver {recipe}" + f", {blocks}" * bool(blocks), _ours(recipe, blocks), recipe, blocks)


def _liger() -> Callable[[Any], Any]:
    """Return Liger's conversion. Raises: ImportError if it is not installed, or needs what this machine lacks."""
    with peer.silence():
        from liger_kernel.transformers import apply_liger_kernel_to_llama

    def of(model: Any) -> Any:
        apply_liger_kernel_to_llama(model=model)
        return model

    return of


def _ours(recipe: str, blocks: str) -> Callable[[Any], Any]:
    def of(model: Any) -> Any:
        qt.convert(model, recipe, skip=[HEAD], blocks=IN_PLACE[blocks])
        return model

    return of


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def gradients(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return all gradients of a step as one float32 vector."""
    model.zero_grad()
    loss_of(model, tokens).backward()
    parts = [parameter.grad.float().flatten() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return torch.cat(parts)


def copied(base: nn.Module, subject: Subject) -> nn.Module:
    model: nn.Module = subject.of(copy.deepcopy(base))
    return model

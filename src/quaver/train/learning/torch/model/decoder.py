"""A decoder of the library's own blocks: Llama, Gemma 2, Mixtral, DeepSeek, Mamba-2 or another, as its config says.

Embedding, head and routers stay in high precision; the layers' matrices are `quaver.torch.Linear`, with queries, keys,
values, gate and value apart, so that JAX's decoder has the same names and quantizes the same operands; those of experts
are `quaver.torch.GroupedLinear`.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quaver.torch as qt
from quaver.core.converting.conversion import Report
from quaver.core.spec import Recipe
from quaver.torch.blocks.experts.routing import Routing
from quaver.torch.blocks.prologues.norm import Norm
from quaver.torch.linear.stored import storing
from quaver.train.configuration import optimizer_name
from quaver.train.configuration.config import TrainConfig
from quaver.train.configuration.parameter_table import initial, padded
from quaver.train.configuration.sizes import ModelConfig
from quaver.train.learning.torch.model.caches import Caches
from quaver.train.learning.torch.model.layers import layer_of, rope_of

Routings = tuple[Routing, ...]


class Decoder(nn.Module):
    """Token ids [B, S] to logits [B, S, vocab], or to their loss; its parameters are float32, on the default device."""

    def __init__(self, config: ModelConfig, vocab: int, recompute: str = "none") -> None:
        super().__init__()
        self.config = config
        self.embedding: Any = nn.Embedding(vocab, config.dim, device=None, dtype=torch.float32)
        rope = rope_of(config)
        self.layers = nn.ModuleList(layer_of(config, number, rope, recompute) for number in range(config.layers))
        self.norm: Any = Norm(
            config.normalization, config.dim, config.eps, zero_centered=config.zero_centered, dtype=torch.float32
        )
        self.head: nn.Linear | None = None
        if not config.tied:
            self.head = nn.Linear(config.dim, vocab, bias=False, device=None, dtype=torch.float32)

    def forward(
        self,
        ids: Tensor,
        cache: Caches | None = None,
        targets: Tensor | None = None,
        chunk: int | None = None,
        with_routings: bool = False,
    ) -> Any:
        """With a cache, the ids are the tokens after those that it holds, which it takes up. With targets [B, S] the
        result is their mean cross-entropy, for which the logits of `chunk` tokens exist at once; with_routings it is
        (that, the `Routing` of each layer of experts). A stage of a pipeline takes [B, S, dim] for the ids where it has
        no embedding, and gives that where it has no norm and head."""
        x = ids if self.embedding is None else self.embedding(ids)
        if self.config.scaled_embedding and self.embedding is not None:
            x = x * self.config.dim**0.5
        routings = []
        for number, layer in enumerate(self.layers):
            x = layer(x) if cache is None else layer(x, **cache.of(number))
            if isinstance(x, tuple):
                x, routing = x
                routings.append(routing)
        x = self._end(x, targets, chunk)
        return (x, tuple(routings)) if with_routings else x

    def _end(self, x: Tensor, targets: Tensor | None, chunk: int | None) -> Tensor:
        """Logits or their loss, of what the last layer gives."""
        if self.norm is None:
            return x
        x = self.norm(x)
        if targets is not None:
            head = self.embedding if self.head is None else self.head
            return qt.linear_cross_entropy(x, head, targets, soft_cap=self.config.logit_cap, chunk=chunk)
        logits: Tensor = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        cap = self.config.logit_cap
        return logits if cap is None else cap * torch.tanh(logits.float() / cap)


def build(config: ModelConfig, vocab: int, seed: int, device: torch.device, recompute: str = "none") -> Decoder:
    """A decoder with the initial weights of `quaver.train.configuration.parameter_table`."""
    with torch.device(device):
        model = Decoder(config, padded(vocab), recompute)
    with torch.no_grad():
        for name, value in initial(config, vocab, seed):
            model.get_parameter(name).copy_(torch.from_numpy(value))
    return model


def quantize_layers(model: Decoder, recipe: Recipe, seed: int) -> Report:
    """Give matrices and attention of the layers a recipe; embedding and head stay as they are."""
    return qt.convert(model, recipe, skip=["head"] if model.head is not None else [], seed=seed)


def change_layers(model: Decoder, recipe: Recipe, seed: int) -> Report:
    """`quantize_layers` where another recipe was in force: what that has recorded is dropped, without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "convert gives .* another recipe", UserWarning)
        return quantize_layers(model, recipe, seed)


def prepare(model: Decoder, recipe: Recipe, config: TrainConfig, codes: bool, in_parts: bool = False) -> Report:
    """`quantize_layers`, and the weights in the form in which the run's optimizer keeps them.

    Args:
        codes: as `Chosen.weights` takes it.
        in_parts: whether fully_shard will divide the model, which gives gradients of codes the dtype that these stand
            for.
    """
    report = quantize_layers(model, recipe, config.seed)
    chosen = optimizer_name.find(config.optimizer)
    if chosen.weights(recipe, config.dtype, codes) == "codes":
        assert chosen.preset is not None
        for name in report.converted:
            layer, spec = model.get_submodule(name), storing.weight_spec(recipe)
            assert spec is not None
            # What is kept beside the codes begins at the value that they were made of.
            storing.store(layer, spec, keep_initial=True)
            if in_parts and chosen.preset.gradient == "bfloat16":
                layer.bfloat16()
    if chosen.others(config.dtype) == "bfloat16":
        for module in model.modules():
            if isinstance(module, nn.Linear | qt.GroupedLinear) and module.weight.dtype is torch.float32:
                module.weight = nn.Parameter(module.weight.detach().bfloat16())
    return report


def loss_of(
    model: nn.Module,
    batch: Tensor,
    dtype: str,
    chunk: int = 0,
    cut: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
) -> Tensor:
    """Mean cross-entropy in nats a token, in float32, of batch int64 [B, S + 1].

    Args:
        chunk: tokens whose logits exist at once; 0 makes those of all.
        cut: gives of [B, S] the tokens that the model is given here.
    """
    return mean_loss(model, cut(batch[:, :-1]), cut(batch[:, 1:]), dtype, chunk)


def loss_and_routings(model: nn.Module, batch: Tensor, dtype: str, chunk: int = 0) -> tuple[Tensor, Routings]:
    """`loss_of` a batch, and how its tokens chose experts, layer by layer."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        x, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        given = {"targets": targets, "chunk": chunk} if chunk else {}
        result, routings = model(x, with_routings=True, **given)
    return (result if chunk else _cross_entropy(result, targets)), routings


def mean_loss(model: nn.Module, x: Tensor, targets: Tensor, dtype: str, chunk: int) -> Tensor:
    """`loss_of` the tokens x [B, S], or of what the stage before gave, and those that follow each of them."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        if chunk:
            loss: Tensor = model(x, targets=targets, chunk=chunk)
            return loss
        logits = model(x)
    return _cross_entropy(logits, targets)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

"""The decoder under PyTorch: its layers, caches, loss, and balancing of experts."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quaver.torch as qt
from quaver.recipes.conversion import ConversionReport
from quaver.recipes.spec import Recipe
from quaver.torch.linear import stored_weight
from quaver.torch.linear.linear import Quantizable
from quaver.torch.nn.attention.kv_cache import KVCache, PagedKVCache
from quaver.torch.nn.attention.latent import LatentConfig
from quaver.torch.nn.attention.rope import RotaryEmbedding
from quaver.torch.nn.moe.layers import MixtureConfig, MoE
from quaver.torch.nn.moe.routing import Routing, balance_loss, token_counts, z_loss
from quaver.torch.nn.norm import NormKind
from quaver.torch.nn.ssm.mamba2 import Mamba2Layer, StateCache
from quaver.torch.nn.transformer import TransformerLayer
from quaver.train import config as optimizer_name
from quaver.train import config as recipe_name
from quaver.train.config import TrainConfig
from quaver.train.memory import initial_values, padded
from quaver.train.model_config import ExpertSizes, ModelConfig

# ---- caches ----
# Caches for generation: keys and values of attention layers, and states of state-space layers.

#: Tokens per page.
PAGE = 16


class DecoderCaches:
    """One cache for each kind of layer that a model has.

    Args:
        config: architecture of the model.
        kind: "plain" or "paged".
        capacity: maximum number of tokens.
    """

    def __init__(self, config: ModelConfig, kind: str, capacity: int) -> None:
        attention, states = config.numbers("attention", "experts"), config.numbers("state", "state-mlp")
        self._places: dict[int, dict[str, Any]] = {}
        if attention:
            layers = len(attention)
            paged = kind == "paged"
            keys = PagedKVCache(layers, -(-capacity // PAGE), PAGE) if paged else KVCache(layers, capacity)
            self._places |= {number: {"cache": keys, "layer": place} for place, number in enumerate(attention)}
        if states:
            state = StateCache(len(states))
            self._places |= {number: {"cache": state, "layer": place} for place, number in enumerate(states)}

    def of(self, number: int) -> dict[str, Any]:
        """Return the cache arguments for a layer's forward."""
        return self._places[number]


# ---- layers ----

#: Fields with the same name in a configuration and in all layers, in attention layers, and in layers without latent
#: attention.
SAME = ("activation", "normalization", "eps", "zero_centered", "bias")
OF_ATTENTION = ("norm_position", "parallel", "scale", "soft_cap")
OF_HEADS = ("groups", "head_dim", "qk_norm")


def rope_of(config: ModelConfig) -> RotaryEmbedding | None:
    """Return the rotary embedding shared by all layers, or None if the model has none."""
    if not config.rotates or not config.numbers("attention", "experts"):
        return None
    return RotaryEmbedding(
        config.head_dim if config.latent is None else config.latent.rope_dim,
        theta=config.theta,
        fraction=config.fraction,
        scaling=dict(config.scaling) or None,
        max_positions=config.positions,
    )


def layer_of(config: ModelConfig, number: int, rope: RotaryEmbedding | None, recompute: str) -> nn.Module:
    """Create a layer of the decoder with float32 parameters."""
    kind = config.kind(number)
    if kind in ("state", "state-mlp"):
        return _state(config, config.hidden if kind == "state-mlp" else None, recompute)
    names = SAME + OF_ATTENTION + (OF_HEADS if config.latent is None else ())
    options: dict[str, Any] = {name: getattr(config, name) for name in names}
    if config.latent is not None:
        sizes = config.latent
        options["latent"] = LatentConfig(
            q_rank=sizes.q_rank,
            kv_rank=sizes.kv_rank,
            plain_dim=sizes.plain_dim,
            rope_dim=sizes.rope_dim,
            value_dim=sizes.value_dim,
        )
    experts = config.experts if kind == "experts" else None
    return TransformerLayer(
        config.dim,
        config.heads,
        config.hidden if experts is None else experts.hidden,
        mixture=None if experts is None else mixture_of(experts),
        mask_type="causal",
        window=config.window(number),
        fused=False,
        rope=rope,
        recompute=None if recompute == "none" else recompute,
        dtype=torch.float32,
        **options,
    )


def mixture_of(experts: ExpertSizes) -> MixtureConfig:
    """Return the routing options of a layer of experts."""
    return MixtureConfig(
        experts=experts.number,
        k=experts.chosen,
        scores=experts.scores,
        groups=experts.groups,
        top_groups=experts.top_groups,
        best_of_group=experts.best_of_group,
        scale=experts.scale,
        balance_bias=experts.bias_rate > 0,
        shared=experts.shared,
        shared_fused=False,
        capacity=experts.capacity or None,
        return_routing=True,
    )


def _state(config: ModelConfig, hidden: int | None, recompute: str) -> Mamba2Layer:
    sizes = config.state
    assert sizes is not None
    same: dict[str, Any] = {name: getattr(config, name) for name in SAME}
    return Mamba2Layer(
        config.dim,
        hidden=hidden,
        inner=sizes.inner,
        head_dim=sizes.head_dim,
        state=sizes.state,
        groups=sizes.groups,
        taps=sizes.taps,
        fused=False,
        recompute="full" if recompute == "full" else None,
        dtype=torch.float32,
        **same,
    )


# ---- decoder ----
# A decoder of the library's own blocks: Llama, Gemma 2, Mixtral, DeepSeek, Mamba-2 or others, depending on its config.
#
# Embedding, head and routers stay in high precision. The layers' matrices are `quaver.torch.Linear`, unfused (queries,
# keys, values, gate and up), so that JAX's decoder has the same names and quantizes the same operands. Experts are
# `quaver.torch.GroupedLinear`.

Routings = tuple[Routing, ...]


class Decoder(nn.Module):
    """Decoder from token ids [B, S] to logits [B, S, vocab] or their loss; float32 parameters on the default device."""

    def __init__(self, config: ModelConfig, vocab: int, recompute: str = "none") -> None:
        super().__init__()
        self.config = config
        self.embedding: Any = nn.Embedding(vocab, config.dim, device=None, dtype=torch.float32)
        rope = rope_of(config)
        self.layers = nn.ModuleList(layer_of(config, number, rope, recompute) for number in range(config.layers))
        self.norm: Any = NormKind(
            config.normalization, config.dim, config.eps, zero_centered=config.zero_centered, dtype=torch.float32
        )
        self.head: nn.Linear | None = None
        if not config.tied:
            self.head = nn.Linear(config.dim, vocab, bias=False, device=None, dtype=torch.float32)

    def forward(
        self,
        ids: Tensor,
        cache: DecoderCaches | None = None,
        targets: Tensor | None = None,
        chunk: int | None = None,
        with_routings: bool = False,
    ) -> Any:
        """Compute logits, or the loss if targets are given.

        Args:
            ids: token ids [B, S]; for a pipeline stage without embedding, the previous stage's output [B, S, dim].
            cache: caches of earlier tokens, which are updated; None for none.
            targets: next tokens [B, S]; the result is then their mean cross-entropy.
            chunk: number of tokens whose logits exist at once for the loss.
            with_routings: also return the `Routing` of each layer of experts.
        Returns:
            Logits [B, S, vocab] or the loss; [B, S, dim] for a pipeline stage without norm and head; with_routings:
            (that, routings).
        """
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
        """Return logits or their loss from the last layer's output."""
        if self.norm is None:
            return x
        x = self.norm(x)
        if targets is not None:
            head = self.embedding if self.head is None else self.head
            return qt.linear_cross_entropy(x, head, targets, soft_cap=self.config.logit_cap, chunk=chunk)
        logits: Tensor = F.linear(x, self.embedding.weight) if self.head is None else self.head(x)
        cap = self.config.logit_cap
        return logits if cap is None else cap * torch.tanh(logits.float() / cap)


def build_decoder(
    config: ModelConfig, vocab: int, seed: int, device: torch.device, recompute: str = "none", nudge: float = 0.0
) -> Decoder:
    """Create a decoder with the initial weights of `quaver.train.memory`."""
    with torch.device(device):
        model = Decoder(config, padded(vocab), recompute)
    with torch.no_grad():
        for name, value in initial_values(config, vocab, seed, nudge):
            model.get_parameter(name).copy_(torch.from_numpy(value))
    return model


def quantize_layers(model: Decoder, recipe: Recipe, seed: int) -> ConversionReport:
    """Apply a recipe to matrices and attention of the layers; embedding and head are unchanged."""
    return qt.convert(model, recipe, skip=["head"] if model.head is not None else [], seed=seed)


def change_layers(model: Decoder, recipe: Recipe, seed: int) -> ConversionReport:
    """`quantize_layers` for a model with another recipe, whose state is dropped without a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "convert changes the recipe of .* drops the state", UserWarning)
        return quantize_layers(model, recipe, seed)


def convert_decoder(
    model: Decoder, recipe: Recipe, config: TrainConfig, codes: bool, in_parts: bool = False
) -> ConversionReport:
    """Call `quantize_layers`, and convert the weights to the storage that the run's optimizer uses.

    Args:
        model: the decoder.
        recipe: recipe of the layers.
        config: options of the run.
        codes: as in `OptimizerChoice.weights`.
        in_parts: fully_shard will shard the model; it gives gradients of codes the dtype that the codes represent.
    Returns:
        The report of the conversion.
    """
    report = quantize_layers(model, recipe, config.seed)
    chosen = optimizer_name.find_optimizer(config.optimizer)
    if chosen.weights(recipe, config.dtype, codes) == "codes":
        assert chosen.preset is not None
        for name in report.converted:
            layer, spec = model.get_submodule(name), stored_weight.weight_spec(recipe)
            assert spec is not None
            # Masters or residuals start from the value before quantization.
            stored_weight.store(layer, spec, keep_initial=True)
            if in_parts and chosen.preset.gradient == "bfloat16":
                layer.bfloat16()
    if chosen.others(config.dtype) == "bfloat16":
        for module in model.modules():
            stored = isinstance(module, Quantizable) and module.weight_spec is not None
            if isinstance(module, nn.Linear | qt.GroupedLinear) and module.weight.dtype is torch.float32 and not stored:
                module.weight = nn.Parameter(module.weight.detach().bfloat16())
    return report


def loss_of(
    model: nn.Module,
    batch: Tensor,
    dtype: str,
    chunk: int = 0,
    cut: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
) -> Tensor:
    """Return the mean cross-entropy in nats per token, in float32, of a batch int64 [B, S + 1].

    Args:
        model: the decoder.
        batch: token ids.
        dtype: "bfloat16" for autocast, or "float32".
        chunk: number of tokens whose logits exist at once; 0 for all.
        cut: selects this rank's tokens of a [B, S] tensor.
    """
    return mean_loss(model, cut(batch[:, :-1]), cut(batch[:, 1:]), dtype, chunk)


def loss_and_routings(model: nn.Module, batch: Tensor, dtype: str, chunk: int = 0) -> tuple[Tensor, Routings]:
    """Return the loss of a batch as in `loss_of`, and the routing of each layer of experts."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        x, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        loss_arguments = {"targets": targets, "chunk": chunk} if chunk else {}
        result, routings = model(x, with_routings=True, **loss_arguments)
    return (result if chunk else _cross_entropy(result, targets)), routings


def mean_loss(model: nn.Module, x: Tensor, targets: Tensor, dtype: str, chunk: int) -> Tensor:
    """`loss_of` from tokens x [B, S], or the previous stage's output, and the next tokens."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
        if chunk:
            loss: Tensor = model(x, targets=targets, chunk=chunk)
            return loss
        logits = model(x)
    return _cross_entropy(logits, targets)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


# ---- balancing of experts ----

#: Columns in `Balance.sums` besides the choices per expert: dropped choices, balance loss, z loss.
OTHERS = 3


class Balance:
    """Balances the load of experts by losses and by a bias, over the micro-batches of a step.

    Args:
        model: decoder with the same layers on all ranks.
        experts: sizes and weights of the losses.
        mean: averages a tensor over ranks with different tokens; None for a single process.
        ranks: number of these ranks.
    """

    def __init__(
        self, model: nn.Module, experts: ExpertSizes, mean: Callable[[Tensor], Tensor] | None = None, ranks: int = 1
    ) -> None:
        mixtures = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
        self.experts, self.mixtures, self.ranks = experts, [*mixtures.values()], ranks
        #: Index of each layer of experts.
        self.layers = [int(name.split(".")[1]) for name in mixtures]
        self.mean: Callable[[Tensor], Tensor] = (lambda value: value) if mean is None else mean
        device = self.mixtures[0].router.weight.device
        #: Choices per expert and the further columns by layer, summed over micro-batches.
        self.sums = torch.zeros((len(mixtures), experts.number + OTHERS), dtype=torch.float64, device=device)
        self.micro_batches = 0

    def begin(self) -> None:
        """Reset at the start of a step."""
        self.sums.zero_()
        self.micro_batches = 0

    def loss(self, routings: Routings, sequences: int) -> Tensor:
        """Return the balance losses of a micro-batch, averaged over layers, and record its statistics.

        Args:
            routings: routing of each layer of experts.
            sequences: number of sequences among this rank's tokens.
        """
        own = self.experts
        counts = torch.stack([token_counts(each.indices, own.number) for each in routings])
        # Averaged over ranks: the loss then equals that of one process with the whole batch.
        shares = self.mean(counts.to(torch.float64))
        total = torch.zeros((), dtype=torch.float32, device=counts.device)
        for layer, (routing, mixture) in enumerate(zip(routings, self.mixtures, strict=True)):
            if own.by_sequence:
                balance = balance_loss(routing, sequences=sequences)
            else:
                balance = balance_loss(routing, counts=shares[layer])
            z = z_loss(routing)
            total = total + own.balance * balance + own.z * z
            capacity = mixture.mixture.capacity_of(routing.indices.shape[0])
            dropped = counts.new_zeros(()) if capacity is None else (counts[layer] - capacity).clamp(min=0).sum()
            others = torch.stack([dropped.to(torch.float64), balance.detach().double(), z.detach().double()])
            self.sums[layer] += torch.cat([counts[layer].to(torch.float64), others])
        self.micro_batches += 1
        return total / len(routings)

    @torch.no_grad()
    def end(self, finite: Tensor) -> Tensor:
        """Update biases after a step if its numbers were finite; returns the input of `extra_metrics`, float32 [n]."""
        totals = self.mean(self.sums.clone())
        number, parts = self.experts.number, self.ranks
        totals[:, : number + 1] = (totals[:, : number + 1] * parts).round()
        totals[:, number + 1 :] /= self.micro_batches
        if self.experts.bias_rate:
            for layer, mixture in enumerate(self.mixtures):
                mixture.router.update_bias(totals[layer, :number] * finite, self.experts.bias_rate)
        return totals.float().flatten()

    def extra_metrics(self, numbers: list[float]) -> dict[str, float]:
        """Return the entries for a step's metrics from the result of `end`."""
        number = self.experts.number
        rows = [numbers[first : first + number + OTHERS] for first in range(0, len(numbers), number + OTHERS)]
        choices = sum(sum(row[:number]) for row in rows)
        busiest = max(max(row[:number]) * number / sum(row[:number]) for row in rows)
        extra_metrics: dict[str, float] = {
            "balance_loss": sum(row[number + 1] for row in rows) / len(rows),
            "z_loss": sum(row[number + 2] for row in rows) / len(rows),
            "dropped": sum(row[number] for row in rows) / choices,
            "busiest": round(busiest, 4),
        }
        for layer, row in zip(self.layers, rows, strict=True):
            extra_metrics |= {f"load_{layer}_{expert}": int(load) for expert, load in enumerate(row[:number])}
        return extra_metrics


def bf16_copy(model: Decoder, seed: int) -> Decoder | None:
    """Return a copy of the model under bf16, to compare routing; None if weights exist only as codes."""
    if any(stored_weight.holds_codes(p) for p in model.parameters()):
        return None
    plain = copy.deepcopy(model).eval()
    change_layers(plain, recipe_name.find_recipe("bf16"), seed)
    return plain


def count_different_choices(left: Routings, right: Routings) -> tuple[int, int]:
    """Return how many choices of experts differ between two routings of the same tokens, and how many there are."""
    differ = choices = 0
    for one, other in zip(left, right, strict=True):
        chosen = [
            torch.zeros_like(each.logits, dtype=torch.bool).scatter(1, each.indices, True) for each in (one, other)
        ]
        differ += int((chosen[0] & ~chosen[1]).sum())
        choices += one.indices.numel()
    return differ, choices

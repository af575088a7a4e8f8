"""What keeps a model's experts evenly busy in training, and what is said of them, step by step.

Losses that are added to the cross-entropy, and a bias that is moved after each step.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from quaver.torch.blocks.experts.balancing import balance_loss, token_counts, z_loss
from quaver.torch.blocks.experts.mixture import MoE
from quaver.torch.linear.stored import storing
from quaver.train.configuration import recipe_name
from quaver.train.configuration.sizes import ExpertSizes
from quaver.train.learning.torch.model.decoder import Decoder, Routings, change_layers

#: Of a layer and step, beside how many choices each expert has: dropped choices, balance loss, z loss.
OTHERS = 3


class Balance:
    """The experts of a model, over the micro-batches of a step.

    Args:
        model: with the same layers on all ranks.
        experts: how they are kept busy.
        mean: the mean of a tensor over ranks that have other tokens, and how many those are; None of one process.
    """

    def __init__(
        self, model: nn.Module, experts: ExpertSizes, mean: Callable[[Tensor], Tensor] | None = None, ranks: int = 1
    ) -> None:
        mixtures = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
        self.experts, self.mixtures, self.ranks = experts, [*mixtures.values()], ranks
        #: The number of each layer of experts.
        self.layers = [int(name.split(".")[1]) for name in mixtures]
        self.mean: Callable[[Tensor], Tensor] = (lambda value: value) if mean is None else mean
        device = self.mixtures[0].router.weight.device
        #: By layer the choices of each expert, and `OTHERS`, added up over micro-batches.
        self.sums = torch.zeros((len(mixtures), experts.number + OTHERS), dtype=torch.float64, device=device)
        self.micro_batches = 0

    def begin(self) -> None:
        """Forget the step before."""
        self.sums.zero_()
        self.micro_batches = 0

    def loss(self, routings: Routings, sequences: int) -> Tensor:
        """What is added to the cross-entropy of a micro-batch, the mean of the layers', and take it into account.

        Args:
            sequences: that the tokens of this rank are.
        """
        own = self.experts
        counts = torch.stack([token_counts(each.indices, own.number) for each in routings])
        # Of all ranks' tokens: the loss is then that of one process with the whole batch.
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
        """Move biases after a step, if its numbers were finite; returns what `said` reads, float32 of one axis."""
        of_all = self.mean(self.sums.clone())
        number, parts = self.experts.number, self.ranks
        of_all[:, : number + 1] = (of_all[:, : number + 1] * parts).round()
        of_all[:, number + 1 :] /= self.micro_batches
        if self.experts.bias_rate:
            for layer, mixture in enumerate(self.mixtures):
                mixture.router.update_bias(of_all[layer, :number] * finite, self.experts.bias_rate)
        return of_all.float().flatten()

    def said(self, numbers: list[float]) -> dict[str, float]:
        """What stands in the metrics of a step, of what `end` gave."""
        number = self.experts.number
        rows = [numbers[first : first + number + OTHERS] for first in range(0, len(numbers), number + OTHERS)]
        choices = sum(sum(row[:number]) for row in rows)
        busiest = max(max(row[:number]) * number / sum(row[:number]) for row in rows)
        said: dict[str, float] = {
            "balance_loss": sum(row[number + 1] for row in rows) / len(rows),
            "z_loss": sum(row[number + 2] for row in rows) / len(rows),
            "dropped": sum(row[number] for row in rows) / choices,
            "busiest": round(busiest, 4),
        }
        for layer, row in zip(self.layers, rows, strict=True):
            said |= {f"load_{layer}_{expert}": int(load) for expert, load in enumerate(row[:number])}
        return said


def in_bf16(model: Decoder, seed: int) -> Decoder | None:
    """The same weights under bf16, to compare choices with; None of weights that are codes alone."""
    if any(storing.holds_codes(p) for p in model.parameters()):
        return None
    plain = copy.deepcopy(model).eval()
    change_layers(plain, recipe_name.find("bf16"), seed)
    return plain


def differing(left: Routings, right: Routings) -> tuple[int, int]:
    """How many choices of experts one routing has that another of the same tokens has not, and how many there are."""
    differ = choices = 0
    for one, other in zip(left, right, strict=True):
        chosen = [
            torch.zeros_like(each.logits, dtype=torch.bool).scatter(1, each.indices, True) for each in (one, other)
        ]
        differ += int((chosen[0] & ~chosen[1]).sum())
        choices += one.indices.numel()
    return differ, choices

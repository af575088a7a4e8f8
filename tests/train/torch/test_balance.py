"""Test expert balancing and its counts against a manual computation."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quaver import recipes
from quaver.torch.nn.moe.routing import Routing, balance_loss, route, token_counts, z_loss
from quaver.train.model_config import MODELS, ModelConfig
from quaver.train.torch.decoder import (
    Balance,
    Decoder,
    bf16_copy,
    build_decoder,
    count_different_choices,
    loss_and_routings,
    quantize_layers,
)

CPU = torch.device("cpu")


def small(name: str, capacity: float = 0.0) -> ModelConfig:
    config = replace(MODELS[name], layers=2)
    assert config.experts is not None
    return replace(config, experts=replace(config.experts, capacity=capacity))


def routed(config: ModelConfig, batches: int = 2) -> tuple[Decoder, list[tuple[Routing, ...]]]:
    model = build_decoder(config, 256, 0, CPU)
    ids = torch.randint(0, 256, (batches, 3, 17), generator=torch.Generator().manual_seed(0))
    return model, [loss_and_routings(model, batch, "float32")[1] for batch in ids]


@pytest.mark.parametrize("name", ["mixtral-tiny", "deepseek-tiny"])
def test_the_loss_is_the_weighted_mean_of_the_layers(name: str) -> None:
    config = small(name)
    model, (routings, _) = routed(config)
    own = config.experts
    assert own is not None and len(routings) == len(config.numbers("experts"))
    sequences = 3 if own.by_sequence else 1
    expected = [own.balance * balance_loss(r, sequences=sequences) + own.z * z_loss(r) for r in routings]
    loss = Balance(model, own).loss(routings, 3)
    torch.testing.assert_close(loss, sum(expected, torch.zeros(())) / len(expected), rtol=1e-6, atol=0)
    loss.backward()
    router = model.layers[config.numbers("experts")[0]].mlp.router
    assert router.weight.grad is not None and router.weight.grad.abs().sum() > 0


def test_a_step_counts_all_micro_batches_and_dropped_tokens() -> None:
    config = small("mixtral-tiny", capacity=1.0)
    model, batches = routed(config)
    assert config.experts is not None
    balance = Balance(model, config.experts)
    balance.begin()
    for routings in batches:
        balance.loss(routings, 3)
    extra_metrics = balance.extra_metrics(balance.end(torch.ones(())).tolist())
    tokens, k, number = 3 * 16, config.experts.chosen, config.experts.number
    dropped = 0
    for layer in range(2):
        counts = [token_counts(routings[layer].indices, number) for routings in batches]
        assert [extra_metrics[f"load_{layer}_{e}"] for e in range(number)] == (counts[0] + counts[1]).tolist()
        assert sum(counts).sum() == 2 * tokens * k
        dropped += sum(int((c - tokens * k // number).clamp(min=0).sum()) for c in counts)
    assert dropped > 0 and extra_metrics["dropped"] == pytest.approx(dropped / (2 * 2 * tokens * k))
    losses = [balance_loss(r).item() for routings in batches for r in routings]
    assert extra_metrics["balance_loss"] == pytest.approx(sum(losses) / 4)
    balance.begin()
    balance.loss(batches[0], 3)
    again = balance.extra_metrics(balance.end(torch.ones(())).tolist())
    assert sum(again[f"load_0_{e}"] for e in range(number)) == tokens * k


@pytest.mark.parametrize("finite", [True, False])
def test_biases_move_once_a_step_and_not_where_it_was_not_finite(finite: bool) -> None:
    config = small("deepseek-tiny")
    model, batches = routed(config)
    assert config.experts is not None
    balance = Balance(model, config.experts)
    balance.begin()
    for routings in batches:
        balance.loss(routings, 3)
    balance.end(torch.tensor(float(finite)))
    counts = sum(token_counts(routings[0].indices, config.experts.number) for routings in batches)
    assert isinstance(counts, Tensor)
    moved = config.experts.bias_rate * torch.sign(counts.double().mean() - counts)
    bias = model.layers[1].mlp.router.balance
    torch.testing.assert_close(bias, moved.float() * finite)
    assert bool(bias.any()) is finite


def test_choices_that_differ_are_counted() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    other = torch.tensor([[2.0, 3.0, 1.0, 0.0], [2.5, 1.0, 2.0, 3.0]])
    one, two = route(logits, 2), route(other, 2)
    assert count_different_choices((one,), (one,)) == (0, 4)
    # The first token chooses the same experts in another order, the second one another.
    assert count_different_choices((one, one), (two, one)) == (1, 8)


def test_a_bf16_model_has_the_same_weights_and_leaves_the_quantized_one_unchanged() -> None:
    config = small("mixtral-tiny")
    model = build_decoder(config, 256, 0, CPU)
    quantize_layers(model, recipes.get("delayed"), 0)
    ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
    loss_and_routings(model, ids, "float32")[0].backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = bf16_copy(model, 0)
    assert plain is not None and not plain.training and model.training
    with torch.no_grad():
        loss, routings = loss_and_routings(plain, ids, "float32")
        expected, wanted = loss_and_routings(build_decoder(config, 256, 0, CPU), ids, "float32")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert count_different_choices(routings, wanted)[0] == 0
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)

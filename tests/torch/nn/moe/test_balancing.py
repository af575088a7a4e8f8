"""Losses that balance experts, and the bias that does without one: formulas token by token, transformers' own."""

from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from tests.close import assert_bitwise, assert_close


def drawn(tokens: int = 48, experts: int = 6) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))


def by_hand(routing: qt.Routing, tokens: Tensor) -> Tensor:
    """The loss of these tokens, with every share counted."""
    indices, probabilities = routing.indices[tokens], routing.probabilities[tokens].double()
    experts = probabilities.shape[1]
    shares = [(indices == e).sum() / indices.numel() for e in range(experts)]
    return torch.stack([experts * share * probabilities[:, e].mean() for e, share in enumerate(shares)]).sum()


@pytest.mark.parametrize("sequences", [1, 2, 8])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_balance_losses_are_means_over_sequences(scores: str, sequences: int) -> None:
    routing = qt.route(drawn(), 2, scores=scores)
    every = torch.arange(48).chunk(sequences)
    expected = torch.stack([by_hand(routing, tokens) for tokens in every]).mean()
    assert_close("loss", qt.balance_loss(routing, sequences=sequences), expected, 1e-6)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("offset", [40.0, -60.0, -200.0, -1000.0])
def test_a_balance_loss_and_its_gradient_do_not_vanish_with_the_scores(scores: str, offset: float) -> None:
    spread = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grads, losses = [], []
    for dtype in (torch.float32, torch.float64):
        # The same numbers in both: multiples of 2^-10 near -1000 are float32's.
        logits = ((spread * 64).round() / 64 + offset).to(dtype).requires_grad_()
        routing = qt.route(logits, 2, scores=scores)
        assert_close("sums", routing.probabilities.detach().sum(1), torch.ones(64), 1e-6)
        loss = qt.balance_loss(routing)
        loss.backward()
        losses.append(loss.item())
        grads.append(logits.grad)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[1] > 0.5
    assert_close("gradient", grads[0], grads[1], 1e-4)
    if offset < 0:  # At 40 scores hardly change with the logits.
        assert grads[0].abs().max() > 1e-4


def test_masked_tokens_do_not_count() -> None:
    routing = qt.route(drawn(), 2)
    mask = torch.rand(48, generator=torch.Generator().manual_seed(1)) < 0.6
    assert_close("loss", qt.balance_loss(routing, mask=mask), by_hand(routing, mask.nonzero()[:, 0]), 1e-6)
    selected = routing.logits[mask]
    assert_close("z", qt.z_loss(routing, mask), selected.double().logsumexp(-1).square().mean(), 1e-6)
    assert qt.token_counts(routing.indices, 6, mask).tolist() == qt.token_counts(routing.indices[mask], 6).tolist()
    assert qt.balance_loss(routing, mask=torch.zeros(48, dtype=torch.bool)) == 0
    broken = routing._replace(probabilities=routing.probabilities.masked_fill(~mask[:, None], torch.nan))
    assert_bitwise(qt.balance_loss(broken, mask=mask), qt.balance_loss(routing, mask=mask))


def test_even_choices_of_even_probabilities_cost_1() -> None:
    even = torch.eye(6).repeat(4, 1) * 100
    assert_close("loss", qt.balance_loss(qt.route(even, 1)), torch.tensor(1.0), 1e-6)
    one = torch.zeros(24, 6).index_fill(1, torch.tensor(0), 100.0)
    assert_close("loss", qt.balance_loss(qt.route(one, 1)), torch.tensor(6.0), 1e-6)


def test_gradients_match_finite_differences() -> None:
    logits = drawn(12).double().requires_grad_()
    mask = torch.rand(12, generator=torch.Generator().manual_seed(1)) < 0.7

    def losses(z: Tensor) -> tuple[Tensor, ...]:
        softmax, sigmoid = qt.route(z, 2), qt.route(z, 2, scores="sigmoid")
        return qt.balance_loss(softmax, sequences=3), qt.balance_loss(sigmoid, mask=mask), qt.z_loss(softmax, mask)

    assert torch.autograd.gradcheck(losses, (logits,))


def test_counts_of_all_ranks_balance_a_batch_in_parts() -> None:
    logits = drawn()
    whole = qt.balance_loss(qt.route(logits, 2))
    counts = qt.token_counts(qt.route(logits, 2).indices, 6)
    parts = [qt.balance_loss(qt.route(part, 2), counts=counts) for part in logits.chunk(4)]
    assert_close("mean of the parts", torch.stack(parts).mean(), whole, 1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_k_times_the_loss_matches_transformers(masked: bool) -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = drawn().requires_grad_()
    mask = (torch.rand(4, 12, generator=torch.Generator().manual_seed(1)) < 0.7) if masked else None
    theirs = mixtral.load_balancing_loss_func((logits,), 6, 2, mask)
    ours = 2 * qt.balance_loss(qt.route(logits, 2), mask=None if mask is None else mask.reshape(-1))
    assert_close("loss", ours, theirs, 1e-6)
    (a,), (b,) = torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits)
    assert_close("gradient", a, b, 1e-6)


def test_a_bias_moves_towards_even_choices() -> None:
    bias = torch.zeros(4)
    qt.update_bias(bias, torch.tensor([9, 3, 0, 4]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.5, 0.0]
    # Beyond 2^24, where float32 knows no odd numbers.
    qt.update_bias(bias, torch.tensor([(1 << 25) + 1, 1 << 25, 1 << 25, (1 << 25) - 1]), 0.5)
    assert bias.tolist() == [-1.0, 0.5, 0.5, 0.5]


def test_a_bias_balances_without_a_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    tilt, bias = torch.linspace(-1, 1, 8), torch.zeros(8)
    unevenness = []
    for _ in range(300):
        routing = qt.route(torch.randn(256, 8, generator=generator) + tilt, 2, scores="sigmoid", bias=bias)
        counts = qt.token_counts(routing.indices, 8)
        unevenness.append(float(counts.max() / 64))
        qt.update_bias(bias, counts, 3e-3)
    assert sum(unevenness[:10]) / 10 > 1.8 and sum(unevenness[-50:]) / 50 < 1.25, unevenness[::30]


BAD: dict[str, tuple[Any, str]] = {
    "sequences": (lambda r: qt.balance_loss(r, sequences=5), "5 sequences do not divide 48 tokens"),
    "mask": (lambda r: qt.balance_loss(r, mask=torch.ones(4, 12, dtype=torch.bool)), r"mask is bool \[48\]"),
    "mask of numbers": (lambda r: qt.z_loss(r, torch.ones(48)), r"mask is bool \[48\]"),
    "counts": (lambda r: qt.balance_loss(r, counts=torch.ones(5)), "counts apply to the whole batch"),
    "counts of sequences": (
        lambda r: qt.balance_loss(r, sequences=2, counts=torch.ones(6)),
        "counts apply to the whole",
    ),
    "bias": (lambda r: qt.update_bias(torch.zeros(6), torch.ones(5)), "of the same experts"),
    "narrow bias": (lambda r: qt.update_bias(torch.zeros(6).bfloat16(), torch.ones(6)), "use float32"),
}


@pytest.mark.parametrize("name", BAD)
def test_mismatched_inputs_are_refused(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(qt.route(drawn(), 2))

"""Who goes to which expert: the reference, transformers' own routers, and what no router should trip over."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.reference import moe as reference
from quaver.torch.nn.moe.routing import SCORES, best
from tests.close import assert_bitwise, assert_close

GROUPS: tuple[dict[str, Any], ...] = ({}, {"groups": 4, "top_groups": 2}, {"groups": 2, "top_groups": 1})


def _options() -> list[dict[str, Any]]:
    """Every combination that is one."""
    rows = []
    for scores, groups, biased in itertools.product(SCORES, GROUPS, (False, True)):
        for first, normalize in itertools.product((False, True), (None, True, False)):
            if first and scores != "softmax":
                continue
            if scores == "softmax" and not first and normalize is False:
                continue
            rows.append({"scores": scores, "softmax_first": first, "normalize": normalize, "biased": biased} | groups)
    return rows


@pytest.mark.parametrize("k", [1, 3, 8])
def test_choices_weights_and_probabilities_are_the_references(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    for experts, tokens in ((16, 33), (64, 7)):
        logits = torch.randn(tokens, experts, generator=generator)
        bias = torch.randn(experts, generator=generator) * 0.1
        for options in _options():
            options = dict(options)
            own = {"bias": bias} if options.pop("biased") else {}
            if options.get("groups") and k > options["top_groups"] * experts // options["groups"]:
                continue
            routing = qt.route(logits, k, scale=1.5, **options, **own)
            expected = reference.route(
                logits.numpy(), k, scale=1.5, **options, **{n: b.numpy() for n, b in own.items()}
            )
            assert routing.indices.tolist() == expected.indices.tolist(), options
            assert_close(f"weights {options}", routing.weights, expected.weights, 1e-6)
            assert_close(f"probabilities {options}", routing.probabilities, expected.probabilities, 1e-6)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_computed_with_in_float32(scores: str, dtype: torch.dtype) -> None:
    logits = torch.randn(9, 8).to(dtype)
    for a, b in zip(qt.route(logits, 2, scores=scores), qt.route(logits.float(), 2, scores=scores), strict=True):
        assert_bitwise(a, b)
    with torch.autocast("cpu"):
        for a, b in zip(qt.route(logits, 2, scores=scores), qt.route(logits.float(), 2, scores=scores), strict=True):
            assert_bitwise(a, b)


def test_gradients_match_finite_differences() -> None:
    logits = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(8, dtype=torch.float64)
    for options in _options():
        options = dict(options)
        own = {"bias": bias} if options.pop("biased") else {}

        def weights(z: Tensor, options: Any = options, own: Any = own) -> tuple[Tensor, Tensor]:
            return qt.route(z, 2, scale=0.7, **options, **own)[1:3]

        assert torch.autograd.gradcheck(weights, (logits,)), options


def test_far_logits_have_finite_gradients() -> None:
    for scores in SCORES:
        logits = torch.tensor([[-500.0, -90.0, -41.0, -39.0, 0.0, 90.0, -torch.inf]], requires_grad=True)
        routing = qt.route(logits, 6, scores=scores)
        (routing.weights.square().sum() + routing.probabilities[:, 2:4].sum()).backward()
        assert logits.grad is not None and logits.grad.isfinite().all(), (scores, logits.grad)


def test_the_softplus_square_root_is_continuous_between_its_formulas() -> None:
    z = torch.linspace(-60, 20, 4001)
    exact = torch.nn.functional.softplus(z.double()).sqrt()
    assert ((SCORES["sqrtsoftplus"](z).double() - exact).abs() <= 3e-7 * exact).all()


def test_of_equal_scores_the_lower_number_is_chosen() -> None:
    assert qt.route(torch.zeros(2, 8), 3).indices.tolist() == [[0, 1, 2]] * 2
    assert qt.route(torch.tensor([[1.0, -0.0, 0.0, 1.0]]), 4).indices.tolist() == [[0, 3, 1, 2]]
    biased = qt.route(torch.zeros(1, 4), 2, scores="sigmoid", bias=torch.tensor([0.0, 1.0, 1.0, 0.0]))
    assert biased.indices.tolist() == [[1, 2]]
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 3e38])
    drawn = values[torch.randint(0, len(values), (200, 12), generator=torch.Generator().manual_seed(0))]
    for x in (drawn, drawn.double(), drawn.bfloat16()):
        expected = [reference.descending(row)[:5] for row in x.float().numpy()]
        assert best(x, 5).tolist() == expected


def test_nan_stays_with_its_token_and_chooses_experts_that_exist() -> None:
    logits = torch.randn(4, 6)
    logits[1] = torch.nan
    logits[2, 4] = torch.nan
    logits[3, 5] = torch.inf
    for scores in SCORES:
        routing = qt.route(logits, 2, scores=scores)
        assert routing.indices.min() >= 0 and routing.indices.max() < 6
        assert routing.indices[1].tolist() == [0, 1] and routing.indices[2, 0] == 4 and routing.indices[3, 0] == 5
        assert routing.weights[0].isfinite().all() and routing.weights[1:3].isnan().all()
    one = qt.route(logits, 2, scores="sigmoid", normalize=False).weights
    assert one[2].isnan().tolist() == [True, False]


def test_no_tokens_and_all_experts() -> None:
    empty = qt.route(torch.empty(0, 4), 2)
    assert empty.indices.shape == empty.weights.shape == (0, 2) and empty.probabilities.shape == (0, 4)
    every = qt.route(torch.randn(3, 4), 4)
    assert every.indices.sort(-1)[0].tolist() == [[0, 1, 2, 3]] * 3
    assert_close("sums", every.weights.sum(-1), torch.ones(3), 1e-6)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "more than there are": ({"k": 9}, "k is 9, and there are 8 experts"),
    "none": ({"k": 0}, "k is 0"),
    "a float": ({"k": 2.0}, "k is 2.0; give a whole number"),
    "a flag": ({"k": True}, "k is True; give a whole number"),
    "scores": ({"k": 2, "scores": "sigmoit"}, "did you mean 'sigmoid'"),
    "groups that do not divide": ({"k": 2, "groups": 3, "top_groups": 1}, "3 groups do not divide 8 experts"),
    "one of two": ({"k": 2, "groups": 4}, "groups and top_groups together"),
    "more groups than there are": ({"k": 2, "groups": 4, "top_groups": 5}, "top_groups is 5 of 4"),
    "too few in the groups": ({"k": 3, "groups": 4, "top_groups": 1}, "fewer than the 3"),
    "best of more": ({"k": 4, "groups": 4, "top_groups": 2, "best_of_group": 3}, "has 2 experts"),
    "best of no group": ({"k": 2, "best_of_group": 1}, "give groups and top_groups"),
    "bias": ({"k": 2, "scores": "sigmoid", "bias": torch.zeros(7)}, "one number for each of the 8"),
    "softmax first": ({"k": 2, "scores": "sigmoid", "softmax_first": True}, "softmax_first belongs"),
    "not normalized": ({"k": 2, "normalize": False}, "already sums to 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_mismatched_inputs_are_refused(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        qt.route(torch.randn(3, 8), **options)


def test_logits_of_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="flatten batch and sequence"):
        qt.route(torch.randn(2, 3, 8), 2)


def test_roots_of_softplus_match_deepseek_v4() -> None:
    transformers = pytest.importorskip("transformers")
    rival = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = transformers.DeepseekV4Config(hidden_size=16, n_routed_experts=8, num_experts_per_tok=3)
    router = rival.DeepseekV4TopKRouter(config)
    with torch.no_grad():
        router.weight.normal_(generator=torch.Generator().manual_seed(1))
    logits, weights, indices = router(torch.randn(57, 16))
    experts = logits.shape[1]
    bias = router.e_score_correction_bias
    ours = qt.route(logits, 3, scores="sqrtsoftplus", bias=bias, scale=config.routed_scaling_factor)
    dense = torch.zeros(57, experts).scatter(1, indices, weights)
    assert_close("weights", torch.zeros(57, experts).scatter(1, ours.indices, ours.weights), dense, 1e-6)

"""The table of coverage: tiny models of transformers' families under `convert` with nothing but a recipe."""

import copy

import pytest
import torch

import quaver.torch as qt
from quaver.torch.linear.linear import Quantizable
from tests.close import assert_bitwise
from tests.torch.conversion import logits
from tests.torch.conversion.coverage import PAGE, covered, written
from tests.torch.conversion.families import FAMILIES, tiny, tokens

#: What is left besides the head: routers, which are no nn.Linear's forward, and layers whose weight is read uncalled.
LEFT = ("output head", "Router overrides forward", "multiplies by its weight without calling it")
#: Experts that no token of a small batch may visit.
MAY_REST = {"switch_transformers": "expert_"}
#: The smallest share of the parameters of GEMMs, heads apart.
SHARES = {"falcon": 0.9, "gpt2": 0.9, "mixtral": 0.9, "qwen3_moe": 0.9, "gpt_oss": 0.9, "deepseek_v3": 0.9}
SHARES |= {"mamba": 0.8, "falcon_mamba": 0.8}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_converted_whole_and_every_layer_runs(family: str) -> None:
    report, check, loss = covered(family)
    assert loss.isfinite()
    assert report.share >= SHARES.get(family, 0.9) and report.flops_share > 0.5
    left = {row.name: row.why for row in report.rows if row.recipe is None}
    assert all(any(why in reason for why in LEFT) for reason in left.values()), left
    rests = MAY_REST.get(family)
    assert all(rests is not None and rests in name for name in check.never_called), str(check)
    assert not check.read_behind and not check.gone, str(check)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_high_precision_and_after_revert_equals_the_original(family: str) -> None:
    plain, x = tiny(family), tokens()
    model = copy.deepcopy(plain)
    qt.convert(model, "bf16")
    kinds = [type(m) for m in plain.modules()]
    results = []
    for m in (model, plain):
        torch.manual_seed(1)
        loss = m(input_ids=x, labels=x).loss
        loss.backward()
        results.append([loss, *(p.grad for p in m.parameters())])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_bitwise(a, b)
    qt.convert(model, "tensorwise", head=True)
    with torch.no_grad():
        model(input_ids=x, labels=x)
    qt.revert(model)
    assert [type(m) for m in model.modules()] == kinds
    assert not any(isinstance(m, Quantizable) for m in model.modules())
    for (name, a), (other, b) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True):
        assert name == other
        if a.is_floating_point() or a.dtype.is_signed:
            assert_bitwise(a, b, name)
    with torch.no_grad():
        losses = []
        for m in (model.eval(), plain.eval()):
            torch.manual_seed(1)
            losses.append(m(input_ids=x, labels=x).loss)
    assert_bitwise(*losses)


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text()
    assert page == written(page), "python -m tests.torch.conversion.coverage writes it anew"
    assert len(FAMILIES) >= 40


def test_the_page_has_the_noise_of_every_familys_logits() -> None:
    assert sorted(FAMILIES) == list(logits.shown(PAGE.read_text())), (
        "python -m tests.torch.conversion.logits writes it anew"
    )


# Half a second each, and one of a kind tells of the others.
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[] if f in ("llama", "gpt2", "mixtral", "t5") else pytest.mark.slow) for f in FAMILIES],
)
def test_the_noise_of_logits_is_the_pages(family: str) -> None:
    figures = logits.shown(PAGE.read_text())[family]
    # Processors sum products in another order.
    for recipe, figure, decibels in zip(logits.RECIPES, figures, logits.decibels(family), strict=True):
        assert abs(figure - decibels) <= 1, recipe

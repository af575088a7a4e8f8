"""Test the cost of a step on many GPUs against hand calculations and the behaviour of its parts."""

from dataclasses import replace
from typing import Any

import pytest

from quaver import recipes
from quaver.costs import hardware, ledger, steps
from quaver.costs.decoder import DecoderShape, deepseek_v3_like, dense, llama
from quaver.costs.hardware import GPUS, HOP_INSIDE, HOP_OUTSIDE, INTERCONNECTS, START
from quaver.costs.steps import REACHED, TrainingSetup, predict
from quaver.recipes import RECIPES

H100, LINK = GPUS["h100"], INTERCONNECTS["hgx-h100"]
SMALL = llama("small", 4, 1024, 8, 4, 128, 4096, vocab=32_000)
EXPERTS = deepseek_v3_like()


def step(
    model: DecoderShape = SMALL, recipe: str = "tensorwise", gpus: int = 8, axes: Any = None, **how: Any
) -> steps.StepCost:
    mesh = hardware.over(gpus, **(axes or {}))
    return predict(model, recipes.get(recipe), "h100", mesh, LINK, **how)


def test_published_sizes() -> None:
    assert llama("8b", 32, 4096, 32, 8, 128, 14_336).parameters == pytest.approx(8.03e9, rel=1e-3)
    assert EXPERTS.parameters == pytest.approx(671e9, rel=1e-3)


def test_a_gpu_alone_sends_nothing_and_its_parts_are_the_ledgers() -> None:
    alone = step(gpus=1, checkpoints="none", tokens=4096)
    assert not alone.wire and alone.parts["sharding"] == alone.parts["pipeline"] == 0
    block = SMALL.blocks[0][1]
    costs = [
        ledger.layer(recipes.get("tensorwise"), 4096, m.in_features, m.out_features, H100, produced=True)
        for m in block.matrices
    ]
    assert alone.parts["gemms"] == pytest.approx(4 * sum(cost.seconds for cost in costs) / REACHED)
    assert alone.seconds == pytest.approx(sum(alone.parts.values()))
    assert alone.tokens_per_second == pytest.approx(4096 / alone.seconds)


def test_ring_traffic_matches_a_hand_calculation() -> None:
    inside = LINK.inside.value * 1e9
    assert LINK.gather(1e9, 8, 1) == pytest.approx(1e9 * 7 / 8 / inside + START + 7 * HOP_INSIDE)
    # Sixteen ranks on two whole nodes: eight network cards are as fast as the links inside.
    assert LINK.gather(1e9, 16, 1) == pytest.approx(1e9 * 15 / 16 / inside + START + 14 * HOP_INSIDE + HOP_OUTSIDE)
    # One rank a node: one card.
    card = LINK.outside.value * 1e9
    assert LINK.gather(1e9, 4, 8) == pytest.approx(1e9 * 3 / 4 / card + START + 3 * HOP_OUTSIDE)
    assert LINK.bus(4, 4) == pytest.approx(2 * card)
    assert LINK.all_to_all(1e9, 16, 1) == pytest.approx(1e9 * 8 / 16 / card + START + HOP_OUTSIDE)
    assert LINK.gather(1e9, 1, 1) == LINK.all_to_all(1e9, 1, 1) == 0


def test_communication_bytes_match_a_hand_calculation() -> None:
    block = SMALL.blocks[0][1]
    plain, narrow = step(recipe="bf16"), step()
    assert plain.wire["weights"] == pytest.approx(2 * 4 * 2 * block.parameters * 7 / 8)
    assert narrow.wire["weights"] == pytest.approx(plain.wire["weights"] / 2, rel=1e-6)
    assert plain.wire["gradients"] == narrow.wire["gradients"] == pytest.approx(4 * 4 * block.parameters * 7 / 8)
    # Two gathers and two sums of a token shard forward, the same backward, in bf16 all.
    split = step(recipe="bf16", axes={"tp": 2}, checkpoints="none")
    assert split.wire["tensor"] == pytest.approx(4 * 2 * 4 * 2 * 8192 * 1024 / 2)


def test_the_same_work_takes_the_same_time_for_any_split() -> None:
    model = llama("wide", 8, 4096, 32, 8, 128, 14_336)
    for name in ("gemms", "attention", "elementwise"):
        whole = step(model, "bf16", 8).parts[name]
        assert step(model, "bf16", 8, {"tp": 2}, sequences=2).parts[name] == pytest.approx(whole, rel=0.02)
        assert step(model, "bf16", 8, {"cp": 2}, sequences=2).parts[name] == pytest.approx(whole, rel=0.02)
        assert step(model, "bf16", 8, {"pp": 2}, micro_batches=2).parts[name] == pytest.approx(whole, rel=0.02)


def test_more_checkpoints_take_more_time_and_less_memory() -> None:
    times, activations = [], []
    for checkpoints in ("none", "selective", "full"):
        one = step(llama("deep", 32, 2048, 16, 8, 128, 8192), "bf16", checkpoints=checkpoints)
        times.append(one.seconds)
        activations.append(one.memory["activations"])
    assert times == sorted(times) and activations == sorted(activations, reverse=True)


def test_an_eight_bit_layer_keeps_less_than_a_bf16_one() -> None:
    assert (
        step(checkpoints="none").memory["activations"] < step(recipe="bf16", checkpoints="none").memory["activations"]
    )


def test_idle_time_of_a_pipeline() -> None:
    one = step(axes={"pp": 4}, micro_batches=4)
    working = one.seconds - one.parts["pipeline"] - one.parts["optimizer"]
    assert one.parts["pipeline"] == pytest.approx(working * 3 / 4)
    taking_turns = step(axes={"pp": 4}, micro_batches=4, interleaved=2)
    assert taking_turns.parts["pipeline"] == pytest.approx(one.parts["pipeline"] / 2)


def test_experts_of_a_rank_see_the_tokens_of_all_its_group() -> None:
    def of(ep: int) -> steps.StepCost:
        return step(EXPERTS, "bf16", 64, {"ep": ep, "pp": 1}, checkpoints="none")

    near, far = of(8), of(64)
    assert near.parts["gemms"] == pytest.approx(far.parts["gemms"], rel=0.1)
    assert near.wire["experts"] < far.wire["experts"] and near.parts["experts"] < far.parts["experts"]
    hidden = step(EXPERTS, "bf16", 64, {"ep": 64}, checkpoints="none", overlapped=True)
    assert hidden.parts["experts"] < far.parts["experts"]
    assert near.memory["weights and optimizer"] == pytest.approx(far.memory["weights and optimizer"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_price(recipe: str) -> None:
    one = step(recipe=recipe, axes={"tp": 2, "cp": 2, "fsdp": 4}, tokens=4096)
    assert all(value >= 0 for value in one.parts.values()) and one.seconds > 0
    assert one.wire["weights"] <= step(recipe="bf16", axes={"tp": 2, "cp": 2, "fsdp": 4}, tokens=4096).wire["weights"]


def test_overlap_hides_no_more_than_gemms_take() -> None:
    assert steps.hidden_seconds(1.0, 10.0, 8) == steps.HIDDEN
    assert steps.hidden_seconds(10.0, 1.0, 8) == 7 / 8 and steps.hidden_seconds(10.0, 1.0, 2) == 1 / 2

    def shown(name: str) -> float:
        """Seconds of tensor parallelism's communication with overlap over those without."""
        mesh, link = hardware.over(8, tp=8), hardware.get_interconnect(name)
        one, other = (
            predict(SMALL, recipes.get("tensorwise"), "h100", mesh, link, overlapped=each).parts["tensor"]
            for each in (True, False)
        )
        return one / other

    assert shown("nvl72") < shown("hgx-h100") < shown("pcie") < 1
    # On the fastest links GEMMs take long enough to hide all that may be hidden.
    assert shown("nvl72") >= 1 - steps.HIDDEN - 1e-12


def test_slower_networks_are_slower() -> None:
    def on(name: str) -> float:
        mesh = hardware.over(64, tp=8)
        how: Any = {"sequences": 1, "checkpoints": "none"}
        return predict(SMALL, recipes.get("bf16"), "h100", mesh, hardware.get_interconnect(name), **how).seconds

    assert on("nvl72") < on("hgx-b200") < on("hgx-h100") < on("ethernet") < on("pcie")


@pytest.mark.parametrize(
    ("axes", "how", "message"),
    [
        ({"tp": 3}, {}, "tp 3 x pp 1"),
        ({"fsdp": 3}, {}, "fsdp is 3"),
        ({"tp": 0}, {}, "tp is 0"),
        ({"cp": 3}, {}, "ranks of cp"),
        ({"ep": 3}, {}, "ranks of ep do not divide"),
        ({"ep": 2}, {}, "no experts"),
        ({"pp": 8}, {}, "fewer than pp"),
        ({}, {"sequences": 0}, "sequences is 0"),
        ({"tp": 8}, {"tokens": 1001}, "cannot be divided"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(axes: Any, how: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(axes=axes, **how)


def test_heads_and_experts_that_ranks_do_not_divide() -> None:
    odd = DecoderShape(name="odd", blocks=((1, dense(96, 3, 3, 32, 96)),), dim=96, vocab=32)
    with pytest.raises(ValueError, match="3 heads"):
        step(odd, axes={"tp": 2})
    with pytest.raises(ValueError, match="256 experts"):
        step(EXPERTS, "bf16", 96, {"ep": 96})


def test_unknown_interconnects_and_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'hgx-h100'"):
        hardware.get_interconnect("hgx_h100")


def test_every_rate_has_a_source() -> None:
    for name, one in INTERCONNECTS.items():
        assert name == one.name and one.node >= 1
        assert all(f.value > 0 and f.source for f in (one.inside, one.outside))


def test_a_plan_in_bf16_is_the_same_plan() -> None:
    narrow = step()
    assert isinstance(narrow.plan, TrainingSetup)
    assert steps.step(replace(narrow.plan, recipe=recipes.get("bf16"))).seconds == step(recipe="bf16").seconds

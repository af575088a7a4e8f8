"""Keep, offload or recompute: each tensor by what its removal costs."""

import math

import pytest

from quaver.costs.offload import SavedActivation, place

RATE = 1e9


def choices(*activations: SavedActivation, forward: float, backward: float = math.inf) -> dict[str, str]:
    placed = place(activations, forward, backward, RATE)
    return {p.activation.name: p.choice for p in placed.placements}


def test_copies_that_fit_beside_a_forward_cost_nothing() -> None:
    saved = [SavedActivation("input", 4e8), SavedActivation("result", 5e8, 0.1)]
    placed = place(saved, 1.0, 2.0, RATE)
    assert [p.choice for p in placed.placements] == ["offload", "offload"]
    assert placed.seconds == placed.stall_all == 0.0
    assert placed.copy_all == pytest.approx(0.9)
    assert placed.bytes("offload") == placed.bytes() == 9e8


def test_what_is_fast_to_recompute_is_recomputed_once_copies_stall() -> None:
    saved = SavedActivation("input", 1e9), SavedActivation("slow", 1e9, 0.9), SavedActivation("fast", 1e9, 0.1)
    assert choices(*saved, forward=2.0) == {"input": "offload", "slow": "offload", "fast": "recompute"}


def test_a_tensor_is_kept_if_its_removal_costs_more_than_the_layer() -> None:
    # A third of the layer's time for each third of its bytes.
    saved = SavedActivation("input", 1e9), SavedActivation("a", 1e9, 0.5), SavedActivation("b", 1e9, 0.3)
    assert choices(*saved, forward=1.0) == {"input": "offload", "a": "keep", "b": "recompute"}


def test_a_short_backward_stalls_too() -> None:
    placed = place([SavedActivation("input", 1e9)], 2.0, 0.75, RATE)
    assert [p.seconds for p in placed.placements] == [0.25]
    assert placed.stall_all == 0.25


def test_a_layer_that_saves_nothing() -> None:
    placed = place([], 1.0, 1.0, RATE)
    assert placed.placements == [] and placed.seconds == placed.stall_all == placed.bytes() == 0.0

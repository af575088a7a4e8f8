"""Check a few steps of shadowing optimizer states, and the page with the recorded figures."""

import json

from benchmarks.acceptance import open_loop
from benchmarks.measuring import results


def test_states_in_more_bits_err_less_and_float32_not_at_all() -> None:
    names = ["float32", "bfloat16", "int8 root/64, the same v", "v in E4M3 (the control)"]
    chosen = tuple(scheme for name in names for scheme in open_loop.SCHEMES if scheme.name == name)
    seen = open_loop.measured(0.95, 4, 0, lambda line: None, chosen)
    errors = [seen[name]["error"] for name in names]
    assert errors[0] == 0 < errors[1] < 0.01 < errors[2] < 0.1 < errors[3]
    assert seen["float32"]["clamped"] == 0, "the bound holds of exact states"
    control = seen["v in E4M3 (the control)"]
    assert control["largest"] > 100 and control["clamped error"] < 1, "what the clamp is for"


def test_a_moment_rounded_to_nearest_keeps_moving_its_weight_and_a_stochastic_one_does_not() -> None:
    names = ["float32", "int8 near roots/64, v near fourth roots/64, the same: `lean`, `balanced`"]
    names.append("the same, m to nearest")
    chosen = tuple(scheme for scheme in open_loop.SCHEMES if scheme.name in names)
    went = open_loop.stopped(0.95, 0, chosen, after=500)
    assert went[names[0]] == 1 and went[names[1]] < 1.1 and went[names[2]] > 10


def test_the_page_has_the_recorded_figures() -> None:
    newest = max(results.FOLDER.glob("open-loop-*.json"))
    lines = open_loop.table(json.loads(newest.read_text(encoding="utf-8"))["figures"])
    assert "\n".join(lines) in open_loop.PAGE.read_text(encoding="utf-8")

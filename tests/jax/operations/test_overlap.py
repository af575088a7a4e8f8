"""Rings of shards: the numbers of one collective and one GEMM, bytes of codes on the wire, and nothing that waits."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest

import quaver.jax as qj

ROOT = Path(__file__).parents[3]
RECIPES = ("none", "delayed", "mxfp8", "nvfp4")


@cache
def results() -> dict[str, Any]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-W", "error", "-m", "tests.jax.operations.overlapped"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_a_ring_gives_the_numbers_of_one_collective(name: str) -> None:
    own = results()[name]
    assert own["overlapped"] < 1e-6 and own["states"] == 0 and own["one device"] < 2e-6


def sent_bytes(text: str, operation: str) -> dict[str, int]:
    """Elements that one device sends by element type; all are sent in bytes or float32."""
    totals: dict[str, int] = {}
    for line in text.splitlines():
        if f"stablehlo.{operation}" in line and (found := re.search(r"\(tensor<((?:\d+x)+)(\w+)>\)", line)):
            size = 1
            for number in found[1].split("x")[:-1]:
                size *= int(number)
            totals[found[2]] = totals.get(found[2], 0) + size
    return totals


@pytest.mark.parametrize(("name", "per_code"), [("delayed", 1), ("mxfp8", 1), ("nvfp4", 0.5)])
def test_codes_and_scales_are_sent_and_sums_in_float32(name: str, per_code: float) -> None:
    ring = sent_bytes(results()[name]["ring"], "collective_permute")
    # Per device of dp 2 and tp 4, shards [1, 64, 64] of activations are sent three times: x for fprop and wgrad of the
    # first layer, grad_output for dgrad and wgrad of the second, and the sums of fprop and dgrad.
    shard, sends, gathers = 64 * 64, 3, 4
    codes = ring.get("ui8", 0) + ring.get("i8", 0)
    scales = {"delayed": 0, "mxfp8": shard // 32, "nvfp4": shard // 16}[name] * gathers * sends
    assert codes == gathers * sends * shard * per_code + scales
    assert ring["f32"] == 2 * sends * shard


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_no_send_waits_for_the_gemm_beside_it(name: str) -> None:
    text = results()[name]["ring"]
    functions = re.split(r"(?=^  func\.func)", text, flags=re.M)
    multiplies = {re.search(r"@([\w.]+)", f)[1] for f in functions if "dot_general" in f}  # type: ignore[index]
    body = max(functions, key=lambda f: f.count("collective_permute"))
    needs: dict[str, set[str]] = {}
    sends, gemms = [], []
    for line in body.splitlines():
        if (defined := re.match(r"\s+(%[\w]+)(?::\d+)? = (.*)", line)) is None:
            continue
        result, rest = defined.groups()
        operands = {o.partition("#")[0] for o in re.findall(r"%\w+", rest)}
        needs[result] = operands.union(*(needs.get(o, set()) for o in operands))
        if "collective_permute" in rest:
            sends.append(result)
        elif (called := re.match(r"(?:func\.)?call @([\w.]+)", rest)) and called[1] in multiplies:
            gemms.append(result)
    assert len(sends) >= 12 and len(gemms) >= 20
    for send in sends:
        independent = [g for g in gemms if send not in needs[g] and g not in needs[send]]
        assert independent, f"every GEMM waits for {send}, or it for them"


def test_scatter_output_needs_shard_map_and_no_gather() -> None:
    x = w = jax.numpy.ones((32, 32))
    tokens = qj.ShardedOperand("tp", jax.sharding.PartitionSpec("tp", None))
    with pytest.raises(ValueError, match=r"inside jax\.shard_map only"):
        qj.linear(x, w, recipe="mxfp8", scatter_output=tokens)

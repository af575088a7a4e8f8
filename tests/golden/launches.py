"""Kernel launches per architecture, recorded without a GPU: `launches.json` has those of an earlier commit.

`python -m tests.golden.launches` compares, `--write` writes. Names of kernels and constants in the file are translated
by `names.json` before they are compared, and a launch belongs to a step of a layer or to all rows of the static gate.
"""

import argparse
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

# Decided when a kernel is defined; interpreted kernels are not recorded.
os.environ.pop("TRITON_INTERPRET", None)

import pytest
import torch
from torch import nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.backends.gpu import scaled_mm
from quaver.torch.backends.gpu.launch import KernelLaunch, recording
from tests.golden import names
from tests.kernels.cases import CASES
from tests.kernels.gate.record import record
from tests.torch.backends.gpu.pretend import as_on_a_gpu, become

FILE = Path(__file__).with_name("launches.json")
ARCHITECTURES = 80, 89, 90, 100, 120
RECIPES = [name for name, build in recipes.RECIPES.items() if build().quantizes]
LAYER: dict[str, Any] = {"normalization": "RMSNorm", "mask_type": "causal", "groups": 2, "bias": False}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOKENS, WIDTH = 256, 256

Step = Callable[[torch.dtype], torch.Tensor]


def of_layer(make: Callable[[torch.dtype], nn.Module], *shape: int) -> Step:
    """A step of a layer: what its backward begins from."""

    def output(dtype: torch.dtype) -> torch.Tensor:
        y = make(dtype)(torch.randn(*(shape or (TOKENS, WIDTH)), dtype=dtype).requires_grad_())
        return y[0] if isinstance(y, tuple) else y

    return output


def grouped(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(TOKENS, WIDTH, dtype=dtype).requires_grad_()
    ends = torch.tensor([128, 128, TOKENS], dtype=torch.int32)
    y: torch.Tensor = qt.GroupedLinear(3, WIDTH, 128, bias=False, dtype=dtype)(x, ends)
    return y


def cross_entropy(dtype: torch.dtype) -> torch.Tensor:
    head = qt.Linear(WIDTH, 512, bias=False, dtype=dtype)
    x = torch.randn(TOKENS, WIDTH, dtype=dtype).requires_grad_()
    return qt.linear_cross_entropy(x, head, torch.zeros(TOKENS, dtype=torch.long))


STEPS: dict[str, Step] = {
    "Linear": of_layer(lambda dtype: qt.Linear(WIDTH, 128, bias=False, dtype=dtype)),
    "Linear, bias": of_layer(lambda dtype: qt.Linear(WIDTH, 128, dtype=dtype)),
    "Linear, ragged": of_layer(lambda dtype: qt.Linear(WIDTH, 128, dtype=dtype), 200, WIDTH),
    "RMSNorm": of_layer(lambda dtype: qt.RMSNorm(WIDTH, dtype=dtype)),
    "LayerNormLinear": of_layer(lambda dtype: qt.LayerNormLinear(WIDTH, 128, dtype=dtype)),
    "LayerNormMLP": of_layer(lambda dtype: qt.LayerNormMLP(WIDTH, 384, dtype=dtype)),
    "MLP": of_layer(lambda dtype: qt.MLP(WIDTH, 384, "swiglu", dtype=dtype)),
    "TransformerLayer": of_layer(
        lambda dtype: qt.TransformerLayer(
            WIDTH, 4, 384, activation="swiglu", rope=qt.RotaryEmbedding(64), dtype=dtype, **LAYER
        ),
        *(1, 128, WIDTH),
    ),
    "GroupedLinear": grouped,
    "MoE": of_layer(lambda dtype: qt.MoE(WIDTH, 128, qt.MixtureConfig(experts=4, k=2), dtype=dtype)),
    "Mamba2": of_layer(lambda dtype: qt.Mamba2(WIDTH, dtype=dtype), 1, 256, WIDTH),
    "cross entropy": cross_entropy,
}


#: Steps that no recipe quantizes.
UNQUANTIZED = ("RMSNorm", "cross entropy")


def rows() -> Iterator[tuple[str, str, str, bool]]:
    """Step, recipe, dtype, attention in eight bits."""
    for step in STEPS:
        for recipe in ("bf16",) if step in UNQUANTIZED else RECIPES:
            yield step, recipe, "bfloat16", False
    for recipe in RECIPES:
        yield "Linear", recipe, "float16", False
    # GEMMs with a scale for each row give no float32.
    for recipe in (name for name in RECIPES if not name.startswith("rowwise")):
        yield "Linear", recipe, "float32", False
    for recipe in ("tensorwise", "mxfp8"):
        yield "TransformerLayer", recipe, "bfloat16", True


def recorded(step: Step, recipe: str, dtype: str, attention: bool, arch: int) -> list[KernelLaunch]:
    """What one step launches, forward and backward, in order."""
    in_force = recipes.get(recipe, attention=True) if attention else recipes.get(recipe)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch, as_on_a_gpu(patch):
        # Recording assumes GEMMs that read transposes from Blackwell on.
        become(arch, patch, either=arch >= 100)
        # Nothing was computed that a probe could compare.
        patch.setattr(scaled_mm, "_probe", lambda *_: "")
        with recording(arch) as launches, qt.autocast(in_force):
            y = step(DTYPES[dtype])
            y.backward(torch.ones_like(y))
    return launches


def plain(launch: KernelLaunch) -> dict[str, Any]:
    """A launch without names of arguments, which no result depends on, but for those of constants."""
    order = {name: number for number, name in enumerate(launch.fn.arg_names)}
    return {
        "kernel": launch.fn.__name__,
        "grid": list(launch.grid),
        "constants": {name: value_of(value) for name, value in sorted(launch.constants.items())},
        "arguments": " ".join(kind for kind in launch.signature.values() if kind != "constexpr"),
        "divisible": sorted(order[name] for name in launch.divisible),
        "warps": launch.warps,
        "registers": launch.registers,
    }


def value_of(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"kernel": value.__name__} if hasattr(value, "__name__") else str(value)


def translated(launch: dict[str, Any]) -> str:
    """As text that is equal for equal launches, with present names."""
    constants = {
        names.constant(name): {"kernel": names.kernel(value["kernel"])} if isinstance(value, dict) else value
        for name, value in launch["constants"].items()
    }
    return json.dumps(launch | {"kernel": names.kernel(launch["kernel"]), "constants": constants}, sort_keys=True)


def everything() -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Launches by label, and why the others failed."""
    found: dict[str, list[dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    for arch in ARCHITECTURES:
        label = f"sm_{arch}, gate"
        try:
            gate = record([case for case in CASES if case.since <= arch], arch)
            found[label] = [plain(each.launch) for each in gate]
        except Exception:
            failed[label] = traceback.format_exc()
        for step, recipe, dtype, attention in rows():
            label = f"sm_{arch}, {step}, {recipe}, {dtype}{', attention' * attention}"
            try:
                found[label] = [plain(each) for each in recorded(STEPS[step], recipe, dtype, attention, arch)]
            except Exception:
                failed[label] = traceback.format_exc()
    return found, failed


def differences(ours: dict[str, list[dict[str, Any]]], known: dict[str, list[dict[str, Any]]]) -> list[str]:
    """One line for each label with different launches: those on only one side."""
    lines = [f"launches, {label}: not in the file" for label in ours.keys() - known.keys()]
    lines += [f"launches, {label}: only in the file" for label in known.keys() - ours.keys()]
    for label in sorted(ours.keys() & known.keys()):
        a, b = (Counter(map(translated, side[label])) for side in (ours, known))
        lines += [f"launches, {label}: only here: {each}" for each in (a - b).elements()]
        lines += [f"launches, {label}: only in the file: {each}" for each in (b - a).elements()]
        if a == b and "gate" not in label and [*map(translated, ours[label])] != [*map(translated, known[label])]:
            lines.append(f"launches, {label}: in another order")
    return lines


def read() -> dict[str, list[dict[str, Any]]]:
    file = json.loads(FILE.read_text())
    launches = []
    for number, grid, values, warps, registers in file["launches"]:
        kernel, constants, arguments, divisible = file["kinds"][number]
        launches.append(
            {
                "kernel": kernel,
                "grid": grid,
                "constants": dict(zip(constants, values, strict=True)),
                "arguments": arguments,
                "divisible": divisible,
                "warps": warps,
                "registers": registers,
            }
        )
    return {label: [launches[number] for number in numbers] for label, numbers in file["steps"].items()}


def write(found: dict[str, list[dict[str, Any]]]) -> None:
    """Each launch once, as a number of its kernel and arguments and what else it has."""

    def text(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"))

    def kind(each: dict[str, Any]) -> str:
        return text([each["kernel"], list(each["constants"]), each["arguments"], each["divisible"]])

    def launch(each: dict[str, Any]) -> str:
        values = list(each["constants"].values())
        return text([kinds[kind(each)], each["grid"], values, each["warps"], each["registers"]])

    every = [each for launches in found.values() for each in launches]
    kinds = {key: number for number, key in enumerate(sorted(set(map(kind, every))))}
    launches = {key: number for number, key in enumerate(sorted(set(map(launch, every))))}
    steps = [f"{text(label)}:{text([launches[launch(each)] for each in found[label]])}" for label in sorted(found)]
    parts = [f'"kinds":[\n{_lines(kinds)}\n]', f'"launches":[\n{_lines(launches)}\n]']
    parts.append(f'"steps":{{\n{_lines(steps)}\n}}')
    FILE.write_text("{" + ",\n".join(parts) + "}\n")


def _lines(texts: Iterable[str]) -> str:
    return ",\n".join(texts)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.launches", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write launches.json")
    chosen = parser.parse_args(arguments)
    found, failed = everything()
    for label, why in failed.items():
        print(f"launches, {label} failed:\n{why}")
    if chosen.write:
        write(found)
    lines = differences(found, read())
    print("\n".join([*lines, f"{sum(map(len, found.values()))} launches, {len(lines) or 'none'} different"]))
    return int(bool(lines or failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

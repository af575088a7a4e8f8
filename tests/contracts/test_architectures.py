"""Code that depends on a GPU's architecture covers all of them.

Their properties are in `launching.device.TRAITS`; other code uses a property, or a comparison (`arch < 89`), which also
covers future architectures. What each architecture launches is compared in `tests/kernels/test_gate.py`.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton

from quaver.torch.backends.gpu.device import TRAITS
from tests.contracts.sources import modules, parsed, walk

TABLE = "quaver.torch.backends.gpu.device"
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
#: Architectures by name, each with its reason.
NAMED = {
    # For torch 2.11 on Ada (pytorch#177651).
    ("quaver.torch.backends.gpu.scaled_mm", 89),
    # `integers`: on Ada, Triton casts by way of float16 (triton#11753).
    ("quaver.torch.backends.gpu.tensorwise", 89),
    # DeepSeek's GEMM with scales of blocks, which cuBLASLt has only for Hopper.
    ("quaver.torch.backends.gpu.scaled_mm", 90),
}


def by_name(tree: ast.AST) -> Iterator[int]:
    """Architectures that code selects by number: in a collection, by `==` or `in`, or as both ends of a range."""
    for node in walk(tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set) and all(map(known, node.elts)) and len(node.elts) > 1:
            yield from (element.value for element in node.elts)  # type: ignore[attr-defined]
        elif isinstance(node, ast.Dict) and node.keys and all(known(key) for key in node.keys):
            yield from (key.value for key in node.keys)  # type: ignore[union-attr]
        elif isinstance(node, ast.Compare) and re.search(r"\barch", ast.unparse(node)):
            sides = zip(node.ops, node.comparators, strict=True)
            yield from (side.value for op, side in sides if isinstance(op, ast.Eq | ast.NotEq) and known(side))  # type: ignore[attr-defined]
        elif isinstance(node, ast.Call) and len(node.args) > 1 and known(node.args[-1]):
            first, last = node.args[-2:]
            if known(first) and ast.unparse(first) == ast.unparse(last):
                yield last.value  # type: ignore[attr-defined]


def known(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value in TRAITS


@pytest.mark.parametrize("assembler", sorted(path.name for path in TOOLS.glob("ptxas*")))
def test_every_architecture_that_an_assembler_of_tritons_knows_is_in_the_table(assembler: str) -> None:
    help_text = subprocess.run([TOOLS / assembler, "--help"], capture_output=True, text=True, check=True).stdout
    archs = {int(arch) for arch in re.findall(r"'sm_(\d+)", help_text)}
    assert {80, 90} <= archs
    assert {arch for arch in archs if arch >= min(TRAITS)} <= set(TRAITS)


def test_code_asks_the_table_and_names_no_architecture() -> None:
    named = {(name, arch) for name, file in modules().items() if name != TABLE for arch in by_name(parsed(file))}
    assert named == NAMED


@pytest.mark.parametrize(
    "planted",
    [
        "NARROW = 86, 89, 120",
        "WIDE = {80: 1, 90: 2}",
        "if arch == 90: pass",
        "if architecture(x.device) in (90, 100): pass",
        "Kind('1x128', '1x128', 90, 90)",
    ],
)
def test_a_table_that_forgets_some_is_seen(planted: str) -> None:
    assert list(by_name(ast.parse(planted)))

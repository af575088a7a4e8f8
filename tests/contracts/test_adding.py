"""Each line of CONTRIBUTING's table "to add a thing" is followed literally, in a copy of the tree, and tests run there.

The tests that meet a throw-away thing are those with its name among their parameters, and those of whole tables.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: New files of each thing, by path.
FILES = {
    "implementation of an operation (a kernel)": {
        "src/quaver/torch/backends/cpu/throwaway.py": '''"""An implementation that a test adds."""

from quaver.torch.backends.cpu import gemm


def reason(*args, **options):
    return gemm.reason(*args, **options)


def matmul(*args, **options):
    return gemm.matmul(*args, **options)
'''
    },
    "Triton kernel": {
        "src/quaver/kernels/throwaway.py": '''"""A kernel that a test adds."""

import triton
import triton.language as tl


@triton.jit
def throwaway(x, out, size, BM: tl.constexpr, BN: tl.constexpr):
    """2 x to out, both of `size` elements. Exact."""
    at = tl.program_id(0) * BM * BN + tl.arange(0, BM * BN)
    tl.store(out + at, (tl.load(x + at, mask=at < size).to(tl.float32) * 2).to(out.dtype.element_ty), mask=at < size)
''',
        "src/quaver/torch/backends/gpu/throwaway.py": '''"""What launches a kernel that a test adds."""

import torch
from torch import Tensor

from quaver.kernels import throwaway
from quaver.torch.backends.gpu.launch import launcher


def doubled(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    tensors, numbers = (x, out), (x.numel(),)
    launcher(throwaway.throwaway, (-(-x.numel() // 4096),), tensors, numbers, {"BM": 32, "BN": 128}, 4)(*tensors)
    return out
''',
    },
    "benchmark": {
        "benchmarks/cases/host/throwaway.py": '''"""A case that a test adds."""

from benchmarks.measuring.figure import Case, Figure, exactly


def measure(quick: bool) -> list[Figure]:
    return [Figure("quaver", "counted", 0, "modules", exactly(0))]


CASE = Case(name="throwaway", title="Nothing", notes="Counts nothing.", measure=measure)
'''
    },
}

#: A recipe that a test adds.
RECIPE = '''@recipe
def throwaway(*, weight_2d: bool = False, attention: bool = False) -> Recipe:
    """E4M3 in 1x32 blocks.

    Args:
        weight_2d: the weight in 32x32 blocks.
        attention: True to quantize attention too.
    """
    check_flags(weight_2d=weight_2d)
    line = QuantSpec(E4M3, (1, 32), "e8m0")
    weight = QuantSpec(E4M3, (32, 32), "e8m0") if weight_2d else line
    fprop, wgrad = GemmSpec(line, weight), GemmSpec(line, line)
    return Recipe("throwaway", fprop, fprop, wgrad, attention=attention_spec(attention, line, line))


'''

#: An update rule that a test adds.
RULE = '''@dataclass(frozen=True)
class ThrowawayRule(AdamRule):
    """AdamW by another name."""


'''

#: The lines of each thing: file, the text before which it goes, and the line.
LINES = {
    "recipe": [
        ("src/quaver/recipes/__init__.py", "# ---- table ----", RECIPE),
        ("src/quaver/recipes/__init__.py", '    "nvfp4": nvfp4,\n', '    "throwaway": throwaway,\n'),
        ("src/quaver/recipes/__init__.py", '    "tensorwise",\n]', '    "throwaway",\n'),
        ("src/quaver/train/report.py", '    "nvfp4": "', '    "throwaway": "#123456",\n'),
    ],
    "format": [
        (
            "src/quaver/recipes/formats.py",
            "\nFORMATS.update",
            'E3M4 = Format(\n    name="throwaway", bits=8, exponent_bits=3, mantissa_bits=4, bias=3, max=31.0, has_nan=False\n)\n',  # noqa: E501
        ),
        ("src/quaver/recipes/formats.py", "E5M2, E3M2, E2M3, E2M1, E8M0))", "E3M4, "),
    ],
    "implementation of an operation (a kernel)": [
        ("src/quaver/torch/operations/ops.py", "GPU = ", "from quaver.torch.backends.cpu import throwaway\n"),
        (
            "src/quaver/torch/operations/ops.py",
            '        Implementation("reference", reference.matmul),\n',
            '        Implementation("throwaway", throwaway.matmul, throwaway.reason),\n',
        ),
    ],
    "Triton kernel": [
        (
            "tests/kernels/cases.py",
            "from quaver.torch.backends.gpu import emulation as",
            "from quaver.torch.backends.gpu import throwaway\n",
        ),
        (
            "tests/kernels/cases.py",
            "    *_convolutions(),\n]",
            '    Case(name="throwaway", launch=lambda: throwaway.doubled(matrix())),\n',
        ),
    ],
    "GPU of the cost model": [
        (
            "src/quaver/costs/hardware.py",
            '        Gpu(\n            name="a100",',
            '        Gpu(name="throwaway", about="a test\'s", capability=(8, 0), copy=_copy(1.0, "a data sheet"),\n'
            '            rates={"bf16": GpuRate(100.0, "published", "a data sheet that nobody has")}),\n',
        )
    ],
    "interconnect": [
        (
            "src/quaver/costs/hardware.py",
            '        Interconnect(\n            name="hgx-h100",',
            '        Interconnect(name="throwaway", full_name="a test\'s", node=8, inside=_links(300, "links"),\n'
            '            outside=_card(100, "cards")),\n',
        )
    ],
    "preset of an optimizer": [
        (
            "src/quaver/reference/optimizer_state.py",
            '        Preset(name="float32"),\n',
            '        Preset(name="throwaway", first=StateSpec(code="throwaway"), second=_SECOND),\n',
        )
    ],
    "code of optimizer states": [
        (
            "src/quaver/reference/optimizer_state.py",
            '        StateCode(name="bfloat16", kind',
            '        StateCode(name="throwaway", kind="softsign", bytes=1),\n',
        )
    ],
    "rule of an optimizer": [
        ("src/quaver/torch/optim/rules.py", "@dataclass(frozen=True)\nclass LionRule", RULE),
        (
            "src/quaver/torch/optim/optimizers.py",
            "class Muon(",
            "class Throwaway(AdamW):\n    def rule(self, group: Any, preset: Any) -> Any:\n"
            '        return rules.ThrowawayRule(True, False, group["maximize"])\n\n\n',
        ),
        (
            "src/quaver/torch/optim/__init__.py",
            "\n__all__ = [",
            "from quaver.torch.optim.optimizers import Throwaway\n",
        ),
        ("src/quaver/torch/optim/__init__.py", '"Optimizer", "Preset"', '"Throwaway", '),
        (
            "tests/torch/optim/test_rules.py",
            '    "Muon": (optim.Muon',
            '    "throwaway": (optim.Throwaway, torch.optim.AdamW, {}),\n',
        ),
    ],
    "model size": [
        (
            "src/quaver/train/model_config.py",
            '    "nano": model(',
            '    "throwaway": model(1, 64, 2, 1, 32, 128, 5e-3, **LLAMA),\n',
        )
    ],
    "benchmark": [
        ("benchmarks/cases/__init__.py", "\nCASES = (", "from benchmarks.cases.host import throwaway\n"),
        ("benchmarks/cases/__init__.py", "    imports.CASE,\n", "    throwaway.CASE,\n"),
    ],
}

#: Tests of whole tables; of others those that have a throw-away thing's name among their parameters run.
TABLES = [
    "tests/recipes/test_recipes.py",
    "tests/train/test_plots.py::test_every_recipe_has_its_own_colour",
]
NAMED = [
    "tests/recipes/test_formats.py",
    "tests/reference",
    "tests/costs",
    "tests/torch/linear/test_linear.py",
    "tests/torch/optim/test_rules.py",
    "tests/train",
    "tests/benchmarks/test_benchmarks.py",
]

USED = """
import torch, quaver.torch as qt
from quaver.costs import hardware as gpus, hardware as interconnects
from quaver.torch import optim

interconnects.INTERCONNECTS["throwaway"], gpus.GPUS["throwaway"]
layer = qt.Linear(32, 32, recipe="mxfp8")
x = torch.randn(4, 32)
with qt.only("throwaway"):
    y = layer(x)
assert torch.equal(y, layer(x))
model = torch.nn.Linear(128, 128)
for optimizer in (optim.AdamW(model.parameters(), preset="throwaway"), optim.Throwaway(model.parameters(), lr=0.1)):
    model(torch.randn(4, 128)).square().sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with every throw-away thing in it."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in ("src", "tests", "benchmarks"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for files in FILES.values():
        for path, text in files.items():
            (copy / path).write_text(text, encoding="utf-8")
    for lines in LINES.values():
        for path, before, line in lines:
            text = (copy / path).read_text(encoding="utf-8")
            (copy / path).write_text(text.replace(before, line + before, 1), encoding="utf-8")
    return copy


def run(tree: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tree / "src"), str(tree)))}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_every_line_of_the_table_is_followed() -> None:
    text = (
        (ROOT / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .partition("## Adding a recipe, format, kernel or model")[2]
        .partition("\n## ")[0]
    )
    things = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)[1:]
    assert set(LINES) == set(things) and set(FILES) <= set(LINES)


def test_every_file_and_line_has_a_place_in_the_tree() -> None:
    for files in FILES.values():
        for path in files:
            assert (ROOT / path).parent.is_dir() and not (ROOT / path).exists(), path
    for lines in LINES.values():
        for path, before, _ in lines:
            assert before in (ROOT / path).read_text(encoding="utf-8"), f"{path}: {before!r}"
    for test in (*TABLES, *NAMED):
        assert (ROOT / test.partition("::")[0]).exists(), test


@pytest.mark.slow
def test_throw_away_things_pass_the_tests_of_their_tables(tree: Path) -> None:
    run(tree, "-c", USED)
    gate = ("-m", "tests.kernels.gate", "--only", "throwaway*")
    assert "nothing wrong" in run(tree, *gate, "--update")
    assert "nothing wrong" in run(tree, *gate, "--quick")
    assert '"throwaway' in (tree / "tests/kernels/gate/ceilings.toml").read_text(encoding="utf-8")
    pytest_ = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider")
    run(tree, *pytest_, *TABLES)
    shown = run(tree, *pytest_, "-v", "-m", "not slow and not ranks", "-k", "throwaway", *NAMED)
    for folder in NAMED:
        assert folder in shown, f"no test of {folder} met a throw-away thing"

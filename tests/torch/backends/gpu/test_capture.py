"""A capture launches what its rehearsal loaded, and nothing else."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.backends.gpu import capture, scaled_mm
from quaver.torch.cuda_graph import WARM_UP, CapturedStep
from quaver.torch.state.layer_state import state_of
from tests.torch.backends.gpu.pretend import Driver, as_on_a_gpu, become

RECIPES = [name for name, build in recipes.RECIPES.items() if build().quantizes]
ARCHITECTURES = (89, 90, 100, 120)
K, N = 48, 32
#: What was found out of the GEMMs of each architecture: probing them again takes longer than all the rest.
WAYS: dict[Any, Any] = {}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], Driver]]:
    """Makes a CPU pass for a GPU of an architecture; kernels run where a recipe's decisions go by their results."""

    def become_one(recipe: str, arch: int) -> Driver:
        become(arch, monkeypatch)
        monkeypatch.setattr(scaled_mm, "_choices", WAYS)
        return Driver(monkeypatch, runs=recipe == "delayed")

    with as_on_a_gpu(monkeypatch):
        yield become_one


def launches(driver: Driver, module: nn.Module, recipe: str, x: Tensor, warm_up: int) -> list[list[object]]:
    """The kernels that each call of a captured training step launches; it has been captured at the last."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in x:
            with qt.autocast(recipes.delayed(history=4) if recipe == "delayed" else recipe):
                loss = module(part).float().square().mean()
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    captured, by_step = CapturedStep(step, warm_up=warm_up), []
    for _ in range(warm_up + 1):
        driver.launched.clear()
        captured(x)
        by_step.append(list(driver.launched))
    assert captured._graph is not None
    return by_step


CALLS = [(32, True), (37, False)]
#: Each recipe on one architecture, and each architecture under a quarter of the recipes, alternately even tokens with a
#: bias and odd ones without.
BY_TURNS = [
    (recipe, arch, CALLS[(i + j) // 4 % 2])
    for i, recipe in enumerate(RECIPES)
    for j, arch in enumerate(ARCHITECTURES)
    if (i + j) % 4 == 0
]
#: And the GPUs that have the GEMMs of these two.
BY_TURNS += [("blockwise", 90, CALLS[0]), ("nvfp4", 100, CALLS[0])]
EVERY = [
    pytest.param(recipe, arch, *call, marks=() if (recipe, arch, call) in BY_TURNS else pytest.mark.slow)
    for recipe, arch, call in product(RECIPES, ARCHITECTURES, product((32, 37), (True, False)))
]


@pytest.mark.parametrize(("recipe", "arch", "tokens", "bias"), EVERY)
def test_a_capture_launches_what_its_rehearsal_launched(
    recipe: str, arch: int, tokens: int, bias: bool, gpu: Callable[[str, int], Driver]
) -> None:
    driver = gpu(recipe, arch)
    layers = [qt.Linear(*sides, bias=bias, dtype=torch.bfloat16) for sides in ((K, N), (N, K))]
    x = torch.randn(2, tokens, K).bfloat16().requires_grad_()
    *_, rehearsed, captured = launches(driver, nn.Sequential(*layers), recipe, x, WARM_UP)
    assert captured == rehearsed
    assert set(captured) <= driver.loaded


@pytest.mark.parametrize(
    ("recipe", "arch"),
    [
        ("rowwise", 90),
        ("mxfp8", 100),
        *(
            pytest.param(recipe, arch, marks=pytest.mark.slow)
            for recipe in RECIPES
            for arch in ARCHITECTURES
            if (recipe, arch) not in (("rowwise", 90), ("mxfp8", 100))
        ),
    ],
)
def test_a_capture_of_a_block_launches_what_its_rehearsal_launched(
    recipe: str, arch: int, gpu: Callable[[str, int], Driver]
) -> None:
    """Norms, rope, activations and attention's masks, and weights that several layers share an input with."""
    driver = gpu(recipe, arch)
    options = {"groups": 2, "bias": False, "activation": "swiglu", "normalization": "RMSNorm", "window": (8, 0)}
    block = qt.TransformerLayer(64, 4, 96, rope=qt.RotaryEmbedding(16), dtype=torch.bfloat16, **options)
    x = torch.randn(1, 2, 16, 64).bfloat16().requires_grad_()
    *_, rehearsed, captured = launches(driver, block, recipe, x, WARM_UP)
    assert captured == rehearsed
    assert set(captured) <= driver.loaded


def test_a_capture_of_attention_in_eight_bits_launches_what_its_rehearsal_launched(
    gpu: Callable[[str, int], Driver],
) -> None:
    recipe = "tensorwise"
    driver = gpu(recipe, 90)
    options = {"groups": 1, "bias": False, "window": (8, 0)}
    block = qt.MultiheadAttention(64, 2, recipe=recipes.get(recipe, attention=True), dtype=torch.bfloat16, **options)
    x = torch.randn(1, 2, 16, 64).bfloat16().requires_grad_()
    *_, rehearsed, captured = launches(driver, block, recipe, x, WARM_UP)
    names = {kernel[0].__name__ for kernel in captured}
    assert {"attention", "attention_rows", "attention_columns"} <= names
    assert captured == rehearsed
    assert set(captured) <= driver.loaded


def test_a_captured_graph_reads_the_stored_codes_at_each_replay() -> None:
    """What a GEMM's layout of them is kept for would be filled once, at a replay, and not follow the codes."""
    with qt.quantized_init("tensorwise"):
        layer = qt.Linear(K, N, bias=False)
    with capture.rehearsing(torch.device("cpu")):
        assert layer.weight.unwrap() is not layer.weight.unwrap()
        assert not state_of(layer).weights


def test_a_capture_rehearsal_ends_with_its_block_and_nests() -> None:
    cpu = torch.device("cpu")
    with capture.rehearsing(cpu):
        with pytest.raises(KeyError), capture.rehearsing(cpu):
            raise KeyError
        assert capture.is_captured_or_rehearsed(cpu) and not capture.capturing(cpu)
    assert not capture.is_captured_or_rehearsed(cpu)

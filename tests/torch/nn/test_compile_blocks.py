"""A whole Transformer layer in one graph, under every recipe, with eager mode's bits."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from tests.close import assert_bitwise, assert_close
from tests.torch.nn.pairs import Run, assert_same_training
from tests.torch.nn.test_transformer import make, run
from tests.torch.test_compile import KINDS, WITHOUT_CODE

#: FP8 attention beside recipes of most kinds; other layers have those of the others, one layer alone has packed codes
#: without noise, and the slow test below has all.
ELSEWHERE = ("rowwise", "blockwise", "rowwise_bf16_wgrad", "tensorwise", "mxfp4")
EVERY = [*(name for name in KINDS if name not in ELSEWHERE), recipes.mxfp8(attention=True)]
#: The recipe that is compiled to the end.
TO_THE_END = "nvfp4"
# Ten seconds of compiling, of a graph that a quick case has.
SLOWLY = pytest.param("inductor", marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def eager(layer: Any, x: Tensor) -> Tensor:
    return layer(x)


class Compiled:
    """A run of a layer, compiled in one graph after so many steps: to the end, or up to where Inductor writes C++."""

    def __init__(self, run: Run = eager, after: int = 0, backend: Any = "inductor") -> None:
        self.plain, self.after = run, after
        self.compiled = torch.compile(run, fullgraph=True, backend=backend)

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        self.after -= 1
        return self.plain(layer, x) if self.after >= 0 else self.compiled(layer, x)


def inputs(dtype: torch.dtype, steps: int = 2) -> list[Tensor]:
    return [(torch.randn(2, 9, 64) * (i + 1)).to(dtype) for i in range(steps)]


@pytest.mark.parametrize("recipe", EVERY, ids=str)
def test_a_llama_layer_has_eager_bits(recipe: Any) -> None:
    layer = make("Llama", qk_norm="RMSNorm", dtype=torch.bfloat16)
    # What makes buffers is a graph of its own, which single layers have.
    compiled = Compiled(after=1, backend="inductor" if recipe == TO_THE_END else WITHOUT_CODE)
    assert_same_training(layer, [eager, compiled], recipe, inputs(torch.bfloat16, 3))


# Ten seconds of compiling each.
@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*recipes.RECIPES, recipes.mxfp8(attention=True)], ids=str)
def test_a_llama_layer_that_is_compiled_to_the_end_has_eager_bits(recipe: Any) -> None:
    layer = make("Llama", qk_norm="RMSNorm", dtype=torch.bfloat16)
    assert_same_training(layer, [eager, Compiled()], recipe, inputs(torch.bfloat16))


@pytest.mark.parametrize(
    ("kind", "recipe", "backend"),
    [
        ("Falcon", "blockwise", WITHOUT_CODE),
        ("GPT-NeoX", "rowwise_bf16_wgrad", WITHOUT_CODE),
        # Three seconds.
        pytest.param("GPT-NeoX", "mxfp8", WITHOUT_CODE, marks=pytest.mark.slow),
        ("post-norm encoder", "rowwise", WITHOUT_CODE),
        pytest.param("post-norm encoder", "rowwise", "inductor", marks=pytest.mark.slow),
    ],
)
def test_other_layers_have_eager_bits(kind: str, recipe: str, backend: str) -> None:
    compiled = Compiled(backend=backend)
    assert_same_training(make(kind, dtype=torch.bfloat16), [eager, compiled], recipe, inputs(torch.bfloat16))


@pytest.mark.parametrize("backend", [WITHOUT_CODE, SLOWLY])
def test_float32_has_eager_bits(backend: str) -> None:
    assert_same_training(make("Llama"), [eager, Compiled(backend=backend)], "tensorwise", inputs(torch.float32))


@pytest.mark.parametrize("backend", [WITHOUT_CODE, SLOWLY])
def test_eight_bit_activations_compile(backend: str) -> None:
    layer = make("Llama", dtype=torch.bfloat16, eight_bit_activations=True)
    assert_same_training(layer, [eager, Compiled(backend=backend)], "mxfp8", inputs(torch.bfloat16))


@pytest.mark.parametrize("backend", [WITHOUT_CODE, SLOWLY])
def test_recomputation_compiles(backend: str) -> None:
    layer = make("Llama", dtype=torch.bfloat16, recompute="mlp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own checkpoint's random state under compile
        # Within a checkpoint a compiler lets nobody make buffers: convert makes them before, or a first step does.
        compiled = Compiled(after=1, backend=backend)
        assert_same_training(layer, [eager, compiled], "delayed", inputs(torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        *(
            "Gemma 2",
            "gpt-oss",
            "ALiBi",
            "Qwen3",
            "OLMo 2",
            "Cohere's norms of heads",
            "Llama 4",
            "Llama 4 without rope",
        ),
        *("DeepSeek-V3", "Whisper", "decoder with memory"),
    ],
)
@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
def test_every_kind_has_eager_bits(kind: str, recipe: str) -> None:
    assert_same_training(make(kind, dtype=torch.bfloat16), [run, Compiled(run)], recipe, inputs(torch.bfloat16))


@pytest.mark.slow
def test_a_position_bias_has_eager_bits_but_for_the_order_in_which_its_gradient_is_summed() -> None:
    layer, x = make("T5", dtype=torch.bfloat16), torch.randn(2, 9, 64).bfloat16()
    runs = []
    for call in (eager, Compiled()):
        layer.zero_grad()
        with qt.autocast("mxfp8"):
            y = call(layer, x)
        y.backward(torch.ones_like(y))
        bias: Any = layer.attention.position_bias
        runs.append((y, bias.weight.grad))
    assert_bitwise(runs[1][0], runs[0][0])
    assert_close("gradient", runs[1][1], runs[0][1], 1e-2)

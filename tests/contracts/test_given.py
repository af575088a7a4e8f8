"""Both frameworks refuse wrong operands and specs with the same message."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import quaver.jax as qj
import quaver.torch as qt
from quaver import recipes

SPEC = recipes.mxfp8().fprop.a
FRAMEWORKS = {"torch": (qt, torch.ones(4, 32)), "jax": (qj, jnp.ones((4, 32)))}


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(TypeError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    "spec", [None, "mxfp8", recipes.mxfp8(), recipes.mxfp8().fprop], ids=lambda s: type(s).__name__
)
def test_an_invalid_spec_gives_a_clear_error(framework: str, spec: Any) -> None:
    quaver, x = FRAMEWORKS[framework]
    message = (
        f"quantize: spec is a {type(spec).__name__}; give a QuantSpec, such as quaver.recipes.get('mxfp8').fprop.a"
    )
    for operand in (x, quaver.quantize(x, SPEC)):
        assert refusal(lambda operand=operand: quaver.quantize(operand, spec)) == message


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_invalid_operand_gives_a_clear_error(framework: str) -> None:
    quaver, x = FRAMEWORKS[framework]
    q, such = quaver.quantize(x, SPEC), f"give a Quantized, such as quaver.{framework}.quantize(x, spec)"
    assert refusal(lambda: quaver.dequantize(x)).endswith(such)
    assert refusal(lambda: quaver.matmul(x, q)).startswith("matmul: a is a ")
    assert refusal(lambda: quaver.matmul(q, x)).endswith(such)
    assert refusal(lambda: quaver.quantize([[1.0]], SPEC)).startswith("quantize: x is a list; give a")


def test_an_array_is_no_tensor() -> None:
    assert refusal(lambda: qt.quantize(np.ones((4, 32)), SPEC)) == (  # type: ignore[arg-type]
        "quantize: x is a ndarray; give a Tensor, such as torch.as_tensor(x)"
    )

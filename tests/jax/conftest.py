"""How much XLA and LLVM optimize: as for a user where the claim is what they make of a program, else little."""

from collections.abc import Iterator

import jax
import pytest

#: Files whose claims an optimizer could break: roundings, sums, what a program consists of, and sharding.
OPTIMIZED = "test_quantize", "test_matmul", "test_linear", "test_lowering", "test_compiled"


@pytest.fixture(autouse=True, scope="module")
def _little_is_optimized(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiling is what the others spend their time on."""
    jax.config.update("jax_disable_most_optimizations", request.path.stem not in OPTIMIZED)
    yield
    jax.config.update("jax_disable_most_optimizations", False)

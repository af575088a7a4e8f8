"""Share fixtures of the tests that compare frameworks."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def hardly_optimized() -> Iterator[None]:
    """Compile each operation as a separate program with little optimization."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)

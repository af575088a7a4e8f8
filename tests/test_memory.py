"""What a worker of the tests gives back between two files: see conftest.py."""

import sys

import pytest

from tests import forked
from tests.conftest import resident

#: In a process of its own, since in a worker others' compiled code goes, and free memory is taken, meanwhile.
GIVES_BACK = """
import jax
import jax.numpy as jnp
from tests.conftest import give_back, resident

def compiled(n):
    return jax.jit(lambda x: sum(jnp.sin(x + i) for i in range(100)))(jnp.ones(n))

# The first compilation allocates the compiler's own buffers.
compiled(100)
give_back()
before = resident()
for n in range(1, 10):
    compiled(n)
grown = resident() - before
give_back()
left = resident() - before
assert grown > 5 and left < grown / 2, f"{grown:.0f} MB, and {left:.0f} after giving back"
"""


@pytest.mark.skipif(not resident(), reason="resident memory is read from /proc")
def test_compiled_code_and_its_memory_are_released() -> None:
    done = forked.bare("jax").run([sys.executable, "-c", GIVES_BACK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

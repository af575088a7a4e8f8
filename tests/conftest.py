"""What holds for every test: one thread, fixed seeds, uninitialized memory full of NaN, no GPU tests without a GPU."""

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

torch.set_num_threads(1)
# Kernels are interpreted where there is no GPU; Triton chooses when a kernel is defined, so before any is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


#: Raised inside torch by what torch itself does on the first compilation.
TORCHS_OWN = "ignore:.torch.jit.script.*. is deprecated:DeprecationWarning"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", TORCHS_OWN)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _empty_is_nan() -> Iterator[None]:
    """Deterministic mode makes torch.empty return NaN (255 in bytes), so that an element nobody wrote is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)

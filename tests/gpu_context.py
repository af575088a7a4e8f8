"""A lost CUDA context ends a run of GPU tests with the name of the test that lost it.

After an illegal instruction or address every later call on the device fails, so that each later test of the process
would fail within milliseconds and hide the one that matters.
"""

from collections.abc import Iterator
from typing import Any

import pytest


def lost_context() -> str:
    """The error of CUDA if the context of this process is lost, or ""."""
    import torch

    if not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    report: Any = yield
    if call.excinfo is not None and item.get_closest_marker("gpu") and (why := lost_context()):
        # xdist's controller ends all workers by the same word.
        item.session.shouldstop = f"the CUDA context was lost in {item.nodeid}: {why}"
    return report

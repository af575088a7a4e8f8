"""Codes of tokens in blocks of a row are quantized again in blocks along tokens, as a weight gradient reads them."""

import numpy as np
import pytest
import torch

import quaver.torch as qt
from quaver import recipes


@pytest.mark.parametrize("name", ["rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize(("spread", "least"), [(12, 0.975), (24, 0.965)])
def test_the_fraction_of_equal_values_is_bounded_by_the_row_spread(name: str, spread: int, least: float) -> None:
    """The largest row is 2**spread times the smallest."""
    by_row, along = recipes.get(name).fprop.a, recipes.get(name).wgrad.b
    assert by_row is not None and along is not None
    for seed in range(6):
        for tokens in (64, 256):
            rng = np.random.default_rng(seed)
            sizes = 2.0 ** np.round(rng.uniform(-spread / 2, spread / 2, (tokens, 1)))
            x = torch.from_numpy((rng.normal(size=(tokens, 256)) * sizes).astype(np.float32))
            again = qt.quantize(qt.quantize(x, by_row).dequantize().t(), along)
            same = again.dequantize() == qt.quantize(x.t(), along).dequantize()
            assert same.double().mean() >= least, (seed, tokens)

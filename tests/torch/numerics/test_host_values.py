"""Lengths of sequences on a GPU are read once for all layers that are given them, and again after a write."""

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.torch.numerics import versions


def test_layers_that_share_cu_seqlens_read_them_once_for_each_version(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(versions, "waits", lambda t: True)
    monkeypatch.setattr(Tensor, "tolist", lambda t: read.append(tolist(t)) or read[-1])
    layers = [qt.MultiheadAttention(64, 4, mask_type="causal", layout="thd") for _ in range(3)]
    ends, x = torch.tensor([0, 5, 9], dtype=torch.int32), torch.randn(9, 64)

    def run() -> Tensor:
        y = x
        for layer in layers:
            y = layer(y, cu_seqlens=ends)
        return y

    before = run()
    assert read == [[0, 5, 9]]
    assert torch.equal(run(), before) and len(read) == 1
    ends[1] = 3
    assert not torch.equal(run(), before) and read == [[0, 5, 9], [0, 3, 9]]
    ends[1] = 12
    with pytest.raises(ValueError, match="falls from 12 to 9"):
        run()

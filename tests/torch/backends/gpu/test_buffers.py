"""Kept weights on several streams: the first read on another stream waits for the writing, and shares its memory.

Streams are stood in for here; `tests/gpu/test_layers.py` has the same on a card.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.backends.gpu import buffers
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.state import weight_cache
from tests.torch.backends.gpu.streams import GPU, Streams, stand_in


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return stand_in(monkeypatch)


def cached(recipe: str) -> tuple[nn.Module, nn.Parameter, Any, weight_cache.CachedWeight]:
    layer, weight = qt.Linear(32, 48), nn.Parameter(torch.randn(48, 32))
    spec = recipes.get(recipe).fprop.b
    assert spec is not None
    window = weight_cache.begin(layer, weight)
    entry = weight_cache.store(layer, "fprop", weight, spec, 0.0, qt.quantize(weight, spec), window)
    assert entry is not None
    entry.written = buffers.EntryByStream(entry, GPU)
    return layer, weight, spec, entry


def tensors(q: Quantized) -> set[int]:
    return {t.data_ptr() for t in (q.data, q.scale, q.tensor_factor, q.amax) if isinstance(t, Tensor)}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "nvfp4"])
def test_another_stream_waits_once_and_holds_the_memory(recipe: str, streams: Streams) -> None:
    layer, weight, spec, entry = cached(recipe)
    assert streams.log == [("recorded", 1)]
    assert weight_cache.lookup(layer, "fprop", weight, spec, 0.0) is entry
    assert len(streams.log) == 1, "the stream that has written it waits for nothing"
    streams.now = 2
    reader = weight_cache.lookup(layer, "fprop", weight, spec, 0.0)
    assert reader is not None and reader.quantized is not None and entry.quantized is not None
    assert streams.log[1] == ("waits", 2, 1)
    assert {at for what, stream, at in streams.log[2:] if (what, stream) == ("keeps", 2)} == tensors(entry.quantized)
    assert tensors(reader.quantized) == tensors(entry.quantized)
    done = len(streams.log)
    assert weight_cache.lookup(layer, "fprop", weight, spec, 0.0) is reader and len(streams.log) == done
    streams.now = 3
    assert weight_cache.lookup(layer, "fprop", weight, spec, 0.0) is not reader
    assert streams.log[done] == ("waits", 3, 1)


def test_streams_do_not_share_derived_codes(streams: Streams) -> None:
    layer, weight, spec, entry = cached("tensorwise")
    assert entry.quantized is not None
    # A transpose that is written when a GEMM first asks for it, on this stream.
    entry.quantized.T.data = entry.quantized.T.data.clone()
    entry.fast_operands = "operands"
    streams.now = 2
    reader = weight_cache.lookup(layer, "fprop", weight, spec, 0.0)
    assert reader is not None and reader.quantized is not None
    assert reader.fast_operands is None and reader.quantized.T.data.data_ptr() == reader.quantized.data.data_ptr()


def test_readers_are_freed_with_their_source(streams: Streams) -> None:
    layer, weight, spec, entry = cached("rowwise")
    streams.now = 2
    reader = weight_cache.lookup(layer, "fprop", weight, spec, 0.0)
    assert reader is not None
    weight_cache.free(layer)
    assert reader.quantized is None and entry.quantized is None
    assert weight_cache.lookup(layer, "fprop", weight, spec, 0.0) is None

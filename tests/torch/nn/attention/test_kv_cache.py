"""Test that a cache returns its contents in order, and that decoding by token equals one forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.torch.nn.attention import attention
from tests.close import assert_bitwise, assert_close

MAKERS: dict[str, Callable[..., Any]] = {
    "plain": lambda layers, capacity: qt.KVCache(layers, capacity),
    "paged": lambda layers, capacity: qt.PagedKVCache(layers, 3 * -(-capacity // 4), page_size=4),
}
BOTH = pytest.mark.parametrize("kind", MAKERS)
#: Options of causal layers that decide which keys a token sees, and how positions count.
LAYERS: dict[str, dict[str, Any]] = {
    "rope, grouped": {"groups": 2, "normalization": "RMSNorm", "activation": "swiglu"},
    "window, sinks": {"groups": 2, "window": (3, -1), "sinks": "learnable"},
    "caps, norms around": {"soft_cap": 2.0, "norm_position": "sandwich", "scale": 0.2},
    "chunks, norms of heads after rope": {"chunk": 4, "qk_norm": "L2", "qk_norm_after_rope": True, "bias": False},
    "temperature, no rope": {"rope": None, "temperature": (0.4, 3)},
    "partial rope, parallel": {"rope": qt.RotaryEmbedding(8, fraction=0.5), "parallel": "two_norms"},
    "norms of all heads, separate": {"qk_norm": "RMSNorm", "qk_norm_scope": "all_heads", "fused": False},
    "ALiBi": {"rope": None, "alibi": True, "window": (2, 0)},
    "relative bias": {"rope": None, "position_bias": qt.RelativePositionBias(4, 8, 6, bidirectional=False)},
    "stretched rope": {
        "rope": qt.RotaryEmbedding(8, scaling={"rope_type": "dynamic", "factor": 2.0}, max_positions=16)
    },
}


def layer_of(name: str, mask_type: str = "causal") -> qt.TransformerLayer:
    """A layer of 32 features and 4 heads with large random parameters."""
    layer = qt.TransformerLayer(32, 4, 48, **{"rope": qt.RotaryEmbedding(8), "mask_type": mask_type} | LAYERS[name])
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def tokens(batch: int, count: int, dim: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, count, 2, dim).to(dtype)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_append(kind: str, dtype: torch.dtype) -> None:
    cache = MAKERS[kind](2, 12)
    k, v = tokens(3, 11, 4, dtype), tokens(3, 11, 6, dtype)
    k[0, 3], k[1, 2, 0, 0], v[2, 1] = torch.nan, torch.inf, -0.0
    start = 0
    for count in (5, 1, 0, 4, 1):
        end = start + count
        for layer in range(2):
            assert cache.length == start and cache.lengths.tolist() in ([start] * 3, [])
            keys, values = cache.update(layer, k[:, start:end] * (layer + 1), v[:, start:end] * (layer + 1))
            assert_bitwise(keys, k[:, :end] * (layer + 1), f"keys of {end}")
            assert_bitwise(values, v[:, :end] * (layer + 1), f"values of {end}")
        start = end
    assert cache.length == 11 and cache.batch == 3


@BOTH
def test_a_full_cache_gives_a_clear_error_and_writes_nothing(kind: str) -> None:
    cache = MAKERS[kind](1, 8)
    k, v = tokens(3, 6), tokens(3, 6)
    cache.update(0, k, v)
    messages = {
        "plain": r"holds 6 of 8 tokens, and 3 more do not fit; make it with a capacity of 9",
        "paged": r"3 more pages of 4 tokens are needed, and 0 of 6 are free",
    }
    with pytest.raises(ValueError, match=messages[kind]):
        cache.update(0, tokens(3, 3), tokens(3, 3))
    assert cache.length == 6
    more = tokens(3, 2)
    assert_bitwise(cache.update(0, more, more)[0], torch.cat([k, more], 1))
    with pytest.raises(ValueError, match=r"do not fit|are needed"):
        MAKERS[kind](1, 8).update(0, tokens(3, 9), tokens(3, 9))


@BOTH
def test_reorder_is_indexing(kind: str) -> None:
    cache = MAKERS[kind](2, 8)
    k, v = tokens(3, 5), tokens(3, 5, 6)
    for layer in range(2):
        cache.update(layer, k, v)
    cache.reorder(torch.tensor([2, 0, 2]))
    more = tokens(3, 2), tokens(3, 2, 6)
    for layer in range(2):
        keys, values = cache.update(layer, *more)
        assert_bitwise(keys, torch.cat([k[[2, 0, 2]], more[0]], 1))
        assert_bitwise(values, torch.cat([v[[2, 0, 2]], more[1]], 1))


@BOTH
def test_truncating_forgets_the_last_tokens(kind: str) -> None:
    cache = MAKERS[kind](1, 8)
    k, more = tokens(3, 7), tokens(3, 2)
    cache.update(0, k, k)
    cache.truncate(2 if kind == "plain" else [2, 2, 2])
    assert cache.length == 2
    assert_bitwise(cache.update(0, more, more)[0], torch.cat([k[:, :2], more], 1))
    with pytest.raises(ValueError, match="cannot be truncated to"):
        cache.truncate(5 if kind == "plain" else [1, 5, 1])


def test_sequences_of_different_lengths_come_and_go() -> None:
    rope = qt.RotaryEmbedding(8)
    cache = qt.PagedKVCache(1, pages=8, page_size=2)
    keys_and_values = {
        name: (torch.randn(1, n, 2, 8), torch.randn(1, n, 2, 8)) for name, n in (("a", 6), ("b", 3), ("c", 4))
    }
    ids = {}

    def prompt(name: str, count: int) -> None:
        ids[name] = cache.add()
        cache.use([ids[name]])
        k, v = keys_and_values[name]
        cache.update(0, rope(k[:, :count]), v[:, :count])

    def step(*names: str) -> None:
        """Decode the next token of each sequence; attention must equal that of each sequence alone."""
        cache.use([ids[n] for n in names])
        offset, at = cache.offset, cache.lengths.tolist()
        k, v = (
            torch.cat([keys_and_values[n][i][:, t : t + 1] for n, t in zip(names, at, strict=True)]) for i in (0, 1)
        )
        keys, values = cache.update(0, rope(k, offset=offset), v)
        assert cache.padding().sum(1).tolist() == [max(at) - t for t in at]
        mask, mask_type = cache.mask(None, "causal", 1)
        y = attention(rope(k, offset=offset), keys, values, mask_type=mask_type, mask=mask)
        for row, (name, t) in enumerate(zip(names, at, strict=True)):
            one_k, one_v = (m[:, : t + 1] for m in keys_and_values[name])
            whole = attention(rope(one_k), rope(one_k), one_v, mask_type="causal")
            assert_close(f"{name} at {t}", y[row], whole[0, -1:], 1e-6)

    prompt("a", 4)
    prompt("b", 1)
    step("a", "b")
    step("b", "a")
    assert cache.free_pages == 8 - 3 - 2
    cache.free(ids["a"])
    assert cache.free_pages == 6 and cache.sequences == [ids["b"]]
    keys_and_values["c"][0][0, 3] = torch.nan
    prompt("c", 4)
    cache.free(ids["c"])
    keys_and_values["d"] = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)
    prompt("d", 8)
    cache.truncate([5])
    step("d")
    cache.use(None)
    assert cache.sequences == [ids["b"], ids["d"]] and cache.lengths.tolist() == [3, 6]


def test_padding_never_exposes_the_nan_of_another_sequence() -> None:
    cache = qt.PagedKVCache(1, pages=4, page_size=2)
    bad, good = cache.add(), cache.add()
    cache.use([bad])
    cache.update(0, torch.full((1, 4, 1, 2), torch.nan), torch.full((1, 4, 1, 2), torch.nan))
    cache.use([good])
    cache.update(0, torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    cache.use([bad, good])
    keys, values = cache.update(0, torch.ones(2, 1, 1, 2), torch.ones(2, 1, 1, 2))
    assert keys[1].isfinite().all() and values[1].isfinite().all() and keys.shape == (2, 5, 1, 2)


@BOTH
def test_cached_keys_work_in_inference_mode_and_outside(kind: str) -> None:
    cache = MAKERS[kind](1, 8)
    k = tokens(3, 2)
    with torch.inference_mode():
        cache.update(0, k, k)
    cache.update(0, k, k)
    with torch.inference_mode():
        keys, _ = cache.update(0, k, k)
    assert_bitwise(keys, torch.cat([k, k, k], 1))


@BOTH
def test_invalid_arguments_give_a_clear_error(kind: str) -> None:
    cache = MAKERS[kind](2, 8)
    k = tokens(3, 2)
    with pytest.raises(ValueError, match=r"layer 2 of a cache for 2"):
        cache.update(2, k, k)
    with pytest.raises(ValueError, match=r"keys have shape \(3, 2, 2, 4\) and values \(3, 1, 2, 4\)"):
        cache.update(0, k, k[:, :1])
    with pytest.raises(ValueError, match=r"decode under torch\.no_grad\(\)"):
        cache.update(0, k.clone().requires_grad_(), k)
    cache.update(0, k, k)
    for other in (k[..., :3], k.double()):
        with pytest.raises(ValueError, match=r"the cache holds keys .*, but got"):
            cache.update(0, other, other)
    with pytest.raises(ValueError, match=r"the cache holds keys|has 2 rows and 3 sequences"):
        cache.update(0, k[:2], k[:2])
    assert cache.length_of(0) == 2 if kind == "plain" else cache.length_of(0).tolist() == [2, 2, 2]


def test_unknown_sequences_of_a_paged_cache_give_a_clear_error() -> None:
    cache = qt.PagedKVCache(1, pages=4, page_size=2)
    one = cache.add()
    with pytest.raises(ValueError, match=r"there is no sequence 7; the cache has \[0\]"):
        cache.free(7)
    with pytest.raises(ValueError, match="name one twice"):
        cache.use([one, one])
    with pytest.raises(ValueError, match="2 indices for 1 rows"):
        cache.reorder(torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="a cache needs positive numbers"):
        qt.PagedKVCache(1, pages=0)
    with pytest.raises(ValueError, match="a cache needs positive numbers"):
        qt.KVCache(1, 0)
    cache.update(0, torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    with pytest.raises(ValueError, match=r"which of the new tokens \[1, 1\] are padding; .* shape \(1, 3\)"):
        cache.mask(torch.zeros(1, 3, dtype=torch.bool), "padding_causal", 1)
    with pytest.raises(ValueError, match="without padding; use a PagedKVCache for prompts of different lengths"):
        qt.KVCache(1, 2).mask(torch.zeros(1, 1, dtype=torch.bool), "padding_causal", 1)
    with pytest.raises(ValueError, match="reorder it after the first update"):
        qt.KVCache(1, 2).reorder(torch.tensor([0]))


@BOTH
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_decodes_as_it_runs_whole(name: str, kind: str) -> None:
    """Two layers in a row."""
    layers = [layer_of(name) for _ in range(2)]
    x = torch.randn(3, 9, 32)
    cache = MAKERS[kind](2, 9)

    def run(part: Tensor, **options: Any) -> Tensor:
        for number, layer in enumerate(layers):
            part = layer(part, **(options | {"layer": number} if options else {}))
        return part

    with torch.no_grad():
        whole = run(x)
        steps = [run(part, cache=cache) for part in x.split([4, 1, 1, 2, 1], dim=1)]
        assert_close("outputs", torch.cat(steps, 1), whole, 1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_decodes_sequences_of_different_lengths(name: str) -> None:
    layer = layer_of(name)
    x, cache = torch.randn(2, 9, 32), qt.PagedKVCache(1, pages=8, page_size=4)
    long, short = cache.add(), cache.add()
    with torch.no_grad():
        whole = layer(x)
        cache.use([long])
        layer(x[:1, :6], cache=cache)
        cache.use([short])
        layer(x[1:, :2], cache=cache)
        cache.use([long, short])
        for step in range(3):
            y = layer(torch.stack([x[0, 6 + step], x[1, 2 + step]])[:, None], cache=cache)
            expected = torch.stack([whole[0, 6 + step], whole[1, 2 + step]])[:, None]
            assert_close(f"step {step}", y, expected, 1e-5)


@pytest.mark.parametrize("name", ["rope, grouped", "window, sinks"])
def test_a_layer_takes_padded_prompts_and_decodes_on(name: str) -> None:
    """A batch of prompts of 6 and 2 tokens, padded on the right; the padding is cut, then each goes on."""
    layer, alone = layer_of(name, "padding_causal"), layer_of(name)
    alone.load_state_dict(layer.state_dict())
    x, cache, lengths = torch.randn(2, 9, 32), qt.PagedKVCache(1, pages=8, page_size=4), [6, 2]
    with torch.no_grad():
        whole = alone(x)
        prompts = layer(x[:, :6], cache=cache, mask=torch.arange(6) >= torch.tensor(lengths)[:, None])
        cache.truncate(lengths)
        for row, length in enumerate(lengths):
            assert_close(f"prompt {row}", prompts[row, :length], whole[row, :length], 1e-5)
        for step in range(3):
            y = layer(torch.stack([x[0, 6 + step], x[1, 2 + step]])[:, None], cache=cache)
            assert_close(f"step {step}", y[:, 0], torch.stack([whole[0, 6 + step], whole[1, 2 + step]]), 1e-5)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_forward_that_broke_off_is_not_continued_unseen(kind: str) -> None:
    cache = MAKERS[kind](2, 8)
    k, more = tokens(3, 2), tokens(3, 1)
    for layer in (0, 1):
        cache.update(layer, k, k)
    cache.update(0, more, more)
    with pytest.raises(ValueError, match=r"layer 0 holds 3 tokens and layer 1 of the cache 2: .* truncate.. it to 2"):
        cache.update(0, more, more)
    cache.truncate(2 if kind == "plain" else [2, 2, 2])  # type: ignore[arg-type]
    assert_bitwise(cache.update(0, more, more)[0], torch.cat([k, more], 1))
    unused = MAKERS[kind](3, 8)
    for layer in (0, 1):
        unused.update(layer, k, k)
    with pytest.raises(ValueError, match="made for more layers than the model has"):
        unused.update(0, more, more)


@pytest.mark.parametrize("kind", MAKERS)
def test_an_index_of_no_row_gives_a_clear_error(kind: str) -> None:
    cache = MAKERS[kind](1, 8)
    cache.update(0, tokens(3, 2), tokens(3, 2))
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=r"are not all rows of the 3 cached sequences; give 0 to 2"):
            cache.reorder(torch.tensor([0, 1, wrong]))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    "options, mask, message",
    [
        ({"mask_type": "causal"}, torch.zeros(1, 3) > 0, "'causal' takes no mask|new tokens .3, 3. are padding"),
        ({"mask_type": "none", "window": (2, 0)}, None, "mask_type 'none' count from the first"),
        ({"mask_type": "none", "chunk": 2}, None, "mask_type 'none' count from the first"),
        ({"mask_type": "none", "alibi": True}, None, "mask_type 'none' count from the first"),
    ],
)
def test_options_incompatible_with_a_cache_are_refused_first(
    kind: str, options: dict[str, Any], mask: Tensor | None, message: str
) -> None:
    attention, cache = qt.MultiheadAttention(16, 2, **options), MAKERS[kind](1, 8)
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        attention(torch.randn(3, 3, 16), cache=cache, mask=mask)
    assert cache.length == 0


@BOTH
def test_reset_accepts_another_batch_and_dtype(kind: str) -> None:
    cache = MAKERS[kind](1, 8)
    cache.update(0, tokens(3, 6), tokens(3, 6))
    cache.reset()
    assert cache.length == 0
    k = tokens(2, 4, 8, torch.bfloat16)
    assert_bitwise(cache.update(0, k, k)[0], k)


def test_reorder_widens_a_batch_into_beams() -> None:
    cache = qt.KVCache(1, 4)
    k, more, beams = tokens(2, 3), tokens(4, 1), [0, 0, 1, 1]
    cache.update(0, k, k)
    cache.reorder(torch.tensor(beams))
    assert_bitwise(cache.update(0, more, more)[0], torch.cat([k[beams], more], 1))

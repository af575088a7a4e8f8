"""Generation with `InferenceParams` agrees with a forward of all tokens, while sequences start and end."""

from collections import OrderedDict
from typing import Any

import pytest
import torch

import quaver.compat.transformer_engine.pytorch as te
from tests.close import assert_close

LENGTHS = {"a": 5, "b": 3, "c": 4}


def model(layout: str) -> Any:
    torch.manual_seed(0)
    return [
        te.TransformerLayer(32, 64, 4, num_gqa_groups=2, layer_number=i + 1, attn_input_format=layout).eval()
        for i in range(2)
    ]


def run(layers: Any, x: torch.Tensor, rope: torch.Tensor, layout: str, cache: Any = None) -> torch.Tensor:
    y = x if layout == "bshd" else x.transpose(0, 1)
    for layer in layers:
        options = {} if cache is None else {"inference_params": cache, "self_attn_mask_type": "padding_causal"}
        y = layer(y, rotary_pos_emb=rope, **options)
    return y if layout == "bshd" else y.transpose(0, 1)


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize(
    "paged", [{}, {"is_paged": True, "total_num_pages": 12, "page_size": 4}], ids=["whole", "paged"]
)
@torch.no_grad()
def test_decoding_with_a_cache_equals_one_forward(layout: str, paged: dict[str, Any]) -> None:
    layers, rope = model(layout), te.RotaryPositionEmbedding(8)(16)
    tokens = {name: torch.randn(1, 10, 32) for name in "abcd"}
    whole = {name: run(layers, x, rope, layout) for name, x in tokens.items()}
    cache = te.InferenceParams(4, 16, num_heads_kv=2, head_dim_k=8, dtype=torch.float32, **paged)

    def step(new: dict[str, int], before: dict[str, int]) -> None:
        cache.pre_step(OrderedDict(new))
        assert cache.get_seqlens_pre_step().tolist() == [before[s] for s in new]
        longest = max(new.values())
        x = torch.stack(
            [
                torch.nn.functional.pad(tokens[s][0, before[s] : before[s] + n], (0, 0, 0, longest - n))
                for s, n in new.items()
            ]
        )
        y = run(layers, x, rope, layout, cache)
        for row, (s, n) in zip(y, new.items(), strict=True):
            assert_close(f"{s} from {before[s]}", row[:n], whole[s][0, before[s] : before[s] + n], 1e-5)

    step(LENGTHS, dict.fromkeys(LENGTHS, 0))
    step(dict.fromkeys(LENGTHS, 1), LENGTHS)
    # One is over, another one comes, and rows change their order.
    step({"c": 1, "d": 2, "a": 1}, {"c": 5, "d": 0, "a": 6})
    step({"a": 2, "c": 1, "d": 3}, {"a": 7, "c": 6, "d": 2})
    cache.reset()
    step({"b": 4}, {"b": 0})


def test_a_step_without_pre_step_gives_a_clear_error() -> None:
    layer, cache = model("bshd")[0], te.InferenceParams(2, 4)
    with pytest.raises(ValueError, match=r"2 rows, and the step has 0: call pre_step"), torch.no_grad():
        layer(torch.randn(2, 3, 32), inference_params=cache)
    cache.pre_step({"a": 5, "b": 1})
    with pytest.raises(ValueError, match="more pages of 4 tokens are needed"), torch.no_grad():
        layer(torch.randn(2, 5, 32), inference_params=cache)
    with pytest.raises(ValueError, match="needs total_num_pages and page_size"):
        te.InferenceParams(2, 4, is_paged=True)

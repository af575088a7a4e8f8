"""Compare equivalent attention masks, and show the options of attention. In every mask True means masked out."""

import torch
from torch import Tensor

from quaver.torch.nn.attention import DotProductAttention, attention, explain_attention

torch.manual_seed(0)
BATCH, TOKENS, HEADS, GROUPS, FEATURES = 2, 10, 4, 2, 16
q = torch.randn(BATCH, TOKENS, HEADS, FEATURES)
k, v = torch.randn(2, BATCH, TOKENS, GROUPS, FEATURES)

i, j = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)  # positions of queries and keys
lengths = torch.tensor([10, 6])
padded = torch.arange(TOKENS) >= lengths[:, None]  # [B, S]: the second sample ends early
either = padded[:, None, :, None] | padded[:, None, None, :]  # masks padded queries and padded keys


def same(what: str, one: Tensor, other: Tensor) -> None:
    difference = (one - other).abs().max().item()
    print(f"{what:<66} differ by {difference:.0e}")
    assert difference < 1e-5, what


causal = attention(q, k, v, mask_type="causal")
same("causal, and the triangle as a mask", causal, attention(q, k, v, mask_type="arbitrary", mask=j > i))
infinite = torch.zeros(TOKENS, TOKENS).masked_fill(j > i, -torch.inf)
same("causal, and the triangle as an additive bias", causal, attention(q, k, v, bias=infinite))

same(
    "padding, and the same pairs as a mask",
    attention(q, k, v, mask_type="padding", mask=padded),
    attention(q, k, v, mask_type="arbitrary", mask=either),
)
both = attention(q, k, v, mask_type="padding_causal", mask=padded)
same("padding_causal, and as a mask", both, attention(q, k, v, mask_type="arbitrary", mask=either | (j > i)))

ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])  # [0, 10, 16]
ragged = attention(q[~padded], k[~padded], v[~padded], mask_type="causal", layout="thd", cu_seqlens=ends)
same("padding_causal, and the tokens laid end to end without padding", both[~padded], ragged)
print("a query that sees nothing gives 0:", not both[padded].any())

window = attention(q, k, v, mask_type="causal", window=(3, 0))  # itself and three keys before
same(
    "a causal window of (3, 0), and as a mask",
    window,
    attention(q, k, v, mask_type="arbitrary", mask=(j > i) | (j < i - 3)),
)
same("causal with a window, and a window alone", window, attention(q, k, v, window=(3, 0)))

last = attention(q[:, -2:], k, v, mask_type="causal_bottom_right")
same("the last two queries by themselves, aligned bottom right, and causal", last, causal[:, -2:])

# A sink adds a logit to the softmax, without a value. off_by_one is a logit of 0, as for a key of zeros.
nothing = torch.zeros(BATCH, 1, GROUPS, FEATURES)
same(
    "an off-by-one sink, and a key and a value of zeros",
    attention(q, k, v, sinks="off_by_one"),
    attention(q, torch.cat([k, nothing], 1), torch.cat([v, nothing], 1)),
)
learnable = DotProductAttention(HEADS, FEATURES, groups=GROUPS, mask_type="causal", sinks="learnable")
same(
    "a learnable sink begins as off by one",
    learnable(q, k, v),
    attention(q, k, v, mask_type="causal", sinks="off_by_one"),
)

print(explain_attention(q, k, v, mask_type="causal", window=(3, 0), sinks="off_by_one"))
try:
    attention(q, k, v, mask_type="padding", mask=(~padded).float())
except ValueError as error:
    print("refused:", error)

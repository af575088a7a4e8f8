"""Test attention over a split sequence against one process: bit for bit with equal sum order, else within 1e-6."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quaver import recipes
from quaver.torch.nn.attention import attention
from quaver.torch.parallel.context import attention as across
from quaver.torch.parallel.context.comm import ChunkOrder, pack, spec_of, unpack
from tests import two_ranks
from tests.close import assert_bitwise
from tests.torch.parallel.traffic import Seen
from tests.two_ranks import world

TOKENS, HEADS = 48, 4
RAGGED = torch.tensor([0, 5, 5, 29, 30, 48], dtype=torch.int32)

#: Options of attention besides q, k and v, and the number of key heads (`groups`).
ASKED: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"mask_type": "causal"},
    "causal with sinks": {"mask_type": "causal", "sinks": True},
    "causal, groups": {"mask_type": "causal", "groups": HEADS},
    "causal, window": {"mask_type": "causal", "window": (7, 0)},
    "both ways, window": {"window": (9, 3)},
    "causal, soft cap": {"mask_type": "causal", "soft_cap": 2.0, "scale": 0.7},
    "causal, ALiBi": {"mask_type": "causal", "alibi_slopes": True},
    "both ways, ALiBi": {"alibi_slopes": True},
    "causal, chunks": {"mask_type": "causal", "chunk": 11},
    "both ways, chunks": {"chunk": 13},
    "off by one": {"mask_type": "causal_bottom_right", "sinks": "off_by_one", "layout": "sbhd"},
    "values of other features": {"mask_type": "causal", "narrow": 8},
    "ragged": {"layout": "thd"},
    "ragged causal": {"layout": "thd", "mask_type": "causal"},
    "ragged causal, window": {"layout": "thd", "mask_type": "causal", "window": (4, 0)},
    "ragged, window": {"layout": "thd", "window": (4, 2)},
    "ragged causal, chunks and sinks": {"layout": "thd", "mask_type": "causal", "chunk": 6, "sinks": True},
    "ragged, ALiBi": {"layout": "thd", "alibi_slopes": True},
}
#: Cases that also run without load balancing.
UNBALANCED = "none", "causal", "both ways, window", "ragged causal, window"
#: Cases that also run on four ranks, where chunks are shorter than windows and sequences.
FOUR_RANKS = (
    *("none", "causal with sinks", "causal, window", "both ways, window", "both ways, ALiBi", "both ways, chunks"),
    *("ragged", "ragged causal", "ragged causal, window", "ragged, window", "ragged causal, chunks and sinks"),
)


class AttentionCase:
    """Inputs and options of one case; every rank has the full sequence."""

    def __init__(self, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        self.options = dict(options)
        groups, narrow = self.options.pop("groups", world()), self.options.pop("narrow", 16)
        layout = self.options.get("layout", "bshd")
        self.dim = 1 if layout == "bshd" else 0
        before = {"bshd": (2, TOKENS), "sbhd": (TOKENS, 2), "thd": (TOKENS,)}[layout]
        random = torch.Generator().manual_seed(0)
        sizes = (HEADS, 16), (groups, 16), (groups, narrow), (HEADS, narrow)
        self.q, self.k, self.v, self.grad = (torch.randn(*before, *of, generator=random).to(dtype) for of in sizes)
        self.q = self.q * 3
        if layout == "thd":
            self.options["cu_seqlens"] = RAGGED
        if self.options.get("alibi_slopes"):
            self.options["alibi_slopes"] = torch.tensor([0.5, 0.25, 0.1, 0.02])
        self.sinks = torch.randn(HEADS, generator=random) if self.options.get("sinks") is True else None

    def single_process(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Output and gradients of one process."""
        q, k, v, grad = (x.to(dtype or x.dtype, copy=True) for x in (self.q, self.k, self.v, self.grad))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        return self.run(lambda **options: attention(*leaves, **options), q, k, v, grad)

    def sharded(self, balanced: bool, **how: Any) -> list[Tensor]:
        """Output and gradients of all ranks, concatenated."""
        order, rank = ChunkOrder(world(), balanced), dist.get_rank()
        q, k, v = (order.cut(x, self.dim, rank).requires_grad_() for x in (self.q, self.k, self.v))
        grad = order.cut(self.grad, self.dim, rank)
        got = self.run(
            lambda **options: across.context_parallel_attention(q, k, v, balanced=balanced, **how, **options),
            q,
            k,
            v,
            grad,
        )
        wholes = [order.join(two_ranks.gathered(x), self.dim) for x in got[:4]]
        return wholes + [torch.stack(two_ranks.gathered(x)).sum(0) for x in got[4:]]

    def run(self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
        options, leaves = dict(self.options), [q, k, v]
        if self.sinks is not None:
            options["sinks"] = self.sinks.clone().requires_grad_()
            leaves.append(options["sinks"])
        out = attend(**options)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def split(self, balanced: bool) -> list[Tensor]:
        """One process that attends chunk by chunk and sums gradients in the order of ranks."""
        order, dim = ChunkOrder(world(), balanced), self.dim
        outs, dqs, sums = [], [], [torch.zeros_like(x) for x in (self.k, self.v)]
        for rank in range(world()):
            own = [torch.zeros_like(x) for x in sums]
            rows, dq = [], []
            for a, b in order.spans(rank, TOKENS):
                q = self.q.narrow(dim, a, b - a).clone().requires_grad_()
                k, v = (x.narrow(dim, 0, b).clone().requires_grad_() for x in (self.k, self.v))
                y = attention(q, k, v, mask_type="causal_bottom_right")
                gradients = torch.autograd.grad(y, (q, k, v), self.grad.narrow(dim, a, b - a))
                rows.append(y.detach())
                dq.append(gradients[0])
                for total, g in zip(own, gradients[1:], strict=True):
                    total.narrow(dim, 0, b).add_(g)
            outs.append(torch.cat(rows, dim))
            dqs.append(torch.cat(dq, dim))
            sums = own if rank == 0 else [total + part for total, part in zip(sums, own, strict=True)]
        return [order.join(outs, dim), order.join(dqs, dim), *sums]


def assert_near(got: list[Tensor], wanted: list[Tensor], what: str, bound: float = 1e-6) -> None:
    for name, a, b in zip(("output", "dq", "dk", "dv", "dsinks"), got, wanted, strict=False):
        away = (a - b).abs().max() / b.abs().max()
        assert away <= bound, f"{what}: {name} is {away:.2g} of the largest away"
    assert len(got) == len(wanted)


def every_option(rank: int) -> None:
    for name, options in ASKED.items():
        if world() > 2 and name not in FOUR_RANKS:
            continue
        given = AttentionCase(options)
        wanted = given.single_process()
        for balanced in (True, False) if name in UNBALANCED else (True,):
            for how in across.WAYS:
                got = given.sharded(balanced, how=how)
                what = f"{name}, {how}, balanced {balanced}"
                assert_near(got, wanted, what)
                if how == "all_to_all":
                    for a, b in zip(got[:4], wanted[:4], strict=True):
                        assert_bitwise(a, b, what)


def sums_in_the_same_order(rank: int) -> None:
    for balanced in (True, False):
        given = AttentionCase({"mask_type": "causal"})
        for a, b in zip(given.sharded(balanced, how="gather"), given.split(balanced), strict=True):
            assert_bitwise(a, b, f"balanced {balanced}")


def sixteen_bits(rank: int) -> None:
    """In bf16, outputs are within one rounding of one process, and gradients within two."""
    given = AttentionCase({"mask_type": "causal"}, torch.bfloat16)
    wanted = [x.float() for x in given.single_process()]
    for how in across.WAYS:
        got = given.sharded(True, how=how)
        assert all(x.dtype is torch.bfloat16 for x in got)
        assert_near([x.float() for x in got], wanted, how, 2**-7)


def eight_bits(rank: int) -> None:
    """Keys and values sent as codes equal those that one process quantizes and dequantizes for each rank."""
    order = ChunkOrder(world())
    for recipe in ("mxfp8", "rowwise", "tensorwise", "blockwise"):
        spec = spec_of(recipe)
        given = AttentionCase({"mask_type": "causal", "groups": HEADS})
        dequantized = AttentionCase({"mask_type": "causal", "groups": HEADS})
        for name in ("k", "v"):
            sharded = [order.cut(getattr(given, name), 1, other) for other in range(world())]
            back = [unpack([x[0] for x in pack(part[None], spec)], spec, part.dtype) for part in sharded]
            setattr(dequantized, name, order.join(back, 1))
        wanted = dequantized.single_process()
        for how in across.WAYS if recipe == "mxfp8" else ("ring",):
            assert_near(given.sharded(True, how=how, quantized=recipe), wanted, f"{how} {recipe}")
        split = dequantized.split(True)
        for a, b in zip(given.sharded(True, how="gather", quantized=recipe), split, strict=True):
            assert_bitwise(a, b, recipe)


def bytes_sent(rank: int) -> None:
    """In forward, codes and scales of keys and values take at most 52 % of the bytes of bf16."""
    random = torch.Generator().manual_seed(rank)
    for features, named in ((64, ("mxfp8", "tensorwise")), (128, ("mxfp8", "rowwise", "blockwise", "tensorwise"))):
        q, k, v = (torch.randn(1, 8, 4, features, generator=random).bfloat16() for _ in range(3))
        for how in across.WAYS:
            sent = {}
            for recipe in (None, *named):
                with Seen() as traffic, torch.no_grad():
                    across.context_parallel_attention(q, k, v, how=how, mask_type="causal", quantized=recipe)
                sent[recipe] = sum(traffic.bytes[kind] for kind in ("gather", "exchange", "send"))
                if how == "all_to_all":
                    # Queries and outputs are sent unquantized.
                    sent[recipe] -= 2 * q.nbytes // world() * (world() - 1)
            whole = (k.nbytes + v.nbytes) * (world() - 1)
            assert sent[None] == (whole // world() if how == "all_to_all" else whole), (how, sent)
            for recipe in named:
                assert sent[recipe] <= 0.52 * sent[None], f"{how} {recipe}: {sent[recipe] / sent[None]:.3f}"


def odd_values(rank: int) -> None:
    """NaN, infinities, zeros and subnormals affect only queries that see them; errors for huge numbers are bounded."""
    for how in across.WAYS:
        for value in (torch.nan, torch.inf, 1e-40, 0.0):
            given = AttentionCase({"mask_type": "causal"})
            given.k[0, 20, 0, 3] = value
            given.v[1] = 0.0
            got, wanted = given.sharded(True, how=how), given.single_process()
            lost, sound = got[0].isnan(), ~got[0].isnan()
            # torch adds tensor masks, so a NaN key gives NaN for all queries of its chunk.
            chunk = TOKENS // (2 * world())
            compared = torch.arange(TOKENS) // chunk != 20 // chunk if how == "gather" else torch.arange(TOKENS) >= 0
            assert torch.equal(lost[:, compared], wanted[0].isnan()[:, compared]), f"{how} {value}"
            assert lost[wanted[0].isnan()].all()
            assert (got[0][sound] - wanted[0][sound]).abs().max() <= 1e-6 * wanted[0][sound].abs().max()
        given = AttentionCase({"mask_type": "causal"})
        given.q[0, 5] = 1e4
        exact = given.single_process(torch.float64)
        for a, b, truth in zip(given.sharded(True, how=how), given.single_process(), exact, strict=True):
            away, of_one = ((x - truth).abs().max() / truth.abs().max() for x in (a, b))
            assert away <= 4 * of_one + 1e-6, f"{how}: {away:.2g} from float64, and one process {of_one:.2g}"


def attention_in_eight_bits(rank: int) -> None:
    recipe = recipes.mxfp8(attention=True)
    given = AttentionCase({"mask_type": "causal", "recipe": recipe})
    for a, b in zip(given.sharded(True, how="all_to_all"), given.single_process(), strict=True):
        assert_bitwise(a, b)
    for how in ("gather", "ring"):
        with pytest.raises(ValueError, match="use how='all_to_all', or a recipe without attention=True"):
            given.sharded(True, how=how)


def bad_input(rank: int) -> None:
    q = torch.randn(1, 8, 4, 16)
    k = torch.randn(1, 8, 1, 16)

    def raises(message: str, *qkv: Tensor, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            across.context_parallel_attention(*(qkv or (q, q, q)), **options)

    raises("4 query heads and 1 key and value heads, and both must be multiples of . ranks", q, k, k, how="all_to_all")
    raises("no how 'rings'|how 'rings'|'rings'", how="rings")
    raises("7 queries and 7 keys; each rank needs", q[:, :7], q[:, :7], q[:, :7])
    raises("8 queries and 6 keys", q, k[:, :6], k[:, :6])
    raises("0 queries and 0 keys", q[:, :0], q[:, :0], q[:, :0])
    raises("layout 'thd' with cu_seqlens", mask_type="padding", mask=torch.zeros(1, 8, dtype=torch.bool))
    raises("has a bias", bias=torch.zeros(8, 8))
    raises("has dropout 0.1", dropout=0.1)
    raises("cannot be sent in recipe nvfp4, which", quantized="nvfp4")
    raises("cannot be sent in recipe delayed", quantized="delayed")
    raises("cannot be sent in recipe bf16, which quantizes no input", quantized="bf16")
    raises("require a gradient", alibi_slopes=torch.ones(4, requires_grad=True))
    raises(
        f"ends at 8 and there are {8 * world()} tokens", q[0], q[0], q[0], layout="thd", cu_seqlens=torch.tensor([0, 8])
    )
    raises("differ for queries and keys", cu_seqlens=(torch.tensor([0]), torch.tensor([0])))
    both = two_ranks.mesh(1, world(), names=("dp", "cp"))
    raises(r"this one has 2, \('dp', 'cp'\); give one dimension, such as mesh\['cp'\]", mesh=both)
    assert across.context_parallel_attention(q, q, q, mesh=both["cp"]).shape == q.shape
    chunks = 2 * world()
    with pytest.raises(ValueError, match=f"10 tokens .* does not divide into {chunks} chunks .*; pad it to"):
        ChunkOrder(world()).cut(torch.zeros(1, 10), 1, 0)
    for how in across.WAYS:
        leaf = q.clone().requires_grad_()
        (g,) = torch.autograd.grad(
            across.context_parallel_attention(q, leaf, q, how=how).sum(), leaf, create_graph=True
        )
        with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
            g.sum().backward()


CASES = [
    *(every_option, sums_in_the_same_order, sixteen_bits, eight_bits, bytes_sent, odd_values, attention_in_eight_bits),
    bad_input,
]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.ranks
def test_split_sequences_attend_like_the_whole(tmp_path: Path, ranks: int) -> None:
    two_ranks.run(__name__, tmp_path, ranks)


if __name__ == "__main__":
    two_ranks.main(CASES)

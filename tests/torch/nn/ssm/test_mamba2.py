"""The Mamba-2 block: its parts one after the other, transformers' mixers, recipes, packing, padding and decoding."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quaver.torch as qt
from quaver.torch.nn.ssm.mamba2 import GATES, Mamba2
from tests.close import assert_bitwise, assert_close
from tests.torch.nn.pairs import assert_same_training

SIZES: dict[str, Any] = {"inner": 48, "head_dim": 8, "state": 16, "groups": 2}


def make(dim: int = 32, **options: Any) -> Mamba2:
    torch.manual_seed(0)
    block = Mamba2(dim, **(SIZES | options))
    with torch.no_grad():
        for name in ("D", "dt_bias"):
            block.get_parameter(name).add_(torch.randn(block.heads) * 0.3)
    return block


def layer_by_layer(block: Any, x: Tensor) -> Tensor:
    """The layers called one after the other."""
    u = x if block.norm is None else block.norm(x)
    z, mixed, dt = block.in_proj(u).split((48, 112, 6), -1)
    value, B, C = block.conv1d(mixed).split((48, 32, 32), -1)
    y, _ = qt.ssd(
        value.unflatten(-1, (6, 8)),
        dt,
        -torch.exp(block.A_log.float()),
        B.unflatten(-1, (2, 16)),
        C.unflatten(-1, (2, 16)),
        block.D,
        dt_bias=block.dt_bias,
        dt_limit=block.dt_limit,
    )
    y = y.flatten(-2)
    gated: Tensor = qt.activate("swiglu", z, y) if block.gated_norm is None else block.gated_norm(y, z)
    projected: Tensor = block.out_proj(gated)
    return projected


@pytest.mark.parametrize("recipe", [None, "mxfp8", "delayed", "nvfp4"])
@pytest.mark.parametrize("gate", GATES)
def test_it_has_the_bits_of_its_parts(gate: str, recipe: str | None) -> None:
    block = make(gate=gate, normalization="RMSNorm", dt_limit=(0.01, 0.5))
    runs = [lambda block, x: block(x), layer_by_layer]
    assert_same_training(block, runs, recipe, [torch.randn(2, 9, 32) for _ in range(2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_trains_in_few_bits_and_under_autocast(dtype: torch.dtype) -> None:
    block, x = make(), torch.randn(2, 20, 32)
    truth = block(x)
    narrow = make(dtype=dtype)
    narrow.load_state_dict(block.state_dict())
    y = narrow(x.to(dtype))
    assert y.dtype is dtype
    assert_close("in few bits", y, truth, 2e-2)
    with torch.autocast("cpu", dtype), qt.autocast("tensorwise"):
        y = block(x)
    assert y.dtype is dtype
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in block.parameters())


def test_compiled_in_one_graph_gives_eager_bits() -> None:
    torch.compiler.reset()
    block = make(normalization="RMSNorm", dtype=torch.bfloat16)
    compiled = torch.compile(lambda block, x: block(x), fullgraph=True, backend="aot_eager")
    x = [torch.randn(2, 9, 32).bfloat16() for _ in range(2)]
    assert_same_training(block, [lambda block, x: block(x), compiled], "mxfp8", x)


# Decoding, padding and packing.


@pytest.mark.parametrize("lengths", [[1] * 12, [5, 1, 1, 5], [12], [2, 10]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_in_sequence_equal_the_whole(lengths: list[int], dtype: torch.dtype) -> None:
    block, x = make(normalization="RMSNorm", dtype=dtype), torch.randn(2, 12, 32).to(dtype)
    cache = qt.StateCache(1)
    with torch.no_grad():
        whole = block(x)
        parts = [block(part, cache=cache) for part in x.split(lengths, 1)]
    assert cache.length == 12
    assert_close("parts", torch.cat(parts, 1), whole, 1e-6 if dtype is torch.float32 else 1e-2)


def test_padding_before_a_sequence_leaves_no_trace() -> None:
    block, x = make(bias=True), torch.randn(2, 9, 32)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[1, :4] = True
    y = block(x, mask=mask)
    assert_close("the padded one", y[1, 4:], block(x[1:, 4:])[0], 1e-6)
    assert_close("the other", y[0], block(x[:1])[0], 1e-6)
    spoiled = x.masked_fill(mask[..., None], float("nan"))
    assert torch.equal(block(spoiled, mask=mask)[~mask], y[~mask])
    cache = qt.StateCache(1)
    with torch.no_grad():
        block(spoiled, mask=mask, cache=cache)
        token = torch.randn(2, 1, 32)
        decoded = block(token, cache=cache)
        alone = block(torch.cat((x[1:, 4:], token[1:]), 1))
    assert_close("what it goes on with", decoded[1], alone[0, -1:], 1e-6)


def test_packed_sequences_are_independent() -> None:
    block, x = make(normalization="RMSNorm"), torch.randn(30, 32, requires_grad=True)
    ends = [0, 7, 7, 8, 30]
    y = block(x, cu_seqlens=torch.tensor(ends))
    alone = torch.cat([block(x[None, a:b])[0] for a, b in pairwise(ends)])
    assert_close("outputs", y, alone, 1e-6)
    grads = [torch.autograd.grad(t.square().sum(), (x, *block.parameters())) for t in (y, alone)]
    for one, other in zip(*grads, strict=True):
        assert_close("gradients", one, other, 2e-6)


def test_zero_tokens_and_one_token() -> None:
    block = make()
    assert block(torch.empty(2, 0, 32)).shape == (2, 0, 32)
    assert block(torch.empty(0, 4, 32)).shape == (0, 4, 32)
    block(torch.randn(2, 1, 32)).sum().backward()
    assert block.in_proj.weight.grad is not None and block.in_proj.weight.grad.any()


# What it begins with, and what it is equal to.


def test_parameters_have_the_expected_initial_values() -> None:
    torch.manual_seed(0)
    block = Mamba2(64, head_dim=2, dt_range=(0.01, 0.2), A_range=(2.0, 5.0))
    steps, decays = F.softplus(block.dt_bias), block.A_log.exp()
    assert 0.0099 <= steps.min() < 0.03 and 0.1 < steps.max() <= 0.201
    assert 2.0 <= decays.min() < 2.5 and 4.5 < decays.max() <= 5.01
    assert_bitwise(block.D, torch.ones(64))
    meta = Mamba2(64, head_dim=2, device="meta", dtype=torch.bfloat16)
    assert meta(torch.empty(2, 5, 64, device="meta", dtype=torch.bfloat16)).shape == (2, 5, 64)
    meta.to_empty(device="cpu").reset_parameters()
    assert all(p.isfinite().all() for p in meta.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner": 50}, "50 inner features do not divide into heads of 8"),
        ({"groups": 4}, "6 heads cannot share 4 groups"),
        ({"gate": "last"}, "give one of 'gate_first'"),
        ({"gate_groups": 5}, "do not divide into 5 groups"),
        ({"dt_range": (0.0, 0.1)}, "dt_range is"),
        ({"conv_activation": "geglu"}, "takes two tensors"),
        ({"taps": 0}, "0 taps computes nothing"),
        ({"chunk_size": 0}, "chunk_size is 0; give 1 to 256"),
        ({"chunk_size": 2.5}, "chunk_size is 2.5; give 1 to 256"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_give_a_clear_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)(torch.randn(1, 2, 32))
    with pytest.raises(TypeError, match="did you mean 'head_dim'"):
        Mamba2(32, headdim=8)  # type: ignore[call-arg]


def test_inputs_that_do_not_fit_give_a_clear_error() -> None:
    block, x = make(), torch.randn(2, 9, 32)
    for given, message in (
        ({"x": x[0]}, r"give \[batch, tokens, 32\]"),
        ({"x": x[..., :31]}, "got an input of shape"),
        ({"x": x, "mask": torch.zeros(2, 8, dtype=torch.bool)}, "give bool"),
        ({"x": x, "mask": torch.zeros(2, 9)}, "True where a token is padding"),
        ({"x": x[0], "cu_seqlens": torch.tensor([0, 4])}, "ends at 4 and there are 9"),
        (
            {"x": x[0], "cu_seqlens": torch.tensor([0, 9]), "cache": qt.StateCache(1)},
            "a cache cannot be combined with cu_seqlens",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            block(**given)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cu_seqlens: it is a list; give a Tensor"):
        block(x[0], cu_seqlens=[0, 9])  # type: ignore[arg-type]
    block.in_proj = qt.Linear(32, 83, bias=False)
    with pytest.raises(ValueError, match="cannot be sharded across ranks"):
        block(x)

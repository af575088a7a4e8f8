"""Rotary positions against complex multiplication in float64."""

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver.torch import RotaryEmbedding, apply_rotary
from tests.close import assert_bitwise, assert_close
from tests.pairs import case_name, pairs
from tests.torch.test_compile import WITHOUT_CODE

INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True])
FRACTION = pytest.mark.parametrize("fraction", [1.0, 0.5])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def expected(x: Tensor, positions: Any, turning: int, interleaved: bool) -> np.ndarray:
    """x [B, S, H, D], positions [B, S]; pairs of features are complex numbers."""
    y = x.detach().double().numpy().copy()
    half = turning // 2
    angle = np.asarray(positions)[..., None] * 10_000.0 ** (-np.arange(half) / half)
    first = slice(0, turning, 2) if interleaved else slice(0, half)
    second = slice(1, turning, 2) if interleaved else slice(half, turning)
    z = (y[..., first] + 1j * y[..., second]) * np.exp(1j * angle)[:, :, None]
    y[..., first], y[..., second] = z.real, z.imag
    return y


COUNTED = np.tile(np.arange(5), (2, 1))
STARTS = np.array([[3], [11]])
WHERE: dict[str, tuple[dict[str, Any], Any]] = {
    "counted": ({}, COUNTED),
    "positions": ({"positions": torch.tensor([4, 0, 2, 2, 9])}, np.tile([4, 0, 2, 2, 9], (2, 1))),
    "int32": ({"positions": torch.tensor([4, 0, 2, 2, 9], dtype=torch.int32)}, np.tile([4, 0, 2, 2, 9], (2, 1))),
    "per sequence": ({"positions": torch.arange(10).view(2, 5)}, np.arange(10).reshape(2, 5)),
    "offset": ({"offset": 7}, COUNTED + 7),
    "offset tensor": ({"offset": torch.tensor(7)}, COUNTED + 7),
    "offsets": ({"offset": torch.tensor([3, 11])}, COUNTED + STARTS),
    "both": ({"positions": torch.arange(5) * 2, "offset": torch.tensor([3, 11])}, COUNTED * 2 + STARTS),
}


@INTERLEAVED
@FRACTION
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_rope_rotates_pairs_and_its_gradient_rotates_back(
    interleaved: bool, fraction: float, where: str, layout: str
) -> None:
    x, g = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8)
    options, positions = WHERE[where]
    rope = RotaryEmbedding(8, fraction=fraction, interleaved=interleaved)
    given = (x.transpose(0, 1) if layout == "sbhd" else x).contiguous().requires_grad_()
    y = rope(given, layout=layout, **options)
    y.backward(g.transpose(0, 1) if layout == "sbhd" else g)
    y, grad = (t.transpose(0, 1) if layout == "sbhd" else t for t in (y, given.grad))
    turning = int(8 * fraction)
    assert_close("output", y, expected(x, positions, turning, interleaved), 1e-6)
    assert_close("gradient", grad, expected(g, -positions, turning, interleaved), 1e-6)


@pytest.mark.parametrize(
    ("offset", "lengths", "dtype"),
    pairs(("none", "number", "each", "positions"), ((3, 4), (1, 0, 6), (0, 0, 7, 0)), (torch.int32, torch.int64)),
    ids=case_name,
)
def test_ragged_sequences_restart_their_positions(dtype: torch.dtype, lengths: tuple[int, ...], offset: str) -> None:
    x = torch.randn(7, 3, 8)
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=dtype)
    each = torch.arange(len(lengths)) * 10
    counted = np.concatenate([np.arange(n) for n in lengths])
    options, positions = {
        "none": ({}, counted),
        "number": ({"offset": 5}, counted + 5),
        "each": ({"offset": each}, counted + np.repeat(each.numpy(), lengths)),
        "positions": ({"positions": torch.arange(7) * 3}, np.arange(7) * 3),
    }[offset]
    rope = RotaryEmbedding(8)
    y = rope(x, layout="thd", cu_seqlens=cu_seqlens, **options)
    assert_close(offset, y, expected(x[None], positions[None], 8, False)[0], 1e-6)
    if offset == "positions":
        assert_bitwise(rope(x, layout="thd", **options), y)


def test_an_empty_batch_is_no_error() -> None:
    rope = RotaryEmbedding(8)
    assert rope(torch.empty(0, 5, 2, 8)).shape == (0, 5, 2, 8)
    assert rope(torch.empty(2, 0, 2, 8)).shape == (2, 0, 2, 8)
    empty = torch.zeros(2, dtype=torch.int64)
    assert rope(torch.empty(0, 2, 8), layout="thd", cu_seqlens=empty).shape == (0, 2, 8)
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    scaled = RotaryEmbedding(8, scaling=longrope, max_positions=16)
    assert scaled(torch.empty(0, 2, 8), layout="thd", cu_seqlens=empty).shape == (0, 2, 8)


@INTERLEAVED
@FRACTION
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_values_and_gradients_are_rounded_once(interleaved: bool, fraction: float, dtype: torch.dtype) -> None:
    rope = RotaryEmbedding(8, fraction=fraction, interleaved=interleaved)
    x = torch.randn(2, 6, 3, 8).to(dtype).requires_grad_()
    wide = x.detach().float().requires_grad_()
    g = torch.randn_like(x)
    y = rope(x)
    y.backward(g)
    rope(wide).backward(g.float())
    assert_bitwise(y, rope(wide).to(dtype))
    assert x.grad is not None and wide.grad is not None
    assert_bitwise(x.grad, wide.grad.to(dtype))


@INTERLEAVED
def test_nan_and_infinity_stay_in_their_pair_and_the_rest_keeps_its_bits(interleaved: bool) -> None:
    x = torch.randn(1, 4, 1, 8)
    x[0, 1, 0, 0], x[0, 2, 0, 6] = torch.nan, -torch.inf
    x[0, 3, 0, 4:] = torch.tensor([-0.0, torch.inf, torch.nan, 1e-40])
    y = RotaryEmbedding(8, fraction=0.5, interleaved=interleaved)(x)
    assert_bitwise(y[..., 4:], x[..., 4:])
    pair = [0, 1] if interleaved else [0, 2]
    assert y[0, 1, 0, pair].isnan().all() and y[..., :4].isnan().sum() == 2


def test_autograd_keeps_only_the_tables() -> None:
    rope, x = RotaryEmbedding(8), torch.randn(2, 5, 3, 8, dtype=torch.bfloat16, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rope(x * 1)
    tables = {t.data_ptr() for t in rope.tables(x)}
    assert {t.data_ptr() for t in saved} == tables and len(saved) == 2


def test_tables_made_in_inference_mode_serve_training() -> None:
    rope, x = RotaryEmbedding(8), torch.randn(2, 5, 4, 8, requires_grad=True)
    with torch.inference_mode():
        rope(x)
    rope(x).sum().backward()
    assert x.grad is not None


class Two(nn.Module):
    """A product before rope; Inductor would skip its rounding to bf16."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.rope = RotaryEmbedding(16, **options)

    def forward(self, x: Tensor, **where: Any) -> Tensor:
        return self.rope(x * 1.3, **where) * 0.7


#: Constructor options, and arguments that give the token positions.
COMPILED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "float32": ({}, {}),
    "ragged": ({}, {"layout": "thd", "cu_seqlens": torch.tensor([0, 2, 2, 9])}),
    "offset": ({}, {"offset": 9}),
    "positions": ({}, {"positions": torch.arange(24).view(4, 6) * 50}),
    "interleaved": ({"interleaved": True}, {"offset": torch.tensor([1, 2, 3, 500])}),
    "partial": ({"fraction": 0.5}, {"layout": "sbhd"}),
    "dynamic": ({"scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_positions": 4}, {}),
    "longrope": (
        {
            "scaling": {
                "rope_type": "longrope",
                "original_max_position_embeddings": 4,
                "short_factor": [1.0] * 8,
                "long_factor": [3.0] * 8,
            },
            "max_positions": 8,
        },
        {"positions": torch.arange(6)},
    ),
}


class Several(nn.Module):
    """All rotations in one graph, with all scalings before and after them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.ropes = nn.ModuleDict({case: qt.RotaryEmbedding(16, **options) for case, (options, _) in COMPILED.items()})

    def forward(self, inputs: dict[str, Tensor], starts: Tensor) -> dict[str, Tensor]:
        """starts: offsets of the ragged sequences, which differ from those at compilation."""
        scaled = {case: x * 1.3 for case, x in inputs.items()}
        rotated = {}
        for case, rope in self.ropes.items():
            where = COMPILED[case][1] | ({"offset": starts} if case == "ragged" else {})
            rotated[case] = rope(scaled[case], **where)
        return {case: y * 0.7 for case, y in rotated.items()}


def operand(case: str) -> Tensor:
    shape = {"ragged": (9, 2, 16), "partial": (6, 4, 2, 16)}.get(case, (4, 6, 2, 16))
    return torch.randn(shape, dtype=torch.float32 if case == "float32" else torch.bfloat16)


#: Inductor without C++ compilation, which takes fifteen seconds here; the graph of a full layer is compiled fully.
@pytest.mark.parametrize("backend", [WITHOUT_CODE, pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_bits_equal_eager_bits(backend: str) -> None:
    """Outputs and gradients of two steps."""
    several = Several()
    compiled = torch.compile(several, fullgraph=True, backend=backend)
    for starts in (torch.tensor([0, 5, 7]), torch.tensor([3, 5, 8])):
        given = {case: operand(case) for case in COMPILED}
        gradients = [torch.randn_like(x) for x in given.values()]
        runs = []
        for run in (several, compiled):
            leaves = {case: x.clone().requires_grad_() for case, x in given.items()}
            results = run(leaves, starts)
            torch.autograd.backward(list(results.values()), gradients)
            runs.append({case: (y.detach(), leaves[case].grad) for case, y in results.items()})
        for case, eager in runs[0].items():
            for one, other in zip(runs[1][case], eager, strict=True):
                assert_bitwise(one, other, case)


def test_decoding_compiles_once_for_all_offsets() -> None:
    net = Two()
    # Recompilation is decided by Dynamo, so the backend does not matter.
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    x = torch.randn(1, 1, 2, 16)
    for offset in range(2, 8):
        with torch._dynamo.config.patch(error_on_recompile=offset > 3):
            assert_bitwise(compiled(x, offset=offset), net(x, offset=offset))


def test_frequencies_stay_float32_across_casts_and_devices() -> None:
    x = torch.randn(1, 300, 1, 16)
    y = RotaryEmbedding(16)(x)
    for rope in (RotaryEmbedding(16, device="meta").to_empty(device="cpu"), RotaryEmbedding(16).bfloat16()):
        assert rope.inverse_frequency.dtype == torch.float32
        assert_bitwise(rope(x), y)
    meta = RotaryEmbedding(16).to("meta")
    assert meta(x.to("meta")).is_meta and meta.state_dict() == {} and not list(meta.parameters())
    meta.to_empty(device="cpu").reset_parameters()
    assert_bitwise(meta(x), y)
    used = RotaryEmbedding(16)
    used(x)
    for again in (copy.deepcopy(used), pickle.loads(pickle.dumps(used))):
        assert_bitwise(again(x), y)


def test_second_derivatives_and_torch_func_follow() -> None:
    rope, x = RotaryEmbedding(4), torch.randn(1, 3, 1, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda a: rope(a).square(), (x,))
    batched = torch.randn(5, 2, 3, 1, 4)
    assert_bitwise(torch.func.vmap(rope)(batched), torch.stack([rope(b) for b in batched]))
    grad = torch.func.grad(lambda a: rope(a).square().sum())(batched[0])
    assert_close("the turning keeps lengths", grad, 2 * batched[0], 1e-6)


def test_the_plain_function_takes_any_tables() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]])
    cos, sin = torch.zeros(4), torch.tensor([-1.0, -1.0, 1.0, 1.0])
    assert apply_rotary(x, cos, sin).tolist() == [[-3.0, -4.0, 1.0, 2.0, 5.0]]
    assert apply_rotary(x, cos, torch.tensor([-1.0, 1.0, -1.0, 1.0]), True).tolist() == [[-2.0, 1.0, -4.0, 3.0, 5.0]]
    assert qt.apply_rotary is apply_rotary


@pytest.mark.parametrize(
    "shape, options, message",
    [
        ((5, 1, 6), {}, r"layout 'bshd' takes B, S, H, D with D = 6, but got a tensor of shape \(5, 1, 6\)"),
        ((2, 5, 1, 8), {}, r"with D = 6, but got a tensor of shape \(2, 5, 1, 8\)"),
        ((2, 5, 1, 6), {"layout": "bsh"}, r"no layout 'bsh'; did you mean 'bshd'\?"),
        (
            (2, 5, 1, 6),
            {"positions": torch.arange(4)},
            r"positions have shape \(4,\); x \(2, 5, 1, 6\) in layout 'bshd' needs \(5,\) or \(2, 5\)",
        ),
        ((5, 2, 1, 6), {"positions": torch.zeros(5, 2), "layout": "sbhd"}, r"'sbhd' needs \(5,\) or \(2, 5\)"),
        ((2, 5, 1, 6), {"offset": torch.arange(3)}, r"offset has shape \(3,\); give a number, or one for each of 2"),
        ((2, 5, 1, 6), {"cu_seqlens": torch.tensor([0, 5])}, r"cu_seqlens is for layout 'thd', and this is 'bshd'"),
        ((2, 5, 1, 6), {"positions": [0, 1, 2, 3, 4]}, "positions, offset and cu_seqlens of rope are tensors"),
        ((5, 1, 6), {"layout": "thd", "cu_seqlens": [0, 5]}, "positions, offset and cu_seqlens of rope are tensors"),
        ((5, 1, 6), {"layout": "thd"}, r"layout 'thd' needs cu_seqlens with the start of each sequence"),
        ((5, 1, 6), {"layout": "thd", "positions": torch.arange(4)}, r"in 'thd' needs \(5,\)"),
        ((5, 1, 6), {"layout": "thd", "cu_seqlens": torch.tensor([0, 3, 2, 5])}, r"must ascend from 0 to .* 5"),
        ((5, 1, 6), {"layout": "thd", "cu_seqlens": torch.tensor([0, 4])}, r"cu_seqlens is \[0, 4\]; it must ascend"),
        ((5, 1, 6), {"layout": "thd", "cu_seqlens": torch.tensor([0.0, 5.0])}, r"give int \[sequences \+ 1\]"),
        (
            (5, 1, 6),
            {"layout": "thd", "cu_seqlens": torch.tensor([0, 3, 5]), "offset": torch.arange(3)},
            r"offset has 3 numbers for 2 sequences; one each",
        ),
    ],
)
def test_invalid_arguments_give_a_clear_error(shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RotaryEmbedding(6)(torch.ones(shape), **options)


def test_feature_counts_that_cannot_rotate_give_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"0\.5 of 6 is 3; make it an even number"):
        RotaryEmbedding(6, fraction=0.5)
    with pytest.raises(ValueError, match=r"fraction is 0"):
        RotaryEmbedding(6, fraction=0)


@pytest.mark.parametrize(
    ("dtype", "fraction", "interleaved", "kernel"),
    pairs((torch.float32, torch.bfloat16), (1.0, 0.5), (False, True), (False, True)),
    ids=case_name,
)
def test_rotated_tensors_are_contiguous_for_any_input_layout(
    dtype: torch.dtype, fraction: float, interleaved: bool, kernel: bool
) -> None:
    rope = qt.RotaryEmbedding(16, fraction=fraction, interleaved=interleaved)
    whole = torch.randn(2, 5, 4, 48).to(dtype)
    with qt.only("triton") if kernel else contextlib.nullcontext():
        for x in (whole[..., :16], whole[..., 16:32].transpose(1, 2).contiguous().transpose(1, 2)):
            cos, sin = rope.tables(x)
            y = qt.apply_rotary(x, cos, sin, interleaved)
            assert y.is_contiguous() and not x.is_contiguous()
            assert_bitwise(y, qt.apply_rotary(x.contiguous(), cos, sin, interleaved))


def test_positions_that_were_written_are_read_again() -> None:
    rope, q = RotaryEmbedding(8), torch.randn(2, 5, 4, 8)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            positions = torch.arange(5)
            assert_bitwise(rope(q, positions=positions), rope(q))
            positions += 3
            assert_bitwise(rope(q, positions=positions), rope(q, offset=3))

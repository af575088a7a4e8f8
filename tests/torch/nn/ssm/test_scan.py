"""The scan in chunks: float64's recurrence, outputs and all gradients, whatever the chunks are and the values hold."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import quaver.torch as qt
from quaver.torch.nn.ssm import scan
from quaver.torch.nn.ssm.scan import ssd
from tests.close import assert_bitwise, assert_close
from tests.torch.nn.ssm.drawn import SIZE, differentiated, drawn_gradient, exact, leaves, named, tensors

#: Relative RMS error against the float64 recurrence: of float32, and of one rounding to 16 bits.
BOUND = 9e-7
ONE_ROUNDING = {torch.bfloat16: 2.5e-3, torch.float16: 3e-4}


def assert_exact(values: dict[str, Tensor], bound: float = BOUND, **options: Any) -> None:
    expected = exact(values, **options)
    given = leaves(values)
    for name, one, other in zip(named(values), differentiated(ssd(**given, **options), given), expected, strict=True):
        assert_close(name, one, other, bound)


@pytest.mark.parametrize("chunk_size", [None, 1, 7, 16, 64, 256])
@pytest.mark.parametrize("scale", [0.05, 1.0, 20.0])
def test_outputs_and_gradients_match_a_float64_recurrence(scale: float, chunk_size: int | None) -> None:
    assert_exact(tensors(scale=scale), chunk_size=chunk_size)


@pytest.mark.parametrize(
    ("size", "left_out", "options"),
    [
        ((1, 33, 4, 5, 4, 3), (), {}),
        ((3, 16, 4, 8, 1, 8), ("D",), {}),
        ((2, 17, 2, 64, 2, 64), ("initial_states",), {}),
        ((2, 20, 4, 8, 2, 8), ("dt_bias", "D", "initial_states"), {}),
        ((2, 20, 4, 8, 2, 8), (), {"dt_limit": (0.05, 0.4)}),
        ((2, 20, 4, 8, 2, 8), (), {"dt_softplus": False}),
        ((2, 20, 4, 8, 2, 8), (), {"dt_softplus": False, "dt_limit": (-1.0, 0.5)}),
        ((1, 1, 4, 8, 2, 8), (), {}),
        ((2, 300, 2, 4, 1, 4), (), {}),
    ],
    ids=str,
)
def test_each_option_and_size(size: tuple[int, ...], left_out: tuple[str, ...], options: dict[str, Any]) -> None:
    values = tensors(size)
    # With a step size of 0 at most tokens, the gradient is a difference of nearly equal terms.
    bound = BOUND if options.get("dt_softplus", True) else 3e-6
    assert_exact({name: value for name, value in values.items() if name not in left_out}, bound, **options)


def test_a_skip_for_each_feature() -> None:
    values = tensors()
    assert_exact(values | {"D": torch.randn(SIZE[2], SIZE[3])})


@pytest.mark.parametrize("dtype", ONE_ROUNDING)
def test_few_bits_are_rounded_once(dtype: torch.dtype) -> None:
    values = tensors(dtype=dtype)
    expected, given = exact(values), leaves(values)
    for name, one, other in zip(named(values), differentiated(ssd(**given), given), expected, strict=True):
        assert_close(name, one, other, BOUND if one.dtype is torch.float32 else ONE_ROUNDING[dtype])
    assert ssd(**values)[0].dtype is dtype and ssd(**values)[1].dtype is torch.float32


# Hard values.


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v["dt"].fill_(-1e9),
        lambda v: v["dt"][:, 10:20].fill_(1e4),
        lambda v: v["dt"][:, ::3].fill_(1e25),
        lambda v: v["A"].fill_(-1e-30),
        lambda v: v["A"].fill_(-1e30),
        lambda v: v["A"].zero_(),
        lambda v: v["x"][0, 3].fill_(1e20),
        lambda v: v["x"].fill_(1e-30),
        lambda v: v["x"].zero_(),
        lambda v: v["B"].zero_(),
        lambda v: v["initial_states"].fill_(1e25),
    ],
    ids=[
        "dt 0",
        "dt 1e4",
        "dt 1e25",
        "A -1e-30",
        "A -1e30",
        "A 0",
        "x 1e20",
        "x 1e-30",
        "x 0",
        "B 0",
        "state 1e25",
    ],
)
def test_edge_case_values(change: Callable[[dict[str, Tensor]], Any]) -> None:
    values = tensors()
    change(values)
    assert_exact(values, 3e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["x", "dt", "B", "C"])
def test_nonfinite_values_spoil_no_earlier_chunk_and_no_other_sequence(name: str, value: float) -> None:
    values = tensors()
    clean, _ = ssd(**values, chunk_size=16)
    values[name][0, 40] = value
    y, last = ssd(**values, chunk_size=16)
    assert_bitwise(y[1], clean[1])
    assert_bitwise(y[0, :32], clean[0, :32])
    truth = exact(values)[0]
    # Whether a value becomes infinite or NaN depends on the order of sums.
    assert (~y[0, 40:].isfinite() | truth[0, 40:].isfinite()).all()
    assert last[1].isfinite().all()


# Packed sequences.

CU_SEQLENS = torch.tensor([0, 10, 10, 47, 48, 75])


def packed(values: dict[str, Tensor], sequences: int) -> dict[str, Tensor]:
    values = {name: value[0] if name in ("x", "dt", "B", "C") else value for name, value in values.items()}
    states = torch.randn(sequences, *values["initial_states"].shape[1:])
    return values | {"initial_states": states}


@pytest.mark.parametrize("chunk_size", [None, 8, 256])
def test_packed_sequences_are_independent(chunk_size: int | None) -> None:
    values = leaves(packed(tensors(), 5))
    y, last, *grads = differentiated(ssd(**values, cu_seqlens=CU_SEQLENS, chunk_size=chunk_size), values)
    g_y, g_last = (drawn_gradient(t, n) for n, t in enumerate((y, last)))
    expected = [torch.zeros_like(value) for value in values.values()]
    for n, (start, end) in enumerate(zip(CU_SEQLENS.tolist(), CU_SEQLENS.tolist()[1:], strict=False)):
        names = "x", "dt", "B", "C"
        alone = {k: v[None, start:end].detach() if k in names else v.detach() for k, v in values.items()}
        alone["initial_states"] = alone["initial_states"][n : n + 1]
        wide = {name: value.double().requires_grad_() for name, value in alone.items()}
        one = ssd(**wide)
        assert_close(f"y of {n}", y[start:end], one[0][0], BOUND)
        assert_close(f"last state of {n}", last[n], one[1][0], BOUND)
        parts = torch.autograd.grad(one, list(wide.values()), [g_y[None, start:end].double(), g_last[n, None].double()])
        for name, total, part in zip(values, expected, parts, strict=True):
            if name in names:
                total[start:end] = part[0]
            elif name == "initial_states":
                total[n] = part[0]
            else:
                total += part
    for name, grad, other in zip(values, grads, expected, strict=True):
        assert_close(f"gradient of {name}", grad, other, 2 * BOUND)


def test_nan_in_one_sequence_leaves_the_bits_of_others() -> None:
    values = packed(tensors(), 5)
    clean, states = ssd(**values, cu_seqlens=CU_SEQLENS)
    for name in ("x", "dt", "B", "C"):
        values[name][10:47] = torch.nan
    y, last = ssd(**values, cu_seqlens=CU_SEQLENS)
    for start, end in ((0, 10), (47, 75)):
        assert_bitwise(y[start:end], clean[start:end])
    assert y[10:47].isnan().all() and last[2].isnan().all()
    assert_bitwise(last[[0, 1, 3, 4]], states[[0, 1, 3, 4]])
    assert_bitwise(last[1], values["initial_states"][1])


@pytest.mark.parametrize("size", [(2, 0, 4, 8, 2, 8), (0, 5, 4, 8, 2, 8)])
def test_nothing_to_scan(size: tuple[int, ...]) -> None:
    values = leaves(tensors(size))
    y, last = ssd(**values)
    assert y.shape == values["x"].shape
    assert_bitwise(last, values["initial_states"])
    (y.sum() + last.sum()).backward()
    assert_bitwise(values["initial_states"].grad, torch.ones_like(last))
    assert not values["A"].grad.any()  # type: ignore[union-attr]


# Execution.


def test_one_token_without_gradients_is_the_recurrence_itself() -> None:
    values = tensors((3, 1, 4, 8, 2, 8))
    assert scan.SSD.explain(*values.values(), None, scan.ScanOptions(True, "0.0,inf", 32))[0] == ("recurrence", "")
    with torch.no_grad():
        y, last = ssd(**values)
    for name, one, other in zip(("y", "last states"), (y, last), exact(values), strict=False):
        assert_close(name, one, other, BOUND)
    bf16 = {name: value.bfloat16() if name in ("x", "dt", "B", "C") else value for name, value in values.items()}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, last = ssd(**bf16)
    assert y.dtype is torch.bfloat16 and last.dtype is torch.float32
    assert_close("last states under autocast", last, exact(bf16)[1], BOUND)


def test_a_state_continues_where_it_ended() -> None:
    values = tensors()
    y, last = ssd(**values)
    names = "x", "dt", "B", "C"
    first = {name: v[:, :31] if name in names else v for name, v in values.items()}
    rest = {name: v[:, 31:] if name in names else v for name, v in values.items()}
    y1, state = ssd(**first)
    y2, end = ssd(**(rest | {"initial_states": state}))
    assert_close("y", torch.cat((y1, y2), 1), y, BOUND)
    assert_close("last states", end, last, BOUND)


def test_only_inputs_are_saved() -> None:
    values, saved = leaves(tensors()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ssd(**values)
    given = {value.data_ptr() for value in values.values()}
    assert {t.data_ptr() for t in saved} <= given


def test_compiled_in_one_graph_gives_eager_bits() -> None:
    torch.compiler.reset()
    run = torch.compile(partial(ssd, dt_limit=(0.01, 1.0)), fullgraph=True, backend="aot_eager")
    for size in (SIZE, (2, 40, 6, 8, 3, 16)):
        values = tensors(size)
        given, compiled = leaves(values), leaves(values)
        expected = differentiated(ssd(**given, dt_limit=(0.01, 1.0)), given)
        for name, one, other in zip(named(values), differentiated(run(**compiled), compiled), expected, strict=True):
            assert_bitwise(one, other, name)
    flat = packed(tensors(), 5)
    laid = torch.compile(ssd, fullgraph=True, backend="aot_eager")
    assert_bitwise(laid(**flat, cu_seqlens=CU_SEQLENS)[0], ssd(**flat, cu_seqlens=CU_SEQLENS)[0])


def test_transformers_scan() -> None:
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    values = tensors((2, 150, 8, 16, 2, 32))
    given, theirs = leaves(values), leaves(values)
    renamed = {"x": "hidden_states", "initial_states": "initial_states"}
    chunk_scan = modeling.mamba2_chunk_scan.__wrapped__
    other = chunk_scan(
        **{renamed.get(name, name): value for name, value in theirs.items()},
        chunk_size=64,
        dt_softplus=True,
        return_final_states=True,
    )
    expected = differentiated(other, theirs)
    for name, one, two in zip(named(values), differentiated(ssd(**given), given), expected, strict=True):
        assert_close(name, one, two, 2e-6)


@pytest.mark.parametrize("name", scan.PACKAGES)
def test_packages_are_chosen_by_name_alone_and_say_why_they_are_not_there(name: str) -> None:
    assert [impl.name for impl in scan.SSD.implementations] == ["recurrence", "chunked", *scan.PACKAGES]
    backend = name.replace("_", "-")
    with qt.only(name), pytest.raises(ValueError, match=rf"{backend} (is not installed|runs on GPUs)"):
        ssd(**tensors())


# Errors.


def test_a_second_derivative_and_transforms_are_refused() -> None:
    values = leaves(tensors((1, 5, 2, 4, 1, 4)))
    y, _ = ssd(**values)
    (grad,) = torch.autograd.grad(y.sum(), values["x"], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()
    x = values["x"].detach()
    with pytest.raises(NotImplementedError, match=r"no torch\.func"):
        torch.func.grad(lambda x: ssd(**(values | {"x": x}))[0].sum())(x)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"x": torch.randn(5, 8)}, {}, r"give floating-point \[B, T, H, P\]"),
        ({"x": torch.ones(2, 75, 6, 8, dtype=torch.int64)}, {}, "floating-point"),
        ({"dt": torch.randn(2, 75, 5)}, {}, r"dt is \[2, 75, 5\].*one a head"),
        ({"A": torch.randn(5)}, {}, r"A \[5\]"),
        ({"B": torch.randn(2, 75, 3, 15)}, {}, r"B is .* C is|B is \[2, 75, 3, 15\] and C"),
        ({"B": torch.randn(2, 75, 4, 16), "C": torch.randn(2, 75, 4, 16)}, {}, "6 heads cannot share 4 groups"),
        ({"B": torch.randn(2, 75, 3, 16).bfloat16()}, {}, "convert them to one dtype"),
        ({"D": torch.randn(7)}, {}, r"give \[H\] = \[6\]"),
        ({"dt_bias": torch.randn(6, 1)}, {}, "dt_bias is"),
        ({"initial_states": torch.randn(1, 6, 8, 16)}, {}, r"initial_states is .* give \[sequences, H, P, N\]"),
        ({}, {"dt_limit": (1.0, 0.5)}, "dt_limit is"),
        ({}, {"dt_limit": (float("nan"), 0.5)}, "dt_limit is"),
        ({}, {"dt_limit": 3}, "dt_limit is 3"),
        ({}, {"chunk_size": 0}, "chunk_size is 0"),
        ({}, {"chunk_size": 512}, "chunk_size is 512"),
    ],
)
def test_invalid_arguments_give_a_clear_error(given: dict[str, Tensor], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ssd(**(tensors() | given), **options)


def test_cumulative_lengths_that_do_not_fit_give_a_clear_error() -> None:
    flat = packed(tensors(), 2)
    with pytest.raises(ValueError, match="give cu_seqlens with their boundaries"):
        ssd(**flat)
    for ends, message in (([0, 70, 80], "ends at 80 and there are 75 tokens"), ([0, 60, 40], "must ascend")):
        with pytest.raises(ValueError, match=message):
            ssd(**flat, cu_seqlens=torch.tensor(ends))
    with pytest.raises(ValueError, match="give int32 or int64"):
        ssd(**flat, cu_seqlens=torch.tensor([0.0, 70.0, 75.0]))

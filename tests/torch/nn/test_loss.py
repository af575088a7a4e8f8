"""The head and its loss in chunks, against F.cross_entropy of F.linear: values, gradients, memory, bad input."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import quaver.torch as qt
from benchmarks.measuring.memory import peak
from quaver.torch import linear_cross_entropy
from quaver.torch.nn import loss as chunked
from quaver.torch.nn.loss import _warned
from tests.close import assert_bitwise, assert_close

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ignoring": {"ignore_index": 3},
    "smoothing": {"label_smoothing": 0.1},
    "z loss": {"z_loss": 1e-2},
    "soft cap": {"soft_cap": 2.0},
    "all": {"ignore_index": 0, "label_smoothing": 0.2, "z_loss": 1e-3, "soft_cap": 30.0},
}
EVERY = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
CHUNKS = pytest.mark.parametrize("chunk", [None, 1, 5, 12, 100])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def two_functions(
    x: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *, reduction: str = "mean", **options: Any
) -> Tensor:
    logits = F.linear(x, weight, bias).float().flatten(0, -2)
    if options.get("soft_cap"):
        logits = options["soft_cap"] * torch.tanh(logits / options["soft_cap"])
    flat, ignore = targets.flatten(), options.get("ignore_index", -100)
    smoothing: float = options.get("label_smoothing", 0.0)
    losses = F.cross_entropy(logits, flat, ignore_index=ignore, label_smoothing=smoothing, reduction="none")
    losses = losses + torch.where(flat != ignore, options.get("z_loss", 0.0) * logits.logsumexp(-1) ** 2, 0.0)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() / (flat != ignore).sum() if reduction == "mean" else losses.sum()


def operands(dtype: torch.dtype = torch.float32, biased: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    x, weight, bias = torch.randn(3, 4, 16), torch.randn(11, 16) / 4, torch.randn(11)
    x, weight, bias = (t.to(dtype).requires_grad_() for t in (x, weight, bias))
    return x, weight, torch.randint(11, (3, 4)), bias if biased else None


def gradients(loss: Tensor, *leaves: Tensor | None) -> list[Tensor]:
    g = torch.linspace(0.5, 2.0, loss.numel()).view(loss.shape)
    return list(torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None], g))


@EVERY
@REDUCTIONS
@CHUNKS
def test_losses_and_gradients_match_the_two_functions(
    options: dict[str, Any], reduction: str, chunk: int | None
) -> None:
    x, weight, targets, bias = operands()
    expected = two_functions(x, weight, targets, bias, reduction=reduction, **options)
    loss = linear_cross_entropy(x, weight, targets, bias, reduction=reduction, chunk=chunk, **options)
    assert loss.dtype is torch.float32
    assert_close("loss", loss, expected, 1e-5)
    for ours, theirs in zip(gradients(loss, x, weight, bias), gradients(expected, x, weight, bias), strict=True):
        assert_close(f"gradient {list(ours.shape)}", ours, theirs, 1e-5)


@pytest.mark.parametrize("name", ["triton", "reference"])
@REDUCTIONS
def test_under_the_kernels_it_is_the_same(name: str, reduction: str) -> None:
    x, weight, targets, bias = operands()
    expected = two_functions(x, weight, targets, bias, reduction=reduction, **OPTIONS["all"])
    with qt.only(name):
        loss = linear_cross_entropy(x, weight, targets, bias, reduction=reduction, chunk=5, **OPTIONS["all"])
        grads = gradients(loss, x, weight, bias)
    assert_close("loss", loss, expected, 1e-5)
    for ours, theirs in zip(grads, gradients(expected, x, weight, bias), strict=True):
        assert_close("gradient", ours, theirs, 1e-5)


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 8e-3), (torch.float16, 1e-3)], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@CHUNKS
def test_narrow_dtypes_lose_their_own_rounding_and_no_more(
    dtype: torch.dtype, bound: float, autocast: bool, chunk: int | None
) -> None:
    x, weight, targets, bias = operands(torch.float32 if autocast else dtype)
    exact = [leaf.detach().to(dtype).double().requires_grad_() for leaf in (x, weight, bias) if leaf is not None]
    expected = F.cross_entropy(F.linear(*exact).flatten(0, 1), targets.flatten())
    with torch.autocast("cpu", dtype, enabled=autocast):
        loss = linear_cross_entropy(x, weight, targets, bias, chunk=chunk)
    assert_close("loss", loss, expected, bound)
    for ours, theirs in zip(gradients(loss, x, weight, bias), gradients(expected, *exact), strict=True):
        assert ours.dtype is x.dtype
        assert_close(f"gradient {list(ours.shape)}", ours, theirs, bound)


def test_backward_saves_gradients_and_no_logits() -> None:
    """512 tokens and a vocabulary of 4096 are 8 MiB of logits, of which two functions keep two kinds."""
    x, weight = torch.randn(512, 32, requires_grad=True), torch.randn(4096, 32, requires_grad=True)
    targets = torch.randint(4096, (512,))
    saved: dict[str, int] = {}
    for name, function in (("ours", linear_cross_entropy), ("theirs", two_functions)):
        held: dict[int, int] = {}

        def pack(t: Tensor, held: dict[int, int] = held) -> Tensor:
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            options: dict[str, Any] = {"chunk": 64} if name == "ours" else {}
            function(x, weight, targets, **options)  # type: ignore[operator]
        saved[name] = sum(held.values())
    logits = 512 * 4096 * 4
    assert saved["theirs"] >= logits
    assert saved["ours"] <= (x.numel() + weight.numel()) * 4 + 64 < logits / 10


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_pieces_have_the_bits_of_the_whole(
    options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, targets, bias = operands(dtype)

    def results() -> list[Tensor]:
        loss = linear_cross_entropy(x, weight, targets, bias, **options)
        return [loss.detach(), *gradients(loss, x, weight, bias)]

    monkeypatch.setattr(chunked, "PIECE", 1 << 30)
    whole = results()
    monkeypatch.setattr(chunked, "PIECE", 4 * 3 * weight.shape[0])
    assert chunked._piece(weight.shape[0]) == 3 < targets.numel()
    pieces = results()
    assert_bitwise(pieces[0], whole[0])
    for a, b in zip(pieces[1:], whole[1:], strict=True):
        # A product of fewer columns may add up in another order.
        assert_close("gradient", a, b, 1e-6 if dtype is torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_takes_little_beside_logits_and_gradients(dtype: torch.dtype) -> None:
    x, weight = torch.randn(512, 32).to(dtype).requires_grad_(), torch.randn(4096, 32).to(dtype).requires_grad_()
    targets, held = torch.randint(4096, (512,)), []

    def step() -> None:
        held[:] = [linear_cross_entropy(x, weight, targets)]
        held.clear()

    logits = 512 * 4096 * dtype.itemsize
    rest = x.nbytes + 4 * weight.numel() + 4 * x.numel()
    assert logits < peak(step).bytes <= logits + rest + 4 * chunked.PIECE


#: Once to the end, and once up to where Inductor would write the same C++.
@pytest.mark.parametrize(("reduction", "backend"), [("mean", "inductor"), ("none", "aot_eager_decomp_partition")])
def test_compiled_it_gives_the_same_bits(reduction: str, backend: str) -> None:
    x, weight, targets, bias = operands()
    run = torch.compile(linear_cross_entropy, fullgraph=True, backend=backend)
    options: dict[str, Any] = {"chunk": 5, "reduction": reduction, "soft_cap": 3.0}
    eager, compiled = (f(x, weight, targets, bias, **options) for f in (linear_cross_entropy, run))
    assert_close("loss", compiled, eager, 1e-6)
    for ours, theirs in zip(gradients(compiled, x, weight, bias), gradients(eager, x, weight, bias), strict=True):
        assert_close("gradient", ours, theirs, 1e-6)


@pytest.mark.parametrize("checkpoint", [qt.checkpoint, torch.utils.checkpoint.checkpoint])
def test_recomputed_it_gives_the_same_bits(checkpoint: Any) -> None:
    x, weight, targets, bias = operands()
    plain = linear_cross_entropy(x, weight, targets, bias, chunk=5)
    again = checkpoint(
        lambda *given: linear_cross_entropy(*given, chunk=5), x, weight, targets, bias, use_reentrant=False
    )
    assert_bitwise(again, plain)
    for ours, theirs in zip(gradients(again, x, weight, bias), gradients(plain, x, weight, bias), strict=True):
        assert_bitwise(ours, theirs)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients_none_are_computed(off: Any) -> None:
    """torch reports required gradients as if gradients were never disabled; the logits are one of three GEMMs."""
    x, weight, targets, bias = operands()
    without, with_them = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with with_them:
        expected = linear_cross_entropy(x, weight, targets, bias)
    with without, off():
        loss = linear_cross_entropy(x, weight, targets, bias)
    assert_bitwise(loss, expected.detach())
    assert with_them.get_total_flops() == 3 * without.get_total_flops() == 3 * 2 * 12 * 16 * 11


def test_a_tied_embedding_gets_both_gradients() -> None:
    ids, targets = torch.randint(11, (2, 6)), torch.randint(11, (2, 6))
    table = torch.randn(11, 8, requires_grad=True)
    ours, theirs = (f(F.embedding(ids, table), table, targets) for f in (linear_cross_entropy, two_functions))
    expected = torch.autograd.grad(theirs, table)[0]
    assert_close("table", torch.autograd.grad(ours, table)[0], expected, 1e-5)
    embedding = nn.Embedding.from_pretrained(table.detach(), freeze=False)
    linear_cross_entropy(embedding(ids), embedding, targets).backward()
    assert embedding.weight.grad is not None
    assert_close("the module in its table's place", embedding.weight.grad, expected, 1e-5)


@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "all"])
def test_inputs_without_requires_grad_get_no_gradient(frozen: str) -> None:
    x, weight, targets, bias = operands()
    for name, leaf in (("x", x), ("weight", weight), ("bias", bias)):
        assert leaf is not None
        leaf.requires_grad_(frozen not in (name, "all"))
    loss = linear_cross_entropy(x, weight, targets, bias)
    assert loss.requires_grad == (frozen != "all")
    if loss.requires_grad:
        loss.backward()
    for leaf in (x, weight, bias):
        assert leaf is not None and (leaf.grad is not None) == leaf.requires_grad


def test_backward_may_run_twice() -> None:
    x, weight, targets, _ = operands()
    loss = linear_cross_entropy(x, weight, targets)
    first, second = (torch.autograd.grad(2 * loss, weight, retain_graph=True)[0] for _ in range(2))
    assert_bitwise(first, second)


def test_no_token_at_all_is_nan_with_a_gradient_of_zero() -> None:
    x, weight, targets, bias = operands()
    for given, labels in ((x, torch.full_like(targets, -100)), (x[:0], targets[:0])):
        loss = linear_cross_entropy(given, weight, labels, bias)
        assert loss.isnan()
        assert not any(g.any() for g in gradients(loss, x, weight, bias))
        assert linear_cross_entropy(given, weight, labels, bias, reduction="sum") == 0


def test_a_head_under_a_recipe_is_run_in_high_precision_with_a_warning() -> None:
    x, _, targets, _ = operands()
    head = qt.Linear(16, 11, recipe="rowwise")
    plain = nn.Linear(16, 11)
    plain.load_state_dict(head.state_dict())
    _warned.clear()
    with pytest.warns(UserWarning, match="head's GEMMs in high precision, not in rowwise"):
        loss = linear_cross_entropy(x, head, targets)
    assert_bitwise(loss, linear_cross_entropy(x, plain, targets))
    assert_close("loss", loss, two_functions(x, plain.weight, targets, plain.bias), 1e-5)
    assert_bitwise(linear_cross_entropy(x, head, targets), loss)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "reduction": ({"reduction": "men"}, "did you mean 'mean'"),
    "targets": ({"targets": torch.zeros(4, 3, dtype=torch.int64)}, "needs integers of shape"),
    "probabilities": ({"targets": torch.zeros(3, 4)}, "needs integers"),
    "out of range": ({"targets": torch.full((3, 4), 11)}, "target 11 is outside 0 … 10"),
    "weight": ({"weight": torch.zeros(11, 15)}, "do not fit"),
    "empty vocabulary": ({"weight": torch.zeros(0, 16), "bias": None}, "V > 0"),
    "bias": ({"bias": torch.zeros(12)}, "bias has shape"),
    "smoothing": ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
    "z loss": ({"z_loss": -1.0}, "z_loss -1.0"),
    "infinite z loss": ({"z_loss": float("inf")}, "z_loss inf"),
    "z loss of NaN": ({"z_loss": float("nan")}, "z_loss nan"),
    "cap": ({"soft_cap": 0.0}, "soft_cap 0.0"),
    "infinite cap": ({"soft_cap": float("inf")}, "soft_cap inf"),
    "chunk": ({"chunk": 0}, "chunk is 0"),
    "dtype": ({"weight": torch.zeros(11, 16, dtype=torch.bfloat16)}, "convert one, or enter torch.autocast"),
}


@pytest.mark.parametrize("given, sentence", BAD.values(), ids=BAD)
def test_bad_input_gives_a_clear_error(given: dict[str, Any], sentence: str) -> None:
    x, weight, targets, bias = operands()
    with pytest.raises(ValueError, match=sentence):
        linear_cross_entropy(**{"x": x, "weight": weight, "targets": targets, "bias": bias, **given})

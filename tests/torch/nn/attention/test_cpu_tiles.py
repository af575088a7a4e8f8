"""Attention of bf16 by tiles on a CPU: the reference's outputs and gradients, what later keys cannot do, what is kept.

Where the processor has no block for bf16, another one stands for it: what surrounds it is the same.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import quaver.torch as qt
from quaver.torch.backends.cpu import gemm
from quaver.torch.nn.attention import attention, cpu_tiles, explain_attention
from quaver.torch.operations import operation
from tests.close import assert_bitwise, assert_close
from tests.torch.backends.cpu import block
from tests.torch.nn.attention.cases import gradients

#: Relative RMS in bf16 of outputs and gradients, as of torch's own.
CLOSE = 1.5e-2


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, a block on every processor, and no call too small."""
    functions, threads = block.functions(), torch.get_num_threads()
    monkeypatch.setattr(gemm, "_functions", lambda: functions)
    monkeypatch.setattr(cpu_tiles, "SMALLEST", 1)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def operands(batch: int, tokens: int, heads: int, groups: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((batch, tokens, n, width) for n in (heads, groups, groups))
    q, k, v = (torch.randn(shape).bfloat16().requires_grad_() for shape in shapes)
    return q, k, v


def exactly(*x: Tensor) -> tuple[Tensor, ...]:
    return tuple(a.detach().float().requires_grad_() for a in x)


@pytest.mark.parametrize("mask_type", ["none", "causal"])
@pytest.mark.parametrize(
    "sizes", [(2, 64, 2, 2, 32), (1, 100, 4, 2, 32), (3, 130, 3, 1, 64), (1, 191, 2, 2, 96)], ids=str
)
def test_it_equals_the_reference(sizes: tuple[int, ...], mask_type: str) -> None:
    x = operands(*sizes)
    scale = None if sizes[-1] == 64 else 0.3
    with qt.only("tiles"):
        y = attention(*x, mask_type=mask_type, scale=scale)
    of_x, exact = gradients(y, *x), exactly(*x)
    with qt.only("reference"):
        right = attention(*exact, mask_type=mask_type, scale=scale)
    assert_close("output", y, right, 4e-3)
    for name, g, good in zip("qkv", of_x, gradients(right, *exact), strict=True):
        assert g.dtype is torch.bfloat16
        assert_close(f"gradient of {name}", g, good, 6e-3)


def test_it_is_as_close_to_float32_as_torch() -> None:
    x = operands(2, 192, 4, 2, 64)
    exact, distances = exactly(*x), {}
    with qt.only("reference"):
        y = attention(*exact, mask_type="causal")
    right = y, *gradients(y, *exact)
    for name in ("tiles", "sdpa"):
        with qt.only(name):
            y = attention(*x, mask_type="causal")
        distances[name] = [(a - b).norm() for a, b in zip((y, *gradients(y, *x)), right, strict=True)]
    for ours, theirs in zip(distances["tiles"], distances["sdpa"], strict=True):
        assert ours <= 1.05 * theirs


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


VIEWS: dict[str, Callable[[int], Tensor]] = {
    "every other feature": lambda heads: normal(1, 128, heads, 64)[..., ::2],
    "an odd place": lambda heads: normal(128 * heads * 32 + 1)[1:].view(1, 128, heads, 32),
    "rows of an odd length": lambda heads: normal(1, 128, heads, 33)[..., 1:],
    "features outside": lambda heads: normal(1, heads, 32, 128).permute(0, 3, 1, 2),
    "one feature for all": lambda heads: normal(1, 128, heads, 1).expand(-1, -1, -1, 32),
    "one head for all": lambda heads: normal(1, 128, 1, 32).expand(-1, -1, heads, -1),
    "one sequence for all": lambda heads: normal(1, 128, heads, 32).expand(2, -1, -1, -1),
}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("lies", VIEWS)
def test_operands_may_have_any_layout(lies: str, groups: int) -> None:
    views, results = [VIEWS[lies](n) for n in (2, groups, groups)], []
    for x in (views, [v.clone(memory_format=torch.contiguous_format) for v in views]):
        x = [t.detach().requires_grad_() for t in x]
        y = attention(*x, mask_type="causal")
        results.append((y, *gradients(y, *x)))
    for one, other in zip(*results, strict=True):
        assert_bitwise(one, other)


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, False), (False, False, True)], ids=str)
def test_a_subset_of_gradients_matches_all(needs: tuple[bool, ...]) -> None:
    x = operands(1, 100, 2, 1, 32)
    every = gradients(attention(*x, mask_type="causal"), *x)
    some = [t.detach().requires_grad_(need) for t, need in zip(x, needs, strict=True)]
    y = attention(*some, mask_type="causal")
    wanted = needs.index(True)
    assert_bitwise(gradients(y, some[wanted])[0], every[wanted])


def test_groups_of_heads_that_do_not_fit_at_once_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = operands(3, 150, 4, 2, 32)
    results = []
    for most in (1 << 19, 1):
        monkeypatch.setattr(cpu_tiles, "SCORES", most)
        y = attention(*x, mask_type="causal")
        results.append((y, *gradients(y, *x)))
    for one, other in zip(*results, strict=True):
        assert_bitwise(one, other)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_values_stay_with_the_queries_that_see_them(value: float) -> None:
    x = [t.detach() for t in operands(1, 130, 2, 1, 32)]
    before = attention(*x, mask_type="causal")
    for i, (first, last) in enumerate(((100, 101), (100, 130), (100, 130))):
        changed = [t.clone() for t in x]
        changed[i][0, 100, 0, 3] = value
        y = attention(*changed, mask_type="causal")
        heads, features = (slice(1), slice(None)) if i == 0 else (slice(2), slice(None) if i == 1 else slice(3, 4))
        # A score of -inf is a weight of 0.
        assert (i == 1 and value == value) or not y[:, first:last, heads, features].isfinite().any()
        # Of values a tile of queries sees 0 times what comes later.
        seen = 64 if i == 2 else first
        assert_bitwise(y[:, :seen], before[:, :seen])
        assert_bitwise(y[:, last:], before[:, last:])


@pytest.mark.parametrize("value", [0.0, 1e-39, 1e4, 1e9, 1e18])
def test_edge_case_values_are_as_close_to_float32_as_in_torch(value: float) -> None:
    x = operands(1, 96, 2, 1, 32)
    with torch.no_grad():
        for t in x[:2]:
            t[0, 40, 0, 3] = value
    exact, results = exactly(*x), []
    with qt.only("reference"):
        right = attention(*exact, mask_type="causal")
    results.append((right, *gradients(right, *exact)))
    for name in ("tiles", "sdpa"):
        with qt.only(name):
            y = attention(*x, mask_type="causal")
        results.append((y, *gradients(y, *x)))
    for good, ours, theirs in zip(*results, strict=True):
        assert (ours - good).norm() <= 1.1 * (theirs - good).norm().nan_to_num() + 1e-2 * good.norm()


def test_backward_keeps_queries_keys_values_and_a_number_a_row() -> None:
    x, kept = operands(2, 128, 4, 2, 32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):  # type: ignore[func-returns-value]
        attention(*x, mask_type="causal")
    assert sum(kept) == sum(t.nbytes for t in x) + 4 * 2 * 128 * 4


def test_an_output_may_be_written_to() -> None:
    x = operands(1, 100, 4, 2, 32)
    y = attention(*x)
    right = gradients(2 * y, *x)
    for one, other in zip(gradients(attention(*x).mul_(2), *x), right, strict=True):
        assert_bitwise(one, other)


def test_without_gradients_and_in_inference_mode_the_bits_are_the_same() -> None:
    x = operands(1, 128, 2, 2, 32)
    y = attention(*x, mask_type="causal")
    with torch.no_grad():
        assert_bitwise(attention(*x, mask_type="causal"), y)
    with torch.inference_mode():
        assert_bitwise(attention(*(t.clone() for t in x), mask_type="causal").clone(), y)


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda x: [t.float() for t in x], "bfloat16"),
        (lambda x: [t[..., :24] for t in x], "features"),
        (lambda x: [x[0], x[1], x[2][..., :32]], "the same size"),
        (lambda x: [t[:, :63] for t in x], "tokens"),
        (lambda x: [x[0][:, :64], *x[1:]], "tokens"),
        (lambda x: [torch.cat([t] * 6, 1) for t in x], "1024"),
    ],
)
def test_unsupported_calls_give_a_reason(change: Callable[[Any], list[Tensor]], sentence: str) -> None:
    x = [t.detach() for t in operands(1, 192, 2, 2, 64)]
    assert sentence in dict(explain_attention(*change(x), mask_type="causal").passed_over)["tiles"]


def test_options_autocast_transforms_and_threads_equal_torch() -> None:
    x = [t.detach() for t in operands(1, 128, 2, 2, 32)]

    def why(**options: Any) -> str:
        return dict(explain_attention(*x, **options).passed_over).get("tiles", "")

    assert not why() and not why(mask_type="causal")
    for options in ({"window": (3, 0)}, {"dropout": 0.1}, {"soft_cap": 5.0}, {"sinks": "off_by_one"}, {"chunk": 7}):
        assert "without another option" in why(**options)
    assert "scale" in why(scale=-1.0)
    with torch.autocast("cpu", torch.float16):
        assert "autocast" in cpu_tiles.reason_unsupported(*(t.transpose(1, 2) for t in x), True, 1.0)
    asked = []
    torch.func.vmap(lambda q: asked.append(cpu_tiles.reason_unsupported(q, q, q, True, 1.0)) or q)(
        x[0].transpose(1, 2)[None]
    )  # type: ignore[func-returns-value]
    assert "torch.func" in asked[0]
    torch.set_num_threads(2)
    assert "threads" in why()


def test_a_processor_without_the_block_instructions_gives_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_functions", lambda: None)
    x = [t.detach() for t in operands(1, 128, 2, 2, 32)]
    assert "instructions" in dict(explain_attention(*x).passed_over)["tiles"]


def test_gradients_have_no_derivative() -> None:
    x = operands(1, 64, 2, 2, 32)
    (g,) = torch.autograd.grad(attention(*x).sum(), x[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        g.sum().backward()


def test_products_are_counted_as_torch_counts_attention() -> None:
    x = operands(2, 128, 4, 2, 32)
    # As layers do when they are made.
    operation.register_flop_formulas()
    with FlopCounterMode(display=False) as counter:
        attention(*x).sum().backward()
    assert counter.get_total_flops() == (4 + 10) * 2 * 4 * 128 * 128 * 32


def test_a_selective_checkpoint_may_save_it_and_gradients_have_the_same_bits() -> None:
    x, calls = operands(1, 128, 2, 2, 32), []
    saved = torch.ops.quaver.attention_tiles.default

    def policy(_: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        calls.append(operator)
        return CheckpointPolicy.MUST_SAVE if operator is saved else CheckpointPolicy.PREFER_RECOMPUTE

    y = attention(*x, mask_type="causal")
    right = gradients(y, *x)
    y = checkpoint(
        lambda *x: attention(*x, mask_type="causal"),
        *x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    assert saved in calls
    for one, other in zip(gradients(y, *x), right, strict=True):
        assert_bitwise(one, other)


def test_one_graph_handles_all_lengths_with_the_bits_of_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of lengths that are torch's."""
    torch.compiler.reset()
    monkeypatch.setattr(cpu_tiles, "SMALLEST", 2 * 2 * 100 * 100)
    traced = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traced.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)  # type: ignore[attr-defined]

    def run(*x: Tensor) -> Tensor:
        return attention(*x, mask_type="causal")

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for tokens in (128, 12, 100, 90, 192):
        x = operands(2, tokens, 2, 1, 32)
        for t in x:
            torch._dynamo.mark_dynamic(t, 1)
        y, right = compiled(*x), run(*x)
        assert_bitwise(y, right)
        for one, other in zip(gradients(y, *x), gradients(right, *x), strict=True):
            assert_bitwise(one, other)
    assert len(traced) == 1


def compiled(mask_type: str = "causal") -> Callable[..., Tensor]:
    torch.compiler.reset()

    def run(*x: Tensor) -> Tensor:
        return attention(*x, mask_type=mask_type)

    return torch.compile(run, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("of_forward, of_backward", [(2, 1), (1, 2)])
def test_threads_of_backward_may_be_others(of_forward: int, of_backward: int) -> None:
    """Whose attention the forward took is written down, not asked again."""
    x, run = operands(1, 128, 2, 2, 32), compiled()
    torch.set_num_threads(of_forward)
    y = run(*x)
    torch.set_num_threads(of_backward)
    exact = exactly(*x)
    with qt.only("reference"):
        right = attention(*exact, mask_type="causal")
    for name, g, good in zip("qkv", gradients(y, *x), gradients(right, *exact), strict=True):
        assert_close(f"gradient of {name}", g, good, CLOSE)


def test_compiled_operands_may_have_any_layout() -> None:
    x = [VIEWS["every other feature"](n)[:, :12].detach().requires_grad_() for n in (2, 1, 1)]
    exact, y = exactly(*x), compiled()(*x)
    with qt.only("reference"):
        right = attention(*exact, mask_type="causal")
    assert_close("output", y, right, CLOSE)
    for name, g, good in zip("qkv", gradients(y, *x), gradients(right, *exact), strict=True):
        assert_close(f"gradient of {name}", g, good, CLOSE)


@pytest.mark.parametrize("queries, keys", [(0, 70), (70, 0)])
def test_compiled_without_queries_or_keys_gradients_are_0(queries: int, keys: int) -> None:
    x = [normal(2, tokens, n, 32).requires_grad_() for tokens, n in ((queries, 2), (keys, 1), (keys, 1))]
    y = compiled("none")(*x)
    assert y.shape == (2, queries, 2, 32) and not y.any()
    assert not any(g.any() for g in torch.autograd.grad(y.sum(), x))


def test_an_exported_program_holds_torchs_operations_alone() -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, mask_type="causal")

    x = tuple(t.detach() for t in operands(1, 128, 2, 2, 32))
    program = torch.export.export(Attention(), x)
    assert not any("quaver" in str(node.target) for node in program.graph.nodes)


def test_compiled_forward_mode_loses_no_derivative() -> None:
    q, k, v = (t.detach() for t in operands(1, 128, 2, 2, 32))

    def tangent(q: Tensor) -> Tensor | None:
        with forward_ad.dual_level():
            y = attention(forward_ad.make_dual(q, q), k, v, mask_type="causal")
            return forward_ad.unpack_dual(y).tangent

    torch.compiler.reset()
    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.compile(tangent, backend="aot_eager")(q)


def test_tensor_subclasses_use_torch_in_every_argument() -> None:
    class Own(Tensor):
        pass

    x = [t.detach() for t in operands(1, 128, 2, 2, 32)]
    for i in range(3):
        given = [t.as_subclass(Own) if i == j else t for j, t in enumerate(x)]
        assert "plain tensors" in dict(explain_attention(*given, mask_type="causal").passed_over)["tiles"]  # type: ignore[arg-type]
    parameters = [torch.nn.Parameter(t) for t in x]
    assert_bitwise(attention(*parameters, mask_type="causal"), attention(*x, mask_type="causal"))

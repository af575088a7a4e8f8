"""Whole converted models under torch.compile: one graph, one compilation for all lengths, policies of checkpoints."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3 import modeling_qwen3

import quaver.torch as qt
from quaver.torch.operations import ops
from tests.close import assert_bitwise
from tests.torch.conversion.families import tiny
from tests.torch.conversion.in_place import model_of
from tests.torch.test_compile import WITHOUT_CODE

#: Sequences and their tokens. torch gives a size of one a compilation of its own, whatever is compiled.
LENGTHS = ((2, 12), (3, 2), (2, 1000), (2, 4096))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


# The quick one has norms that share what they compute, and its numbers are no symbols, which cost a second tracing: the
# norms below have them. Fifteen seconds each of the others.
@pytest.mark.parametrize(
    ("blocks", "symbols"),
    [
        (qt.Blocks(loss=True), False),
        pytest.param(qt.Blocks(loss=True), True, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
    ids=["blocks", "blocks with numbers as symbols", "layers"],
)
def test_a_whole_llama_is_one_graph_and_one_compilation_for_all_lengths(blocks: Any, symbols: bool) -> None:
    model = tiny("llama", num_hidden_layers=1, max_position_embeddings=4096)
    qt.convert(model, "tensorwise", blocks=blocks)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=WITHOUT_CODE)
    for batch, length in LENGTHS:
        x = torch.randint(1, 90, (batch, length), generator=torch.Generator().manual_seed(length))
        with torch._dynamo.config.patch(specialize_float=not symbols):
            loss = compiled(input_ids=x, labels=x).loss
        loss.backward()
        if length <= 12:
            expected = model(input_ids=x, labels=x).loss.detach()
            assert (loss.detach() - expected).abs() <= 1e-6 * expected
    assert counters["stats"]["unique_graphs"] == 1
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "make", [lambda: LlamaRMSNorm(64), lambda: nn.LayerNorm(64), lambda: qt.RMSNorm(64)], ids=["Llama", "torch", "ours"]
)
def test_norms_of_one_formula_share_a_graph_of_any_length(make: Callable[[], nn.Module]) -> None:
    """Where sizes are symbols so are numbers, and a symbol that one autograd function made was no other's."""
    model = nn.Sequential(make(), make())
    model.append(model[0])
    if not isinstance(model[0], qt.RMSNorm):
        qt.convert(model, "bf16", blocks=True)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 12, 64), (3, 5, 64)):
        x = torch.randn(shape, requires_grad=True)
        y = compiled(x)
        assert_bitwise(y.detach(), model(x).detach())
        y.square().sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


def test_attention_in_place_is_ours_when_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the forward's file has been patched since the conversion, the forward's own attention runs."""
    attends: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        # transformers always passes a mask to torch's attention, ours never without one.
        calls = [n for n in graph.graph.nodes if n.target is torch.nn.functional.scaled_dot_product_attention]
        attends.append(bool(calls) and all("attn_mask" not in node.kwargs for node in calls))
        return graph

    model = model_of("qwen3", torch.bfloat16, num_hidden_layers=1)
    qt.convert(model, "bf16", blocks=True)
    part = model.model.layers[0].self_attn
    x = torch.randn(2, 64, model.config.hidden_size).bfloat16()
    where, results = model.model.rotary_emb(x, torch.arange(64)[None]), []
    for run in (torch.compile(part, fullgraph=True, backend=backend), part):
        model.zero_grad()
        y = run(x, position_embeddings=where, attention_mask=None)[0]
        y.float().square().sum().backward()
        results.append([y.detach(), *(p.grad for p in part.parameters())])
    assert attends == [True]
    for one, other in zip(*results, strict=True):
        # Compiled, the family's own function applies the positions, and rounds each of its products.
        assert (one - other).norm() <= 0.02 * other.norm()
    monkeypatch.setattr(modeling_qwen3, "eager_attention_forward", lambda *args, **options: None)
    torch._dynamo.reset()
    torch.compile(part, fullgraph=True, backend=backend)(x, position_embeddings=where, attention_mask=None)
    assert attends == [True, False]


@pytest.mark.parametrize("blocks", [False, True], ids=["layers", "blocks"])
def test_a_compiled_layer_quantizes_each_tensor_once_a_pass(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v have one input, and so have gate and up: 4 inputs and 7 weights, then 7 gradients; and weights once
    more, whose codes no graph keeps."""
    done: list[tuple[int, ...]] = []
    quantize = ops.QUANTIZE.eager
    monkeypatch.setattr(ops.QUANTIZE, "eager", lambda x, *args: done.append(tuple(x.shape)) or quantize(x, *args))
    model: Any = model_of("llama", torch.bfloat16, num_hidden_layers=1)
    qt.convert(model, "tensorwise", blocks=blocks)
    layer = model.model.layers[0]
    weights = sorted(tuple(p.shape) for p in layer.parameters() if p.dim() == 2)
    x = torch.randn(2, 12, model.config.hidden_size).bfloat16().requires_grad_()
    where = model.model.rotary_emb(x.detach(), torch.arange(12)[None])
    run = torch.compile(layer, fullgraph=True, backend=WITHOUT_CODE)
    held: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.setdefault(t.data_ptr(), t), lambda t: t):
        y: Tensor = run(x, position_embeddings=where)
    forward = [*done]
    done.clear()
    y.float().square().sum().backward()
    # torch 2.15 saves the activation of an MLP and quantizes it once more.
    again = int(blocks and torch.__version__ >= "2.15")
    assert len(forward) == 4 + 7 and len(done) == 7 + 7 + again
    assert all(sorted(s for s in of_pass if s[0] != 24) == weights for of_pass in (forward, done))
    # Of one byte an element only inputs are kept.
    codes = [t for t in held.values() if t.element_size() == 1 and t.dtype is not torch.bool]
    assert len(codes) == 4 - again and all(t.shape[0] == 24 for t in codes)


def test_a_policy_of_checkpoints_keeps_quantized_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then backward quantizes what it makes itself, and no input once more."""
    done: list[Any] = []
    quantize = ops.QUANTIZE.eager
    monkeypatch.setattr(ops.QUANTIZE, "eager", lambda x, *args: done.append(x.shape) or quantize(x, *args))
    model: Any = model_of("llama", num_hidden_layers=1)
    qt.convert(model, "tensorwise", blocks=True)
    x = torch.randn(2, 12, model.config.hidden_size)
    # A part alone: the policy is asked of each operator, and a whole layer has more of the same.
    plain = model.model.layers[0].mlp
    counts, gradients = {}, {}
    for keeps in (False, True):

        def policy(ctx: Any, op: Any, *args: Any, keeps: bool = keeps, **kwargs: Any) -> CheckpointPolicy:
            must_save = keeps and op is torch.ops.quaver.quantize.default
            return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE

        part = copy.deepcopy(plain)
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        torch._dynamo.reset()
        run = torch.compile(checkpoint, fullgraph=True, backend=WITHOUT_CODE)
        y: Tensor = run(part, x, use_reentrant=False, context_fn=contexts)
        done.clear()
        y.square().sum().backward()
        counts[keeps] = len(done)
        gradients[keeps] = {name: p.grad for name, p in part.named_parameters()}
    plain(x).square().sum().backward()
    for name, parameter in plain.named_parameters():
        for each in gradients.values():
            assert (each[name] - parameter.grad).abs().max() <= 1e-5 * parameter.grad.abs().max(), name
    assert counts[True] < counts[False]

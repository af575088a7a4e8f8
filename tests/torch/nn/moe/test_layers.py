"""Experts and mixtures of them: token by token, the bits of their parts, what they keep, what they refuse."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import quaver.torch as qt
from quaver.recipes import RECIPES
from quaver.torch.nn.moe.permutation import moves
from tests.close import assert_bitwise, assert_close

KINDS: dict[str, dict[str, Any]] = {
    "gated": {},
    "plain": {"activation": "squared_relu"},
    "biased": {"activation": "geglu", "bias": True},
    "gpt-oss": {"activation": "clamped_swiglu", "bias": True, "layout": "kn", "interleaved": True},
    "padded": {"pad": 8},
    "narrow": {"eight_bit_activations": True},
}
QUANTIZING = [name for name, build in RECIPES.items() if build().quantizes]


def drawn(
    tokens: int = 40, experts: int = 6, k: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, qt.Routing]:
    """Tokens, and where they go: the last expert gets none."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, experts, generator=generator)
    logits[:, -1] = -torch.inf
    return torch.randn(tokens, 16, generator=generator).to(dtype), qt.route(logits, 2)


def token_by_token(experts: Any, x: Tensor, routing: qt.Routing, weights: Tensor) -> Tensor:
    first, second = experts._modules[experts._first_projections], experts.down_proj
    up, down = first.matrices(first.weight), second.matrices(second.weight)
    rows = []
    for token in range(x.shape[0]):
        total = torch.zeros(x.shape[1], dtype=x.dtype)
        for choice, e in enumerate(routing.indices[token].tolist()):
            h = up[e] @ x[token] + (0 if first.bias is None else first.bias[e])
            h = torch.cat([h[::2], h[1::2]]) if experts._activations.interleaved else h
            y = down[e] @ qt.activate(experts.activation, h[None])[0] + (0 if second.bias is None else second.bias[e])
            total = total + weights[token, choice] * y
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "narrow"])
def test_experts_and_all_gradients_are_those_token_by_token(kind: str) -> None:
    torch.manual_seed(0)
    experts = qt.Experts(6, 16, 24, **KINDS[kind])
    exact = copy.deepcopy(experts).double()
    x, routing = drawn()
    results = []
    for module, dtype in ((experts, torch.float32), (exact, torch.float64)):
        inputs = [x.to(dtype).requires_grad_(), routing.weights.detach().to(dtype).requires_grad_()]
        run = token_by_token if module is exact else lambda m, x, r, w: m(x, r.indices, w)
        y = run(module, inputs[0], routing, inputs[1])
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        results.append([y, *torch.autograd.grad(y, [*inputs, *module.parameters()], g)])
    for name, a, b in zip(["y", "x", "weights", *dict(experts.named_parameters())], *results, strict=True):
        assert_close(name, a, b, 1e-6)
        if "_proj" in name:
            assert not a[-1].any(), "no token went to the last expert"


def parts(experts: Any, x: Tensor, routing: qt.Routing, weights: Tensor) -> Tensor:
    """The same computation by separate functions."""
    rows, offsets, places = qt.permute(x, routing.indices, experts.experts, pad=experts.pad)
    h = experts._modules[experts._first_projections](rows, offsets)
    interleaved = experts._activations.interleaved
    h = qt.activate(experts.activation, *((h[:, ::2].contiguous(), h[:, 1::2].contiguous()) if interleaved else (h,)))
    return qt.unpermute(experts.down_proj(h, offsets), places, routing.indices.shape[1], weights)


@pytest.mark.parametrize("recipe", QUANTIZING)
@pytest.mark.parametrize("kind", ["gated", "gpt-oss"])
def test_experts_have_the_bits_of_their_parts(recipe: str, kind: str) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "gated" else torch.float32
    original = qt.Experts(6, 16, 24, **KINDS[kind], recipe=recipe, dtype=dtype)
    x, routing = drawn(dtype=dtype)
    results = []
    for run in (parts, lambda m, x, r, w: m(x, r.indices, w)):
        experts = copy.deepcopy(original)
        inputs = [x.clone().requires_grad_(), routing.weights.detach().clone().requires_grad_()]
        y = run(experts, inputs[0], routing, inputs[1])
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        of = torch.autograd.grad(y, [*inputs, *experts.parameters()], g)
        results.append([y, *of, *(buffer.clone() for buffer in experts.buffers())])
    for a, b in zip(*results, strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("recipe", [n for n in QUANTIZING if moves(RECIPES[n]().fprop.a)])
def test_codes_alone_change_the_gradient_of_the_first_weight_alone(recipe: str) -> None:
    torch.manual_seed(0)
    x, routing = drawn()
    results = []
    for codes_alone in (False, True):
        torch.manual_seed(0)
        experts = qt.Experts(6, 16, 24, recipe=recipe, codes_alone=codes_alone)
        inputs = [x.clone().requires_grad_(), routing.weights.detach().clone().requires_grad_()]
        y = experts(inputs[0], routing.indices, inputs[1])
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        results.append([y, *torch.autograd.grad(y, [*inputs, *experts.parameters()], g)])
    for number, (a, b) in enumerate(zip(*results, strict=True)):
        if number == 3:
            built = RECIPES[recipe]()
            assert built.fprop.a is not None
            # In high precision the tokens had no rounding at all.
            most = 0.3 if built.fprop.a.format.bits < 8 else 0.02 if built.wgrad.b is not None else 0.04
            assert (a - b).norm() <= most * a.norm()
        else:
            assert_bitwise(a, b)


def saved_bytes(run: Any) -> int:
    """Bytes saved for backward, each storage once, without parameters and integer tensors."""
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        if t.dtype not in (torch.int64, torch.int32) and not isinstance(t, torch.nn.Parameter):
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run()
    assert y.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("frozen", [False, True], ids=["router", "frozen router"])
def test_tokens_are_saved_once_and_not_per_expert(frozen: bool) -> None:
    tokens, k, dim, hidden = 512, 8, 64, 32
    routing = qt.route(torch.randn(tokens, 16).requires_grad_(not frozen), k)
    x = torch.randn(tokens, dim).bfloat16()
    sizes = {}
    for name, options in {"bf16": {}, "mxfp8": {}, "codes": {"codes_alone": True}}.items():
        recipe = "mxfp8" if name == "codes" else name
        experts = qt.Experts(16, dim, hidden, recipe=recipe, dtype=torch.bfloat16, **options)
        sizes[name] = saved_bytes(
            lambda experts=experts: experts(x.clone().requires_grad_(), routing.indices, routing.weights)
        )
    # Inputs of the activation, and outputs of the experts, which the gradients of the routing weights need.
    between = 2 * tokens * k * (2 * hidden + (0 if frozen else dim))
    weights = 2 * 16 * 3 * hidden * dim
    assert sizes["codes"] <= between + tokens * dim * (1 + 1 / 32) + weights + 4 * tokens * k + 4096, sizes
    assert sizes["mxfp8"] <= between + 2 * tokens * dim + weights + 4 * tokens * k + 4096, sizes


def test_a_capacity_drops_the_last_tokens() -> None:
    moe = qt.MoE(16, 24, qt.MixtureConfig(experts=4, k=1, capacity=0.5))
    with torch.no_grad():
        moe.router.weight.zero_()
    x = torch.randn(16, 16)
    # All choose expert 0, which takes half of an even share of 4.
    y = moe(x)
    assert y[:2].abs().min() > 0 and not y[2:].any()
    assert moe.mixture.capacity_of(1) == 1 and moe.mixture.capacity_of(0) == 1


def test_nan_stays_with_its_token() -> None:
    moe = qt.MoE(16, 24, qt.MixtureConfig(experts=4, k=2, shared=8), recipe="mxfp8")
    x = torch.randn(12, 16)
    expected = moe(x)
    x[3] = torch.nan
    y = moe(x)
    assert y[3].isnan().all()
    others = torch.arange(12) != 3
    assert_bitwise(y[others], expected[others])


def losses(y: Tensor, routing: qt.Routing) -> Tensor:
    return y.square().mean() + 0.1 * qt.balance_loss(routing, sequences=2) + 0.01 * qt.z_loss(routing)


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "nvfp4"])
def test_losses_reach_the_router_through_every_kind_of_recomputation(recipe: str) -> None:
    results = []
    mixture = qt.MixtureConfig(experts=4, k=2, shared=8, shared_gate=True, return_routing=True)
    built = qt.MoE(16, 24, mixture, normalization="RMSNorm")
    x = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(0))
    for how in ("plain", "recompute", "checkpoint", "reentrant"):
        # A copy draws the same noise as its original.
        moe = copy.deepcopy(built)
        moe.recompute = how == "recompute"

        def run(x: Tensor, moe: Any = moe) -> tuple[Tensor, ...]:
            y, routing = moe(x)
            # torch's reentrant checkpoint ignores tensors in nested tuples of outputs.
            return y, *routing

        ways = {"checkpoint": qt.checkpoint, "reentrant": partial(checkpoint, use_reentrant=True)}
        for _ in range(2):
            moe.zero_grad()
            own = x.clone().requires_grad_()
            with qt.autocast(recipe):
                y, *routing = ways[how](run, own) if how in ways else run(own)
            losses(y, qt.Routing(*routing)).backward()
        results.append([own.grad, *(p.grad for p in moe.parameters())])
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            assert_bitwise(a, b)


def test_layers_with_a_mixture_give_their_routing() -> None:
    each = {}
    options: dict[str, Any] = {"activation": "swiglu", "recipe": "mxfp8"}
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    for parallel in (False, True, "two_norms"):
        for recompute in (None, "mlp", "full"):
            torch.manual_seed(0)
            mixture = qt.MixtureConfig(experts=4, k=2, return_routing=True)
            layer: Any = qt.TransformerLayer(
                16, 2, 24, mixture=mixture, recompute=recompute, parallel=parallel, **options
            )
            y, routing = layer(x)
            assert routing.indices.shape == (16, 2) and isinstance(layer.mlp, qt.MoE)
            losses(y, routing).backward()
            each[recompute] = [y, *(p.grad for p in layer.parameters())]
            layer.mlp.return_routing = False
            assert_bitwise(layer(x), y)
        for other in ("mlp", "full"):
            for a, b in zip(each[other], each[None], strict=True):
                assert_bitwise(a, b)
    with pytest.raises(ValueError, match="residual_from_norm"):
        qt.TransformerLayer(16, 2, 24, mixture=mixture, residual_from_norm=True, **options)


def test_routers_stay_in_high_precision() -> None:
    moe = qt.MoE(16, 24, qt.MixtureConfig(experts=4, k=2, balance_bias=True, scores="sigmoid")).bfloat16()
    moe.return_routing = True
    x = torch.randn(12, 16).bfloat16()
    plain = moe.router(x)
    assert plain.weights.dtype is plain.logits.dtype is torch.float32
    assert moe.router.balance.dtype is torch.float32 and moe.router.weight.dtype is torch.bfloat16
    exact = x.double() @ moe.router.weight.double().t()
    assert_close("logits", plain.logits, exact, 1e-6)
    with torch.autocast("cpu"), qt.autocast("nvfp4"):
        _, routing = moe(x)
    for a, b in zip(routing, plain, strict=True):
        assert_bitwise(a, b)


def test_the_balance_is_updated_and_saved() -> None:
    moe = qt.MoE(16, 24, qt.MixtureConfig(experts=4, k=2, balance_bias=True, scores="sigmoid", return_routing=True))
    _, routing = moe(torch.randn(50, 16))
    counts = qt.token_counts(routing.indices, 4)
    moe.router.update_bias(counts, 0.25)
    assert moe.router.balance.tolist() == (torch.sign(25 - counts) * 0.25).tolist()
    other = qt.MoE(16, 24, moe.mixture)
    other.load_state_dict(moe.state_dict())
    assert_bitwise(other.router.balance, moe.router.balance)
    assert_bitwise(copy.deepcopy(moe).router.balance, moe.router.balance)
    with pytest.raises(ValueError, match="no balance to update"):
        qt.MoE(16, 24, qt.MixtureConfig(experts=4, k=2)).router.update_bias(counts)


def test_a_mixture_can_be_built_on_meta() -> None:
    mixture = qt.MixtureConfig(experts=4, k=2, balance_bias=True, router_bias=True, shared=8, shared_gate=True)
    moe = qt.MoE(16, 24, mixture, normalization="LayerNorm", bias=True, device="meta")
    assert all(p.is_meta for p in moe.parameters()) and moe.router.balance.is_meta
    moe.to_empty(device="cpu")
    moe.reset_parameters()
    assert all(p.isfinite().all() for p in moe.parameters()) and moe.router.balance.tolist() == [0.0] * 4
    assert moe(torch.randn(3, 16)).isfinite().all()


def test_an_expert_without_tokens_keeps_its_history() -> None:
    torch.manual_seed(0)
    moe = qt.MoE(16, 24, qt.MixtureConfig(experts=4, k=1), recipe=RECIPES["delayed"](history=4))
    x = torch.randn(32, 16)
    for _ in range(2):
        with qt.autocast(moe.experts.down_proj.recipe):
            moe(x).sum().backward()
    before = moe.experts.down_proj.factor.clone()
    assert before.all()
    with torch.no_grad():
        moe.router.weight.zero_()
    for _ in range(6):
        with qt.autocast(moe.experts.down_proj.recipe):
            moe(x * 64).sum().backward()
    after = moe.experts.down_proj.factor
    assert_bitwise(after[1:], before[1:])
    assert (after[0, 0] != before[0, 0]).all()


@pytest.mark.parametrize(
    "recipe", ["mxfp8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16", "delayed", "nvfp4"))]
)
def test_a_compiler_sees_one_graph_with_the_same_bits(recipe: str) -> None:
    torch._dynamo.reset()
    options: dict[str, Any] = {"scores": "sigmoid", "balance_bias": True, "shared": 8, "return_routing": True}
    mixture = qt.MixtureConfig(experts=6, k=2, capacity=1.0, **options)
    moe = qt.MoE(16, 24, mixture, normalization="RMSNorm", recipe=recipe)
    other = copy.deepcopy(moe)
    compiled: Any = torch.compile(other, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 10, 16)
    results = []
    for run in (moe, compiled):
        # Delayed scaling's factors are those of the step before.
        for _ in range(2):
            moe.zero_grad()
            other.zero_grad()
            own = x.clone().requires_grad_()
            with qt.autocast(recipe):
                y, routing = run(own)
            losses(y, routing).backward()
        results.append([y, own.grad, *(p.grad for p in (moe if run is moe else other).parameters())])
    for a, b in zip(*results, strict=True):
        assert_bitwise(a, b)


BAD: dict[str, tuple[Any, str]] = {
    "k": (lambda: qt.MoE(16, 24, qt.MixtureConfig(experts=4, k=5)), "k is 5, and there are 4 experts"),
    "groups": (
        lambda: qt.MoE(16, 24, qt.MixtureConfig(experts=4, k=2, groups=3, top_groups=1)),
        "3 groups do not divide",
    ),
    "capacity": (lambda: qt.MoE(16, 24, qt.MixtureConfig(experts=4, k=2, capacity=0.0)), "drops every token"),
    "nan": (lambda: qt.MoE(16, 24, qt.MixtureConfig(experts=4, k=2, capacity=math.nan)), "capacity is nan"),
    "gate": (lambda: qt.MoE(16, 24, qt.MixtureConfig(experts=4, k=2, shared_gate=True)), "shared is 0"),
    "scores": (lambda: qt.MoE(16, 24, qt.MixtureConfig(experts=4, k=2, scores="softmx")), "did you mean 'softmax'"),
    "activation": (lambda: qt.Experts(4, 16, 24, "swigul"), "did you mean 'swiglu'"),
    "interleaved": (lambda: qt.Experts(4, 16, 24, "relu", interleaved=True), "no gate, so it cannot be interleaved"),
    "pad": (lambda: qt.Experts(4, 16, 24, pad=0), "pad is 0"),
    "none": (lambda: qt.Experts(0, 16, 24), "0 experts"),
    "width": (lambda: qt.MoE(16, 24, qt.MixtureConfig(experts=4, k=2))(torch.randn(3, 8)), "its last axis must be 16"),
    "tokens": (
        lambda: qt.Experts(4, 16, 24)(torch.randn(3, 16), torch.zeros(4, 2).long(), torch.rand(4, 2)),
        "of the same tokens",
    ),
    "dtype": (
        lambda: qt.Experts(4, 16, 24)(torch.randn(3, 16).half(), torch.zeros(3, 2).long(), torch.rand(3, 2)),
        "got torch.float16 tokens",
    ),
    "weights": (
        lambda: qt.Experts(4, 16, 24)(torch.randn(3, 16), torch.zeros(3, 2).long(), torch.rand(3, 1)),
        "weights are one for each",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_mismatched_inputs_are_refused(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()

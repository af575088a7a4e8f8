"""torch.compile traces every recipe in one graph, gives eager mode's bits and keeps eight bits for backward."""

import copy
import gc
import pickle
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import quaver.torch as qt
from quaver import recipes
from quaver.costs.ledger import saved_bytes
from quaver.recipes.spec import QuantSpec, Recipe
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.operations.autograd import flat
from quaver.torch.state.history import amax
from tests.close import assert_bitwise, assert_close
from tests.pairs import alternating, pairs


def kinds() -> list[str]:
    """The first recipe of each kind for which a layer's traced code differs; other recipes change only its specs."""
    first: dict[Hashable, str] = {}
    for name, build in recipes.RECIPES.items():
        recipe = build()
        specs = [(spec.two_level, spec.format.packed, spec.transposable) for spec in quantized(recipe)]
        none = [gemm.a is None for gemm in recipe.gemms.values()]
        first.setdefault((recipe.delayed is not None, recipe.stochastic, *specs, *none), name)
    return list(first.values())


def quantized(recipe: Recipe) -> list[QuantSpec]:
    return [spec for spec in recipe.operands().values() if spec is not None]


def keeps_state(recipe: str | Recipe) -> bool:
    """Whether a layer gets buffers in its first step."""
    of = recipes.get(recipe)
    return of.delayed is not None or of.stochastic


KINDS = kinds()


def some(*stateless: str) -> Any:
    """Parametrize over kinds of recipes; those with state and the given ones are quick, others are marked slow.

    Each kind is quick in at least one test, and in `test_one_graph_with_the_bits_of_eager_mode`.
    """
    names = [n for n in KINDS if recipes.get(n).quantizes]
    quick = {name for name in names if keeps_state(name)} | set(stateless)
    assert quick <= set(names)
    rows = [pytest.param(name, marks=[] if name in quick else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", rows)


#: Inductor's decompositions and partitioner without generated C++, which takes most of the compile time.
WITHOUT_CODE = "aot_eager_decomp_partition"
Step = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Reset Dynamo; keep other tests' layers alive meanwhile and free this test's layers after it."""
    torch._dynamo.reset()
    others = amax.layers()
    yield
    torch._dynamo.reset()
    del others
    gc.collect()
    # Dynamo's remaining objects would cost a quarter of a second in each later collection.
    gc.freeze()


class Small(nn.Module):
    """One layer between operations that Inductor would fuse with it."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.first = qt.Linear(64, 96, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.first(x * 0.37))


def train(net: nn.Module, step: Step, steps: int = 3, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Train some steps without recompilation after the second; return outputs, gradients and buffers."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tensors = {}
    for i in range(steps):
        x = (torch.randn(5, 7, 64) * (i + 1)).to(dtype).requires_grad_()
        # The first step creates the layers' buffers, so the second may recompile.
        with torch._dynamo.config.patch(error_on_recompile=i >= 2):
            y = step(x)
        y.float().square().sum().backward()
        assert x.grad is not None
        tensors |= {f"output {i}": y.detach().clone(), f"grad_input {i}": x.grad}
        tensors |= {f"grad of {name} {i}": p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        tensors |= {f"{name} {i}": b.clone() for name, b in net.named_buffers()}
        optimizer.step()
        optimizer.zero_grad()
    return tensors


def assert_trained_alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for what, value in other.items():
        if "bias" in what:
            # A sum over tokens, which Inductor computes in another order, in float32 before rounding.
            step = 1e-6 if value.dtype is torch.float32 else torch.finfo(value.dtype).eps
            assert_close(what, one[what], value, step)
        else:
            assert_bitwise(one[what], value, what)


def backend_for(recipe: str, *those: str) -> str:
    """Inductor for these recipes, else the backend without generated code."""
    return "inductor" if recipe in those else WITHOUT_CODE


def autocast_outside(net: nn.Module, recipe: str | Recipe, compiled: bool, backend: Any = "inductor") -> Step:
    f = torch.compile(net, fullgraph=True, backend=backend) if compiled else net

    def step(x: Tensor) -> Tensor:
        with qt.autocast(recipe):
            return f(x)  # type: ignore[no-any-return]

    return step


def autocast_inside(net: nn.Module, recipe: str | Recipe, compiled: bool, backend: Any = "inductor") -> Step:
    def step(x: Tensor) -> Tensor:
        with qt.autocast(recipe):
            return net(x)  # type: ignore[no-any-return]

    return torch.compile(step, fullgraph=True, backend=backend) if compiled else step


def converted(net: nn.Module, recipe: str | Recipe, compiled: bool, backend: Any = "inductor") -> Step:
    """Convert the model, which creates buffers before the first step, so that all steps are one graph."""
    qt.convert(net, recipe)
    return torch.compile(net, fullgraph=True, backend=backend) if compiled else net


AUTOCASTS = (autocast_outside, autocast_inside, converted)


def assert_compiled_trains_alike(
    net: nn.Module,
    recipe: str | Recipe,
    how: Callable[..., Step] = converted,
    backend: str = WITHOUT_CODE,
    steps: int = 3,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Train a model and a compiled copy, and compare all bits."""
    copied = copy.deepcopy(net)
    expected = train(net, how(net, recipe, False), steps, dtype)
    assert_trained_alike(train(copied, how(copied, recipe, True, backend), steps, dtype), expected)


def compile_cases() -> list[Any]:
    """Every recipe in every mode; those of one kind, modes of stateless recipes and Inductor's C++ are slow."""
    rows = []
    for at, name in enumerate(dict.fromkeys([*KINDS, *recipes.RECIPES])):
        for number, how in enumerate(AUTOCASTS):
            quick = name in KINDS and (number == at % len(AUTOCASTS) or keeps_state(name))
            rows.append(pytest.param(name, how, WITHOUT_CODE, marks=[] if quick else pytest.mark.slow))
        # One with a GEMM that Inductor computes; for the others it mostly sees opaque operators.
        quick = name == "rowwise_bf16_wgrad"
        marks = [] if quick else [pytest.mark.slow]
        rows.append(pytest.param(name, AUTOCASTS[at % len(AUTOCASTS)], "inductor", marks=marks))
    return rows


@pytest.mark.parametrize(("name", "how", "backend"), compile_cases())
def test_one_graph_with_the_bits_of_eager_mode(name: str, how: Callable[..., Step], backend: str) -> None:
    assert_compiled_trains_alike(Small(), name, how, backend, steps=6)


def unpickled(net: Small) -> Small:
    copied: Small = pickle.loads(pickle.dumps(net))
    return copied


# Two seconds each; histories are handled like counts.
@pytest.mark.parametrize(
    ("name", "copied"),
    [
        pytest.param(name, autocast_kind, marks=[] if (at - number) % 2 == 0 else pytest.mark.slow)
        for at, name in enumerate(name for name in recipes.RECIPES if keeps_state(name))
        for number, autocast_kind in enumerate((copy.deepcopy, unpickled))
    ],
)
def test_a_copy_of_a_converted_model_is_one_graph(name: str, copied: Callable[[Small], Small]) -> None:
    """Untraceable work, such as the checksum of a name, is done before the first forward."""
    net = Small()
    qt.convert(net, name)
    eager, compiled = copied(net), copied(net)
    step = torch.compile(compiled, fullgraph=True, backend="eager")
    assert_trained_alike(train(compiled, step, 2), train(eager, eager, 2))


@pytest.mark.parametrize(
    ("name", "dtype", "last"),
    [
        ("delayed", torch.float16, WITHOUT_CODE),
        ("mxfp8", torch.float16, WITHOUT_CODE),
        ("tensorwise", torch.float32, WITHOUT_CODE),
        ("nvfp4", torch.float32, WITHOUT_CODE),
        # Takes four seconds each.
        pytest.param("delayed", torch.float16, "inductor", marks=pytest.mark.slow),
        pytest.param("nvfp4", torch.float32, "inductor", marks=pytest.mark.slow),
    ],
)
def test_other_dtypes_too(name: str, dtype: torch.dtype, last: str) -> None:
    net = Small(dtype)
    net.first.bias.requires_grad_(False)
    assert_compiled_trains_alike(net, name, backend=last, steps=2, dtype=dtype)


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.delayed(history=2, margin=1, algorithm="most_recent"),
        recipes.delayed(history=1, format="e4m3", power_of_two=False),
        recipes.tensorwise(power_of_two=False),
        recipes.mxfp8(weight_2d=True),
        recipes.nvfp4(stochastic_rounding=False, weight_2d=False),
    ],
    ids=str,
)
def test_options_too(recipe: Recipe) -> None:
    assert_compiled_trains_alike(Small(), recipe)


@some("tensorwise")
def test_under_torch_autocast(name: str) -> None:
    def within(net: nn.Module, recipe: str, compiled: bool, backend: str = WITHOUT_CODE) -> Step:
        inner = converted(net, recipe, compiled, backend)

        def step(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return inner(x)

        return step

    assert_compiled_trains_alike(Small(torch.float32), name, within, steps=2, dtype=torch.float32)


@pytest.mark.parametrize("name", KINDS)
def test_eval_and_no_grad(name: str) -> None:
    net = Small()
    x = torch.randn(6, 64, dtype=torch.bfloat16)
    compiled = torch.compile(net, fullgraph=True, backend=backend_for(name, "nvfp4"))
    with qt.autocast(name), torch.no_grad():
        assert_bitwise(compiled(x), net(x))
        net.eval()
        assert_bitwise(compiled(x), net(x))
    assert not list(net.buffers())


@some("rowwise_bf16_wgrad")
def test_a_layer_used_twice(name: str) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = qt.Linear(64, 64, bias=False, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.relu(self.layer(x)))

    assert_compiled_trains_alike(Twice(), name, steps=1)


@some("mxfp4")
def test_checkpoint_inside(name: str) -> None:
    class Checkpointed(Small):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return y

    nets = [Small(), Checkpointed()]
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        net.first.bias.requires_grad_(False)
    results = [
        train(net, converted(net, name, compiled, WITHOUT_CODE))
        for net, compiled in zip(nets, (False, True), strict=True)
    ]
    assert_trained_alike(results[1], results[0])


class Blocks(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(qt.Linear(64, 64, bias=False, dtype=torch.bfloat16), nn.ReLU()) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@some("rowwise")
def test_blocks_compiled_one_by_one_stay_below_the_recompile_limit(name: str) -> None:
    nets = [Blocks(12)]
    nets.append(copy.deepcopy(nets[0]))
    for net in nets:
        qt.convert(net, name)
    for block in nets[1].blocks:
        block.compile(fullgraph=True, backend=WITHOUT_CODE)
    results = [train(net, net) for net in nets]
    assert_trained_alike(results[1], results[0])


@some("blockwise", "rowwise_bf16_wgrad")
def test_token_counts_may_vary(name: str) -> None:
    net = Small()
    qt.convert(net, name)
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend=WITHOUT_CODE)
    for tokens in (5, 3, 48, 17, 1):
        x = torch.randn(tokens, 64, dtype=torch.bfloat16)
        outcomes = []
        for f in (net, compiled):
            net.zero_grad()
            for module in net.modules():
                if "count" in module._buffers:
                    module.count[:2] = 0
            y = f(x)
            y.backward(torch.ones_like(y))
            outcomes.append((y, net.first.weight.grad))
            if name == "delayed":
                # Both models start with unset factors.
                net.first.history.zero_()
                net.first.factor.zero_()
        for one, other in zip(*outcomes, strict=True):
            assert_bitwise(one, other)


# Four seconds each; only one recipe of each kind is quick.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in KINDS else pytest.mark.slow)
        for name, build in recipes.RECIPES.items()
        if build().wgrad.b is not None
    ],
)
def test_backward_keeps_eight_bits(name: str) -> None:
    """Decoding is inside an operator; otherwise the graph would save decoded operands."""
    # A second layer would double the time for drawing noise.
    depth = 1 if keeps_state(name) else 2
    net = nn.Sequential(*(qt.Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(depth)))
    x = torch.randn(512, 256, dtype=torch.bfloat16)
    parameters = {p.untyped_storage().data_ptr() for p in net.parameters()}
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    step = converted(net, name, True, WITHOUT_CODE)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = step(x)
    y.sum().backward()
    saved = sum(size for at, size in storages.items() if at not in parameters)
    recipe, plain = recipes.get(name), depth * 2 * x.numel()
    scales = depth * (saved_bytes(recipe, *x.shape) - x.numel() * recipe.wgrad.b.format.stored_bits // 8)
    # The compiler may save a weight's codes for dgrad, as eager mode caches them between steps.
    weights = sum(p.numel() for p in net.parameters()) * recipe.fprop.b.format.stored_bits // 8 * 17 // 16
    assert saved <= (0.30 * plain if recipe.wgrad.b.format.packed else 0.52 * plain + scales) + weights


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_layer_outputs_may_be_written_in_place(compiled: bool) -> None:
    """As with nn.ReLU(inplace=True), and in Falcon, which adds attention's output to the MLP's."""
    layers = nn.ModuleList([qt.Linear(32, 32, recipe="tensorwise"), qt.LayerNormMLP(32, 64, recipe="tensorwise")])

    def run(x: Tensor) -> Tensor:
        y = torch.relu_(layers[0](x))
        z = layers[1](x)
        z += y
        return z

    x = torch.randn(2, 3, 32)
    right = torch.relu(layers[0](x)) + layers[1](x)
    right.sum().backward()
    expected = [p.grad.clone() for p in layers.parameters()]
    layers.zero_grad()
    y = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(x)
    assert_bitwise(y, right)
    y.sum().backward()
    for p, grad in zip(layers.parameters(), expected, strict=True):
        assert_bitwise(p.grad, grad)


# The operators `quantize` and `matmul`.


def quantize_arguments() -> dict[str, tuple[Any, ...]]:
    x = torch.randn(24, 40)
    arguments: dict[str, tuple[Any, ...]] = {}
    for make in recipes.RECIPES.values():
        for spec in make().operands().values():
            if spec is None:
                continue
            count = torch.tensor(3) if spec.rounding == "stochastic" else None
            factor = torch.tensor(4.0) if make().delayed is not None else None
            for transposed in (False, True):
                key = f"{spec.text}{' turned' * transposed}{' with a factor' * (factor is not None)}"
                arguments.setdefault(
                    key, (x.bfloat16(), transposed, spec.text, None, factor, 1, torch.tensor(2), count, None)
                )
    return arguments


QUANTIZE = quantize_arguments()
#: All tests of opcheck except test_schema, which cannot compare float8 tensors before and after the call.
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


#: Tests that need no compiler: schemas and fake tensors.
WITHOUT_TRACING = ("test_schema", "test_faketensor")


def first_of_their_kind() -> set[str]:
    """Keys of QUANTIZE, one of each kind of result: packed codes, a tensor factor, noise, a transpose."""
    first: dict[Hashable, str] = {}
    for key, (_, transposed, text, _, factor, _, _, count, _) in QUANTIZE.items():
        spec = next(s for s in SPECS if s.text == text)
        first.setdefault((spec.format.packed, spec.two_level, transposed, factor is None, count is None), key)
    return set(first.values())


SPECS = [spec for make in recipes.RECIPES.values() for spec in quantized(make())]
TRACED = first_of_their_kind()


@pytest.mark.parametrize("key", QUANTIZE)
def test_quantize_is_a_proper_operator(key: str) -> None:
    checks = {} if key in TRACED else {"test_utils": WITHOUT_TRACING}
    torch.library.opcheck(torch.ops.quaver.quantize.default, QUANTIZE[key], **checks)


@pytest.mark.parametrize(
    ("name", "gemm", "bias"),
    pairs([n for n, r in recipes.RECIPES.items() if r().quantizes], ["fprop", "dgrad", "wgrad"], [False, True]),
)
def test_matmul_is_a_proper_operator(name: str, gemm: str, bias: bool) -> None:
    spec = recipes.get(name).gemms[gemm]
    if spec.a is None or spec.b is None:
        pytest.skip("this GEMM is not quantized")
    # Tracing is checked for one GEMM of each kind of recipe, alternately.
    is_selected = name in KINDS and list(recipes.get(name).gemms).index(gemm) == KINDS.index(name) % 3
    checks = CHECKS if is_selected else ("test_faketensor",)
    operands = []
    for rows, one in ((24, spec.a), (16, spec.b)):
        for transposed in (False, True):
            x = torch.randn(rows, 48)
            data, scale, factor, _ = torch.ops.quaver.quantize(
                x.t().contiguous() if transposed else x, transposed, one.text, None, None, 0, None, None, None
            )
            is_transposed = transposed and not one.format.packed
            q = Quantized(data, scale, one, (rows, 48), is_transposed, factor if one.two_level else None)
            operands.append(flat(q))
    # Without bias, both or none of the operands are transposed; with bias, one of them is.
    for a, b in zip(operands[:2], operands[3:1:-1] if bias else operands[2:], strict=True):
        arguments = (*a, *b, torch.bfloat16, torch.randn(16) if bias else None)
        torch.library.opcheck(torch.ops.quaver.matmul.default, arguments, test_utils=checks)


#: One operand of each format, block and kind of scale whose blocks divide k.
BLOCK_FORMATS = {
    (spec.format, spec.block, spec.scale): spec
    for spec in reversed(SPECS)
    if spec.block[1] is not None and spec.rounding == "nearest" and not spec.hadamard
}


@pytest.mark.parametrize(("transposed", "spec"), alternating((False, True), BLOCK_FORMATS.values(), (False,)), ids=str)
def test_compiled_values_of_partial_blocks_are_those_of_eager_mode(spec: QuantSpec, transposed: bool) -> None:
    """Inductor fuses the expansion of scales with the operations that read them."""
    torch.compiler.reset()
    rows, k = 40, 2 * (spec.block[1] or 1) + 20
    x = torch.randn(rows, k) * torch.logspace(-3, 3, k)
    # Contiguous columns are stored transposed.
    q = qt.quantize(x.t().contiguous().t() if transposed else x, spec)

    def values(data: Tensor, scale: Tensor, factor: Tensor | None) -> Tensor:
        return qt.dequantize(qt.Quantized(data, scale, q.spec, q.shape, q.transposed, factor))

    tensors: Any = q.data, q.scale, q.tensor_factor
    assert_bitwise(torch.compile(values, fullgraph=True)(*tensors), values(*tensors))

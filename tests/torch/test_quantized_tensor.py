"""Test `QuantizedTensor`: every operation it has against the values it dequantizes to, and all others raise."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import quaver.torch as qt
from quaver.recipes import RECIPES
from quaver.recipes.formats import E5M2
from quaver.recipes.spec import QuantSpec
from quaver.torch.quantized_tensor import QuantizedTensor
from tests.close import assert_bitwise

#: One weight spec of each kind in the recipes, by recipe; mxfp6 stores one code per byte.
SPECS: dict[str, QuantSpec] = {}
for _name, _build in RECIPES.items():
    _spec = _build().fprop.b
    if _spec is not None and (_at_rest := replace(_spec, rounding="nearest", hadamard=False)) not in SPECS.values():
        SPECS[_name] = _at_rest
SPECS["e5m2"] = replace(SPECS["delayed"], format=E5M2)
SPECS["fp32 scales"] = replace(SPECS["rowwise"], scale="fp32")
FORMATS = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
MX, TENSORWISE, BLOCKWISE, NVFP4 = (SPECS[n] for n in ("mxfp8", "delayed", "blockwise", "nvfp4"))
N, K = 160, 80


def values(seed: int = 0, n: int = N, k: int = K, dtype: torch.dtype = torch.float32) -> Tensor:
    value = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * (seed + 1)
    return value.to(dtype)


def tensor(spec: QuantSpec = MX, seed: int = 0, dtype: torch.dtype = torch.float32) -> QuantizedTensor:
    return QuantizedTensor.from_tensor(values(seed, dtype=dtype), spec)


def parameter(spec: QuantSpec = MX, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    return nn.Parameter(tensor(spec, seed, dtype))


def assert_same(a: Any, b: Any) -> None:
    """Check that spec, dtype, codes, scales and values are equal."""
    assert isinstance(a, QuantizedTensor) and a.spec == b.spec and a.dtype is b.dtype and a.shape == b.shape
    for one, other in zip(a.tensors(), b.tensors(), strict=True):
        assert_bitwise(one.detach().view(torch.uint8), other.detach().view(torch.uint8))
    assert_bitwise(a.dequantize(), b.dequantize())


class Holder(nn.Module):
    """A module with one stored weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight


# ---- contents ----


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_and_scales_are_those_of_quantize(spec: QuantSpec, dtype: torch.dtype) -> None:
    w, q = tensor(spec, dtype=dtype), qt.quantize(values(dtype=dtype), spec)
    assert w.shape == (N, K) and w.dtype is dtype and w.stride() == (K, 1)
    assert_bitwise(w.unwrap().codes(), q.codes())
    assert_bitwise(w.unwrap().scales(), q.scales())
    assert_bitwise(w.dequantize(), q.dequantize().to(dtype))
    assert type(w.dequantize()) is Tensor
    assert_same(QuantizedTensor.from_quantized(q, dtype), w)
    assert w.nbytes == q.plain().nbytes or spec.per_tensor


@FORMATS
@pytest.mark.parametrize(
    "value", [0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, 1e30, 3e-39], ids=lambda value: str(value)
)
def test_values_that_hurt_are_those_of_quantize(spec: QuantSpec, value: float) -> None:
    x = values()
    x[3, 5] = value
    w, expected = QuantizedTensor.from_tensor(x, spec), qt.quantize(x, spec).dequantize()
    assert_bitwise(w.dequantize(), expected)
    written = tensor(spec, 1)
    written.copy_(x)
    assert_bitwise(written.dequantize(), expected)
    assert_bitwise(torch.empty(N, K).copy_(w), expected)
    assert_bitwise(copy.deepcopy(w).dequantize(), expected)


@FORMATS
@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (1, 1), (3, 7), (33, 17)], ids=str)
def test_empty_and_ragged_shapes_are_kept(spec: QuantSpec, shape: tuple[int, int]) -> None:
    x = values(0, *shape)
    w = QuantizedTensor.from_tensor(x, spec)
    expected = qt.quantize(x, spec).dequantize()
    one: Tensor
    for one in (w, w.clone(), pickle.loads(pickle.dumps(w)), copy.deepcopy(w), w[:]):
        assert one.shape == shape
        assert_bitwise(one.dequantize(), expected)


@pytest.mark.parametrize(
    "value, spec, message",
    [
        (torch.zeros(3), MX, "matrix"),
        (torch.zeros(3, 3, dtype=torch.int32), MX, "int32"),
        (torch.zeros(3, 32), replace(MX, rounding="stochastic"), "stochastically"),
        (torch.zeros(3, 32), replace(MX, hadamard=True), "rotated"),
    ],
    ids=["vector", "integers", "stochastic", "rotated"],
)
def test_what_cannot_be_a_weight_at_rest_raises(value: Tensor, spec: QuantSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizedTensor.from_tensor(value, spec)


# ---- operations ----


@FORMATS
def test_detach_shares_codes_and_clone_copies_them(spec: QuantSpec) -> None:
    w = parameter(spec)
    detached, cloned = w.detach(), w.detach().clone()
    assert_same(detached, w)
    assert_same(cloned, w)
    assert detached.codes.data_ptr() == w.codes.data_ptr() != cloned.codes.data_ptr()
    detached.copy_(values(7))
    assert_bitwise(w.dequantize(), qt.quantize(values(7), spec).dequantize())
    assert_same(cloned, tensor(spec))


@FORMATS
def test_copy_of_another_spec_or_dtype_quantizes_its_values(spec: QuantSpec) -> None:
    for other in (TENSORWISE, MX, NVFP4):
        source, into = tensor(other, 2), tensor(spec)
        into.copy_(source)
        assert_same(into, source if other == spec else QuantizedTensor.from_tensor(source.dequantize(), spec))
    into = tensor(spec, dtype=torch.bfloat16)
    into.copy_(values(5))
    assert into.dtype is torch.bfloat16
    assert_bitwise(into.unwrap().codes(), qt.quantize(values(5), spec).codes())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int64], ids=str)
def test_copy_of_codes_without_scales_raises(dtype: torch.dtype) -> None:
    w = tensor()
    with pytest.raises(TypeError, match="which has its scales"):
        w.copy_(torch.zeros(N, K).to(dtype))
    assert_same(w, tensor())


@pytest.mark.parametrize("shape", [(N, K + 1), (N - 1, K)], ids=str)
def test_copy_of_another_shape_raises(shape: tuple[int, int]) -> None:
    w = tensor()
    for other in (torch.zeros(shape), QuantizedTensor.from_tensor(torch.zeros(shape), MX)):
        with pytest.raises(RuntimeError, match="must match the existing size"):
            w.copy_(other)
    assert_same(w, tensor())


@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_another_dtype_keeps_the_codes(spec: QuantSpec, dtype: torch.dtype) -> None:
    w = tensor(spec)
    moved = w.to(dtype)
    assert moved.dtype is dtype and moved.dequantize().dtype is dtype
    assert_same(moved.float(), w)
    assert_bitwise(moved.dequantize(), w.unwrap().dequantize().to(dtype))


def test_a_dtype_that_is_none_of_high_precision_raises() -> None:
    for dtype in (torch.float8_e4m3fn, torch.int8, torch.bool):
        with pytest.raises(TypeError, match=r"read w\.codes"):
            tensor().to(dtype)


@FORMATS
def test_meta_and_back_has_the_same_layout(spec: QuantSpec) -> None:
    w = tensor(spec)
    away: Any = w.to("meta")
    made = QuantizedTensor.from_tensor(values().to("meta"), spec)
    for one in (away, made):
        assert one.is_meta and all(t.is_meta for t in one.tensors()) and one.shape == (N, K)
        back = torch.empty_like(one, device="cpu")
        assert isinstance(back, QuantizedTensor)
        back.copy_(w)
        assert_same(back, w)


@FORMATS
def test_rows_of_whole_blocks_are_views(spec: QuantSpec) -> None:
    w = tensor(spec)
    height = spec.block[0]
    step = 32 if height is None else -(-32 // height) * height
    whole = w.dequantize()
    for start in range(0, N, step):
        rows: Any
        for rows in (w[start : start + step], w.narrow(0, start, min(step, N - start))):
            assert_bitwise(rows.dequantize(), whole[start : start + step])
            assert rows.codes.untyped_storage().data_ptr() == w.codes.untyped_storage().data_ptr()
    pieces = w.split(step)
    assert [len(piece) for piece in pieces] == [len(piece) for piece in whole.split(step)]
    for piece, expected in zip(pieces, whole.split(step), strict=True):
        assert_bitwise(piece.dequantize(), expected)
        assert_bitwise(piece.clone().dequantize(), expected)
        assert_bitwise(pickle.loads(pickle.dumps(piece)).dequantize(), expected)
    assert_same(torch.cat(pieces), w)
    first, second = w.split([step, N - step])
    assert_bitwise(second.dequantize(), whole[step:])
    assert_same(torch.cat([first, second]), w)


@FORMATS
def test_writing_to_rows_changes_those_rows_alone_or_raises(spec: QuantSpec) -> None:
    w = tensor(spec)
    step = 32 if spec.block[0] is None else -(-32 // spec.block[0]) * spec.block[0]
    rows, expected, value = w[:step], w.dequantize(), values(4)[:step] * 100
    if spec.block[0] is None or spec.two_level:
        for write in (lambda: rows.copy_(value), rows.zero_, lambda: rows.detach().copy_(value)):
            with pytest.raises(TypeError, match="whose scale also serves other rows"):
                write()
        assert_bitwise(w.dequantize(), expected)
        rows.clone().copy_(value)
    else:
        rows.copy_(value)
        expected[:step] = qt.quantize(value, spec).dequantize()
    assert_bitwise(w.dequantize(), expected)


@pytest.mark.parametrize(
    "take",
    [
        lambda w: w[:100],
        lambda w: w.split(100),
        lambda w: w[:, :16],
        lambda w: w.split(16, 1),
        lambda w: w[::2],
        lambda w: torch.cat([w[:128], w], 1),
        lambda w: torch.cat([w, w]),
        lambda w: torch.cat([w, values()]),
        lambda w: torch.cat([w, tensor(MX)]),
        lambda w: w.view(K, N),
    ],
)
def test_rows_that_cut_blocks_and_other_views_raise(take: Callable[[Tensor], object]) -> None:
    with pytest.raises(NotImplementedError, match=r"w\.dequantize\(\)"):
        take(tensor(BLOCKWISE))


@pytest.mark.parametrize("spec", [TENSORWISE, NVFP4], ids=str)
def test_rows_with_scales_of_their_own_are_not_joined(spec: QuantSpec) -> None:
    with pytest.raises(NotImplementedError, match="scales of their own"):
        torch.cat([tensor(spec), tensor(spec, 1)])


def test_gradients_and_states_are_plain_tensors() -> None:
    w = tensor(dtype=torch.bfloat16)
    for made, expected in (
        (torch.zeros_like(w), torch.zeros(N, K)),
        (torch.ones_like(w), torch.ones(N, K)),
        (torch.full_like(w, 3.0), torch.full((N, K), 3.0)),
        (w.new_zeros(4), torch.zeros(4)),
        (w.new_ones((2, 3)), torch.ones(2, 3)),
        (w.new_full((2,), 5.0), torch.full((2,), 5.0)),
    ):
        assert type(made) is Tensor
        assert_bitwise(made, expected.bfloat16())
    states = torch.zeros_like(w, dtype=torch.float32, memory_format=torch.preserve_format)
    assert type(states) is Tensor and states.dtype is torch.float32 and states.stride() == (K, 1)
    assert type(w.new_empty(2, 3)) is Tensor and w.new_zeros(3, device="meta").is_meta
    assert type(torch.empty_like(w, dtype=torch.uint8)) is Tensor


def test_equal_compares_values() -> None:
    w = tensor()
    assert torch.equal(w, w.clone()) and torch.equal(w, w.dequantize()) and torch.equal(w.dequantize(), w)
    assert not torch.equal(w, tensor(seed=1)) and not torch.equal(w, w[:32])
    other = QuantizedTensor.from_tensor(w.dequantize(), TENSORWISE)
    assert torch.equal(w, other) is bool((w.dequantize() == other.dequantize()).all())


@FORMATS
def test_initializers_quantize_what_they_fill(spec: QuantSpec) -> None:
    for initialize in (nn.init.zeros_, nn.init.ones_, nn.init.normal_, nn.init.xavier_uniform_):
        w, expected = parameter(spec), torch.empty(N, K)
        for each in (w, expected):
            torch.manual_seed(0)
            initialize(each)
        assert_bitwise(w.dequantize().detach(), qt.quantize(expected, spec).dequantize())


OTHERS: dict[str, Callable[[Any], object]] = {
    "multiply": lambda w: w * 2,
    "multiply in place": lambda w: w.mul_(2),
    "add in place": lambda w: w.add_(torch.ones(N, K)),
    "lerp of an EMA": lambda w: w.lerp_(values(1), 0.1),
    "linear": lambda w: nn.functional.linear(torch.zeros(2, K), w),
    "matmul": lambda w: torch.zeros(2, N) @ w,
    "transpose": lambda w: w.t(),
    "norm": lambda w: w.norm(),
    "isnan": lambda w: w.isnan(),
    "index": lambda w: w[0],
    "write to an element": lambda w: w.__setitem__((0, 0), 1.0),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    "resize": lambda w: w.resize_(2, 2),
    "as strided": lambda w: w.as_strided((2, 2), (1, 1)),
    "other strides": lambda w: w.as_strided((N, K), (1, N)),
    "reinterpret": lambda w: w.view(torch.int32),
    "stack": lambda w: torch.stack([w, w]),
}


@pytest.mark.parametrize("operation", OTHERS.values(), ids=OTHERS)
def test_other_operations_raise_and_write_nothing(operation: Callable[[Any], object]) -> None:
    w = tensor()
    with pytest.raises(NotImplementedError, match=r"aten\.\w+\.\w+ is not defined for a QuantizedTensor.*dequantize"):
        operation(w)
    assert_same(w, tensor())


@pytest.mark.parametrize("read", [torch.from_dlpack, lambda w: w.apply_(abs)], ids=["dlpack", "apply_"])
def test_functions_that_read_memory_without_dispatch_raise(read: Callable[[Any], object]) -> None:
    with pytest.raises(NotImplementedError, match=r"is not defined for a QuantizedTensor.*w\.dequantize\(\)"):
        read(tensor())


# ---- autograd ----


def test_a_gradient_flows_to_the_weight() -> None:
    w = parameter(dtype=torch.bfloat16)
    w.grad_dtype = torch.float32
    torch.empty(N, K).copy_(w).mul(values(1)).sum().backward()
    assert type(w.grad) is Tensor and w.grad.dtype is torch.float32
    assert_bitwise(w.grad, values(1).bfloat16().float())
    w.grad.zero_()
    torch.empty(N, K).copy_(torch.cat([w[:32], w[32:]])).mul(values(2)).sum().backward()
    assert_bitwise(w.grad, values(2).bfloat16().float())


@pytest.mark.parametrize("write", [lambda w, x: w.copy_(x), lambda w, x: setattr(w, "data", x)], ids=["copy_", "data"])
def test_a_write_between_forward_and_backward_raises(write: Callable[[Any, Any], object]) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: QuantizedTensor) -> Tensor:
            ctx.save_for_backward(w)
            return x @ w.dequantize().T

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            (w,) = ctx.saved_tensors
            return g @ w.dequantize(), torch.zeros_like(w)

    x, w = torch.ones(2, K, requires_grad=True), parameter()
    y = Product.apply(x, w)
    y.sum().backward()
    assert x.grad is not None
    assert_bitwise(x.grad, torch.ones(2, N) @ w.dequantize().detach())
    y = Product.apply(x, w)
    before = w._version
    with torch.no_grad():
        write(w, tensor(seed=1))
    assert w._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "write", [lambda w, state: w.codes.zero_(), lambda w, state: state.zero_()], ids=["codes", "state"]
)
@pytest.mark.parametrize("kind", ["linear", "mlp", "grouped"])
def test_a_write_to_the_codes_between_forward_and_backward_raises(
    kind: str, write: Callable[[Any, Any], object]
) -> None:
    with qt.quantized_init("mxfp8"):
        layer: Any = {
            "linear": lambda: qt.Linear(64, 64),
            "mlp": lambda: qt.MLP(64, 64),
            "grouped": lambda: qt.GroupedLinear(2, 64, 64),
        }[kind]()
    x = torch.randn(8, 64, requires_grad=True)
    ends = (torch.tensor([3, 8], dtype=torch.int32),) if kind == "grouped" else ()
    key = next(key for key in layer.state_dict() if key.endswith("weight"))
    for recipe in ("mxfp8", "tensorwise", None):
        with qt.autocast(recipe or "mxfp8", enabled=recipe is not None):
            y = layer(x, *ends)
        with torch.no_grad():
            write(layer.get_parameter(key), layer.state_dict()[key])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# ---- copies of a weight; earlier versions lost the scale in these ----


def _copied(one: Any, other: Any) -> Any:
    with torch.no_grad():
        one.weight.copy_(other.weight)
    return one.weight


def _cloned(one: Any, other: Any) -> Any:
    one.weight = nn.Parameter(other.weight.detach().clone())
    return one.weight


def _tied(one: Any, other: Any) -> Any:
    one.weight = other.weight
    with torch.no_grad():
        other.weight.copy_(other.weight.dequantize())
    assert one.weight.codes is other.weight.codes
    return one.weight


def _through_data(one: Any, other: Any) -> Any:
    one.weight.data = other.weight.data
    return one.weight


def _swapped(one: Any, other: Any) -> Any:
    moved = copy.deepcopy(other.weight)
    torch.utils.swap_tensors(one.weight, moved)
    return one.weight


def _deep_copied(one: Any, other: Any) -> Any:
    return copy.deepcopy(other).weight


def _pickled(one: Any, other: Any) -> Any:
    return pickle.loads(pickle.dumps(other)).weight


def _saved(one: Any, other: Any) -> Any:
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    one.load_state_dict(torch.load(file, weights_only=True))
    return one.weight


def _saved_as_parameter(one: Any, other: Any) -> Any:
    file = io.BytesIO()
    torch.save(other.weight, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _loaded_by_assignment(one: Any, other: Any) -> Any:
    one.load_state_dict(other.state_dict(), assign=True)
    return one.weight


COPIES: tuple[Callable[[Any, Any], Any], ...] = (
    _copied,
    _cloned,
    _tied,
    _through_data,
    _swapped,
    _deep_copied,
    _pickled,
    _saved,
    _saved_as_parameter,
    _loaded_by_assignment,
)


@FORMATS
@pytest.mark.parametrize("way", COPIES, ids=lambda f: f.__name__.strip("_"))
def test_a_copy_has_the_scales(spec: QuantSpec, way: Callable[[Any, Any], Any]) -> None:
    one, other = Holder(parameter(spec, 0)), Holder(parameter(spec, 3))
    if way is _tied:
        _copied(other, Holder(QuantizedTensor.from_tensor(other.weight.dequantize().detach(), spec)))
        with torch.no_grad():
            other.weight.copy_(other.weight.dequantize())
    result = way(one, other)
    assert_same(result, other.weight)
    assert isinstance(result, nn.Parameter) and result.requires_grad
    if way not in (_saved_as_parameter, _deep_copied, _pickled):
        assert one.weight is result


@FORMATS
def test_modules_move_and_cast_it_in_place(spec: QuantSpec) -> None:
    one = Holder(parameter(spec))
    weight = one.weight
    one.bfloat16()
    assert one.weight is weight and weight.dtype is torch.bfloat16 and weight.requires_grad
    assert_same(weight, tensor(spec).bfloat16())
    one.to("meta")
    assert one.weight.is_meta and isinstance(one.weight, QuantizedTensor)
    one.to_empty(device="cpu")
    assert isinstance(one.weight, QuantizedTensor) and one.weight.device.type == "cpu"


def test_data_of_another_kind_raises() -> None:
    w = parameter()
    for value in (values(1), w.codes, tensor()[:32]):
        with pytest.raises(TypeError, match="assign a QuantizedTensor of its shape"):
            w.data = value
    assert_same(w, tensor())
    w.data = tensor(NVFP4, dtype=torch.bfloat16)
    assert w.spec == NVFP4 and w.dtype is torch.bfloat16 and w.requires_grad
    assert_same(w, tensor(NVFP4, dtype=torch.bfloat16))


def test_a_deep_copy_keeps_identity_and_the_dtype_of_the_gradient() -> None:
    w = parameter(dtype=torch.bfloat16)
    w.grad_dtype = torch.float32
    w.grad = values(1)
    one, again = copy.deepcopy([w, w])
    # As for any parameter.
    assert one is again and one.grad is None and one.grad_dtype is torch.float32
    leaf = tensor().requires_grad_()
    leaf.grad = values(1)
    copied = copy.deepcopy(leaf)
    assert copied.grad is not leaf.grad and not isinstance(copied, nn.Parameter)
    assert_bitwise(copied.grad, values(1))
    frozen = copy.deepcopy(w.requires_grad_(False))
    assert not frozen.requires_grad and isinstance(frozen, nn.Parameter)
    with pytest.raises(RuntimeError, match="only a leaf"):
        copy.deepcopy(parameter().clone())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_optimizers_of_torch_raise_and_write_nothing(kind: Any, fused: bool) -> None:
    w = parameter()
    w.grad = torch.ones(N, K)
    optimizer = kind([w], lr=0.1, fused=fused)
    # The latter only once a layer stores a weight.
    with pytest.raises((NotImplementedError, ValueError), match=r"quaver\.torch\.optim|layer\.set_weight"):
        optimizer.step()
    assert_same(w, tensor())


# ---- compilers and several ranks ----


@pytest.mark.parametrize(
    ("spec", "backend"), [(TENSORWISE, "aot_eager"), (MX, "inductor"), (NVFP4, "aot_eager")], ids=str
)
def test_a_compiled_graph_reads_the_codes(spec: QuantSpec, backend: str) -> None:
    torch.compiler.reset()

    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.dequantize().T

    x, w = values(1, 4, K), tensor(spec)
    compiled = torch.compile(product, backend=backend, fullgraph=True)
    assert_bitwise(compiled(x, w), product(x, w))
    w.copy_(values(2))
    assert_bitwise(compiled(x, w), product(x, w))


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", (tmp_path / "store").as_uri(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("recipe", "groups"), [("tensorwise", 0), ("nvfp4", 2)])
def test_a_write_before_a_compiled_backward_raises(recipe: str, groups: int) -> None:
    torch.compiler.reset()
    with qt.quantized_init(recipe):
        layer: Any = qt.GroupedLinear(groups, 32, 64, recipe=recipe) if groups else qt.Linear(32, 64, recipe=recipe)
    x = torch.ones(8, 32, requires_grad=True)
    y = torch.compile(layer, backend="aot_eager")(x, *([torch.tensor([4, 8], dtype=torch.int32)] if groups else []))
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@FORMATS
def test_flat_values_are_read_and_not_written(spec: QuantSpec) -> None:
    w = tensor(spec)
    flat = w.view(-1)
    assert flat.shape == (N * K,)
    assert_bitwise(torch.cat([flat, flat])[: N * K], w.dequantize().view(-1))
    assert_bitwise(torch.empty(N, K).copy_(flat.narrow(0, 0, N * K).view(N, K)), w.dequantize())
    writes: tuple[Callable[[], object], ...] = (
        lambda: flat.__setitem__(0, 1.0),
        lambda: flat[:4].zero_(),
        lambda: flat.view(N, K).copy_(values(1)),
        lambda: flat.mul_(2),
        lambda: flat.chunk(2),
        lambda: torch._foreach_mul_([flat], 2.0),
        lambda: torch.add(flat, 1.0, out=flat),
    )
    for write in writes:
        with pytest.raises(NotImplementedError, match=r"w\.dequantize\(\)"):
            write()
    assert_same(w, tensor(spec))


@pytest.mark.usefixtures("one_rank")
def test_wrappers_for_several_ranks_raise_or_leave_it_alone() -> None:
    module = Holder(parameter())
    DistributedDataParallel(module)
    # Codes of the same values may have another power of two as their scale.
    assert torch.equal(module.weight, tensor())
    with pytest.raises(NotImplementedError, match="QuantizedTensor"):
        distribute_tensor(tensor(), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(NotImplementedError, match="QuantizedTensor"):
        dist.all_reduce(tensor())


def test_shared_memory_holds_codes_and_scales() -> None:
    module: Any = Holder(parameter(NVFP4)).share_memory()
    assert module.weight.is_shared() and all(t.is_shared() for t in module.weight.tensors())
    assert_same(module.weight, tensor(NVFP4))

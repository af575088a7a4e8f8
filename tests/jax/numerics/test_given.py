"""Test that every public function refuses invalid arguments clearly and accepts numpy arrays."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

import quaver.jax as qj
from quaver import recipes
from quaver.jax import linen
from quaver.jax import state as states
from quaver.jax.blocks.attention import attention, rope
from quaver.jax.blocks.layers import activate, layer_norm, rms_norm
from quaver.jax.nnx import MLP, DenseGeneral
from tests.close import assert_bitwise
from tests.jax.transformed import integers

SPEC = recipes.get("mxfp8").fprop.a
assert SPEC is not None
# Threefry takes seconds to compile.
KEY = jax.random.key(0, impl="unsafe_rbg")
X, W = integers(0, 4, 16), integers(1, 16, 8)
Q = qj.quantize(X, SPEC)
RECIPE = recipes.delayed(history=2)
STATE = states.init(RECIPE)
NUMBERS = (((1,), (0,)), ((), ()))

#: Every function with arguments that fit, and those of them that the property changes.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "linear": (
        partial(qj.linear, recipe=RECIPE),
        {"x": X, "w": W, "bias": jnp.ones(8), "state": STATE, "dtype": None, "name": "layer", "seed": 0, "axes": None}
        | {"gather_input": None, "gather_weight": None},
    ),
    "dot_general": (
        partial(qj.dot_general, recipe="mxfp8"),
        {"lhs": X, "rhs": W, "dimension_numbers": NUMBERS, "state": None, "name": "layer", "seed": 0},
    ),
    "grouped_dot": (
        partial(qj.grouped_dot, recipe="mxfp8"),
        {"x": X, "w": W[None], "group_sizes": jnp.array([4]), "state": None, "dtype": None, "name": "g", "seed": 0},
    ),
    "quantize": (
        qj.quantize,
        {"x": X, "spec": SPEC, "amax": None, "factor": None, "seed": 0, "tensor_id": 0, "count": 0},
    ),
    "dequantize": (qj.dequantize, {"q": Q}),
    "matmul": (qj.matmul, {"a": Q, "b": Q, "dtype": jnp.float32, "bias": None}),
    "Gather": (qj.ShardedOperand, {"axis": "a", "sharding": jax.sharding.PartitionSpec("a")}),
    "autocast": (qj.autocast, {"recipe": "mxfp8"}),
    "state.init": (states.init, {"recipe": "delayed"}),
    "state.merge": (lambda a, b: states.merge(a, b), {"a": STATE, "b": STATE}),
    "state.share": (states.share, {"states": STATE, "n": 2}),
    "state.update": (states.update, {"before": STATE, "after": STATE}),
    "state.micro_batch": (states.micro_batch, {"states": STATE, "index": 1}),
    "state.unrecorded": (states.unrecorded, {"states": STATE}),
}

WRONG: dict[str, Any] = {
    "a list": [[1.0, 2.0]],
    "text": "text",
    "nothing": None,
    "a fraction": 2.5,
    "a dict": {"a": 1},
    "an object": object(),
    "a shape": jax.ShapeDtypeStruct((4, 16), jnp.float32),
    "an array of text": np.array([["a"]]),
    "complex numbers": np.ones((4, 16), complex),
    "a matrix of no gradient": np.zeros((4, 16), jax.dtypes.float0),
    "random keys": jax.random.split(KEY, 4),
}
#: What is taken all the same.
TAKEN = {
    ("linear", "name", "text"), ("dot_general", "name", "text"), ("grouped_dot", "name", "text"),
    ("Gather", "axis", "text"), ("quantize", "amax", "a fraction"), ("quantize", "factor", "a fraction"),
    ("quantize", "tensor_id", "a fraction"), ("quantize", "count", "a fraction"), ("state.init", "recipe", "nothing"),
    ("linear", "bias", "nothing"), ("state.share", "states", "nothing"), ("state.micro_batch", "states", "nothing"),
    ("state.unrecorded", "states", "nothing"), ("linear", "dtype", "a shape"),
    ("grouped_dot", "dtype", "a shape"), ("matmul", "dtype", "a shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_unsupported_arguments_give_a_clear_error(name: str) -> None:
    function, arguments = CALLS[name]
    # Valid arguments are traced, since their values do not matter; wrong ones are passed as they are.
    jax.eval_shape(lambda: (function(**arguments), None)[1])
    for argument, (kind, value) in ((a, w) for a in arguments for w in WRONG.items()):
        if (name, argument, kind) in TAKEN or (arguments[argument] is None and value is None):
            continue
        try:
            function(**arguments | {argument: value})
        except (TypeError, ValueError) as error:
            sentence = str(error)
            assert len(sentence) > 40 and " " in sentence, f"{argument} = {kind}: {sentence}"
            inside = ("object has no", "not iterable", "not subscriptable", "must be integers", "sequence element")
            assert not any(words in sentence for words in inside), f"{argument} = {kind}: {sentence}"
        else:
            raise AssertionError(f"{argument} = {kind} was taken")


def test_a_list_is_refused_and_an_array_suggested() -> None:
    with pytest.raises(TypeError, match=r"x is a list; give an array, such as jax.numpy.asarray\(x\)"):
        qj.linear([[1.0, 2.0]], W)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["linear", "dot_general", "grouped_dot", "quantize"])
def test_numpy_and_float64_arrays_are_accepted(name: str) -> None:
    function, arguments = CALLS[name]
    expected = jax.jit(partial(function, **arguments))()
    for dtype in (np.float32,) if name == "quantize" else (np.float32, np.float64):
        given = {k: np.asarray(v, dtype) if isinstance(v, Array) and v.ndim == 2 else v for k, v in arguments.items()}
        jax.tree.map(assert_bitwise, jax.jit(partial(function, **given))(), expected)


def test_nnx_variables_and_their_gradients_are_accepted() -> None:
    layer = nnx.jit(lambda: DenseGeneral(16, 8, rngs=nnx.Rngs(KEY)))()

    def loss(w: Any) -> tuple[Array, Array]:
        y = qj.linear(X, w, recipe="mxfp8")
        return y.sum(), y

    array_gradients, expected = jax.jit(jax.grad(loss, has_aux=True))(layer.kernel[...])
    variable_gradients, got = nnx.jit(nnx.grad(lambda layer: loss(layer.kernel), has_aux=True))(layer)
    assert_bitwise(got, expected)
    assert_bitwise(variable_gradients["kernel"][...], array_gradients)


@pytest.mark.parametrize("grad", [False, True])
def test_pmap_is_named_with_what_to_use_in_its_place(grad: bool) -> None:
    def run(x: Array) -> Array:
        return qj.linear(x, W, recipe="mxfp8").sum()

    with pytest.raises(ValueError, match=r"jax.pmap.*instead of pmap use jax.jit with sharded arrays"):
        jax.pmap(jax.grad(run) if grad else run)(X[None])


def test_dot_general_refuses_mismatched_axes() -> None:
    with pytest.raises(TypeError, match="contracting dimensions"):
        qj.dot_general(X, W, (((0,), (0,)), ((), ())), recipe="mxfp8")
    with pytest.raises(ValueError, match="dimension_numbers are"):
        qj.dot_general(X, W, ((1,), (0,)), recipe="mxfp8")  # type: ignore[arg-type]


def test_axes_are_integers_inside_a_trace_too() -> None:
    several = [1.5, "1", float("inf"), float("nan"), KEY, jnp.float32(1), [1]]
    wrong = [*WRONG.values(), *((((axis,), (0,)), ((), ())) for axis in several)]
    for numbers in wrong:
        run = partial(qj.dot_general, dimension_numbers=numbers, recipe="mxfp8")
        for call in (run, partial(jax.eval_shape, run)):
            with pytest.raises(ValueError, match="dimension_numbers are"):
                call(X, W)
    for axis in (np.int64(1), jnp.int32(1), True):
        numbers = (((axis,), np.array([0])), ([], []))
        assert jax.eval_shape(partial(qj.dot_general, dimension_numbers=numbers, recipe="mxfp8"), X, W).shape == (4, 8)


def test_a_mismatched_count_is_refused() -> None:
    with pytest.raises(ValueError, match="count is int32"):
        qj.linear(X, W, recipe="nvfp4", state={"count": jnp.zeros(2, jnp.int32)})


def test_mismatched_state_trees_are_refused() -> None:
    with pytest.raises(ValueError, match=r"contains a float at \['w'\].*split"):
        states.merge({"w": 1.0, "state": STATE})
    with pytest.raises(ValueError, match="differ in their layers"):
        states.merge(STATE, states.init("nvfp4"))
    with pytest.raises(ValueError, match="got none"):
        states.merge()
    with pytest.raises(ValueError, match="give the number of uses"):
        states.share(STATE, 0)


#: Functions and modules of blocks, of x.
BLOCKS: dict[str, Callable[[Any], Any]] = {
    "linen DenseGeneral": lambda x: linen.DenseGeneral(8).init(KEY, x),
    "linen LayerNormMLP": lambda x: linen.LayerNormMLP(8).init(KEY, x),
    "nnx DenseGeneral": lambda x: DenseGeneral(16, 8, rngs=nnx.Rngs(KEY))(x),
    "nnx MLP": lambda x: MLP(16, 8, rngs=nnx.Rngs(KEY))(x),
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "activate": lambda x: activate("gelu", x),
    "attention": lambda x: attention(x, x, x),
    "rope": rope,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_require_arrays(name: str) -> None:
    for wrong in WRONG.values():
        with pytest.raises(TypeError, match=r"give (an array|one of real numbers)"):
            BLOCKS[name](wrong)


def test_grouped_dot_says_that_float64_is_not_quantized() -> None:
    with jax.enable_x64(True), pytest.warns(UserWarning, match="float64 is computed in high precision"):
        qj.grouped_dot(X.astype(float), W[None], jnp.array([4]), recipe="mxfp8")

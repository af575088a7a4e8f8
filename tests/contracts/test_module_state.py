"""State of modules in the process: every container that a function fills, and why several threads may fill it.

And what a layer keeps: one attribute more than nn.Linear, whatever it runs.
"""

import ast
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.state.layer_state import state_of
from tests.contracts.sources import parsed, walk

ROOT = Path(__file__).parents[2] / "src" / "quaver"
#: Packages whose modules run in several threads: on a GPU, backward has its own thread.
PARTS = ("torch", "kernels")
FILLING = {"add", "append", "clear", "discard", "extend", "pop", "setdefault", "update"}

SAME = "what two threads put under a key is the same, and holds nothing that is lost when one of them is dropped"
LOCKED = "filled under a lock, and looked up again there"
ONCE = "setdefault: the first one stays"
OWN = "the key holds the thread and the stream: nobody else writes there"
WARNS = "two threads may warn twice"
#: functools.cache and lru_cache are safe in threads; their values must be, too.
CACHED = "functools keeps it consistent; two threads may compute the same twice"
#: By module and name.
SAFE = {
    "torch.state.history.amax:_histories": SAME,
    "torch.state.history.amax:_layers": "each layer has a number of its own, which itertools.count gives to no other",
    "torch.state.history.amax:_numbers": "a thread adds the layers that it makes",
    "torch.nn.attention.inputs:_by_position": "one a stream, since no other waits for what a stream makes",
    "torch.nn.attention.backends:_compiled": CACHED,
    "torch.nn.ssm.scan:_differs": CACHED,
    "torch.conversion.matchers.swap_class:_counterparts": ONCE,
    "torch.parallel.tensor.sharded_module:_sharded": CACHED,
    "torch.optim.compiled:_programs": SAME,
    "torch.linear.grouped.custom_ops:parsed": CACHED,
    "torch.numerics.grouped:_cached_numbers": CACHED,
    "torch.backends.gpu.grouped_quantize:equal_ends": CACHED,
    "torch.linear.grouped.emulated:_answers": SAME,
    "torch.conversion.replace.attention:rebuilt": CACHED,
    "torch.conversion.replace.mixer:uses": CACHED,
    "torch.parallel.fsdp.scales:_watch_optimizers": CACHED,
    "torch.parallel.fsdp.shards:_wrapped": "a thread adds the layers that it prepares",
    "torch.conversion.convert:_roots": "a thread adds the models that it converts",
    "torch.backends.cpu.gemm:multiplies_bf16": CACHED,
    "torch.backends.cpu.decode:_int16": CACHED,
    "torch.backends.cpu.decode:_scaled_values": CACHED,
    "torch.backends.cpu.decode:_table": CACHED,
    "torch.backends.cpu.few_bits:_codes_of_upper_halves": CACHED,
    "torch.backends.cpu.few_bits:_nearest_codes": CACHED,
    "torch.backends.cpu.few_bits:_of_scale_codes": CACHED,
    "torch.backends.cpu.few_bits:_stochastic_codes": CACHED,
    "torch.backends.cpu.noise:_ascending": CACHED,
    "torch.backends.cpu.quantize:_scalars": SAME,
    "torch.backends.cpu.quantize:_steps": CACHED,
    "torch.nn.loss:_warned": WARNS,
    "torch.conversion.quantized_weights:_frozen_layers": "filled under a lock",
    "torch.conversion.quantized_weights:_hooked": "filled under a lock",
    "torch.backends.gpu.capture:rehearsed": "one thread rehearses a stream, and sets change in one step",
    "torch.backends.gpu.fused_quantize:_announced": WARNS,
    "torch.backends.gpu.device:forced_implementations": "`only` is the process's, entered in one thread at a time",
    "torch.backends.gpu.device:_architecture": CACHED,
    "torch.backends.gpu.device:_why_no_fp8": CACHED,
    "torch.backends.gpu.device:_why_too_old": CACHED,
    "torch.backends.gpu.device:why_no_triton": CACHED,
    "torch.backends.gpu.grouped_mm:_probes": SAME,
    "torch.backends.gpu.interpreter:_originals": "tests interpret kernels, where one thread comes first",
    "torch.backends.gpu.launch:_kernels": LOCKED,
    "torch.backends.gpu.launch:_recorded": "only tests and the gate record, in one thread",
    "torch.backends.gpu.launch:_buffers": LOCKED,
    "torch.backends.gpu.launch:_workspaces": LOCKED,
    "torch.backends.gpu.launch:multiprocessors": CACHED,
    "torch.backends.gpu.scaled_mm:_ones": ONCE,
    "torch.backends.gpu.quantize:_families": SAME,
    "torch.state.history.roll_gpu:_captured": "a thread adds the layers that it captures",
    "torch.backends.gpu.scaled_mm:_transposes": SAME,
    "torch.backends.gpu.scaled_mm:_choices": "two threads find out the same; an entry holds its specs",
    "torch.linear.grouped.layer:_warned": WARNS,
    "torch.linear.linear:_warned": WARNS,
    "torch.linear.linear:plans": SAME,
    "torch.linear.general:_plans": SAME,
    "torch.operations.operation:FORMULAS": "filled while modules are imported",
    "torch.operations.operation:OPERATIONS": "filled while modules are imported",
    "torch.operations.ops:_resolved": "an entry holds the recipe whose identity it has; `only` is the process's",
    "torch.optim.codes:_table": CACHED,
    "torch.optim.gradients:_takers": "a thread adds the parameters of the optimizers that it makes",
    "torch.optim.host:_claimed": "a thread adds the parameters of its own optimizer, before their first step",
    "torch.numerics.versions:_read": "two threads read the same values of one version",
    "torch.conversion.replace.mamba_packing:_cu_seqlens": "two threads make the same of one version",
    "torch.nn.attention.rope_scaling:parse": CACHED,
    "torch.linear.stored_weight:_hooked": "two threads may hook the same check twice",
    "torch.linear.stored_weight:_stored": "a thread adds the layers that it makes",
    "torch.linear.stored_weight:_known": "a thread looks up layers that another went through, and checks each",
    "torch.parallel.tensor.partial:_seen": "another thread's entry saves it one more walk of the same graph",
    "torch.state.weight_cache:_parameter_versions": "a change by another thread costs one more quantization at most",
}


def filled(name: str, source: str) -> Iterator[str]:
    """Names of containers that the functions of a module fill or replace, and functions with cached results."""
    tree = parsed(source)
    names = {node.id for part in tree.body if isinstance(part, ast.Assign | ast.AnnAssign) for node in stored(part)}
    for function in (node for node in walk(tree) if isinstance(node, ast.FunctionDef)):
        if any("cache" in ast.unparse(one) and "property" not in ast.unparse(one) for one in function.decorator_list):
            yield f"{name}:{function.name}"
        replaced = {one for node in walk(function) if isinstance(node, ast.Global) for one in node.names}
        for node in walk(function):
            yield from (
                f"{name}:{one}" for one in written(node) if one in names and (one in replaced or not bare(node))
            )


def stored(node: ast.AST) -> Iterator[ast.Name]:
    return (one for one in walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))


def bare(node: ast.AST) -> bool:
    """True if a node assigns a name, which is local to the function unless declared global."""
    return isinstance(node, ast.Name)


def written(node: ast.AST) -> Iterator[str]:
    """The container that a node of a syntax tree fills: name[key] = ..., name.add(...), and name = ..."""
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store | ast.Del)
        and isinstance(node.value, ast.Name)
    ):
        yield node.value.id
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FILLING:
        yield from (one.id for one in [node.func.value] if isinstance(one, ast.Name))


def present() -> set[str]:
    filled_names: set[str] = set()
    for part in PARTS:
        for path in sorted((ROOT / part).rglob("*.py")):
            filled_names |= set(filled(".".join(path.relative_to(ROOT).with_suffix("").parts), path.read_text()))
    return filled_names


def test_module_state_is_reviewed_for_thread_safety() -> None:
    unknown = sorted(present() - set(SAFE))
    assert not unknown, f"filled without a word on threads, add a reason to SAFE or a lock: {unknown}"
    assert not sorted(set(SAFE) - present()), "no longer there, take them out of SAFE"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("held = {}\ndef f(k):\n    held[k] = 1", {"m:held"}),
        ("held = []\ndef f(k):\n    held.append(k)", {"m:held"}),
        ("held = None\ndef f(k):\n    global held\n    held = k", {"m:held"}),
        ("held = None\ndef f(k):\n    held = k", set()),
        ("@cache\ndef f(k):\n    return k", {"m:f"}),
        ("class A:\n    @cached_property\n    def f(self):\n        return 1", set()),
        ("held = {}\ndef f(k):\n    return held.get(k)", set()),
        ("held = {}\ndef f(k):\n    del held[k]", {"m:held"}),
    ],
)
def test_state_filled_by_functions_is_found(source: str, expected: set[str]) -> None:
    assert set(filled("m", source)) == expected


@pytest.mark.parametrize("recipe", [name for name in recipes.RECIPES if name != "bf16"])
def test_a_layer_keeps_one_attribute_more_than_a_plain_one(recipe: str) -> None:
    """Not counting user-readable options: after running, conversion, copying or pickling."""
    plain = nn.Linear(32, 32)
    converted = nn.Sequential(nn.Linear(32, 32))
    qt.convert(converted, recipe)
    options = {"seed", "recipe", "qualified_name"}
    for layer in (qt.Linear(32, 32, recipe=recipe), converted[0]):
        for _ in range(2):
            with qt.autocast(recipe):
                y = layer(torch.randn(32, 32, requires_grad=True))
            y.sum().backward()
        for one in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert set(vars(one)) - set(vars(plain)) - options == {"_state"}
            assert isinstance(one, qt.Linear)
            assert (state_of(one).serial, state_of(one).delayed) == (state_of(layer).serial, state_of(layer).delayed)

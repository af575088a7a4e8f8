"""Functions are short and take few arguments; constructors with many options take a record of them."""

import ast

from tests.contracts.sources import modules, parsed, walk

#: Limits of what a reader can keep in mind.
MOST_ARGUMENTS, MOST_LINES = 12, 80
#: Functions with the signature of another library.
NAMES_OF_OTHERS = "quaver.compat."
#: Kernels, whose length is that of their loop.
KERNELS = "quaver.kernels."
#: Public functions whose options are arguments, since they are called too often for a lookup.
PUBLIC = {
    "quaver.jax.blocks.attention.attention",
    "quaver.jax.blocks.ring_attention.ring_attention",
    "quaver.torch.nn.attention.op.attention",
    "quaver.torch.parallel.context.attention.context_parallel_attention",
}
#: Implementations of operators, with the arguments of their schema.
OPERATORS = {f"quaver.torch.nn.attention.fp8_kernels.{way}" for way in ("forward", "backward")}


def functions(sources: dict[str, str]) -> dict[str, tuple[int, int]]:
    """(arguments, lines) of each function by its name."""
    sizes = {}
    for name, source in sources.items():
        for node in walk(parsed(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                arguments = len([a for a in given if a.arg not in ("self", "cls")])
                assert node.end_lineno is not None
                sizes[f"{name}.{node.name}:{node.lineno}"] = arguments, node.end_lineno - node.lineno + 1
    return sizes


def ours() -> dict[str, tuple[int, int]]:
    return functions({name: source for name, source in modules().items() if not f"{name}.".startswith(KERNELS)})


def test_no_function_takes_more_arguments_than_a_reader_keeps_in_mind() -> None:
    many = {name for name, (arguments, _) in ours().items() if arguments > MOST_ARGUMENTS}
    many = {name for name in many if name.partition(":")[0] not in PUBLIC | OPERATORS}
    many = {name for name in many if not name.startswith(NAMES_OF_OTHERS)}
    assert not many, f"more than {MOST_ARGUMENTS} arguments; give them as a record: {sorted(many)}"


def test_no_function_is_longer_than_a_page() -> None:
    long = {name: lines for name, (_, lines) in ours().items() if lines > MOST_LINES}
    assert not long, f"more than {MOST_LINES} lines: {long}"

"""No code uses torch's default dtype or device for its own tensors, and none changes a setting of the process.

Both are checked in the syntax trees. A changed default gives wrong results, or buffers of a wrong size for code in C. A
setting that is changed and restored is visible to every other thread in between. Also, whether a compiler traces
depends on the thread, so that no code may query it of the process.
"""

import ast
import inspect
from collections.abc import Iterator

import pytest
from torch import nn

from tests.contracts.sources import modules, parsed, walk

#: Functions that create a tensor; torch's own list of functions that use the default device is a part of it.
_FACTORIES = """
arange as_tensor asarray bartlett_window blackman_window empty empty_permuted empty_quantized empty_strided eye fftfreq
full hamming_window hann_window kaiser_window linspace logspace nested_tensor normal ones rand randint randn randperm
range rfftfreq scalar_tensor sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor
sparse_csc_tensor sparse_csr_tensor tensor tril_indices triu_indices vander zeros
"""
FACTORIES = set(_FACTORIES.split())
#: Constructors of the oldest kind, which take no dtype.
OLD = {"FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor"}
#: Functions that change a setting of the process, by the last part of their name.
_SETTERS = """
set_default_dtype set_default_device set_default_tensor_type set_num_threads set_num_interop_threads set_warn_always
use_deterministic_algorithms set_deterministic_debug_mode set_flush_denormal set_float32_matmul_precision set_rng_state
set_swap_module_params_on_conversion set_overwrite_module_params_on_conversion set_printoptions set_sharing_strategy
enable_flash_sdp enable_mem_efficient_sdp enable_math_sdp enable_cudnn_sdp set_device set_per_process_memory_fraction
set_start_method setrecursionlimit setswitchinterval setdefaulttimeout setlocale basicConfig seterr putenv unsetenv
chdir umask
"""
SETTERS = set(_SETTERS.split())
#: The same, by their full name.
_CALLS = """
torch.manual_seed torch.seed torch.random.manual_seed torch.cuda.manual_seed torch.cuda.manual_seed_all random.seed
np.random.seed numpy.random.seed gc.disable gc.enable gc.freeze gc.set_threshold signal.signal warnings.filterwarnings
warnings.simplefilter jax.config.update os.environ.setdefault os.environ.update os.environ.pop os.environ.clear
torch.set_grad_enabled torch.autograd.set_grad_enabled torch.autograd.set_detect_anomaly
torch.autograd.set_multithreading_enabled
"""
CALLS = set(_CALLS.split())
#: Settings of the thread where they are the context of a `with`.
SCOPED = {call for call in CALLS if call.startswith(("torch.set_", "torch.autograd.set_"))} | {"set_device"}
#: Objects whose attributes and items are settings of the process.
SETTINGS = "torch.backends", "torch._dynamo.config", "torch._inductor.config", "torch.utils.deterministic", "os.environ"
#: Calls that are allowed because the module owns its process: (module, call).
OWNERS = {
    # Training and generating from the command line set their threads and handle signals.
    ("quaver.train.torch.learner", "torch.set_num_threads"),
    ("quaver.train.torch.learner", "torch.set_num_threads"),
    ("quaver.train.loop", "signal.signal"),
    ("quaver.train.torch.process_group", "signal.signal"),
    ("quaver.train.torch.learner", "warnings.simplefilter"),
    ("quaver.train.torch.decoder", "warnings.filterwarnings"),
    # So do reading a recipe's text and `doctor`.
    ("quaver.train.config", "warnings.simplefilter"),
    ("quaver.train.torch.learner", "warnings.simplefilter"),
    # While kernels are interpreted, which only tests do.
    ("quaver.torch.backends.gpu.interpreter", "warnings.simplefilter"),
    # Seeds each run inside of `torch.random.fork_rng`.
    ("quaver.torch.compare", "torch.manual_seed"),
    # XLA reads its number of threads from there when it starts.
    ("quaver.train.jax.learner", "os.environ.setdefault"),
}
_TRACING = "quaver.torch.numerics.rounding"
#: torch's queries for compilers, which concern the whole process without Dynamo, and the modules that may use them.
ASKED = {
    "is_compiling": {_TRACING},
    "is_dynamo_compiling": {_TRACING},
    "_is_compiling_flag": {_TRACING},
}


def dotted(node: ast.AST, known: dict[str, str]) -> str:
    """The dotted name of an expression, with aliases resolved; "" if it has none."""
    if isinstance(node, ast.Name):
        return known.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value, known)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def aliases(tree: ast.AST) -> dict[str, str]:
    """Names in a file that refer to torch: imported, or assigned from an attribute."""
    known: dict[str, str] = {}
    for node in walk(tree):
        if isinstance(node, ast.Import):
            known |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    for node in walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Attribute):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            meant = dotted(node.value, known)
            if meant.startswith(("torch.", "os.", "jax.")):
                known |= {target.id: meant for target in targets if isinstance(target, ast.Name)}
    return known


def defaults_taken(source: str) -> Iterator[tuple[int, str]]:
    """(line, code) of every tensor whose dtype or device is torch's default, and of factories that are not called."""
    tree = parsed(source)
    known = aliases(tree)
    called = set()
    for node in walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called.add(node.func)
        name = dotted(node.func, known)
        if not (makes_a_tensor(name) or makes_parameters(name)):
            continue
        given = {keyword.arg for keyword in node.keywords}
        if name.rpartition(".")[2] in OLD or not {"dtype", "device"} <= given:
            yield node.lineno, ast.unparse(node)
    for node in walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and node not in called and isinstance(node.ctx, ast.Load):
            name = dotted(node, known)
            if makes_a_tensor(name) and name.rpartition(".")[2] not in OLD:
                yield node.lineno, ast.unparse(node)


def makes_a_tensor(name: str) -> bool:
    root, _, last = name.rpartition(".")
    return root in ("torch", "torch.fft", "torch.nested", "torch.sparse") and last in FACTORIES | OLD


def makes_parameters(name: str) -> bool:
    """Whether a name is one of torch's modules that take a dtype and a device."""
    if not name.startswith(("nn.", "torch.nn.")):
        return False
    module = getattr(nn, name.rpartition(".")[2], None)
    return inspect.isclass(module) and {"dtype", "device"} <= set(inspect.signature(module).parameters)


def settings_changed(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of every change of a setting of the process: calls by their name, assignments by their code."""
    tree = parsed(source)
    known = aliases(tree)
    contexts = {
        item.context_expr for node in walk(tree) if isinstance(node, ast.With | ast.AsyncWith) for item in node.items
    }
    for node in walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func, known)
            last = name.rpartition(".")[2]
            if name in CALLS or last in SETTERS:
                if node not in contexts or not {name, last} & SCOPED:
                    yield node.lineno, name
            elif last in ("setattr", "delattr") and node.args and is_setting(dotted(node.args[0], known)):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
            for target in targets:
                if isinstance(target, ast.Attribute | ast.Subscript) and is_setting(dotted(target.value, known)):
                    yield node.lineno, ast.unparse(node)


def is_setting(name: str) -> bool:
    return any(name == setting or name.startswith(setting + ".") for setting in SETTINGS)


def test_every_tensor_names_its_dtype_and_device() -> None:
    unnamed = [
        f"{name}:{line}: {code}"
        for name, source in modules().items()
        if name.startswith(("quaver.torch", "quaver.train"))
        for line, code in defaults_taken(source)
    ]
    assert not unnamed, "name dtype and device; pass None if the user's default is meant:\n" + "\n".join(unnamed)


def test_process_settings_change_only_through_their_owner() -> None:
    changes = {(name, what): line for name, source in modules().items() for line, what in settings_changed(source)}
    wrong = [f"{name}:{line}: {what}" for (name, what), line in changes.items() if (name, what) not in OWNERS]
    assert not wrong, "other threads see it, and an exception leaves it:\n" + "\n".join(wrong)
    assert set(changes) >= OWNERS, f"nobody does it any more: {OWNERS - set(changes)}"


def queries(source: str) -> Iterator[tuple[int, str]]:
    """Uses of the names in `ASKED`: as an attribute, an import, or an argument of getattr."""
    for node in walk(parsed(source)):
        names = {
            ast.Attribute: lambda n: [n.attr],
            ast.ImportFrom: lambda n: [alias.name for alias in n.names],
            ast.Constant: lambda n: [n.value],
        }.get(type(node), lambda _: [])(node)
        yield from ((node.lineno, name) for name in names if isinstance(name, str) and name in ASKED)


def test_tracing_is_checked_per_thread() -> None:
    places = [(name, line, what) for name, source in modules().items() for line, what in queries(source)]
    wrong = [f"{name}:{line}: {what}" for name, line, what in places if name not in ASKED[what]]
    assert not wrong, "another thread may compile: `quaver.torch.numerics.rounding.is_tracing`\n" + "\n".join(wrong)
    assert {what: {name for name, _, other in places if other == what} for what in ASKED} == ASKED


@pytest.mark.parametrize(
    "code",
    [
        "torch.compiler.is_compiling()",
        "from torch.compiler import is_dynamo_compiling as f",
        "getattr(torch.compiler, '_is_compiling_flag')",
        "torch._dynamo.is_compiling()",
    ],
)
def test_the_lint_sees_a_question_to_the_process(code: str) -> None:
    assert list(queries(code)) and not list(queries("is_tracing()"))


@pytest.mark.parametrize(
    "code",
    [
        "torch.empty((2, 3))",
        "torch.zeros(3, dtype=torch.float32)",
        "torch.arange(3, device='cpu')",
        "torch.as_tensor(x, device='cpu')",
        "torch.full((), 1.0, **made)",
        "make = torch.empty",
        "from torch import randn\nrandn(3)",
        "from torch import randn as normal\nnormal(3)",
        "import torch as t\nt.eye(3)",
        "torch.FloatTensor(3)",
        "nn.Linear(3, 4)",
        "torch.nn.Embedding(3, 4, device=None)",
    ],
)
def test_the_lint_sees_a_default(code: str) -> None:
    assert list(defaults_taken(code))


@pytest.mark.parametrize(
    "code",
    [
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "m = torch.backends.mkldnn.matmul\nm.fp32_precision = 'bf16'",
        "p: Any = torch.backends.mkldnn.matmul\ndef f():\n    p.fp32_precision = 'bf16'",
        "from torch.backends import mkldnn\nmkldnn.matmul.fp32_precision = 'bf16'",
        "from torch.backends.cuda import matmul as m\nm.fp32_precision = 'ieee'",
        "setattr(torch.backends.cuda.matmul, 'fp32_precision', 'ieee')",
        "torch.set_default_dtype(torch.bfloat16)",
        "from torch import set_num_threads as threads\nthreads(2)",
        "torch.set_grad_enabled(False)",
        "os.environ['A'] = '1'",
        "del os.environ['A']",
        "torch._inductor.config.fallback_random = True",
        "torch.manual_seed(0)",
    ],
)
def test_the_lint_sees_a_setting_that_changes(code: str) -> None:
    assert list(settings_changed(code))


def test_the_lint_covers_everything_affected_by_the_default_device() -> None:
    listed = pytest.importorskip("torch.utils._device", reason="this torch has no such list")
    # transformers replaces torch.linspace for a while, and torch may have made its list in that while.
    own = [f for f in listed._device_constructors() if (f.__module__ or "torch").startswith("torch")]
    moved = {f.__name__.removeprefix("fft_") for f in own}
    assert moved <= FACTORIES, moved - FACTORIES

"""Bytes that autograd keeps of one Llama layer between forward and backward, and what each part's are.

Every tensor saved for backward is seen by `torch.autograd.graph.saved_tensors_hooks`; each storage counts once, where
it is saved first, parameters do not count.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import quaver.torch as qt
from benchmarks.cases.linear.memory import SAVING
from benchmarks.measuring.figure import Case, Figure, Target, at_most
from benchmarks.subjects import blocks
from benchmarks.subjects.blocks import Plain, Size
from quaver.torch.nn.norm import RMSNorm
from quaver.torch.numerics.quantized import split_operand

#: Batch and tokens, and the layer.
SIZE = (4, 64), Size(dim=4096, heads=32, groups=8, hidden=14336)
QUICK_SIZE = (8, 16), Size(dim=512, heads=8, groups=2, hidden=1792)
#: Highest shares of a plain layer's bytes: by default, and with eight_bit_activations; and who is judged.
DEFAULT, EIGHT_BITS = at_most(64.0), at_most(57.0)
JUDGED = ("tensorwise", "mxfp8")

#: Columns of the table of parts.
NORMS, INTO_QKV, ROPE, QKV = "norms' inputs", "qkv's input", "rope tables", "q, k, v"
ATTENTION, INTO_O = "attention's output", "out's input"
INTO_MLP, GATE_UP, SILU, INTO_DOWN = "gate_up's input", "gate and up", "silu(gate)", "down's input"
PARTS = (NORMS, INTO_QKV, ROPE, QKV, ATTENTION, INTO_O, INTO_MLP, GATE_UP, SILU, INTO_DOWN)


@dataclass
class Ledger:
    """Whose bytes are kept."""

    parameters: set[int]
    #: Part that what is saved now belongs to, unless it has a name.
    part: str = NORMS
    #: Part by address of what is known before it is saved.
    names: dict[int, str] = field(default_factory=dict)
    #: Part and tensor by address; held until they are counted, as an address that is used again would count once.
    kept: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    #: So that what has a name keeps its address.
    held: list[Tensor] = field(default_factory=list)

    def name(self, part: str, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self.names.setdefault(address(tensor), part)
                self.held.append(tensor)

    def pack(self, tensor: Tensor) -> Tensor:
        where = address(tensor)
        if where not in self.parameters and where not in self.kept:
            self.kept[where] = self.names.get(where, self.part), tensor.detach()
        return tensor

    def bytes(self) -> dict[str, int]:
        """By part."""
        by_part = dict.fromkeys(PARTS, 0)
        for part, tensor in self.kept.values():
            by_part[part] += tensor.untyped_storage().nbytes()
        return by_part


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def watch(layer: nn.Module, ledger: Ledger) -> None:
    """Have a layer tell the ledger, from now on, which part runs."""
    parts: Any = layer
    attention, mlp = parts.attention, parts.mlp
    if isinstance(layer, Plain):
        begins(attention.norm, ledger, NORMS)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            begins(projection, ledger, INTO_QKV)
        begins(parts.rope, ledger, ROPE)
        begins(parts.attend, ledger, ATTENTION, QKV)
        begins(attention.o_proj, ledger, INTO_O)
        begins(mlp.norm, ledger, NORMS)
        for projection in (mlp.gate_proj, mlp.up_proj):
            begins(projection, ledger, INTO_MLP)
        begins(parts.activation, ledger, SILU, GATE_UP)
        begins(mlp.down_proj, ledger, INTO_DOWN)
        return
    # Hooks on our linear layers and norms would have them called one by one.
    begins(attention, ledger, NORMS, NORMS)
    begins(attention.core, ledger, ATTENTION, QKV)
    attention.core.register_forward_hook(lambda *_: setattr(ledger, "part", INTO_O))
    begins(mlp, ledger, NORMS, NORMS)
    for norm, beside in ((attention.norm, INTO_QKV), (mlp.norm, INTO_MLP)):
        norm.formula = Watched(norm.formula, ledger, NORMS, beside)
    mlp._input_op = Watched(mlp._input_op, ledger, GATE_UP, INTO_DOWN)
    tables = attention.rope.tables

    def named(*args: Any, **options: Any) -> Any:
        cos_and_sin = tables(*args, **options)
        ledger.name(ROPE, cos_and_sin)
        return cos_and_sin

    attention.rope.tables = named


def begins(module: nn.Module, ledger: Ledger, part: str, inputs: str = "") -> None:
    """When the module begins, what follows is of `part`, and its inputs are of `inputs` if that is given."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        ledger.part = part
        if inputs:
            ledger.name(inputs, args)

    module.register_forward_pre_hook(hook)


@dataclass(frozen=True)
class Watched:
    """An input operation of `quaver.torch.linear.autograd` that tells what it keeps, and that it has run."""

    op: Any
    ledger: Ledger
    #: What it keeps, and what is kept beside that.
    own_part: str
    beside: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.op, name)

    def __call__(self, *x: Tensor | None) -> Tensor:
        self.ledger.part = self.own_part
        y: Tensor = self.op(*x)
        self.ledger.part = self.beside
        return y

    def forward(self, *x: Tensor | None, implementation: int | None = None) -> Any:
        y, saved = self.op.forward(*x, implementation=implementation)
        self.ledger.name(self.own_part, (tensor for value in saved for tensor in split_operand(value)[0]))
        self.ledger.part = self.beside
        return y, saved


def kept(layer: nn.Module, x: Tensor, recipe: str | None = None) -> dict[str, int]:
    """Bytes by part of one forward."""
    ledger = Ledger({address(parameter) for parameter in layer.parameters()})
    watch(layer, ledger)
    leaf = x.clone().requires_grad_()
    with qt.autocast(recipe, enabled=recipe is not None), saved_tensors_hooks(ledger.pack, lambda tensor: tensor):
        layer(leaf)
    return ledger.bytes()


@dataclass(frozen=True)
class Subject:
    """One layer."""

    shown: str
    #: Bytes by part.
    parts: dict[str, int]
    recipe: str = ""
    eight_bits: bool = False

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@functools.cache
def subjects(quick: bool) -> tuple[Subject, ...]:
    """The two plain layers first; measured once for both tables."""
    return tuple(measured(quick))


def measured(quick: bool) -> Iterator[Subject]:
    (batch, tokens), size = QUICK_SIZE if quick else SIZE
    torch.manual_seed(0)
    x = torch.randn(batch, tokens, size.dim, dtype=torch.bfloat16)
    for shown, norm in ((TORCH, nn.RMSNorm), (LEAN, RMSNorm)):
        yield Subject(shown, kept(Plain(size, tokens, gpt=False, fused=False, norm=norm), x))
    base = Plain(size, tokens, gpt=False, fused=True, norm=nn.RMSNorm)
    for eight_bits in (False, True):
        for name in JUDGED if eight_bits else ["bf16", *SAVING]:
            layer = blocks.ours(base, size, eight_bit_activations=eight_bits)
            shown = f"quaver {name}" + ", eight_bit_activations" * eight_bits
            yield Subject(shown, kept(layer, x, name), name, eight_bits)


def totals(quick: bool) -> list[Figure]:
    figures: list[Figure] = []
    against: dict[str, int] = {}
    for subject in subjects(quick):
        if not subject.recipe:
            against[subject.shown] = subject.total
        target: Target | None = None
        if subject.recipe in JUDGED:
            target = EIGHT_BITS if subject.eight_bits else DEFAULT
        figures.append(Figure(subject.shown, "kept", subject.total / 2**20, "MiB"))
        for column, base in against.items():
            figures.append(Figure(subject.shown, f"of {column}", 100 * subject.total / base, "%", target))
    return figures


def shares(quick: bool) -> list[Figure]:
    """Each part's bytes as shares of all that the lean plain layer keeps."""
    whole = next(subject.total for subject in subjects(quick) if subject.shown == LEAN)
    return [
        Figure(subject.shown, part, 100 * count / whole, "%")
        for subject in subjects(quick)
        if subject.recipe in ("", *JUDGED)
        for part, count in [*subject.parts.items(), ("in all", subject.total)]
    ]


TORCH, LEAN = "torch's RMSNorm", "a lean RMSNorm"
_HOW = (
    f"A Llama layer in bf16, {SIZE[1].dim} features, {SIZE[1].heads} heads in {SIZE[1].groups} groups, MLP "
    f"{SIZE[1].hidden}, {SIZE[0][0]} sequences of {SIZE[0][1]} tokens. The plain layers are nn.Linear, F.silu and "
    "scaled_dot_product_attention, q, k and v apart, one with nn.RMSNorm, which on a CPU keeps float32 copies, and "
    "one with a norm that keeps its input and a number a row. Each storage saved for backward counts once, parameters "
    "apart. The rope tables serve every sequence of a batch and every layer of a model; here they are this layer's."
)
TOTALS = Case(
    name="memory-block",
    title="Activation bytes saved for backward: a Llama layer, eager",
    notes=_HOW,
    measure=totals,
)
SHARES = Case(
    name="memory-block-parts",
    title="Activation bytes saved for backward: the parts of a Llama layer",
    notes=(
        f"{_HOW} Shares of what the second keeps. A tensor that two parts keep counts as the first one's: in bf16 the "
        "output of attention is the input of o_proj, and ours keeps the first in bf16 and the second in eight bits."
    ),
    measure=shares,
)

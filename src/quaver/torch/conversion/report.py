"""Report of `convert` for PyTorch: one row per layer, shares of parameters and FLOPs, and a check by a forward run."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quaver.costs.ledger import saved_bytes
from quaver.recipes import conversion
from quaver.recipes.spec import Recipe
from quaver.recipes.text import html_table
from quaver.torch.conversion.explain import fprop_runs
from quaver.torch.conversion.replace.blocks import ReplaceableModule
from quaver.torch.linear.linear import Quantizable
from quaver.torch.quantized_tensor import memory_of, nested_tensors
from quaver.torch.state.weight_cache import storage_id

# ---- check a converted model by running its forward once ----

#: Torch functions that read only the dtype, device or shape of a tensor. "__get__" is the getter of an attribute; the
#: function that then reads the attribute's data is recorded instead.
METADATA_FUNCTIONS = {"__get__", "to", "type_as", "expand_as", "view_as", "reshape_as"} | {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"),
}


@dataclass
class Check:
    """Result of `Report.check`; true if every converted layer ran converted."""

    #: Names of converted layers that the run did not call.
    never_called: list[str] = field(default_factory=list)
    #: Converted layers whose weight was read outside of their forward, by name, and the torch functions that read it.
    read_behind: dict[str, list[str]] = field(default_factory=dict)
    #: Converted layers that are no longer in the model, by name, and the class of the module that replaced them.
    gone: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Return True if every converted layer was called and no other code read its weight."""
        return not (self.never_called or self.read_behind or self.gone)

    def __str__(self) -> str:
        if self:
            return "every converted layer was called, and no other code read its weight"
        lines = [f"converted and not called in this run: {name or '(root)'}" for name in self.never_called]
        lines += [
            f"read in high precision by {', '.join(functions)}, outside of the layer: the weight of {name or '(root)'}"
            for name, functions in self.read_behind.items()
        ]
        lines += [
            f"no longer converted: {name or '(root)'} is now a {kind}: another library has replaced it, and only "
            "one of the two can quantize a layer"
            for name, kind in self.gone.items()
        ]
        return "\n".join(lines)

    __repr__ = __str__


def checked(converted: Mapping[str, str], model: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> Check:
    """Run the model once without gradients and implement `Report.check`.

    Args:
        converted: names of the converted layers, and the class of each.
        model: the converted model, or one that wraps it.
        inputs: positional arguments of its forward.
        named: keyword arguments of its forward.
    Returns:
        The layers that were not called, read elsewhere, or replaced.
    """
    # Hooks work on the original module, not on the wrapper that torch.compile returns.
    model = getattr(model, "_orig_mod", model)
    layers = {
        m.__dict__.get("qualified_name", name): m for name, m in model.named_modules() if isinstance(m, Quantizable)
    }
    layers = {name: m for name, m in layers.items() if name in converted}
    watch = _WeightReadWatcher(model, layers)
    with ExitStack() as stack:
        stack.enter_context(_state_restored(model))
        stack.enter_context(watch.module_hooks())
        stack.enter_context(torch.no_grad())
        stack.enter_context(watch)
        model(*inputs, **named)
    return Check(
        [name for name, m in layers.items() if m not in watch.called],
        {name: sorted(functions) for name, functions in watch.read.items()},
        {name: _replacement_of(model, name) for name in converted if name not in layers},
    )


def _replacement_of(model: nn.Module, name: str) -> str:
    try:
        kind = type(model.get_submodule(name))
    except AttributeError:
        return "missing module"
    return f"{kind.__name__} of {kind.__module__.partition('.')[0]}"


@contextmanager
def _state_restored(model: nn.Module) -> Iterator[None]:
    """Restore the random state and the values of all buffers on exit."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


class _WeightReadWatcher(TorchFunctionMode):
    """Records torch functions that read the weight of a converted layer while neither the layer nor an owner runs."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.called: set[nn.Module] = set()
        self.running: list[nn.Module] = []
        self.read: dict[str, set[str]] = {}
        #: Weights by storage id: first and last offset in the storage, name of the layer, modules that may read the
        #: weight.
        self.weights: dict[int, list[tuple[int, int, str, list[nn.Module]]]] = {}
        owners_of: dict[int, list[nn.Module]] = {}
        for module in model.modules():
            for p in {id(p): p for p in module._parameters.values() if p is not None}.values():
                owners_of.setdefault(id(p), []).append(module)
        converted = set(layers.values())
        for name, layer in layers.items():
            for parameter in layer.parameters():
                owners = owners_of[id(parameter)]
                if parameter.dim() > 1 and not any(owner in converted and owner is not layer for owner in owners):
                    memory = memory_of(parameter)
                    start = int(memory.storage_offset())
                    place = self.weights.setdefault(storage_id(memory.untyped_storage()), [])
                    place.append((start, start + memory.numel(), name, [layer, *owners]))

    @contextmanager
    def module_hooks(self) -> Iterator[None]:
        """Record which modules run, by forward hooks on every module."""
        handles = []
        for module in self.model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.called.add(module)
        self.running.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        while self.running and self.running.pop() is not module:
            pass

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name not in METADATA_FUNCTIONS and (name == "data_ptr" or next(nested_tensors(result), None) is not None):
            for tensor in nested_tensors((args, kwargs)):
                self._record_read(tensor, name)
        return result

    def _record_read(self, tensor: Tensor, function: str) -> None:
        if tensor.layout is not torch.strided or type(tensor) not in (Tensor, nn.Parameter):
            return
        for start, end, name, readers in self.weights.get(storage_id(tensor.untyped_storage()), ()):
            if start <= tensor.storage_offset() < end and not any(module in self.running for module in readers):
                self.read.setdefault(name, set()).add(function)


# ---- report ----

#: Number of input tokens for which the saved bytes are counted.
TOKENS = 4096
HEADER = ("layer", "recipe", "implementation", "parameters", "FLOPs", "bytes saved per token", "left alone because")


@dataclass(frozen=True)
class ReportRow:
    """One module that multiplies by a weight."""

    name: str
    kind: str
    #: Recipe of the layer, or None if it was not converted.
    recipe: Recipe | None
    parameters: int
    #: FLOPs of the layer's forward for one token of the model.
    flops: float
    #: Reason why the layer was not converted, or "".
    why: str = ""
    #: Of a converted layer: device and dtype of the weight, (input, output) features of the first GEMM, input features
    #: of each GEMM, and how often a token of the model is an input (for experts, the number that it is routed to).
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    features: tuple[int, int] = (0, 0)
    inputs: tuple[int, ...] = ()
    visits: float = 1.0

    @property
    def implementation(self) -> str:
        """Return the implementation of the fprop GEMM on the weight's device, named as `explain` names it, or ""."""
        if self.recipe is None or self.device is None or self.dtype is None:
            return ""
        if self.device.type == "meta":
            return "not on a device yet"
        return fprop_runs(self.recipe, *self.features, self.dtype, self.device)

    @property
    def saved(self) -> float:
        """Return the bytes per token that the layer saves less for backward than in high precision, if no other layer
        shares its input.
        """
        if self.recipe is None or self.dtype is None:
            return 0.0
        size = self.dtype.itemsize
        return self.visits * sum(size * k - saved_bytes(self.recipe, TOKENS, k, size) / TOKENS for k in self.inputs)


@dataclass(repr=False)
class Report(conversion.ConversionReport):
    """Report of `convert`: the layers that it converted, and why it left the others alone."""

    rows: list[ReportRow] = field(default_factory=list)
    #: With `blocks=`: one entry per module that a Quaver block may replace, with the block, or why it is not replaced.
    blocks: list[ReplaceableModule] = field(default_factory=list)

    @property
    def flops_share(self) -> float:
        """Converted share (0 to 1) of the FLOPs of all GEMMs for one token, including the output head's."""
        return self._converted_share(lambda row: row.flops)

    @property
    def saved(self) -> float:
        """Bytes per token that all layers save less for backward, if no two layers share an input."""
        return sum(row.saved for row in self.rows)

    def table(self) -> str:
        """Return a text table with one line per kind of layer.

        Layers whose names differ only in numbers, such as those of all Transformer layers, share a line.
        """
        lines = [HEADER, *(_cells(row, self, count) for row, count in _group_rows(self.rows))]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )

    def check(self, model: nn.Module, *inputs: Any, **named: Any) -> Check:
        """Run the model once without gradients and check that the converted layers really run converted.

        Args:
            model: the converted model, or one that wraps it.
            inputs: positional arguments of its forward.
            named: keyword arguments of its forward.
        Returns:
            A `Check` with the converted layers that were not called, those whose weight other code read, and those that
            are no longer in the model because another library replaced them. The random state and the buffers are
            restored after the run.
        """
        return checked({row.name: row.kind for row in self.rows if row.recipe is not None}, model, inputs, named)

    def _converted_share(self, of: Callable[[ReportRow], float]) -> float:
        total = sum(map(of, self.rows))
        return sum(of(row) for row in self.rows if row.recipe is not None) / total if total else 0.0

    def _done(self) -> list[str]:
        lines = super()._done()
        if any(row.recipe is not None for row in self.rows):
            lines.append(
                f"  {self.flops_share:.0%} of the FLOPs of GEMMs; {self.saved:,.0f} fewer bytes per token saved "
                "for backward"
            )
        placed = Counter((row.kind, row.block, row.why) for row in self.blocks)
        for (kind, block, why), count in placed.items():
            reason = f" ({why})" if why else ""
            lines.append(f"  {count} {kind}: {f'computed as {block}' if block else 'computed by itself'}{reason}")
        return lines

    def _repr_html_(self) -> str:
        table = html_table(HEADER, [_cells(row, self, count) for row, count in _group_rows(self.rows)])
        return f"{super()._repr_html_()}<details><summary>kinds of layers</summary>{table}</details>"


def _cells(row: ReportRow, report: Report, count: int) -> tuple[str, ...]:
    parameters, flops = (sum(map(of, report.rows)) or 1 for of in (lambda r: r.parameters, lambda r: r.flops))
    return (
        (row.name or "(root)") + (f" x {count}" if count > 1 else ""),
        "" if row.recipe is None else str(row.recipe),
        row.implementation,
        f"{count * row.parameters / parameters:.1%}",
        f"{count * row.flops / flops:.1%}",
        f"{count * row.saved:,.0f}" if row.recipe is not None else "",
        row.why,
    )


def _group_rows(rows: list[ReportRow]) -> list[tuple[ReportRow, int]]:
    """Group rows whose names differ only in numbers; return one row per group and the size of the group."""
    groups = Counter(replace(row, name=re.sub(r"(?<![^.])\d+(?![^.])", "*", row.name)) for row in rows)
    first = {replace(row, name=re.sub(r"(?<![^.])\d+(?![^.])", "*", row.name)): row for row in reversed(rows)}
    return [(row if count > 1 else first[row], count) for row, count in groups.items()]

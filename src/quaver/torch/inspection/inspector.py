"""`inspect`: measure, in every hundredth step of a training loop, where quantized layers lose precision."""

import json
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from quaver.recipes.conversion import matches
from quaver.recipes.text import check_instance, html_lines, html_table, suggest
from quaver.torch.inspection.statistics import (
    NONE,
    ErrorStatistics,
    OperandStatistics,
    error_statistics,
    operand_statistics,
)
from quaver.torch.linear.general import matrix
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.state import observer
from quaver.torch.state.weight_cache import refresh

#: Results of GEMMs.
RESULTS = {"fprop": "output", "dgrad": "grad_input", "wgrad": "grad_weight"}
#: File in the output folder.
FILE = "inspect.jsonl"
#: A row is flagged above these: mean relative squared error of rows or columns (6 dB), and shares of the elements.
LARGE_ERROR, MANY_FLUSHED, MANY_SATURATED = 0.25, 0.5, 0.02
#: Ratio of an outlier's amax to the median amax of all rows or columns above which it is named.
OUTLIER = 100.0
NOTHING = "nothing was sampled yet: call step() after optimizer.step(), and run the layers in training"


class Key(NamedTuple):
    """A tensor of a layer: an operand or the result of a GEMM."""

    layer: str
    gemm: str
    #: "input", "weight" or "grad_output"; or "output", "grad_input" or "grad_weight".
    tensor: str
    #: Group of a layer with several, such as an expert; None for the whole layer.
    group: int | None = None


class Inspector(observer.Observer):
    """Sampled statistics of a model's quantized GEMMs; made by `inspect`.

    Attributes:
        rows: one dict per sampled step, layer, GEMM and tensor; `pandas.DataFrame(inspector.rows)` is a table.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        start: int,
        stop: int | None,
        layers: Iterable[str],
        out: str | Path | None,
    ) -> None:
        # Layers are named as in the model that `convert` got.
        model = getattr(model, "_orig_mod", model)
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        self.every, self.first, self.last = every, start, stop
        self.patterns = tuple(layers)
        self.path = None if out is None else Path(out) / FILE
        self.rows: list[dict[str, Any]] = []
        self.number = 0
        self._names: dict[int, str] = {}
        self._seen: dict[Key, ErrorStatistics] = {}
        self._sampling = ExitStack()
        self._open = False
        _check(self)

    # ---- steps ----

    def __enter__(self) -> "Inspector":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin with step 0, if the inspector is not used as a context manager. All ranks must call it.

        Raises: on all ranks, ValueError if ranks sample different steps, the output folder has statistics already, or
            it cannot be written.
        """
        if self._open:
            raise RuntimeError("inspect: this inspector has started already")
        _check_ranks(self)
        errors = [error for error in _gather(self._create_file()) if error]
        if errors:
            raise ValueError(f"inspect: {errors[0]}")
        self._open, self.number = True, 0
        self._begin()

    def step(self) -> None:
        """End the current step; call it after `optimizer.step()`. In a sampled step, all ranks must call it."""
        if not self._open:
            raise RuntimeError("inspect: step() outside of the context; use `with qt.inspect(model) as inspector:`")
        if self.samples(self.number):
            self._sampling.close()
            self._finish()
        self.number += 1
        self._begin()

    def close(self) -> None:
        """Stop; statistics of a step that has not ended are dropped."""
        self._sampling.close()
        self._seen.clear()
        self._open = False

    def samples(self, step: int) -> bool:
        """Return True if a step is sampled."""
        after = step - self.first
        return after >= 0 and after % self.every == 0 and (self.last is None or step < self.last)

    def _begin(self) -> None:
        if not self.samples(self.number):
            return
        # The model may have changed its structure.
        self._names = {
            id(module): name
            for name, module in _quantized_layers(self.model)
            if not self.patterns or any(matches(pattern, name) for pattern in self.patterns)
        }
        refresh(self.model)
        self._sampling.enter_context(torch.compiler.set_stance("force_eager"))
        self._sampling.enter_context(observer.observing(self))

    def _finish(self) -> None:
        """Pool the statistics of all ranks, and append the step's rows."""
        ranks = _gather(self._seen)
        self._seen = {}
        pooled: dict[Key, ErrorStatistics] = {}
        nonfinite: dict[Key, list[int]] = {}
        for rank, seen in enumerate(ranks):
            for key, statistics in seen.items():
                if key in pooled:
                    pooled[key].add(statistics)
                else:
                    pooled[key] = statistics
                if statistics.nonfinite:
                    nonfinite.setdefault(key, []).append(rank)
        rows = [_row(self.number, key, statistics, nonfinite.get(key, [])) for key, statistics in pooled.items()]
        self.rows += rows
        self._write(rows)

    def _create_file(self) -> str:
        """Create the output file on the first rank, and return why that failed, or ""."""
        if self.path is None or _rank() != 0:
            return ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch(exist_ok=False)
        except FileExistsError:
            return f"{self.path} has statistics of another run; give another folder, or delete the file"
        except OSError as error:
            return f"cannot write {self.path} ({error}); give another folder"
        return ""

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if self.path is None or _rank() != 0:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as error:
            warnings.warn(f"inspect: cannot write {self.path} ({error}); statistics stay in memory", stacklevel=4)
            self.path = None

    # ---- observer ----

    def observe_operand(
        self, layer: nn.Module, operand: str, x: Tensor, q: Quantized, parameter: str = "weight"
    ) -> None:
        name = self._name(layer, parameter)
        if name is None or is_tracing():
            return
        statistics = operand_statistics(x, q)
        for gemm, tensor in _readers(layer, operand):
            self._pool(Key(name, gemm, tensor), statistics)

    def observe_gemm(
        self,
        layer: nn.Module,
        gemm: str,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        y: Tensor,
        parameter: str = "weight",
        group: int | None = None,
    ) -> None:
        name = self._name(layer, parameter)
        if name is None or is_tracing():
            return
        with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
            exact = a.detach().float() @ b.detach().float().t()
            if bias is not None:
                exact += bias.detach().float()
            statistics = error_statistics(exact, matrix(y.detach()).float())
        self._pool(Key(name, gemm, RESULTS[gemm]), statistics)
        if group is not None:
            self._pool(Key(name, gemm, RESULTS[gemm], group), statistics)

    def _name(self, layer: nn.Module, parameter: str) -> str | None:
        name = self._names.get(id(layer))
        return name if name is None or parameter == "weight" else f"{name}.{parameter}"

    def _pool(self, key: Key, statistics: ErrorStatistics) -> None:
        if key not in self._seen:
            self._seen[key] = type(statistics)()
        self._seen[key].add(statistics)

    # ---- results ----

    def worst(self, count: int = 10) -> list[dict[str, Any]]:
        """Return one row of the last sampled step for each of the worst layers, the worst first.

        That row is a flagged operand if the layer has one, else the tensor with the largest error.
        """
        by_layer: dict[str, list[dict[str, Any]]] = {}
        places: dict[str, tuple[Any, ...]] = {}
        for place, row in enumerate(self._last_step()):
            by_layer.setdefault(row["layer"], []).append(row)
            severity = _severity(row, place)
            places[row["layer"]] = min(severity, places.get(row["layer"], severity))
        order = sorted(by_layer, key=places.__getitem__)
        return [min(by_layer[layer], key=_as_cause) for layer in order[:count]]

    def flagged(self) -> list[dict[str, Any]]:
        """Return the last sampled step's rows that are flagged as faults."""
        return [row for row in self._last_step() if row["flags"]]

    def _last_step(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["step"] == self.rows[-1]["step"]]

    def __str__(self) -> str:
        rows = self.worst()
        if not rows:
            return NOTHING
        table = [HEADER, *map(_cells, rows)]
        widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table]
        return "\n".join([f"step {rows[0]['step']}, the worst tensor of each layer:", *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = self.worst()
        return html_table(HEADER, map(_cells, rows)) if rows else html_lines([NOTHING])


def inspect(
    model: nn.Module,
    *,
    every: int = 100,
    start: int = 0,
    stop: int | None = None,
    layers: Iterable[str] = (),
    out: str | Path | None = None,
) -> Inspector:
    """Measure in sampled steps of a training loop where quantized layers lose precision.

        with qt.inspect(model, every=100, out="runs/x") as inspector:
            for batch in batches:
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                inspector.step()
        print(inspector)  # the ten worst layers

    A sampled step runs eagerly and compares each GEMM with the high-precision product of the same inputs. It changes no
    result. Other steps cost one comparison per layer.

    Args:
        model: the model whose quantized layers are measured.
        every: number of steps from one sampled step to the next.
        start: first sampled step; the loop's first step is 0.
        stop: sample only steps before this one; None for all.
        layers: name patterns of the layers to measure, as in `quaver.Rules`; () for all.
        out: folder for `inspect.jsonl`, one JSON object per row; None keeps the rows in memory only.
    Raises:
        ValueError: `every` is less than 1, a pattern matches no layer, the model has no layer that Quaver quantizes.
    """
    return Inspector(model, every=every, start=start, stop=stop, layers=layers, out=out)


# ---- checks ----


def _check(inspector: Inspector) -> None:
    check_instance("inspect", "model", inspector.model, nn.Module, "torch.nn.Linear(64, 64)")
    for name, value, least in (("every", inspector.every, 1), ("start", inspector.first, 0)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"inspect: {name} is {value!r}; give a whole number, {least} or more")
    names = [name for name, _ in _quantized_layers(inspector.model)]
    if not names:
        raise ValueError("inspect: the model has no layer that Quaver quantizes; call qt.convert(model, recipe) first")
    for pattern in inspector.patterns:
        if not any(matches(pattern, name) for name in names):
            hint = suggest(pattern.rpartition(".")[2], {part for name in names for part in name.split(".")})
            raise ValueError(f"inspect: no quantized layer matches {pattern!r}; {hint}")


def _check_ranks(inspector: Inspector) -> None:
    """Raise ValueError on all ranks if they would sample different steps."""
    settings = _gather((inspector.every, inspector.first, inspector.last))
    if len(set(settings)) > 1:
        raise ValueError(f"inspect: ranks have other (every, start, stop): {settings}; give all ranks the same")


def _quantized_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if "_state" in module.__dict__)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _gather(value: Any) -> list[Any]:
    """Return the value of each rank."""
    if _world() == 1:
        return [value]
    values: list[Any] = [None] * _world()
    dist.all_gather_object(values, value)
    return values


# ---- rows ----

HEADER = ("layer", "GEMM", "tensor", "rows", "SNR in dB", "error", "flushed", "saturated", "non-finite", "why")


def _readers(layer: nn.Module, operand: str) -> list[tuple[str, str]]:
    """Return (GEMM, tensor) for each GEMM that reads an operand."""
    tensor, _, transposed = operand.partition(".")
    reads = {
        "input": ("fprop", "wgrad"),
        "weight": ("fprop", "dgrad"),
        "grad_output": ("dgrad", "wgrad"),
    }[tensor]
    if transposed:
        return [(reads[1], tensor)]
    recipe = getattr(layer, "recipe", None)
    reuse = None if recipe is None else getattr(recipe.reuse, tensor)
    return [(gemm, tensor) for gemm in (reads if reuse else reads[:1])]


def _row(step: int, key: Key, statistics: ErrorStatistics, ranks: list[int]) -> dict[str, Any]:
    """Return one row of the table, of built-in types."""
    row: dict[str, Any] = {
        "step": step,
        "layer": key.layer or "(root)",
        "gemm": key.gemm,
        "tensor": key.tensor,
        "group": key.group,
        "rows": statistics.rows,
        "elements": statistics.elements,
        "snr": _finite(statistics.snr),
        "error": statistics.error,
        "nonfinite": statistics.nonfinite,
        "nonfinite_ranks": ranks,
    }
    if isinstance(statistics, OperandStatistics):
        elements = max(statistics.elements, 1)
        (row_ratio, row_index), (column_ratio, column_index) = statistics.outlier_row, statistics.outlier_column
        row |= {
            "format": str(statistics.spec),
            "flushed": statistics.flushed / max(statistics.nonzero, 1),
            "saturated": statistics.saturated / elements,
            "amax": statistics.amax,
            "dynamic_range": statistics.dynamic_range,
            "scale_spread": statistics.scale_spread,
            "outlier_row": row_index,
            "outlier_row_ratio": _finite(row_ratio),
            "outlier_column": column_index,
            "outlier_column_ratio": _finite(column_ratio),
        }
    two_level = isinstance(statistics, OperandStatistics) and statistics.spec is not None and statistics.spec.two_level
    row["flags"] = _flags(row, two_level)
    return row


def _finite(value: float) -> float | None:
    """Return a number that JSON has; None for an infinity or NaN."""
    return value if math.isfinite(value) else None


def _flags(row: dict[str, Any], two_level: bool) -> list[str]:
    """Return why a row is a fault, in a few words each."""
    flags = []
    if row["nonfinite"]:
        ranks = f" on ranks {row['nonfinite_ranks']}" if _world() > 1 else ""
        flags.append(f"{row['nonfinite']} not finite{ranks}")
    if row.get("flushed", 0) > MANY_FLUSHED:
        flags.append(f"{row['flushed']:.0%} flushed to zero")
    # Rounded two-level scales saturate a few percent of the largest values.
    if row.get("saturated", 0) > MANY_SATURATED and not two_level:
        flags.append(f"{row['saturated']:.0%} saturated")
    if row["error"] > LARGE_ERROR:
        flags.append(f"{row['error']:.0%} lost")
    if flags:
        for line in ("row", "column"):
            ratio = row.get(f"outlier_{line}_ratio", 0.0)
            if row.get(f"outlier_{line}", NONE) != NONE and (ratio is None or ratio > OUTLIER):
                size = "infinitely" if ratio is None else f"{ratio:.0e} times"
                flags.append(f"{line} {row[f'outlier_{line}']} is {size} larger than the median")
    return flags


def _severity(row: dict[str, Any], place: int) -> tuple[Any, ...]:
    """Return a sort key, the worst first.

    Of values that are not finite the first computed is the worst. Faults of a forward spoil gradients of other layers
    too, so they come before faults of backwards.
    """
    if row["nonfinite"]:
        return 0, place
    lost = max(row["error"], row.get("flushed", 0.0), row.get("saturated", 0.0))
    return 1, not row["flags"], bool(row["flags"]) and row["gemm"] != "fprop", -lost, place


def _as_cause(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return a sort key of a layer's rows, in the order in which they were computed: the first with values that are not
    finite, then flagged operands before the results that they spoil.
    """
    if row["nonfinite"]:
        return (0,)
    return 1, not row["flags"], row["tensor"] in RESULTS.values(), -row["error"]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    snr = "" if row["snr"] is None else f"{row['snr']:.1f}"
    shares = [f"{row[name]:.1%}" if name in row else "" for name in ("flushed", "saturated")]
    layer = row["layer"] if row["group"] is None else f"{row['layer']}[{row['group']}]"
    numbers = (str(row["rows"]), snr, f"{row['error']:.1%}", *shares, str(row["nonfinite"]))
    return (layer, row["gemm"], row["tensor"], *numbers, ", ".join(row["flags"]))

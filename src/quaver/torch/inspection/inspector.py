"""`inspect`: measure, in every hundredth step of a training loop, where quantized layers lose precision."""

import copy
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from quaver.recipes.conversion import matches
from quaver.recipes.spec import Recipe
from quaver.recipes.text import check_instance, html_lines, html_table, suggest
from quaver.torch.inspection.attention import measure_attention
from quaver.torch.inspection.fallback import Fallback, FallbackState
from quaver.torch.inspection.statistics import (
    ErrorStatistics,
    OperandStatistics,
    operand_statistics,
    result_statistics,
)
from quaver.torch.nn.attention.dot_product import DotProductAttention
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.state import observer
from quaver.torch.state.history.roll import has_ranks
from quaver.torch.state.weight_cache import refresh

#: Operands that each GEMM reads, and its result.
OPERANDS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
RESULTS = {"fprop": "output", "dgrad": "grad_input", "wgrad": "grad_weight"}
#: `gemm` of all GEMMs of a quantized attention together, and its results.
ATTENTION = "attention"
ATTENTION_RESULTS = ("output", "grad_q", "grad_k", "grad_v")
#: File in the output folder.
FILE = "inspect.jsonl"
#: A tensor is flagged if its error is above 6 dB, or more of its nonzero values are flushed, or more of all saturated.
LARGE_ERROR, MANY_FLUSHED, MANY_SATURATED = 0.25, 0.5, 0.02
#: Ratio of a row's or column's amax to the median amax of all, above which a flag names it.
OUTLIER = 100.0
NOTHING = "nothing was sampled yet: call step() after optimizer.step()"
HEADER = (
    "layer",
    "GEMM",
    "tensor",
    "nonzero rows",
    "SNR in dB",
    "error",
    "flushed",
    "saturated",
    "non-finite",
    "flags",
)


class TensorKey(NamedTuple):
    """A tensor of a layer: an operand or the result of a GEMM."""

    layer: str
    gemm: str
    #: One of `OPERANDS` or `RESULTS`; of attention q, k, v, grad_output or one of `ATTENTION_RESULTS`.
    tensor: str
    #: Index of the expert in a layer with several, for one expert's result; None for all together.
    expert: int | None = None


class Inspector(observer.Observer):
    """Statistics of a model's quantized GEMMs in sampled steps; made by `inspect`.

    Attributes:
        rows: one dict per sampled step, layer, GEMM and tensor; `pandas.DataFrame(inspector.rows)` is a table.
    """

    measures_gemms = True

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        start: int,
        stop: int | None,
        layers: str | Iterable[str],
        out: str | Path | None,
        resume: int | None,
        fallback: Fallback | None,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        check_instance("inspect", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
        self._model = unwrapped(model)
        self._every, self._first_step, self._end, self._resumed = every, start, stop, resume
        self._patterns = (layers,) if isinstance(layers, str) else tuple(layers)
        self._path = None if out is None else Path(out) / FILE
        self._step: int | None = None
        self._closed = self._paused = False
        self._names: dict[int, str] = {}
        self._seen: dict[TensorKey, ErrorStatistics] = {}
        #: Keys of operands that two GEMMs share, of which one may not run.
        self._shared: set[TensorKey] = set()
        self._sampling = ExitStack()
        self._check()
        self._fallback = None if fallback is None else FallbackState(fallback, self._model)

    # ---- steps ----

    def __enter__(self) -> "Inspector":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin the first step, in a loop without `with`; `close` is then needed at its end. All ranks must call it.

        Raises: on all ranks, ValueError if ranks sample different steps, the output folder has statistics already and
            `resume` is None, or it cannot be written; RuntimeError if this inspector was used before.
        """
        if self._step is not None or self._closed:
            raise RuntimeError("inspect: this inspector was used before; make another one")
        settings = _gather((self._every, self._first_step, self._end, self._resumed))
        if len(set(settings)) > 1:
            raise ValueError(
                f"inspect: ranks have other (every, start, stop, resume): {settings}; give all ranks the same"
            )
        if self._fallback is not None:
            self._fallback.check()
        errors = [error for error in _gather(self._create_file()) if error]
        if errors:
            raise ValueError(f"inspect: {errors[0]}")
        self._step = self._resumed or 0
        self._begin_step()

    def step(self) -> None:
        """End the current step; call it after `optimizer.step()`. In a sampled step, all ranks must call it."""
        if self._step is None or self._closed:
            raise RuntimeError("inspect: step() outside of the context; use `with qt.inspect(model) as inspector:`")
        if self._samples(self._step):
            self._sampling.close()
            rows = self._pool_ranks(self._step)
            if self._fallback is not None:
                self._fallback.update(self._step, rows)
        self._step += 1
        self._begin_step()

    def close(self) -> None:
        """Stop; statistics of a step that has not ended are dropped."""
        self._sampling.close()
        self._seen.clear()
        self._shared.clear()
        self._names.clear()
        self._model, self._closed = nn.Module(), True

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context in which nothing is measured, such as that of a validation."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            if self._step is not None and self._samples(self._step) and not self._seen:
                # Weights that were quantized meanwhile are quantized again, so that they are seen.
                refresh(self._model)

    def _samples(self, step: int) -> bool:
        after = step - self._first_step
        return after >= 0 and after % self._every == 0 and (self._end is None or step < self._end)

    def _begin_step(self) -> None:
        if self._step is None or not self._samples(self._step):
            return
        # The model may have changed its structure.
        modules = dict(_observed_modules(self._model))
        self._names = {id(module): name for name, module in modules.items()}
        for name, module in modules.items():
            if any(p.is_meta for p in module.parameters(recurse=False)):
                raise ValueError(
                    f"inspect: {name or 'the model'} is on the meta device, so it has no values to measure; call "
                    "model.to_empty(device=...) and initialize or load its parameters first"
                )
        # Cached weights are quantized again, so that they are seen.
        refresh(self._model)
        self._sampling.enter_context(eager_steps())
        self._sampling.enter_context(observer.observing(self))

    def _pool_ranks(self, step: int) -> list[dict[str, Any]]:
        """Append the rows of a step from the statistics of all ranks, and return them."""
        self._drop_unread()
        pooled: dict[TensorKey, ErrorStatistics] = {}
        ranks: dict[TensorKey, list[int]] = {}
        for rank, seen in enumerate(_gather(self._seen)):
            for key, statistics in seen.items():
                _add(pooled, key, statistics)
                if statistics.nonfinite:
                    ranks.setdefault(key, []).append(rank)
        self._seen = {}
        rows = [_row(step, key, statistics, ranks.get(key, [])) for key, statistics in pooled.items()]
        self.rows += rows
        self._write(rows)
        return rows

    def _drop_unread(self) -> None:
        """Drop the statistics of a shared operand for a GEMM that did not run."""

        def ran(key: TensorKey) -> bool:
            return key.gemm == "fprop" or key._replace(tensor=RESULTS[key.gemm]) in self._seen

        for key in self._shared:
            readers = [key._replace(gemm=gemm) for gemm, operands in OPERANDS.items() if key.tensor in operands]
            if not ran(key) and any(map(ran, readers)):
                self._seen.pop(key, None)
        self._shared.clear()

    # ---- file ----

    def _create_file(self) -> str:
        """Create the output file on the first rank, or remove the rows that a resumed loop will write again.

        Returns:
            Why that failed, or "".
        """
        if self._path is None or not _is_first_rank():
            return ""
        try:
            kept = ""
            if self._path.exists():
                if self._resumed is None:
                    return (
                        f"{self._path} has statistics of another run; give another folder, delete the file, or give "
                        "resume=the next step of the same run"
                    )
                kept = _lines_before(self._path, self._resumed)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial = self._path.with_suffix(".partial")
            partial.write_text(kept, encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            return f"cannot write {self._path} ({error}); give another folder"
        except (ValueError, KeyError, TypeError) as error:
            return f"{self._path} has a line that is no row of inspect ({error}); restore it, or delete the file"
        return ""

    def _write(self, rows: list[dict[str, Any]]) -> None:
        if self._path is None or not _is_first_rank():
            return
        try:
            # Unlike with "a", a file that was removed is not created again without its first rows.
            with self._path.open("r+", encoding="utf-8") as file:
                file.seek(0, os.SEEK_END)
                file.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as error:
            warnings.warn(f"inspect: cannot write {self._path} ({error}); statistics stay in memory", stacklevel=4)
            self._path = None

    # ---- observer ----

    def observe_operand(
        self, layer: nn.Module, recipe: Recipe, operand: str, x: Tensor, q: Quantized, parameter: str = "weight"
    ) -> None:
        name = self._name(layer, parameter)
        if name is None or is_tracing():
            return
        statistics = operand_statistics(x, q)
        tensor, _, transposed = operand.partition(".")
        if transposed:
            statistics.transpose()
        first, second = (gemm for gemm, operands in OPERANDS.items() if tensor in operands)
        shared = not transposed and getattr(recipe.reuse, tensor)
        for gemm in (first, second) if shared else (second if transposed else first,):
            key = TensorKey(name, gemm, tensor)
            _add(self._seen, key, statistics)
            if shared:
                self._shared.add(key)

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
        quantized: observer.QuantizedPair = (None, None),
    ) -> None:
        name = self._name(layer, parameter)
        if name is None or is_tracing():
            return
        with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
            exact = a.detach().float() @ b.detach().float().t()
            if bias is not None:
                exact += bias.detach().float()
            statistics = result_statistics(exact, y.detach().float())
        for expert in dict.fromkeys((None, group)):
            _add(self._seen, TensorKey(name, gemm, RESULTS[gemm], expert), statistics)

    def observe_attention(
        self, core: nn.Module, qkv: tuple[Tensor, Tensor, Tensor], options: Mapping[str, Any], y: Tensor
    ) -> None:
        name = self._name(core)
        if name is None:
            return
        assert isinstance(core, DotProductAttention)

        def report(tensor: str, statistics: ErrorStatistics) -> None:
            _add(self._seen, TensorKey(name, ATTENTION, tensor), statistics)

        measure_attention(core, qkv, options, y, report)

    def _name(self, layer: nn.Module, parameter: str = "weight") -> str | None:
        """Return the name of a layer, and of the parameter in a layer with several; None if it is not measured."""
        module_name = self._names.get(id(layer))
        if module_name is None or self._paused:
            return None
        name = module_name if parameter == "weight" else f"{module_name}.{parameter}".lstrip(".")
        measured = not self._patterns or any(matches(p, each) for p in self._patterns for each in (name, module_name))
        return name if measured else None

    # ---- fallback ----

    @property
    def switches(self) -> list[dict[str, Any]]:
        """Layers that fell back to another recipe: step, layer, recipes before and after, the tensor that failed."""
        return [] if self._fallback is None else self._fallback.switches

    def state_dict(self) -> dict[str, Any]:
        """Return the number of ended steps and the state of the fallback, for a checkpoint."""
        fallback = None if self._fallback is None else self._fallback.state_dict()
        return {"step": self._step or 0, "fallback": fallback}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a saved run: call it before `start` or `with`, and before the model's state is loaded.

        The model must be converted as it was at the start of that run; the saved switches are repeated.

        Raises:
            RuntimeError: after `start`. ValueError: another `fallback`, or the model has other recipes.
        """
        if self._step is not None or self._closed:
            raise RuntimeError("inspect: load_state_dict() after start(); call it first")
        if (state["fallback"] is None) != (self._fallback is None):
            raise ValueError("inspect: the saved state has other fallback settings; give the same fallback=")
        self._resumed = state["step"]
        if self._fallback is not None:
            self._fallback.load_state_dict(state["fallback"])

    # ---- results ----

    def worst(self, count: int = 10) -> list[dict[str, Any]]:
        """Return one row of the last sampled step for each of the worst layers, the worst first.

        The row of a layer is the first with a value that is not finite, else a flagged operand, else a flagged result,
        else the tensor with the largest error.
        """
        by_layer: dict[str, list[dict[str, Any]]] = {}
        severity: dict[str, tuple[Any, ...]] = {}
        for index, row in enumerate(self._last_step()):
            by_layer.setdefault(row["layer"], []).append(row)
            own = _severity(row, index)
            severity[row["layer"]] = min(own, severity.get(row["layer"], own))
        layers = sorted(by_layer, key=severity.__getitem__)
        return [min(by_layer[layer], key=_order_in_layer) for layer in layers[:count]]

    def flagged(self) -> list[dict[str, Any]]:
        """Return the last sampled step's rows that are flagged as faults."""
        return [row for row in self._last_step() if row["flags"]]

    def summary(self) -> dict[str, float]:
        """Return the lowest `snr` and highest `error`, `flushed` and `saturated` of the last sampled step's rows, and
        the number of `flagged` ones. A figure that no row has is left out.
        """
        rows = self._last_step()
        figures = {"snr": min, "error": max, "flushed": max, "saturated": max}
        values = {name: [row[name] for row in rows if row.get(name) is not None] for name in figures}
        summary = {name: float(figures[name](own)) for name, own in values.items() if own}
        return {**summary, "flagged": len(self.flagged())} if rows else {}

    def _last_step(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["step"] == self.rows[-1]["step"]]

    def __str__(self) -> str:
        rows = self.worst()
        if not rows:
            return NOTHING
        table = [HEADER, *map(_cells, rows)]
        widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table]
        return "\n".join([f"step {rows[0]['step']}, the worst layers:", *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = self.worst()
        return html_table(HEADER, map(_cells, rows)) if rows else html_lines([NOTHING])

    # ---- checks ----

    def _check(self) -> None:
        least = {"every": (self._every, 1), "start": (self._first_step, 0)}
        if self._end is not None:
            least["stop"] = self._end, 1
        if self._resumed is not None:
            least["resume"] = self._resumed, 0
        for option, (value, smallest) in least.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                raise ValueError(f"inspect: {option} is {value!r}; give a whole number, {smallest} or more")
        if self._end is not None and self._end <= self._first_step:
            raise ValueError(f"inspect: stop is {self._end}, and start {self._first_step}: no step would be sampled")
        names = []
        for name, module in _observed_modules(self._model):
            stacks = [key for key, p in module.named_parameters(recurse=False) if p.dim() == 3 and key != "weight"]
            names += [name, *(f"{name}.{key}".lstrip(".") for key in stacks)]
        if not any("_state" in module.__dict__ for module in self._model.modules()):
            raise ValueError(
                "inspect: the model has no layer that Quaver quantizes; call qt.convert(model, recipe) first"
            )
        for pattern in self._patterns:
            if not any(matches(pattern, name) for name in names):
                hint = suggest(pattern.rpartition(".")[2], {part for name in names for part in name.split(".")})
                raise ValueError(f"inspect: no quantized layer matches {pattern!r}; {hint}")


def inspect(
    model: nn.Module,
    *,
    every: int = 100,
    start: int = 0,
    stop: int | None = None,
    layers: str | Iterable[str] = (),
    out: str | Path | None = None,
    resume: int | None = None,
    fallback: Fallback | None = None,
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
        layers: name pattern, or several, of the layers to measure, as in `quaver.Rules`; () for all.
        out: folder for `inspect.jsonl`, one JSON object per row; None keeps the rows in memory only.
        resume: number of the loop's first step, if it continues an earlier one: an existing file keeps the rows of
            steps before it, and the others are removed. None begins with step 0, and an existing file is an error.
        fallback: when a layer gets a safer recipe, and which one; None changes nothing. All ranks switch together, in
            `step`. Save `Inspector.state_dict` with the model.
    Raises:
        ValueError: `every`, `start`, `stop` or `resume` is no such number, a pattern matches no layer, or the model has
            no layer that Quaver quantizes.
    """
    return Inspector(
        model, every=every, start=start, stop=stop, layers=layers, out=out, resume=resume, fallback=fallback
    )


# ---- torch.compile ----


class _EagerSteps:
    """Number of inspectors that sample a step, and the stance of torch.compile that they share."""

    count = 0
    stance = ExitStack()


@contextmanager
def eager_steps() -> Iterator[None]:
    """Context in which compiled functions run eagerly; contexts may end in any order."""
    if _EagerSteps.count == 0:
        _EagerSteps.stance.enter_context(torch.compiler.set_stance("force_eager"))
    _EagerSteps.count += 1
    try:
        yield
    finally:
        _EagerSteps.count -= 1
        if _EagerSteps.count == 0:
            _EagerSteps.stance.close()


# ---- models and ranks ----


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's and DistributedDataParallel's wrappers, whose names `convert` used."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def _observed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of quantizable layers and of attention."""
    for name, module in model.named_modules():
        if "_state" in module.__dict__ or isinstance(module, DotProductAttention):
            yield name, module


def _lines_before(path: Path, step: int) -> str:
    """Return the lines of a file whose rows are of earlier steps, without an unfinished last line."""
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
    return "".join(line + "\n" for line in complete.split("\n") if line and json.loads(line)["step"] < step)


def _is_first_rank() -> bool:
    return not has_ranks(None) or dist.get_rank() == 0


def _gather(value: Any) -> list[Any]:
    """Return the value of each rank."""
    if not has_ranks(None):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# ---- rows ----


def _add(table: dict[TensorKey, ErrorStatistics], key: TensorKey, statistics: ErrorStatistics) -> None:
    if key in table:
        table[key].add(statistics)
    else:
        table[key] = copy.copy(statistics)


def _row(step: int, key: TensorKey, statistics: ErrorStatistics, ranks: list[int]) -> dict[str, Any]:
    """Return one row of the table, of built-in types.

    Args:
        ranks: ranks on which the tensor had values that are not finite.
    """
    row: dict[str, Any] = {
        "step": step,
        "layer": key.layer or "(root)",
        "gemm": key.gemm,
        "tensor": key.tensor,
        "expert": key.expert,
        "nonzero_rows": statistics.rows,
        "elements": statistics.elements,
        "snr": _finite(statistics.snr),
        "error": statistics.error,
        "nonfinite": statistics.nonfinite,
        "nonfinite_ranks": ranks,
    }
    flags = []
    if statistics.nonfinite:
        flags.append(f"{statistics.nonfinite} not finite" + (f" on ranks {ranks}" if has_ranks(None) else ""))
    if isinstance(statistics, OperandStatistics):
        flushed = statistics.flushed / max(statistics.nonzero, 1)
        saturated = statistics.saturated / max(statistics.elements, 1)
        row |= {
            "format": str(statistics.spec),
            "flushed": flushed,
            "saturated": saturated,
            "amax": statistics.amax,
            "dynamic_range": statistics.dynamic_range,
            "scale_spread": statistics.scale_spread,
        }
        if flushed > MANY_FLUSHED:
            flags.append(f"{flushed:.0%} flushed to zero")
        # A two-level scale is itself rounded, which clips the largest values of some blocks a little.
        if saturated > MANY_SATURATED and not statistics.spec.two_level:
            flags.append(f"{saturated:.0%} saturated")
    if statistics.error > LARGE_ERROR:
        flags.append(f"{statistics.error:.0%} lost")
    if isinstance(statistics, OperandStatistics):
        for name, (ratio, index) in (("row", statistics.outlier_row), ("column", statistics.outlier_column)):
            row[f"outlier_{name}"], row[f"outlier_{name}_ratio"] = index, _finite(ratio)
            if flags and ratio > OUTLIER:
                flags.append(f"the amax of {name} {index} is {ratio:.0e} times the median")
    row["flags"] = flags
    return row


def _finite(value: float) -> float | None:
    """Return a number that JSON has; None for an infinity or NaN."""
    return value if math.isfinite(value) else None


def _severity(row: dict[str, Any], index: int) -> tuple[Any, ...]:
    """Return a sort key of rows, the worst first.

    First come tensors with values that are not finite, in order of computation, because the first spoils the others.
    Then flagged ones, those of fprop before those of backward, which they spoil.
    """
    if row["nonfinite"]:
        return 0, index
    flagged = bool(row["flags"])
    lost = max(row["error"], row.get("flushed", 0.0), row.get("saturated", 0.0))
    # Rounded, so that of tensors that lost about the same the first computed comes first.
    return 1, not flagged, flagged and _is_backward(row), -round(lost, 1) if flagged else -lost, index


def _order_in_layer(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return a sort key that puts the row first which stands for its layer; see `Inspector.worst`."""
    if row["nonfinite"]:
        return (0,)
    flagged = bool(row["flags"])
    result = row["tensor"] in (ATTENTION_RESULTS if row["gemm"] == ATTENTION else RESULTS.values())
    return 1, not flagged, flagged and result, -row["error"]


def _is_backward(row: dict[str, Any]) -> bool:
    return row["tensor"].startswith("grad_") or row["gemm"] in ("dgrad", "wgrad")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    snr = "" if row["snr"] is None else f"{row['snr']:.1f}"
    shares = [f"{row[name]:.1%}" if name in row else "" for name in ("flushed", "saturated")]
    layer = row["layer"] if row["expert"] is None else f"{row['layer']}[{row['expert']}]"
    numbers = (str(row["nonzero_rows"]), snr, f"{row['error']:.1%}", *shares, str(row["nonfinite"]))
    return (layer, row["gemm"], row["tensor"], *numbers, ", ".join(row["flags"]))

"""`inspect`: measure, in every hundredth step of a training loop, where quantized layers lose precision."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from quaver.inspection.counts import CountTable
from quaver.inspection.rows import RESULTS, TensorKey, add, row_of
from quaver.inspection.statistics import ErrorStatistics, OperandStatistics
from quaver.inspection.table import InspectionTable, is_measured
from quaver.jax.inspection.statistics import length, operand_figures, result_figures, statistics_of
from quaver.jax.numerics.quantized import Quantized
from quaver.recipes.spec import QuantSpec

# ---- recording: while a sampled step is traced, layers put their measurements into its program ----


class MeasuredTensor(NamedTuple):
    """A tensor whose statistics are computed in a program."""

    gemm: str
    tensor: str
    columns: int
    #: None for the result of a GEMM.
    spec: QuantSpec | None
    #: True if rows and columns were swapped.
    transposed: bool = False
    #: Number of experts whose statistics are apart; None for one layer.
    experts: int | None = None


@partial(jax.tree_util.register_dataclass, data_fields=["figures"], meta_fields=["tensors"])
@dataclass
class Measurements:
    """Statistics of one call of a layer, which forward saves for backward."""

    tensors: tuple[MeasuredTensor, ...] = ()
    #: float32 [numbers] for each tensor, or [experts, numbers].
    figures: tuple[Array, ...] = ()

    def operand(
        self,
        gemm: str,
        tensor: str,
        x: Array,
        q: Quantized,
        *,
        transposed: bool = False,
        rows_and_columns: Array | None = None,
    ) -> None:
        """Add an operand x [rows, k] before quantization, or its transpose; or [experts, rows, k].

        Args:
            rows_and_columns: as for `operand_figures`.
        """
        if x.ndim == 3:
            experts, figures = x.shape[0], jax.vmap(operand_figures)(x, q)
        else:
            experts, figures = None, operand_figures(x, q, rows_and_columns)
        columns = (x if rows_and_columns is None else rows_and_columns).shape[-1]
        self._add(MeasuredTensor(gemm, tensor, columns, q.spec, transposed, experts), figures)

    def share(self, tensor: str, gemm: str, other: str) -> bool:
        """Add an operand of one GEMM to another that reads the same codes; return False if the first did not run."""
        for own, figures in zip(self.tensors, self.figures, strict=True):
            if (own.gemm, own.tensor) == (gemm, tensor):
                self._add(own._replace(gemm=other), figures)
                return True
        return False

    def result(self, gemm: str, exact: Array, y: Array) -> None:
        """Add the result of a GEMM [m, n], and the float32 product of its operands before quantization."""
        self._add(MeasuredTensor(gemm, RESULTS[gemm], y.shape[1], None), result_figures(exact, y, y.shape[0]))

    def results(self, gemm: str, exact: Array, y: Array, sizes: Array) -> None:
        """Add the results of one GEMM per expert.

        Args:
            exact, y: [experts, m, n]; or [T, n], the rows of expert 0 first, then those of expert 1, and so on.
            sizes: number of tokens of each expert.
        """
        experts = sizes.shape[0]
        if y.ndim == 3:
            figures = jax.vmap(partial(result_figures, height=y.shape[1]))(exact, y)
        else:
            owner = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(y.shape[0]), side="right")[:, None]

            def of_expert(expert: Array) -> Array:
                own = owner == expert
                return result_figures(jnp.where(own, exact, 0), jnp.where(own, y, 0), sizes[expert])

            figures = jax.lax.map(of_expert, jnp.arange(experts))
        self._add(MeasuredTensor(gemm, RESULTS[gemm], y.shape[-1], None, False, experts), figures)

    def _add(self, tensor: MeasuredTensor, figures: Array) -> None:
        self.tensors += (tensor,)
        self.figures += (figures,)


class Recorder:
    """Receives the statistics of an inspector's sampled steps from the programs that were traced for it.

    It is part of jit's cache key, so that a step function has a program with measurements and one without.
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._patterns = patterns
        #: Layers in the order of their first call, and whether they are measured.
        self.layers: dict[str, bool] = {}
        self.seen: dict[TensorKey, ErrorStatistics] = {}
        # Callbacks run in threads of the devices.
        self._lock = Lock()

    def add_layer(self, name: str) -> bool:
        """Note that a layer is traced; return True if it is measured."""
        return self.layers.setdefault(name, is_measured(self._patterns, name))

    def report(self, layer: str, measured: Measurements) -> None:
        """Make the program under construction send the statistics of a call when it runs."""
        if measured.tensors:
            figures = jnp.concatenate([each.ravel() for each in measured.figures])
            jax.debug.callback(partial(self._receive, layer, measured.tensors), figures)

    def _receive(self, layer: str, tensors: tuple[MeasuredTensor, ...], figures: Any) -> None:
        numbers = iter(np.asarray(figures).tolist())
        with self._lock:
            for gemm, tensor, columns, spec, transposed, experts in tensors:
                for index in range(experts or 1):
                    statistics = statistics_of(islice(numbers, length(spec)), columns, spec)
                    if transposed and isinstance(statistics, OperandStatistics):
                        statistics.transpose()
                    expert = None if experts is None or spec is not None else index
                    for each in dict.fromkeys((None, expert)):
                        add(self.seen, TensorKey(layer, gemm, tensor, each), statistics)

    def take(self) -> dict[TensorKey, ErrorStatistics]:
        """Return and drop the statistics of a step, in the order in which its tensors are computed."""
        jax.effects_barrier()
        seen, self.seen = self.seen, {}
        order = {name: index for index, name in enumerate(self.layers)}

        def position(key: TensorKey) -> tuple[int, int]:
            forward = key.tensor in ("input", "weight", RESULTS["fprop"])
            return (0, order[key.layer]) if forward else (1, -order[key.layer])

        return {key: seen[key] for key in sorted(seen, key=position)}


_context = jax.make_user_context(default_value=None)


def recorder_of(name: str) -> Recorder | None:
    """Return the recorder of the sampled step in which a layer is traced; None if it is not measured."""
    recorder: Recorder | None = _context.value
    return recorder if recorder is not None and recorder.add_layer(name) else None


# ---- steps ----


class Inspector(InspectionTable):
    """Statistics of quantized GEMMs in sampled steps; made by `inspect`.

    Attributes:
        rows: one dict per sampled step, layer, GEMM and tensor; `pandas.DataFrame(inspector.rows)` is a table.
    """

    #: The inspector that was started and not closed.
    _open: "Inspector | None" = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._recorder = Recorder(self._patterns)
        self._step: int | None = None
        self._closed = False
        #: True if `pause` was entered in this step, which may then have no layers.
        self._paused = False
        #: Number of `pause` contexts that are open.
        self._pauses = 0
        self._sampling = ExitStack()

    def __enter__(self) -> "Inspector":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin the first step, in a loop without `with`; `close` is then needed at its end.

        Raises: ValueError if the output folder has statistics already and `resume` is None, or it cannot be written;
            RuntimeError if this inspector was used before.
        """
        if self._step is not None or self._closed:
            raise RuntimeError("inspect: this inspector was used before; make another one")
        if Inspector._open is not None:
            raise RuntimeError("inspect: another inspector is open; close it first, as one program has one recorder")
        if jax.process_index() != 0:
            self._path = None
        error = self._create_file()
        if error:
            raise ValueError(f"inspect: {error}")
        Inspector._open = self
        self._step = self._resumed or 0
        self._begin_step()

    def step(self) -> None:
        """End the current step; call it after the function that computes a training step.

        Raises: after the first sampled step, ValueError if no quantized layer ran in it, or a pattern matches none.
        """
        if self._step is None or self._closed:
            raise RuntimeError("inspect: step() outside of the context; use `with qj.inspect() as inspector:`")
        if self._pauses:
            raise RuntimeError("inspect: step() within pause(); call it after the paused part")
        if self._samples(self._step):
            self._sampling.close()
            seen = self._recorder.take()
            self._check_layers()
            several = jax.process_count() > 1
            own = jax.process_index()
            rows = [row_of(self._step, key, s, [own] if s.nonfinite else [], several) for key, s in seen.items()]
            self.rows += rows
            self._write(rows)
        self._step += 1
        self._begin_step()

    def close(self) -> None:
        """Stop; statistics of a step that has not ended are dropped."""
        self._sampling.close()
        self._closed = True
        if Inspector._open is self:
            Inspector._open = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context in which nothing is measured, such as that of a validation."""
        self._paused = True
        self._pauses += 1
        try:
            with _context(None):
                yield
        finally:
            self._pauses -= 1

    def _begin_step(self) -> None:
        self._paused = False
        if self._step is not None and self._samples(self._step):
            self._sampling.enter_context(_context(self._recorder))

    def _check_layers(self) -> None:
        layers = self._recorder.layers
        if not layers and self._paused:
            return
        if not layers:
            raise ValueError(
                f"inspect: no quantized layer ran in step {self._step}; call the jitted step function between "
                "inspector.step() calls, under a recipe, and not one that lower().compile() returned"
            )
        self._check_patterns([name for name in layers if name])


def inspect(
    *,
    every: int = 100,
    start: int = 0,
    stop: int | None = None,
    layers: str | Iterable[str] = (),
    out: str | Path | None = None,
    resume: int | None = None,
) -> Inspector:
    """Measure in sampled steps of a training loop where quantized layers lose precision.

        with qj.inspect(every=100, out="runs/x") as inspector:
            for batch in batches:
                state, loss = train_step(state, batch)  # jitted
                inspector.step()
        print(inspector)  # the ten worst layers

    The first sampled step compiles `train_step` once more, with measurements: each GEMM is compared with the
    high-precision product of the same inputs. They change no result. Other steps run the program without them.

    Args:
        every: number of steps from one sampled step to the next.
        start: first sampled step; the loop's first step is 0.
        stop: sample only steps before this one; None for all.
        layers: name pattern, or several, of the layers to measure, as in `quaver.Rules`; () for all.
        out: folder for `inspect.jsonl`, one JSON object per row; None keeps the rows in memory only.
        resume: number of the loop's first step, if it continues an earlier one: an existing file keeps the rows of
            steps before it, and the others are removed. None begins with step 0, and an existing file is an error.
    Raises:
        ValueError: `every`, `start`, `stop` or `resume` is no such number.
    """
    return Inspector(every=every, start=start, stop=stop, layers=layers, out=out, resume=resume)


# ---- counts ----


@contextmanager
def count() -> Iterator[CountTable]:
    """Count values of operands that saturated, were flushed to zero or were not finite, in the calls of a block.

        with qj.count() as counters:
            step(params, x)  # jitted or not; compiled once more, with measurements
        print(counters)

    Operands are named by GEMM, such as "fprop.input"; one that two GEMMs share is listed under both. The counts are
    those of `inspect`, which also has errors and shares.
    """
    recorder, counters = Recorder(()), CountTable()
    with _context(recorder):
        yield counters
    for key, statistics in recorder.take().items():
        if isinstance(statistics, OperandStatistics) and key.expert is None:
            counters.table[key.layer][f"{key.gemm}.{key.tensor}"].add(statistics)

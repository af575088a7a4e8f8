"""`inspect`: measure, in every hundredth step of a training loop, where quantized layers lose precision."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from quaver.inspection.rows import ATTENTION, OPERANDS, RESULTS, TensorKey, add, row_of
from quaver.inspection.statistics import ErrorStatistics
from quaver.inspection.table import InspectionTable, is_measured
from quaver.recipes.spec import Recipe
from quaver.recipes.text import check_instance
from quaver.torch.inspection.attention import measure_attention
from quaver.torch.inspection.fallback import Fallback, FallbackState
from quaver.torch.inspection.statistics import operand_statistics, result_statistics
from quaver.torch.nn.attention.dot_product import DotProductAttention
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import is_tracing
from quaver.torch.state import observer
from quaver.torch.state.history.roll import has_ranks
from quaver.torch.state.weight_cache import refresh


class Inspector(InspectionTable, observer.Observer):
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
        check_instance("inspect", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
        self._model = unwrapped(model)
        super().__init__(every=every, start=start, stop=stop, layers=layers, out=out, resume=resume)
        self._step: int | None = None
        self._closed = self._paused = False
        self._names: dict[int, str] = {}
        self._seen: dict[TensorKey, ErrorStatistics] = {}
        #: Keys of operands that two GEMMs share; one of the two may not run.
        self._shared: set[TensorKey] = set()
        self._sampling = ExitStack()
        self._check()
        if fallback is not None:
            check_instance("inspect", "fallback", fallback, Fallback, "qt.Fallback(recipes=['rowwise', 'bf16'])")
        # A DistributedDataParallel may be inside of a compiled module.
        parallel = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._fallback = None if fallback is None else FallbackState(fallback, self._model, parallel)

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
        errors = [error for error in _gather(self._create_file() if _is_first_rank() else "") if error]
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
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before
            if not before and self._step is not None and self._samples(self._step) and not self._seen:
                # Weights that were quantized meanwhile are quantized again, so that they are seen.
                refresh(self._model)

    def _begin_step(self) -> None:
        if self._step is None or not self._samples(self._step):
            return
        # The model may have changed its structure.
        modules = dict(observed_modules(self._model))
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
                add(pooled, key, statistics)
                if statistics.nonfinite:
                    ranks.setdefault(key, []).append(rank)
        self._seen = {}
        rows = [
            row_of(step, key, statistics, ranks.get(key, []), has_ranks(None)) for key, statistics in pooled.items()
        ]
        self.rows += rows
        if _is_first_rank():
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
            add(self._seen, key, statistics)
            if shared:
                self._shared.add(key)

    def observe_gemm(self, gemm: observer.ObservedGemm) -> None:
        name = self._name(gemm.layer, gemm.parameter)
        if name is None or is_tracing():
            return
        statistics = result_statistics(gemm.exact(), gemm.y.detach().float())
        for expert in dict.fromkeys((None, gemm.group)):
            add(self._seen, TensorKey(name, gemm.name, RESULTS[gemm.name], expert), statistics)

    def observe_attention(
        self, core: nn.Module, qkv: tuple[Tensor, Tensor, Tensor], options: Mapping[str, Any], y: Tensor
    ) -> None:
        name = self._name(core)
        if name is None:
            return
        assert isinstance(core, DotProductAttention)

        def report(tensor: str, statistics: ErrorStatistics) -> None:
            add(self._seen, TensorKey(name, ATTENTION, tensor), statistics)

        measure_attention(core, qkv, options, y, report)

    def _name(self, layer: nn.Module, parameter: str = "weight") -> str | None:
        """Return the name of a layer, and of the parameter in a layer with several; None if it is not measured."""
        module_name = self._names.get(id(layer))
        if module_name is None or self._paused:
            return None
        name = module_name if parameter == "weight" else f"{module_name}.{parameter}".lstrip(".")
        return name if is_measured(self._patterns, name, module_name) else None

    # ---- fallback ----

    @property
    def switches(self) -> list[dict[str, Any]]:
        """Layers that fell back to another recipe: step, layer, recipes before and after, the tensor that failed."""
        return [] if self._fallback is None else self._fallback.switches

    def state_dict(self) -> dict[str, Any]:
        """Return the number of ended steps and the state of the fallback, for a checkpoint."""
        fallback = None if self._fallback is None else self._fallback.state_dict()
        step = self._resumed if self._step is None else self._step
        return {"step": step or 0, "fallback": fallback}

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

    # ---- checks ----

    def _check(self) -> None:
        names = []
        for name, module in observed_modules(self._model):
            stacks = [key for key, p in module.named_parameters(recurse=False) if p.dim() == 3 and key != "weight"]
            names += [name, *(f"{name}.{key}".lstrip(".") for key in stacks)]
        if not any("_state" in module.__dict__ for module in self._model.modules()):
            raise ValueError(
                "inspect: the model has no layer that Quaver quantizes; call qt.convert(model, recipe) first"
            )
        self._check_patterns(names)


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


def observed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of quantizable layers and of attention."""
    for name, module in model.named_modules():
        if "_state" in module.__dict__ or isinstance(module, DotProductAttention):
            yield name, module


def _is_first_rank() -> bool:
    return not has_ranks(None) or dist.get_rank() == 0


def _gather(value: Any) -> list[Any]:
    """Return the value of each rank."""
    if not has_ranks(None):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

"""`what_if`: predict what each recipe costs a model in precision, and find the cheapest rules within two budgets."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quaver import recipes as recipe_table
from quaver.costs import hardware, ledger
from quaver.costs.hardware import Gpu
from quaver.inspection.rows import OPERANDS
from quaver.inspection.statistics import ErrorStatistics
from quaver.inspection.table import WHAT_IF_FILE
from quaver.recipes.conversion import Rules, Skip
from quaver.recipes.spec import Recipe
from quaver.recipes.text import check_instance, html_lines, html_table
from quaver.torch.conversion.convert import convert, revert
from quaver.torch.inspection.inspector import unwrapped
from quaver.torch.inspection.statistics import result_statistics
from quaver.torch.inspection.substitution import (
    GemmSubstitution,
    LossFunction,
    Run,
    copied,
    decoded_operands,
    run,
)
from quaver.torch.numerics.quantized import Quantized
from quaver.torch.numerics.rounding import rotate
from quaver.torch.operations import ops
from quaver.torch.state import observer

#: Recipe under which the model is captured; it quantizes every GEMM of every layer, and each result is then replaced.
CAPTURE = "tensorwise"
HEADER = ("recipe", "predicted KL", "worst gradient", "time / bf16", "real loss - bf16", "real gradients")


# ---- capture ----


@dataclass(eq=False)
class CapturedGemms:
    """Operands of one call of one weight of a layer, in high precision."""

    layer: str
    #: Input [T, K] and weight [N, K].
    x: Tensor
    weight: Tensor
    #: True for one expert of several, which sees only the tokens routed to it.
    expert: bool
    #: grad_output [T, N]; None until backward.
    g: Tensor | None = None
    #: Operands of each GEMM that ran, [m, k] and [n, k].
    operands: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class _Capture(GemmSubstitution):
    """Computes every GEMM in high precision and saves the operands."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[CapturedGemms] = []
        self._by_weight: dict[tuple[str, str, int | None], list[CapturedGemms]] = {}

    def observe_gemm(self, gemm: observer.ObservedGemm) -> None:
        super().observe_gemm(gemm)
        name, a = self.names.get(id(gemm.layer)), gemm.a.detach()
        if name is None or a.numel() == 0:
            return
        calls = self._by_weight.setdefault((name, gemm.parameter, gemm.group), [])
        if gemm.name == "fprop":
            operands = {"fprop": (a, gemm.b.detach())}
            calls.append(CapturedGemms(name, a, gemm.b.detach(), gemm.group is not None, operands=operands))
            return
        if gemm.name == "wgrad":
            # The call with this input; dgrad may have brought grad_output already.
            g, x = a.t(), gemm.b.detach().t()
            call = next((call for call in reversed(calls) if call.x.data_ptr() == x.data_ptr()), None)
        else:
            # Backward runs in the reverse order, and after the forward that a checkpoint recomputes.
            g, call = a, next((call for call in reversed(calls) if call.g is None and len(call.x) == len(a)), None)
        if call is not None:
            if call.g is None:
                self.calls.append(call)
            call.g = g
            call.operands[gemm.name] = a, gemm.b.detach()


# ---- evaluation ----


@dataclass
class LayerPrecision:
    """Precision of one layer under one recipe."""

    #: Predicted KL divergence of the model's output, in nats per token, that fprop of this layer alone causes.
    kl: float = 0.0
    #: Errors of results by (GEMM, "result"), and of operands by (GEMM, operand), of quantized GEMMs.
    errors: dict[tuple[str, str], ErrorStatistics] = field(default_factory=dict)

    def snr(self, gemm: str) -> float:
        """Return -10 log10 of the `error` of a GEMM's result; infinite if it is exact, -inf if it is not finite."""
        found = self.errors.get((gemm, "result"))
        if found is not None and found.nonfinite:
            return -math.inf
        return _decibels(1.0, 0.0 if found is None else found.error)

    def operand_snr(self, gemm: str, operand: str) -> float:
        """Return the SNR of an operand in dB; infinite if it is exact."""
        found = self.errors.get((gemm, operand))
        return math.inf if found is None else found.snr

    def add(self, other: "LayerPrecision") -> None:
        """Pool with another call of the layer."""
        self.kl += other.kl
        for key, statistics in other.errors.items():
            if key in self.errors:
                self.errors[key].add(statistics)
            else:
                self.errors[key] = statistics


def _decibels(signal: float, noise: float) -> float:
    """Return the ratio of two sums of squares in dB: infinite without noise, -inf if nothing is left."""
    if noise == 0:
        return math.inf
    ratio = signal / noise
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf


def _squares(x: Tensor) -> float:
    """Return the sum of squares; float32 values whose squares over- or underflow are summed in float64."""
    norm = float(torch.linalg.vector_norm(x))
    return norm**2 if 1e-15 < norm < math.inf else float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _evaluate(call: CapturedGemms, candidates: Sequence[Recipe], tokens: int) -> Iterator[LayerPrecision]:
    """Yield the precision of one call under each recipe."""
    assert call.g is not None
    values = {gemm: (a.float(), b.float()) for gemm, (a, b) in call.operands.items()}
    exact = {gemm: a @ b.t() for gemm, (a, b) in values.items()}
    for recipe in candidates:
        precision = LayerPrecision()
        for gemm, originals in call.operands.items():
            specs = recipe.gemms[gemm].a, recipe.gemms[gemm].b
            pair: list[Quantized | None] = [
                None if spec is None else ops.QUANTIZE(x, spec, None, None, (0, number, 0))
                for number, (x, spec) in enumerate(zip(originals, specs, strict=True))
            ]
            if pair[1] is None and recipe.dequantized_backward:
                pair[1] = _dequantized(call, gemm, recipe)
            if pair == [None, None]:
                continue
            decoded = decoded_operands(values[gemm], pair)
            for operand, x, q, value in zip(OPERANDS[gemm], values[gemm], pair, decoded, strict=True):
                if q is not None:
                    x = rotate(x) if q.spec.hadamard else x
                    precision.errors[gemm, operand] = result_statistics(x, value)
            y = decoded[0] @ decoded[1].t()
            precision.errors[gemm, "result"] = result_statistics(exact[gemm], y)
            if gemm == "fprop":
                # The formula of `max_kl` in `what_if`; the gradient of a token's own loss is `tokens` times g.
                kl = 0.5 * tokens * _squares(y.sub_(exact[gemm]).mul_(call.g).sum(1))
                precision.kl = kl if math.isfinite(kl) else math.inf
        yield precision


def _dequantized(call: CapturedGemms, gemm: str, recipe: Recipe) -> Quantized:
    """Return b of an unquantized dgrad or wgrad that reads fprop's operand."""
    x, spec = (call.weight, recipe.fprop.b) if gemm == "dgrad" else (call.x, recipe.fprop.a)
    assert spec is not None
    return ops.QUANTIZE(x, spec).T


# ---- choice of rules ----


class Candidate(NamedTuple):
    """A recipe that a layer may get."""

    #: None leaves the layer in high precision.
    recipe: Recipe | None
    #: The recipe as Python code.
    code: str
    kl: float
    #: The smaller SNR of its gradients in dB.
    grad_snr: float
    #: Predicted seconds of the layer's GEMMs and quantizations in one step.
    seconds: float


def _choose(candidates: Mapping[str, Sequence[Candidate]], max_kl: float) -> dict[str, Candidate]:
    """Return the cheapest candidate of each layer whose KL adds up to at most `max_kl`.

    Starts with the cheapest ones and replaces, one after the other, that one which lowers KL most per second.
    """
    chosen = {layer: min(each, key=lambda c: (c.seconds, c.kl)) for layer, each in candidates.items()}
    while sum(c.kl for c in chosen.values()) > max_kl:
        best = max(
            (
                ((chosen[layer].kl - c.kl) / max(c.seconds - chosen[layer].seconds, 1e-12), layer, index)
                for layer, each in candidates.items()
                for index, c in enumerate(each)
                if c.kl < chosen[layer].kl
            ),
            default=None,
        )
        if best is None:
            break
        chosen[best[1]] = candidates[best[1]][best[2]]
    return chosen


def _patterns(chosen: Mapping[str, Candidate]) -> dict[str, Candidate]:
    """Return rules that give each layer its candidate: layers by name, then kinds of layers, then the rest by `*`."""
    kinds: dict[str, list[str]] = {}
    for name in chosen:
        kinds.setdefault(name.rpartition(".")[2], []).append(name)
    common = _most_common(chosen.values())
    exact: dict[str, Candidate] = {}
    by_kind: dict[str, Candidate] = {}
    for kind, names in kinds.items():
        usual = _most_common(chosen[name] for name in names)
        exact |= {name: chosen[name] for name in names if chosen[name].code != usual.code}
        if usual.code != common.code:
            by_kind[f"*.{kind}" if any("." in name for name in names) else kind] = usual
    # A name also matches layers whose names end with it, so longer names come first.
    rules = dict(sorted(exact.items(), key=lambda rule: -len(rule[0]))) | by_kind | {"*": common}
    lookup = Rules({pattern: candidate.code for pattern, candidate in rules.items()})
    for name, candidate in chosen.items():
        rule = lookup.match(name, 1, 1)
        if rule is None or rule.recipe != candidate.code:
            return dict(sorted(chosen.items(), key=lambda rule: -len(rule[0])))
    return rules


def _most_common(candidates: Iterable[Candidate]) -> Candidate:
    by_code: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        by_code.setdefault(candidate.code, []).append(candidate)
    return max(by_code.values(), key=len)[0]


# ---- result ----


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """Result of `what_if`."""

    #: One dict per recipe, layer and GEMM: `pandas.DataFrame(result.rows)` is a table.
    rows: list[dict[str, Any]]
    #: One dict per recipe, the recommended rules last.
    summary: list[dict[str, Any]]
    #: The cheapest rules within both budgets; `convert` takes them.
    rules: dict[str, Recipe | None]
    #: The same as Python code.
    code: str
    #: Description of the predicted times.
    note: str

    def save(self, folder: str | Path) -> None:
        """Write what_if.json, whose rules the report of `quaver inspect` shows."""
        text = json.dumps({"table": [HEADER, *map(_cells, self.summary)], "code": self.code, "note": self.note})
        (Path(folder) / WHAT_IF_FILE).write_text(text + "\n", encoding="utf-8")

    def __str__(self) -> str:
        table = [HEADER, *map(_cells, self.summary)]
        widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table]
        return "\n".join([*lines, f"rules = {self.code}", self.note])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(HEADER, map(_cells, self.summary)) + html_lines([f"rules = {self.code}", self.note])


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    worst, real = ("exact" if row[key] == math.inf else f"{row[key]:.1f} dB" for key in ("grad_snr", "real_grad_snr"))
    return (row["recipe"], f"{row['kl']:.2g}", worst, f"{row['time']:.2f}", f"{row['loss_difference']:+.2g}", real)


def what_if(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    recipes: Sequence[str | Recipe],
    *,
    max_kl: float = 1e-3,
    min_grad_snr: float = 10.0,
    skip: Skip = (),
    gpu: str | Gpu = "h100",
    tokens: int = 8192,
    widen: int = 1,
) -> WhatIf:
    """Predict what each recipe costs in precision, layer by layer, and find the cheapest rules within two budgets.

        result = qt.what_if(model, batch, loss_fn, ["mxfp8", "nvfp4"])
        print(result)
        qt.convert(model, result.rules)

    Captures one forward and backward in high precision. Every GEMM is then computed from the captured operands under
    each recipe, and the rules that come out are checked by one real forward and backward, as is each recipe. Works on a
    copy: the model and the random state do not change. A converted model is evaluated as if reverted. Delayed scaling
    is evaluated with the scales of this batch.

    Args:
        model: the model.
        batch: passed to `loss_fn`.
        loss_fn: function of model and batch that returns the mean loss over tokens.
        recipes: recipes to consider, beside high precision.
        max_kl: largest predicted KL divergence of the model's output from that in high precision, in nats per token. It
            is the sum over layers of half the mean over tokens of (g · δ)², with the gradient g of a token's loss with
            respect to the output of the layer, and the error δ of that output.
        min_grad_snr: smallest signal-to-noise ratio in dB of any layer's gradients of input and weight, from the mean
            relative error of their rows or columns, whichever is larger.
        skip: layers to leave in high precision, as in `convert`.
        gpu: GPU whose time is predicted, as for `quaver plan`.
        tokens: tokens of a step of the prediction.
        widen: factor of all features in the prediction, to choose rules for a large model with a small one.
    Raises:
        ValueError: an unknown recipe or GPU, no layer that `convert` would convert, or a loss without gradients.
    """
    check_instance("what_if", "model", model, nn.Module, "torch.nn.Linear(64, 64)")
    candidates = _recipes(recipes)
    for name, value, least in (("max_kl", max_kl, 0.0), ("tokens", tokens, 1), ("widen", widen, 1)):
        if not value >= least:
            raise ValueError(f"what_if: {name} is {value!r}; give {least:g} or more")
    card = hardware.get(gpu)
    original = copied(unwrapped(model))
    revert(original)
    exact = run(original, batch, loss_fn)
    if not exact.finite:
        raise ValueError("what_if: loss or gradients are not finite in high precision: quantization is not the cause")
    calls = _captured(original, batch, loss_fn, skip)
    rows_seen = _tokens(calls)
    table: dict[str, list[LayerPrecision]] = {}
    for call in calls:
        pooled = table.setdefault(call.layer, [LayerPrecision() for _ in candidates])
        for into, precision in zip(pooled, _evaluate(call, [r for r, _ in candidates], rows_seen), strict=True):
            into.add(precision)
    prices = _Prices(calls, card, tokens / rows_seen, widen)
    unfiltered = {layer: _candidates(layer, each, candidates, -math.inf, prices) for layer, each in table.items()}
    options = {layer: _candidates(layer, each, candidates, min_grad_snr, prices) for layer, each in table.items()}
    chosen = _choose(options, max_kl)
    skipped = dict.fromkeys(_skipped(original, skip), Candidate(None, "None", 0.0, math.inf, 0.0))
    patterns = _patterns(chosen | skipped)
    rules = {pattern: candidate.recipe for pattern, candidate in patterns.items()}
    bf16_seconds = sum(prices.seconds(layer, None) for layer in table)
    summary = []
    for number, (recipe, _) in enumerate(candidates):
        # The first option of a layer is high precision.
        row = _summary_row(str(recipe), [each[1 + number] for each in unfiltered.values()], bf16_seconds)
        summary.append(row | _real_errors(original, batch, loss_fn, recipe, skip, exact))
    row = _summary_row("rules", chosen.values(), bf16_seconds)
    summary.append(row | _real_errors(original, batch, loss_fn, rules, skip, exact))
    code = "{" + ", ".join(f"{pattern!r}: {candidate.code}" for pattern, candidate in patterns.items()) + "}"
    note = f"time: of the layers' GEMMs and quantizations, predicted for {card.about} and {tokens} tokens"
    note += f", features times {widen}" if widen > 1 else ""
    if not any(rules.values()) and all(row["time"] >= 1 for row in summary):
        note += "; no recipe is faster than bf16 for features this small: give widen= to choose for a larger model"
    return WhatIf(rows=[*_rows(table, candidates)], summary=summary, rules=rules, code=code, note=note)


def _recipes(given: Sequence[str | Recipe]) -> list[tuple[Recipe, str]]:
    """Return each recipe with its code."""
    if isinstance(given, str | Recipe) or not given:
        raise ValueError(f"what_if: recipes is {given!r}; give a list, such as ['mxfp8', 'nvfp4']")
    found = [(recipe_table.get(each), repr(str(each) if isinstance(each, Recipe) else each)) for each in given]
    for recipe, code in found:
        if not recipe.quantizes:
            raise ValueError(f"what_if: {code} quantizes nothing; high precision is always considered")
    return found


def _tokens(calls: Sequence[CapturedGemms]) -> int:
    """Return the number of tokens: the most rows of any layer, of all experts together if all layers are experts."""
    rows: Counter[str] = Counter()
    for call in calls:
        rows[call.layer] = rows[call.layer] + len(call.x) if call.expert else max(rows[call.layer], len(call.x))
    experts = {call.layer for call in calls if call.expert}
    return max([count for layer, count in rows.items() if layer not in experts] or rows.values())


def _skipped(original: nn.Module, skip: Skip) -> list[str]:
    """Return the names of the layers that `convert` would convert without `skip`."""
    if not callable(skip) and not list(skip):
        return []
    every, rest = (convert(copied(original), CAPTURE, skip=each).converted for each in ((), skip))
    return [name for name in every if name not in rest]


def _captured(original: nn.Module, batch: Any, loss_fn: LossFunction, skip: Skip) -> list[CapturedGemms]:
    """Return the operands of all GEMMs that `convert` would quantize."""
    model = copied(original)
    if not convert(model, CAPTURE, skip=skip).converted:
        raise ValueError("what_if: the model has no layer that qt.convert would convert")
    capture = _Capture()
    run(model, batch, loss_fn, capture)
    if not capture.calls:
        raise ValueError(
            "what_if: no layer that qt.convert would convert ran in forward and backward; let loss_fn call the model "
            "that it is given, and its parameters require gradients"
        )
    return capture.calls


class _Prices:
    """Predicted seconds of each layer."""

    def __init__(self, calls: Sequence[CapturedGemms], gpu: Gpu, scale: float, widen: int) -> None:
        #: Rows, in_features and out_features of each layer's matrices.
        self._sizes: dict[str, Counter[tuple[int, int, int]]] = {}
        self._gpu = gpu
        self._seconds: dict[tuple[str, Recipe | None], float] = {}
        for call in calls:
            n, k = (size * widen for size in call.weight.shape)
            rows = max(1, round(len(call.x) * scale))
            self._sizes.setdefault(call.layer, Counter())[rows, k, n] += 1

    def seconds(self, layer: str, recipe: Recipe | None) -> float:
        """Return the predicted seconds of a layer's GEMMs and quantizations; None is high precision."""
        if (layer, recipe) not in self._seconds:
            self._seconds[layer, recipe] = sum(
                times * ledger.layer(recipe or recipe_table.get("bf16"), rows, k, n, self._gpu).seconds
                for (rows, k, n), times in self._sizes[layer].items()
            )
        return self._seconds[layer, recipe]


def _candidates(
    layer: str,
    precisions: Sequence[LayerPrecision],
    candidates: Sequence[tuple[Recipe, str]],
    min_grad_snr: float,
    prices: _Prices,
) -> list[Candidate]:
    """Return what a layer may get: high precision, and each recipe without the GEMMs whose gradients it makes bad."""
    found = [Candidate(None, "None", 0.0, math.inf, prices.seconds(layer, None))]
    for precision, (recipe, code) in zip(precisions, candidates, strict=True):
        snrs = {gemm: precision.snr(gemm) for gemm in ("dgrad", "wgrad")}
        bad = [gemm for gemm, snr in snrs.items() if snr < min_grad_snr]
        if bad:
            try:
                recipe = recipe_table.override(recipe, **dict.fromkeys(bad))
            except ValueError:  # delayed scaling does not go without a quantized dgrad
                continue
            code = f"recipes.override({code}, {', '.join(f'{gemm}=None' for gemm in bad)})"
        snr = min((snr for gemm, snr in snrs.items() if gemm not in bad), default=math.inf)
        found.append(Candidate(recipe, code, precision.kl, snr, prices.seconds(layer, recipe)))
    return found


def _summary_row(name: str, layers: Iterable[Candidate], bf16_seconds: float) -> dict[str, Any]:
    layers = list(layers)
    return {
        "recipe": name,
        "kl": sum(c.kl for c in layers),
        "grad_snr": min(c.grad_snr for c in layers),
        "time": sum(c.seconds for c in layers) / bf16_seconds,
    }


def _real_errors(
    original: nn.Module, batch: Any, loss_fn: LossFunction, recipe: Any, skip: Skip, exact: Run
) -> dict[str, float]:
    """Return the change of the loss and the SNR of all gradients together in a real forward and backward."""
    if isinstance(recipe, Mapping) and not any(recipe.values()):
        return {"loss_difference": 0.0, "real_grad_snr": math.inf}
    model = copied(original)
    convert(model, recipe, skip=skip)
    found = run(model, batch, loss_fn)
    signal = noise = 0.0
    for name, g in exact.gradients.items():
        signal += _squares(g.float())
        noise += _squares(found.gradients[name].float() - g.float())
    return {"loss_difference": found.loss - exact.loss, "real_grad_snr": _decibels(signal, noise)}


def _rows(
    table: Mapping[str, Sequence[LayerPrecision]], candidates: Sequence[tuple[Recipe, str]]
) -> Iterator[dict[str, Any]]:
    for layer, precisions in table.items():
        for precision, (recipe, _) in zip(precisions, candidates, strict=True):
            for gemm in dict.fromkeys(gemm for gemm, _ in precision.errors):
                row: dict[str, Any] = {"layer": layer or "(root)", "recipe": str(recipe), "gemm": gemm}
                row |= {"snr": precision.snr(gemm), "kl": precision.kl if gemm == "fprop" else None}
                row |= {f"{operand}_snr": precision.operand_snr(gemm, operand) for operand in OPERANDS[gemm]}
                yield row

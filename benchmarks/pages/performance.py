"""The predicted tables of two pages: `python -m benchmarks.pages.performance` writes them.

What a user gains is in docs/performance.md, what it rests on in docs/design/performance.md.

They stand between `<!-- NAME -->` and `<!-- end of NAME -->`; a test compares them with what is computed here, so that
a page cannot say what the ledger does not.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.pages import curves, runs
from benchmarks.pages.published import Forecast, of_torchao, of_transformer_engine, other_cards, seven
from quaver import recipes
from quaver.costs import decoder, hardware, ledger, steps
from quaver.costs.hardware import GPUS, Gpu, GpuRate
from quaver.train.commands.plan import plan

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "performance.md"
DESIGN = DOCS / "design" / "performance.md"

#: (tokens, in, out) of the floors.
SHAPES = (
    (8192, 4096, 4096),
    (8192, 4096, 14_336),
    (8192, 8192, 28_672),
    (16_384, 4096, 4096),
    (16_384, 4096, 14_336),
    (16_384, 8192, 28_672),
)
#: Rows of the tables of minimum sizes: title, recipe, and how it is used.
HOPPER = (
    ("tensorwise", "tensorwise", {}),
    ("delayed", "delayed", {}),
    ("delayed, weights once in 8 micro-batches", "delayed", {"micro_batches": 8}),
    ("the same, inputs and gradients from their producers", "delayed", {"micro_batches": 8, "produced": True}),
    ("rowwise", "rowwise", {}),
    ("rowwise_bf16_wgrad", "rowwise_bf16_wgrad", {}),
    ("blockwise", "blockwise", {}),
    ("blockwise, from producers", "blockwise", {"produced": True}),
)
BLACKWELL = tuple((name, name, {}) for name in ("tensorwise", "delayed", "rowwise", "mxfp8", "nvfp4"))
#: Assumed fraction of the copy rate that kernels reach, for predictions of emulation.
REACHED = 0.85
MODEL_RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, the first column aligned left, the others right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rates() -> str:
    """Return a table of GPUs and their rates, whose sources are in `quaver.costs.hardware`."""
    kinds = ("bf16", "tensor", "row", "block", "mx", "nvfp4")

    def shown(figure: GpuRate | None, digits: int = 0) -> str:
        return "–" if figure is None else f"{figure.value:.{digits}f} {figure.how[0]}"  # noqa: RUF001

    rows = [
        [gpu.name, gpu.about, shown(gpu.copy, 2), *(shown(gpu.rates.get(kind)) for kind in kinds)]
        for gpu in GPUS.values()
    ]
    return markdown(["name", "GPU", "copy, TB/s", *kinds], rows)


def floors(gpu: str, columns: Sequence[tuple[str, str, dict[str, int]]]) -> str:
    """Return a table of ms and speed-up of one Linear, forward and backward, by shape."""
    rows = []
    for shape in SHAPES:
        costs = [ledger.layer(recipes.get(name), *shape, gpu, **how) for _, name, how in columns]  # type: ignore[arg-type]
        cells = [f"{cost.seconds * 1e3:.3g} ({cost.speedup:.2f})" for cost in costs]
        rows.append([f"{shape[0]}, {shape[1]} → {shape[2]}", f"{costs[0].bf16_seconds * 1e3:.3g}", *cells])
    return markdown(["tokens, K → N", "bf16", *(title for title, _, _ in columns)], rows)


def moved() -> str:
    """Return a table of bytes per element moved by quantization, by recipe and tensor."""
    rows = []
    tokens, k, n = 8192, 4096, 14_336
    for gpu in ("h200", "b200"):
        for name in recipes.RECIPES:
            cost = ledger.layer(recipes.get(name), tokens, k, n, gpu)
            sizes = {"input": tokens * k, "weight": n * k, "grad_output": tokens * n}
            cells = [f"{cost.tensors[tensor].bytes / size:.2f}" for tensor, size in sizes.items()]
            rows.append([gpu, name, *cells, ", ".join(cost.emulated) or "none"])
    return markdown(["GPU", "recipe", "input", "weight", "grad_output", "GEMMs not native"], rows)


def forecasts(predicted: Iterable[Forecast]) -> str:
    """Return a table of published and predicted figures."""
    rows = [[f.what, f.unit, f"{f.published:.2f}", f"{f.predicted:.2f}", f"{f.error:+.1%}"] for f in predicted]
    return markdown(["what", "in", "published", "predicted", "error"], rows)


def taken_for() -> str:
    """Return a table of errors at torchao's shapes, by the assumed GPU."""
    cards = {"2.4 TB/s, GEMM rates of the H200 NVL (`h100-hbm2e`)": GPUS["h100-hbm2e"], **other_cards()}
    by_card = {title: of_torchao(card) for title, card in cards.items()}
    head = ["torchao's H100 taken for", *(f.what.partition("H100, ")[2] for f in next(iter(by_card.values())))]
    return markdown(head, [[title, *(f"{f.error:+.1%}" for f in row)] for title, row in by_card.items()])


def models() -> str:
    """Return a table of all matrices of a Llama-3-8B layer, by GPU and recipe."""
    rows = []
    for gpu in GPUS:
        plans = [plan("llama3-8b", name, gpu) for name in MODEL_RECIPES]
        cells = [f"{p.speedup:.2f}" + " (emulated)" * bool(p.rows[0].cost.emulated) for p in plans]
        rows.append([gpu, f"{plans[0].bf16_seconds * 1e3:.2f}", *cells])
    return markdown(["GPU", "bf16, ms", *MODEL_RECIPES], rows)


def _lacks(recipe: str, card: Gpu) -> bool:
    return any(ledger.on(gemm, card) not in card.rates for gemm in recipes.get(recipe).gemms.values())


def emulated() -> str:
    """Return a table of emulated Linears of 4096 by 4096 at 4096 tokens, with kernels at 85 % of the copy rate."""
    side, rows = 4096, []
    for name in ("a100", "l4", "l40s", "rtx4090", "h100", "h200", "h200-nvl", "b200"):
        card = GPUS[name]
        slower = replace(card, copy=card.copy.times(REACHED, "what kernels are taken to reach of it"))
        names = [recipe for recipe in ("blockwise", "mxfp8", "nvfp4") if _lacks(recipe, slower)]
        for recipe in names or ["mxfp6"]:
            cost = ledger.layer(recipes.get(recipe), side, side, side, slower)
            passes = [*cost.tensors.values(), *(gemm.decoding for gemm in cost.gemms.values())]
            launches = len(cost.gemms) + sum(one.kernels for one in passes)
            tensor_bytes = [f"{one.bytes / side**2:.2f}" for one in (*cost.tensors.values(), passes[-1])]
            cells = [f"{cost.bytes / 1e6:.0f}", f"{launches:.0f}", f"{cost.bf16_seconds * 1e6:.0f}"]
            rows.append([name, recipe, *tensor_bytes, *cells, f"{cost.seconds * 1e6:.0f}", f"{1 / cost.speedup:.2f}"])
    head = ["GPU", "recipe", "input, bytes an element", "weight", "grad_output", "saved input dequantized"]
    return markdown([*head, "MB", "launches", "bf16, µs", "emulated, µs", "over bf16"], rows)


#: One recipe for each way to quantize attention.
ATTENTION_RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
#: Tokens, heads, groups of keys and features of a head of a Llama-3-8B layer.
ATTENTION = 8192, 32, 8, 128


def attention_table() -> str:
    """Return a table of causal attention in eight bits and bf16, forward and backward."""
    rows, specs = [], {name: recipes.get(name, attention=True).attention for name in ATTENTION_RECIPES}
    for gpu in ("a100", "h100", "h200", "b200"):
        costs = [decoder.cost(spec, *ATTENTION, gpu) for spec in specs.values() if spec is not None]
        cells = [
            f"{cost.seconds * 1e3:.3g} ({cost.speedup:.2f}): {cost.forward * 1e3:.3g} + {cost.backward * 1e3:.3g}"
            for cost in costs
        ]
        rows.append([gpu, f"{costs[0].bf16_seconds * 1e3:.3g}", *cells])
    counts = [" + ".join(map(str, decoder.products(spec))) for spec in specs.values() if spec is not None]
    rows.append(["products", " + ".join(map(str, decoder.PLAIN)), *counts])
    return markdown(["GPU", "bf16, ms", *ATTENTION_RECIPES], rows)


def runs_table() -> str:
    """Return a table of published training runs on many GPUs and their predictions."""
    head = ["model, GPUs, batch", "bf16, tokens/s a GPU", "predicted", "eight bits", "predicted", "gain", "predicted"]
    return markdown([*head, ""], runs.cells(runs.judged()))


def curves_table() -> str:
    """Return a table of tokens/s per GPU in bf16 by model and number of GPUs, and the gain of tensorwise."""
    return markdown(["bf16, tokens/s a GPU (tensorwise)", *(f"{gpus:,}" for gpus in curves.COUNTS)], curves.cells())


def overlap_table() -> str:
    """Return a table of what overlap gains with tensor parallelism over eight H100, by links."""
    head, rows = ["model, recipe"], []
    links = {name: hardware.get_interconnect(link) for name, link in (("NVLink 4", "hgx-h100"), ("PCIe 5.0", "pcie"))}
    for name in links:
        head += [f"{name}: communication of a step", "hidden", "gain in tokens/s"]
    for model in ("8B", "70B"):
        for recipe in ("bf16", "tensorwise"):
            row = [f"{model}, {recipe}"]
            for link in links.values():
                apart, beside = (
                    steps.predict(
                        runs.MODELS[model], recipes.get(recipe), "h100", hardware.over(8, tp=8), link, overlapped=each
                    )
                    for each in (False, True)
                )
                sent, shown = apart.parts["tensor"], beside.parts["tensor"]
                gain = beside.tokens_per_second / apart.tokens_per_second - 1
                row += [f"{sent / apart.seconds:.0%}", f"{1 - shown / sent:.0%}", f"{gain:+.0%}"]
            rows.append([cell.replace("%", " %") for cell in row])
    return markdown(head, rows)


TABLES = {
    "rates": rates,
    "bytes": moved,
    "forecasts": lambda: forecasts(seven()),
    "more forecasts": lambda: forecasts(of_transformer_engine("b300")),
    "cards": taken_for,
    "floors on an H200": lambda: floors("h200", HOPPER),
    "floors on a B200": lambda: floors("b200", BLACKWELL),
    "emulated": emulated,
    "models": models,
    "attention": attention_table,
    "runs": runs_table,
    "overlap": overlap_table,
    "curves": curves_table,
}


#: The page of each table.
PAGES = {
    PAGE: ("models", "floors on an H200", "floors on a B200", "attention", "runs", "overlap", "curves", "emulated"),
    DESIGN: ("bytes", "rates", "forecasts", "cards", "more forecasts"),
}


def between(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)


def filled(text: str, names: Iterable[str]) -> str:
    """Return the page with these tables computed again.

    Raises:
        ValueError: the page has no place for a table.
    """
    for name in names:
        text, places = between(name).subn(lambda m, name=name: f"{m[1]}{TABLES[name]()}\n{m[2]}", text)
        if places != 1:
            raise ValueError(f"the page has {places} places for the table {name!r}; it needs one")
    return text


def write() -> None:
    """Write all tables into their pages."""
    for page, names in PAGES.items():
        page.write_text(filled(page.read_text(encoding="utf-8"), names), encoding="utf-8")


if __name__ == "__main__":
    write()

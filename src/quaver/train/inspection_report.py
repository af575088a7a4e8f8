"""report.html of `quaver inspect`: heat map, table and histograms in one file that loads nothing else.

The plots are drawn by bokeh. The page's own script decodes the statistics, which are float16 in base64, and fills the
plots; the table and the menus are plain HTML.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.document import Document
from bokeh.embed import components
from bokeh.events import DocumentReady, Tap
from bokeh.models import (
    BoxAnnotation,
    ColorBar,
    ColumnDataSource,
    CustomJS,
    CustomJSHover,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
)
from bokeh.palettes import Viridis256
from bokeh.plotting import figure
from bokeh.resources import Resources

from quaver.train import files
from quaver.train.inspection_table import STATISTICS, ReportTable, histograms, without_common_start

FILE = "report.html"
#: Most histograms of one layer: two operands of three GEMMs.
HISTOGRAMS = 6
#: Most rows of the table, and most flagged tensors listed above it.
ROWS, FLAGS = 2000, 10
HEADER = ("layer", "GEMM", "tensor", "format", "SNR in dB", "error", "flushed", "saturated", "non-finite", "flags")
NO_RULES = (
    "None were computed. <code>qt.what_if(model, batch, loss_fn, recipes).save(folder)</code> finds them for this "
    "model, with their predicted price; or <code>quaver inspect --model hf:PATH --text FILE</code>."
)


def write_report(
    table: ReportTable, path: Path, title: str, environment: Mapping[str, str], rules: Mapping[str, Any] | None
) -> Path:
    """Write the report.

    Args:
        table: statistics of the run.
        path: the file to write.
        title: heading, such as the name of the run.
        environment: texts by title, such as versions.
        rules: contents of what_if.json, or None.
    """
    script, divs = _plots(table)
    heat, *bars = divs
    data = {
        "steps": table.steps,
        "layers": table.layers,
        "statistics": STATISTICS,
        "values": {
            gemm: {
                tensor: {name: _base64(values) for name, values in statistics.items()}
                for (own, tensor), statistics in table.values.items()
                if own == gemm
            }
            for gemm in dict.fromkeys(gemm for gemm, _ in table.values)
        },
        "histograms": {layer: [asdict(each) for each in own[:HISTOGRAMS]] for layer, own in histograms(table).items()},
    }
    body = BODY.format(
        title=escape(title),
        steps=_steps_text(table),
        flags=_flags(table),
        heat=heat,
        bars="".join(bars),
        last=table.steps[-1],
        rows=_rows(table.last[:ROWS]),
        rules=NO_RULES if rules is None else _rules(rules),
        environment="".join(f"<h3>{escape(name)}</h3><pre>{escape(text)}</pre>" for name, text in environment.items()),
    )
    # "<" would end the script.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    bokeh = Resources(mode="inline", components=["bokeh"]).render_js()
    head = HEAD.format(title=escape(title), css=CSS)
    page = f'{head}{body}<script type="application/json" id="data">{text}</script>{bokeh}{script}</body></html>\n'
    files.write(path, page)
    return path


# ---- plots ----


def _plots(table: ReportTable) -> tuple[str, Sequence[str]]:
    """Return the script of all plots, and their elements: the heat map and the histograms."""
    rows, columns = len(table.layers), len(table.steps)
    heat = figure(
        height=min(max(15 * rows + 90, 260), 1600),
        sizing_mode="stretch_width",
        x_range=(0, columns),
        y_range=(rows, 0),
        x_axis_label="step",
        tools="tap,reset,box_zoom",
        toolbar_location=None,
    )
    source = ColumnDataSource({"image": [np.zeros((rows, columns), np.float32)]})
    mapper = LinearColorMapper(palette=Viridis256, nan_color="rgba(128, 128, 128, 0.25)")
    heat.image("image", x=0, y=0, dw=columns, dh=rows, color_mapper=mapper, source=source)
    bar = ColorBar(color_mapper=mapper, width=12, padding=6, background_fill_alpha=0)
    heat.add_layout(bar, "right")
    shortened = without_common_start(table.layers)
    for axis, names, most in ((heat.xaxis, [str(step) for step in table.steps], 6), (heat.yaxis, shortened, 120)):
        every = -(-len(names) // most)
        places = [place + 0.5 for place in range(0, len(names), every)]
        axis.ticker = FixedTicker(ticks=places)
        axis.major_label_overrides = {place: names[int(place)] for place in places}
    heat.yaxis.major_label_text_font_size = "10px"
    heat.grid.visible = False
    code = "return names[Math.min(names.length - 1, Math.max(0, Math.floor(value)))]"
    heat.add_tools(
        HoverTool(
            tooltips=[("layer", "$y{custom}"), ("step", "$x{custom}"), ("value", "@image{0.[0000]}")],
            formatters={
                "$y": CustomJSHover(args={"names": table.layers}, code=code),
                "$x": CustomJSHover(args={"names": table.steps}, code=code),
            },
        )
    )
    bars, boxes = zip(*(_histogram() for _ in range(HISTOGRAMS)), strict=True)
    document = Document()
    for each in (heat, *bars):
        document.add_root(each)
    models = {"heat": heat, "source": source, "mapper": mapper, "color_bar": bar, "palette": list(Viridis256)}
    document.js_on_event(DocumentReady, CustomJS(args=models | {"bars": bars, "boxes": boxes}, code=SCRIPT))
    select = "document.dispatchEvent(new CustomEvent('quaver-layer', {detail: Math.floor(cb_obj.y)}))"
    heat.js_on_event(Tap, CustomJS(code=select))
    script, divs = components((heat, *bars))
    return script, divs


def _histogram() -> tuple[figure, list[BoxAnnotation]]:
    """Return an empty histogram, and the boxes of its format's normal and subnormal numbers."""
    plot = figure(
        height=190, sizing_mode="stretch_width", toolbar_location=None, tools="", x_range=(-20, 10), visible=False
    )
    plot.title.text_font_size = "12px"
    plot.yaxis.axis_label, plot.xaxis.axis_label = "share", "log2(|x| / scale)"
    plot.grid.visible = False
    boxes = [
        BoxAnnotation(left=0, right=0, fill_color=c, fill_alpha=0.18, line_alpha=0, level="underlay")
        for c in ("green", "orange")
    ]
    for box in boxes:
        plot.add_layout(box)
    source = ColumnDataSource({"left": [], "right": [], "top": []}, name="bars")
    plot.quad(left="left", right="right", top="top", bottom=0, source=source, fill_color="#3b7dd8", line_width=0)
    plot.y_range.start = 0
    return plot, boxes


def _base64(values: np.ndarray) -> str:
    largest = np.finfo(np.float16).max
    return base64.b64encode(values.clip(-largest, largest).astype("<f2").tobytes()).decode()


# ---- text ----


def _steps_text(table: ReportTable) -> str:
    text = f"{table.sampled} sampled step{'s' * (table.sampled > 1)}, {len(table.layers)} layers"
    return text + (f"; {len(table.steps)} steps are shown" if len(table.steps) < table.sampled else "")


def _flags(table: ReportTable) -> str:
    """Return the flagged tensors of the last sampled step as a list."""
    flagged = [row for row in table.last if row["flags"]]
    lines = [
        f"<li><b>{escape(_layer(row))}</b>, {escape(row['gemm'])}, {escape(row['tensor'])}: "
        f"{escape(', '.join(row['flags']))}</li>"
        for row in flagged[:FLAGS]
    ]
    text = f'<ul class="flags">{"".join(lines)}</ul>' if lines else "<p>No tensor of this step is flagged.</p>"
    if len(flagged) > FLAGS:
        text += f"<p>{len(flagged) - FLAGS} more are in the table below.</p>"
    if before := table.flagged_before:
        text += f"<p>Earlier steps with flagged tensors: {', '.join(map(str, before[-20:]))}.</p>"
    return text


def _layer(row: Mapping[str, Any]) -> str:
    return row["layer"] if row["expert"] is None else f"{row['layer']}[{row['expert']}]"


def _rows(rows: Iterable[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        shares = [(row.get(name), "{:.2%}") for name in ("error", "flushed", "saturated")]
        texts = (_layer(row), row["gemm"], row["tensor"], row.get("format", ""))
        numbers = [(row["snr"], "{:.1f}"), *shares, (row["nonfinite"], "{}")]
        cells = [f"<td>{escape(text)}</td>" for text in texts]
        cells += [
            "<td></td>" if value is None else f'<td class="number" data-value="{value}">{how.format(value)}</td>'
            for value, how in numbers
        ]
        lines.append(f'<tr data-layer="{escape(row["layer"])}">{"".join(cells)}')
        lines.append(f"<td>{escape(', '.join(row['flags']))}</td></tr>\n")
    head = "".join(f"<th><button>{name}</button></th>" for name in HEADER)
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"


def _rules(rules: Mapping[str, Any]) -> str:
    """Return the table of `what_if` and its rules."""
    header, *rows = rules["table"]
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"<pre>qt.convert(model, {escape(rules['code'])})</pre><p>{escape(rules['note'])}</p>"
    )


# ---- page ----
# The content security policy forbids to load anything from elsewhere. Bokeh compiles callbacks by new Function.

HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data: blob:;
 style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'">
<title>{title}</title><style>{css}</style></head>
"""

BODY = """<body><header><h1>{title}</h1><button id="theme">dark / light</button></header>
<p>{steps}</p>
<h2>Flagged in step {last}</h2>{flags}
<h2>Layers and steps</h2>
<div class="menus"><label>statistic <select id="statistic"></select></label>
<label>GEMM <select id="gemm"></select></label><label>tensor <select id="tensor"></select></label></div>
<p id="worst"></p>{heat}
<p>Click on a layer, here or in the table, for its histograms.</p>
<h2 id="layer">Histograms</h2>
<p id="legend">Step {last}: nonzero values by |x| / scale, as the format stores it. Green: normal numbers; orange:
subnormal ones; left of both: stored as zero, or as the smallest number; right: saturated.</p>
<p id="none" hidden>This layer has no operand in the last sampled step.</p>
<div class="bars">{bars}</div>
<h2>Tensors of step {last}, the worst first</h2>
<div class="scroll tall"><table id="tensors">{rows}</table></div>
<h2>Recommended rules</h2>{rules}
<h2>Environment</h2>{environment}
"""

CSS = """
:root { color-scheme: light; --text: #1c1c1e; --muted: #5b5f66; --line: #d5d8dd; --back: #ffffff; --head: #f1f3f5;
  --mark: #dce9ff; --bad: #b3261e }
:root[data-theme=dark] { color-scheme: dark; --text: #e6e6e8; --muted: #a3a8b0; --line: #3a3d42; --back: #17181a;
  --head: #24262a; --mark: #1f3657; --bad: #ff8a80 }
body { font: 14px/1.45 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1200px;
  margin: 0 auto; padding: 12px 16px 40px; overflow-wrap: anywhere }
header { display: flex; justify-content: space-between; align-items: center; gap: 12px }
h1 { font-size: 20px; margin: 4px 0 } h2 { font-size: 16px; margin: 26px 0 8px }
h3 { font-size: 13px; margin: 10px 0 4px }
p { margin: 6px 0; color: var(--muted) } .flags b { color: var(--bad) } .flags { padding-left: 20px; margin: 6px 0 }
button, select { font: inherit; color: inherit; background: var(--head); border: 1px solid var(--line);
  border-radius: 4px; padding: 2px 8px; white-space: nowrap }
.menus { display: flex; flex-wrap: wrap; gap: 8px 16px } label { white-space: nowrap }
.bars { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); gap: 8px }
.scroll { overflow: auto } .tall { max-height: 480px }
table { border-collapse: collapse; white-space: nowrap; min-width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: 3px 10px 3px 0; text-align: left; border-bottom: 1px solid var(--line) }
thead { position: sticky; top: 0; background: var(--head) } th button { border: 0; padding: 0; font-weight: 600 }
.number { text-align: right } tbody tr { cursor: pointer } tr.chosen { background: var(--mark) }
pre { background: var(--head); padding: 8px 10px; overflow: auto; margin: 6px 0; border-radius: 4px }
"""

SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent)
const find = id => document.getElementById(id), rows = data.layers.length, columns = data.steps.length
const menus = ["gemm", "tensor", "statistic"].map(find), [gemm, tensor, statistic] = menus

function fill(menu, names, title = name => name) {
  const before = menu.value
  menu.replaceChildren(...names.map(name => new Option(title(name), name)))
  if (names.includes(before)) menu.value = before
}

function decode(text) {
  const view = new DataView(Uint8Array.from(atob(text), c => c.charCodeAt(0)).buffer)
  return Float32Array.from({length: view.byteLength / 2}, (_, i) => {
    const bits = view.getUint16(2 * i, true), exponent = (bits >> 10) & 31, fraction = (bits & 1023) / 1024
    const size = exponent === 31 ? NaN : exponent ? (1 + fraction) * 2 ** (exponent - 15) : fraction * 2 ** -14
    return bits >> 15 ? -size : size
  })
}

function draw() {
  fill(tensor, Object.keys(data.values[gemm.value]))
  const own = data.values[gemm.value][tensor.value]
  fill(statistic, Object.keys(data.statistics).filter(name => name in own), name => data.statistics[name])
  const values = statistic.value ? decode(own[statistic.value]) : new Float32Array(rows * columns).fill(NaN)
  source.data.image[0].set(values)
  let low = Infinity, high = -Infinity, worst = -1
  const smaller = statistic.value === "snr"
  values.forEach((value, i) => {
    if (Number.isNaN(value)) return
    if (worst < 0 || (smaller ? value < values[worst] : value > values[worst])) worst = i
    low = Math.min(low, value)
    high = Math.max(high, value)
  })
  if (["error", "flushed", "saturated", "nonfinite"].includes(statistic.value)) low = 0
  mapper.setv({low, high: high > low ? high : low + 1, palette: smaller ? [...palette].reverse() : palette})
  source.change.emit()
  find("worst").textContent = worst < 0 ? "No layer has a value." : `${data.statistics[statistic.value]}, ` +
    `${smaller ? "lowest" : "highest"}: ${Number(values[worst].toPrecision(3))} of ` +
    `${data.layers[Math.floor(worst / columns)]} in step ${data.steps[worst % columns]}. Grey: no value, or exact.`
}

function choose(layer) {
  const own = data.histograms[layer] ?? []
  find("layer").textContent = `Histograms of ${layer}`
  find("none").hidden = own.length > 0
  find("legend").hidden = own.length === 0
  bars.forEach((plot, i) => {
    plot.visible = i < own.length
    if (i >= own.length) return
    const h = own[i], left = h.shares.map((_, j) => h.start + j), [normal, subnormal] = boxes[i]
    plot.title.text = `${h.title}: ${h.format}`
    plot.renderers[0].data_source.data = {left, right: left.map(x => x + 1), top: h.shares}
    plot.x_range.setv({start: Math.min(h.start, h.subnormal) - 1,
                       end: Math.max(h.start + h.shares.length, h.largest + 1) + 1})
    normal.setv({left: h.normal, right: h.largest + 1})
    subnormal.setv({left: h.subnormal, right: h.normal})
  })
  document.querySelectorAll("#tensors tbody tr").forEach(row =>
    row.classList.toggle("chosen", row.dataset.layer === layer))
}

function sort(column, button) {
  const body = document.querySelector("#tensors tbody"), down = button.dataset.order !== "down"
  document.querySelectorAll("#tensors th button").forEach(each => delete each.dataset.order)
  button.dataset.order = down ? "down" : "up"
  const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent
  const compare = (a, b) => a === "" || b === "" ? (a === "") - (b === "") :
    (down ? 1 : -1) * (isNaN(a) || isNaN(b) ? a.localeCompare(b, undefined, {numeric: true}) : b - a)
  body.replaceChildren(...[...body.rows].sort((a, b) => compare(key(a), key(b))))
}

function colour(theme) {
  document.documentElement.dataset.theme = theme
  const style = getComputedStyle(document.documentElement)
  const [text, line, back] = ["--text", "--line", "--back"].map(name => style.getPropertyValue(name))
  for (const plot of [heat, ...bars]) {
    plot.setv({background_fill_color: back, border_fill_color: back, outline_line_color: plot === heat ? null : line})
    if (plot.title) plot.title.text_color = text
    for (const axis of [...plot.left, ...plot.below])
      axis.setv({axis_label_text_color: text, major_label_text_color: text, axis_line_color: line,
                 major_tick_line_color: line, minor_tick_line_color: null})
  }
  color_bar.setv({major_label_text_color: text, title_text_color: text})
}

const preferred = matchMedia("(prefers-color-scheme: dark)")
preferred.addEventListener("change", () => colour(preferred.matches ? "dark" : "light"))
find("theme").onclick = () => colour(document.documentElement.dataset.theme === "dark" ? "light" : "dark")
menus.forEach(menu => menu.onchange = draw)
document.addEventListener("quaver-layer", event => {
  if (!(event.detail in data.layers)) return
  choose(data.layers[event.detail])
  find("layer").scrollIntoView({behavior: "smooth", block: "nearest"})
})
find("tensors").onclick = event => {
  const button = event.target.closest("th button"), row = event.target.closest("tbody tr")
  if (button) sort(button.parentNode.cellIndex, button)
  else if (row) choose(row.dataset.layer)
}
fill(gemm, Object.keys(data.values))
fill(tensor, Object.keys(data.values[gemm.value]))
if ("output" in data.values[gemm.value]) tensor.value = "output"
colour(preferred.matches ? "dark" : "light")
draw()
choose(document.querySelector("#tensors tbody tr").dataset.layer)
document.documentElement.dataset.drawn = "yes"
"""

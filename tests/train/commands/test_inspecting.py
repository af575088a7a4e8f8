"""`quaver inspect`: the report of a run and of a Hugging Face model, drawn by Chromium where it is installed."""

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from quaver.train import frameworks
from quaver.train.commands.cli import app

GEMMS = {
    "fprop": ("input", "weight", "output"),
    "dgrad": ("grad_output", "weight", "grad_input"),
    "wgrad": ("grad_output", "input", "grad_weight"),
}
#: Layer, and what a report must escape.
FAULTY = "model.layers.1.</script><b>"


def quaver(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def row_of(step: int, layer: str, gemm: str, tensor: str, **others: Any) -> dict[str, Any]:
    """A row as `inspect` writes it."""
    row = {"step": step, "layer": layer, "gemm": gemm, "tensor": tensor, "expert": None, "nonzero_rows": 64}
    row |= {"elements": 4096, "snr": 25.0 + step / 100, "error": 0.003, "nonfinite": 0, "nonfinite_ranks": []}
    if tensor == GEMMS[gemm][2]:
        return row | {"flags": [], **others}
    row |= {"format": "e4m3[1x32]:e8m0", "flushed": 0.01, "saturated": 0.0, "amax": 0.25, "dynamic_range": 20.5}
    row |= {"scale_spread": 3.0, "histogram_start": -3, "histogram": [10, 100, 1000, 3000]}
    row |= {"outlier_row": 3, "outlier_row_ratio": 2.0, "outlier_column": 5, "outlier_column_ratio": 3.0, "flags": []}
    return row | others


def write_run(folder: Path, layers: int, steps: int) -> list[str]:
    """Write the rows of a run whose second layer flushes its input in the last step; returns the layers."""
    names = [f"model.layers.{layer}.mlp.up_proj" for layer in range(layers)]
    names[1] = FAULTY
    fault = {"flushed": 0.98, "error": 0.75, "snr": 1.5, "flags": ["98% flushed to zero", "75% lost"]}
    keys = [(gemm, tensor) for gemm, tensors in GEMMS.items() for tensor in tensors]
    with (folder / "inspect.jsonl").open("w", encoding="utf-8") as file:
        for step in range(0, 50 * steps, 50):
            for name in names:
                for key in keys:
                    faulty = (step, name, *key) == (50 * (steps - 1), FAULTY, "fprop", "input")
                    file.write(json.dumps(row_of(step, name, *key, **(fault if faulty else {}))) + "\n")
        file.write('{"step": 999, "lay')  # the run was killed
    return names


# ---- the report of a run ----

#: Script that uses the page as a reader does, and writes into its body what is seen.
READER = """
function canvases(root) {
  return [...root.querySelectorAll("*")].flatMap(e => [
    ...(e.localName === "canvas" ? [e] : []), ...(e.shadowRoot ? canvases(e.shadowRoot) : [])])
}
function colours() {
  const found = canvases(document).filter(c => c.width * c.height > 0).map(c => {
    const words = new Uint32Array(c.getContext("2d").getImageData(0, 0, c.width, c.height).data.buffer)
    return new Set(words).size
  })
  return found.filter(count => count > 20).length
}
const find = id => document.getElementById(id), seen = {}
function set(id, value) {
  find(id).value = value
  find(id).dispatchEvent(new Event("change"))
}
const wait = () => new Promise(done => setTimeout(done, 500))
async function read() {
  if (document.documentElement.dataset.drawn !== "yes") return setTimeout(read, 50)
  await wait()
  seen.canvases = colours()
  seen.first = find("statistic").value
  set("statistic", "snr")
  seen.snr = find("worst").textContent
  seen.chosen = find("layer").textContent
  set("tensor", "input")
  set("statistic", "error")
  seen.error = find("worst").textContent
  set("statistic", "amax")
  seen.amax = find("worst").textContent
  set("tensor", "output")
  seen.statistics = [...find("statistic").options].map(option => option.value)
  find("tensors").tBodies[0].lastElementChild.lastElementChild.click()
  seen.clicked = find("layer").textContent
  find("tensors").tHead.querySelectorAll("button")[4].click()
  seen.sorted = [...find("tensors").tBodies[0].rows].map(row => row.cells[4].textContent)
  const theme = document.documentElement.dataset.theme
  find("theme").click()
  seen.themes = [theme, document.documentElement.dataset.theme]
  await wait()
  seen.after = colours()
  seen.width = document.documentElement.scrollWidth
  document.body.textContent = JSON.stringify(seen)
}
read()
"""


def browse(report: Path, *options: str) -> dict[str, Any]:
    """Open a report in Chromium, run `READER`, and return what it saw; no error may be logged."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    page = report.with_name("read.html")
    page.write_text(report.read_text(encoding="utf-8").replace("</body>", f"<script>{READER}</script></body>"))
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
    command += [f"--user-data-dir={report.parent / 'chromium'}", "--enable-logging=stderr", "--dump-dom", *options]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    # Chromium advises another kind of canvas, because `READER` reads the pixels.
    expected = re.compile(r"\[bokeh [\d.]+\] (setting log level|document idle)|Canvas2D: Multiple readback")
    logged = [line for line in done.stderr.splitlines() if "CONSOLE" in line and not expected.search(line)]
    assert not logged, logged
    body = re.search(r"<body[^>]*>(.*)</body>", done.stdout, re.DOTALL)
    assert body is not None
    return json.loads(unescape(body[1]))


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_a_browser_draws_the_report(tmp_path: Path, theme: str) -> None:
    write_run(tmp_path, layers=5, steps=8)
    assert quaver(tmp_path).exit_code == 0
    seen = browse(
        tmp_path / "report.html", "--window-size=500,900", f"--blink-settings=preferredColorScheme={theme != 'dark':d}"
    )
    # The heat map and the six histograms of the worst layer.
    assert seen["canvases"] == 7 and seen["after"] == 7
    assert seen["first"] == "error" and seen["snr"].startswith(
        "SNR in dB, lowest: 25 of model.layers.0.mlp.up_proj in step 0"
    )
    assert seen["chosen"] == f"Histograms of {FAULTY}"
    assert seen["error"].startswith(f"error, highest: 0.75 of {FAULTY} in step 350")
    assert seen["amax"].startswith("log2 of amax, highest: -2 of ")
    assert seen["statistics"] == ["error", "snr", "nonfinite"]
    assert seen["clicked"] == "Histograms of model.layers.4.mlp.up_proj"
    assert seen["sorted"] == ["28.5"] * 44 + ["1.5"]
    assert seen["themes"] == [theme, "light" if theme == "dark" else "dark"]
    assert seen["width"] <= 500


def test_the_report_loads_nothing_and_needs_no_framework(tmp_path: Path) -> None:
    write_run(tmp_path, layers=3, steps=2)
    (tmp_path / "config.toml").write_text('recipe = "mxfp8"\n')
    code = f"""
import sys
from quaver.train.commands.cli import app
app(["inspect", {str(tmp_path)!r}], standalone_mode=False)
print([name for name in ("torch", "jax") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page and not re.search(
        r"""(src|href)=["']|@import|<link""", page.split("<script")[0]
    )
    assert 'recipe = "mxfp8"' in unescape(page) and "98% flushed to zero" in page and "qt.what_if" in page
    assert (tmp_path / "inspect.png").stat().st_size > 10_000


def test_a_hundred_layers_and_steps_are_five_megabytes_at_most(tmp_path: Path) -> None:
    write_run(tmp_path, layers=100, steps=120)
    result = quaver(tmp_path, "--out", tmp_path / "shown")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "shown" / "report.html").read_text(encoding="utf-8")
    assert len(page) <= 5_000_000 and "120 sampled steps, 100 layers; 100 steps are shown" in page


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (None, [], "there is no "),
        ([], [], "has no rows: no step was sampled yet"),
        (['{"step": 1}'], [], "line 1 of .* is no row of inspect; restore or delete it"),
        (["[]"], [], "line 1 of .* is no row of inspect"),
        ([json.dumps(row_of(0, "a", "fprop", "output"))], ["--statistic", "flushd"], "did you mean 'flushed'"),
        (
            [json.dumps(row_of(0, "a", "fprop", "output"))],
            ["--statistic", "flushed"],
            "no tensor has a value of flushed",
        ),
        ([], ["--text", "a.txt"], "give RUN_DIR, the folder of one run, or --model"),
    ],
)
def test_an_unreadable_run_is_one_error(
    tmp_path: Path, lines: list[str] | None, options: list[str], message: str
) -> None:
    if lines is not None:
        (tmp_path / "inspect.jsonl").write_text("".join(line + "\n" for line in lines))
    result = quaver(tmp_path, *options)
    assert result.exit_code == 1 and re.search(message, result.stderr) and result.stderr.count("\n") == 1, result.output
    assert not (tmp_path / "report.html").exists()


def test_missing_bokeh_is_an_error_with_its_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, layers=2, steps=1)
    monkeypatch.setattr(frameworks, "find_spec", lambda name: None)
    result = quaver(tmp_path)
    assert result.exit_code == 1 and "pip install 'quaver[inspect]'" in result.stderr


# ---- a Hugging Face model ----


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with random weights, and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("default")
def test_a_hugging_face_model_has_a_report_with_rules(llama: Path, tmp_path: Path) -> None:
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for text in texts:
        text.write_text("The quick brown fox jumps over the lazy dog. " * 4)
    options = ["--recipe", "mxfp8,nvfp4", "--gpu", "b200", "--widen", 64, "--tokens", 200, "--device", "cpu"]
    command = ["--model", f"hf:{llama}", "--text", *texts, *options, "--out", tmp_path / "out"]
    result = quaver(*command)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "out" / "inspect.jsonl").read_text().splitlines()]
    assert {row["format"] for row in rows if "format" in row} == {"e4m3[1x32]:e8m0"}
    assert max(row["nonzero_rows"] for row in rows if row["tensor"] == "input") == 192  # three sequences of 64
    code = next(line for line in result.stdout.splitlines() if line.startswith("rules = {"))
    page = unescape((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    assert f"qt.convert(model, {code.removeprefix('rules = ')})" in page and "predicted KL" in page
    assert "192 tokens, inspected under mxfp8" in page
    # What was converted and reached, and what runs it.
    assert "converted 14 to mxfp8" in page and "every converted layer was called" in page
    assert page.count("fprop GEMM") == 1  # all layers alike
    # A second report does not overwrite the rows of the first.
    again = quaver(*command)
    assert again.exit_code == 1 and "has statistics of another run" in again.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "gpt2"], "--model gpt2 is no model; give hf:PATH"),
        (["--model", "hf:missing", "--text", "a.txt"], "--model hf:missing is no model"),
        (["--model", "hf:LLAMA"], "--model needs --text"),
        (["--model", "hf:LLAMA", "--text", "missing.txt"], "missing.txt"),
        (["--model", "hf:LLAMA", "--text", "EMPTY"], "--text has 0 tokens"),
        (["--model", "hf:LLAMA", "--text", "EMPTY", "--tokens", "1"], "--tokens is 1; give 2 or more"),
        (["--model", "hf:LLAMA", "--text", "EMPTY", "--recipe", "mxpf8"], "did you mean 'mxfp8'"),
        (["--model", "hf:LLAMA", "--text", "EMPTY", "--gpu", "h1000"], "h1000"),
    ],
)
@pytest.mark.filterwarnings("default")
def test_a_bad_option_of_a_model_is_one_error(llama: Path, tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "empty.txt").write_text("")
    given = [o.replace("LLAMA", str(llama)).replace("EMPTY", str(tmp_path / "empty.txt")) for o in options]
    result = quaver(*given, "--out", tmp_path / "out")
    assert result.exit_code == 1 and message in result.stderr and not (tmp_path / "out").exists(), result.output


def test_rules_that_cannot_be_read_are_one_error(tmp_path: Path) -> None:
    write_run(tmp_path, layers=2, steps=1)
    for text in ("{", "[]", '{"table": [], "code": "{}", "note": ""}'):
        (tmp_path / "what_if.json").write_text(text)
        result = quaver(tmp_path)
        assert result.exit_code == 1 and "what_if.json is not what WhatIf.save writes" in result.stderr, result.output

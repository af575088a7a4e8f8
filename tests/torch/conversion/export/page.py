"""What each format holds of each recipe, of a small Llama trained under each: tables of docs/guides/serving.md.

`python -m tests.torch.conversion.export.page` writes them, in one to two minutes of a core.
"""

import functools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quaver.torch as qt
from quaver import recipes
from quaver.torch.conversion.export.export import Exported
from tests.torch.conversion.export.served import HELD

PAGE = Path(__file__).parents[4] / "docs" / "guides" / "serving.md"
BEGIN, END = "<!-- python -m tests.torch.conversion.export.page writes from here -->", "<!-- to here -->"
STEPS, VOCABULARY = 60, 256


def text() -> Tensor:
    """Bytes of Python's own source, int64 [rows, 64]."""
    data = Path(functools.__file__).read_bytes()
    return torch.tensor(list(data[: len(data) // 64 * 64])).view(-1, 64)


def trained(recipe: str) -> Any:
    """A Llama of transformers in bf16, two layers of 256 features, some steps old."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    qt.convert(model, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = text()[:-4]
    for step in range(STEPS):
        batch = rows[torch.randint(len(rows), (4,), generator=torch.Generator().manual_seed(step))]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def exported() -> Iterator[tuple[str, str, Exported | None]]:
    """Every recipe in every format, None where it is refused."""
    for recipe in recipes.RECIPES:
        if recipe == "bf16":
            continue
        model, ids = trained(recipe), text()[-4:]
        for format in HELD:
            if recipe not in HELD[format]:
                yield recipe, format, None
                continue
            with tempfile.TemporaryDirectory() as folder:
                yield recipe, format, qt.export(model, Path(folder) / "out", format=format, check=ids, calibrate=ids)
        print(recipe, file=sys.stderr)


def row(recipe: str, format: str, result: Exported | None) -> str:
    if result is None:
        can = [f"`{other}`" for other in HELD if recipe in HELD[other]]
        return f"| `{recipe}` | `{format}` | not supported; use {', '.join(can)} | | | | |"
    assert result.check is not None
    (name,) = {name for name, _ in result.layers}
    check, share = result.check, result.bytes / result.bytes_before
    kl = [f"{part.mean:.1e}" if part.mean else "0" for part in (check.weights, check.inputs, check.high_inputs)]
    return f"| `{recipe}` | `{format}` | {name}: {check.reads} | {share:.1%} | {' | '.join(kl)} |"


HEADER = (
    "| recipe | format | stored as, inputs | bytes of bf16's | KL, weights | KL, readers' inputs | KL, 16-bit inputs |"
)


def written(page: str, rows: list[str]) -> str:
    """The page with these rows."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([before + BEGIN, "", HEADER, "|---|---|---|---:|---:|---:|---:|", *rows, "", END + after])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), [row(*each) for each in exported()]))

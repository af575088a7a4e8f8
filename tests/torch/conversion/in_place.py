"""Blocks in place in each family: `python -m tests.torch.conversion.in_place` writes its table."""

import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor

import quaver.torch as qt
from tests.torch.conversion.coverage import PAGE
from tests.torch.conversion.families import tiny, tokens

BEGIN, END = "<!-- python -m tests.torch.conversion.in_place writes from here -->", "<!-- to here, blocks -->"
HEADER = ("family", "computed by blocks", "computed by the module itself")
#: Families whose equality is tested, and which the table names.
FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "gpt_neox", "falcon", "gpt2", "mpt"),
    *("olmo2", "exaone4", "deepseek_v3", "llama4_text", "gpt_oss", "bert", "t5"),
    *("phi3", "cohere", "modernbert", "granite"),
    *("mamba2", "bamba", "nemotron_h", "zamba2"),
)
#: The same noise and the same random choices aside, outputs are compared without dropout.
DROPOUT = dict.fromkeys(
    (
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"),
    ),
    0.0,
)


def model_of(family: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A tiny model without dropout and with norm parameters different from their initial values."""
    config = type(tiny(family).config)()
    model = tiny(family, **{name: value for name, value in DROPOUT.items() if hasattr(config, name)}, **more)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
    return model.to(dtype).train()


def step(model: Any, padded: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Logits, loss and all gradients of one step; padded: the first tokens of one sample are padding."""
    x = tokens(seed)
    mask = torch.ones_like(x)
    if padded:
        mask[1, -4:] = 0
    model.zero_grad()
    outputs = model(input_ids=x, attention_mask=mask, labels=x)
    outputs.loss.backward()
    results = {"loss": outputs.loss.detach()}
    if outputs.logits is not None:
        results["logits"] = outputs.logits.detach()
    return results | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@functools.cache
def converted(family: str) -> tuple[Any, qt.Report]:
    """A model with blocks in place, in float32, and the report."""
    model = model_of(family)
    return model, qt.convert(model, "bf16", blocks=True)


def line(family: str) -> str:
    """The row of one family."""
    rows = converted(family)[1].blocks
    done = Counter(f"{row.kind}: {row.block}" for row in rows if row.block)
    left = Counter(f"{row.kind}: {row.why}" for row in rows if not row.block)
    cells = (family, *("; ".join(f"{n} {what}" for what, n in sorted(part.items())) for part in (done, left)))
    return f"| {' | '.join(cells)} |"


def written(page: str) -> str:
    """The page with the table of now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = [f"| {' | '.join(HEADER)} |", "|---|---|---|", *map(line, sorted(FAMILIES))]
    return "\n".join([before + BEGIN, "", *table, "", END + after])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

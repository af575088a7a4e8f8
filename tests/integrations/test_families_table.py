"""The table of five families by Trainer: runs of one seed see the same weights and batches."""

import pytest
import torch
from rich.console import Console
from torch import Tensor

from quaver.torch.linear.linear import Quantizable

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-integrations")
pytestmark = pytest.mark.filterwarnings("default")

from benchmarks.acceptance import families  # noqa: E402


def weights(family: str, run: str) -> list[Tensor]:
    return [p.detach() for p in families.model_of(family, 3, run).parameters()]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_models_of_a_seed_differ_by_the_nudge_or_the_recipe_alone(family: str) -> None:
    base = weights(family, families.BASELINE)
    for other, bound in (("mxfp8", 0.0), (families.NULL, 1.01 * families.NUDGE)):
        difference = max(float((a - b).abs().max()) for a, b in zip(base, weights(family, other), strict=True))
        assert difference <= bound and (difference > 0) == (bound > 0)
    model = families.model_of(family, 3, "mxfp8")
    assert sum(isinstance(part, Quantizable) for part in model.modules()) >= 8


def test_a_run_is_paired_and_the_table_shows_its_differences() -> None:
    train, held_out = families.text()
    losses = families.measured(["gpt2"], ("tensorwise",), 4, 1, lambda line: None)
    base = losses["gpt2", families.BASELINE]
    assert base == [families.loss_of("gpt2", 0, families.BASELINE, 4, train, held_out)]
    (row,) = families.rows(losses, ("tensorwise",))
    differences = [losses["gpt2", run][0] - base[0] for run in (families.NULL, "tensorwise")]
    assert 0 < abs(differences[0]) < 0.01 and 0 < abs(differences[1]) < 0.1
    assert row[0] == "gpt2" and [cell.split()[0] for cell in row[2:]] == [f"{d:+.4f}" for d in differences]
    quantized = losses["gpt2", "tensorwise"]
    two = {("gpt2", "bf16"): [1.0, 2.0], ("gpt2", "null"): [1.0, 2.25]} | {("t5", "bf16"): [1.0], ("t5", "null"): [0.5]}
    assert families.farthest(two, ()) == "Largest difference from bf16 of any seed: null 0.5000 (t5)."
    assert f"tensorwise {abs(quantized[0] - base[0]):.4f} (gpt2)." in families.farthest(losses, ("tensorwise",))
    page = families.PAGE.read_text(encoding="utf-8")
    assert page.count(families.BEGIN) == page.count(families.END) == 1


def test_of_an_encoder_and_decoder_the_second_half_follows_from_the_first() -> None:
    text = torch.arange(200, dtype=torch.uint8).numpy()
    row = families.Windows(text, 3, 0, halves=True)[1]
    assert torch.equal(row["labels"], row["input_ids"] + families.SEQUENCE // 2)


def test_an_unknown_family_gives_a_clear_error() -> None:
    with pytest.raises(ValueError, match="no family 'bert'; there are t5, mpt, gpt2, llama, falcon"):
        families.run(1, 1, ["bert"], False, Console(quiet=True))

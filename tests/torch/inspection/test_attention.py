"""`qt.inspect` of quantized attention: operands and results of each call, against attention in high precision."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver.torch.nn.attention import fp8

RECIPES = [f"{name}(attention=True)" for name in ("tensorwise", "rowwise", "blockwise", "delayed", "mxfp8")]
RESULTS = ("output", "grad_q", "grad_k", "grad_v")


class Block(nn.Module):
    def __init__(self, recipe: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = qt.MultiheadAttention(64, 4, groups=2, recipe=recipe, **options)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        y: Tensor = self.attention(x, **options)
        return y


def rows_of(model: nn.Module, run: Any) -> dict[str, dict[str, Any]]:
    """Run a function in a sampled step, and return the rows of attention by tensor."""
    with qt.inspect(model, every=1) as inspector:
        run()
        inspector.step()
    rows = {row["tensor"]: row for row in inspector.rows if row["gemm"] == "attention"}
    assert {row["layer"] for row in rows.values()} <= {"attention.core"}
    return rows


def x_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("recipe", RECIPES)
def test_operands_and_results_have_rows(recipe: str) -> None:
    model, x = Block(recipe, mask_type="causal"), x_of(2, 32, 64)
    rows = rows_of(model, lambda: model(x).square().mean().backward())
    assert list(rows) == ["q", "k", "v", "output", "grad_output", "grad_v", "grad_k", "grad_q"]
    for name, row in rows.items():
        assert 0 < row["error"] < 0.1 and not row["flags"], name
        assert row["elements"] == 2 * 32 * (32 if name[-1] in "kv" else 64)
    assert rows["q"]["format"] and rows["q"]["flushed"] == 0 and "amax" not in rows["output"]


@pytest.mark.parametrize(
    "options",
    [
        {"mask_type": "causal", "window": (5, 0), "soft_cap": 3.0, "scale": 0.7},
        {"alibi": True, "sinks": "learnable", "layout": "sbhd"},
        {"mask_type": "causal", "chunk": 8, "qk_norm": "RMSNorm"},
        {"layout": "thd", "mask_type": "causal", "cu_seqlens": torch.tensor([0, 20, 64], dtype=torch.int32)},
        {"mask_type": "padding", "mask": torch.arange(32)[None] >= torch.tensor([[32], [20]])},
        {"bias": torch.linspace(-1, 1, 32 * 32).view(1, 1, 32, 32), "autocast": True},
    ],
)
def test_the_exact_results_are_of_the_same_call(options: dict[str, Any]) -> None:
    options = dict(options)
    call = {name: options.pop(name) for name in ("cu_seqlens", "mask", "bias") if name in options}
    casts = options.pop("autocast", False)
    model = Block("mxfp8(attention=True)", **options)
    x = x_of(64, 64) if options.get("layout") == "thd" else x_of(2, 32, 64)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            y = model(x, **call)
        y.float().square().mean().backward()

    rows = rows_of(model, run)
    # With other options the values would differ by far more.
    assert all(20 < rows[name]["snr"] < 50 for name in RESULTS), {name: rows[name]["snr"] for name in RESULTS}


def test_a_large_key_is_named() -> None:
    model, x = Block("tensorwise(attention=True)", mask_type="none"), x_of(1, 32, 64)

    def grow(_: nn.Module, __: Any, k: Tensor) -> Tensor:
        factors = torch.ones(32, 1)
        factors[7] = 1e6
        return k * factors

    model.attention.qkv_proj.register_forward_hook(grow)
    row = rows_of(model, lambda: model(x))["k"]
    assert row["outlier_row"] == 7 and row["flushed"] > 0.9 and any("row 7" in flag for flag in row["flags"])


@pytest.mark.parametrize("wrong", ["output", "grad_k"])
def test_a_wrong_result_is_named_alone(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The operators are private; their faults cannot be planted from outside.
    name, place = ("FORWARD", 0) if wrong == "output" else ("BACKWARD", 1)
    operator = getattr(fp8, name)

    def doubled(*arguments: Any) -> list[Tensor]:
        results: list[Tensor] = operator(*arguments)
        results[place] = results[place] * 2
        return results

    monkeypatch.setattr(fp8, name, doubled)
    model, x = Block("mxfp8(attention=True)"), x_of(2, 32, 64)
    rows = rows_of(model, lambda: model(x).sum().backward())
    assert {tensor for tensor, row in rows.items() if row["flags"]} == {wrong}


@pytest.mark.parametrize("how", ["quaver", "torch", "reentrant"])
def test_a_recomputed_call_is_counted_once_and_micro_batches_are_pooled(how: str) -> None:
    model, x = Block("tensorwise(attention=True)", mask_type="causal"), x_of(2, 32, 64)

    def run() -> None:
        for _ in range(2):
            if how == "quaver":
                y = qt.checkpoint(model, x)
            else:
                y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=how == "reentrant")
            y.square().mean().backward()

    rows = rows_of(model, run)
    assert len(rows) == 8
    assert all(row["elements"] == 2 * 2 * 32 * (32 if name[-1] in "kv" else 64) for name, row in rows.items())


def test_dropout_leaves_operands_and_draws_no_other_numbers() -> None:
    model, x = Block("mxfp8(attention=True)", dropout=0.5), x_of(2, 32, 64)
    outputs = []

    def run() -> None:
        torch.manual_seed(3)
        y = model(x)
        y.sum().backward()
        outputs.extend((y, torch.rand(4)))

    rows = rows_of(model, run)
    run()
    assert set(rows) == {"q", "k", "v", "grad_output"}
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])


@pytest.mark.parametrize("recompute", [None, "full"])
def test_no_bit_changes(recompute: str | None) -> None:
    def gradients(sampled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = qt.TransformerLayer(64, 4, 96, groups=2, mask_type="causal", recompute=recompute, rope=None)
        qt.convert(layer, "delayed(history=4, attention=True)")
        inspector = qt.inspect(layer, every=1 if sampled else 1000, start=0 if sampled else 999)
        with inspector:
            for seed in range(3):
                x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
                y = layer(x)
                y.square().mean().backward()
                inspector.step()
        assert sampled is any(row["gemm"] == "attention" for row in inspector.rows)
        return [y, x.grad, *(p.grad for p in layer.parameters()), *layer.state_dict().values()]

    for plain, sampled in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, sampled)


def test_patterns_select_attention() -> None:
    model, x = Block("tensorwise(attention=True)"), x_of(2, 32, 64)
    for pattern, layers in (("*.core", {"attention.core"}), ("*.o_proj", {"attention.o_proj"})):
        with qt.inspect(model, every=1, layers=pattern) as inspector:
            model(x).sum().backward()
            inspector.step()
        assert {row["layer"] for row in inspector.rows} == layers


def test_transformer_engines_attention_is_measured() -> None:
    import quaver.compat.transformer_engine.pytorch as te

    core = te.DotProductAttention(4, 16, attn_mask_type="causal", attention_dropout=0.0)
    q, k, v = (x_of(32, 2, 4, 16) for _ in range(3))
    model = nn.Sequential(core, qt.Linear(64, 64))
    with qt.inspect(model, every=1) as inspector:
        with qt.autocast("mxfp8(attention=True)"):
            y = model[1](core(q, k, v))
        y.sum().backward()
        inspector.step()
    rows = {row["tensor"]: row["error"] for row in inspector.rows if row["layer"] == "0"}
    assert set(rows) == {"q", "k", "v", "grad_output", *RESULTS} and max(rows.values()) < 0.1

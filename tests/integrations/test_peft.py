"""PEFT with a recipe: LoRA in high precision on top of a base in eight or four bits."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.torch.linear.linear import Linear, Quantizable
from tests.close import assert_bitwise
from tests.torch.conversion.families import tiny, tokens

pytest.importorskip("peft", reason="peft is not installed: make test-integrations")
pytestmark = pytest.mark.filterwarnings("default")

from peft import IA3Config, LoraConfig, PeftModel, get_peft_model  # noqa: E402

from quaver.integrations.peft import REGISTER, LoraOverCodes, over_codes  # noqa: E402

STEPS = 4
RECIPE = recipes.delayed(history=3, algorithm="most_recent")
STORED = ["tensorwise", "mxfp8", "nvfp4"]


def config(**more: Any) -> LoraConfig:
    given: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.0, **more}
    return LoraConfig(**given)


def loss_of(model: Any, i: int) -> Tensor:
    x = tokens(i)
    loss: Tensor = model(input_ids=x, labels=x).loss
    return loss


def train(model: Any, steps: int = STEPS, micro: int = 1) -> list[float]:
    optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2), []
    for i in range(steps):
        for j in range(micro):
            loss = loss_of(model, i * micro + j)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def stored(recipe: str, dtype: torch.dtype = torch.float32) -> Any:
    model = tiny("llama").to(dtype)
    qt.quantize_weights(model, recipe)
    return model


def adapted(model: Any, **more: Any) -> Any:
    torch.manual_seed(1)
    return get_peft_model(model, over_codes(config(**more)))


def adapters(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "lora_" in name]


@pytest.mark.parametrize("before", [True, False], ids=["convert, adapt", "adapt, convert"])
@pytest.mark.parametrize("micro", [1, 2])
def test_lora_trains_the_same_in_both_orders_and_adapters_stay(before: bool, micro: int) -> None:
    """Delayed scaling, with the converted root as a part of the called module and the other way round."""
    runs = []
    for order in (True, before):
        model: Any = tiny("llama")
        if order:
            qt.convert(model, RECIPE)
        torch.manual_seed(1)
        model = get_peft_model(model, config())
        if not order:
            qt.convert(model, RECIPE)
        assert {type(p).__name__ for n, p in model.named_modules() if n.endswith("base_layer")} == {"Linear"}
        assert not any(isinstance(p, Quantizable) for n, p in model.named_modules() if "lora_" in n)
        assert sum(isinstance(p, Quantizable) for p in model.modules()) == 14
        runs.append(train(model, micro=micro))
        layer = next(p for p in model.modules() if isinstance(p, Quantizable))
        assert layer.history[1:, 0].any()
    assert runs[0] == runs[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", STORED)
def test_adapters_over_codes_learn_and_the_codes_stay(recipe: str, dtype: torch.dtype) -> None:
    model = stored(recipe, dtype)
    before = {name: v.clone() for name, v in model.state_dict().items() if not name.endswith(("count", "history"))}
    model = adapted(model)
    assert all(p.dtype is torch.float32 and p.requires_grad for p in adapters(model))
    # A's initial values were never rounded to codes; there are 100 codes in their range.
    assert len(adapters(model)[0].unique()) > 200
    losses = [train(model, 1)[0] for _ in range(1)] + train(model, 12)
    assert losses[-1] < losses[0]
    after = model.get_base_model().state_dict()
    for name, value in before.items():
        layer, _, last = name.rpartition(".")
        after_training = after.get(name, after.get(f"{layer}.base_layer.{last}"))
        assert_bitwise(after_training.view(torch.uint8), value.view(torch.uint8), name)


@pytest.mark.parametrize("recipe", STORED)
def test_files_hold_adapters_alone_and_come_back(recipe: str, tmp_path: Path) -> None:
    model = adapted(stored(recipe))
    train(model)
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
    again = PeftModel.from_pretrained(stored(recipe), tmp_path, config=over_codes(LoraConfig.from_pretrained(tmp_path)))
    with torch.no_grad():
        assert_bitwise(loss_of(again, 7), loss_of(model, 7))
    # With the unquantized base they are the trained adapters.
    plain = PeftModel.from_pretrained(tiny("llama"), tmp_path)
    for a, b in zip(adapters(plain), adapters(model), strict=True):
        assert_bitwise(a.detach(), b.detach())


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("recipe", STORED)
def test_merging_decodes_adds_and_leaves_high_precision(recipe: str, safe: bool) -> None:
    model = adapted(stored(recipe))
    train(model)
    wrapped = {name: part for name, part in model.named_modules() if isinstance(part, LoraOverCodes)}
    assert len(wrapped) == 14
    plain = qt.plain_state_dict(model)
    expected = {}
    for name, part in wrapped.items():
        a, b = part.lora_A["default"].weight, part.lora_B["default"].weight
        expected[name.removeprefix("base_model.model.")] = plain[f"{name}.base_layer.weight"] + b @ a * 2.0
    merged = model.merge_and_unload(safe_merge=safe)
    for name, value in expected.items():
        layer = merged.get_submodule(name)
        assert type(layer) is Linear and layer.weight_spec is None and layer.weight.dtype is torch.float32
        torch.testing.assert_close(layer.weight, value, rtol=1e-6, atol=1e-7)
        assert layer.recipe is None
    assert not any("base_layer" in name or "lora_" in name or "scale" in name for name in merged.state_dict())
    tiny("llama").load_state_dict(qt.plain_state_dict(merged))
    # What then: codes again, if that is wanted.
    assert len(qt.quantize_weights(merged, recipe).layers) == 14


@pytest.mark.parametrize("recipe", STORED)
def test_a_merged_adapter_is_not_rounded_away(recipe: str) -> None:
    """The adapter has a hundredth of the weight's norm, less than the distance between codes. After merging, its effect
    on the outputs is complete; with the recipe, which rounds the sum to codes, 0.4 of it or nothing remains."""
    torch.manual_seed(0)
    x = torch.randn(64, 256)
    model: Any = nn.Sequential(nn.Linear(256, 512, bias=False))
    qt.quantize_weights(model, recipe, head=True)
    with torch.no_grad():
        base = model(x)
        model = get_peft_model(model, over_codes(config(target_modules=["0"], init_lora_weights=False)))
        part = next(p for p in model.modules() if isinstance(p, LoraOverCodes))
        weight = qt.plain_state_dict(model)["base_model.model.0.base_layer.weight"]
        part.lora_B["default"].weight *= 0.01 * weight.norm() / part.get_delta_weight("default").norm()
        effect = model(x) - base
        exact = x @ weight.t()
        merged = model.merge_and_unload()
        assert_kept(merged(x) - exact, effect, 0.999, 1.001)
        with qt.autocast(recipe):
            assert_kept(merged(x) - base, effect, -0.1, 0.5)


def assert_kept(change: Tensor, effect: Tensor, low: float, high: float) -> None:
    """How much of an adapter's effect a change has."""
    fraction = ((change * effect).sum() / (effect * effect).sum()).item()
    assert low < fraction < high, f"{fraction:.3f} of the adapter's effect"


@pytest.mark.parametrize("recipe", STORED)
def test_unmerging_gives_the_very_codes_back(recipe: str) -> None:
    model = adapted(stored(recipe), lora_bias=False)
    train(model)
    torch.manual_seed(2)
    model.add_adapter("other", over_codes(config(init_lora_weights=False, target_modules=["q_proj", "down_proj"])))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        loss = loss_of(model, 7)
    for names in (["default"], ["default", "other"]):
        model.merge_adapter(adapter_names=names)
        bases = [part for n, part in model.named_modules() if n.endswith("base_layer")]
        assert all(part.weight_spec is None and part.recipe is None for part in bases)
        with torch.no_grad():
            assert loss_of(model, 7) != loss
        model.unmerge_adapter()
        assert {str(part.recipe) for part in bases} == {recipe}
        after = model.state_dict()
        assert list(after) == list(before)
        for name, value in before.items():
            assert_bitwise(after[name].view(torch.uint8), value.view(torch.uint8), name)
        with torch.no_grad():
            assert_bitwise(loss_of(model, 7), loss)


def test_merging_into_weights_in_high_precision_is_pefts() -> None:
    losses = []
    for over in (lambda c: c, over_codes):
        model: Any = tiny("llama")
        qt.convert(model, "mxfp8")
        torch.manual_seed(1)
        model = get_peft_model(model, over(config()))
        train(model)
        merged = model.merge_and_unload()
        losses.append(loss_of(merged, 7).item())
        tiny("llama").load_state_dict(qt.plain_state_dict(merged))
    assert losses[0] == losses[1]


def test_a_rule_that_names_an_adapter_converts_it() -> None:
    model = get_peft_model(tiny("llama"), config())
    report = qt.convert(model, {"*.q_proj.lora_A.default": "mxfp8", "*": "tensorwise"})
    assert sum("lora_" in name for name in report.converted) == 2
    other = "base_model.model.model.layers.0.self_attn.k_proj.lora_B.default"
    assert "an adapter of PEFT stays in high precision" in report.skipped[other]


def test_merging_into_codes_gives_a_clear_error() -> None:
    model = get_peft_model(tiny("llama"), config())
    saved = qt.quantize_weights(model, "mxfp8")
    assert not saved.layers
    wanted = "quantize before get_peft_model(model, quaver.integrations.peft.over_codes"
    assert any(wanted in why for why in saved.skipped.values())
    # With a config that knows codes, over layers that are converted, the order is free.
    other = tiny("llama")
    qt.convert(other, "mxfp8")
    other = adapted(other)
    assert len(qt.quantize_weights(other, "mxfp8").layers) == 14
    assert all(part.weight_spec is None for part in other.merge_and_unload().modules() if isinstance(part, Linear))


@pytest.mark.parametrize("recipe", STORED)
@pytest.mark.parametrize(
    ("method", "dtype"), [("LoRA", torch.float32), ("LoRA", torch.bfloat16), ("IA3", torch.bfloat16)], ids=str
)
def test_a_peft_adapter_over_codes_warns_about_merging_before_training(
    recipe: str, method: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """torch copies nothing to NVFP4's dtype, which PEFT would give the adapter, and adds nothing to FP8."""
    plain = config() if method == "LoRA" else IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=r"cannot be merged into them.*over_codes\(config\).*dequantize_weights"):
        model = get_peft_model(stored(recipe, dtype), plain, autocast_adapter_dtype=False)
    added = [p for p in model.parameters() if p.requires_grad]
    assert added and {p.dtype for p in added} == {dtype}
    if method == "IA3":
        return
    other = get_peft_model(stored(recipe, dtype), over_codes(config()), autocast_adapter_dtype=False)
    with torch.no_grad():
        for p, q in zip(adapters(other), adapters(model), strict=True):
            p.copy_(q)
    assert train(model) == train(other)
    # What it has learned can be saved, loaded over codes that merge, and merged.
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(
        stored(recipe, dtype), tmp_path, config=over_codes(LoraConfig.from_pretrained(tmp_path))
    )
    with torch.no_grad():
        assert_bitwise(loss_of(again.merge_and_unload(), 7), loss_of(other.merge_and_unload(), 7))


@pytest.mark.filterwarnings("error:PEFT adds")
def test_over_codes_and_weights_in_high_precision_warn_of_nothing() -> None:
    converted, decoded = tiny("llama"), stored("mxfp8")
    qt.convert(converted, "mxfp8")
    qt.dequantize_weights(decoded)
    adapted(stored("nvfp4"))
    for model in (converted, decoded):
        get_peft_model(model, config())


def test_methods_and_starting_values_that_read_the_weight_are_refused() -> None:
    with pytest.raises(TypeError, match="IA3Config does not support"):
        over_codes(IA3Config())
    with pytest.raises(ValueError, match="init_lora_weights='olora' starts from the base's weight"):
        adapted(stored("mxfp8"), init_lora_weights="olora")
    with pytest.raises(ValueError, match="use_dora reads the base's weight"):
        adapted(stored("mxfp8"), use_dora=True)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("more", [{"use_dora": True}, {"init_lora_weights": "pissa"}], ids=str)
def test_a_second_adapter_that_reads_the_weight_is_refused_too(recipe: str, more: dict[str, Any]) -> None:
    model = adapted(stored(recipe))
    with pytest.raises(ValueError, match=r"the base's weight.*which exists only as codes"):
        model.add_adapter("other", config(target_modules=["q_proj"], **more))


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_merged_layers_unmerge_after_moves_and_casts(recipe: str) -> None:
    model = adapted(stored(recipe), init_lora_weights=False)
    model.merge_adapter()
    model.to(torch.bfloat16)
    model.unmerge_adapter()
    layer = next(part for part in model.modules() if isinstance(part, Linear))
    assert layer.weight_spec is not None and layer.weight_dtype is torch.bfloat16
    assert qt.plain_state_dict(layer)["weight"].dtype is torch.bfloat16
    model.merge_adapter()
    model.to("meta")
    model.unmerge_adapter()
    assert all(value.is_meta for value in layer.state_dict().values())


def test_a_version_without_the_hook_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(LoraConfig, REGISTER)
    with pytest.raises(ValueError, match=r"has no _register_custom_module.*dequantize_weights"):
        over_codes(config())


def test_a_copy_of_an_adapted_model_merges_too() -> None:
    model = adapted(stored("nvfp4"))
    train(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert_bitwise(loss_of(copied.merge_and_unload(), 7), loss_of(model.merge_and_unload(), 7))

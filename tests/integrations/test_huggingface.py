"""A recipe as transformers' quantization config: folders keep all state, and no class takes codes for weights."""

import copy
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, TrainerState
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import quaver.torch as qt
from quaver import recipes
from quaver.integrations.huggingface import (
    FILE,
    METHOD,
    QuaverConfig,
    QuaverQuantizer,
    ScalingCallback,
    load,
    saturation,
    save,
)
from quaver.torch.linear.linear import Quantizable
from tests.close import assert_bitwise
from tests.torch.conversion.families import FAMILIES, tiny, tokens


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an unconverted Llama."""
    folder = tmp_path_factory.mktemp("plain")
    tiny("llama").save_pretrained(folder)
    return folder


def loaded(folder: Path, config: QuaverConfig | None = None, dtype: torch.dtype = torch.float32) -> Any:
    given = {} if config is None else {"quantization_config": config}
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **given)
    assert not any(report.values())
    return model


def loss_of(model: Any) -> Tensor:
    x = tokens()
    loss: Tensor = model(input_ids=x, labels=x).loss
    return loss


def assert_same(one: nn.Module, other: nn.Module) -> None:
    a, b = one.state_dict(), other.state_dict()
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype is b[name].dtype and a[name].stride() == b[name].stride(), name
        assert_bitwise(a[name].contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_a_folder_brings_histories_and_counts_back(
    recipe: str, dtype: torch.dtype, plain: Path, tmp_path: Path
) -> None:
    model = loaded(plain, QuaverConfig(recipe, seed=3), dtype)
    for _ in range(2):
        loss_of(model).backward()
    state = qt.scaling_state_dict(model)
    assert state and all(v.any() for name, v in state.items() if name.endswith(("history", "count")))
    model.save_pretrained(tmp_path)
    again = loaded(tmp_path, dtype=dtype)
    assert_same(again, model)
    losses = []
    for each in (model, again):
        each.zero_grad()
        loss = loss_of(each)
        loss.backward()
        losses.append([loss, *(p.grad for p in each.parameters())])
    for a, b in zip(*losses, strict=True):
        assert_bitwise(a, b)


def test_blocks_in_place_come_back_with_the_folder(plain: Path, tmp_path: Path) -> None:
    model = loaded(plain, QuaverConfig("delayed", blocks=True))
    loss_of(model).backward()
    model.save_pretrained(tmp_path)
    again = loaded(tmp_path)
    assert_same(again, model)
    kinds = [
        # By name: a class of ours holds the attributes that it was compared with, and loading sets some.
        [[kind.__qualname__ for kind in type(m).__mro__] for m in each.modules()]
        for each in (model, again, loaded(plain, QuaverConfig("delayed")))
    ]
    assert kinds[0] == kinds[1] != kinds[2]


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "nvfp4"])
def test_stored_weights_come_back_bit_for_bit_from_a_small_file(recipe: str, plain: Path, tmp_path: Path) -> None:
    model = loaded(plain, QuaverConfig(recipe, weights="stored"))
    other = AutoModelForCausalLM.from_pretrained(plain)
    qt.quantize_weights(other, recipe)
    assert_same(model, other)
    model.save_pretrained(tmp_path)
    again = loaded(tmp_path)
    assert_same(again, model)
    with torch.no_grad():
        assert_bitwise(loss_of(again), loss_of(model))
    before, after = (os.path.getsize(f / "model.safetensors") for f in (plain, tmp_path))
    assert after < before * 0.45
    # As a Trainer that resumes loads a folder.
    again.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert_same(again, model)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["high", "stored"])
def test_every_family_comes_back_from_its_folder(family: str, weights: str, tmp_path: Path) -> None:
    kind, model = FAMILIES[family], tiny(family)
    if family == "gpt_neo":
        pytest.skip("transformers refuses to save a model of two layers of it")
    rules = {"*experts*": "tensorwise", "*": "delayed"}
    with warnings.catch_warnings():
        # Of families without experts no name fits.
        warnings.simplefilter("ignore")
        qt.convert(model, rules)
        model.save_pretrained(tmp_path / "plain")
        plain, report = kind.from_pretrained(tmp_path / "plain", output_loading_info=True)
        assert not any(report.values())
        assert_same(plain, tiny(family))
        one = kind.from_pretrained(tmp_path / "plain", quantization_config=QuaverConfig(rules, weights=weights))
        one.save_pretrained(tmp_path / "own")
        again, report = kind.from_pretrained(tmp_path / "own", output_loading_info=True)
    assert not any(report.values())
    assert_same(again, one)


def test_a_process_without_the_import_refuses_codes_and_says_what_to_import(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    loaded(plain, QuaverConfig("mxfp8", weights="stored")).save_pretrained(tmp_path)
    monkeypatch.delitem(AUTO_QUANTIZATION_CONFIG_MAPPING, METHOD)
    monkeypatch.delitem(AUTO_QUANTIZER_MAPPING, METHOD)
    monkeypatch.setattr("transformers.quantizers.auto.logger.warning", warned.append)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "import quaver.integrations.huggingface" in warned[0]


def test_dequantize_gives_the_plain_model_and_its_folder(plain: Path, tmp_path: Path) -> None:
    model = loaded(plain, QuaverConfig("delayed"))
    model.dequantize()
    assert not any(isinstance(m, Quantizable) for m in model.modules())
    model.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert_same(loaded(tmp_path), loaded(plain))


def test_the_order_of_rules_options_and_skips_outlive_the_folder(plain: Path, tmp_path: Path) -> None:
    config = QuaverConfig({"*.v_proj": None, "*.self_attn.*": "mxfp8", "*": "delayed"}, skip=["*.down_proj"], head=True)
    model = loaded(plain, config)
    model.save_pretrained(tmp_path)
    again = loaded(tmp_path)
    kinds = [{n: str(getattr(m, "recipe", None)) for n, m in each.named_modules()} for each in (model, again)]
    assert (
        kinds[0] == kinds[1]
        and kinds[0]["lm_head"] == "delayed"
        and kinds[0]["model.layers.0.self_attn.q_proj"] == "mxfp8"
    )
    assert kinds[0]["model.layers.0.self_attn.v_proj"] == kinds[0]["model.layers.0.mlp.down_proj"] == "None"
    loaded(plain, QuaverConfig("delayed", options={"history": 5})).save_pretrained(tmp_path)
    assert loaded(tmp_path).model.layers[0].mlp.up_proj.history.shape == (5, 3)


def test_an_invalid_config_gives_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"give QuaverConfig\('mxfp8', options="):
        QuaverConfig(recipes.mxfp8())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no recipe 'mxfp9'"):
        QuaverConfig("mxfp9")
    with pytest.raises(ValueError, match="has no option 'histories'"):
        QuaverConfig("delayed", options={"histories": 4})
    with pytest.raises(ValueError, match=r"options \['history'\] are of one recipe"):
        QuaverConfig({"*": "delayed"}, options={"history": 4})
    with pytest.raises(ValueError, match="a folder cannot store the options of Blocks"):
        QuaverConfig("mxfp8", blocks=qt.Blocks(loss=True))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights is 'eight'"):
        QuaverConfig("mxfp8", weights="eight")
    with pytest.raises(ValueError, match=r"give a list of patterns, such as \['lm_head'\]"):
        QuaverConfig("mxfp8", skip="lm_head")


def test_an_optimizer_that_cannot_step_codes_says_so_at_its_first_step(plain: Path) -> None:
    model = loaded(plain, QuaverConfig("mxfp8", weights="stored"))
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model).backward()
    with pytest.raises(ValueError, match="would write to the codes"):
        optimizer.step()


def test_the_callbacks_file_holds_the_scaling_state(plain: Path, tmp_path: Path) -> None:
    model, fresh = (loaded(plain, QuaverConfig("delayed")) for _ in range(2))
    assert not load(model, tmp_path)
    for _ in range(2):
        loss_of(model).backward()
    save(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert load(fresh, tmp_path)
    assert_same(fresh, model)


def test_saturation_is_reported_as_a_fraction_of_each_operand() -> None:
    layer = nn.Sequential(nn.Linear(32, 32))
    qt.convert(layer, "delayed")
    with qt.inspect(layer, every=1, start=2) as inspector:
        for size in (1.0, 1.0, 100.0):
            layer(torch.full((4, 32), size)).sum().backward()
            inspector.step()
    shares = saturation(inspector.rows)
    assert shares["saturated_input"] == 1.0 and shares["saturated_weight"] == shares["nonfinite_grad_output"] == 0.0


class Arguments:
    """What the callback reads of TrainingArguments, which need accelerate; test_trainer.py has those."""

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1, **more: Any) -> None:
        self.output_dir, self.process_index, self.world_size = str(folder), rank, ranks
        self.resume_from_checkpoint: str | None = None
        self.logging_strategy, self.logging_first_step, self.gradient_accumulation_steps = "steps", False, 1
        self.__dict__.update(more)


def recorded(scale: float = 1.0) -> nn.Sequential:
    """A converted model with histories of this size and unaffected weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 32))
    qt.convert(net, "delayed")
    net(torch.full((16, 32), scale)).sum().backward()
    return net


def test_each_rank_resumes_with_its_own_histories(tmp_path: Path) -> None:
    ranks, state = [recorded(1.0), recorded(5.0)], TrainerState(global_step=3)
    for rank, model in enumerate(ranks):
        ScalingCallback().on_save(Arguments(tmp_path, rank, 2), state, None, model)
    for rank, model in enumerate(ranks):
        fresh = recorded(9.0)
        ScalingCallback().on_train_begin(Arguments(tmp_path, rank, 2), state, None, fresh)
        assert_same(fresh, model)
    with pytest.raises(ValueError, match=r"scaling-00002-of-00003.* is not there.* as many processes as saved it"):
        ScalingCallback().on_train_begin(Arguments(tmp_path, 2, 3), state, None, recorded())


def test_the_state_of_another_run_is_refused(tmp_path: Path) -> None:
    """A folder of the same name in the Trainer's own output, and the one that the arguments resume from."""
    own, other, state = recorded(), recorded(5.0), TrainerState(global_step=3)
    with torch.no_grad():
        other[0].weight[0, 0] += 1.0
    for folder, model in ((tmp_path / "own", own), (tmp_path / "other", other)):
        (folder / "checkpoint-3").mkdir(parents=True)
        ScalingCallback().on_save(Arguments(folder), state, None, model)
    fresh = copy.deepcopy(other)
    with pytest.raises(ValueError, match=r"was saved with other weights in 1 of 2 .*another run, give ScalingCallback"):
        ScalingCallback().on_train_begin(Arguments(tmp_path / "own"), state, None, fresh)
    assert_same(fresh, other)
    given = str(tmp_path / "other/checkpoint-3")
    ScalingCallback().on_train_begin(Arguments(tmp_path / "own", resume_from_checkpoint=given), state, None, fresh)
    with pytest.raises(ValueError, match=r"resumes at step 4, and .* is of step 3"):
        ScalingCallback(resume_from=given).on_train_begin(Arguments(tmp_path), TrainerState(global_step=4), None, fresh)


@pytest.mark.parametrize(
    ("strategy", "first", "counted"),
    [("no", False, []), ("no", True, [1]), ("epoch", False, [3, 6, 7]), ("steps", False, [2, 4, 6])],
)
def test_saturation_is_measured_in_steps_that_are_logged(
    strategy: str, first: bool, counted: list[int], tmp_path: Path
) -> None:
    """Seven steps of three, of five batches, two a step; logging_steps is 2."""
    arguments = Arguments(tmp_path, logging_strategy=strategy, logging_first_step=first, gradient_accumulation_steps=2)
    seen = []
    for step in range(7):
        callback, state = ScalingCallback(), TrainerState(global_step=step, max_steps=7, logging_steps=2)
        model, logs = recorded(), {}
        callback.on_step_begin(arguments, state, None, model, train_dataloader=range(5))
        model(torch.ones(16, 32)).sum().backward()
        callback.on_step_end(arguments, state, None)
        callback.on_log(arguments, state, None, logs)
        seen += [step + 1] if "saturated_input" in logs else []
    assert seen == counted


@pytest.mark.filterwarnings("ignore:convert changed nothing")
def test_a_model_that_nothing_of_was_converted_is_refused(plain: Path) -> None:
    with pytest.raises(ValueError, match=r"converted nothing in LlamaForCausalLM \(.*load it without device_map"):
        AutoModelForCausalLM.from_pretrained(plain, quantization_config=QuaverConfig("mxfp8", skip=["*"]))
    # As accelerate's hooks leave a layer.
    net = nn.Sequential(nn.Linear(32, 32))
    layer: Any = net[0]
    layer.forward = layer.forward
    with pytest.raises(ValueError, match=r"converted nothing in Sequential \(0: .*whose hooks replace forwards"):
        QuaverQuantizer(QuaverConfig("mxfp8"))._convert(net)

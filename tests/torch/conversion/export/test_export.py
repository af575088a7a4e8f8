"""Test exports: files hold the codes of fprop, and recipes that a format cannot store are refused."""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quaver
import quaver.torch as qt
from quaver import recipes, reference
from quaver.torch.conversion.export.check import divergence, log_probabilities, with_exported_weights
from quaver.torch.conversion.export.layouts import FUSED
from quaver.torch.conversion.export.operands import Reader, disassemble
from quaver.torch.quantized_tensor import memory_of
from tests.close import assert_bitwise
from tests.torch.conversion.export.page import PAGE
from tests.torch.conversion.export.served import HELD, WIDTH, dense, model, tokens

PAIRS = [(recipe, format) for format in HELD for recipe in HELD[format]]
QUANTIZED = ("1", "3", "4")


def consumed(layer: Any) -> Tensor:
    """What the specification gives of a layer's weight, by the factor that is in force."""
    spec, weight = layer.recipe.fprop.b, layer.weight.detach().float().numpy()
    factor = layer._buffers.get("factor")
    kwargs = {} if factor is None else {"factor": float(factor[1])}
    return torch.from_numpy(reference.dequantize(reference.quantize(weight, spec, **kwargs)))


@pytest.mark.parametrize(("recipe", "format"), PAIRS)
def test_files_hold_the_operands_of_fprop(recipe: str, format: str, tmp_path: Path) -> None:
    trained = model(recipe)
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    result = qt.export(trained, tmp_path / "out", format=format, check=tokens(), calibrate=tokens())
    read = dense(tmp_path / "out")
    assert set(read) == set(QUANTIZED)
    for name in QUANTIZED:
        assert_bitwise(read[name], consumed(trained[int(name)]))
    assert {name for name, _ in result.layers} == {HELD[format][recipe]}
    assert result.check is not None and result.check.weights.largest == 0.0
    assert 0.0 < result.check.high_inputs.largest < 0.05
    after = trained.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert_bitwise(value, after[name])
    assert type(trained[1]) is type(model(recipe)[1]) and trained[1].weight_spec is None and trained.training


@pytest.mark.parametrize("recipe", [recipe for recipe in recipes.RECIPES if recipe != "bf16"])
@pytest.mark.parametrize("format", HELD)
def test_formats_that_cannot_store_a_recipe_list_those_that_can(recipe: str, format: str, tmp_path: Path) -> None:
    if recipe in HELD[format]:
        return
    can = [other for other in HELD if recipe in HELD[other]]
    with pytest.raises(ValueError, match=re.escape(f"{format!r} cannot store the codes of 1")) as error:
        qt.export(model(recipe), tmp_path / "out", format=format, calibrate=tokens())
    assert f"use format={' or '.join(map(repr, can))}" in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "recipe",
    [
        quaver.recipes.mxfp8(weight_2d=True),
        quaver.recipes.nvfp4(weight_2d=False),
        quaver.recipes.nvfp4(power_of_two=False),
        quaver.recipes.tensorwise(power_of_two=False),
        quaver.recipes.rowwise(power_of_two=False),
        quaver.recipes.blockwise(power_of_two=False),
        quaver.recipes.delayed(power_of_two=False, margin=1),
    ],
    ids=str,
)
def test_options_of_recipes_export(recipe: quaver.Recipe, tmp_path: Path) -> None:
    trained = model(recipe)
    result = qt.export(trained, tmp_path / "out", check=tokens())
    for name, value in dense(tmp_path / "out").items():
        assert_bitwise(value, consumed(trained[int(name)]))
    assert result.check is not None and result.check.weights.largest == 0.0


def test_a_factor_that_has_no_exact_reciprocal_is_refused_by_modelopt(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"only exact for powers of two.*use format='compressed-tensors'"):
        qt.export(model(quaver.recipes.nvfp4(power_of_two=False)), tmp_path / "out", format="modelopt")


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "nvfp4", "mxfp6"])
def test_the_check_finds_one_wrong_code(recipe: str, tmp_path: Path) -> None:
    trained, folder = model(recipe), tmp_path / "out"
    qt.export(trained, folder)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in ("3.weight_packed", "3.weight") if name in tensors)
    codes = tensors[name].view(torch.uint8).clone()
    # The sign of a code that is no zero.
    codes[0] ^= 0x80
    tensors[name] = codes.view(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors")
    right = log_probabilities(trained, tokens())
    with with_exported_weights(disassemble(trained, ()).collected, Reader(folder)):
        wrong = log_probabilities(trained, tokens())
    assert divergence(right, wrong).largest > 1e-6
    assert divergence(right, log_probabilities(trained, tokens())).largest == 0.0


def test_weights_stored_only_as_codes_are_exported_unchanged(tmp_path: Path) -> None:
    with qt.quantized_init("mxfp8"):
        layer = qt.Linear(WIDTH, WIDTH)
    trained = nn.Sequential(layer)
    codes = memory_of(layer.weight.detach().clone()).view(torch.uint8)
    qt.export(trained, tmp_path / "without recipe")
    with qt.autocast("mxfp8"):
        qt.export(trained, tmp_path / "under one", check=torch.randn(4, WIDTH))
    for folder, inputs in (("without recipe", None), ("under one", dict)):
        tensors = load_file(tmp_path / folder / "model.safetensors")
        assert_bitwise(tensors["0.weight"].view(torch.uint8), codes)
        config = json.loads((tmp_path / folder / "config.json").read_text())["quantization_config"]
        given = config["config_groups"]["group_0"]["input_activations"]
        assert given is None if inputs is None else isinstance(given, dict)


def test_rules_give_layers_separate_groups(tmp_path: Path) -> None:
    trained = model("mxfp8")
    qt.convert(trained, {"3": "nvfp4", "4": "bf16", "5": None, "*": "mxfp8"})
    result = qt.export(trained, tmp_path / "out", check=tokens())
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision" and config["ignore"] == ["4", "5"]
    targets = {group["format"]: group["targets"] for group in config["config_groups"].values()}
    assert targets == {"mxfp8-quantized": ["1"], "nvfp4-pack-quantized": ["3"]}
    assert result.check is not None and result.check.weights.largest == 0.0
    qt.export(trained, tmp_path / "nvidia", format="modelopt")
    layers = json.loads((tmp_path / "nvidia" / "hf_quant_config.json").read_text())["quantization"]
    assert layers["quant_algo"] == "MIXED_PRECISION" and set(layers["quantized_layers"]) == {"1", "3"}


def test_layers_left_out_by_name_keep_their_trained_values(tmp_path: Path) -> None:
    trained = model("rowwise")
    result = qt.export(trained, tmp_path / "out", high_precision=["4"], check=tokens())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert_bitwise(tensors["4.weight"], trained[4].weight.detach())
    assert result.left == {"4": "asked for by name"} and "4 (asked for by name)" in str(result)
    with pytest.raises(ValueError, match="no quantized layer has a name that matches 'x'"):
        qt.export(trained, tmp_path / "other", high_precision=["x"])


def test_files_are_cut_where_they_are_full(tmp_path: Path) -> None:
    trained = model("mxfp8")
    qt.export(trained, tmp_path / "one")
    qt.export(trained, tmp_path / "many", shard_bytes=9000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    whole = load_file(tmp_path / "one" / "model.safetensors")
    parts = {name: value for file in files for name, value in load_file(tmp_path / "many" / file).items()}
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        assert_bitwise(value.view(torch.uint8), parts[name].view(torch.uint8))
    assert all(
        a.equal(b) for a, b in zip(dense(tmp_path / "one").values(), dense(tmp_path / "many").values(), strict=True)
    )


class Shared(nn.Module):
    """A head that is the embedding's matrix, and one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 32), nn.Linear(32, 32, bias=False)
        self.head.weight = self.embed.weight
        self.a = self.again = nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.again(self.a(self.embed(ids))))
        return y


def test_shared_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained = Shared()
    qt.convert(trained, "mxfp8", head=True)
    result = qt.export(trained, tmp_path / "out", check=torch.arange(8))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert_bitwise(tensors["embed.weight"], trained.embed.weight.detach())
    assert set(dense(tmp_path / "out")) == {"head", "a", "again"}
    assert result.check is not None and result.check.weights.largest == 0.0


def converted(*layers: nn.Module) -> nn.Sequential:
    whole = nn.Sequential(*layers)
    qt.convert(whole, "mxfp8")
    return whole


def with_nan() -> nn.Linear:
    layer = nn.Linear(32, 32)
    nn.init.constant_(layer.weight, math.nan)
    return layer


def linear() -> nn.Linear:
    return nn.Linear(32, 32)


BAD: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "no recipe": (linear, {}, "no layer of this model is quantized: call quaver.torch.convert"),
    "nan": (lambda: converted(with_nan()), {}, "0.weight contains infinities or NaN"),
    "meta": (lambda: converted(nn.Linear(64, 64, device="meta")), {}, "0.weight is on meta and has no values"),
    "part of a block": (lambda: converted(nn.Linear(40, 8)), {}, "rows of 40 values end within a block of 32"),
    "parametrization": (
        lambda: converted(nn.utils.parametrizations.weight_norm(linear())),
        {},
        "computed by a parametrization: remove it first",
    ),
    "packed": (
        lambda: converted(nn.MultiheadAttention(32, 2)),
        {},
        "no format has codes for a layer of this kind: write it in high precision",
    ),
    "format": (
        lambda: converted(linear()),
        {"format": "compressed_tensors"},
        "no format of exported files 'compressed_tensors'; did you mean 'compressed-tensors'?",
    ),
    "no logits": (
        lambda: converted(linear(), nn.Flatten(0)),
        {"check": torch.ones(1, 32)},
        "check needs a model that gives logits",
    ),
    "check of text": (lambda: converted(linear()), {"check": "text"}, "check is a str; give inputs of the model"),
    "calibration by text": (lambda: converted(linear()), {"calibrate": "text"}, "calibrate is a str; give inputs"),
}


@pytest.mark.parametrize(("build", "options", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_gives_a_clear_error_and_leaves_no_files(
    build: Callable[[], nn.Module], options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        qt.export(build(), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_unusable_output_paths_are_refused(tmp_path: Path) -> None:
    trained = model("mxfp8")
    (tmp_path / "empty").mkdir()
    qt.export(trained, tmp_path / "empty")
    with pytest.raises(ValueError, match="already exists and is not empty"):
        qt.export(trained, tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="exists and is not a folder"):
        qt.export(trained, tmp_path / "file")
    with pytest.raises(ValueError, match="cannot be written"):
        qt.export(trained, tmp_path / "file" / "below")
    assert sorted(os.listdir(tmp_path)) == ["empty", "file"]


def test_delayed_input_scales_are_exported(tmp_path: Path) -> None:
    trained = model("delayed")
    result = qt.export(trained, tmp_path / "out", check=tokens())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert float(tensors["1.input_scale"]) == 1.0 / float(trained[1].factor[0])
    # Its readers quantize inputs by the same scale: nothing differs.
    assert result.check is not None and result.check.inputs.largest == 0.0
    fresh = nn.Sequential(nn.Linear(32, 32))
    qt.convert(fresh, "delayed")
    qt.export(fresh, tmp_path / "fresh")
    assert "0.input_scale" not in load_file(tmp_path / "fresh" / "model.safetensors")
    with pytest.raises(ValueError, match="give calibrate=inputs"):
        qt.export(fresh, tmp_path / "nvidia", format="modelopt")


def test_the_page_has_every_recipe_in_every_format() -> None:
    lines = PAGE.read_text().splitlines()
    for recipe in recipes.RECIPES:
        for format in HELD if recipe != "bf16" else ():
            (row,) = [line for line in lines if line.startswith(f"| `{recipe}` | `{format}` |")]
            stored = HELD[format].get(recipe)
            assert (f"| {stored}: " if stored else "| not supported; use ") in row
            # Of weights nothing differs.
            assert recipe not in HELD[format] or row.split("|")[5].strip() == "0"


def names(folder: Path) -> set[str]:
    return set(load_file(folder / "model.safetensors"))


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    trained = model("mxfp8")
    qt.export(trained, tmp_path / "plain")
    trained[1], trained[3] = checkpoint_wrapper(trained[1]), torch.compile(trained[3], backend="eager")
    for label, wrapped in (
        ("wrapped within", trained),
        ("compiled", torch.compile(trained, backend="eager")),
        ("replicated", nn.DataParallel(trained)),
    ):
        qt.export(wrapped, tmp_path / label)
        assert names(tmp_path / label) == names(tmp_path / "plain")
        for a, b in zip(dense(tmp_path / label).values(), dense(tmp_path / "plain").values(), strict=True):
            assert_bitwise(a, b)


class Fused(nn.Module):
    """Matrices that a server fuses, of magnitudes that are far from one another."""

    def __init__(self, sizes: dict[str, float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names = list(sizes)
        for name, size in sizes.items():
            layer = nn.Linear(WIDTH, WIDTH, bias=False)
            with torch.no_grad():
                layer.weight.mul_(size)
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([getattr(self, name)(x) for name in self.names]).sum(0)


SIZES = (1.0, 5.0, 0.3)
EACH_GROUP = [dict(zip(names, SIZES, strict=False)) for names in FUSED]


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("sizes", [*EACH_GROUP, {"wq_a": 1.0, "wkv": 5.0, "wgate": 0.3}], ids="+".join)
def test_weights_that_servers_fuse_have_one_scale_of_the_tensor_and_the_same_numbers(
    format: str, sizes: dict[str, float], tmp_path: Path
) -> None:
    trained = Fused(sizes)
    qt.convert(trained, "nvfp4" if "q_proj" in sizes else quaver.recipes.nvfp4(weight_2d=False))
    x = torch.randn(4, WIDTH)
    result = qt.export(trained, tmp_path / "out", format=format, check=x, calibrate=x)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    last = "weight_global_scale" if format == "compressed-tensors" else "weight_scale_2"
    assert len({float(tensors[f"{name}.{last}"]) for name in sizes}) == 1
    for name, value in dense(tmp_path / "out").items():
        assert_bitwise(value, consumed(trained.get_submodule(name)))
    assert result.check is not None and result.check.weights.largest == 0.0


def test_weights_that_no_single_scale_fits_are_refused(tmp_path: Path) -> None:
    trained = Fused({"q_proj": 1.0, "k_proj": 2.0**18, "v_proj": 1.0})
    qt.convert(trained, "nvfp4")
    with pytest.raises(ValueError, match=r"differ too much for that.*high_precision=\['k_proj', 'q_proj', 'v_proj'\]"):
        qt.export(trained, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_weight_of_zeros_fits_any_scale_of_the_tensor(tmp_path: Path) -> None:
    trained = Fused({"q_proj": 1.0, "k_proj": 0.0, "v_proj": 2.0**-20})
    qt.convert(trained, "nvfp4")
    with pytest.raises(ValueError, match="differ too much"):
        qt.export(trained, tmp_path / "far")
    with torch.no_grad():
        trained.v_proj.weight.zero_()
    assert qt.export(trained, tmp_path / "out", check=torch.randn(4, WIDTH)).check.weights.largest == 0.0


@pytest.mark.parametrize("format", HELD)
@pytest.mark.parametrize("mixed", ["by name", "by rule", "two recipes"])
def test_different_schemes_for_fused_layers_are_refused(format: str, mixed: str, tmp_path: Path) -> None:
    trained = Fused({"q_proj": 1.0, "k_proj": 1.0, "v_proj": 1.0, "o_proj": 1.0})
    recipe = {"compressed-tensors": "nvfp4", "modelopt": "nvfp4", "deepseek": "blockwise"}[format]
    others = {"by name": recipe, "by rule": None, "two recipes": "mxfp8"}
    if format == "deepseek" and mixed == "two recipes":
        others[mixed] = None
    qt.convert(trained, quaver.Rules({"k_proj": others[mixed], "*": recipe}))
    high_precision = ["k_proj"] if mixed == "by name" else []
    quantized = ["q_proj", "v_proj"] if mixed == "by name" or others[mixed] is None else ["k_proj", "q_proj", "v_proj"]
    with pytest.raises(ValueError, match=rf"fuse these layers.*k_proj \(.*high_precision=\{quantized}"):
        qt.export(trained, tmp_path / "out", format=format, high_precision=high_precision)
    assert not list(tmp_path.iterdir())
    qt.export(trained, tmp_path / "out", format=format, high_precision=[*quantized, *high_precision])

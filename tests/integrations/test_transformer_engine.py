"""Test that a checkpoint of Transformer Engine's JAX modules continues in ours with equal losses and gradients."""

import ast
import inspect
import sys
from importlib.metadata import PathDistribution
from typing import Any

import pytest

import quaver.compat.transformer_engine.pytorch as te
from quaver.compat.transformer_engine.pytorch import optimizers
from tests import forked
from tests.integrations import beside_transformer_engine as beside

PACKAGE = beside.FOLDER / f"transformer_engine-{beside.VERSION}.dist-info"


FILES = {
    te.Linear: "module/linear.py",
    te.LayerNormLinear: "module/layernorm_linear.py",
    te.LayerNormMLP: "module/layernorm_mlp.py",
    te.GroupedLinear: "module/grouped_linear.py",
    te.DotProductAttention: "attention/dot_product_attention/dot_product_attention.py",
    te.MultiheadAttention: "attention/multi_head_attention.py",
    te.TransformerLayer: "transformer.py",
    te.RotaryPositionEmbedding: "attention/rope.py",
    te.InferenceParams: "attention/inference.py",
    optimizers.FusedAdam: "optimizers/fused_adam.py",
    te.moe_permute: "permutation.py",
    te.moe_unpermute: "permutation.py",
    te.moe_permute_and_pad_with_probs: "permutation.py",
    te.autocast: "quantization.py",
    te.quantized_model_init: "quantization.py",
}


@pytest.mark.parametrize("thing", FILES, ids=lambda thing: thing.__name__)
def test_positional_arguments_have_the_original_order(thing: Any) -> None:
    source = beside.FOLDER / "transformer_engine" / "pytorch" / FILES[thing]
    if not source.is_file():
        pytest.skip(f"transformer-engine {beside.VERSION} is not in {beside.FOLDER}: make test-integrations")
    (definition,) = (n for n in ast.parse(source.read_text()).body if getattr(n, "name", "") == thing.__name__)
    if isinstance(definition, ast.ClassDef):
        (definition,) = (n for n in definition.body if getattr(n, "name", "") == "__init__")
    assert isinstance(definition, ast.FunctionDef)
    theirs = [a.arg for a in definition.args.args if a.arg != "self"]
    ours = [p.name for p in inspect.signature(thing).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    # Arguments that it has inserted since are passed by name.
    assert ours == theirs[: len(ours)]


@pytest.mark.slow
def test_original_checkpoints_continue_identically() -> None:
    if not PACKAGE.is_dir():
        pytest.skip(f"transformer-engine {beside.VERSION} is not in {beside.FOLDER}: make test-integrations")
    assert PathDistribution(PACKAGE).version == beside.VERSION
    done = forked.bare("jax").run([sys.executable, "-m", beside.__name__], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("|") == 3 * len(beside.CASES)

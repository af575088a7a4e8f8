"""`MeshResource`, logical axes and scaling modes under Transformer Engine's names."""

import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from quaver import recipes
from quaver.compat.transformer_engine import jax as te
from quaver.compat.transformer_engine.jax.quantize import ScalingMode
from quaver.compat.transformer_engine.jax.sharding import get_sharding_map_logic_axis_to_mesh_axis, global_shard_guard

ROOT = Path(__file__).parents[4]


def test_a_layer_is_sharded_as_its_mesh_resource_says() -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-W", "error", "-m", "tests.compat.transformer_engine.jax.eight_devices"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == "as one device\n", done.stderr[-3000:]


def test_rules_that_contradict_a_mesh_resource_are_named() -> None:
    assert get_sharding_map_logic_axis_to_mesh_axis() == {}
    with global_shard_guard(te.MeshResource(dp_resource="data")):
        with pytest.raises(ValueError, match=r"'nvte_batch': \('other', 'data'\)"):
            te.flax.extend_logical_axis_rules([("nvte_batch", "other")])
        with global_shard_guard(None):
            assert get_sharding_map_logic_axis_to_mesh_axis()["nvte_batch"] == "data"


@pytest.mark.parametrize(
    ("mode", "spec", "dtype"),
    [
        (ScalingMode.NO_SCALING, None, jnp.float32),
        (ScalingMode.DELAYED_TENSOR_SCALING, recipes.delayed().fprop.a, jnp.float32),
        (ScalingMode.CURRENT_TENSOR_SCALING, recipes.tensorwise().fprop.a, jnp.float32),
        (ScalingMode.MXFP8_1D_SCALING, recipes.mxfp8().fprop.a, jnp.float8_e8m0fnu),
        (ScalingMode.NVFP4_1D_SCALING, recipes.nvfp4().fprop.a, jnp.float8_e4m3fn),
        (ScalingMode.NVFP4_2D_SCALING, recipes.nvfp4().fprop.b, jnp.float8_e4m3fn),
    ],
)
def test_a_scaling_mode_has_the_spec_of_its_recipe(mode: ScalingMode, spec: object, dtype: object) -> None:
    assert (mode.spec, mode.get_scale_dtype()) == (spec, dtype)
    assert mode.is_block_scaling is mode.is_1d_block_scaling() is ("MXFP8" in mode.name or "NVFP4" in mode.name)
    assert mode.is_tensor_scaling() is ("TENSOR" in mode.name)

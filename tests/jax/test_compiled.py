"""The kernels that XLA makes of a layer on H200 and B200, compiled without a GPU. `make test-lowering` downloads XLA.

The compiler gets the properties of a device instead of finding one. This shows which kernels a program consists of,
but not their speed or their results.
"""

import importlib.util
import os
import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import quaver.jax as qj
from quaver.recipes import get

pytestmark = pytest.mark.skipif(
    "QUAVER_TEST_LOWERING" not in os.environ or importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs the CUDA plugin of jax; run make test-lowering",
)

#: Properties that differ: compute capability, cores, memory bandwidth, cache, memory.
DEVICES = {
    "NVIDIA H200": (9, 132, 4800000000000, 52428800, 151397597184),
    "NVIDIA B200": (10, 148, 7672320000000, 132644864, 191514411008),
}


def description(name: str) -> str:
    """The properties that XLA would query from a device."""
    major, cores, bandwidth, cache_size, memory = DEVICES[name]
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth} l2_cache_size: {cache_size}
  clock_rate_ghz: 1.98 device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {major} feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "{name}"
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""


@cache
def mesh(device: str) -> jax.sharding.Mesh:
    described = topologies.get_topology_desc("", platform="cuda", target_config=description(device), topology="1x1x1")
    return topologies.make_mesh(described, (1,), ("d",))


@cache
def optimized(name: str, device: str, gemm: str = "triton") -> str:
    """The optimized program of a layer's forward and backward pass, 1024 tokens of 512 features to 2048.

    XLA chooses between cuBLASLt and its own Triton GEMMs by timing them, which takes the device: one is switched off.
    """
    recipe = get(name)

    def step(x: jax.Array, w: jax.Array, g: jax.Array, state: Any) -> Any:
        y, backward = jax.vjp(
            lambda *a: qj.linear(*a[:2], recipe=recipe, state=a[2], name="a", dtype=x.dtype), x, w, state
        )
        return y, backward(g)

    sharding = NamedSharding(mesh(device), PartitionSpec())
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)  # noqa: E731
    arrays = [((1024, 512), jnp.bfloat16), ((512, 2048), jnp.float32), ((1024, 2048), jnp.bfloat16)]
    arguments = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in arrays]
    state = jax.tree.map(like, qj.state.init(recipe))
    options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": gemm == "triton"}
    lowered = jax.jit(step).trace(*arguments, state).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=options).as_text()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise"])
def test_the_gemms_of_fp8_recipes_are_cublas_lt_fp8_gemms(name: str, device: str) -> None:
    assert len(re.findall(r'custom_call_target="__cublas\$lt\$matmul\$f8"', optimized(name, device, "cublas"))) == 3


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_block_scaled_gemms_are_native_on_blackwell(name: str) -> None:
    assert len(re.findall(r'custom_call_target="__cudnn\$blockScaledDot"', optimized(name, "NVIDIA B200"))) == 3


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "blockwise"])
def test_rounding_survives_where_a_gemm_is_emulated(name: str) -> None:
    """XLA deletes casts to FP8 and back; then the program would have no eight-bit numbers at all."""
    text = optimized(name, "NVIDIA H200")
    assert "blockScaledDot" not in text
    assert "f8e4m3fn[" in text or "u8[" in text


def test_rings_send_shards_while_others_are_multiplied() -> None:
    """In the schedule for eight H200, the GEMM of another shard is between each send's start and its end."""
    from tests.jax.operations import overlapped

    described = topologies.get_topology_desc(
        "", platform="cuda", target_config=description("NVIDIA H200"), topology="1x1x8"
    )
    devices = topologies.make_mesh(described, (2, 4), ("dp", "tp")).devices
    mesh8 = jax.sharding.Mesh(devices, ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    program, types = overlapped.program("tensorwise", True, mesh8), overlapped.types(mesh8, 4, 16384, 4096, 16384)
    options = {
        "xla_gpu_autotune_level": 0,
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # Else XLA joins the GEMMs of all shards, which then wait for the last one.
        "xla_gpu_dot_merger_threshold_mb": 0,
    }
    lowered = program.trace(*types).lower(lowering_platforms=("cuda",))
    text = lowered.compile(compiler_options=options).as_text()
    order = re.findall(r"= (?:\([^=\n]*\)|\S+) (collective-permute-start|collective-permute-done|custom-call)\(", text)
    short = "".join({"collective-permute-start": "s", "collective-permute-done": "d"}.get(each, "g") for each in order)
    # Three sends for each of forward's gather and scatter, dgrad's two, and one of each wgrad's.
    assert len(re.findall(r"sg+d", short)) >= 10, short

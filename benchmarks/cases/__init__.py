"""Registry of cases. A new case is a file and a line here."""

from benchmarks.cases.blocks import attention_noise, block_memory, block_speed, experts, state_space
from benchmarks.cases.host import host_cost, imports, optimizer_step
from benchmarks.cases.linear import frozen, grouped, jax_memory, jax_speed, memory, noise, speed
from benchmarks.cases.models import llama

CASES = (
    speed.SMALL_BF16,
    speed.SMALL_FLOAT32,
    speed.LARGE_BF16,
    speed.LARGE_FLOAT32,
    block_speed.SMALL,
    block_speed.LARGE,
    block_speed.LLAMA,
    experts.CASE,
    grouped.RESEARCH,
    grouped.EXPERTS,
    grouped.MANY,
    grouped.LARGE,
    jax_speed.CASE,
    jax_memory.CASE,
    memory.LAYER,
    memory.EAGER_MLP,
    memory.COMPILED_MLP,
    memory.SILU_MLP,
    block_memory.CASE,
    llama.SAVED_BYTES,
    llama.PEAK,
    llama.GRADIENTS,
    llama.TIME,
    state_space.CASE,
    llama.COMPILED,
    frozen.CASE,
    host_cost.CASE,
    imports.CASE,
    optimizer_step.CASE,
    noise.WHOLE,
    noise.WORST_ROW,
    attention_noise.GAUSSIAN,
    attention_noise.OUTLYING,
    attention_noise.SHIFTED,
)

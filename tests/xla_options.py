"""XLA's options for quick compilation: with JAX_DISABLE_MOST_OPTIMIZATIONS a layer compiles in a third of the time."""

from importlib.metadata import version
from typing import Any

QUICK: dict[str, Any] = {"xla_cpu_parallel_codegen_split_count": 1}
if version("jaxlib").startswith("0.10."):
    # Later versions have no such option.
    QUICK["xla_cpu_use_fusion_emitters"] = False
#: And for programs of those files whose claim no optimizer could break.
QUICKEST = QUICK | {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
#: The first as the environment variable XLA_FLAGS has them.
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())

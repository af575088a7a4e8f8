"""Table of the inference engines that a stream is made for: versions, and the schemes that they read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quaver.torch.conversion.export.check import Written
from quaver.torch.conversion.export.layouts import FORMATS


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An inference engine that loads checkpoint-format tensors into a running model."""

    name: str
    #: Oldest and newest version whose calls are known, as numbers; a version is compared in as many numbers.
    oldest: tuple[int, ...]
    newest: tuple[int, ...]
    #: Names of the schemes that it reads, by checkpoint format.
    schemes: Mapping[str, frozenset[str]]

    @property
    def versions(self) -> str:
        """The supported versions as text."""
        oldest, newest = (".".join(map(str, version)) for version in (self.oldest, self.newest))
        return f"{oldest} to {newest}"


# vLLM: the calls start_weight_update(), update_weights(update_info) and finish_weight_update(); before 0.25
# start_weight_update had an argument. Schemes: vllm/model_executor/layers/quantization/compressed_tensors/
# compressed_tensors.py (_get_scheme_from_parts) and modelopt.py (LINEAR_ALGOS).
# Source: the wheels 0.24.0, 0.25.1, 0.29.0, 0.32.0 and 0.33.0 of PyPI, vllm/v1/worker/gpu_worker.py;
# docs.vllm.ai/en/v0.32.0/training/weight_transfer.
VLLM = Engine(
    name="vllm",
    oldest=(0, 25),
    newest=(0, 33),
    schemes={
        "compressed-tensors": frozenset(
            {"float-quantized", "naive-quantized", "mxfp8-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized"}
        ),
        "deepseek": frozenset({"fp8"}),
        "modelopt": frozenset({"FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "NVFP4", "W4A16_NVFP4"}),
        "mxfp4": frozenset({"mxfp4"}),
    },
)
# SGLang: begin_weight_update(), update_weights_from_tensor or _from_distributed, end_weight_update(); releases before
# 0.5.21 have no session, and do not undo the packing of quantized weights. Schemes: sglang/srt/layers/quantization/
# compressed_tensors/compressed_tensors.py (_get_scheme_from_parts) and modelopt_quant.py.
# Source: the wheels 0.5.20 to 0.5.23 of PyPI, sglang/srt/entrypoints/engine.py; github.com/sgl-project/sglang, pull
# request 28001; docs.sglang.io/docs/advanced_features/sglang_for_rl.
SGLANG = Engine(
    name="sglang",
    oldest=(0, 5, 21),
    newest=(0, 5, 23),
    schemes={
        "compressed-tensors": frozenset({"float-quantized", "naive-quantized", "nvfp4-pack-quantized"}),
        "deepseek": frozenset({"fp8"}),
        "modelopt": frozenset({"FP8", "NVFP4", "W4A16_NVFP4"}),
        "mxfp4": frozenset({"mxfp4"}),
    },
)
# transformers: names of its checkpoints; `StreamLoader` reads every scheme.
TRANSFORMERS = Engine(
    name="transformers",
    oldest=(5, 0),
    newest=(5, 23),
    schemes={
        "compressed-tensors": VLLM.schemes["compressed-tensors"] | {"mxfp6-pack-quantized"},
        "deepseek": VLLM.schemes["deepseek"],
        "modelopt": VLLM.schemes["modelopt"],
        "mxfp4": VLLM.schemes["mxfp4"],
    },
)
ENGINES = {engine.name: engine for engine in (VLLM, SGLANG, TRANSFORMERS)}


def check_version(engine: Engine, version: str | None) -> None:
    """Raise if the calls of this version of an engine are unknown; None is taken for a supported one.

    Raises:
        ValueError: the message names the supported versions.
    """
    if version is None:
        return
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    numbers = tuple(int(number) for number in found[1].split(".")) if found else ()
    padded = (*numbers, *(0 for _ in engine.oldest))[: len(engine.oldest)]
    if not numbers or not engine.oldest <= padded <= engine.newest:
        raise ValueError(
            f"{engine.name} {version} is not supported: its calls are known for versions {engine.versions}; use one of "
            "these, or pass version=None after comparing its weight-update calls with quaver.torch.serving.engines"
        )


def check_schemes(engine: Engine, checkpoint_format: str, plan: Sequence[Written]) -> None:
    """Raise if an engine cannot read the scheme of a weight.

    Raises:
        ValueError: the message names the layers, and formats in which the engine reads them.
    """
    readable = engine.schemes[checkpoint_format]
    rejected: dict[str, list[str]] = {}
    for one, scheme, _ in plan:
        if scheme.name not in readable:
            rejected.setdefault(scheme.name, []).append(one.module_name)
    if not rejected:
        return
    each = "; ".join(
        f"{scheme} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})" for scheme, names in rejected.items()
    )
    names = sorted({name for names in rejected.values() for name in names})
    raise ValueError(
        f"{engine.name} does not read these schemes of {checkpoint_format!r}: {each}. It reads "
        f"{', '.join(sorted(readable))}; other checkpoint formats are "
        f"{', '.join(repr(name) for name in FORMATS if name != checkpoint_format)}. Train these layers under another "
        f"recipe, or send them in high precision with high_precision={names[:3]}"
    )

"""Export format "mxfp4", that of GPT-OSS: the experts of a layer in MXFP4, everything else in high precision.

    tensor               dtype  shape                 content
    gate_up_proj_blocks  uint8  [E, 2 I, H / 32, 16]  E2M1 codes, two a byte, the even k in the lower half
    gate_up_proj_scales  uint8  [E, 2 I, H / 32]      E8M0 scales
    down_proj_blocks     uint8  [E, H, I / 32, 16]
    down_proj_scales     uint8  [E, H, I / 32]

E experts, H hidden features, I features between the two projections. Rows of gate and up alternate: gate is in the even
rows of gate_up_proj. Servers leave inputs in 16 bits.

Source: the checkpoints openai/gpt-oss-20b and 120b, and transformers 5.23, integrations/mxfp4.py.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quaver.recipes.formats import E2M1
from quaver.recipes.spec import QuantSpec
from quaver.torch.conversion.export.layouts import (
    FileFormat,
    Inputs,
    Layout,
    Scheme,
    UnsupportedByFormat,
    check_width,
    row_scales,
    stored_codes,
)
from quaver.torch.numerics.quantized import Quantized

#: Modules in high precision, as config.json of the published checkpoints lists them.
HIGH_PRECISION = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")


def _scheme(layout: Layout, spec: QuantSpec, inputs: Inputs) -> Scheme:
    # `inputs` is unused: readers leave the inputs of this format in 16 bits.
    if layout != "mx" or spec.format is not E2M1:
        raise UnsupportedByFormat(
            f"it stores E2M1 codes with one E8M0 scale per 32 values along k, but this weight is {spec}"
        )
    return Scheme(name="mxfp4", layout=layout, weight=spec)


def _tensors(q: Quantized, scheme: Scheme, inputs: Inputs) -> dict[str, Tensor]:
    check_width(q, scheme.layout)
    return {"_blocks": stored_codes(q).unflatten(1, (-1, 16)), "_scales": row_scales(q)}


def _configuration(schemes: Mapping[str, Scheme], left: list[str]) -> dict[str, Any]:
    # Layers whose experts are in high precision are not in the published list.
    experts = [name for name in left if name.endswith(".experts")]
    return {"quant_method": "mxfp4", "modules_to_not_convert": [*HIGH_PRECISION, *experts]}


MXFP4 = FileFormat("mxfp4", "vLLM, SGLang, transformers", _scheme, _tensors, _configuration, stacked=True)

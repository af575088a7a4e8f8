"""GPT-OSS's own format: the experts of a layer as blocks and scales, all else in high precision.

    gate_up_proj_blocks  uint8 [E, 2 I, H / 32, 16], two codes a byte, the even k in the lower half
    gate_up_proj_scales  uint8 [E, 2 I, H / 32], E8M0
    down_proj_blocks, down_proj_scales  the same of [E, H, I]

Rows are the features of the output, of gate and up by turns. Inputs stay in 16 bits.

Source: the checkpoints openai/gpt-oss-20b and 120b, and transformers 5.23, integrations/mxfp4.py.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quaver.core.numbers.formats import E2M1
from quaver.core.spec import QuantSpec
from quaver.torch.model.weights.serving.layouts import (
    FileFormat,
    Inputs,
    Layout,
    Scheme,
    Unfit,
    check_width,
    row_scales,
    stored_codes,
)
from quaver.torch.numerics.quantized import Quantized

#: What the published checkpoints name as left in high precision.
HIGH = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")


def _scheme(layout: Layout, spec: QuantSpec, inputs: Inputs) -> Scheme:
    if layout != "mx" or spec.format is not E2M1:
        raise Unfit(f"it has e2m1 codes with an E8M0 scale for 32 of them, and the weight is {spec}")
    return Scheme(name="mxfp4", layout=layout, weight=spec)


def _tensors(q: Quantized, scheme: Scheme, inputs: Inputs) -> dict[str, Tensor]:
    check_width(q, scheme.layout)
    return {"_blocks": stored_codes(q).unflatten(1, (-1, 16)), "_scales": row_scales(q)}


def _configuration(schemes: Mapping[str, Scheme], left: list[str]) -> dict[str, Any]:
    experts = [name for name in left if name.endswith(".experts")]
    return {"quant_method": "mxfp4", "modules_to_not_convert": [*HIGH, *experts]}


MXFP4 = FileFormat("mxfp4", "vLLM, SGLang, transformers", _scheme, _tensors, _configuration, stacked=True)

"""DeepSeek's block format: float8_e4m3fn weights with a float32 `weight_scale_inv` for each 128 × 128 of them.

    weight[n, k] = codes[n, k] × weight_scale_inv[n // 128, k // 128]

A weight with one scale holds it in every block. Inputs are quantized by the reader, 1 × 128, as they come.

Source: DeepSeek-V3 technical report, arXiv:2412.19437, section 3.3, and the configuration of its checkpoints.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quaver.core.numbers.formats import E4M3
from quaver.core.spec import QuantSpec
from quaver.torch.model.weights.serving.layouts import FileFormat, Inputs, Layout, Scheme, Unfit, stored_codes
from quaver.torch.numerics.quantized import Quantized

SIZE = 128
READS = QuantSpec(E4M3, (1, SIZE), "fp32")


def _scheme(layout: Layout, spec: QuantSpec, inputs: Inputs) -> Scheme:
    if layout not in ("block", "tensor"):
        raise Unfit(f"its blocks of {SIZE} by {SIZE} have one float32 scale each, and {spec} has others")
    if inputs.spec is None:
        raise Unfit("its readers quantize inputs, and this recipe leaves them in high precision")
    return Scheme(name="fp8", layout=layout, weight=spec, input=READS)


def _tensors(q: Quantized, scheme: Scheme, inputs: Inputs) -> dict[str, Tensor]:
    rows, columns = (-(-size // SIZE) for size in q.shape)
    scales = q.scales().expand(rows, columns).contiguous()
    return {"weight": stored_codes(q), "weight_scale_inv": scales}


def _configuration(schemes: Mapping[str, Scheme], left: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [SIZE, SIZE],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": left,
    }


DEEPSEEK = FileFormat("deepseek", "vLLM, SGLang, transformers", _scheme, _tensors, _configuration)

"""Small model that trains under any recipe, its tokens, and the recipes supported by each format."""

from pathlib import Path

import torch
from torch import Tensor, nn

import quaver.torch as qt
from quaver import recipes
from quaver.recipes.spec import Recipe
from quaver.torch.conversion.export.operands import Reader

#: Rows that are whole blocks, of 128 rows too, and some that are not.
WIDTH, HIDDEN, VOCABULARY = 64, 160, 48


def model(recipe: str | Recipe, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """An embedding, three quantized layers and a head in high precision, some steps old where there are histories."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)]
    whole = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY)).to(dtype)
    qt.convert(whole, recipe, skip=["5"])
    if recipes.get(recipe).delayed is not None:
        for _ in range(3):
            whole(tokens()).sum().backward()
    return whole


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))


def dense(folder: Path) -> dict[str, Tensor]:
    """The weights that a reader finds in a folder, by the layers' names."""
    reader = Reader(folder)
    return {prefix.rstrip("."): reader.decoded(prefix).dense() for prefix in reader.quantized()}


#: By format of matrices: recipes, with what the format calls their weights; all others are refused.
HELD: dict[str, dict[str, str]] = {
    "compressed-tensors": {
        "delayed": "float-quantized",
        "tensorwise": "float-quantized",
        "rowwise": "float-quantized",
        "rowwise_bf16_wgrad": "float-quantized",
        "blockwise": "float-quantized",
        "mxfp8": "mxfp8-quantized",
        "mxfp6": "mxfp6-pack-quantized",
        "mxfp4": "mxfp4-pack-quantized",
        "nvfp4": "nvfp4-pack-quantized",
    },
    "deepseek": dict.fromkeys(("delayed", "tensorwise", "blockwise"), "fp8"),
    "modelopt": {
        "delayed": "FP8",
        "tensorwise": "FP8",
        "rowwise": "FP8_PER_CHANNEL_PER_TOKEN",
        "rowwise_bf16_wgrad": "FP8_PER_CHANNEL_PER_TOKEN",
        "mxfp8": "MXFP8",
        "nvfp4": "NVFP4",
    },
}

"""The colour of a recipe: its own in every picture, whatever other recipes are beside it and in whatever order.

Sources: Okabe and Ito's colours, which the colour-blind tell apart (their yellow is too pale for a line).
"""

from colorsys import hsv_to_rgb
from zlib import crc32

from quaver import recipes
from quaver.train.configuration import recipe_name

GREY = "#444444"

COLOURS = {
    "bf16": GREY,
    "delayed": "#0072B2",
    "tensorwise": "#E69F00",
    "rowwise": "#CC79A7",
    "rowwise_bf16_wgrad": "#7A5195",
    "blockwise": "#56B4E9",
    "mxfp8": "#009E73",
    "mxfp6": "#8C6D1F",
    "mxfp4": "#7F0000",
    "nvfp4": "#D55E00",
}


def colour(text: str) -> str:
    """A recipe's colour: its row of the table, or with options, or of a name without a row, one drawn from its specs.

    Args:
        text: as `TrainConfig.recipe` takes it; two texts of one recipe, or schedule, have one colour.
    Raises:
        ValueError: no recipe has this name.
    """
    parts = [(part.recipe, part.end) for part in recipe_name.parts(text)]
    recipe = parts[0][0]
    if len(parts) > 1:
        drawn = crc32(repr(parts).encode())
    elif recipe.name in COLOURS and recipe == recipes.get(recipe.name):
        return COLOURS[recipe.name]
    else:
        drawn = crc32(repr(recipe).encode())
    red_green_blue = hsv_to_rgb((drawn & 0xFFFF) / 0x10000, 0.85, 0.45 + 0.35 * (drawn >> 16) / 0x10000)
    return "#" + "".join(f"{round(255 * part):02X}" for part in red_green_blue)

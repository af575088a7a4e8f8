"""Recipes as a user types them: `mxfp8`, or with options, `delayed(history=16, format="e4m3")`."""

import ast
import re
import warnings
from typing import Any

import quaver.recipes
from quaver.core.spec import Recipe
from quaver.train.configuration.config import shown

#: Characters of a recipe's text; a longer one is a mistake, and Python's parser is not made for any text.
LONGEST = 500


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a recipe's text; the options' values are Python literals.

    Raises: ValueError if the text has another form.
    """
    if len(text) <= LONGEST:
        try:
            with warnings.catch_warnings():
                # Of odd escapes, which are an option's value all the same.
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(text.strip(), mode="eval").body
            if isinstance(tree, ast.Name):
                return tree.id, {}
            if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and not tree.args:
                options = {option.arg: ast.literal_eval(option.value) for option in tree.keywords if option.arg}
                if len(options) == len(tree.keywords):
                    return tree.func.id, options
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            pass  # MemoryError is how the parser says that something is nested too deeply
    raise ValueError(f"recipe {shown(text)} cannot be read; write NAME or NAME(option=value, ...)")


def find(text: str) -> Recipe:
    """The recipe that a text names. Raises: ValueError, with a suggestion, if there is none."""
    name, options = parse(text)
    return quaver.recipes.get(name, **options)


def split(text: str) -> list[str]:
    """The recipes of a comma-separated list; commas inside parentheses belong to a recipe's options."""
    parts, depth = [""], 0
    for letter in text:
        depth = max(0, depth + (letter == "(") - (letter == ")"))
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def folder(text: str) -> str:
    """A recipe's text as part of a folder's name: `delayed(history=16)` becomes `delayed-history=16`."""
    return re.sub(r"[^\w=.,+-]", "", text.replace("(", "-"))

"""Export few kernels for tests: `python -m tests.native.small_export FOLDER [FAMILY ...]`."""

import sys
from pathlib import Path

from quaver.capi.cases import Selection
from quaver.capi.export import export
from quaver.recipes.formats import E4M3

#: Families of the default tests, under half a minute on one core without a cache.
FAMILIES = ("tensor", "mx")

if __name__ == "__main__":
    families = tuple(sys.argv[2:]) or FAMILIES
    export([90], Path(sys.argv[1]), Selection(families=families, formats=(E4M3,), ratios=False, widths=(256,)))

"""Write the outcomes of tests to $OUT/tests.json after each test, so that a run killed at any moment leaves them."""

import json
import os
from pathlib import Path
from typing import Any

#: Tests by outcome, and the error of each failed one.
outcomes: dict[str, dict[str, str]] = {}


def pytest_runtest_logreport(report: Any) -> None:
    # An xdist worker sends its reports to the controller, which writes them.
    if "PYTEST_XDIST_WORKER" in os.environ or not (report.when == "call" or report.failed or report.skipped):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    error = str(crash.message if crash else report.longrepr)[:300] if report.failed else ""
    outcomes.setdefault(report.outcome, {})[report.nodeid] = error
    path = Path(os.environ.get("OUT", "."), "tests.json")
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(outcomes, indent=1), encoding="utf-8")
    os.replace(partial, path)

"""A forked program behaves like one that Python starts."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked

PROGRAMS = {
    "where it is": "import os, sys; print(sys.argv, sys.path[0], os.getcwd(), __name__, os.environ['HERE'])",
    "input": "import sys; print(sys.stdin.read(), sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.encoding)",
    "a code": "raise SystemExit(3)",
    "a word": "import sys; print('said'); sys.exit('a word')",
    "an error": "print('said'); raise ValueError('what was wrong')",
    "Ctrl-C": "raise KeyboardInterrupt",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "signals": "import signal as s; print([str(s.getsignal(n)) for n in (s.SIGTERM, s.SIGCHLD, s.SIGPIPE)])",
    "a session": "import os; print(os.getsid(0) == os.getpid())",
    "its end": "import atexit, threading as t; atexit.register(print, 'last'); t.Timer(0.1, print, ['late']).start()",
    "a full disk": "import os; os.close(1); os.open('/dev/full', os.O_WRONLY); print('said')",
    "warnings": "import warnings; warnings.warn('a warning')",
    "a child": "import os; print('said', flush=True); c = os.fork(); c or os._exit(7); print(os.waitpid(c, 0)[1])",
    "threads": "import os; print(len(os.listdir('/proc/self/task')), sorted(os.listdir('/proc/self/fd')))",
}


@pytest.mark.skipif(forked.quick is subprocess, reason="forked on Linux alone")
@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS)
def test_a_forked_program_is_one_that_python_starts(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "ä")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input").write_text("what is read")
    command = [sys.executable, "-W", "error", "-c", code, "-x", "ö"]
    done = []
    for module in (subprocess, forked.quick):
        with (tmp_path / "input").open() as file:
            options: dict[str, Any] = {"stdin": file, "capture_output": True, "text": True, "start_new_session": True}
            done.append(module.run(command, check=False, **options))
    own, fork = done
    assert (fork.returncode, fork.stdout) == (own.returncode, own.stdout), fork.stderr
    assert fork.stderr.splitlines()[-1:] == own.stderr.splitlines()[-1:]


@pytest.mark.skipif(forked.quick is subprocess, reason="forked on Linux alone")
def test_a_program_is_not_forked_where_libraries_were_imported_under_other_settings() -> None:
    environment = {"JAX_ENABLE_X64": "1"}
    done = forked.quick.run([sys.executable, "-c", ""], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "has imported libraries under" in done.stderr

"""`python -m quaver.train` is the `quaver` command, for where the command itself is not on the path."""

from quaver.train.cli import app

if __name__ == "__main__":
    app(prog_name="quaver")

"""The command `quaver`, and `python -m quaver.train` for where the command itself is not on the path."""

import sys

from quaver.train.commands import installation


def main() -> None:
    """Run the command line; where packages are missing, say which in one sentence and exit with 1."""
    if sentence := installation.missing():
        print(sentence, file=sys.stderr)
        sys.exit(1)
    from quaver.train.commands.cli import app
    from quaver.train.commands.failing import recorded

    recorded(lambda: app(prog_name="quaver"))()


if __name__ == "__main__":
    main()

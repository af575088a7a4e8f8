"""Entry point of the command `quaver`, and of `python -m quaver.train` if the command is not on the path."""

import sys

from quaver.train.commands import installation


def main() -> None:
    """Run the command line; if packages are missing, print which ones and exit with 1."""
    if sentence := installation.missing_packages():
        print(sentence, file=sys.stderr)
        sys.exit(1)
    from quaver.train.commands.cli import app
    from quaver.train.commands.failing import record_crashes

    record_crashes(lambda: app(prog_name="quaver"))()


if __name__ == "__main__":
    main()

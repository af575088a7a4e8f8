"""Print the folder of the C headers, or with --cmake that of the CMake package."""

import argparse

from quaver.include import CMAKE, HEADERS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m quaver.include", description=__doc__)
    parser.add_argument("--cmake", action="store_true", help="print the folder for CMake's quaver_DIR")
    print(CMAKE if parser.parse_args().cmake else HEADERS)


if __name__ == "__main__":
    main()

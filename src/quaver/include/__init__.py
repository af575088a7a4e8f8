"""C and C++ headers, and their CMake package: `python -m quaver.include` prints the folder."""

from pathlib import Path

#: Folder for a compiler's -I: quaver_numerics.h and quaver.hpp.
HEADERS = Path(__file__).resolve().parent
#: Folder for CMake's `quaver_DIR`.
CMAKE = HEADERS / "cmake"

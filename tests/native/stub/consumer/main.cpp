#include <cstdio>
#include <quaver.h>
#include <quaver.hpp>

int main() {
    std::printf("%d %s\n", quaver_version(), quaver_build());
    return quaver_version() != QUAVER_VERSION || quaver::numerics::encode({1.0f}, QVN_E4M3)[0] != 0x38;
}

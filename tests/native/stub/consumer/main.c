#include <quaver.h>
#include <stdio.h>

int main(void) {
    printf("%d %s\n", quaver_version(), quaver_build());
    return quaver_version() != QUAVER_VERSION;
}

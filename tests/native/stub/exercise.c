/* Every kind of call, by as many threads as given, each with a handle of its own. Run under sanitizers. */
#include "quaver.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 200, COLUMNS = 144, ROUNDS = 40 };
static int wrong;

static quaver_tensor matrix(void *data, int64_t rows, int64_t columns) {
    quaver_tensor t = {0};
    t.size = sizeof t, t.dtype = QUAVER_BF16, t.rows = rows, t.columns = columns, t.stride = columns, t.data = data;
    return t;
}
static quaver_tensor codes(char *memory, int64_t rows, int64_t columns, quaver_dtype dtype, quaver_block block) {
    quaver_tensor t = matrix(memory, rows, columns);
    t.dtype = (int32_t)dtype, t.block = (int32_t)block, t.stride = quaver_row_bytes(columns, dtype);
    t.scale = memory + 65536, t.factor = (float *)(memory + 131072);
    return t;
}
static void expect(quaver_status got, int exported) {
    if (got == QUAVER_OK || (!exported && got == QUAVER_ERROR_NOT_EXPORTED)) return;
    fprintf(stderr, "%s\n", quaver_status_text(got));
    __atomic_store_n(&wrong, 1, __ATOMIC_RELAXED);
}

static void *work(void *unused) {
    (void)unused;
    char *memory = aligned_alloc(64, 1 << 20); /* addresses only: nothing reads it */
    void *workspace = memory + 900000 / 64 * 64;
    quaver_handle h = NULL;
    expect(quaver_create(&h, workspace, quaver_workspace_bytes(COLUMNS)), 1);
    for (int i = 0; h && i < ROUNDS; i++) {
        quaver_tensor x = matrix(memory + (i & 1) * 2, ROWS + i, COLUMNS - i);
        float *amax = (float *)(memory + 131200);
        expect(quaver_amax(h, NULL, &x, amax), 1);
        for (int block = QUAVER_TENSOR; block <= QUAVER_NV_SQUARE; block++) {
            quaver_dtype dtype = block >= QUAVER_NV ? QUAVER_E2M1 : QUAVER_E4M3;
            quaver_tensor q = codes(memory + 262144, x.rows, x.columns, dtype, (quaver_block)block);
            quaver_tensor qt = codes(memory + 524288, x.columns, x.rows, dtype, (quaver_block)block);
            if (block == QUAVER_TENSOR) qt.scale = q.scale;
            int exported = block == QUAVER_TENSOR || block == QUAVER_MX || block == QUAVER_MX_SQUARE;
            expect(quaver_quantize(h, NULL, &x, &q, i & 2 ? &qt : NULL, amax, NULL), exported);
            quaver_tensor y = matrix(memory, x.rows, x.columns);
            expect(quaver_dequantize(h, NULL, &q, &y, 1), 0);
        }
    }
    quaver_step step = {.size = sizeof step, .weight = QUAVER_F32, .gradient = QUAVER_BF16};
    quaver_parameter parameter = {.size = sizeof parameter, .rows = ROWS, .columns = COLUMNS, .weight = memory,
                                  .first = memory, .second = memory, .gradient = memory, .count = (float *)memory};
    int64_t programs = quaver_step_programs(ROWS, COLUMNS), row[QUAVER_STEP_FIELDS];
    int32_t(*chunks)[3] = malloc((size_t)programs * sizeof *chunks);
    expect(quaver_step_row(&step, &parameter, 0, row, chunks), 1);
    if (h) expect(quaver_adamw_step(h, NULL, &step, memory, programs, memory, (float *)memory, memory, 1), 0);
    free(chunks);
    if (h) expect(quaver_preload(h), 1);
    expect(quaver_destroy(h), 1);
    free(memory);
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[16];
    int count = argc > 1 ? atoi(argv[1]) : 1;
    for (int i = 0; i < count; i++) pthread_create(&threads[i], NULL, work, NULL);
    for (int i = 0; i < count; i++) pthread_join(threads[i], NULL);
    puts(quaver_build());
    return wrong;
}

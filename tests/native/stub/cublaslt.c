/* A libcublasLt.so.13 that multiplies nothing: it logs each matmul with its attributes and layouts to $STUB_GEMM_LOG,
 * one JSON object a line. $STUB_FAILS names a function that fails; "heuristic" finds no algorithm. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int status;
typedef struct { char text[2048]; int compute, scale; } desc_t;
typedef struct { int type; uint64_t rows, columns; int64_t stride; } layout_t;
typedef struct { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } heuristic_t;
static int alive; /* objects that were created and not destroyed */
static int fails(const char *name) {
    const char *wanted = getenv("STUB_FAILS");
    return wanted && !strcmp(wanted, name);
}
static void *made(size_t bytes) {
    alive++;
    return calloc(1, bytes);
}
static status gone(void *object) {
    alive--;
    free(object);
    return 0;
}

status cublasLtMatmulDescCreate(void **out, int compute, int scale) {
    if (fails("cublasLtMatmulDescCreate")) return 3;
    desc_t *d = *out = made(sizeof *d);
    d->compute = compute, d->scale = scale;
    return 0;
}
status cublasLtMatmulDescDestroy(void *d) { return gone(d); }
status cublasLtMatmulDescSetAttribute(void *desc, int attribute, const void *value, size_t bytes) {
    desc_t *d = desc;
    size_t at = strlen(d->text);
    at += (size_t)snprintf(d->text + at, sizeof d->text - at, "%s\"%d\": \"", at ? ", " : "", attribute);
    for (size_t i = bytes; i-- > 0;)
        at += (size_t)snprintf(d->text + at, sizeof d->text - at, "%02x", ((const unsigned char *)value)[i]);
    snprintf(d->text + at, sizeof d->text - at, "\"");
    return 0;
}
status cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    if (fails("cublasLtMatrixLayoutCreate")) return 7;
    layout_t *l = *out = made(sizeof *l);
    l->type = type, l->rows = rows, l->columns = columns, l->stride = stride;
    return 0;
}
status cublasLtMatrixLayoutDestroy(void *l) { return gone(l); }
status cublasLtMatmulPreferenceCreate(void **out) {
    *out = made(8);
    return 0;
}
status cublasLtMatmulPreferenceDestroy(void *p) { return gone(p); }
status cublasLtMatmulPreferenceSetAttribute(void *p, int attribute, const void *value, size_t bytes) {
    if (attribute != 1 || bytes != 8) return 7;
    memcpy(p, value, 8);
    return 0;
}
status cublasLtMatmulAlgoGetHeuristic(void *h, void *d, void *a, void *b, void *c, void *y, void *p, int wanted,
                                      heuristic_t *found, int *count) {
    (void)h, (void)d, (void)a, (void)b, (void)c, (void)y, (void)p;
    *count = wanted == 1 && !fails("heuristic");
    memset(found, 0, sizeof *found);
    found->algorithm[0] = 42;
    return 0;
}
static void print_layout(FILE *log, const char *name, const layout_t *l) {
    fprintf(log, "\"%s\": [%d, %lu, %lu, %ld], ", name, l->type, (unsigned long)l->rows, (unsigned long)l->columns,
            (long)l->stride);
}
status cublasLtMatmul(void *h, void *desc, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout,
                      const void *beta, const void *c, void *c_layout, void *y, void *y_layout, const uint64_t *algorithm,
                      void *workspace, size_t bytes, void *stream) {
    const desc_t *d = desc;
    int on_device = strstr(d->text, "\"2\": \"00000001\"") != NULL;
    if (fails("cublasLtMatmul")) return 13;
    FILE *log = fopen(getenv("STUB_GEMM_LOG"), "a");
    fprintf(log, "{\"handle\": %lu, \"compute\": %d, \"scale\": %d, \"attributes\": {%s}, ", (unsigned long)h, d->compute,
            d->scale, d->text);
    print_layout(log, "a_layout", a_layout), print_layout(log, "b_layout", b_layout);
    print_layout(log, "c_layout", c_layout), print_layout(log, "y_layout", y_layout);
    if (on_device)
        fprintf(log, "\"alpha\": %lu, \"beta\": %lu, ", (unsigned long)alpha, (unsigned long)beta);
    else
        fprintf(log, "\"alpha\": %g, \"beta\": %g, ", *(const float *)alpha, *(const float *)beta);
    fprintf(log, "\"a\": %lu, \"b\": %lu, \"c\": %lu, \"y\": %lu, \"algorithm\": %lu, \"workspace\": %lu, \"bytes\": %lu, "
            "\"stream\": %lu, \"alive\": %d}\n", (unsigned long)a, (unsigned long)b, (unsigned long)c, (unsigned long)y,
            (unsigned long)algorithm[0], (unsigned long)workspace, (unsigned long)bytes, (unsigned long)stream, alive);
    fclose(log);
    return 0;
}
int stub_alive(void) { return alive; }

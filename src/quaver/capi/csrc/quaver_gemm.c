/* y [m, n] = a [m, k] @ b [n, k].T of quantized operands, by a cublasLt that is found at run time.
 *
 * cuBLAS counts columns first: its A is our b, its B our a, and its D our y, so that both operands are read along k. */
#include "quaver_internal.h"
#include "quaver_cublaslt.h"
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#define TRY QV_TRY

static struct {
    int (*descCreate)(void **, int, int);
    int (*descDestroy)(void *);
    int (*descSet)(void *, int, const void *, size_t);
    int (*layoutCreate)(void **, int, uint64_t, uint64_t, int64_t);
    int (*layoutDestroy)(void *);
    int (*preferenceCreate)(void **);
    int (*preferenceDestroy)(void *);
    int (*preferenceSet)(void *, int, const void *, size_t);
    int (*heuristic)(void *, void *, void *, void *, void *, void *, void *, int, qv_heuristic *, int *);
    int (*matmul)(void *, void *, const void *, const void *, void *, const void *, void *, const void *, const void *,
                  void *, void *, void *, const uint64_t *, void *, size_t, void *);
} lt;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int found;

static int find(void *library, const char *name, void *field) {
    void *symbol = dlsym(library, name);
    memcpy(field, &symbol, sizeof symbol);
    return symbol != NULL;
}

static void load_cublaslt(void) {
    static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"};
    void *library = NULL;
    for (int i = 0; i < 3 && !library; i++) library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    found = library && find(library, "cublasLtMatmulDescCreate", &lt.descCreate) &&
            find(library, "cublasLtMatmulDescDestroy", &lt.descDestroy) &&
            find(library, "cublasLtMatmulDescSetAttribute", &lt.descSet) &&
            find(library, "cublasLtMatrixLayoutCreate", &lt.layoutCreate) &&
            find(library, "cublasLtMatrixLayoutDestroy", &lt.layoutDestroy) &&
            find(library, "cublasLtMatmulPreferenceCreate", &lt.preferenceCreate) &&
            find(library, "cublasLtMatmulPreferenceDestroy", &lt.preferenceDestroy) &&
            find(library, "cublasLtMatmulPreferenceSetAttribute", &lt.preferenceSet) &&
            find(library, "cublasLtMatmulAlgoGetHeuristic", &lt.heuristic) &&
            find(library, "cublasLtMatmul", &lt.matmul);
}

static const int TYPES[] = {
    [QUAVER_BF16] = QV_CUDA_R_16BF,    [QUAVER_F16] = QV_CUDA_R_16F,      [QUAVER_F32] = QV_CUDA_R_32F,
    [QUAVER_E4M3] = QV_CUDA_R_8F_E4M3, [QUAVER_E5M2] = QV_CUDA_R_8F_E5M2, [QUAVER_E2M1] = QV_CUDA_R_4F_E2M1,
};

static int32_t mode_of(int32_t block) {
    switch (block) {
    case QUAVER_MX:
    case QUAVER_MX_SQUARE: return QV_CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    case QUAVER_NV:
    case QUAVER_NV_SQUARE: return QV_CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
    default: return QV_CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    }
}

/* ---- one multiplication: descriptors, then the call ---- */

typedef struct {
    void *desc, *a, *b, *y, *preference;
    int error; /* cublasStatus_t */
} gemm;

static void set(gemm *g, int attribute, const void *value, size_t bytes) {
    if (!g->error) g->error = lt.descSet(g->desc, attribute, value, bytes);
}
#define SET(g, attribute, value) set(g, QV_CUBLASLT_MATMUL_DESC_##attribute, &(value), sizeof(value))

static void describe(gemm *g, const quaver_gemm_options *o, const quaver_tensor *a, const quaver_tensor *b,
                     const quaver_tensor *y) {
    int32_t transposed = QV_CUBLAS_OP_T, straight = QV_CUBLAS_OP_N, mode = mode_of(a->block);
    const void *a_scale = b->scale, *b_scale = a->scale;
    int8_t fast = (int8_t)o->fast_accumulation;
    g->error = lt.descCreate(&g->desc, QV_CUBLAS_COMPUTE_32F, QV_CUDA_R_32F);
    SET(g, TRANSA, transposed);
    SET(g, TRANSB, straight);
    SET(g, FAST_ACCUM, fast);
    SET(g, A_SCALE_POINTER, a_scale);
    SET(g, B_SCALE_POINTER, b_scale);
    if (mode != QV_CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) { /* an attribute of cuBLAS 12.8 */
        SET(g, A_SCALE_MODE, mode);
        SET(g, B_SCALE_MODE, mode);
    }
    if (o->device_alpha) {
        int32_t device = QV_CUBLASLT_POINTER_MODE_DEVICE;
        SET(g, POINTER_MODE, device);
    }
    if (o->bias) {
        int32_t epilogue = QV_CUBLASLT_EPILOGUE_BIAS, type = TYPES[y->dtype == QUAVER_F32 ? QUAVER_BF16 : y->dtype];
        SET(g, EPILOGUE, epilogue);
        SET(g, BIAS_POINTER, o->bias);
        SET(g, BIAS_DATA_TYPE, type);
    }
}

static void layouts(gemm *g, const quaver_tensor *a, const quaver_tensor *b, const quaver_tensor *y) {
    /* Rows are filled with zeros, so that k can be rounded up to them: cuBLAS needs multiples of 16 bytes. */
    int64_t k = a->stride * (a->dtype == QUAVER_E2M1 ? 2 : 1);
    if (!g->error) g->error = lt.layoutCreate(&g->b, TYPES[b->dtype], (uint64_t)k, (uint64_t)b->rows, k);
    if (!g->error) g->error = lt.layoutCreate(&g->a, TYPES[a->dtype], (uint64_t)k, (uint64_t)a->rows, k);
    if (!g->error) g->error = lt.layoutCreate(&g->y, TYPES[y->dtype], (uint64_t)y->columns, (uint64_t)y->rows, y->stride);
}

static void multiply(gemm *g, void *cublaslt, void *stream, const quaver_gemm_options *o, const quaver_tensor *a,
                     const quaver_tensor *b, const quaver_tensor *y) {
    const void *alpha = o->device_alpha ? o->device_alpha : &o->alpha;
    const void *beta = o->device_beta ? o->device_beta : &o->beta;
    size_t bytes = (size_t)o->workspace_bytes;
    qv_heuristic best;
    int count = 0;
    if (!g->error) g->error = lt.preferenceCreate(&g->preference);
    if (!g->error)
        g->error = lt.preferenceSet(g->preference, QV_CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
    if (!g->error) g->error = lt.heuristic(cublaslt, g->desc, g->b, g->a, g->y, g->y, g->preference, 1, &best, &count);
    if (!g->error && !count) g->error = QV_CUBLAS_STATUS_NOT_SUPPORTED;
    if (!g->error)
        g->error = lt.matmul(cublaslt, g->desc, alpha, b->data, g->b, a->data, g->a, beta, y->data, g->y, y->data, g->y,
                             best.algorithm, o->workspace, bytes, stream);
}

static void release(gemm *g) {
    if (g->preference) lt.preferenceDestroy(g->preference);
    void *const all[] = {g->a, g->b, g->y};
    for (int i = 0; i < 3; i++)
        if (all[i]) lt.layoutDestroy(all[i]);
    if (g->desc) lt.descDestroy(g->desc);
}

/* ---- public ---- */

static quaver_status check_options(const quaver_gemm_options *from, quaver_gemm_options *o) {
    if (!from) return QUAVER_ERROR_NULL;
    if (qv_read(o, from, sizeof *o)) return QUAVER_ERROR_SIZE;
    if (o->fast_accumulation & ~1) return QUAVER_ERROR_FORMAT;
    if (!o->device_alpha != !o->device_beta || (!o->workspace && o->workspace_bytes)) return QUAVER_ERROR_NULL;
    if (o->workspace_bytes < 0) return QUAVER_ERROR_WORKSPACE;
    return (uintptr_t)o->workspace & 15 || (uintptr_t)o->bias & 15 ? QUAVER_ERROR_ALIGNMENT : QUAVER_OK;
}

quaver_status quaver_gemm(quaver_handle h, void *cublaslt, void *stream, const quaver_gemm_options *options,
                          const quaver_tensor *a_, const quaver_tensor *b_, const quaver_tensor *y_) {
    quaver_tensor a, b, y;
    quaver_gemm_options o;
    gemm g = {0};
    if (!h || !cublaslt || !a_ || !b_) return QUAVER_ERROR_NULL;
    TRY(check_options(options, &o));
    TRY(qv_check_values(y_, &y));
    if (qv_read(&a, a_, sizeof a)) return QUAVER_ERROR_SIZE;
    int64_t k = a.columns;
    TRY(qv_check_codes(a_, &a, y.rows, k));
    TRY(qv_check_codes(b_, &b, y.columns, k));
    int mx = a.block == QUAVER_MX || a.block == QUAVER_MX_SQUARE;
    int nv = a.block == QUAVER_NV || a.block == QUAVER_NV_SQUARE;
    if (mode_of(a.block) != mode_of(b.block)) return QUAVER_ERROR_MISMATCH;
    if (!(mx || nv || (a.block == QUAVER_TENSOR && b.block == QUAVER_TENSOR))) return QUAVER_ERROR_FORMAT;
    if (a.dtype == QUAVER_E5M2 && b.dtype == QUAVER_E5M2) return QUAVER_ERROR_FORMAT;
    if ((uintptr_t)y.data & 15) return QUAVER_ERROR_ALIGNMENT;
    if (y.rows == 0 || y.columns == 0 || k == 0) return QUAVER_OK;
    pthread_once(&once, load_cublaslt);
    if (!found) return QUAVER_ERROR_NO_CUBLAS;
    describe(&g, &o, &a, &b, &y);
    layouts(&g, &a, &b, &y);
    multiply(&g, cublaslt, stream, &o, &a, &b, &y);
    release(&g);
    if (g.error) qv_set_error(h, g.error);
    return g.error ? QUAVER_ERROR_CUBLAS : QUAVER_OK;
}

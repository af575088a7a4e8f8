/* Driver, handles, and the choice and launch of kernels. */
#include "quaver_internal.h"
#include "quaver_tables.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* ---- the CUDA driver, by dlopen ---- */

#define STATIC_SHARED (48 * 1024) /* bytes of shared memory that need no attribute */
/* Values of the driver's enums. */
enum { MULTIPROCESSOR_COUNT = 16, COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76, MAX_DYNAMIC_SHARED = 8 };

typedef int result; /* CUresult */
static struct {
    result (*ctxGetDevice)(int *);
    result (*deviceGetAttribute)(int *, int, int);
    result (*moduleLoadData)(void **, const void *);
    result (*moduleUnload)(void *);
    result (*moduleGetFunction)(void **, void *, const char *);
    result (*funcSetAttribute)(void *, int, int);
    result (*memsetD32Async)(uint64_t, unsigned, size_t, void *);
    result (*launchKernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                           void **, void **);
} cu;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int loaded;

static int find(void *library, const char *name, void *field) {
    void *symbol = dlsym(library, name);
    memcpy(field, &symbol, sizeof symbol); /* ISO C has no cast from void * to a function */
    return symbol != NULL;
}

static void load_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    loaded = library && find(library, "cuCtxGetDevice", &cu.ctxGetDevice) &&
             find(library, "cuDeviceGetAttribute", &cu.deviceGetAttribute) &&
             find(library, "cuModuleLoadData", &cu.moduleLoadData) &&
             find(library, "cuModuleUnload", &cu.moduleUnload) &&
             find(library, "cuModuleGetFunction", &cu.moduleGetFunction) &&
             find(library, "cuFuncSetAttribute", &cu.funcSetAttribute) &&
             find(library, "cuMemsetD32Async", &cu.memsetD32Async) &&
             find(library, "cuLaunchKernel", &cu.launchKernel);
}

/* ---- handles ---- */

typedef struct { void *module, *function; } slot;
struct quaver_handle_s {
    const qv_table *table;
    void *workspace;
    int64_t workspace_bytes;
    int multiprocessors;
    int error;
    slot slots[];
};

static const qv_table *const tables[] = QV_TABLES;

quaver_status quaver_create(quaver_handle *out, void *workspace, int64_t bytes) {
    int device, major, minor, count;
    if (!out || !workspace) return QUAVER_ERROR_NULL;
    if ((uintptr_t)workspace & 15) return QUAVER_ERROR_ALIGNMENT;
    if (bytes < quaver_workspace_bytes(0)) return QUAVER_ERROR_WORKSPACE;
    pthread_once(&once, load_driver);
    if (!loaded) return QUAVER_ERROR_NO_DRIVER;
    if (cu.ctxGetDevice(&device) || cu.deviceGetAttribute(&major, COMPUTE_MAJOR, device) ||
        cu.deviceGetAttribute(&minor, COMPUTE_MINOR, device) ||
        cu.deviceGetAttribute(&count, MULTIPROCESSOR_COUNT, device))
        return QUAVER_ERROR_DRIVER;
    /* A cubin runs on GPUs of its own major version with at least its minor version. */
    const qv_table *best = NULL;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        const qv_table *t = tables[i];
        if (t->arch / 10 == major && t->arch % 10 <= minor && (!best || t->arch > best->arch)) best = t;
    }
    if (!best) return QUAVER_ERROR_ARCHITECTURE;
    quaver_handle h = calloc(1, sizeof *h + best->slots * sizeof(slot));
    if (!h) return QUAVER_ERROR_MEMORY;
    h->table = best;
    h->workspace = workspace;
    h->workspace_bytes = bytes;
    h->multiprocessors = count;
    *out = h;
    return QUAVER_OK;
}

quaver_status quaver_destroy(quaver_handle h) {
    if (!h) return QUAVER_OK;
    for (uint32_t i = 0; i < h->table->slots; i++)
        if (h->slots[i].module) cu.moduleUnload(h->slots[i].module);
    free(h);
    return QUAVER_OK;
}

static quaver_status driver(quaver_handle h, result error) {
    if (!error) return QUAVER_OK;
    h->error = error;
    return QUAVER_ERROR_DRIVER;
}

static quaver_status load(quaver_handle h, const qv_variant *v) {
    slot *s = &h->slots[v->slot];
    void *module = NULL, *function = NULL;
    if (s->function) return QUAVER_OK;
    result error = cu.moduleLoadData(&module, h->table->images + v->offset);
    if (!error) error = cu.moduleGetFunction(&function, module, v->symbol);
    if (!error && v->shared > STATIC_SHARED) error = cu.funcSetAttribute(function, MAX_DYNAMIC_SHARED, (int)v->shared);
    if (!error)
        s->module = module, s->function = function;
    else if (module)
        cu.moduleUnload(module);
    return driver(h, error);
}

quaver_status quaver_preload(quaver_handle h) {
    if (!h) return QUAVER_ERROR_NULL;
    for (int k = 0; k < QV_KERNELS; k++)
        for (uint32_t i = 0; i < h->table->kernels[k].count; i++) {
            quaver_status s = load(h, &h->table->kernels[k].variants[i]);
            if (s) return s;
        }
    return QUAVER_OK;
}

/* ---- launches ---- */

#define SECOND_AXIS 65535 /* programs along the second axis of a grid */

qv_call *qv_add(qv_work *work, int kernel, uint64_t key, const quaver_tensor *x) {
    qv_call *call = &work->calls[work->n++];
    memset(call, 0, sizeof *call);
    call->kernel = kernel;
    call->key = key;
    call->rows = x->rows;
    call->columns = x->columns;
    call->programs_at = -1;
    return call;
}

static void argument(qv_call *call, uint64_t value) {
    if (call->n < QV_ARGUMENTS) call->value[call->n] = value;
    call->n++;
}
void qv_pointer(qv_call *call, const void *p) { argument(call, (uintptr_t)p); }
void qv_int(qv_call *call, int64_t value) { argument(call, (uint32_t)(int32_t)value); }
void qv_float(qv_call *call, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    argument(call, bits);
}

/* Bit i: argument i is a multiple of 16. */
static uint32_t multiples(const qv_call *call) {
    uint32_t facts = 0;
    for (int i = 0; i < call->n; i++) facts |= (uint32_t)((call->value[i] & 15) == 0) << i;
    return facts;
}

quaver_status qv_find(quaver_handle h, qv_call *call) {
    const qv_kernel *kernel = &h->table->kernels[call->kernel];
    for (uint32_t i = 0; i < kernel->count; i++) {
        const qv_variant *v = &kernel->variants[i];
        /* The grid is the variant's, because its blocks are. */
        int64_t down = call->programs ? call->programs : qv_up(call->rows, v->bm);
        int64_t across = call->second ? call->second : call->axes == QV_ROWS_ONLY ? 1 : qv_up(call->columns, v->bn);
        int tall = call->axes == QV_COLUMNS_FIRST && down > SECOND_AXIS;
        if (v->key != (call->key | (tall ? call->tall : 0)) || v->arguments != call->n) continue;
        if (call->programs_at >= 0) call->value[call->programs_at] = (uint32_t)(down * across);
        int whole = call->rows % v->bm == 0 && call->columns % v->bn == 0;
        if ((v->whole && !whole) || (v->assumes & ~multiples(call))) continue;
        int swapped = tall || call->axes != QV_COLUMNS_FIRST; /* rows are the first axis */
        if ((tall && !call->tall) || (swapped && across > SECOND_AXIS)) return QUAVER_ERROR_SHAPE;
        call->variant = v;
        call->grid[0] = (unsigned)(swapped ? down : across), call->grid[1] = (unsigned)(swapped ? across : down);
        return load(h, v);
    }
    return QUAVER_ERROR_NOT_EXPORTED;
}

static quaver_status launch(quaver_handle h, void *stream, qv_call *call) {
    void *pointers[QV_ARGUMENTS + 2];
    uint64_t scratch[2] = {0, 0}; /* of Triton: global and profiling scratch, which no exported kernel uses */
    const qv_variant *v = call->variant;
    for (int i = 0; i < call->n; i++) pointers[i] = &call->value[i];
    pointers[call->n] = &scratch[0];
    pointers[call->n + 1] = &scratch[1];
    return driver(h, cu.launchKernel(h->slots[v->slot].function, call->grid[0], call->grid[1], 1, v->threads, 1, 1,
                                     v->shared, stream, pointers, NULL));
}

quaver_status qv_run(quaver_handle h, void *stream, qv_work *work) {
    quaver_status s = QUAVER_OK;
    for (int i = 0; !s && i < work->n; i++)
        if (!work->calls[i].variant) s = qv_find(h, &work->calls[i]);
    for (int i = 0; !s && i < 2; i++)
        if (work->zeros[i].bytes)
            s = driver(h, cu.memsetD32Async((uintptr_t)work->zeros[i].data, 0, (size_t)work->zeros[i].bytes / 4, stream));
    for (int i = 0; !s && i < work->n; i++) s = launch(h, stream, &work->calls[i]);
    return s;
}

void qv_set_error(quaver_handle h, int error) { h->error = error; }
int qv_multiprocessors(quaver_handle h) { return h->multiprocessors; }
void *qv_workspace(quaver_handle h) { return h->workspace; }
int64_t qv_workspace_size(quaver_handle h) { return h->workspace_bytes; }

/* ---- checks ---- */

int qv_read(void *to, const void *from, size_t ours) {
    uint32_t size;
    memcpy(&size, from, sizeof size);
    if (size < ours) return 1;
    for (size_t i = ours; i < size; i++)
        if (((const unsigned char *)from)[i]) return 1; /* a newer caller uses what this library does not know */
    memcpy(to, from, ours);
    return 0;
}

static int64_t element_bytes(int32_t dtype) { return dtype == QUAVER_F32 ? 4 : dtype <= QUAVER_F16 ? 2 : 1; }

/* Limits with which every offset within a program's block and every grid fits the kernels' 32 bits. */
#define LONGEST_SIDE ((INT64_C(1) << 31) - (1 << 15))
#define LONGEST_STRIDE (INT64_C(1) << 23)
#define MOST_ELEMENTS (INT64_C(1) << 40)

static quaver_status check_shape(const quaver_tensor *t) {
    if (t->rows < 0 || t->columns < 0 || t->rows > LONGEST_SIDE || t->columns > LONGEST_SIDE)
        return QUAVER_ERROR_SHAPE;
    if (t->stride > LONGEST_STRIDE || (t->columns && t->rows > MOST_ELEMENTS / t->columns)) return QUAVER_ERROR_SHAPE;
    return QUAVER_OK;
}

quaver_status qv_check_values(const quaver_tensor *from, quaver_tensor *x) {
    quaver_status s;
    if (!from) return QUAVER_ERROR_NULL;
    if (qv_read(x, from, sizeof *x)) return QUAVER_ERROR_SIZE;
    if (!x->data) return QUAVER_ERROR_NULL;
    if (x->dtype < QUAVER_BF16 || x->dtype > QUAVER_F32 || x->block != QUAVER_NONE) return QUAVER_ERROR_FORMAT;
    if ((s = check_shape(x))) return s;
    if (x->stride < x->columns) return QUAVER_ERROR_SHAPE;
    return (int64_t)(uintptr_t)x->data % element_bytes(x->dtype) ? QUAVER_ERROR_ALIGNMENT : QUAVER_OK;
}

quaver_status qv_check_codes(const quaver_tensor *from, quaver_tensor *q, int64_t rows, int64_t columns) {
    quaver_status s;
    if (qv_read(q, from, sizeof *q)) return QUAVER_ERROR_SIZE;
    if (!q->data || !q->scale) return QUAVER_ERROR_NULL;
    if (q->dtype < QUAVER_E4M3 || q->dtype > QUAVER_E2M1 || q->block < QUAVER_TENSOR || q->block > QUAVER_NV_SQUARE)
        return QUAVER_ERROR_FORMAT;
    int nv = q->block >= QUAVER_NV;
    if (nv != (q->dtype == QUAVER_E2M1)) return QUAVER_ERROR_FORMAT;
    if (q->rows != rows || q->columns != columns) return QUAVER_ERROR_MISMATCH;
    if ((s = check_shape(q))) return s;
    if (q->stride != quaver_row_bytes(columns, (quaver_dtype)q->dtype)) return QUAVER_ERROR_SHAPE;
    if (nv && !q->factor) return QUAVER_ERROR_NULL;
    uintptr_t scale_mask = q->block == QUAVER_TENSOR ? 3 : 15;
    if (((uintptr_t)q->data & 15) || ((uintptr_t)q->scale & scale_mask) || (nv && ((uintptr_t)q->factor & 3)))
        return QUAVER_ERROR_ALIGNMENT;
    return QUAVER_OK;
}

/* ---- sizes and texts ---- */

#define COLUMN_BLOCK 64 /* columns of the programs that share a counter: quaver.torch.backends.gpu.rowwise */

int64_t quaver_workspace_bytes(int64_t columns) {
    int64_t words = columns > 0 ? columns + qv_up(columns, COLUMN_BLOCK) : 0;
    return 4 * (words > 4 ? words : 4);
}

int64_t quaver_row_bytes(int64_t columns, quaver_dtype dtype) {
    switch (dtype) {
    case QUAVER_E4M3:
    case QUAVER_E5M2: return qv_up(columns, 16) * 16;
    case QUAVER_E2M1: return qv_up(columns, 32) * 16;
    case QUAVER_F32: return 4 * columns;
    default: return 2 * columns;
    }
}

int64_t quaver_scale_bytes(int64_t rows, int64_t columns, quaver_block block) {
    switch (block) {
    case QUAVER_TENSOR: return 4;
    case QUAVER_ROW: return 4 * rows;
    case QUAVER_1X128: return 4 * rows * qv_up(columns, 128);
    case QUAVER_128X128: return 4 * qv_up(rows, 128) * 4 * qv_up(columns, 512);
    case QUAVER_MX:
    case QUAVER_MX_SQUARE: return 512 * qv_up(rows, 128) * qv_up(columns, 128);
    case QUAVER_NV:
    case QUAVER_NV_SQUARE: return 512 * qv_up(rows, 128) * qv_up(columns, 64);
    default: return 0;
    }
}

int quaver_last_driver_error(quaver_handle h) { return h ? h->error : 0; }
int quaver_version(void) { return QUAVER_VERSION; }
const char *quaver_build(void) { return QV_BUILD; }

const char *quaver_status_text(quaver_status status) {
    static const char *const texts[] = {
        "no error",
        "a required pointer is NULL",
        "the size of a struct is too small, or it sets fields that this version does not know",
        "a dtype, block or option that this call does not support",
        "a side is negative or too large, or a stride is below the row or above 2^23",
        "an address is not aligned",
        "tensors of one call differ in shape, dtype or block",
        "the workspace is smaller than quaver_workspace_bytes",
        "the CUDA driver reported an error",
        "libcuda.so.1 was not found or is too old",
        "no kernels were exported for this GPU",
        "no kernel was exported for this case",
        "no host memory",
        "libcublasLt was not found or is too old",
        "cuBLASLt reported an error, or has no GEMM for this",
    };
    int at = (int)status;
    return at >= 0 && at < (int)(sizeof texts / sizeof *texts) ? texts[at] : "unknown status";
}

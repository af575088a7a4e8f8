/* Quantization and dequantization: which kernels a call needs, and their arguments. */
#include "quaver_internal.h"
#include "quaver_tables.h"
#include <string.h>

#define TRY QV_TRY

static int square(const quaver_tensor *q) {
    return q->block == QUAVER_128X128 || q->block == QUAVER_MX_SQUARE || q->block == QUAVER_NV_SQUARE;
}
static void matrix(qv_call *call, const quaver_tensor *x) {
    qv_int(call, x->rows), qv_int(call, x->columns), qv_int(call, x->stride);
}
/* An argument that takes the number of programs once the variant is known. */
static void programs(qv_call *call) {
    call->programs_at = call->n;
    qv_int(call, 0);
}
static int64_t lines(int64_t n) { return qv_up(n, 16); }

/* ---- one scale for the tensor ---- */

static void measure(qv_work *work, quaver_handle h, const quaver_tensor *x, float *amax) {
    qv_call *call = qv_add(work, QV_AMAX, QV_AMAX_X(x->dtype), x);
    call->tall = QV_AMAX_TALL(1);
    qv_pointer(call, x->data), qv_pointer(call, amax), qv_pointer(call, qv_workspace(h));
    matrix(call, x);
    programs(call);
}

quaver_status quaver_amax(quaver_handle h, void *stream, const quaver_tensor *x_, float *amax) {
    quaver_tensor x;
    qv_work work = {0};
    TRY(qv_check_values(x_, &x));
    if (!h || !amax) return QUAVER_ERROR_NULL;
    if ((uintptr_t)amax & 3) return QUAVER_ERROR_ALIGNMENT;
    if (x.rows && x.columns) measure(&work, h, &x, amax);
    return qv_run(h, stream, &work);
}

static quaver_status by_tensor(qv_work *work, quaver_handle h, const quaver_tensor *x, const quaver_tensor *q,
                               const quaver_tensor *qt, float *amax, const quaver_options *o) {
    const quaver_tensor *one = q ? q : qt;
    if (!amax || (o->factor && !o->newest)) return QUAVER_ERROR_NULL;
    if (q && qt && q->scale != qt->scale) return QUAVER_ERROR_MISMATCH; /* one number, written once */
    if (!o->factor) measure(work, h, x, amax);
    qv_call *call = qv_add(work, QV_CAST,
                           QV_CAST_X(x->dtype) | QV_CAST_DTYPE(one->dtype) | QV_CAST_POWER_OF_TWO(o->power_of_two) |
                               QV_CAST_ROWS(q != NULL) | QV_CAST_COLUMNS(qt != NULL) |
                               QV_CAST_MEASURED(o->factor == NULL),
                           x);
    /* Blocks of 128 x 64 also cover the zero padding of both results, to 16. */
    qv_pointer(call, x->data);
    if (q) qv_pointer(call, q->data);
    if (qt) qv_pointer(call, qt->data);
    qv_pointer(call, one->scale), qv_pointer(call, amax);
    if (o->factor) qv_pointer(call, o->factor), qv_pointer(call, o->newest), qv_pointer(call, qv_workspace(h));
    matrix(call, x);
    qv_int(call, q ? 16 * lines(x->columns) : 0), qv_int(call, qt ? lines(x->rows) : 0);
    programs(call);
    return QUAVER_OK;
}

/* ---- a scale for each row ---- */

#define LONGEST_ROW 16384 /* columns that a program keeps in registers */
#define LONGEST_LOG2 14

#define MANY_STEPS 2 /* log2 of the blocks that a program takes of a matrix with many rows */

/* log2 of the blocks that a program takes, where each multiprocessor gets `each` programs of `elements` rows. The results
 * do not depend on it: fewer programs send fewer maxima of columns. */
static uint64_t steps_of(quaver_handle h, int64_t rows, int64_t elements, int each) {
    return rows / (elements * each * qv_multiprocessors(h)) > 1 << (MANY_STEPS - 1) ? MANY_STEPS : 0;
}

static void column_amaxes(qv_work *work, quaver_handle h, const quaver_tensor *x, const void *amaxes) {
    uint64_t steps = steps_of(h, x->rows * qv_up(x->columns, 256), 32, 8);
    qv_call *call = qv_add(work, QV_COLUMN_AMAX, QV_COLUMN_AMAX_X(x->dtype) | QV_COLUMN_AMAX_STEPS(steps), x);
    qv_pointer(call, x->data), qv_pointer(call, amaxes);
    matrix(call, x);
}

static void rows(qv_work *work, quaver_handle h, const quaver_tensor *x, const quaver_tensor *q, const void *amaxes,
                 const quaver_options *o) {
    quaver_status s = QUAVER_ERROR_NOT_EXPORTED;
    uint64_t width = qv_log2(16 * lines(x->columns));
    int wide = x->columns > LONGEST_ROW;
    qv_call *call = qv_add(work, wide ? QV_LONG_ROWWISE : QV_ROWWISE,
                           QV_ROWWISE_X(x->dtype) | QV_ROWWISE_DTYPE(q->dtype) |
                               QV_ROWWISE_POWER_OF_TWO(o->power_of_two), /* the first fields of both are the same */
                           x);
    call->axes = QV_ROWS_ONLY;
    qv_pointer(call, x->data), qv_pointer(call, q->data), qv_pointer(call, q->scale);
    if (amaxes && !wide) qv_pointer(call, amaxes);
    matrix(call, x);
    qv_int(call, 16 * lines(x->columns));
    uint64_t key = call->key | QV_ROWWISE_AMAX_VALUES(amaxes != NULL);
    /* The results do not depend on the kernel's width: take the narrowest that was exported. */
    for (; !wide && s == QUAVER_ERROR_NOT_EXPORTED && width <= LONGEST_LOG2; width++) {
        int64_t columns = INT64_C(1) << width, elements = x->columns == columns ? LONGEST_ROW : LONGEST_ROW / 2;
        int64_t height = elements > columns ? elements / columns : 1;
        uint64_t steps = amaxes ? steps_of(h, x->rows, height, 4) : 0;
        call->key = key | QV_ROWWISE_BN(width) | QV_ROWWISE_STEPS(steps);
        s = qv_find(h, call);
    }
}

static quaver_status by_rows(qv_work *work, quaver_handle h, const quaver_tensor *x, const quaver_tensor *q,
                             const quaver_tensor *qt, const quaver_options *o) {
    void *amaxes = qt ? qv_workspace(h) : NULL;
    if (qt && qv_workspace_size(h) < quaver_workspace_bytes(x->columns)) return QUAVER_ERROR_WORKSPACE;
    if (q) rows(work, h, x, q, amaxes, o);
    if (!qt) return QUAVER_OK;
    if (!q || x->columns > LONGEST_ROW) column_amaxes(work, h, x, amaxes);
    qv_call *call = qv_add(work, QV_COLUMNWISE,
                           QV_COLUMNWISE_X(x->dtype) | QV_COLUMNWISE_DTYPE(qt->dtype) |
                               QV_COLUMNWISE_POWER_OF_TWO(o->power_of_two),
                           x);
    qv_pointer(call, x->data), qv_pointer(call, qt->data), qv_pointer(call, qt->scale), qv_pointer(call, amaxes);
    matrix(call, x);
    qv_int(call, lines(x->rows)), qv_int(call, qv_up(x->rows, 128));
    return QUAVER_OK;
}

/* ---- float scales of 1 x 128 or 128 x 128 ---- */

static quaver_status by_blocks(qv_work *work, const quaver_tensor *x, const quaver_tensor *q, const quaver_tensor *qt,
                               const quaver_options *o) {
    const quaver_tensor *one = q ? q : qt, *both[2] = {q, qt};
    int squares = square(one);
    uint64_t key = QV_BLOCKWISE_X(x->dtype) | QV_BLOCKWISE_DTYPE(one->dtype) |
                   QV_BLOCKWISE_POWER_OF_TWO(o->power_of_two) | QV_BLOCKWISE_ROWS(q != NULL) |
                   QV_BLOCKWISE_COLUMNS(qt != NULL); /* the fields of both kernels are the same */
    qv_call *call = qv_add(work, squares ? QV_SQUARES : QV_BLOCKWISE, key, x);
    qv_pointer(call, x->data);
    if (q) qv_pointer(call, q->data);
    if (qt) qv_pointer(call, qt->data);
    if (q) qv_pointer(call, q->scale);
    if (qt) qv_pointer(call, qt->scale);
    matrix(call, x);
    qv_int(call, q ? 16 * lines(x->columns) : 0), qv_int(call, qt ? lines(x->rows) : 0);
    qv_int(call, !q ? 0 : squares ? 4 * qv_up(x->columns, 512) : x->rows);
    qv_int(call, !qt ? 0 : squares ? 4 * qv_up(x->rows, 512) : x->columns);
    for (int i = 0; squares && i < 2; i++) /* kernels do not write the padding of the scales */
        if (both[i] && qv_up(both[i]->columns, 128) % 4) {
            work->zeros[i].data = both[i]->scale;
            work->zeros[i].bytes = quaver_scale_bytes(both[i]->rows, both[i]->columns, QUAVER_128X128);
        }
    return QUAVER_OK;
}

/* ---- MX ---- */

static quaver_status microscaled(qv_work *work, const quaver_tensor *x, const quaver_tensor *q,
                                 const quaver_tensor *qt) {
    const quaver_tensor *one = q ? q : qt;
    uint64_t key = QV_MXFP8_COLUMNS_X(x->dtype) | QV_MXFP8_COLUMNS_DTYPE(one->dtype) |
                   QV_MXFP8_COLUMNS_SQUARE(square(one)); /* the first fields of both kernels are the same */
    if (qt) key |= QV_MXFP8_COLUMNS_ROWS(q != NULL);
    qv_call *call = qv_add(work, qt ? QV_MXFP8_COLUMNS : QV_MXFP8_ROWS, key, x);
    qv_pointer(call, x->data);
    if (q) qv_pointer(call, q->data), qv_pointer(call, q->scale);
    if (qt) qv_pointer(call, qt->data), qv_pointer(call, qt->scale);
    matrix(call, x);
    qv_int(call, 16 * lines(x->columns));
    if (qt) qv_int(call, 4 * lines(x->rows));
    qv_int(call, qv_up(x->columns, 128));
    if (qt) qv_int(call, qv_up(x->rows, 128));
    return QUAVER_OK;
}

/* ---- NVFP4 ---- */

/* Halves of a word, each odd, so that no argument is a multiple of 16. */
static void halves(qv_call *call, uint32_t word) {
    qv_int(call, 2 * (int64_t)(word & 0xFFFF) + 1), qv_int(call, 2 * (int64_t)(word >> 16) + 1);
}

static void rotated_amax(qv_work *work, quaver_handle h, const quaver_tensor *x, int down, float *amax) {
    qv_call *call = qv_add(work, QV_ROTATED_AMAX, QV_ROTATED_AMAX_X(x->dtype) | QV_ROTATED_AMAX_DOWN(down), x);
    qv_pointer(call, x->data), qv_pointer(call, amax), qv_pointer(call, qv_workspace(h));
    matrix(call, x);
    programs(call);
}

static void by_two_levels(qv_work *work, const quaver_tensor *x, const quaver_tensor *q, int down, float *amax,
                          const quaver_options *o) {
    int64_t k = down ? x->rows : x->columns;
    if (o->hadamard) k = 16 * lines(k);
    uint64_t key = QV_NVFP4_ALONG_X(x->dtype) | QV_NVFP4_ALONG_POWER_OF_TWO(o->power_of_two) |
                   QV_NVFP4_ALONG_SQUARE(square(q)) | QV_NVFP4_ALONG_STOCHASTIC(o->stochastic) |
                   QV_NVFP4_ALONG_HADAMARD(o->hadamard); /* the fields of both kernels are the same */
    qv_call *call = qv_add(work, down ? QV_NVFP4_DOWN : QV_NVFP4_ALONG, key, x);
    qv_pointer(call, x->data), qv_pointer(call, q->data), qv_pointer(call, q->scale), qv_pointer(call, q->factor);
    qv_pointer(call, amax);
    if (o->stochastic) qv_pointer(call, o->count);
    matrix(call, x);
    qv_int(call, k), qv_int(call, 4 * qv_up(k, 32)), qv_int(call, qv_up(k, 64));
    uint32_t words[3] = {o->tensor_id, (uint32_t)o->seed, (uint32_t)(o->seed >> 32)};
    for (int i = 0; i < 3; i++) halves(call, o->stochastic ? words[i] : 0);
}

static quaver_status nvfp4(qv_work *work, quaver_handle h, const quaver_tensor *x, const quaver_tensor *q,
                           const quaver_tensor *qt, float *amax, const quaver_options *o) {
    const quaver_tensor *both[2] = {q, qt};
    if (!amax || (o->stochastic && !o->count)) return QUAVER_ERROR_NULL;
    if ((uintptr_t)o->count & 7) return QUAVER_ERROR_ALIGNMENT;
    if (o->stochastic && !o->hadamard && ((q && x->columns % 4) || (qt && x->rows % 4))) return QUAVER_ERROR_SHAPE;
    if (!o->hadamard) measure(work, h, x, amax);
    for (int down = 0; down < 2; down++) {
        if (!both[down]) continue;
        if (o->hadamard) rotated_amax(work, h, x, down, amax);
        by_two_levels(work, x, both[down], down, amax, o);
    }
    return QUAVER_OK;
}

/* ---- public ---- */

quaver_status qv_check_options(const quaver_options *from, quaver_options *o, const quaver_tensor *one) {
    memset(o, 0, sizeof *o);
    o->size = sizeof *o, o->power_of_two = 1;
    if (from && qv_read(o, from, sizeof *o)) return QUAVER_ERROR_SIZE;
    int nv = one->block >= QUAVER_NV;
    if ((o->power_of_two & ~1) || (o->stochastic & ~1) || (o->hadamard & ~1)) return QUAVER_ERROR_FORMAT;
    if (((o->stochastic || o->hadamard) && !nv) || (o->factor && one->block != QUAVER_TENSOR))
        return QUAVER_ERROR_FORMAT;
    if (o->hadamard && one->block == QUAVER_NV_SQUARE) return QUAVER_ERROR_FORMAT;
    return ((uintptr_t)o->factor & 3) || ((uintptr_t)o->newest & 3) ? QUAVER_ERROR_ALIGNMENT : QUAVER_OK;
}

quaver_status quaver_quantize(quaver_handle h, void *stream, const quaver_tensor *x_, const quaver_tensor *q_,
                              const quaver_tensor *qt_, float *amax, const quaver_options *options) {
    quaver_tensor x, q, qt;
    quaver_options o;
    if (!h || !(q_ || qt_)) return QUAVER_ERROR_NULL;
    TRY(qv_check_values(x_, &x));
    if (q_) TRY(qv_check_codes(q_, &q, x.rows, x.columns));
    if (qt_) TRY(qv_check_codes(qt_, &qt, x.columns, x.rows));
    if (q_ && qt_ && (q.block != qt.block || q.dtype != qt.dtype)) return QUAVER_ERROR_MISMATCH;
    const quaver_tensor *straight = q_ ? &q : NULL, *transposed = qt_ ? &qt : NULL, *one = q_ ? &q : &qt;
    TRY(qv_check_options(options, &o, one));
    if ((uintptr_t)amax & 3) return QUAVER_ERROR_ALIGNMENT;
    if (x.rows == 0 || x.columns == 0) return QUAVER_OK;
    qv_work work = {0};
    switch (one->block) {
    case QUAVER_TENSOR: TRY(by_tensor(&work, h, &x, straight, transposed, amax, &o)); break;
    case QUAVER_ROW: TRY(by_rows(&work, h, &x, straight, transposed, &o)); break;
    case QUAVER_1X128:
    case QUAVER_128X128: TRY(by_blocks(&work, &x, straight, transposed, &o)); break;
    case QUAVER_MX:
    case QUAVER_MX_SQUARE: TRY(microscaled(&work, &x, straight, transposed)); break;
    default: TRY(nvfp4(&work, h, &x, straight, transposed, amax, &o));
    }
    return qv_run(h, stream, &work);
}

/* ---- delayed scaling ---- */

#define LONGEST_HISTORY 1024
#define WIDEST_MARGIN 600 /* 2^-margin beyond it saturates any factor */

quaver_status quaver_roll(quaver_handle h, void *stream, const quaver_history *from, const void *table, float *factors) {
    quaver_history o;
    qv_work work = {0};
    quaver_tensor all = {0};
    quaver_status s = QUAVER_ERROR_NOT_EXPORTED;
    if (!h || !from) return QUAVER_ERROR_NULL;
    if (qv_read(&o, from, sizeof o)) return QUAVER_ERROR_SIZE;
    if (!table || !factors) return QUAVER_ERROR_NULL;
    if (o.layers < 0 || o.layers > 1 << 30 || o.length < 1 || o.length > LONGEST_HISTORY || o.step < 0 ||
        o.step > 1 << 20 || o.column_step < 0 || o.column_step > 1 << 28)
        return QUAVER_ERROR_SHAPE;
    if ((o.most_recent & ~1) || (o.power_of_two & ~1)) return QUAVER_ERROR_FORMAT;
    for (int i = 0; i < 3; i++)
        if (o.dtypes[i] != QUAVER_E4M3 && o.dtypes[i] != QUAVER_E5M2) return QUAVER_ERROR_FORMAT;
    if (((uintptr_t)table & 7) || ((uintptr_t)factors & 3)) return QUAVER_ERROR_ALIGNMENT;
    if (!o.layers) return QUAVER_OK;
    all.rows = o.layers, all.columns = 3;
    qv_call *call = qv_add(&work, QV_ROLL, 0, &all);
    call->axes = QV_ROWS_FIRST;
    int margin = o.margin < -WIDEST_MARGIN ? -WIDEST_MARGIN : o.margin > WIDEST_MARGIN ? WIDEST_MARGIN : o.margin;
    qv_pointer(call, table), qv_pointer(call, factors);
    qv_int(call, o.length), qv_int(call, o.step), qv_int(call, o.column_step), qv_int(call, margin);
    uint64_t key = QV_ROLL_LARGEST(!o.most_recent) | QV_ROLL_POWER0(o.power_of_two) |
                   QV_ROLL_EMAX0(o.dtypes[0] == QUAVER_E5M2) | QV_ROLL_EMAX1(o.dtypes[1] == QUAVER_E5M2) |
                   QV_ROLL_EMAX2(o.dtypes[2] == QUAVER_E5M2);
    /* The results do not depend on the block: take the shortest that was exported. */
    for (uint64_t block = qv_log2(o.length); s == QUAVER_ERROR_NOT_EXPORTED && block <= 10; block++) {
        call->key = key | QV_ROLL_BLOCK(block);
        s = qv_find(h, call);
    }
    return qv_run(h, stream, &work);
}

/* ---- dequantization ---- */

/* Rows and columns that share a scale, by quaver_block; 0 is the whole axis. */
static const uint8_t HEIGHTS[] = {0, 0, 1, 1, 128, 1, 32, 1, 16}, WIDTHS[] = {0, 0, 0, 128, 128, 32, 32, 16, 16};
static uint64_t side(uint8_t n) { return n ? 1 + qv_log2(n) : 0; } /* as in a key */

quaver_status quaver_dequantize(quaver_handle h, void *stream, const quaver_tensor *q_, const quaver_tensor *y_,
                                int32_t power_of_two) {
    quaver_tensor q, y;
    if (!h || !q_) return QUAVER_ERROR_NULL;
    TRY(qv_check_values(y_, &y));
    TRY(qv_check_codes(q_, &q, y.rows, y.columns));
    if (power_of_two & ~1) return QUAVER_ERROR_FORMAT;
    int nv = q.block >= QUAVER_NV, mx = !nv && q.block >= QUAVER_MX;
    if (y.dtype == QUAVER_F16 || (y.dtype == QUAVER_BF16 && !power_of_two && !mx)) return QUAVER_ERROR_FORMAT;
    if (y.stride != y.columns) return QUAVER_ERROR_SHAPE;
    if (q.rows == 0 || q.columns == 0) return QUAVER_OK;
    uint64_t kind = nv ? QV_KIND_TWO_LEVEL : mx ? QV_KIND_E8M0 : QV_KIND_FLOAT32;
    qv_work work = {0};
    qv_call *call = qv_add(&work, QV_DECODE,
                            QV_DECODE_OUT(y.dtype) | QV_DECODE_CODES(q.dtype) | QV_DECODE_KIND(kind) |
                                QV_DECODE_BR(side(HEIGHTS[q.block])) | QV_DECODE_BC(side(WIDTHS[q.block])) |
                                QV_DECODE_POWER_OF_TWO(nv && power_of_two),
                            &y);
    int64_t scale_stride = 0, scale_step = 0;
    switch (q.block) {
    case QUAVER_TENSOR:
    case QUAVER_ROW: scale_stride = 1, scale_step = 1; break;
    case QUAVER_1X128: scale_stride = 1, scale_step = q.rows; break;
    case QUAVER_128X128: scale_stride = 4 * qv_up(q.columns, 512), scale_step = 1; break;
    default: break;
    }
    int64_t across_of = nv ? 64 : mx ? 128 : WIDTHS[q.block] ? 512 : 4 * q.columns;
    qv_pointer(call, q.data), qv_pointer(call, q.scale);
    if (nv) qv_pointer(call, q.factor);
    qv_pointer(call, y.data);
    qv_int(call, q.rows), qv_int(call, q.columns), qv_int(call, q.stride);
    qv_int(call, scale_stride), qv_int(call, scale_step), qv_int(call, y.columns);
    qv_int(call, qv_up(q.columns, across_of));
    return qv_run(h, stream, &work);
}

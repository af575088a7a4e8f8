/* Activations, norms, rotary positions and cross entropy. */
#include "quaver_internal.h"
#include "quaver_tables.h"

#define TRY QV_TRY

static int same_matrix(const quaver_tensor *a, const quaver_tensor *b) {
    return a->rows == b->rows && a->columns == b->columns && a->dtype == b->dtype;
}
/* Check a matrix that must agree with another, and copy it. */
static quaver_status like(const quaver_tensor *from, quaver_tensor *to, const quaver_tensor *other) {
    TRY(qv_check_values(from, to));
    return same_matrix(to, other) ? QUAVER_OK : QUAVER_ERROR_MISMATCH;
}
static int contiguous(const quaver_tensor *t) { return t->stride == t->columns; }
static int empty(const quaver_tensor *t) { return t->rows == 0 || t->columns == 0; }

/* Fill the scales of ragged MX tiles with zeros: these kernels do not write their padding. */
static void pad_scales(qv_work *work, const quaver_tensor *q) {
    if (q->rows % 128 == 0 && q->columns % 128 == 0) return;
    work->zeros[0].data = q->scale;
    work->zeros[0].bytes = quaver_scale_bytes(q->rows, q->columns, QUAVER_MX);
}

/* ---- activations ---- */

static const struct { uint8_t formula, gated; } FORMULAS[] = {
    [QUAVER_LINEAR] = {QV_FORMULA_LINEAR, 0},
    [QUAVER_GELU] = {QV_FORMULA_GELU, 0},
    [QUAVER_GELU_EXACT] = {QV_FORMULA_GELU_EXACT, 0},
    [QUAVER_QUICK_GELU] = {QV_FORMULA_QUICK_GELU, 0},
    [QUAVER_RELU] = {QV_FORMULA_RELU, 0},
    [QUAVER_SQUARED_RELU] = {QV_FORMULA_SQUARED_RELU, 0},
    [QUAVER_SILU] = {QV_FORMULA_SILU, 0},
    [QUAVER_GLU] = {QV_FORMULA_SIGMOID, 1},
    [QUAVER_GEGLU] = {QV_FORMULA_GELU, 1},
    [QUAVER_GEGLU_EXACT] = {QV_FORMULA_GELU_EXACT, 1},
    [QUAVER_QUICK_GEGLU] = {QV_FORMULA_QUICK_GELU, 1},
    [QUAVER_REGLU] = {QV_FORMULA_RELU, 1},
    [QUAVER_SQUARED_REGLU] = {QV_FORMULA_SQUARED_RELU, 1},
    [QUAVER_SWIGLU] = {QV_FORMULA_SILU, 1},
    [QUAVER_CLAMPED_SWIGLU] = {QV_FORMULA_CLAMPED_SILU, 1},
};

/* Check activation, gate and value; value->data is NULL unless gated. */
static quaver_status check_inputs(quaver_activation activation, const quaver_tensor *gate_, const quaver_tensor *value_,
                                  quaver_tensor *gate, quaver_tensor *value) {
    if ((int)activation < QUAVER_LINEAR || (int)activation > QUAVER_CLAMPED_SWIGLU) return QUAVER_ERROR_FORMAT;
    TRY(qv_check_values(gate_, gate));
    *value = (quaver_tensor){0};
    if (!FORMULAS[activation].gated) return value_ ? QUAVER_ERROR_FORMAT : QUAVER_OK;
    return like(value_, value, gate);
}

static void limits(qv_call *call, quaver_activation activation, float limit, float alpha) {
    int used = activation == QUAVER_CLAMPED_SWIGLU;
    qv_float(call, used ? limit : 0), qv_float(call, used ? alpha : 0);
}

/* Gate, and value if gated. */
static void inputs(qv_call *call, const quaver_tensor *gate, const quaver_tensor *value) {
    call->axes = QV_ROWS_FIRST;
    qv_pointer(call, gate->data);
    if (value->data) qv_pointer(call, value->data);
}
static void extents(qv_call *call, const quaver_tensor *gate, const quaver_tensor *value) {
    qv_int(call, gate->rows), qv_int(call, gate->columns), qv_int(call, gate->stride), qv_int(call, value->stride);
}

quaver_status quaver_activate(quaver_handle h, void *stream, quaver_activation activation, const quaver_tensor *gate_,
                              const quaver_tensor *value_, const quaver_tensor *y_, float limit, float alpha) {
    quaver_tensor gate, value, y;
    qv_work work = {0};
    if (!h) return QUAVER_ERROR_NULL;
    TRY(check_inputs(activation, gate_, value_, &gate, &value));
    TRY(like(y_, &y, &gate));
    if (!contiguous(&y)) return QUAVER_ERROR_SHAPE;
    if (empty(&gate)) return QUAVER_OK;
    qv_call *call = qv_add(&work, QV_ACTIVATE,
                           QV_ACTIVATE_GATE(gate.dtype) | QV_ACTIVATE_F(FORMULAS[activation].formula) |
                               QV_ACTIVATE_GATED(FORMULAS[activation].gated) | QV_ACTIVATE_MODE(QV_MODE_NONE) |
                               QV_ACTIVATE_POWER_OF_TWO(1),
                           &gate);
    inputs(call, &gate, &value);
    qv_pointer(call, y.data);
    extents(call, &gate, &value);
    qv_int(call, gate.columns), qv_int(call, 0); /* q's stride, qt's lines */
    call->programs_at = call->n;
    qv_int(call, 0);
    limits(call, activation, limit, alpha);
    return qv_run(h, stream, &work);
}

/* One scale for the tensor, by the factor of delayed scaling. */
static void activate_by_tensor(qv_work *work, quaver_handle h, quaver_activation activation, const quaver_tensor *gate,
                               const quaver_tensor *value, const quaver_tensor *q, const quaver_tensor *qt, float *amax,
                               const quaver_options *o) {
    qv_call *call = qv_add(work, QV_ACTIVATE,
                           QV_ACTIVATE_GATE(gate->dtype) | QV_ACTIVATE_F(FORMULAS[activation].formula) |
                               QV_ACTIVATE_GATED(FORMULAS[activation].gated) | QV_ACTIVATE_MODE(QV_MODE_TENSOR) |
                               QV_ACTIVATE_Q(q != NULL) | QV_ACTIVATE_QT(qt != NULL) |
                               QV_ACTIVATE_POWER_OF_TWO(o->power_of_two),
                           gate);
    inputs(call, gate, value);
    if (q) qv_pointer(call, q->data);
    if (qt) qv_pointer(call, qt->data);
    qv_pointer(call, (q ? q : qt)->scale), qv_pointer(call, amax), qv_pointer(call, o->factor);
    qv_pointer(call, qv_workspace(h));
    extents(call, gate, value);
    qv_int(call, q ? q->stride : gate->columns), qv_int(call, qt ? qt->stride / 16 : 0);
    call->programs_at = call->n;
    qv_int(call, 0);
}

static void activate_blocks(qv_work *work, quaver_activation activation, const quaver_tensor *gate,
                            const quaver_tensor *value, const quaver_tensor *q, const quaver_options *o) {
    int mx = q->block == QUAVER_MX;
    qv_call *call = qv_add(work, QV_ACTIVATE_BLOCKS,
                           QV_ACTIVATE_BLOCKS_GATE(gate->dtype) | QV_ACTIVATE_BLOCKS_F(FORMULAS[activation].formula) |
                               QV_ACTIVATE_BLOCKS_GATED(FORMULAS[activation].gated) |
                               QV_ACTIVATE_BLOCKS_MODE(mx ? QV_MODE_E8M0 : QV_MODE_BLOCKS) |
                               QV_ACTIVATE_BLOCKS_POWER_OF_TWO(o->power_of_two),
                           gate);
    inputs(call, gate, value);
    qv_pointer(call, q->data), qv_pointer(call, q->scale);
    extents(call, gate, value);
    qv_int(call, q->stride), qv_int(call, mx ? 4 * qv_up(gate->columns, 128) : gate->rows);
    if (mx) pad_scales(work, q);
}

quaver_status quaver_activate_quantize(quaver_handle h, void *stream, quaver_activation activation,
                                       const quaver_options *quantize, const quaver_tensor *gate_,
                                       const quaver_tensor *value_, const quaver_tensor *q_, const quaver_tensor *qt_,
                                       float *amax, float limit, float alpha) {
    quaver_tensor gate, value, q, qt;
    quaver_options o;
    qv_work work = {0};
    if (!h || !(q_ || qt_)) return QUAVER_ERROR_NULL;
    TRY(check_inputs(activation, gate_, value_, &gate, &value));
    if (q_) TRY(qv_check_codes(q_, &q, gate.rows, gate.columns));
    if (qt_) TRY(qv_check_codes(qt_, &qt, gate.columns, gate.rows));
    const quaver_tensor *straight = q_ ? &q : NULL, *transposed = qt_ ? &qt : NULL, *one = q_ ? &q : &qt;
    TRY(qv_check_options(quantize, &o, one));
    if (o.newest || (one->block != QUAVER_TENSOR && (qt_ || (one->block != QUAVER_MX && one->block != QUAVER_1X128))))
        return QUAVER_ERROR_FORMAT;
    if (q_ && qt_ && (q.block != qt.block || q.dtype != qt.dtype || q.scale != qt.scale)) return QUAVER_ERROR_MISMATCH;
    if (one->dtype != QUAVER_E4M3) return QUAVER_ERROR_NOT_EXPORTED;
    if (one->block == QUAVER_TENSOR && (!o.factor || !amax)) return QUAVER_ERROR_NULL;
    if ((uintptr_t)amax & 3) return QUAVER_ERROR_ALIGNMENT;
    if (empty(&gate)) return QUAVER_OK;
    if (one->block == QUAVER_TENSOR)
        activate_by_tensor(&work, h, activation, &gate, &value, straight, transposed, amax, &o);
    else
        activate_blocks(&work, activation, &gate, &value, &q, &o);
    limits(&work.calls[0], activation, limit, alpha);
    return qv_run(h, stream, &work);
}

quaver_status quaver_activate_backward(quaver_handle h, void *stream, quaver_activation activation,
                                       const quaver_tensor *grad_, const quaver_tensor *gate_,
                                       const quaver_tensor *value_, const quaver_tensor *of_gate_,
                                       const quaver_tensor *of_value_, float limit, float alpha) {
    quaver_tensor gate, value, grad, of_gate, of_value = {0};
    qv_work work = {0};
    if (!h) return QUAVER_ERROR_NULL;
    TRY(check_inputs(activation, gate_, value_, &gate, &value));
    TRY(like(grad_, &grad, &gate));
    TRY(like(of_gate_, &of_gate, &gate));
    if (value.data) TRY(like(of_value_, &of_value, &gate));
    if (empty(&gate)) return QUAVER_OK;
    qv_call *call = qv_add(&work, QV_ACTIVATE_BACKWARD,
                           QV_ACTIVATE_BACKWARD_GATE(gate.dtype) | QV_ACTIVATE_BACKWARD_F(FORMULAS[activation].formula) |
                               QV_ACTIVATE_BACKWARD_GATED(FORMULAS[activation].gated),
                           &gate);
    call->axes = QV_ROWS_FIRST;
    qv_pointer(call, grad.data), qv_pointer(call, gate.data);
    if (value.data) qv_pointer(call, value.data);
    qv_pointer(call, of_gate.data);
    if (value.data) qv_pointer(call, of_value.data);
    qv_int(call, gate.rows), qv_int(call, gate.columns), qv_int(call, grad.stride), qv_int(call, gate.stride);
    qv_int(call, value.stride), qv_int(call, of_gate.stride), qv_int(call, of_value.stride);
    limits(call, activation, limit, alpha);
    return qv_run(h, stream, &work);
}

/* ---- norms ---- */

#define NARROWEST 256 /* columns of the narrowest kernel */
/* Programs per multiprocessor: quaver.torch.backends.gpu.norm. */
enum { FORWARD_PROGRAMS = 8, BACKWARD_PROGRAMS = 2 };

static int aligned(const void *p) { return ((uintptr_t)p & 15) == 0; }
static uint64_t width_of(int64_t columns) { return qv_log2(columns < NARROWEST ? NARROWEST : columns); }
static int64_t programs_of(quaver_handle h, int64_t rows, int each) {
    int64_t most = (int64_t)each * qv_multiprocessors(h);
    return rows < most ? rows : most;
}

static quaver_status check_norm(const quaver_norm_options *from, quaver_norm_options *o, const quaver_tensor *x,
                                const float *mean, const float *inverse) {
    if (!from) return QUAVER_ERROR_NULL;
    if (qv_read(o, from, sizeof *o)) return QUAVER_ERROR_SIZE;
    if (o->centred & ~1) return QUAVER_ERROR_FORMAT;
    if (!o->gamma || (o->centred && (!o->beta || !mean)) || !inverse) return QUAVER_ERROR_NULL;
    if (!o->centred && o->beta) return QUAVER_ERROR_FORMAT;
    /* The order of a sum, and so its bits, would depend on them. */
    if (x->columns % 8 || x->stride % 8) return QUAVER_ERROR_SHAPE;
    if (((uintptr_t)mean & 3) || ((uintptr_t)inverse & 3)) return QUAVER_ERROR_ALIGNMENT;
    return aligned(x->data) && aligned(o->gamma) && aligned(o->beta) ? QUAVER_OK : QUAVER_ERROR_ALIGNMENT;
}

/* A norm whose result is y, or q with the options of its quantization. */
static void normalize(qv_work *work, quaver_handle h, const quaver_norm_options *o, const quaver_tensor *x, const void *y,
                      const quaver_tensor *q, const quaver_options *quantize, float *const statistics[2], float *amax) {
    static const uint8_t MODES[] = {[QUAVER_NONE] = QV_MODE_NONE, [QUAVER_TENSOR] = QV_MODE_TENSOR,
                                    [QUAVER_ROW] = QV_MODE_ROW,   [QUAVER_1X128] = QV_MODE_BLOCKS,
                                    [QUAVER_MX] = QV_MODE_E8M0};
    int mode = q ? MODES[q->block] : QV_MODE_NONE;
    uint64_t key = QV_NORM_X(x->dtype) | QV_NORM_GAMMA(x->dtype) | QV_NORM_BETA(o->centred ? x->dtype : QV_ABSENT) |
                   QV_NORM_Y(y ? x->dtype : QV_ABSENT) | QV_NORM_CENTRED(o->centred) | QV_NORM_MODE(mode) |
                   QV_NORM_BN(width_of(x->columns)) | QV_NORM_CODES(q ? q->dtype : QUAVER_E2M1) |
                   QV_NORM_POWER_OF_TWO(q ? quantize->power_of_two : 1); /* without codes as Python has it */
    qv_call *call = qv_add(work, QV_NORM, key, x);
    call->axes = QV_ROWS_ONLY;
    call->programs = programs_of(h, x->rows, FORWARD_PROGRAMS);
    qv_pointer(call, x->data), qv_pointer(call, o->gamma);
    if (o->centred) qv_pointer(call, o->beta);
    if (y) qv_pointer(call, y);
    if (q) qv_pointer(call, q->data);
    qv_pointer(call, statistics[0]), qv_pointer(call, statistics[1]);
    if (q) qv_pointer(call, q->scale);
    if (mode == QV_MODE_TENSOR)
        qv_pointer(call, amax), qv_pointer(call, quantize->factor), qv_pointer(call, qv_workspace(h));
    qv_int(call, x->rows), qv_int(call, x->columns), qv_int(call, x->stride), qv_int(call, q ? q->stride : x->columns);
    qv_int(call, mode == QV_MODE_E8M0 ? 4 * qv_up(x->columns, 128) : x->rows); /* the scales' stride */
    qv_int(call, call->programs), qv_float(call, o->eps), qv_float(call, (float)(1.0 / (double)x->columns));
    if (mode == QV_MODE_E8M0) pad_scales(work, q);
}

quaver_status quaver_norm(quaver_handle h, void *stream, const quaver_norm_options *options, const quaver_tensor *x_,
                          const quaver_tensor *y_, float *mean, float *inverse) {
    quaver_tensor x, y;
    quaver_norm_options o;
    qv_work work = {0};
    float *const statistics[2] = {mean, inverse};
    if (!h) return QUAVER_ERROR_NULL;
    TRY(qv_check_values(x_, &x));
    TRY(like(y_, &y, &x));
    TRY(check_norm(options, &o, &x, mean, inverse));
    if (!contiguous(&y)) return QUAVER_ERROR_SHAPE;
    if (!aligned(y.data)) return QUAVER_ERROR_ALIGNMENT;
    if (empty(&x)) return QUAVER_OK;
    normalize(&work, h, &o, &x, y.data, NULL, NULL, statistics, NULL);
    return qv_run(h, stream, &work);
}

quaver_status quaver_norm_quantize(quaver_handle h, void *stream, const quaver_norm_options *options,
                                   const quaver_options *quantize, const quaver_tensor *x_, const quaver_tensor *q_,
                                   float *amax, float *mean, float *inverse) {
    quaver_tensor x, q;
    quaver_norm_options o;
    quaver_options how;
    qv_work work = {0};
    float *const statistics[2] = {mean, inverse};
    if (!h || !q_) return QUAVER_ERROR_NULL;
    TRY(qv_check_values(x_, &x));
    TRY(check_norm(options, &o, &x, mean, inverse));
    TRY(qv_check_codes(q_, &q, x.rows, x.columns));
    TRY(qv_check_options(quantize, &how, &q));
    if (how.newest || q.block == QUAVER_128X128 || q.block == QUAVER_MX_SQUARE || q.block >= QUAVER_NV)
        return QUAVER_ERROR_FORMAT;
    if (q.block == QUAVER_TENSOR && (!how.factor || !amax)) return QUAVER_ERROR_NULL;
    if ((uintptr_t)amax & 3) return QUAVER_ERROR_ALIGNMENT;
    if (empty(&x)) return QUAVER_OK;
    normalize(&work, h, &o, &x, NULL, &q, &how, statistics, amax);
    return qv_run(h, stream, &work);
}

int64_t quaver_norm_partial_bytes(quaver_handle h, int64_t rows, int64_t columns, int32_t centred) {
    return h && rows > 0 && columns > 0 ? 4 * programs_of(h, rows, BACKWARD_PROGRAMS) * (centred ? 2 : 1) * columns : 0;
}

/* Add the partial sums of all programs. */
static void add_up(qv_work *work, const quaver_tensor *x, int64_t programs, int64_t width, float *partial, void *of_gamma,
                   void *of_beta) {
    quaver_tensor sums = {0};
    sums.rows = programs, sums.columns = width;
    qv_call *call = qv_add(work, QV_COLUMN_SUMS,
                           QV_COLUMN_SUMS_X(QUAVER_F32) | QV_COLUMN_SUMS_OUT(x->dtype) |
                               QV_COLUMN_SUMS_SECOND(of_beta ? x->dtype : QV_ABSENT),
                           &sums);
    call->programs = 1;
    qv_pointer(call, partial), qv_pointer(call, of_gamma);
    if (of_beta) qv_pointer(call, of_beta);
    qv_int(call, programs), qv_int(call, width), qv_int(call, width);
    qv_int(call, 32 * qv_up(programs, 32)), qv_int(call, of_beta ? x->columns : 0);
}

quaver_status quaver_norm_backward(quaver_handle h, void *stream, const quaver_norm_options *options,
                                   const quaver_tensor *grad_, const quaver_tensor *x_, const float *mean,
                                   const float *inverse, const quaver_tensor *dx_, void *of_gamma, void *of_beta,
                                   float *partial) {
    quaver_tensor x, grad, dx;
    quaver_norm_options o;
    qv_work work = {0};
    if (!h) return QUAVER_ERROR_NULL;
    TRY(qv_check_values(x_, &x));
    TRY(like(grad_, &grad, &x));
    TRY(like(dx_, &dx, &x));
    TRY(check_norm(options, &o, &x, mean, inverse));
    if (!of_gamma || !partial || (o.centred && !of_beta)) return QUAVER_ERROR_NULL;
    if (!contiguous(&dx) || grad.stride % 8) return QUAVER_ERROR_SHAPE;
    if (!aligned(grad.data) || !aligned(dx.data) || !aligned(of_gamma) || !aligned(of_beta) || !aligned(partial))
        return QUAVER_ERROR_ALIGNMENT;
    if (empty(&x)) return QUAVER_OK;
    int64_t width = x.columns * (o.centred ? 2 : 1);
    qv_call *call = qv_add(&work, QV_NORM_BACKWARD,
                           QV_NORM_BACKWARD_X(x.dtype) | QV_NORM_BACKWARD_GAMMA(x.dtype) |
                               QV_NORM_BACKWARD_CENTRED(o.centred) | QV_NORM_BACKWARD_BETA(o.centred) |
                               QV_NORM_BACKWARD_BN(width_of(x.columns)),
                           &x);
    call->axes = QV_ROWS_ONLY;
    call->programs = programs_of(h, x.rows, BACKWARD_PROGRAMS);
    qv_pointer(call, grad.data), qv_pointer(call, x.data), qv_pointer(call, o.gamma);
    qv_pointer(call, mean), qv_pointer(call, inverse), qv_pointer(call, dx.data), qv_pointer(call, partial);
    qv_int(call, x.rows), qv_int(call, x.columns), qv_int(call, grad.stride), qv_int(call, x.stride);
    qv_int(call, width), qv_int(call, call->programs), qv_float(call, (float)(1.0 / (double)x.columns));
    add_up(&work, &x, call->programs, width, partial, of_gamma, o.centred ? of_beta : NULL);
    return qv_run(h, stream, &work);
}

/* ---- rotary positions ---- */

#define ROPE_BLOCK 2048 /* elements of a program: quaver.torch.backends.gpu.norm */

static quaver_status check_rope(const quaver_rope_options *o, int k, int64_t block) {
    if (o->dtype < QUAVER_BF16 || o->dtype > QUAVER_F32 || (o->interleaved & ~1) || (o->back & ~1))
        return QUAVER_ERROR_FORMAT;
    if ((o->dim != 64 && o->dim != 128) || o->heads < 1 || (k ? o->k_heads < 1 : o->k_heads != 0))
        return QUAVER_ERROR_SHAPE;
    if (o->heads > 1 << 16 || o->k_heads > 1 << 16) return QUAVER_ERROR_SHAPE;
    if (o->outer < 0 || o->inner < 0 || o->inner >= INT64_C(1) << 31 ||
        (o->inner && o->outer > (INT64_C(1) << 31) / o->inner))
        return QUAVER_ERROR_SHAPE;
    for (int i = 0; i < 3; i++)
        if (o->q_strides[i] < 0 || o->k_strides[i] < 0 || o->q_strides[i] >= 1 << 29 || o->k_strides[i] >= 1 << 29)
            return QUAVER_ERROR_SHAPE;
    for (int i = 0; i < 2; i++)
        if (o->table_strides[i] < 0 || o->table_strides[i] >= 1 << 29) return QUAVER_ERROR_SHAPE;
    /* Offsets of heads fit 32 bits. */
    int64_t q_end = (o->heads + block) * o->q_strides[2], k_end = (o->k_heads + block) * o->k_strides[2];
    return q_end >> 31 || k_end >> 31 ? QUAVER_ERROR_SHAPE : QUAVER_OK;
}

quaver_status quaver_rope(quaver_handle h, void *stream, const quaver_rope_options *from, const void *q, const void *k,
                          void *q_out, void *k_out, const float *cos, const float *sin) {
    quaver_rope_options o;
    quaver_tensor heads = {0};
    qv_work work = {0};
    if (!h || !from) return QUAVER_ERROR_NULL;
    if (qv_read(&o, from, sizeof o)) return QUAVER_ERROR_SIZE;
    if (!q || !q_out || (k && !k_out) || !cos || !sin) return QUAVER_ERROR_NULL;
    int64_t block = o.dim > 0 ? ROPE_BLOCK / o.dim : 1;
    TRY(check_rope(&o, k != NULL, block));
    uintptr_t mask = o.dtype == QUAVER_F32 ? 3 : 1;
    if ((((uintptr_t)q | (uintptr_t)k | (uintptr_t)q_out | (uintptr_t)k_out) & mask) ||
        (((uintptr_t)cos | (uintptr_t)sin) & 3))
        return QUAVER_ERROR_ALIGNMENT;
    int64_t tokens = o.outer * o.inner, q_blocks = qv_up(o.heads, block), k_blocks = qv_up(o.k_heads, block);
    if (!tokens) return QUAVER_OK;
    heads.rows = o.heads, heads.columns = o.k_heads;
    qv_call *call = qv_add(&work, QV_ROPE,
                           QV_ROPE_Q(o.dtype) | QV_ROPE_K(k ? o.dtype : (int)QV_ABSENT) |
                               QV_ROPE_HALF(qv_log2(o.dim / 2)) | QV_ROPE_INTERLEAVED(o.interleaved) |
                               QV_ROPE_BACK(o.back),
                           &heads);
    call->axes = QV_ROWS_FIRST;
    call->programs = tokens;
    call->second = q_blocks + k_blocks;
    qv_pointer(call, q);
    if (k) qv_pointer(call, k);
    qv_pointer(call, q_out);
    if (k) qv_pointer(call, k_out);
    qv_pointer(call, cos), qv_pointer(call, sin);
    qv_int(call, o.inner), qv_int(call, o.heads), qv_int(call, o.k_heads), qv_int(call, q_blocks), qv_int(call, k_blocks);
    qv_int(call, o.heads * (int64_t)o.dim), qv_int(call, o.k_heads * (int64_t)o.dim);
    for (int i = 0; i < 3; i++) qv_int(call, o.q_strides[i]);
    for (int i = 0; i < 3; i++) qv_int(call, k ? o.k_strides[i] : 0);
    for (int i = 0; i < 3; i++) qv_int(call, 0); /* v */
    for (int i = 0; i < 2; i++) qv_int(call, o.table_strides[i]);
    return qv_run(h, stream, &work);
}

/* ---- cross entropy ---- */

quaver_status quaver_cross_entropy(quaver_handle h, void *stream, const quaver_loss *options, const quaver_tensor *x_,
                                   const int64_t *targets, float *losses) {
    quaver_tensor x;
    quaver_loss o;
    qv_work work = {0};
    if (!h || !options || !targets || !losses) return QUAVER_ERROR_NULL;
    TRY(qv_check_values(x_, &x));
    if (qv_read(&o, options, sizeof o)) return QUAVER_ERROR_SIZE;
    if ((o.gradient & ~1) || (o.weights && !o.gradient)) return QUAVER_ERROR_FORMAT;
    if (((uintptr_t)targets & 7) || ((uintptr_t)losses & 3) || ((uintptr_t)o.weights & 3)) return QUAVER_ERROR_ALIGNMENT;
    if (empty(&x)) return QUAVER_OK;
    qv_call *call = qv_add(&work, QV_CROSS_ENTROPY,
                           QV_CROSS_ENTROPY_LOGITS(x.dtype) |
                               QV_CROSS_ENTROPY_WEIGHTS(o.weights ? (int)QUAVER_F32 : (int)QV_ABSENT) |
                               QV_CROSS_ENTROPY_SMOOTHING(o.label_smoothing != 0) |
                               QV_CROSS_ENTROPY_Z_LOSS(o.z_loss != 0) | QV_CROSS_ENTROPY_CAP(o.soft_cap != 0) |
                               QV_CROSS_ENTROPY_GRADIENT(o.gradient),
                           &x);
    call->axes = QV_ROWS_ONLY;
    qv_pointer(call, x.data), qv_pointer(call, targets), qv_pointer(call, losses);
    if (o.weights) qv_pointer(call, o.weights);
    qv_int(call, x.columns), qv_int(call, x.columns), qv_int(call, x.stride), qv_int(call, o.ignore_index);
    qv_float(call, o.label_smoothing), qv_float(call, o.z_loss), qv_float(call, o.soft_cap);
    return qv_run(h, stream, &work);
}

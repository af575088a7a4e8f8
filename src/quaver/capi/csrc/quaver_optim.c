/* Steps of AdamW: a table of parameters, and one launch for all that share their formats. */
#include "quaver_internal.h"
#include "quaver_tables.h"

#define TRY QV_TRY

/* Blocks of 64 elements that a program steps, and at once: quaver.torch.backends.gpu.optim. */
enum { BLOCK = 64, PROGRAM_BLOCKS = 256, BLOCKS_AT_ONCE = 32, FEW_AT_ONCE = 8 };
#define MOST_STEP_ELEMENTS (INT64_C(1) << 36)

static quaver_status check_step(const quaver_step *from, quaver_step *o) {
    if (!from) return QUAVER_ERROR_NULL;
    if (qv_read(o, from, sizeof *o)) return QUAVER_ERROR_SIZE;
    if (o->weight != QUAVER_F32 && o->weight != QUAVER_BF16) return QUAVER_ERROR_FORMAT;
    if (o->gradient < QUAVER_BF16 || o->gradient > QUAVER_F32) return QUAVER_ERROR_FORMAT;
    if ((o->moments & ~1) || (o->even & ~1) || (o->factored & ~1)) return QUAVER_ERROR_FORMAT;
    return QUAVER_OK;
}

static quaver_status check_pointers(const quaver_step *o, const quaver_parameter *p) {
    if (!p->weight || !p->first || !p->second || !p->gradient || !p->count) return QUAVER_ERROR_NULL;
    if (o->weight == QUAVER_BF16 && !p->low) return QUAVER_ERROR_NULL;
    if (o->moments == QUAVER_MOMENTS_8BIT && (!p->first_scale || !p->second_scale)) return QUAVER_ERROR_NULL;
    if (o->factored != (p->factor != NULL)) return o->factored ? QUAVER_ERROR_NULL : QUAVER_ERROR_FORMAT;
    uintptr_t weight = o->weight == QUAVER_F32 ? 3 : 1, gradient = o->gradient == QUAVER_F32 ? 3 : 1;
    uintptr_t moments = o->moments == QUAVER_MOMENTS_8BIT ? 0 : 3;
    uintptr_t all = (uintptr_t)p->first | (uintptr_t)p->second;
    if (((uintptr_t)p->weight & weight) || ((uintptr_t)p->gradient & gradient) || (all & moments) ||
        (((uintptr_t)p->low | (uintptr_t)p->first_scale | (uintptr_t)p->second_scale) & 1) ||
        (((uintptr_t)p->factor | (uintptr_t)p->count) & 3))
        return QUAVER_ERROR_ALIGNMENT;
    return QUAVER_OK;
}

static quaver_status check_parameter(const quaver_step *o, const quaver_parameter *from, quaver_parameter *p) {
    if (!from) return QUAVER_ERROR_NULL;
    if (qv_read(p, from, sizeof *p)) return QUAVER_ERROR_SIZE;
    TRY(check_pointers(o, p));
    if (p->rows < 1 || p->columns < 1 || p->rows > MOST_STEP_ELEMENTS / p->columns || p->offset < 0 || p->number < 0)
        return QUAVER_ERROR_SHAPE;
    return QUAVER_OK;
}

static int is_even(const quaver_step *o, const quaver_parameter *p) {
    uintptr_t addresses = (uintptr_t)p->weight | (uintptr_t)p->first | (uintptr_t)p->second | (uintptr_t)p->gradient;
    if (o->weight == QUAVER_BF16) addresses |= (uintptr_t)p->low;
    return p->columns % BLOCK == 0 && p->rows * (p->columns / BLOCK) % BLOCKS_AT_ONCE == 0 && !(addresses & 15);
}

int quaver_step_even(const quaver_step *options, const quaver_parameter *parameter) {
    quaver_step o;
    quaver_parameter p;
    return !check_step(options, &o) && !check_parameter(&o, parameter, &p) && is_even(&o, &p);
}

int64_t quaver_step_programs(int64_t rows, int64_t columns) {
    if (rows < 1 || columns < 1 || rows > MOST_STEP_ELEMENTS / columns) return 0;
    return qv_up(rows * qv_up(columns, BLOCK), PROGRAM_BLOCKS);
}

quaver_status quaver_step_row(const quaver_step *options, const quaver_parameter *parameter, int32_t index,
                              int64_t row[QUAVER_STEP_FIELDS], int32_t (*chunks)[3]) {
    quaver_step o;
    quaver_parameter p;
    TRY(check_step(options, &o));
    TRY(check_parameter(&o, parameter, &p));
    if (!row || !chunks) return QUAVER_ERROR_NULL;
    if (index < 0) return QUAVER_ERROR_SHAPE;
    if (o.even && !is_even(&o, &p)) return QUAVER_ERROR_ALIGNMENT;
    int64_t across = qv_up(p.columns, BLOCK), blocks = p.rows * across, programs = qv_up(blocks, PROGRAM_BLOCKS);
    if (blocks >> 31) return QUAVER_ERROR_SHAPE;
    const void *const addresses[] = {p.weight,       NULL,     o.weight == QUAVER_BF16 ? p.low : NULL,
                                     p.first,        NULL,     p.second,
                                     NULL,           p.gradient, NULL,
                                     p.factor,       NULL,     p.count};
    int64_t *at = row;
    for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++) *at++ = (int64_t)(uintptr_t)addresses[i];
    if (o.moments == QUAVER_MOMENTS_8BIT)
        row[4] = (int64_t)(uintptr_t)p.first_scale, row[6] = (int64_t)(uintptr_t)p.second_scale;
    *at++ = p.columns, *at++ = across, *at++ = blocks, *at++ = programs, *at++ = p.offset, *at++ = p.number;
    *at++ = (int64_t)(p.seed & 0xFFFFFFFF), *at++ = (int64_t)(p.seed >> 32);
    for (int64_t i = 0; i < programs; i++) {
        int64_t first = i * PROGRAM_BLOCKS, left = blocks - first < PROGRAM_BLOCKS ? blocks - first : PROGRAM_BLOCKS;
        chunks[i][0] = index, chunks[i][1] = (int32_t)first;
        chunks[i][2] = (int32_t)qv_up(left, o.even ? BLOCKS_AT_ONCE : FEW_AT_ONCE);
    }
    return QUAVER_OK;
}

quaver_status quaver_adamw_step(quaver_handle h, void *stream, const quaver_step *options, const void *chunks,
                                int64_t programs, const void *table, const float *scalars, void *workspace,
                                int32_t parameters) {
    quaver_step o;
    quaver_tensor all = {0};
    qv_work work = {0};
    if (!h) return QUAVER_ERROR_NULL;
    TRY(check_step(options, &o));
    if (!chunks || !table || !scalars || !workspace) return QUAVER_ERROR_NULL;
    if (programs < 0 || programs >= INT64_C(1) << 31 || parameters < 0) return QUAVER_ERROR_SHAPE;
    if (((uintptr_t)chunks | (uintptr_t)table | (uintptr_t)scalars | (uintptr_t)workspace) & 15)
        return QUAVER_ERROR_ALIGNMENT;
    if (!programs || !parameters) return QUAVER_OK;
    all.rows = programs, all.columns = 1;
    qv_call *call = qv_add(&work, QV_STEP,
                           QV_STEP_WEIGHT_TYPE(o.weight) | QV_STEP_GRADIENT_TYPE(o.gradient) |
                               QV_STEP_FIRST_KIND(o.moments) | QV_STEP_FACTORED(o.factored) | QV_STEP_EVEN(o.even),
                           &all);
    call->axes = QV_ROWS_ONLY;
    qv_pointer(call, chunks), qv_pointer(call, table), qv_pointer(call, scalars), qv_pointer(call, workspace);
    qv_int(call, parameters);
    return qv_run(h, stream, &work);
}

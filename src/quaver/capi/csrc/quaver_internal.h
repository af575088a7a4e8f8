/* Shared by the library's sources and by the tables that `quaver kernels` writes. */
#ifndef QUAVER_INTERNAL_H
#define QUAVER_INTERNAL_H
#include "quaver.h"

/* One compiled kernel. */
typedef struct {
    uint64_t key;      /* fields of quaver_tables.h, four bits each */
    uint32_t assumes;  /* bit i: argument i is a multiple of 16 */
    uint8_t whole;     /* blocks cover the matrix exactly, so that nothing is masked */
    uint8_t arguments; /* without Triton's two scratch pointers */
    uint16_t threads;
    uint32_t shared;   /* bytes */
    int32_t bm, bn;    /* rows and columns of a program, bm with its steps */
    uint32_t slot;     /* index in the handle */
    uint64_t offset;   /* of the cubin in the table's images */
    const char *symbol;
} qv_variant;

/* Variants of a kernel: those of a key from the most special to the general one. */
typedef struct { const qv_variant *variants; uint32_t count; } qv_kernel;
typedef struct {
    int arch;
    uint32_t slots;
    const qv_kernel *kernels;
    const unsigned char *images;
} qv_table;

#define QV_ARGUMENTS 30
#define QV_CALLS 4
/* A launch: what decides the variant and the grid, and the arguments in the kernel's order, each in eight bytes, of
 * which the driver copies as many as the kernel takes. */
typedef struct {
    int kernel;
    uint64_t key;
    uint64_t tall;          /* key bits if rows are the grid's first axis, or 0 if no such kernels exist */
    int64_t rows, columns;  /* of the matrix */
    int axes;               /* of the grid: qv_axes */
    int64_t second;         /* programs along the columns, or 0: blocks that cover them */
    int64_t programs;       /* programs along the rows, or 0: blocks that cover them */
    int programs_at;        /* position of the argument that takes the number of programs, or -1 */
    int n;
    uint64_t value[QV_ARGUMENTS];
    const qv_variant *variant; /* by qv_find, with the grid */
    unsigned grid[2];
} qv_call;

/* The launches of one public call: all are found and loaded before the first is launched. */
typedef struct {
    int n;
    qv_call calls[QV_CALLS];
    struct { void *data; int64_t bytes; } zeros[2]; /* buffers to fill with zeros before */
} qv_work;

/* Axes of a grid: columns first unless there are too many rows, rows first, or rows only. */
typedef enum { QV_COLUMNS_FIRST, QV_ROWS_FIRST, QV_ROWS_ONLY } qv_axes;

qv_call *qv_add(qv_work *work, int kernel, uint64_t key, const quaver_tensor *x);
void qv_pointer(qv_call *call, const void *p);
void qv_int(qv_call *call, int64_t value);
void qv_float(qv_call *call, float value);
/* Choose and load the variant of a call. */
quaver_status qv_find(quaver_handle h, qv_call *call);
quaver_status qv_run(quaver_handle h, void *stream, qv_work *work);
void qv_set_error(quaver_handle h, int error);
int qv_multiprocessors(quaver_handle h);
void *qv_workspace(quaver_handle h);
int64_t qv_workspace_size(quaver_handle h);

#define QV_TRY(call)               \
    do {                           \
        quaver_status s_ = (call); \
        if (s_) return s_;         \
    } while (0)

/* Copy a versioned struct; nonzero if its size is wrong. */
int qv_read(void *to, const void *from, size_t ours);
quaver_status qv_check_values(const quaver_tensor *from, quaver_tensor *x);
quaver_status qv_check_codes(const quaver_tensor *from, quaver_tensor *q, int64_t rows, int64_t columns);
/* Check the options of a quantization to q's block; NULL is the default. */
quaver_status qv_check_options(const quaver_options *from, quaver_options *o, const quaver_tensor *q);
static inline int64_t qv_up(int64_t n, int64_t d) { return (n + d - 1) / d; }
static inline uint64_t qv_log2(int64_t n) { /* of the smallest power of two that is at least n */
    uint64_t bits = 0;
    while (((int64_t)1 << bits) < n) bits++;
    return bits;
}
#endif

/* quaver.h: quantization and layer kernels of Quaver for NVIDIA GPUs, without Python. C99 and C++17.
 *
 * Kernels are compiled ahead of time by `quaver kernels`; the CUDA driver is found at run time by dlopen.
 * No call allocates device memory, synchronizes, prints or ends the process. Work is queued on the caller's stream, in
 * the context in which the handle was created. A call that returns an error has launched nothing, except that one with
 * QUAVER_ERROR_DRIVER may have queued the first of several kernels. */
#ifndef QUAVER_H
#define QUAVER_H
#include <stddef.h>
#include <stdint.h>

#define QUAVER_VERSION 100 /* 10000 * major + 100 * minor + patch */

#ifndef QUAVER_API
#if defined(__GNUC__)
#define QUAVER_API __attribute__((visibility("default")))
#else
#define QUAVER_API
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    QUAVER_OK = 0,
    QUAVER_ERROR_NULL = 1,         /* a required pointer is NULL */
    QUAVER_ERROR_SIZE = 2,         /* a struct's size is smaller than its first version, or fields unknown here are set */
    QUAVER_ERROR_FORMAT = 3,       /* a dtype, block or option that the call does not support */
    QUAVER_ERROR_SHAPE = 4,        /* a negative or too large side, or a stride that is below the row or above 2^23 */
    QUAVER_ERROR_ALIGNMENT = 5,    /* codes, scales or workspace not at a multiple of 16 bytes, or x of its element */
    QUAVER_ERROR_MISMATCH = 6,     /* tensors of one call differ in shape, dtype or block */
    QUAVER_ERROR_WORKSPACE = 7,    /* the handle's workspace is smaller than quaver_workspace_bytes */
    QUAVER_ERROR_DRIVER = 8,       /* the driver reported an error: quaver_last_driver_error */
    QUAVER_ERROR_NO_DRIVER = 9,    /* libcuda.so.1 was not found or is too old */
    QUAVER_ERROR_ARCHITECTURE = 10, /* no kernels were exported for this GPU */
    QUAVER_ERROR_NOT_EXPORTED = 11, /* none for this case: dtype, width or family left out of `quaver kernels` */
    QUAVER_ERROR_MEMORY = 12       /* no host memory */
} quaver_status;

typedef enum { QUAVER_BF16, QUAVER_F16, QUAVER_F32, QUAVER_E4M3, QUAVER_E5M2, QUAVER_E2M1 } quaver_dtype;

/* Elements that share a scale, and the layout of the scales of a tensor [rows, columns]. */
typedef enum {
    QUAVER_NONE,      /* values in high precision, no scales */
    QUAVER_TENSOR,    /* all: float [1] */
    QUAVER_ROW,       /* a row: float [rows] */
    QUAVER_1X128,     /* 128 along a row: float [columns / 128][rows], as cuBLAS reads them */
    QUAVER_128X128,   /* a square: float [rows / 128][columns / 128, rounded up to 4; padding is zero] */
    QUAVER_MX,        /* 32 along a row: E8M0 bytes in tiles of 128 x 4 (cuBLAS's and CUTLASS's swizzled layout) */
    QUAVER_MX_SQUARE, /* 32 x 32, the same layout */
    QUAVER_NV,        /* 16 along a row: E4M3 bytes in such tiles, and `factor`, by which scales are divided */
    QUAVER_NV_SQUARE  /* 16 x 16, the same layout */
} quaver_block;

/* A matrix on the device. `size` comes first in every struct so that later versions can add fields at the end. */
typedef struct {
    uint32_t size;         /* sizeof(quaver_tensor) */
    int32_t dtype;         /* quaver_dtype */
    int32_t block;         /* quaver_block */
    int32_t reserved;      /* 0 */
    int64_t rows, columns; /* numbers, also where codes are packed */
    int64_t stride;        /* between rows: elements, or bytes of E2M1; of codes it is quaver_row_bytes */
    void *data;            /* values or codes; E2M1: two a byte, the even column in the low half */
    void *scale;
    float *factor;         /* NV: float [1] */
} quaver_tensor;

typedef struct {
    uint32_t size;         /* sizeof(quaver_options) */
    int32_t power_of_two;  /* 1: float scales and the factor of NV are powers of two; 0: correctly rounded ratios */
    int32_t stochastic;    /* NV: 1 rounds stochastically by (seed, tensor_id, *count, element); columns % 4 == 0 */
    int32_t hadamard;      /* NV: 1 rotates groups of 16 along a row first; codes are padded to 16 columns */
    uint64_t seed;
    uint32_t tensor_id;
    uint32_t reserved;     /* 0 */
    const int64_t *count;  /* on the device; required where stochastic */
    const float *factor;   /* TENSOR, delayed scaling: encode factor, float [1], not 0; NULL: from the amax of x */
    float *newest;         /* required with factor: float [1], raised to the amax of x if that is finite */
} quaver_options;

typedef struct quaver_handle_s *quaver_handle;

/* Create a handle for the calling thread's current CUDA context. One thread and one stream may use it at a time.
 * workspace: device memory, zeros, which every call leaves zero; bytes: at least quaver_workspace_bytes(columns). */
QUAVER_API quaver_status quaver_create(quaver_handle *handle, void *workspace, int64_t bytes);
/* Unload the kernels of a handle; NULL does nothing. */
QUAVER_API quaver_status quaver_destroy(quaver_handle handle);
/* Load every kernel now, instead of at its first launch: needed before a stream is captured. */
QUAVER_API quaver_status quaver_preload(quaver_handle handle);
/* The CUresult of the last QUAVER_ERROR_DRIVER of this handle. */
QUAVER_API int quaver_last_driver_error(quaver_handle handle);
QUAVER_API const char *quaver_status_text(quaver_status status);
QUAVER_API int quaver_version(void);
/* Versions of Quaver, Triton and ptxas that the kernels were compiled by. */
QUAVER_API const char *quaver_build(void);

/* Sizes of buffers. columns: the largest of a matrix quantized to QUAVER_ROW with a transpose, else 0. */
QUAVER_API int64_t quaver_workspace_bytes(int64_t columns);
QUAVER_API int64_t quaver_row_bytes(int64_t columns, quaver_dtype dtype);
QUAVER_API int64_t quaver_scale_bytes(int64_t rows, int64_t columns, quaver_block block);

/* amax, float [1]: the largest |x|; NaN if x has one, 0 if it is subnormal. */
QUAVER_API quaver_status quaver_amax(quaver_handle handle, void *stream, const quaver_tensor *x, float *amax);

/* Quantize x [rows, columns] to q, and its transpose to qt [columns, rows]; either may be NULL. Both have one dtype and
 * block; rows of codes are filled with zeros to quaver_row_bytes.
 * amax: float [1], written for TENSOR and NV (after the rotation, of qt where both are written), else NULL.
 * options: NULL is {power_of_two = 1}. With TENSOR, q and qt share one scale. Nothing is written if a side is 0. */
QUAVER_API quaver_status quaver_quantize(quaver_handle handle, void *stream, const quaver_tensor *x,
                                         const quaver_tensor *q, const quaver_tensor *qt, float *amax,
                                         const quaver_options *options);

/* Write q times its scales to y, bfloat16 or float32 of the same shape. power_of_two: as q was quantized; bfloat16 needs
 * scales that are powers of two. Exact. */
QUAVER_API quaver_status quaver_dequantize(quaver_handle handle, void *stream, const quaver_tensor *q,
                                           const quaver_tensor *y, int32_t power_of_two);

#ifdef __cplusplus
}
#endif
#endif

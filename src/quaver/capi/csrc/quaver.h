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

#define QUAVER_VERSION 200 /* 10000 * major + 100 * minor + patch */

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
    QUAVER_ERROR_MEMORY = 12,      /* no host memory */
    QUAVER_ERROR_NO_CUBLAS = 13,   /* libcublasLt was not found or is too old */
    QUAVER_ERROR_CUBLAS = 14       /* cuBLASLt reported an error, or has no GEMM for this: quaver_last_driver_error */
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
/* The CUresult of the last QUAVER_ERROR_DRIVER, or cublasStatus_t of the last QUAVER_ERROR_CUBLAS, of this handle. */
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

/* ---- GEMMs, by cuBLASLt ---- */

typedef struct {
    uint32_t size;              /* sizeof(quaver_gemm_options) */
    int32_t fast_accumulation;  /* 1: FP8 on Hopper accumulates less precisely */
    float alpha, beta;          /* y = alpha * product + beta * y */
    const float *device_alpha;  /* both on the device instead, or both NULL; NV: 1 / (factor of a * factor of b) */
    const float *device_beta;
    const void *bias;           /* [n] in y's dtype (bfloat16 if that is float32), or NULL */
    void *workspace;            /* device memory of cuBLAS: 32 MiB on Hopper and later */
    int64_t workspace_bytes;
} quaver_gemm_options;

/* y [m, n] = a [m, k] @ b [n, k].T of codes with scales of TENSOR (Ada, Hopper, Blackwell), MX or NV (Blackwell).
 * cublaslt: the caller's cublasLtHandle_t. */
QUAVER_API quaver_status quaver_gemm(quaver_handle handle, void *cublaslt, void *stream,
                                     const quaver_gemm_options *options, const quaver_tensor *a,
                                     const quaver_tensor *b, const quaver_tensor *y);

/* ---- delayed scaling ---- */

typedef struct {
    uint32_t size;         /* sizeof(quaver_history) */
    int32_t layers;
    int32_t length;        /* steps of a history, at most 1024 */
    int32_t step;          /* between consecutive values of a column, and between the three columns */
    int32_t column_step;
    int32_t margin;        /* factors are divided by 2^margin */
    int32_t most_recent;   /* 1: from the newest amax; 0: from the largest of the history */
    int32_t power_of_two;  /* of the factors */
    int32_t dtypes[3];     /* of the columns: QUAVER_E4M3 or QUAVER_E5M2; by default of input, weight, gradient */
    uint32_t reserved;     /* 0 */
} quaver_history;

/* Roll the histories of a model in one launch: each column takes the newest amax, which becomes 0, and its factor
 * follows. table: int64 [layers][2] on the device: addresses of a history, float [length][3], and of its factors,
 * float [3]. factors: float [layers][3], receives a copy of all factors. Formats other than E4M3 everywhere, E5M2
 * everywhere, and E4M3, E4M3, E5M2 are not exported. */
QUAVER_API quaver_status quaver_roll(quaver_handle handle, void *stream, const quaver_history *history,
                                     const void *table, float *factors);

/* ---- layers ---- */

typedef enum {
    QUAVER_LINEAR, /* y = x */
    QUAVER_GELU,   /* by tanh */
    QUAVER_GELU_EXACT,
    QUAVER_QUICK_GELU,
    QUAVER_RELU,
    QUAVER_SQUARED_RELU,
    QUAVER_SILU,
    QUAVER_GLU, /* from here on y = f(gate) * value */
    QUAVER_GEGLU,
    QUAVER_GEGLU_EXACT,
    QUAVER_QUICK_GEGLU,
    QUAVER_REGLU,
    QUAVER_SQUARED_REGLU,
    QUAVER_SWIGLU,
    QUAVER_CLAMPED_SWIGLU /* of gpt-oss, with limit and alpha */
} quaver_activation;

/* y = f(gate) or f(gate) * value, in one dtype; value is NULL unless gated. y is contiguous. Gate and value may be halves
 * of one matrix. limit, alpha: of QUAVER_CLAMPED_SWIGLU, else ignored. Relative RMS error at most 1e-6 before rounding. */
QUAVER_API quaver_status quaver_activate(quaver_handle handle, void *stream, quaver_activation activation,
                                         const quaver_tensor *gate, const quaver_tensor *value, const quaver_tensor *y,
                                         float limit, float alpha);
/* The same, quantized in the same pass instead: E4M3 with scales that are powers of two, of TENSOR to q and to the
 * transpose qt (with the factor of delayed scaling; amax, float [1], is written), or of MX or 1X128 to q alone. */
QUAVER_API quaver_status quaver_activate_quantize(quaver_handle handle, void *stream, quaver_activation activation,
                                                  const quaver_options *quantize, const quaver_tensor *gate,
                                                  const quaver_tensor *value, const quaver_tensor *q,
                                                  const quaver_tensor *qt, float *amax, float limit, float alpha);
QUAVER_API quaver_status quaver_activate_backward(quaver_handle handle, void *stream, quaver_activation activation,
                                                  const quaver_tensor *grad, const quaver_tensor *gate,
                                                  const quaver_tensor *value, const quaver_tensor *of_gate,
                                                  const quaver_tensor *of_value, float limit, float alpha);

typedef struct {
    uint32_t size;       /* sizeof(quaver_norm_options) */
    int32_t centred;     /* 1: LayerNorm, 0: RMSNorm */
    float eps;
    uint32_t reserved;   /* 0 */
    const void *gamma;   /* [columns] in x's dtype */
    const void *beta;    /* the same of LayerNorm; NULL of RMSNorm */
} quaver_norm_options;

/* y = normalized x, gamma and beta. columns and strides are multiples of 8, addresses of 16; at most 16384 columns, and
 * 8192 backward. y is contiguous. mean (NULL of RMSNorm), inverse: float [rows], which backward reads. Relative RMS
 * error at most 1e-6 before rounding. */
QUAVER_API quaver_status quaver_norm(quaver_handle handle, void *stream, const quaver_norm_options *options,
                                     const quaver_tensor *x, const quaver_tensor *y, float *mean, float *inverse);
/* The same, quantized in the same pass to q instead of y: E4M3 with scales that are powers of two, of TENSOR (with the
 * factor of delayed scaling; amax, float [1], is written), ROW, 1X128 or MX. The codes are those of y, quantized. */
QUAVER_API quaver_status quaver_norm_quantize(quaver_handle handle, void *stream, const quaver_norm_options *options,
                                              const quaver_options *quantize, const quaver_tensor *x,
                                              const quaver_tensor *q, float *amax, float *mean, float *inverse);
/* Gradients of x, contiguous, and of gamma and beta, in x's dtype. partial: quaver_norm_partial_bytes of device memory.
 * Deterministic. */
QUAVER_API quaver_status quaver_norm_backward(quaver_handle handle, void *stream, const quaver_norm_options *options,
                                              const quaver_tensor *grad, const quaver_tensor *x, const float *mean,
                                              const float *inverse, const quaver_tensor *dx, void *of_gamma,
                                              void *of_beta, float *partial);
QUAVER_API int64_t quaver_norm_partial_bytes(quaver_handle handle, int64_t rows, int64_t columns, int32_t centred);

typedef struct {
    uint32_t size;        /* sizeof(quaver_rope_options) */
    int32_t dtype;        /* of q and k */
    int32_t interleaved;  /* 1: pairs are neighbours; 0: they are half a head apart */
    int32_t back;         /* 1: rotate back, as gradients need */
    int64_t outer, inner; /* batch and tokens */
    int32_t heads, k_heads, dim, reserved;  /* dim: 64 or 128, all of it rotated */
    int64_t q_strides[3], k_strides[3];     /* of batch, token and head, in elements; features are contiguous */
    int64_t table_strides[2];               /* of batch and token; 0 if they share angles */
} quaver_rope_options;

/* Rotate q, and k unless NULL, to contiguous q_out and k_out. cos, sin: float, dim values a token, each angle at both
 * positions of its pair, with the sine negated at the first. The bits are those of the plain formula. */
QUAVER_API quaver_status quaver_rope(quaver_handle handle, void *stream, const quaver_rope_options *options,
                                     const void *q, const void *k, void *q_out, void *k_out, const float *cos,
                                     const float *sin);

typedef struct {
    uint32_t size;          /* sizeof(quaver_loss) */
    int32_t gradient;       /* 1: overwrite the logits by the gradient of the loss */
    int32_t ignore_index;   /* targets with this value have loss and gradient 0 */
    float label_smoothing;  /* 0 disables a term */
    float z_loss;
    float soft_cap;
    const float *weights;   /* float [rows], by which gradients are multiplied, or NULL */
} quaver_loss;

/* Cross entropy of logits [rows, columns], whose targets are int64 [rows]: losses, float [rows]. */
QUAVER_API quaver_status quaver_cross_entropy(quaver_handle handle, void *stream, const quaver_loss *options,
                                              const quaver_tensor *logits, const int64_t *targets, float *losses);

/* ---- optimizer steps ---- */

#define QUAVER_STEP_FIELDS 20

typedef enum {
    QUAVER_MOMENTS_F32, /* float */
    QUAVER_MOMENTS_8BIT /* int8 and uint8 codes, stochastic, with a bfloat16 scale per 64 elements of a row */
} quaver_moments;

/* What the parameters of one launch share. */
typedef struct {
    uint32_t size;     /* sizeof(quaver_step) */
    int32_t weight;    /* QUAVER_F32, or QUAVER_BF16 with the other 16 bits of the float32 weight in `low` */
    int32_t gradient;  /* QUAVER_BF16, QUAVER_F16 or QUAVER_F32 */
    int32_t moments;   /* quaver_moments */
    int32_t even;      /* 1: quaver_step_even holds for all parameters: a faster kernel */
    int32_t factored;  /* 1: gradients are first multiplied by the parameter's factor */
} quaver_step;

/* A contiguous matrix [rows, columns] of the device, or a part of one. */
typedef struct {
    uint32_t size;           /* sizeof(quaver_parameter) */
    int32_t number;          /* of the parameter in its optimizer: selects its noise */
    int64_t rows, columns;
    int64_t offset;          /* of this shard's first element in the whole parameter; 0 if it is not sharded */
    uint64_t seed;           /* of the noise */
    void *weight, *low;
    void *first, *first_scale, *second, *second_scale; /* moments; scales [rows][columns / 64, rounded up] */
    const void *gradient;
    const float *factor;     /* float [1], or NULL */
    float *count;            /* float [1], steps so far, which each step increases */
} quaver_parameter;

/* True if a parameter may use `even`: whole blocks, and addresses that are multiples of 16. */
QUAVER_API int quaver_step_even(const quaver_step *step, const quaver_parameter *parameter);
/* Rows of `chunks` for a parameter; 0 if it is empty or has more than 2^36 elements. */
QUAVER_API int64_t quaver_step_programs(int64_t rows, int64_t columns);
/* Write a parameter's row of the table, and its quaver_step_programs rows of chunks, both in host memory: the caller
 * copies them to the device, and writes them again when an address changes. index: of the row in the table. */
QUAVER_API quaver_status quaver_step_row(const quaver_step *step, const quaver_parameter *parameter, int32_t index,
                                         int64_t row[QUAVER_STEP_FIELDS], int32_t (*chunks)[3]);
/* Step parameters by AdamW in one launch. On the device, at multiples of 16: chunks, int32 [programs][3]; table, int64
 * [parameters][QUAVER_STEP_FIELDS]; workspace, int32 [parameters][2] of zeros, left as zeros; and scalars, float
 * [8][parameters]: w(beta1), w(beta2), eps, lr, lr * decay, 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t), and the largest
 * update (infinity: no limit), with w(b) = 1 - b, or -b if b is below one half, and t = 1 in the first step. */
QUAVER_API quaver_status quaver_adamw_step(quaver_handle handle, void *stream, const quaver_step *step,
                                           const void *chunks, int64_t programs, const void *table,
                                           const float *scalars, void *workspace, int32_t parameters);

#ifdef __cplusplus
}
#endif
#endif

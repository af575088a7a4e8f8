/* quaver_numerics.h: Quaver's formats, scales, noise and operands in C99. Include it; there is nothing to link.
 *
 * Every function returns the bits of quaver.reference, the specification in numpy. No function allocates, prints or
 * keeps state. Functions that can fail return a qvn_status. Names that begin with qvn__ are internal.
 *
 * It needs IEEE 754 arithmetic in float: round to nearest, subnormals kept. No expression contains a product and a sum,
 * so that contraction to FMA changes nothing.
 */
#ifndef QUAVER_NUMERICS_H
#define QUAVER_NUMERICS_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__) || defined(_M_FP_FAST) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__)
#error "quaver_numerics.h needs IEEE arithmetic: compile without -ffast-math and the flags that it includes"
#endif
#if FLT_EVAL_METHOD != 0
#error "quaver_numerics.h needs float expressions evaluated in float: on 32-bit x86 compile with -msse2 -mfpmath=sse"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ---------------------------------------------------------------------------------------------------- */

typedef enum {
    QVN_OK = 0,
    QVN_ERROR_NULL,       /* a required pointer is NULL */
    QVN_ERROR_FORMAT,     /* the fields of a format contradict each other, or the call does not take this format */
    QVN_ERROR_SPEC,       /* a negative block, an unknown scale or rounding, or two-level scales without E2M1 codes in
                             finite blocks */
    QVN_ERROR_SHAPE,      /* a negative size, a stride below k, more than 2^60 elements, or incomplete blocks */
    QVN_ERROR_FACTOR,     /* an encode factor for scales other than one float32 per tensor */
    QVN_ERROR_LAYOUT,     /* an unknown layout of a stored weight */
    QVN_ERROR_ARITHMETIC  /* this thread flushes subnormals or does not round to nearest */
} qvn_status;

/* A sentence about a status. */
static inline const char *qvn_status_text(qvn_status status) {
    switch (status) {
    case QVN_OK: return "success";
    case QVN_ERROR_NULL: return "a required pointer is NULL";
    case QVN_ERROR_FORMAT: return "the fields of the format contradict each other, or the call takes another format";
    case QVN_ERROR_SPEC: return "the spec has a negative block, an unknown enum, or an unsupported combination";
    case QVN_ERROR_SHAPE: return "a size is negative or too large, or a row ends within a block";
    case QVN_ERROR_FACTOR: return "an encode factor needs a spec with one float32 scale per tensor";
    case QVN_ERROR_LAYOUT: return "the layout of the stored weight is unknown";
    case QVN_ERROR_ARITHMETIC: return "this thread flushes subnormals to zero or does not round to nearest";
    }
    return "unknown status";
}

/* ---- float32 as bits ------------------------------------------------------------------------------------------- */

#define QVN_INFINITY_BITS 0x7F800000u
#define QVN_NAN_BITS 0x7FC00000u
#define QVN_SMALLEST_NORMAL_BITS 0x00800000u

static inline uint32_t qvn_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float qvn_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* float32 of a bfloat16's bits. */
static inline float qvn_from_bf16(uint16_t bits) { return qvn_float((uint32_t)bits << 16); }

/* Bits of |x|. Compared as integers, NaN is above infinity and infinity above every number. */
static inline uint32_t qvn_magnitude(float x) { return qvn_bits(x) & 0x7FFFFFFFu; }

/* 2^p for p in [-149, 127]. */
static inline float qvn_pow2(int p) {
    return qvn_float(p >= -126 ? (uint32_t)(p + 127) << 23 : 1u << (p + 149));
}

/* QVN_ERROR_ARITHMETIC if this thread flushes subnormals or does not round to nearest. A library that was compiled with
 * -ffast-math may have set that. qvn_quantize, qvn_dequantize and qvn_read_weight check it too. */
static inline qvn_status qvn_check_arithmetic(void) {
    volatile float one = 1.0f, three = 3.0f, half = 0.5f, normal = FLT_MIN, subnormal = qvn_float(1);
    float read = subnormal * one, written = normal * half;
    float tie = one + qvn_float(0x34400000u), third = one / three, minus_third = -one / three; /* tie: 1.5 ulp of 1 */
    int exact = qvn_bits(read) == 1u && qvn_bits(written) == 0x00400000u;
    int nearest = qvn_bits(third) == 0x3EAAAAABu && qvn_bits(minus_third) == 0xBEAAAAABu;
    return exact && nearest && qvn_bits(tie) == 0x3F800002u ? QVN_OK : QVN_ERROR_ARITHMETIC;
}

/* ---- formats --------------------------------------------------------------------------------------------------- */

/* A small floating-point format: sign, exponent, mantissa from the highest bit down. You may define your own. */
typedef struct {
    int bits;          /* of one code, including the sign: at most 8 */
    int exponent_bits; /* at least 1 */
    int mantissa_bits; /* at least 1 with a sign */
    int bias;
    float max;         /* largest finite magnitude, to which larger ones and infinities saturate */
    int has_nan;       /* 0: NaN becomes max */
    int has_sign;      /* 0: a format of scales; magnitudes are encoded */
} qvn_format;

static const qvn_format QVN_E4M3 = {8, 4, 3, 7, 448.0f, 1, 1};
static const qvn_format QVN_E5M2 = {8, 5, 2, 15, 57344.0f, 1, 1};
static const qvn_format QVN_E3M2 = {6, 3, 2, 3, 28.0f, 0, 1};
static const qvn_format QVN_E2M3 = {6, 2, 3, 1, 7.5f, 0, 1};
static const qvn_format QVN_E2M1 = {4, 2, 1, 1, 6.0f, 0, 1};
/* Scales only: code c is 2^(c - 127), 255 is NaN. */
static const qvn_format QVN_E8M0 = {8, 8, 0, 127, 1.7014118346046923e38f, 1, 0};

/* Exponent of the smallest normal number. Without mantissa bits there are no subnormals, and code 0 is normal. */
static inline int qvn_emin(const qvn_format *f) { return (f->mantissa_bits > 0) - f->bias; }

/* Code of f->max. */
static inline uint32_t qvn_max_code(const qvn_format *f) {
    uint32_t max = qvn_bits(f->max);
    uint32_t exponent = (uint32_t)((int)(max >> 23) - 127 + f->bias);
    return (exponent << f->mantissa_bits) + ((max & 0x7FFFFFu) >> (23 - f->mantissa_bits));
}

/* QVN_ERROR_FORMAT unless the fields describe a format. The other functions require one that passes. */
static inline qvn_status qvn_check_format(const qvn_format *f) {
    if (!f) return QVN_ERROR_NULL;
    int sign = f->has_sign != 0, nan = f->has_nan != 0;
    if (f->exponent_bits < 1 || f->exponent_bits > 8 || f->mantissa_bits < sign || f->mantissa_bits > 7 || f->bits > 8 ||
        f->bits != sign + f->exponent_bits + f->mantissa_bits || f->bias < -127 || f->bias > 127)
        return QVN_ERROR_FORMAT;
    uint32_t max = qvn_bits(f->max);
    if (max < QVN_SMALLEST_NORMAL_BITS || max > 0x7F000000u) return QVN_ERROR_FORMAT; /* 2^-126 to 2^127 */
    uint32_t missing = (1u << (23 - f->mantissa_bits)) - 1; /* bits of a float32's mantissa that the format lacks */
    uint32_t last = (1u << (f->bits - sign)) - 1;
    if ((int)(max >> 23) - 127 < qvn_emin(f) || (max & missing) || qvn_max_code(f) > last - (uint32_t)nan)
        return QVN_ERROR_FORMAT;
    /* GEMMs support the range of E5M2. Scales compensate for a bias that moves a format into it. */
    if (sign && (f->max > 65536.0f || qvn_emin(f) - f->mantissa_bits < -16)) return QVN_ERROR_FORMAT;
    return QVN_OK;
}

/* |x| in steps between neighbouring codes. Rounded down, its code is first + (mantissa >> shift); the lowest `shift` bits
 * are the fraction of a step. */
typedef struct {
    uint32_t mantissa; /* 24 bits */
    int shift;
    int first;
} qvn__steps;

static inline qvn__steps qvn__steps_of(uint32_t magnitude, const qvn_format *f) {
    qvn__steps s = {magnitude & 0x7FFFFFu, 23 - f->mantissa_bits, 0};
    int exponent = (int)(magnitude >> 23) - 127, emin = qvn_emin(f);
    if (magnitude >= QVN_SMALLEST_NORMAL_BITS)
        s.mantissa |= 0x800000u;
    else
        for (exponent++; s.mantissa && s.mantissa < 0x800000u; exponent--) s.mantissa <<= 1;
    if (f->mantissa_bits == 0) {
        s.first = -1; /* the mantissa of code 0 is 1 */
        if (!s.mantissa || exponent < emin) s.mantissa = 0x800000u, exponent = emin;
    }
    if (exponent < emin)
        s.shift += emin - exponent;
    else
        s.first += (exponent - emin) << f->mantissa_bits;
    return s;
}

/* Code of x from its steps rounded down, and 1 step more if `up`. Saturates. */
static inline uint8_t qvn__code(int steps, int up, float x, const qvn_format *f) {
    uint32_t code = (uint32_t)(steps + up), max_code = qvn_max_code(f);
    if (code > max_code) code = max_code;
    return (uint8_t)(f->has_sign ? code | (qvn_bits(x) >> 31) << (f->bits - 1) : code);
}

static inline uint8_t qvn__nan_code(const qvn_format *f) {
    return (uint8_t)(!f->has_nan ? qvn_max_code(f) : f->has_sign ? 0x7F : 0xFF);
}

/* Code of x rounded to nearest, ties to even. Saturates, infinities too. NaN is 0x7F, 0xFF without a sign, or max. */
static inline uint8_t qvn_encode(float x, const qvn_format *f) {
    uint32_t magnitude = qvn_magnitude(x);
    if (magnitude > QVN_INFINITY_BITS) return qvn__nan_code(f);
    qvn__steps s = qvn__steps_of(magnitude, f);
    if (s.shift > 24) return qvn__code(0, 0, x, f); /* below half of the smallest step */
    uint32_t whole = s.mantissa >> s.shift, half = 1u << s.shift >> 1, rest = s.mantissa & ((1u << s.shift) - 1);
    return qvn__code(s.first + (int)whole, rest > half || (rest == half && (whole & 1)), x, f);
}

/* Code of x rounded stochastically: away from zero if u < the fraction of a step, with u = (random + 1/2) * 2^-16, else
 * towards zero. Saturation and NaN as in qvn_encode. */
static inline uint8_t qvn_encode_stochastic(float x, const qvn_format *f, uint16_t random) {
    uint32_t magnitude = qvn_magnitude(x);
    if (magnitude > QVN_INFINITY_BITS) return qvn__nan_code(f);
    qvn__steps s = qvn__steps_of(magnitude, f);
    if (s.shift > 40) return qvn__code(0, 0, x, f); /* the fraction is below 2^-17, the smallest u */
    uint64_t whole = (uint64_t)s.mantissa >> s.shift, rest = (uint64_t)s.mantissa - (whole << s.shift);
    int up = (uint64_t)(2u * random + 1u) << s.shift < rest << 17;
    return qvn__code(s.first + (int)whole, up, x, f);
}

/* Value of a code. NaN for codes above that of max and for bytes that are not codes. */
static inline float qvn_decode(uint8_t code, const qvn_format *f) {
    uint32_t magnitude = code, negative = 0;
    if (f->has_sign) {
        negative = (uint32_t)code >> (f->bits - 1);
        magnitude = code & ((1u << (f->bits - 1)) - 1);
    }
    if (negative > 1 || magnitude > qvn_max_code(f)) return qvn_float(QVN_NAN_BITS);
    int exponent = (int)(magnitude >> f->mantissa_bits), subnormal = exponent == 0 && f->mantissa_bits > 0;
    uint32_t mantissa = magnitude & ((1u << f->mantissa_bits) - 1);
    if (!subnormal) mantissa |= 1u << f->mantissa_bits;
    float value = (float)mantissa * qvn_pow2(exponent + subnormal - f->bias - f->mantissa_bits);
    return qvn_float(qvn_bits(value) | negative << 31);
}

/* ---- noise of stochastic rounding --------------------------------------------------------------------------------
 * Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. */

/* Ten rounds of Philox4x32, in place. */
static inline void qvn_philox4x32(uint32_t counter[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)counter[0] * 0xD2511F53u, b = (uint64_t)counter[2] * 0xCD9E8D57u;
        counter[0] = (uint32_t)(b >> 32) ^ counter[1] ^ key0;
        counter[2] = (uint32_t)(a >> 32) ^ counter[3] ^ key1;
        counter[1] = (uint32_t)b;
        counter[3] = (uint32_t)a;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

/* Ten rounds of Philox2x32, in place. */
static inline void qvn_philox2x32(uint32_t counter[2], uint32_t key) {
    for (int round = 0; round < 10; round++) {
        uint64_t product = (uint64_t)counter[0] * 0xD256D193u;
        counter[0] = (uint32_t)(product >> 32) ^ counter[1] ^ key;
        counter[1] = (uint32_t)product;
        key += 0x9E3779B9u;
    }
}

/* Random stream of one quantization of one tensor: key and upper counter word of Philox2x32-10. */
typedef struct {
    uint32_t key;
    uint32_t upper;
} qvn_noise;

/* First two words of Philox4x32-10 at the counter (0, 0, tensor_id, count), with the seed as key.
 * seed: of the run. tensor_id: see qvn_tensor_id. count: number of earlier quantizations of this tensor, modulo 2^32. */
static inline qvn_noise qvn_noise_stream(uint64_t seed, uint32_t tensor_id, uint64_t count) {
    uint32_t words[4] = {0, 0, tensor_id, (uint32_t)count};
    qvn_philox4x32(words, (uint32_t)seed, (uint32_t)(seed >> 32));
    qvn_noise noise = {words[0], words[1]};
    return noise;
}

/* Sixteen random bits of element number row * qvn_padded_k + column of the operand. A shard that passes the element's
 * number in the whole operand gets the same bits. */
static inline uint16_t qvn_random_bits(qvn_noise noise, uint64_t element) {
    uint64_t group = element >> 2;
    uint32_t words[2] = {(uint32_t)group, (uint32_t)(group >> 32) ^ noise.upper};
    qvn_philox2x32(words, noise.key);
    uint32_t word = words[(element & 3) >> 1];
    return (uint16_t)(element & 1 ? word : word >> 16);
}

/* Uniform number in (0, 1): (random + 1/2) * 2^-16. */
static inline float qvn_uniform(uint16_t random) { return (float)(2u * random + 1u) * 7.62939453125e-6f; /* 2^-17 */ }

/* Tensor id of a named layer's operand: CRC-32 of a name such as "layers.0.mlp.up.grad_output". */
static inline uint32_t qvn_tensor_id(const char *name) {
    uint32_t crc = 0xFFFFFFFFu;
    for (; *name; name++) {
        crc ^= (uint8_t)*name;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    }
    return ~crc;
}

/* ---- scales ------------------------------------------------------------------------------------------------------
 * The encode factor multiplies data before rounding. The decode scale is 1 / factor: original = data * scale.
 * An amax that is infinite or NaN has factor 1. */

/* Magnitude of an amax, with subnormals replaced by 0. */
static inline float qvn__flush(float amax) {
    uint32_t magnitude = qvn_magnitude(amax);
    return qvn_float(magnitude < QVN_SMALLEST_NORMAL_BITS ? 0 : magnitude);
}

static inline int qvn__finite(float x) { return qvn_magnitude(x) < QVN_INFINITY_BITS; }

/* Largest magnitude of x [rows, k], compared as bits: NaN > infinity > numbers. Subnormal maxima are 0. */
static inline float qvn_amax(const float *x, int64_t rows, int64_t k, int64_t stride) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < k; j++) {
            uint32_t magnitude = qvn_magnitude(x[i * stride + j]);
            if (magnitude > largest) largest = magnitude;
        }
    return qvn__flush(qvn_float(largest));
}

/* Largest p in [low, high] with amax * 2^p <= largest; 0 if amax is 0, infinite or NaN. */
static inline int qvn_exponent(float amax, float largest, int low, int high) {
    uint32_t bits = qvn_bits(amax), max = qvn_bits(largest);
    if (!qvn__finite(amax) || !(amax > 0)) return 0;
    int p = (int)(max >> 23) - (int)((bits + 0x7FFFFFu - (max & 0x7FFFFFu)) >> 23);
    return p < low ? low : p > high ? high : p;
}

/* largest / amax, clamped to normal numbers; 1 if amax is 0, infinite or NaN. */
static inline float qvn__ratio(float largest, float amax) {
    if (!qvn__finite(amax) || !(amax > 0)) return 1.0f;
    float ratio = largest / amax;
    return ratio < FLT_MIN ? FLT_MIN : ratio > FLT_MAX ? FLT_MAX : ratio;
}

/* Encode factor of data with this amax: the largest power of two that does not saturate, or max / amax. */
static inline float qvn_encode_factor(float amax, const qvn_format *f, int power_of_two) {
    return power_of_two ? qvn_pow2(qvn_exponent(amax, f->max, -126, 100)) : qvn__ratio(f->max, amax);
}

/* The tensor factor scales the tensor's amax to at most this: the largest E2M1 times the largest E4M3. */
#define QVN_TWO_LEVEL_MAX 2688.0f

/* Encode factor of the tensor, with two-level scales. */
static inline float qvn_tensor_factor(float amax, int power_of_two) {
    return power_of_two ? qvn_pow2(qvn_exponent(amax, QVN_TWO_LEVEL_MAX, -117, 100))
                        : qvn__ratio(QVN_TWO_LEVEL_MAX, amax);
}

/* E4M3 code of a block's scale, with two-level scales. */
static inline uint8_t qvn_block_scale(float amax, float tensor_factor) {
    return qvn_encode(amax * (tensor_factor * (1.0f / 6.0f)), &QVN_E4M3);
}

/* Encode factor of a block's data, with two-level scales; 0 if the block's scale is 0. Rounds three times, in the order
 * of Transformer Engine. */
static inline float qvn_block_factor(uint8_t block_scale, float tensor_factor) {
    float scale = qvn_decode(block_scale, &QVN_E4M3);
    if (scale == 0.0f) return 0.0f;
    float factor = 1.0f / (scale * (1.0f / tensor_factor));
    return factor > FLT_MAX ? FLT_MAX : factor;
}

/* ---- Hadamard rotation ----------------------------------------------------------------------------------------- */

/* Rotate 16 values in place: signs, four butterfly stages, times 1/4, each rounded to float32. Source: NVIDIA,
 * arXiv:2509.25149, appendix C; the signs are those of Transformer Engine. */
static inline void qvn_rotate(float v[16]) {
    static const uint8_t negative[16] = {0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 1};
    for (int i = 0; i < 16; i++) v[i] = negative[i] ? -v[i] : v[i];
    for (int stride = 1; stride < 16; stride *= 2)
        for (int i = 0; i < 16; i += 2 * stride)
            for (int j = i; j < i + stride; j++) {
                float a = v[j], b = v[j + stride];
                v[j] = a + b;
                v[j + stride] = a - b;
            }
    for (int i = 0; i < 16; i++) v[i] *= 0.25f;
}

/* ---- operands -------------------------------------------------------------------------------------------------- */

typedef enum {
    QVN_SCALE_POWER_OF_TWO,   /* float32, the largest power of two that does not saturate */
    QVN_SCALE_FP32,           /* float32, from max / amax correctly rounded */
    QVN_SCALE_E8M0,           /* the power of two as an exponent byte */
    QVN_SCALE_TWO_LEVEL,      /* E4M3 per block and a power of two per tensor */
    QVN_SCALE_TWO_LEVEL_FP32, /* E4M3 per block and a correctly rounded factor per tensor */
    QVN_SCALE_UNIT            /* always 1, whatever the amax */
} qvn_scale_kind;

typedef enum { QVN_NEAREST, QVN_STOCHASTIC } qvn_rounding;

/* Quantization of one GEMM operand [rows, k]; k is the contraction axis. */
typedef struct {
    const qvn_format *format; /* with a sign */
    int64_t block_rows;       /* rows of a block, which has one scale; 0 is the whole axis */
    int64_t block_k;          /* columns of a block; 0 is the whole axis */
    qvn_scale_kind scale;
    qvn_rounding rounding;
    int hadamard;             /* 1 rotates groups of 16 along k first; k is padded with zeros to a multiple of 16 */
} qvn_spec;

/* Options of qvn_quantize; zeros are the defaults. */
typedef struct {
    const float *amax;  /* one per block, or the tensor's with two-level scales; NULL computes them from x */
    float factor;       /* encode factor of delayed scaling, which replaces that of the amax; 0 is unset */
    uint64_t seed;      /* of stochastic rounding: see qvn_noise_stream */
    uint32_t tensor_id;
    uint64_t count;
} qvn_quantize_options;

/* A quantized operand, in memory of the caller. */
typedef struct {
    uint8_t *codes;        /* [rows, qvn_padded_k], one per byte; qvn_pack packs them */
    float *scale;          /* [qvn_scale_rows, qvn_scale_columns] decode scales, with both levels multiplied */
    uint8_t *stored_scale; /* NULL, or the same shape: E8M0 codes, or E4M3 codes of two-level scales; else unused */
    float tensor_factor;   /* two-level: block scales are divided by it; NaN if the tensor is not finite; else 1 */
} qvn_quantized;

static inline int qvn__two_level(const qvn_spec *s) {
    return s->scale == QVN_SCALE_TWO_LEVEL || s->scale == QVN_SCALE_TWO_LEVEL_FP32;
}

/* Number of stored columns for k columns. */
static inline int64_t qvn_padded_k(const qvn_spec *s, int64_t k) { return s->hadamard ? (k + 15) / 16 * 16 : k; }

static inline int64_t qvn__blocks(int64_t size, int64_t block) {
    return block ? size / block + (size % block != 0) : 1;
}

/* Shape of the scales of an operand [rows, k]. */
static inline int64_t qvn_scale_rows(const qvn_spec *s, int64_t rows) { return qvn__blocks(rows, s->block_rows); }
static inline int64_t qvn_scale_columns(const qvn_spec *s, int64_t k) {
    return qvn__blocks(qvn_padded_k(s, k), s->block_k);
}

/* QVN_ERROR_NULL, QVN_ERROR_FORMAT or QVN_ERROR_SPEC unless operands can be quantized as the spec says. */
static inline qvn_status qvn_check_spec(const qvn_spec *s) {
    if (!s || !s->format) return QVN_ERROR_NULL;
    if (qvn_check_format(s->format) || !s->format->has_sign) return QVN_ERROR_FORMAT;
    if (s->block_rows < 0 || s->block_k < 0 || (unsigned)s->scale > QVN_SCALE_UNIT ||
        (unsigned)s->rounding > QVN_STOCHASTIC)
        return QVN_ERROR_SPEC;
    const qvn_format *f = s->format;
    int e2m1 = f->bits == 4 && f->mantissa_bits == 1 && f->bias == 1 && f->max == 6.0f && !f->has_nan;
    return qvn__two_level(s) && (!e2m1 || !s->block_rows || !s->block_k) ? QVN_ERROR_SPEC : QVN_OK;
}

static inline qvn_status qvn__check_shape(int64_t rows, int64_t k, int64_t stride) {
    int64_t most = (int64_t)1 << 60;
    if (rows < 0 || k < 0 || stride < k || stride > most - 15) return QVN_ERROR_SHAPE;
    return rows && stride + 15 > most / rows ? QVN_ERROR_SHAPE : QVN_OK;
}

/* Encode factor, decode scale and stored scale of one block. */
typedef struct {
    float factor;
    float scale;    /* NaN if an amax is infinite or NaN */
    uint8_t stored; /* E8M0, or E4M3 of two-level scales; else 0 */
} qvn_block;

/* measured: amax of the block's own data. amax: the one that determines the factor, of the block or, with two-level
 * scales, of the tensor. factor: as in qvn_quantize_options. */
static inline qvn_block qvn_scale_block(const qvn_spec *s, float measured, float amax, float factor) {
    qvn_block b = {1.0f, 1.0f, 0};
    if (s->scale == QVN_SCALE_UNIT) return b;
    measured = qvn__flush(measured);
    amax = qvn__flush(amax);
    if (qvn__two_level(s)) {
        float tensor_factor = qvn_tensor_factor(amax, s->scale == QVN_SCALE_TWO_LEVEL);
        b.stored = qvn_block_scale(measured, tensor_factor);
        b.factor = qvn_block_factor(b.stored, tensor_factor);
        b.scale = qvn_decode(b.stored, &QVN_E4M3) / tensor_factor;
        if (!qvn__finite(measured)) b.stored = 0x7F;
    } else {
        b.factor = factor != 0.0f ? factor : qvn_encode_factor(amax, s->format, s->scale != QVN_SCALE_FP32);
        b.scale = 1.0f / b.factor;
        if (s->scale == QVN_SCALE_E8M0 && amax == 0.0f) {
            b.factor = 0.0f;
            b.scale = qvn_pow2(-127);
        }
    }
    if (!qvn__finite(measured) || !qvn__finite(amax)) b.scale = qvn_float(QVN_NAN_BITS);
    if (s->scale == QVN_SCALE_E8M0) b.stored = qvn_encode(b.scale, &QVN_E8M0);
    return b;
}

/* Reads values of an operand as they are quantized: rotated if the spec says so, and with subnormals flushed to zeros of
 * their sign if rounding is stochastic. */
typedef struct {
    const float *x;
    int64_t k, stride;
    const qvn_spec *spec;
    int64_t row, group; /* of the values in `rotated` */
    float rotated[16];
} qvn__reader;

static inline float qvn__read(qvn__reader *r, int64_t i, int64_t j) {
    float value;
    if (!r->spec->hadamard) {
        value = r->x[i * r->stride + j];
    } else {
        if (i != r->row || j / 16 != r->group) {
            r->row = i;
            r->group = j / 16;
            for (int64_t n = 0, at = r->group * 16; n < 16; n++, at++)
                r->rotated[n] = at < r->k ? r->x[i * r->stride + at] : 0.0f;
            qvn_rotate(r->rotated);
        }
        value = r->rotated[j % 16];
    }
    if (r->spec->rounding == QVN_STOCHASTIC && qvn_magnitude(value) < QVN_SMALLEST_NORMAL_BITS)
        value = qvn_float(qvn_bits(value) & 0x80000000u);
    return value;
}

static inline float qvn__amax_of(qvn__reader *r, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
    uint32_t largest = 0;
    for (int64_t i = i0; i < i1; i++)
        for (int64_t j = j0; j < j1; j++) {
            uint32_t magnitude = qvn_magnitude(qvn__read(r, i, j));
            if (magnitude > largest) largest = magnitude;
        }
    return qvn__flush(qvn_float(largest));
}

/* End of a block that begins at `from`. */
static inline int64_t qvn__end(int64_t from, int64_t block, int64_t size) {
    return block && block < size - from ? from + block : size;
}

/* Quantize x [rows, k], rows `stride` elements apart: codes of x * factor, scale = 1 / factor, with a factor per block.
 *
 * options: NULL for the defaults. q: the caller sets its pointers, and the function writes to that memory.
 * A block with an infinity or NaN has scale NaN, even if an amax or factor was passed. */
static inline qvn_status qvn_quantize(const float *x, int64_t rows, int64_t k, int64_t stride, const qvn_spec *spec,
                                      const qvn_quantize_options *options, qvn_quantized *q) {
    qvn_quantize_options o = {NULL, 0.0f, 0, 0, 0};
    if (options) o = *options;
    qvn_status status = qvn_check_spec(spec);
    if (!status) status = qvn__check_shape(rows, k, stride);
    if (!status) status = qvn_check_arithmetic();
    if (status) return status;
    int64_t columns = qvn_padded_k(spec, k), scale_columns = qvn_scale_columns(spec, k);
    int64_t blocks = qvn_scale_rows(spec, rows) * scale_columns;
    if (!q || (blocks && !q->scale) || (rows && k && (!x || !q->codes))) return QVN_ERROR_NULL;
    int one_scale = !spec->block_rows && !spec->block_k &&
                    (spec->scale == QVN_SCALE_FP32 || spec->scale == QVN_SCALE_POWER_OF_TWO);
    if (o.factor != 0.0f && !one_scale) return QVN_ERROR_FACTOR;
    qvn__reader reader = {x, k, stride, spec, -1, -1, {0}};
    qvn_noise noise = qvn_noise_stream(o.seed, o.tensor_id, o.count);
    int two_level = qvn__two_level(spec);
    float tensor_amax = 0.0f; /* with two-level scales */
    q->tensor_factor = 1.0f;
    if (two_level) {
        tensor_amax = qvn__flush(o.amax ? o.amax[0] : qvn__amax_of(&reader, 0, rows, 0, columns));
        q->tensor_factor = qvn__finite(tensor_amax) ? qvn_tensor_factor(tensor_amax, spec->scale == QVN_SCALE_TWO_LEVEL)
                                                    : qvn_float(QVN_NAN_BITS);
    }
    for (int64_t n = 0; n < blocks; n++) {
        int64_t i0 = n / scale_columns * spec->block_rows, i1 = qvn__end(i0, spec->block_rows, rows);
        int64_t j0 = n % scale_columns * spec->block_k, j1 = qvn__end(j0, spec->block_k, columns);
        float measured = qvn__amax_of(&reader, i0, i1, j0, j1);
        float amax = two_level ? tensor_amax : o.amax ? o.amax[n] : measured;
        qvn_block block = qvn_scale_block(spec, measured, amax, o.factor);
        q->scale[n] = block.scale;
        if (q->stored_scale && (two_level || spec->scale == QVN_SCALE_E8M0)) q->stored_scale[n] = block.stored;
        for (int64_t i = i0; i < i1; i++)
            for (int64_t j = j0; j < j1; j++) {
                float scaled = qvn__read(&reader, i, j) * block.factor;
                int64_t at = i * columns + j;
                q->codes[at] = spec->rounding == QVN_NEAREST
                                   ? qvn_encode(scaled, spec->format)
                                   : qvn_encode_stochastic(scaled, spec->format, qvn_random_bits(noise, (uint64_t)at));
            }
    }
    return QVN_OK;
}

/* Write data * scale to y [rows, qvn_padded_k]. rows, k, spec: as for qvn_quantize. scale: decode scales. With a Hadamard
 * rotation y has the rotated values, as the GEMM uses them. */
static inline qvn_status qvn_dequantize(const uint8_t *codes, const float *scale, int64_t rows, int64_t k,
                                        const qvn_spec *spec, float *y) {
    qvn_status status = qvn_check_spec(spec);
    if (!status) status = qvn__check_shape(rows, k, k);
    if (!status) status = qvn_check_arithmetic();
    if (status) return status;
    int64_t columns = qvn_padded_k(spec, k), scale_columns = qvn_scale_columns(spec, k);
    if (rows && k && (!codes || !scale || !y)) return QVN_ERROR_NULL;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            int64_t row = spec->block_rows ? i / spec->block_rows : 0, column = spec->block_k ? j / spec->block_k : 0;
            y[i * columns + j] = qvn_decode(codes[i * columns + j], spec->format) * scale[row * scale_columns + column];
        }
    return QVN_OK;
}

/* ---- storage of codes and scales ------------------------------------------------------------------------------- */

/* Bytes of a row of k codes: of 4 bits two per byte, of 6 bits four in three bytes, the first in the lowest bits. */
static inline int64_t qvn_packed_size(int64_t k, int bits) { return k / 8 * bits + (k % 8 * bits + 7) / 8; }

/* Code j of a packed row. */
static inline uint8_t qvn_code_at(const uint8_t *row, int64_t j, int bits) {
    const uint8_t *group = row + j / 8 * bits; /* eight codes fill `bits` bytes */
    int at = (int)(j % 8) * bits;
    uint32_t word = group[at / 8];
    if (at % 8 + bits > 8) word |= (uint32_t)group[at / 8 + 1] << 8;
    return (uint8_t)(word >> at % 8 & ((1u << bits) - 1));
}

/* Pack a row of k codes of 1 to 8 bits; unused bits at the end are zero. */
static inline void qvn_pack(const uint8_t *codes, int64_t k, int bits, uint8_t *row) {
    for (int64_t n = 0, size = qvn_packed_size(k, bits); n < size; n++) row[n] = 0;
    for (int64_t j = 0; j < k; j++) {
        uint8_t *group = row + j / 8 * bits;
        int at = (int)(j % 8) * bits;
        uint32_t word = (uint32_t)(codes[j] & ((1u << bits) - 1)) << at % 8;
        group[at / 8] = (uint8_t)(group[at / 8] | word);
        if (at % 8 + bits > 8) group[at / 8 + 1] = (uint8_t)(group[at / 8 + 1] | word >> 8);
    }
}

static inline void qvn_unpack(const uint8_t *row, int64_t k, int bits, uint8_t *codes) {
    for (int64_t j = 0; j < k; j++) codes[j] = qvn_code_at(row, j, bits);
}

/* Index of a scale in the order 32_4_4 of Blackwell's GEMMs: tiles of 128 rows and 4 blocks of k, 512 bytes each.
 * row: of the operand; if a block has several rows, its scale is stored for each of them. block: along k. blocks: number
 * of blocks along k. */
static inline int64_t qvn_swizzled_index(int64_t row, int64_t block, int64_t blocks) {
    int64_t tile = row / 128 * ((blocks + 3) / 4) + block / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}

static inline int64_t qvn_swizzled_size(int64_t rows, int64_t blocks) {
    return (rows + 127) / 128 * ((blocks + 3) / 4) * 512;
}

/* Reorder scales [rows, blocks] to qvn_swizzled_size bytes; padding is zero. */
static inline void qvn_swizzle(const uint8_t *scale, int64_t rows, int64_t blocks, uint8_t *swizzled) {
    for (int64_t n = 0, size = qvn_swizzled_size(rows, blocks); n < size; n++) swizzled[n] = 0;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < blocks; j++) swizzled[qvn_swizzled_index(i, j, blocks)] = scale[i * blocks + j];
}

/* ---- weights in exported checkpoints --------------------------------------------------------------------------- */

/* Scales of a stored weight [n, k], by the tensors of compressed-tensors, DeepSeek, ModelOpt and GPT-OSS. */
typedef enum {
    QVN_LAYOUT_TENSOR,        /* float32 [1] */
    QVN_LAYOUT_CHANNEL,       /* float32 [n] */
    QVN_LAYOUT_BLOCK,         /* float32 [ceil(n / 128), ceil(k / 128)]: weight_scale or weight_scale_inv */
    QVN_LAYOUT_MX,            /* E8M0 [n, k / 32] */
    QVN_LAYOUT_NV_DIVIDED,    /* E4M3 [n, k / 16], divided by weight_global_scale (compressed-tensors) */
    QVN_LAYOUT_NV_MULTIPLIED  /* E4M3 [n, k / 16], multiplied by weight_scale_2 (ModelOpt) */
} qvn_layout;

typedef struct {
    const uint8_t *codes;     /* n rows of qvn_packed_size bytes */
    const void *scale;        /* need not be aligned */
    float tensor_scale;       /* weight_global_scale or weight_scale_2; else unused */
    int64_t n, k;             /* GPT-OSS's experts [E, N, ...] are one weight of E * N rows */
    const qvn_format *format;
    qvn_layout layout;
} qvn_stored_weight;

static inline qvn_status qvn_check_weight(const qvn_stored_weight *w) {
    if (!w || !w->codes || !w->scale) return QVN_ERROR_NULL;
    qvn_status status = qvn_check_format(w->format);
    if (status) return status;
    if ((unsigned)w->layout > QVN_LAYOUT_NV_MULTIPLIED) return QVN_ERROR_LAYOUT;
    int64_t width = w->layout == QVN_LAYOUT_MX ? 32 : w->layout >= QVN_LAYOUT_NV_DIVIDED ? 16 : 1;
    if (w->k % width) return QVN_ERROR_SHAPE; /* qvn_weight_at needs complete blocks */
    return qvn__check_shape(w->n, w->k, w->k);
}

/* Dequantized element [i, j] of a weight that passes qvn_check_weight. */
static inline float qvn_weight_at(const qvn_stored_weight *w, int64_t i, int64_t j) {
    int bits = w->format->bits;
    float value = qvn_decode(qvn_code_at(w->codes + i * qvn_packed_size(w->k, bits), j, bits), w->format), scale;
    const uint8_t *bytes = (const uint8_t *)w->scale;
    if (w->layout == QVN_LAYOUT_MX)
        return value * qvn_decode(bytes[i * (w->k / 32) + j / 32], &QVN_E8M0);
    if (w->layout == QVN_LAYOUT_NV_DIVIDED || w->layout == QVN_LAYOUT_NV_MULTIPLIED) {
        scale = qvn_decode(bytes[i * (w->k / 16) + j / 16], &QVN_E4M3);
        return value * (w->layout == QVN_LAYOUT_NV_DIVIDED ? scale / w->tensor_scale : scale * w->tensor_scale);
    }
    int64_t at = w->layout == QVN_LAYOUT_TENSOR    ? 0
                 : w->layout == QVN_LAYOUT_CHANNEL ? i
                                                   : i / 128 * ((w->k + 127) / 128) + j / 128;
    memcpy(&scale, bytes + at * 4, sizeof scale);
    return value * scale;
}

/* Write the dequantized weight to y [n, k]. */
static inline qvn_status qvn_read_weight(const qvn_stored_weight *w, float *y) {
    qvn_status status = qvn_check_weight(w);
    if (!status) status = qvn_check_arithmetic();
    if (status) return status;
    if (!y) return QVN_ERROR_NULL;
    for (int64_t i = 0; i < w->n; i++)
        for (int64_t j = 0; j < w->k; j++) y[i * w->k + j] = qvn_weight_at(w, i, j);
    return QVN_OK;
}

#ifdef __cplusplus
}
#endif

#endif

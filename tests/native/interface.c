/* Calls that quaver_numerics.h must answer with a status, and values that are known from elsewhere. C99 and C++17. */
#include <fenv.h>
#include <stdio.h>
#include <stdlib.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "quaver_numerics.h"

static int failures = 0;

static void expect(const char *call, int line, long long got, long long want) {
    if (got == want) return;
    printf("line %d: %s is %lld, expected %lld\n", line, call, got, want);
    failures++;
}

#define EXPECT(call, want) expect(#call, __LINE__, (long long)(call), (long long)(want))

static float x[64];
static uint8_t codes[64];
static float scale[64], y[64];
static qvn_quantized q = {codes, scale, NULL, 1.0f};

static qvn_spec spec_of(const qvn_format *format, int64_t rows, int64_t k, qvn_scale_kind kind) {
    qvn_spec spec = {format, rows, k, kind, QVN_NEAREST, 0};
    return spec;
}

static qvn_status quantize(qvn_spec spec) { return qvn_quantize(x, 4, 16, 16, &spec, NULL, &q); }

static void check_formats(void) {
    qvn_format own = {8, 4, 3, 7, 448.0f, 1, 1};
    EXPECT(qvn_check_format(NULL), QVN_ERROR_NULL);
    EXPECT(qvn_check_format(&own), QVN_OK);
    own.max = 449.0f;
    EXPECT(qvn_check_format(&own), QVN_ERROR_FORMAT);
    own.max = 480.0f; /* NaN's code */
    EXPECT(qvn_check_format(&own), QVN_ERROR_FORMAT);
    own.has_nan = 0;
    EXPECT(qvn_check_format(&own), QVN_OK);
    own.bits = 7;
    EXPECT(qvn_check_format(&own), QVN_ERROR_FORMAT);
    qvn_format wide = {8, 2, 1, 1, 6.0f, 0, 1}; /* more bits than its fields */
    EXPECT(qvn_check_format(&wide), QVN_ERROR_FORMAT);
    qvn_format zeros = {0, 0, 0, 0, 0.0f, 0, 0};
    EXPECT(qvn_check_format(&zeros), QVN_ERROR_FORMAT);
    qvn_format nan = {8, 4, 3, 7, qvn_float(QVN_NAN_BITS), 1, 1};
    EXPECT(qvn_check_format(&nan), QVN_ERROR_FORMAT);
}

static void check_specs(void) {
    qvn_format own = {8, 4, 3, 7, 449.0f, 1, 1};
    EXPECT(quantize(spec_of(&QVN_E4M3, 0, 0, QVN_SCALE_FP32)), QVN_OK);
    EXPECT(quantize(spec_of(NULL, 0, 0, QVN_SCALE_FP32)), QVN_ERROR_NULL);
    EXPECT(quantize(spec_of(&QVN_E8M0, 0, 0, QVN_SCALE_FP32)), QVN_ERROR_FORMAT); /* no sign */
    EXPECT(quantize(spec_of(&own, 0, 0, QVN_SCALE_FP32)), QVN_ERROR_FORMAT);
    EXPECT(quantize(spec_of(&QVN_E4M3, -1, 0, QVN_SCALE_FP32)), QVN_ERROR_SPEC);
    EXPECT(quantize(spec_of(&QVN_E4M3, 1, -32, QVN_SCALE_E8M0)), QVN_ERROR_SPEC);
    EXPECT(quantize(spec_of(&QVN_E4M3, 1, 16, QVN_SCALE_TWO_LEVEL)), QVN_ERROR_SPEC);
    EXPECT(quantize(spec_of(&QVN_E2M1, 1, 0, QVN_SCALE_TWO_LEVEL)), QVN_ERROR_SPEC);
    EXPECT(quantize(spec_of(&QVN_E2M1, 1, 16, QVN_SCALE_TWO_LEVEL)), QVN_OK);
    /* Formats of 4 bits that are almost E2M1. */
    const qvn_format almost[] = {{4, 1, 2, 1, 1.75f, 0, 1}, {4, 2, 1, 0, 12.0f, 0, 1}, {4, 2, 1, 1, 4.0f, 0, 1},
                                 {4, 2, 1, 1, 4.0f, 1, 1},  {5, 2, 2, 1, 6.0f, 1, 1},  {5, 3, 1, 1, 6.0f, 0, 1}};
    for (size_t i = 0; i < sizeof almost / sizeof almost[0]; i++) {
        EXPECT(qvn_check_format(&almost[i]), QVN_OK);
        EXPECT(quantize(spec_of(&almost[i], 1, 16, QVN_SCALE_TWO_LEVEL)), QVN_ERROR_SPEC);
    }
    int unknown = 6;
    qvn_spec spec = spec_of(&QVN_E4M3, 0, 0, QVN_SCALE_FP32);
    memcpy(&spec.scale, &unknown, sizeof unknown);
    EXPECT(quantize(spec), QVN_ERROR_SPEC);
    spec = spec_of(&QVN_E4M3, 0, 0, QVN_SCALE_FP32);
    memcpy(&spec.rounding, &unknown, sizeof unknown);
    EXPECT(quantize(spec), QVN_ERROR_SPEC);
}

static void check_operands(void) {
    qvn_spec spec = spec_of(&QVN_E4M3, 0, 0, QVN_SCALE_POWER_OF_TWO), rows = spec_of(&QVN_E4M3, 1, 0, QVN_SCALE_FP32);
    int64_t huge = INT64_MAX;
    qvn_quantized empty = {NULL, NULL, NULL, 1.0f};
    EXPECT(qvn_quantize(x, 4, 16, 16, NULL, NULL, &q), QVN_ERROR_NULL);
    EXPECT(qvn_quantize(NULL, 4, 16, 16, &spec, NULL, &q), QVN_ERROR_NULL);
    EXPECT(qvn_quantize(x, 4, 16, 16, &spec, NULL, NULL), QVN_ERROR_NULL);
    EXPECT(qvn_quantize(x, 4, 16, 16, &spec, NULL, &empty), QVN_ERROR_NULL);
    EXPECT(qvn_quantize(NULL, 0, 16, 16, &rows, NULL, &empty), QVN_OK);
    EXPECT(qvn_quantize(x, -1, 16, 16, &spec, NULL, &q), QVN_ERROR_SHAPE);
    EXPECT(qvn_quantize(x, 4, -16, 16, &spec, NULL, &q), QVN_ERROR_SHAPE);
    EXPECT(qvn_quantize(x, 4, 16, 15, &spec, NULL, &q), QVN_ERROR_SHAPE);
    EXPECT(qvn_quantize(x, huge, 16, 16, &spec, NULL, &q), QVN_ERROR_SHAPE);
    EXPECT(qvn_quantize(x, 4, huge, huge, &spec, NULL, &q), QVN_ERROR_SHAPE);
    EXPECT(qvn_quantize(x, 4, 16, huge, &spec, NULL, &q), QVN_ERROR_SHAPE);
    qvn_quantize_options options = {NULL, 0.5f, 0, 0, 0};
    EXPECT(qvn_quantize(x, 4, 16, 16, &spec, &options, &q), QVN_OK);
    EXPECT(qvn_quantize(x, 4, 16, 16, &rows, &options, &q), QVN_ERROR_FACTOR);
    qvn_spec mx = spec_of(&QVN_E4M3, 0, 0, QVN_SCALE_E8M0);
    EXPECT(qvn_quantize(x, 4, 16, 16, &mx, &options, &q), QVN_ERROR_FACTOR);
    EXPECT(qvn_dequantize(codes, scale, 4, 16, &spec, y), QVN_OK);
    EXPECT(qvn_dequantize(NULL, scale, 4, 16, &spec, y), QVN_ERROR_NULL);
    EXPECT(qvn_dequantize(codes, NULL, 4, 16, &spec, y), QVN_ERROR_NULL);
    EXPECT(qvn_dequantize(codes, scale, 4, 16, &spec, NULL), QVN_ERROR_NULL);
    EXPECT(qvn_dequantize(codes, scale, 4, 16, NULL, y), QVN_ERROR_NULL);
    EXPECT(qvn_dequantize(codes, scale, 4, -1, &spec, y), QVN_ERROR_SHAPE);
}

/* An error writes nothing. */
static void check_untouched(void) {
    qvn_spec rows = spec_of(&QVN_E4M3, 1, 0, QVN_SCALE_FP32);
    qvn_quantize_options options = {NULL, 0.5f, 0, 0, 0};
    memset(codes, 0xAB, sizeof codes);
    scale[0] = 5.0f;
    EXPECT(qvn_quantize(x, 4, 16, 16, &rows, &options, &q), QVN_ERROR_FACTOR);
    EXPECT(codes[0] == 0xAB && scale[0] == 5.0f, 1);
}

static void check_weights(void) {
    qvn_stored_weight w = {codes, scale, 1.0f, 1, 32, &QVN_E4M3, QVN_LAYOUT_MX};
    EXPECT(qvn_read_weight(&w, y), QVN_OK);
    EXPECT(qvn_read_weight(&w, NULL), QVN_ERROR_NULL);
    EXPECT(qvn_read_weight(NULL, y), QVN_ERROR_NULL);
    w.k = 33;
    EXPECT(qvn_read_weight(&w, y), QVN_ERROR_SHAPE);
    w.k = -32;
    EXPECT(qvn_read_weight(&w, y), QVN_ERROR_SHAPE);
    w.k = 9;
    w.layout = QVN_LAYOUT_NV_DIVIDED;
    EXPECT(qvn_read_weight(&w, y), QVN_ERROR_SHAPE);
    w.layout = QVN_LAYOUT_TENSOR;
    EXPECT(qvn_read_weight(&w, y), QVN_OK);
    int unknown = 6;
    memcpy(&w.layout, &unknown, sizeof unknown);
    EXPECT(qvn_read_weight(&w, y), QVN_ERROR_LAYOUT);
    w.layout = QVN_LAYOUT_TENSOR;
    w.codes = NULL;
    EXPECT(qvn_read_weight(&w, y), QVN_ERROR_NULL);
    w.codes = codes;
    w.format = NULL;
    EXPECT(qvn_read_weight(&w, y), QVN_ERROR_NULL);
}

static void check_values(void) {
    const float edge[] = {1.0f, -3.0f, 2.0f};
    const float subnormal[] = {qvn_float(0x007FFFFFu)}, nan[] = {qvn_float(QVN_INFINITY_BITS), qvn_float(0xFFC00001u)};
    EXPECT(qvn_tensor_id("123456789"), 0xCBF43926); /* the check value of CRC-32 */
    EXPECT(qvn_from_bf16(0xC040) == -3.0f, 1);
    EXPECT(qvn_amax(edge, 1, 3, 3) == 3.0f, 1);
    EXPECT(qvn_amax(edge, 2, 1, 2) == 2.0f, 1);
    EXPECT(qvn_bits(qvn_amax(subnormal, 1, 1, 1)), 0);
    EXPECT(qvn_bits(qvn_amax(nan, 1, 2, 2)), 0x7FC00001);
    EXPECT(qvn_amax(NULL, 0, 8, 8) == 0.0f, 1);
    for (int status = QVN_OK; status <= QVN_ERROR_ARITHMETIC; status++)
        EXPECT(strcmp(qvn_status_text((qvn_status)status), "unknown status") != 0, 1);
}

static void check_arithmetic(void) {
    EXPECT(qvn_check_arithmetic(), QVN_OK);
    const int directions[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    for (int i = 0; i < 3; i++) {
        fesetround(directions[i]);
        qvn_status status = quantize(spec_of(&QVN_E4M3, 0, 0, QVN_SCALE_FP32));
        fesetround(FE_TONEAREST);
        EXPECT(status, QVN_ERROR_ARITHMETIC);
    }
#if defined(__SSE__)
    const unsigned modes[] = {0x8000, 0x0040}; /* flush to zero, denormals are zero */
    for (int i = 0; i < 2; i++) {
        unsigned before = _mm_getcsr();
        _mm_setcsr(before | modes[i]);
        qvn_status status = quantize(spec_of(&QVN_E4M3, 0, 0, QVN_SCALE_FP32));
        _mm_setcsr(before);
        EXPECT(status, QVN_ERROR_ARITHMETIC);
    }
#endif
}

int main(void) {
    check_formats();
    check_specs();
    check_operands();
    check_untouched();
    check_weights();
    check_values();
    check_arithmetic();
    return failures != 0;
}

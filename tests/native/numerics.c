/* Reads records that tests.native.cases wrote, calls quaver_numerics.h and compares results with the record's.
 *
 * Every array is allocated with its exact size, so that AddressSanitizer finds an access beyond it. Compiles as C99 and
 * as C++17. Prints the number of comparisons, or the first difference. */
#include <stdio.h>
#include <stdlib.h>

#include "quaver_numerics.h"

enum { END, FORMAT, VALUES, ENCODE, STOCHASTIC, DECODE, FACTORS, BLOCKS, NOISE, OPERAND, PACK, SWIZZLE, WEIGHT, ROTATE };

static FILE *file;
static long record = 0;
static int64_t kind;
static long long compared[ROTATE + 1];

static void fail(const char *what, int64_t at, double got, double want) {
    printf("record %ld of kind %d: %s [%lld] is %.9g, expected %.9g\n", record, (int)kind, what, (long long)at, got, want);
    exit(1);
}

static void *array(int64_t count, size_t size) {
    size_t bytes = (size_t)count * size;
    void *memory = malloc(bytes);
    if ((bytes && !memory) || fread(memory ? memory : &bytes, 1, bytes, file) != bytes) {
        printf("record %ld: the file ends early\n", record);
        exit(2);
    }
    return memory;
}

static int64_t number(void) {
    int64_t value;
    if (fread(&value, sizeof value, 1, file) != 1) {
        printf("record %ld: the file ends early\n", record);
        exit(2);
    }
    return value;
}

static float real(void) {
    float value;
    void *memory = array(1, sizeof value);
    memcpy(&value, memory, sizeof value);
    free(memory);
    return value;
}

static void same(const char *what, int64_t at, float got, float want) {
    int both_nan = qvn_magnitude(got) > QVN_INFINITY_BITS && qvn_magnitude(want) > QVN_INFINITY_BITS;
    if (!both_nan && qvn_bits(got) != qvn_bits(want)) fail(what, at, (double)got, (double)want);
}

static void same_floats(const char *what, const float *got, const float *want, int64_t n) {
    for (int64_t i = 0; i < n; i++) same(what, i, got[i], want[i]);
}

static void same_bytes(const char *what, const uint8_t *got, const uint8_t *want, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (got[i] != want[i]) fail(what, i, got[i], want[i]);
}

static qvn_format format;
static float *values = NULL;
static int64_t count = 0;

/* In the order of quaver.FORMATS. */
static const qvn_format *const builtin[] = {&QVN_E4M3, &QVN_E5M2, &QVN_E3M2, &QVN_E2M3, &QVN_E2M1, &QVN_E8M0};

static void check_format(void) {
    int64_t index = number();
    format.bits = (int)number();
    format.exponent_bits = (int)number();
    format.mantissa_bits = (int)number();
    format.bias = (int)number();
    format.has_nan = (int)number();
    format.has_sign = (int)number();
    format.max = real();
    if (index >= 0) {
        const qvn_format *f = builtin[index];
        if (f->bits != format.bits || f->exponent_bits != format.exponent_bits || f->bias != format.bias ||
            f->mantissa_bits != format.mantissa_bits || f->has_nan != format.has_nan || f->has_sign != format.has_sign)
            fail("a field of the built-in format", index, 0, 0);
        same("max of the built-in format", index, f->max, format.max);
    }
    int64_t valid = number();
    if ((qvn_check_format(&format) == QVN_OK) != valid) fail("qvn_check_format", 0, (double)!valid, (double)valid);
}

static void check_encode(void) {
    uint8_t *want = (uint8_t *)array(count, 1);
    for (int64_t i = 0; i < count; i++) {
        uint8_t got = qvn_encode(values[i], &format);
        if (got != want[i]) {
            printf("value %.9g (0x%08x): ", (double)values[i], (unsigned)qvn_bits(values[i]));
            fail("qvn_encode", i, got, want[i]);
        }
    }
    free(want);
}

static void check_stochastic(void) {
    uint16_t *random = (uint16_t *)array(count, 2);
    uint8_t *want = (uint8_t *)array(count, 1);
    for (int64_t i = 0; i < count; i++) {
        uint8_t got = qvn_encode_stochastic(values[i], &format, random[i]);
        if (got != want[i]) {
            printf("value %.9g (0x%08x), random %u: ", (double)values[i], (unsigned)qvn_bits(values[i]), random[i]);
            fail("qvn_encode_stochastic", i, got, want[i]);
        }
    }
    free(random);
    free(want);
}

static void check_decode(void) {
    float *want = (float *)array(256, 4);
    for (int code = 0; code < 256; code++) same("qvn_decode", code, qvn_decode((uint8_t)code, &format), want[code]);
    free(want);
}

static void check_factors(void) {
    int64_t n = number();
    float *amax = (float *)array(n, 4), *want[4];
    for (int i = 0; i < 4; i++) want[i] = (float *)array(n, 4);
    for (int64_t i = 0; i < n; i++) {
        same("qvn_encode_factor, power of two", i, qvn_encode_factor(amax[i], &format, 1), want[0][i]);
        same("qvn_encode_factor", i, qvn_encode_factor(amax[i], &format, 0), want[1][i]);
        same("qvn_tensor_factor, power of two", i, qvn_tensor_factor(amax[i], 1), want[2][i]);
        same("qvn_tensor_factor", i, qvn_tensor_factor(amax[i], 0), want[3][i]);
    }
    compared[kind] += 4 * n - 1;
    for (int i = 0; i < 4; i++) free(want[i]);
    free(amax);
}

static void check_blocks(void) {
    int64_t n = number();
    float *amax = (float *)array(n, 4), *tensor_factor = (float *)array(n, 4);
    uint8_t *code = (uint8_t *)array(n, 1);
    float *factor = (float *)array(n, 4);
    for (int64_t i = 0; i < n; i++) {
        uint8_t got = qvn_block_scale(amax[i], tensor_factor[i]);
        if (got != code[i]) fail("qvn_block_scale", i, got, code[i]);
        same("qvn_block_factor", i, qvn_block_factor(got, tensor_factor[i]), factor[i]);
    }
    compared[kind] += n - 1;
    free(amax);
    free(tensor_factor);
    free(code);
    free(factor);
}

static void check_noise(void) {
    uint64_t seed = (uint64_t)number();
    uint32_t tensor_id = (uint32_t)number();
    uint64_t step = (uint64_t)number();
    int64_t n = number();
    uint64_t *element = (uint64_t *)array(n, 8);
    float *want = (float *)array(n, 4);
    qvn_noise noise = qvn_noise_stream(seed, tensor_id, step);
    for (int64_t i = 0; i < n; i++) same("qvn_uniform", i, qvn_uniform(qvn_random_bits(noise, element[i])), want[i]);
    compared[kind] += n - 1;
    free(element);
    free(want);
}

static void check_operand(void) {
    int64_t rows = number(), k = number(), stride = number();
    qvn_spec spec = {&format, 0, 0, QVN_SCALE_POWER_OF_TWO, QVN_NEAREST, 0};
    spec.block_rows = number();
    spec.block_k = number();
    spec.scale = (qvn_scale_kind)number();
    spec.rounding = (qvn_rounding)number();
    spec.hadamard = (int)number();
    qvn_quantize_options options = {NULL, 0.0f, 0, 0, 0};
    int64_t amaxes = number();
    options.seed = (uint64_t)number();
    options.tensor_id = (uint32_t)number();
    options.count = (uint64_t)number();
    options.factor = real();
    float *amax = (float *)array(amaxes, 4);
    if (amaxes) options.amax = amax;
    int64_t columns = qvn_padded_k(&spec, k), n = rows * columns;
    int64_t blocks = qvn_scale_rows(&spec, rows) * qvn_scale_columns(&spec, k);
    int has_stored = spec.scale == QVN_SCALE_E8M0 || qvn__two_level(&spec);
    /* The last row ends with its last element, not with its stride. */
    float *x = (float *)array(rows ? (rows - 1) * stride + k : 0, 4);
    uint8_t *codes = (uint8_t *)array(n, 1);
    float *scale = (float *)array(blocks, 4);
    uint8_t *stored = (uint8_t *)array(has_stored ? blocks : 0, 1);
    float tensor_factor = real();
    float *dequantized = (float *)array(n, 4);
    qvn_quantized q = {(uint8_t *)malloc((size_t)n), (float *)malloc((size_t)blocks * 4), NULL, 0.0f};
    if (has_stored) q.stored_scale = (uint8_t *)malloc((size_t)blocks);
    float *y = (float *)malloc((size_t)n * 4);
    int defaults = !options.amax && options.factor == 0.0f && !options.seed && !options.tensor_id && !options.count;
    qvn_status status = qvn_quantize(x, rows, k, stride, &spec, defaults ? NULL : &options, &q);
    if (status) fail(qvn_status_text(status), 0, status, 0);
    same_floats("scale", q.scale, scale, blocks);
    same_bytes("codes", q.codes, codes, n);
    if (has_stored) same_bytes("stored_scale", q.stored_scale, stored, blocks);
    same("tensor_factor", 0, q.tensor_factor, tensor_factor);
    status = qvn_dequantize(q.codes, q.scale, rows, k, &spec, y);
    if (status) fail(qvn_status_text(status), 0, status, 0);
    same_floats("qvn_dequantize", y, dequantized, n);
    free(amax);
    free(x);
    free(codes);
    free(scale);
    free(stored);
    free(dequantized);
    free(q.codes);
    free(q.scale);
    free(q.stored_scale);
    free(y);
}

static void check_pack(void) {
    int bits = (int)number();
    int64_t k = number(), size = qvn_packed_size(k, bits);
    uint8_t *codes = (uint8_t *)array(k, 1), *packed = (uint8_t *)array(size, 1);
    uint8_t *row = (uint8_t *)malloc((size_t)size), *back = (uint8_t *)malloc((size_t)k);
    memset(row, 0xFF, (size_t)size);
    qvn_pack(codes, k, bits, row);
    same_bytes("qvn_pack", row, packed, size);
    qvn_unpack(packed, k, bits, back);
    for (int64_t j = 0; j < k; j++) codes[j] = (uint8_t)(codes[j] & ((1u << bits) - 1));
    same_bytes("qvn_unpack", back, codes, k);
    free(codes);
    free(packed);
    free(row);
    free(back);
}

static void check_swizzle(void) {
    int64_t rows = number(), blocks = number(), size = qvn_swizzled_size(rows, blocks);
    uint8_t *scale = (uint8_t *)array(rows * blocks, 1);
    int64_t want_size = number();
    if (size != want_size) fail("qvn_swizzled_size", 0, (double)size, (double)want_size);
    uint8_t *want = (uint8_t *)array(size, 1);
    uint8_t *swizzled = (uint8_t *)malloc((size_t)size);
    memset(swizzled, 0xFF, (size_t)size);
    qvn_swizzle(scale, rows, blocks, swizzled);
    same_bytes("qvn_swizzle", swizzled, want, size);
    free(scale);
    free(want);
    free(swizzled);
}

static void check_weight(void) {
    qvn_stored_weight w = {NULL, NULL, 0.0f, 0, 0, &format, QVN_LAYOUT_TENSOR};
    w.layout = (qvn_layout)number();
    w.n = number();
    w.k = number();
    w.tensor_scale = real();
    int64_t code_bytes = number();
    if (code_bytes != w.n * qvn_packed_size(w.k, format.bits)) fail("bytes of codes", 0, 0, (double)code_bytes);
    uint8_t *codes = (uint8_t *)array(code_bytes, 1);
    int64_t scale_bytes = number();
    uint8_t *scale = (uint8_t *)array(scale_bytes, 1);
    float *want = (float *)array(w.n * w.k, 4), *y = (float *)malloc((size_t)(w.n * w.k) * 4);
    uint8_t *unaligned = (uint8_t *)malloc((size_t)scale_bytes + 1);
    memcpy(unaligned + 1, scale, (size_t)scale_bytes);
    w.codes = codes;
    w.scale = unaligned + 1;
    qvn_status status = qvn_read_weight(&w, y);
    if (status) fail(qvn_status_text(status), 0, status, 0);
    same_floats("qvn_read_weight", y, want, w.n * w.k);
    free(codes);
    free(scale);
    free(unaligned);
    free(want);
    free(y);
}

static void check_rotate(void) {
    float *group = (float *)array(16, 4), *want = (float *)array(16, 4);
    qvn_rotate(group);
    same_floats("qvn_rotate", group, want, 16);
    free(group);
    free(want);
}

int main(int argc, char **argv) {
    file = argc > 1 ? fopen(argv[1], "rb") : NULL;
    if (!file || qvn_check_arithmetic() != QVN_OK) {
        printf("no file, or this process does not compute in IEEE arithmetic\n");
        return 2;
    }
    while ((kind = number()) != END) {
        compared[kind] += 1;
        switch (kind) {
        case FORMAT: check_format(); break;
        case VALUES: free(values), count = number(), values = (float *)array(count, 4); break;
        case ENCODE: compared[kind] += count - 1, check_encode(); break;
        case STOCHASTIC: compared[kind] += count - 1, check_stochastic(); break;
        case DECODE: compared[kind] += 255, check_decode(); break;
        case FACTORS: check_factors(); break;
        case BLOCKS: check_blocks(); break;
        case NOISE: check_noise(); break;
        case OPERAND: check_operand(); break;
        case PACK: check_pack(); break;
        case SWIZZLE: check_swizzle(); break;
        case WEIGHT: check_weight(); break;
        case ROTATE: check_rotate(); break;
        default: fail("unknown kind", 0, 0, 0);
        }
        record++;
    }
    free(values);
    fclose(file);
    printf("formats %lld encodes %lld stochastic %lld decodes %lld factors %lld blocks %lld noise %lld operands %lld "
           "rows %lld swizzles %lld weights %lld rotations %lld\n",
           compared[FORMAT], compared[ENCODE], compared[STOCHASTIC], compared[DECODE], compared[FACTORS],
           compared[BLOCKS], compared[NOISE], compared[OPERAND], compared[PACK], compared[SWIZZLE], compared[WEIGHT],
           compared[ROTATE]);
    return 0;
}

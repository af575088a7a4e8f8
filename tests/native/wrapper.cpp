// quaver.hpp returns what quaver_numerics.h computes, and throws where that returns a status.
#include <cstdio>

#include "quaver.hpp"

namespace qn = quaver::numerics;

static int failures = 0;

static void expect(bool holds, int line) {
    if (holds) return;
    std::printf("line %d does not hold\n", line);
    failures++;
}

#define EXPECT(condition) expect(condition, __LINE__)

template <class Call> static qvn_status status_of(Call call) {
    try {
        call();
    } catch (const qn::Error &error) {
        EXPECT(std::string(error.what()).find(qvn_status_text(error.status())) != std::string::npos);
        return error.status();
    }
    return QVN_OK;
}

static void check_operand(const qvn_spec &spec) {
    const std::int64_t rows = 20, k = 37, stride = 40;
    std::vector<float> x(static_cast<std::size_t>(rows * stride));
    for (std::size_t i = 0; i < x.size(); i++) x[i] = static_cast<float>((i * 7919) % 1009) - 504.0f;
    qvn_quantize_options options{};
    options.seed = 5;
    qn::Quantized made(x.data(), rows, k, stride, spec, options);
    qn::Quantized copy = made;
    const qn::Quantized q = std::move(copy);
    std::int64_t columns = qvn_padded_k(&spec, k);
    std::size_t blocks = static_cast<std::size_t>(qvn_scale_rows(&spec, rows) * qvn_scale_columns(&spec, k));
    std::vector<std::uint8_t> codes(static_cast<std::size_t>(rows * columns)), stored(blocks);
    std::vector<float> scale(blocks), y(codes.size());
    qvn_quantized plain = {codes.data(), scale.data(), stored.data(), 0.0f};
    EXPECT(qvn_quantize(x.data(), rows, k, stride, &spec, &options, &plain) == QVN_OK);
    EXPECT(qvn_dequantize(codes.data(), scale.data(), rows, k, &spec, y.data()) == QVN_OK);
    EXPECT(q.rows() == rows && q.columns() == columns && q.codes() == codes && q.scale() == scale);
    EXPECT(q.stored_scale().empty() || q.stored_scale() == stored);
    EXPECT(q.stored_scale().empty() == (spec.scale == QVN_SCALE_POWER_OF_TWO));
    EXPECT(q.tensor_factor() == plain.tensor_factor && q.dequantize() == y);
    EXPECT(q.spec().format != spec.format && q.spec().format->max == spec.format->max);
    std::vector<std::uint8_t> packed = q.packed();
    std::int64_t width = qvn_packed_size(columns, spec.format->bits);
    EXPECT(packed.size() == static_cast<std::size_t>(rows * width));
    EXPECT(qvn_code_at(packed.data() + 3 * width, 5, spec.format->bits) == q.codes()[static_cast<std::size_t>(3 * columns + 5)]);
}

int main() {
    check_operand({&QVN_E4M3, 0, 0, QVN_SCALE_POWER_OF_TWO, QVN_NEAREST, 0});
    check_operand({&QVN_E2M3, 1, 32, QVN_SCALE_E8M0, QVN_NEAREST, 0});
    check_operand({&QVN_E2M1, 1, 16, QVN_SCALE_TWO_LEVEL, QVN_STOCHASTIC, 1});
    std::vector<float> x(6, 1.5f), none;
    qvn_spec spec{&QVN_E4M3, 0, 0, QVN_SCALE_POWER_OF_TWO, QVN_NEAREST, 0}, bad = spec;
    bad.block_k = -1;
    EXPECT(qn::Quantized(x, 2, 3, spec).dequantize() == x);
    EXPECT(qn::Quantized(none, 0, 3, spec).dequantize().empty());
    EXPECT(status_of([&] { qn::Quantized(x, 2, 3, bad); }) == QVN_ERROR_SPEC);
    EXPECT(status_of([&] { qn::Quantized(x, 2, 4, spec); }) == QVN_ERROR_SHAPE);
    EXPECT(status_of([&] { qn::Quantized(x, -1, 3, spec); }) == QVN_ERROR_SHAPE);
    EXPECT(status_of([&] { qn::Quantized(x, INT64_MAX, INT64_MAX, spec); }) == QVN_ERROR_SHAPE);
    EXPECT(status_of([&] { qn::Quantized(nullptr, 2, 3, 3, spec); }) == QVN_ERROR_NULL);
    EXPECT(qn::decode(qn::encode(x, QVN_E2M1), QVN_E2M1) == x);
    EXPECT(status_of([&] { qn::encode(x, qvn_format{}); }) == QVN_ERROR_FORMAT);
    EXPECT(qn::swizzle({7, 8}, 1, 2)[1] == 8 && qn::swizzle({7, 8}, 1, 2).size() == 512);
    EXPECT(qn::swizzle({}, 0, 2).empty());
    EXPECT(status_of([&] { qn::swizzle({7, 8}, 1, 3); }) == QVN_ERROR_SHAPE);
    std::uint8_t codes[2] = {0x38, 0xB8};
    float scale = 2.0f;
    qvn_stored_weight weight{codes, &scale, 0.0f, 1, 2, &QVN_E4M3, QVN_LAYOUT_TENSOR};
    EXPECT((qn::read_weight(weight) == std::vector<float>{2.0f, -2.0f}));
    weight.k = -2;
    EXPECT(status_of([&] { qn::read_weight(weight); }) == QVN_ERROR_SHAPE);
    return failures != 0;
}

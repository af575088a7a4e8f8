// quaver.hpp: Quaver in C++17: containers and exceptions over the C headers. Include it; there is nothing to link.
#ifndef QUAVER_HPP
#define QUAVER_HPP

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "quaver_numerics.h"

// ---- numerics: quaver_numerics.h ----------------------------------------------------------------------------------

namespace quaver::numerics {

/// A call that the specification does not define; what() says why.
class Error : public std::invalid_argument {
  public:
    explicit Error(qvn_status status)
        : std::invalid_argument(std::string("quaver: ") + qvn_status_text(status)), status_(status) {}
    qvn_status status() const noexcept { return status_; }

  private:
    qvn_status status_;
};

inline void check(qvn_status status) {
    if (status != QVN_OK) throw Error(status);
}

/// Codes of values, to nearest.
inline std::vector<std::uint8_t> encode(const std::vector<float> &values, const qvn_format &format) {
    check(qvn_check_format(&format));
    std::vector<std::uint8_t> codes;
    codes.reserve(values.size());
    for (float value : values) codes.push_back(qvn_encode(value, &format));
    return codes;
}

/// Values of codes, without scales.
inline std::vector<float> decode(const std::vector<std::uint8_t> &codes, const qvn_format &format) {
    check(qvn_check_format(&format));
    std::vector<float> values;
    values.reserve(codes.size());
    for (std::uint8_t code : codes) values.push_back(qvn_decode(code, &format));
    return values;
}

/// A quantized operand [rows, k]: original = data * scale.
class Quantized {
  public:
    /// Quantize x [rows, k], rows `stride` elements apart. Throws Error.
    Quantized(const float *x, std::int64_t rows, std::int64_t k, std::int64_t stride, const qvn_spec &spec,
              const qvn_quantize_options &options = {})
        : rows_(rows), k_(k), spec_(spec) {
        check(qvn_check_spec(&spec));
        check(qvn__check_shape(rows, k, stride));
        format_ = *spec.format;
        std::size_t blocks = size(qvn_scale_rows(&spec, rows), qvn_scale_columns(&spec, k));
        codes_.resize(size(rows, qvn_padded_k(&spec, k)));
        scale_.resize(blocks);
        stored_scale_.resize(qvn__two_level(&spec) || spec.scale == QVN_SCALE_E8M0 ? blocks : 0);
        qvn_quantized q = {codes_.data(), scale_.data(), stored_scale_.data(), 1.0f};
        check(qvn_quantize(x, rows, k, stride, &spec, &options, &q));
        tensor_factor_ = q.tensor_factor;
    }
    /// Quantize a dense x [rows, k].
    Quantized(const std::vector<float> &x, std::int64_t rows, std::int64_t k, const qvn_spec &spec,
              const qvn_quantize_options &options = {})
        : Quantized(checked(x, rows, k), rows, k, k, spec, options) {}

    std::int64_t rows() const noexcept { return rows_; }
    /// Number of stored columns, including the padding of a Hadamard rotation.
    std::int64_t columns() const noexcept { return qvn_padded_k(&spec_, k_); }
    /// Its format pointer leads into this object.
    qvn_spec spec() const noexcept {
        qvn_spec copy = spec_;
        copy.format = &format_;
        return copy;
    }
    /// [rows, columns], one code per byte.
    const std::vector<std::uint8_t> &codes() const noexcept { return codes_; }
    /// Decode scales of the blocks, with both levels multiplied.
    const std::vector<float> &scale() const noexcept { return scale_; }
    /// E8M0 codes, or E4M3 codes of two-level scales; empty with float32 scales.
    const std::vector<std::uint8_t> &stored_scale() const noexcept { return stored_scale_; }
    /// Two-level scales: block scales are divided by it.
    float tensor_factor() const noexcept { return tensor_factor_; }

    /// data * scale [rows, columns].
    std::vector<float> dequantize() const {
        std::vector<float> y(codes_.size());
        qvn_spec of = spec();
        check(qvn_dequantize(codes_.data(), scale_.data(), rows_, k_, &of, y.data()));
        return y;
    }
    /// Rows of codes as files and kernels store them: format.bits per code.
    std::vector<std::uint8_t> packed() const {
        std::int64_t width = qvn_packed_size(columns(), format_.bits);
        std::vector<std::uint8_t> bytes(size(rows_, width));
        for (std::int64_t i = 0; i < rows_; i++)
            qvn_pack(codes_.data() + i * columns(), columns(), format_.bits, bytes.data() + i * width);
        return bytes;
    }

  private:
    static std::size_t size(std::int64_t rows, std::int64_t columns) {
        return static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns);
    }
    static const float *checked(const std::vector<float> &x, std::int64_t rows, std::int64_t k) {
        if (rows < 0 || k < 0 || (k && rows > INT64_MAX / k) || x.size() != size(rows, k)) throw Error(QVN_ERROR_SHAPE);
        return x.data();
    }

    std::int64_t rows_, k_;
    qvn_spec spec_;
    qvn_format format_{};
    std::vector<std::uint8_t> codes_;
    std::vector<float> scale_;
    std::vector<std::uint8_t> stored_scale_;
    float tensor_factor_ = 1.0f;
};

/// Scales [rows, blocks] in the order of Blackwell's GEMMs.
inline std::vector<std::uint8_t> swizzle(const std::vector<std::uint8_t> &scale, std::int64_t rows, std::int64_t blocks) {
    if (rows < 0 || blocks < 0 || (blocks && rows > INT64_MAX / blocks) ||
        scale.size() != static_cast<std::size_t>(rows * blocks))
        throw Error(QVN_ERROR_SHAPE);
    std::vector<std::uint8_t> swizzled(static_cast<std::size_t>(qvn_swizzled_size(rows, blocks)));
    qvn_swizzle(scale.data(), rows, blocks, swizzled.data());
    return swizzled;
}

/// The dequantized weight [n, k] of an exported checkpoint.
inline std::vector<float> read_weight(const qvn_stored_weight &weight) {
    check(qvn_check_weight(&weight));
    std::vector<float> y(static_cast<std::size_t>(weight.n * weight.k));
    check(qvn_read_weight(&weight, y.data()));
    return y;
}

} // namespace quaver::numerics

#endif

// The inner loops of quantisation, as each instruction set provides them (quantize.inl). See quantize.h for what they are for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace drivetrain {

// The numbers are part of the interface with Python (quantize_native.py).
enum class Format : std::uint8_t { int8 = 0, int4 = 1, e4m3 = 2, e5m2 = 3, e3m2 = 4 };

struct EncodeCall {
    Format format;
    bool symmetric, stochastic;
    float inverse;  // 1 / scale, or 0 for a block that is zero
    float zero;
    std::uint32_t key0, key1;  // of the block
    std::uint32_t start;       // place in the block of the first element
};

struct DecodeCall {
    Format format;
    bool symmetric, add;  // add: to what is there
    float scale, zero;
};

// Any number of elements, one code per byte. No element may be NaN or infinite in `encode`.
struct QuantKernels {
    std::uint32_t (*largest)(const float* x, std::size_t count);  // bits of the largest magnitude; above infinity's when there is a NaN
    // Smallest and largest as integers in the order of the numbers (see `ordered` in quantize.inl).
    void (*extremes)(const float* x, std::size_t count, std::int32_t* low, std::int32_t* high);
    void (*encode)(const EncodeCall& call, const float* x, std::uint8_t* codes, std::size_t count);
    void (*decode)(const DecodeCall& call, const std::uint8_t* codes, float* to, std::size_t count);
    // `lanes`: kGroup sums of |x|, or of x squared.
    void (*magnitudes)(const float* x, std::size_t count, bool squared, double* lanes);
    void (*pack_signs)(const float* x, std::uint8_t* bits, std::size_t count);
    void (*unpack_signs)(const std::uint8_t* bits, float scale, float* to, std::size_t count);
    void (*scale)(float* x, float factor, std::size_t count);
};

}  // namespace drivetrain

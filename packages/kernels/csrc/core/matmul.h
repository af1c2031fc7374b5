// Products of activations with a quantised weight, y = x W^T + bias, for inference.
//
// Problem: with few tokens such a product is as fast as the weight is read, so the weight must be read once, in its few bits per element, and
// unpacking it must cost less than reading it; with many tokens unpacking must be spread over them.
// Idea: matmul_kernels.h: rows are the lanes of vectors. A weight may be kept in that order ("panels", made once by `prepare_weight`); one
// in the order of quantize.h is brought into it piece by piece in cache, with the same result.
// Invariants: a token's result depends on neither the number of threads nor on whether the weight was prepared. int8 activations with int8 and
// int4 codes give the same bits on all instruction sets; native ones of 16 bits do too, with any codes, but for bfloat16 where there are
// instructions for it (matmul_avx512_bf16.cpp, matmul_amx.cpp). No result depends on the other tokens, but for the latter ones on whether
// they are many.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantize.h"

namespace drivetrain {

// [out, in], in % block_size == 0. Panels hold rows in sixteens (the last filled up with zeros): values [panels][words of a row][kPanel]
// of 32 bits, scales and zeros [panels][blocks of a row][kPanel]. Of integers four panels (fewer at the end) lie interleaved, as they are read
// together and memory is fastest read in one stream: [fours][words of a row][4][kPanel], and so the blocks.
struct QuantizedWeight {
    QuantRule rule;
    std::size_t out, in;
    const void* values;
    const float* scales;
    const float* zeros;  // null when symmetric
    bool panels;
};

enum class Activations : std::uint8_t {
    native = 0,  // as they are, products summed in float32
    int8 = 1,    // quantised first, each block of a token as `quantize` does with int8 and the weight's block size
};

// The number of rows in all panels of a weight of `out` rows.
std::size_t panel_rows(std::size_t out);

// Writes the panels of `weight`, which has none: panel_rows(out) rows.
void prepare_weight(const QuantizedWeight& weight, void* values, float* scales, float* zeros, int threads);

// x: [tokens, in]; bias: [out] or null data; y: [tokens, out].
void quantized_matmul(const DenseArray& x, std::size_t tokens, const QuantizedWeight& weight, const DenseArray& bias, const DenseArray& y,
                      Activations activations, int threads);

}  // namespace drivetrain

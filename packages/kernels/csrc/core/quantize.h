// Block quantisation of one flat array, its inverse, the reduction of several quantised arrays, and sign compression.
//
// The array is cut into blocks of `block_size` elements (a multiple of kGroup; the last block may be shorter). Each has a float32 scale
// and, when asymmetric, a float32 zero. Codes are packed in element order, low bits first: int4 two per byte, e3m2 four in three bytes.
// The arithmetic and the random numbers are those of quantize_reference.py, bit for bit, whatever the instruction set and the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dtype.h"
#include "quantize_kernels.h"

namespace drivetrain {

struct QuantRule {
    Format format;
    bool symmetric;
    std::size_t block_size;
};

// Random rounding: numbers depend on the seed, the block's index (first_block is that of the array's first) and the place in the block.
struct Rounding {
    bool stochastic;
    std::uint64_t seed, first_block;
};

struct QuantArray {
    QuantRule rule;
    std::uint8_t* values;
    float* scales;
    float* zeros;  // null when symmetric
};

struct DenseArray {
    void* data;
    Dtype dtype;
};

void quantize(const DenseArray& source, std::size_t count, const QuantArray& target, const Rounding& rounding, int threads);

// target = factor * (sum of sources, in their order).
void dequantize_reduce(const std::vector<QuantArray>& sources, float factor, std::size_t count, const DenseArray& target, int threads);

// The same, quantised again.
void reduce_quantized(const std::vector<QuantArray>& sources, float factor, std::size_t count, const QuantArray& target,
                      const Rounding& rounding, int threads);

// One bit per element (1 where it is not negative) and one scale per block: the mean of |x|, or its root mean square.
struct SignArray {
    std::size_t block_size;
    bool root_mean_square;
    std::uint8_t* bits;
    float* scales;
};

void pack_signs(const DenseArray& source, std::size_t count, const SignArray& target, int threads);
void unpack_signs(const SignArray& source, std::size_t count, const DenseArray& target, int threads);

}  // namespace drivetrain

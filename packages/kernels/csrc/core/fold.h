// The reduction of several arrays to one: a left fold in their order, (x0 + x1) + x2 ..., so that it depends on nothing else.
//
// 16-bit floats are folded in float32, and rounded once; a mean divides once, at the end; integers wrap around; a maximum or minimum
// with NaN is NaN.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fold_kernels.h"

namespace drivetrain {

// Element types that can be folded; the first three as in dtype.h. The numbers are part of the interface with Python
// (shared_memory.py). Truth values are folded as u8, by max or min.
enum class FoldType : std::uint8_t { f32 = 0, bf16 = 1, f16 = 2, f64 = 3, i8 = 4, u8 = 5, i16 = 6, i32 = 7, i64 = 8 };
constexpr int kFoldTypes = 9;

std::size_t size_of(FoldType type);

// `parts`: arrays of `count` elements, at least one; `out` may be one of them, but not overlap one otherwise.
void fold(FoldType type, FoldOp op, const void* const* parts, std::size_t count_of_parts, std::size_t count, void* out);

}  // namespace drivetrain

// The inner loops of folding, as each instruction set provides them (fold.inl). See fold.h for what they are for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace drivetrain {

// The numbers are part of the interface with Python (shared_memory.py).
enum class FoldOp : std::uint8_t { sum = 0, mean = 1, max = 2, min = 3 };

// Any number of elements and at least one part; `out` may be one of the parts. 16-bit floats are folded in float32 and rounded once.
struct FoldKernels {
    void (*f32)(FoldOp op, const void* const* parts, std::size_t count_of_parts, std::size_t count, void* out);
    void (*bf16)(FoldOp op, const void* const* parts, std::size_t count_of_parts, std::size_t count, void* out);
    void (*f16)(FoldOp op, const void* const* parts, std::size_t count_of_parts, std::size_t count, void* out);
};

}  // namespace drivetrain

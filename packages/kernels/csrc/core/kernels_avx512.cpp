// AVX-512 F, BW, VL, DQ: x86-64-v4, 16 lanes. Compiled with those flags and nothing more.

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#include "convert.h"
#include "vector_avx512.h"

namespace drivetrain {
namespace {

using V = Avx512;

}  // namespace
}  // namespace drivetrain

#include "kernels.inl"

namespace drivetrain {

const KernelTable* avx512_kernels() {
    static constexpr KernelTable table = make_table("avx512");
    return &table;
}

}  // namespace drivetrain

#else

namespace drivetrain {

const KernelTable* avx512_kernels() { return nullptr; }

}  // namespace drivetrain

#endif

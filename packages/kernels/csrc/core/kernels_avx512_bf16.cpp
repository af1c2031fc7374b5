// AVX-512 with the BF16 extension, which rounds float32 to bfloat16 in one instruction.

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512BF16__)

#include "convert.h"
#include "vector_avx512.h"

namespace drivetrain {
namespace {

struct V : Avx512 {
    // The instruction takes subnormal inputs for zero; the general form takes over where there are any, so that all instruction sets
    // write the same bits.
    static void bf16_store(std::uint16_t* to, Reg a) {
        constexpr int kSubnormal = 0x20;
        if (__builtin_expect(_mm512_fpclass_ps_mask(a, kSubnormal) != 0, 0)) {
            Avx512::bf16_store(to, a);
            return;
        }
        const __m256bh half = _mm512_cvtneps_pbh(a);
        __builtin_memcpy(to, &half, sizeof half);
    }
};

}  // namespace
}  // namespace drivetrain

#include "kernels.inl"

namespace drivetrain {

const KernelTable* avx512_bf16_kernels() {
    static constexpr KernelTable table = make_table("avx512_bf16");
    return &table;
}

}  // namespace drivetrain

#else

namespace drivetrain {

const KernelTable* avx512_bf16_kernels() { return nullptr; }

}  // namespace drivetrain

#endif

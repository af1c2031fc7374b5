// The instruction set that every CPU of the architecture has: one element at a time, which compilers vectorise where the
// architecture has fused multiply-add in its baseline (AArch64: NEON) and which calls the C library's fma where it has not.

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "convert.h"
#include "kernel_table.h"

namespace drivetrain {
namespace {

struct V {
    static constexpr int width = 1;
    using Reg = float;

    static Reg load(const float* from) { return *from; }
    static void store(float* to, Reg a) { *to = a; }
    static Reg set(float a) { return a; }
    static Reg add(Reg a, Reg b) { return a + b; }
    static Reg mul(Reg a, Reg b) { return a * b; }
    static Reg div(Reg a, Reg b) { return a / b; }
    static Reg sqrt(Reg a) { return std::sqrt(a); }
    static Reg fma(Reg a, Reg b, Reg c) { return std::fma(a, b, c); }
    static Reg larger(Reg a, Reg b) { return a > b || a != a ? a : b; }
    static Reg maximum(Reg a, Reg b) { return a > b || a != a ? a : b; }
    static Reg minimum(Reg a, Reg b) { return a < b || a != a ? a : b; }
    static Reg clamp_below(Reg a) { return a > 0.0f || a != a ? a : 0.0f; }
    static Reg sign(Reg a) { return static_cast<float>(a > 0.0f) - static_cast<float>(a < 0.0f); }

    static Reg bf16_load(const std::uint16_t* from) { return one_bf16_to_f32(*from); }
    static void bf16_store(std::uint16_t* to, Reg a) { *to = one_f32_to_bf16(a); }
    static Reg f16_load(const std::uint16_t* from) { return one_f16_to_f32(*from); }
    static void f16_store(std::uint16_t* to, Reg a) { *to = one_f32_to_f16(a); }

    struct Lanes {
        double sums[kGroup];
        explicit Lanes(const double* from) {
            for (std::size_t k = 0; k < kGroup; ++k) sums[k] = from[k];
        }
        // The square of a float32 is exact in double precision, so this rounds once, as a fused multiply-add does.
        void square(int k, Reg a) { sums[k] += static_cast<double>(a) * static_cast<double>(a); }
        void store(double* to) const {
            for (std::size_t k = 0; k < kGroup; ++k) to[k] = sums[k];
        }
    };
};

}  // namespace
}  // namespace drivetrain

#include "kernels.inl"

namespace drivetrain {

const KernelTable* baseline_kernels() {
#if defined(__aarch64__) || defined(_M_ARM64)
    static constexpr KernelTable table = make_table("neon");
#else
    static constexpr KernelTable table = make_table("baseline");
#endif
    return &table;
}

}  // namespace drivetrain

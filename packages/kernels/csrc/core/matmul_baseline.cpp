// Four lanes in the vectors that GCC and Clang offer on every architecture (SSE2, NEON), with a multiplication and an addition for each
// product. int8 activations are multiplied as float32, which is exact.

#include <cstddef>
#include <cstdint>

#include "convert.h"
#include "matmul_kernels.h"

namespace drivetrain {
namespace {

struct V {
    static constexpr int lanes = 4, tokens = 2;
    using Reg = float __attribute__((vector_size(16)));
    using Words = std::int32_t __attribute__((vector_size(16)));
    using Unsigned = std::uint32_t __attribute__((vector_size(16)));

    static Reg load(const float* from) {
        Reg a;
        __builtin_memcpy(&a, from, sizeof a);
        return a;
    }
    static void store(float* to, Reg a) { __builtin_memcpy(to, &a, sizeof a); }
    static Reg set(float a) { return Reg{a, a, a, a}; }
    static Reg add(Reg a, Reg b) { return a + b; }
    static Reg mul(Reg a, Reg b) { return a * b; }
    static Reg fma(Reg a, Reg b, Reg c) { return a * b + c; }

    static Words load_words(const std::uint32_t* from) {
        Words a;
        __builtin_memcpy(&a, from, sizeof a);
        return a;
    }
    template <Codes kCodes, int kPlace>
    static Reg code(Words a) {
        if constexpr (kCodes == Codes::f32) {
            return (Reg)a;
        } else {
            constexpr int kBits = kCodes == Codes::int8 || kCodes == Codes::uint8 ? 8 : 4;
            constexpr std::int32_t kFlip = kCodes == Codes::uint8 ? INT32_C(-0x7f7f7f80) : kCodes == Codes::uint4 ? INT32_C(-0x77777778) : 0;
            const Words own = (Words)((Unsigned)(a ^ kFlip) << (32 - kBits * (kPlace + 1))) >> (32 - kBits);
            return __builtin_convertvector(own, Reg);
        }
    }

    static std::size_t transpose(const unsigned char*, std::size_t, std::size_t, std::uint32_t*) { return 0; }
};

}  // namespace
}  // namespace drivetrain

#include "matmul.inl"

namespace drivetrain {

const MatmulKernels* baseline_matmul() {
    static constexpr MatmulKernels table{transpose, expand, multiply, nullptr, nullptr, nullptr};
    return &table;
}

}  // namespace drivetrain

// AVX2 with FMA and F16C: x86-64-v3, 8 lanes. Compiled with those flags and nothing more.

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#include "convert.h"

namespace drivetrain {
namespace {

struct V {
    static constexpr int width = 8;
    using Reg = __m256;

    static Reg load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Reg a) { _mm256_storeu_ps(to, a); }
    static Reg set(float a) { return _mm256_set1_ps(a); }
    static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
    static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
    static Reg div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
    static Reg sqrt(Reg a) { return _mm256_sqrt_ps(a); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
    static Reg larger(Reg a, Reg b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(a, b, _CMP_NLE_UQ)); }
    // The instructions give the second operand where one of the two is NaN.
    static Reg maximum(Reg a, Reg b) { return _mm256_blendv_ps(_mm256_max_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
    static Reg minimum(Reg a, Reg b) { return _mm256_blendv_ps(_mm256_min_ps(a, b), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
    static Reg clamp_below(Reg a) { return _mm256_and_ps(a, _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NLE_UQ)); }
    static Reg sign(Reg a) {
        const Reg zero = _mm256_setzero_ps(), one = _mm256_set1_ps(1.0f);
        const Reg positive = _mm256_and_ps(_mm256_cmp_ps(a, zero, _CMP_GT_OQ), one);
        const Reg negative = _mm256_and_ps(_mm256_cmp_ps(a, zero, _CMP_LT_OQ), one);
        return _mm256_sub_ps(positive, negative);
    }

    static Reg bf16_load(const std::uint16_t* from) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
    static void bf16_store(std::uint16_t* to, Reg a) {
        const __m256i bits = _mm256_castps_si256(a);
        const __m256i high = _mm256_srli_epi32(bits, 16);
        const __m256i even = _mm256_and_si256(high, _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff))), 16);
        const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
        const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, nan);
        const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
    }
    static Reg f16_load(const std::uint16_t* from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    static void f16_store(std::uint16_t* to, Reg a) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }

    struct Lanes {
        __m256d sums[4];
        explicit Lanes(const double* from) {
            for (int k = 0; k < 4; ++k) sums[k] = _mm256_loadu_pd(from + 4 * k);
        }
        void square(int k, Reg a) {
            const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(a));
            const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
            sums[2 * k] = _mm256_fmadd_pd(low, low, sums[2 * k]);
            sums[2 * k + 1] = _mm256_fmadd_pd(high, high, sums[2 * k + 1]);
        }
        void store(double* to) const {
            for (int k = 0; k < 4; ++k) _mm256_storeu_pd(to + 4 * k, sums[k]);
        }
    };
};

}  // namespace
}  // namespace drivetrain

#include "kernels.inl"

namespace drivetrain {

const KernelTable* avx2_kernels() {
    static constexpr KernelTable table = make_table("avx2");
    return &table;
}

}  // namespace drivetrain

#else

namespace drivetrain {

const KernelTable* avx2_kernels() { return nullptr; }

}  // namespace drivetrain

#endif

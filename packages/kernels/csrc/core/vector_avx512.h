// The vector type of the two AVX-512 translation units: F, BW, VL and DQ, 16 lanes. They differ in how float32 becomes bfloat16.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the deliberately undefined registers of its own intrinsics headers for a mistake of their callers.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernel_table.h"

namespace drivetrain {
namespace {

struct Avx512 {
    static constexpr int width = 16;
    using Reg = __m512;

    static Reg load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Reg a) { _mm512_storeu_ps(to, a); }
    static Reg set(float a) { return _mm512_set1_ps(a); }
    static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
    static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
    static Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
    static Reg sqrt(Reg a) { return _mm512_sqrt_ps(a); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
    static Reg larger(Reg a, Reg b) { return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ), a); }
    // The instructions give the second operand where one of the two is NaN.
    static Reg maximum(Reg a, Reg b) { return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a); }
    static Reg minimum(Reg a, Reg b) { return _mm512_mask_mov_ps(_mm512_min_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a); }
    static Reg clamp_below(Reg a) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NLE_UQ), a); }
    static Reg sign(Reg a) {
        const Reg zero = _mm512_setzero_ps();
        const Reg positive = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, zero, _CMP_GT_OQ), _mm512_set1_ps(1.0f));
        return _mm512_mask_mov_ps(positive, _mm512_cmp_ps_mask(a, zero, _CMP_LT_OQ), _mm512_set1_ps(-1.0f));
    }

    static Reg bf16_load(const std::uint16_t* from) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    static void bf16_store(std::uint16_t* to, Reg a) {
        const __m512i bits = _mm512_castps_si512(a);
        const __m512i high = _mm512_srli_epi32(bits, 16);
        const __m512i even = _mm512_and_si512(high, _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff))), 16);
        const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
        const __m512i chosen = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(chosen));
    }
    static Reg f16_load(const std::uint16_t* from) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    static void f16_store(std::uint16_t* to, Reg a) {
        const __m256i half = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
    }

    struct Lanes {
        __m512d low, high;
        explicit Lanes(const double* from) : low(_mm512_loadu_pd(from)), high(_mm512_loadu_pd(from + 8)) {}
        void square(int, Reg a) {
            const __m512d first = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
            const __m512d second = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1));
            low = _mm512_fmadd_pd(first, first, low);
            high = _mm512_fmadd_pd(second, second, high);
        }
        void store(double* to) const {
            _mm512_storeu_pd(to, low);
            _mm512_storeu_pd(to + 8, high);
        }
    };
};

}  // namespace
}  // namespace drivetrain

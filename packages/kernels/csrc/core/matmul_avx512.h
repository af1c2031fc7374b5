// What the vector types of the AVX-512 translation units of matmul share: 16 lanes, so a panel is one register wide.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes the deliberately undefined registers of its own intrinsics headers for a mistake of their callers.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "matmul_kernels.h"

namespace drivetrain {
namespace {

struct Avx512Products {
    static constexpr int lanes = 16, tokens = 8;
    using Reg = __m512;
    using Words = __m512i;

    static Reg load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Reg a) { _mm512_storeu_ps(to, a); }
    static Reg set(float a) { return _mm512_set1_ps(a); }
    static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
    static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }

    static Words load_words(const std::uint32_t* from) { return _mm512_loadu_si512(from); }
    static Words set_words(std::int32_t a) { return _mm512_set1_epi32(a); }
    static Reg to_float(Words a) { return _mm512_cvtepi32_ps(a); }
    template <Codes kCodes, int kPlace>
    static Reg code(Words a) {
        if constexpr (kCodes == Codes::f32) {
            return _mm512_castsi512_ps(a);
        } else if constexpr (kCodes == Codes::int8 || kCodes == Codes::uint8) {
            const Words own = kCodes == Codes::int8 ? a : _mm512_xor_si512(a, _mm512_set1_epi8(-128));
            return _mm512_cvtepi32_ps(_mm512_srai_epi32(kPlace < 3 ? _mm512_slli_epi32(own, 24 - 8 * kPlace) : own, 24));
        } else {  // of two that are bfloat16 in the halves of a lane
            const Words two = nibble_pairs<kCodes, kPlace % 4>(a);
            return _mm512_castsi512_ps(kPlace < 4 ? _mm512_slli_epi32(two, 16) : _mm512_and_si512(two, _mm512_set1_epi32(-65536)));
        }
    }

    // Codes kPair and kPair + 4 of int4 words in the halves of a lane, as bfloat16: the look-up in a register sees the lowest five bits of
    // a half, of which one is another code's, so the table has everything twice.
    template <Codes kCodes, int kPair>
    static Words nibble_pairs(Words a) {
        return _mm512_permutexvar_epi16(kPair > 0 ? _mm512_srli_epi32(a, 4 * kPair) : a, nibble_table<kCodes>());
    }

    // Half of the codes of int4 words, as bytes from 0 to 15: of int4 8 more than the code.
    template <Codes kCodes, int kHalf>
    static Words nibbles(Words a) {
        const Words own = kHalf == 0 ? a : _mm512_srli_epi32(a, 4), low = _mm512_set1_epi8(15);
        constexpr int kAndThenXor = 0x6a;
        return kCodes == Codes::int4 ? _mm512_ternarylogic_epi32(own, low, _mm512_set1_epi8(8), kAndThenXor) : _mm512_and_si512(own, low);
    }

    static std::size_t transpose(const unsigned char* from, std::size_t stride, std::size_t words, std::uint32_t* to) {
        for (std::size_t done = 0; done < words; done += 16) {
            const std::size_t count = words - done < 16 ? words - done : 16;
            const auto mask = static_cast<__mmask16>((1u << count) - 1u);
            transpose16(from + done * sizeof(std::uint32_t), stride, mask, count, to + done * kPanel);
        }
        return words;
    }

private:
    template <Codes kCodes>
    static Words nibble_table() {
        // bfloat16 of 0 to 7 and -8 to -1, two in each word.
        const __m256i low = _mm256_setr_epi32(0x3f800000, 0x40404000, 0x40a04080, 0x40e040c0, static_cast<int>(0xc0e0c100), static_cast<int>(0xc0a0c0c0),
                                              static_cast<int>(0xc040c080), static_cast<int>(0xbf80c000));
        return _mm512_broadcast_i64x4(kCodes == Codes::int4 ? low : _mm256_permute2x128_si256(low, low, 1));
    }

    static void transpose16(const unsigned char* from, std::size_t stride, __mmask16 mask, std::size_t count, std::uint32_t* to) {
        __m512i a[16], b[16];
        for (std::size_t i = 0; i < 16; ++i) {
            _mm_prefetch(reinterpret_cast<const char*>(from + i * stride) + 256, _MM_HINT_T0);
            a[i] = _mm512_maskz_loadu_epi32(mask, from + i * stride);
        }
        for (int i = 0; i < 8; ++i) {
            b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
            b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
        }
        for (int i = 0; i < 4; ++i) {  // a[4 i + c]: rows 4 i to 4 i + 3 of columns c, 4 + c, 8 + c and 12 + c
            a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
            a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
            a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
            a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
        }
        for (int c = 0; c < 4; ++c) {  // columns c and 8 + c, then 4 + c and 12 + c, of eight rows each
            b[c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
            b[4 + c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
            b[8 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
            b[12 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        }
        for (int c = 0; c < 4; ++c) {
            a[c] = _mm512_shuffle_i32x4(b[c], b[8 + c], 0x88);
            a[8 + c] = _mm512_shuffle_i32x4(b[c], b[8 + c], 0xdd);
            a[4 + c] = _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0x88);
            a[12 + c] = _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0xdd);
        }
        if (count == 16) {
            for (std::size_t i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * kPanel, a[i]);
        } else {
            for (std::size_t i = 0; i < count; ++i) _mm512_storeu_si512(to + i * kPanel, a[i]);
        }
    }
};

}  // namespace
}  // namespace drivetrain

// AVX2 with FMA: 8 lanes. Compiled with the flags of kernels_avx2.cpp.

#include <cstddef>
#include <cstdint>

#include "convert.h"
#include "matmul_kernels.h"

#if defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>

namespace drivetrain {
namespace {

struct V {
    static constexpr int lanes = 8, tokens = 4;
    using Reg = __m256;
    using Words = __m256i;

    static Reg load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Reg a) { _mm256_storeu_ps(to, a); }
    static Reg set(float a) { return _mm256_set1_ps(a); }
    static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
    static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }

    static Words load_words(const std::uint32_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
    static Words set_words(std::int32_t a) { return _mm256_set1_epi32(a); }
    static Reg to_float(Words a) { return _mm256_cvtepi32_ps(a); }
    template <Codes kCodes, int kPlace>
    static Reg code(Words a) {
        if constexpr (kCodes == Codes::f32) {
            return _mm256_castsi256_ps(a);
        } else {
            constexpr int kBits = kCodes == Codes::int8 || kCodes == Codes::uint8 ? 8 : 4;
            constexpr char kFlip = static_cast<char>(kCodes == Codes::uint8 ? 0x80 : kCodes == Codes::uint4 ? 0x88 : 0);
            const Words own = kFlip != 0 ? _mm256_xor_si256(a, _mm256_set1_epi8(kFlip)) : a;
            return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(own, 32 - kBits * (kPlace + 1)), 32 - kBits));
        }
    }

    // One byte per code: of int4 the nibble, of int8 the magnitude and, apart, the sign, so that no sum of two products leaves 16 bits.
    struct Bytes {
        __m256i magnitude, sign;
    };
    template <Codes kCodes>
    static constexpr std::int32_t byte_offset() {
        return kCodes == Codes::int4 ? 8 : kCodes == Codes::uint8 ? -128 : 0;
    }
    template <Codes kCodes, int kHalf>
    static Bytes bytes(Words a) {
        if constexpr (kCodes == Codes::int8 || kCodes == Codes::uint8) {
            const __m256i own = kCodes == Codes::int8 ? a : _mm256_xor_si256(a, _mm256_set1_epi8(-128));
            return {_mm256_abs_epi8(own), own};
        } else {
            const __m256i nibble = _mm256_and_si256(kHalf == 0 ? a : _mm256_srli_epi32(a, 4), _mm256_set1_epi8(15));
            return {kCodes == Codes::int4 ? _mm256_xor_si256(nibble, _mm256_set1_epi8(8)) : nibble, nibble};
        }
    }
    template <Codes kCodes>
    static Words dot(Words sum, const Bytes& codes, std::int32_t four) {
        constexpr bool kHasSign = kCodes == Codes::int8 || kCodes == Codes::uint8;
        const __m256i x = _mm256_set1_epi32(four);
        const __m256i pairs = _mm256_maddubs_epi16(codes.magnitude, kHasSign ? _mm256_sign_epi8(x, codes.sign) : x);
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }

    static std::size_t transpose(const unsigned char* from, std::size_t stride, std::size_t words, std::uint32_t* to) {
        std::size_t done = 0;
        for (; done + 8 <= words; done += 8) {
            for (std::size_t half = 0; half < 2; ++half) {
                transpose8(from + half * 8 * stride + done * sizeof(std::uint32_t), stride, to + done * kPanel + half * 8);
            }
        }
        return done;
    }

private:
    static void transpose8(const unsigned char* from, std::size_t stride, std::uint32_t* to) {
        __m256i row[8], pair[8];
        for (std::size_t i = 0; i < 8; ++i) {
            _mm_prefetch(reinterpret_cast<const char*>(from + i * stride) + 256, _MM_HINT_T0);
            row[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * stride));
        }
        for (int i = 0; i < 4; ++i) {
            pair[2 * i] = _mm256_unpacklo_epi32(row[2 * i], row[2 * i + 1]);
            pair[2 * i + 1] = _mm256_unpackhi_epi32(row[2 * i], row[2 * i + 1]);
        }
        for (int i = 0; i < 2; ++i) {  // row[4 i + c]: column c of rows 4 i to 4 i + 3, and column 4 + c in the upper half
            row[4 * i] = _mm256_unpacklo_epi64(pair[4 * i], pair[4 * i + 2]);
            row[4 * i + 1] = _mm256_unpackhi_epi64(pair[4 * i], pair[4 * i + 2]);
            row[4 * i + 2] = _mm256_unpacklo_epi64(pair[4 * i + 1], pair[4 * i + 3]);
            row[4 * i + 3] = _mm256_unpackhi_epi64(pair[4 * i + 1], pair[4 * i + 3]);
        }
        for (std::size_t c = 0; c < 4; ++c) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + c * kPanel), _mm256_permute2x128_si256(row[c], row[4 + c], 0x20));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + (4 + c) * kPanel), _mm256_permute2x128_si256(row[c], row[4 + c], 0x31));
        }
    }
};

}  // namespace
}  // namespace drivetrain

#include "matmul.inl"
#include "matmul_bytes.inl"

namespace drivetrain {

const MatmulKernels* avx2_matmul() {
    static constexpr MatmulKernels table{transpose, expand, multiply, multiply_bytes, nullptr, nullptr};
    return &table;
}

}  // namespace drivetrain

#else

namespace drivetrain {

const MatmulKernels* avx2_matmul() { return nullptr; }

}  // namespace drivetrain

#endif

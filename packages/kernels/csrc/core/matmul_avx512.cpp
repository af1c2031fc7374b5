// AVX-512 F, BW, VL, DQ: bytes are multiplied in pairs to 16 bits. Compiled with the flags of kernels_avx512.cpp.

#include <cstddef>
#include <cstdint>

#include "convert.h"
#include "matmul_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#include "matmul_avx512.h"

namespace drivetrain {
namespace {

struct V : Avx512Products {
    // One byte per code: of int4 the nibble, of int8 the magnitude and, apart, the sign, so that no sum of two products leaves 16 bits.
    struct Bytes {
        __m512i magnitude;
        __mmask64 negative;
    };
    template <Codes kCodes>
    static constexpr std::int32_t byte_offset() {
        return kCodes == Codes::int4 ? 8 : kCodes == Codes::uint8 ? -128 : 0;
    }
    template <Codes kCodes, int kHalf>
    static Bytes bytes(Words a) {
        if constexpr (kCodes == Codes::int8 || kCodes == Codes::uint8) {
            const __m512i own = kCodes == Codes::int8 ? a : _mm512_xor_si512(a, _mm512_set1_epi8(-128));
            return {_mm512_abs_epi8(own), _mm512_movepi8_mask(own)};
        } else {
            return {nibbles<kCodes, kHalf>(a), 0};
        }
    }
    template <Codes kCodes>
    static Words dot(Words sum, const Bytes& codes, std::int32_t four) {
        constexpr bool kHasSign = kCodes == Codes::int8 || kCodes == Codes::uint8;
        const __m512i x = _mm512_set1_epi32(four);
        const __m512i own = kHasSign ? _mm512_mask_sub_epi8(x, codes.negative, _mm512_setzero_si512(), x) : x;
        return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(codes.magnitude, own), _mm512_set1_epi16(1)));
    }
};

}  // namespace
}  // namespace drivetrain

#include "matmul.inl"
#include "matmul_bytes.inl"

namespace drivetrain {

const MatmulKernels* avx512_matmul() {
    static constexpr MatmulKernels table{transpose, expand, multiply, multiply_bytes, nullptr, nullptr};
    return &table;
}

}  // namespace drivetrain

#else

namespace drivetrain {

const MatmulKernels* avx512_matmul() { return nullptr; }

}  // namespace drivetrain

#endif

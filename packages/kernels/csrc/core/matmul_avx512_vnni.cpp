// AVX-512 with the VNNI extension, which multiplies four bytes and adds the products to 32 bits in one instruction.

#include <cstddef>
#include <cstdint>

#include "convert.h"
#include "matmul_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)

#include "matmul_avx512.h"

namespace drivetrain {
namespace {

struct V : Avx512Products {
    using Bytes = __m512i;  // not negative: the codes, or that much more
    template <Codes kCodes>
    static constexpr std::int32_t byte_offset() {
        return kCodes == Codes::int4 ? 8 : kCodes == Codes::int8 ? 128 : 0;
    }
    template <Codes kCodes, int kHalf>
    static Bytes bytes(Words a) {
        if constexpr (kCodes == Codes::int8) {
            return _mm512_xor_si512(a, _mm512_set1_epi8(-128));
        } else if constexpr (kCodes == Codes::uint8) {
            return a;
        } else {
            return nibbles<kCodes, kHalf>(a);
        }
    }
    template <Codes kCodes>
    static Words dot(Words sum, const Bytes& codes, std::int32_t four) {
        return _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(four));
    }
};

}  // namespace
}  // namespace drivetrain

#include "matmul.inl"
#include "matmul_bytes.inl"

namespace drivetrain {

const MatmulKernels* avx512_vnni_matmul() {
    static constexpr MatmulKernels table{transpose, expand, multiply, multiply_bytes, nullptr, nullptr};
    return &table;
}

}  // namespace drivetrain

#else

namespace drivetrain {

const MatmulKernels* avx512_vnni_matmul() { return nullptr; }

}  // namespace drivetrain

#endif

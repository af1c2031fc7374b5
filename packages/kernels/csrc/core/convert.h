// Conversions of single elements, to nearest even. The vector forms of every instruction set give the same bits, NaN included:
// a NaN stays a NaN of the same sign, made quiet, with the leading bits of its payload.
#pragma once

#include <cstdint>
#include <cstring>

namespace drivetrain {
namespace {  // internal linkage: this header is compiled under several instruction sets

inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float one_bf16_to_f32(std::uint16_t half) { return float_of(static_cast<std::uint32_t>(half) << 16); }

inline std::uint16_t one_f32_to_bf16(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t quiet = (bits >> 16) | 0x40u;
    return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

inline float one_f16_to_f32(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    const std::uint32_t exponent = (half >> 10) & 0x1fu;
    const std::uint32_t mantissa = half & 0x3ffu;
    if (exponent == 31) {
        return float_of(sign | 0x7f800000u | (mantissa << 13) | (mantissa != 0 ? 0x400000u : 0u));
    }
    if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact in float32
        const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
        return float_of(sign | bits_of(magnitude));
    }
    return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

inline std::uint16_t one_f32_to_f16(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    std::uint32_t half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    } else if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more: infinity
        half = 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24
        if (magnitude < 0x33000000u) {     // below 2^-25: zero
            half = 0;
        } else {
            const std::uint32_t shift = 126u - (magnitude >> 23);  // 14..24
            const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
            const std::uint32_t dropped = mantissa & ((1u << shift) - 1u);
            const std::uint32_t middle = 1u << (shift - 1u);
            half = mantissa >> shift;
            half += (dropped > middle || (dropped == middle && (half & 1u))) ? 1u : 0u;
        }
    } else {
        half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    }
    return static_cast<std::uint16_t>(sign | half);
}

}  // namespace
}  // namespace drivetrain

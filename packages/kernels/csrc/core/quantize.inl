// Inner loops of quantisation: plain loops that the compiler makes into vectors of each instruction set. Included by kernels.inl.
// Rounding and flooring go through a constant instead of the library, so that every instruction set has a vector form and the same bits.

namespace drivetrain {
namespace {

// To nearest even, for |x| < 2^22: adding 1.5 * 2^23 leaves no bits below one.
inline float nearest(float x) {
    constexpr float kShift = 12582912.0f;
    return (x + kShift) - kShift;
}

// The finaliser of C. Wellons' "hash prospector" (lowbias32): a bijection of 32 bits with little bias.
inline std::uint32_t mix(std::uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

// Up with the probability of what is cut off: the expectation is x.
inline float randomly(float x, std::uint32_t place, std::uint32_t key0, std::uint32_t key1) {
    const float rounded = nearest(x);
    const float floor = rounded > x ? rounded - 1.0f : rounded;
    const std::uint32_t random = mix(mix(place ^ key0) + key1);
    const float uniform = static_cast<float>(static_cast<std::int32_t>(random >> 8)) * 5.9604644775390625e-8f;  // in [0, 1)
    return uniform < x - floor ? floor + 1.0f : floor;
}

inline float clamped(float x, float low, float high) {
    const float raised = x < low ? low : x;
    return raised > high ? high : raised;
}

// Integers whose order is that of the numbers: infinities and NaNs lie beyond everything finite on the side of their sign.
inline std::int32_t ordered(float x) {
    const auto bits = static_cast<std::int32_t>(bits_of(x));
    return bits ^ (bits >> 31 & 0x7fffffff);
}

std::uint32_t largest_magnitude(const float* x, std::size_t count) {
    std::uint32_t most = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

void extreme_values(const float* x, std::size_t count, std::int32_t* low, std::int32_t* high) {
    std::int32_t least = *low, most = *high;
    for (std::size_t i = 0; i < count; ++i) {
        const std::int32_t value = ordered(x[i]);
        least = value < least ? value : least;
        most = value > most ? value : most;
    }
    *low = least;
    *high = most;
}

template <bool kStochastic, bool kSymmetric>
void encode_integers(const EncodeCall& c, const float* __restrict x, std::uint8_t* __restrict codes, std::size_t count) {
    const bool wide = c.format == Format::int8;
    const float high = kSymmetric ? (wide ? 127.0f : 7.0f) : (wide ? 255.0f : 15.0f);
    const float low = kSymmetric ? -high : 0.0f;
    const std::int32_t mask = wide ? 0xff : 0x0f;
    const float inverse = c.inverse, zero = c.zero;
    const std::uint32_t key0 = c.key0, key1 = c.key1, start = c.start;
    for (std::size_t i = 0; i < count; ++i) {
        const float scaled = clamped((kSymmetric ? x[i] : x[i] - zero) * inverse, low, high);
        const float rounded = kStochastic ? randomly(scaled, start + static_cast<std::uint32_t>(i), key0, key1) : nearest(scaled);
        codes[i] = static_cast<std::uint8_t>(static_cast<std::int32_t>(rounded) & mask);
    }
}

// kBias is the format's exponent bias; the smallest normal exponent is 1 - kBias.
template <int kMantissa, int kBias, int kSignBit, int kLargest, bool kStochastic>
void encode_floats(const EncodeCall& c, const float* __restrict x, std::uint8_t* __restrict codes, std::size_t count) {
    constexpr std::int32_t kLeast = 128 - kBias;  // the smallest normal exponent, as float32 writes it
    const float inverse = c.inverse;
    const std::uint32_t key0 = c.key0, key1 = c.key1, start = c.start;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t bits = bits_of(x[i] * inverse);
        const std::uint32_t magnitude = bits & 0x7fffffffu;
        const auto own = static_cast<std::int32_t>(magnitude >> 23);
        const std::int32_t exponent = own < kLeast ? kLeast : own;
        // In units of the last place that the format has at this exponent. A carry out of the mantissa is the next exponent's first code.
        const float units = float_of(magnitude) * float_of(static_cast<std::uint32_t>(254 + kMantissa - exponent) << 23);
        const float rounded = kStochastic ? randomly(units, start + static_cast<std::uint32_t>(i), key0, key1) : nearest(units);
        std::int32_t code = ((exponent - kLeast) << kMantissa) + static_cast<std::int32_t>(rounded);
        code = code > kLargest ? kLargest : code;
        codes[i] = static_cast<std::uint8_t>(code | static_cast<std::int32_t>(bits >> 31) << kSignBit);
    }
}

template <bool kStochastic>
void encode_as(const EncodeCall& c, const float* x, std::uint8_t* codes, std::size_t count) {
    switch (c.format) {
        case Format::int8:
        case Format::int4:
            return c.symmetric ? encode_integers<kStochastic, true>(c, x, codes, count) : encode_integers<kStochastic, false>(c, x, codes, count);
        case Format::e4m3: return encode_floats<3, 7, 7, 0x7e, kStochastic>(c, x, codes, count);
        case Format::e5m2: return encode_floats<2, 15, 7, 0x7b, kStochastic>(c, x, codes, count);
        case Format::e3m2: return encode_floats<2, 3, 5, 0x1f, kStochastic>(c, x, codes, count);
    }
}

void encode(const EncodeCall& c, const float* x, std::uint8_t* codes, std::size_t count) {
    c.stochastic ? encode_as<true>(c, x, codes, count) : encode_as<false>(c, x, codes, count);
}

struct FloatCodes {
    float values[256];
};

// kSpecial: the first magnitude that is no number (infinity or NaN); kInfinite: whether that first one is an infinity.
constexpr FloatCodes float_codes(int mantissa, int bias, int sign_bit, int special, bool infinite) {
    FloatCodes codes{};
    for (int code = 0; code < 256; ++code) {
        const int magnitude = code & ((1 << sign_bit) - 1);
        const int exponent = magnitude >> mantissa;
        const int fraction = (magnitude & ((1 << mantissa) - 1)) + (exponent == 0 ? 0 : 1 << mantissa);
        auto value = static_cast<float>(fraction);
        for (int power = (exponent == 0 ? 1 : exponent) - bias - mantissa; power != 0; power += power > 0 ? -1 : 1) {
            value = power > 0 ? value * 2.0f : value * 0.5f;
        }
        if (magnitude >= special) value = infinite && magnitude == special ? __builtin_inff() : __builtin_nanf("");
        codes.values[code] = (code >> sign_bit & 1) != 0 ? -value : value;
    }
    return codes;
}

constexpr FloatCodes kE4m3 = float_codes(3, 7, 7, 0x7f, false);
constexpr FloatCodes kE5m2 = float_codes(2, 15, 7, 0x7c, true);
constexpr FloatCodes kE3m2 = float_codes(2, 3, 5, 0x20, false);

template <bool kAdd, typename Value>
void decode_each(Value value, float* __restrict to, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) to[i] = kAdd ? to[i] + value(i) : value(i);
}

template <bool kAdd>
void decode_as(const DecodeCall& c, const std::uint8_t* __restrict codes, float* __restrict to, std::size_t count) {
    const float scale = c.scale, zero = c.zero;
    const auto looked_up = [&](const FloatCodes& table) {
        const float* values = table.values;
        decode_each<kAdd>([=](std::size_t i) { return values[codes[i]] * scale; }, to, count);
    };
    switch (c.format) {
        case Format::e4m3: return looked_up(kE4m3);
        case Format::e5m2: return looked_up(kE5m2);
        case Format::e3m2: return looked_up(kE3m2);
        case Format::int8:
        case Format::int4: break;
    }
    if (!c.symmetric) {
        decode_each<kAdd>([=](std::size_t i) { return static_cast<float>(codes[i]) * scale + zero; }, to, count);
    } else if (c.format == Format::int8) {
        decode_each<kAdd>([=](std::size_t i) { return static_cast<float>(static_cast<std::int8_t>(codes[i])) * scale; }, to, count);
    } else {
        decode_each<kAdd>([=](std::size_t i) { return static_cast<float>((codes[i] ^ 8) - 8) * scale; }, to, count);
    }
}

void decode(const DecodeCall& c, const std::uint8_t* codes, float* to, std::size_t count) {
    c.add ? decode_as<true>(c, codes, to, count) : decode_as<false>(c, codes, to, count);
}

template <bool kSquared>
void add_magnitudes(const float* x, std::size_t count, double* lanes) {
    std::size_t i = 0;
    const auto term = [](float value) {
        const auto wide = static_cast<double>(value);
        return kSquared ? wide * wide : (wide < 0.0 ? -wide : wide);
    };
    for (; i + kGroup <= count; i += kGroup) {
        for (std::size_t k = 0; k < kGroup; ++k) lanes[k] += term(x[i + k]);
    }
    for (std::size_t k = 0; i + k < count; ++k) lanes[k] += term(x[i + k]);
}

void magnitudes(const float* x, std::size_t count, bool squared, double* lanes) {
    squared ? add_magnitudes<true>(x, count, lanes) : add_magnitudes<false>(x, count, lanes);
}

void pack_sign_bits(const float* x, std::uint8_t* bits, std::size_t count) {
    for (std::size_t i = 0; i < count; i += 8) {
        unsigned byte = 0;
        if (i + 8 <= count) {
            for (unsigned k = 0; k < 8; ++k) byte |= static_cast<unsigned>(!(x[i + k] < 0.0f)) << k;
        } else {
            for (unsigned k = 0; i + k < count; ++k) byte |= static_cast<unsigned>(!(x[i + k] < 0.0f)) << k;
        }
        bits[i / 8] = static_cast<std::uint8_t>(byte);
    }
}

void unpack_sign_bits(const std::uint8_t* __restrict bits, float scale, float* __restrict to, std::size_t count) {
    const std::uint32_t negative = bits_of(-scale), flip = 0x80000000u;
    for (std::size_t i = 0; i < count; ++i) to[i] = float_of(negative ^ ((static_cast<std::uint32_t>(bits[i / 8]) >> (i % 8) & 1u) * flip));
}

void scale_all(float* x, float factor, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) x[i] *= factor;
}

constexpr QuantKernels kQuantKernels{largest_magnitude, extreme_values, encode,           decode,
                                     magnitudes,        pack_sign_bits, unpack_sign_bits, scale_all};

}  // namespace
}  // namespace drivetrain

// AVX-512 with the BF16 extension: an instruction adds the products of two pairs of bfloat16 to a float32. All codes are exact in bfloat16.
//
// A few tokens multiply pairs of codes as they are unpacked; for more, the codes of some panels are unpacked once, and tiles of tokens multiply
// them in cache. Products are exact, but added in pairs, and subnormals count as zero, so that sums of bfloat16 activations differ in their
// last bits from those of other instruction sets; they don't depend on the number of tokens.

#include <cstddef>
#include <cstdint>

#include "convert.h"
#include "matmul_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512BF16__)

#include "matmul_avx512.h"

namespace drivetrain {
namespace {

using V = Avx512Products;

}  // namespace
}  // namespace drivetrain

#include "matmul.inl"

namespace drivetrain {
namespace {

constexpr int kMostPanels = 4;       // at a time
constexpr std::size_t kTile = 6;     // tokens that multiply unpacked codes at a time: with kMostPanels that is all registers
constexpr std::size_t kInPlace = 4;  // tokens up to which unpacking for each call of a tile is cheaper than storing what is unpacked

// What is unpacked at a time: so many words of a row give so many pairs.
template <Codes kCodes>
constexpr int words_at_once() {
    return kCodes == Codes::f32 ? 2 : 1;
}
template <Codes kCodes>
constexpr int pairs_at_once() {
    return codes_per_word<kCodes>() * words_at_once<kCodes>() / 2;
}

// The upper halves of two float32, which is all there is of them.
inline __m512i pair_of(__m512i first, __m512i second) {
    return _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(first, 16), second);
}

// Byte kPlace of each lane, signed, as float32 times 2^24: moved to the top of the lane, it needs no other bytes shifted out.
template <int kPlace>
inline __m512i float_of_byte(__m512i a) {
    constexpr int kZero = 0x80;
    const __m512i top = kPlace == 3 ? _mm512_and_si512(a, _mm512_set1_epi32(-(1 << 24)))
                                    : _mm512_shuffle_epi8(a, _mm512_set4_epi32((12 + kPlace) << 24 | kZero << 16 | kZero << 8 | kZero,
                                                                               (8 + kPlace) << 24 | kZero << 16 | kZero << 8 | kZero,
                                                                               (4 + kPlace) << 24 | kZero << 16 | kZero << 8 | kZero,
                                                                               kPlace << 24 | kZero << 16 | kZero << 8 | kZero));
    return _mm512_castps_si512(_mm512_cvtepi32_ps(top));
}

// Codes of sixteen rows in pairs of bfloat16, in the order in which activations come. `step`: to the next word.
template <Codes kCodes>
inline void unpack_pairs(const std::uint32_t* words, std::size_t step, __m512i (&pairs)[pairs_at_once<kCodes>()]) {
    const __m512i own = V::load_words(words);
    if constexpr (kCodes == Codes::f32) {
        pairs[0] = pair_of(own, V::load_words(words + step));
    } else if constexpr (kCodes == Codes::int4 || kCodes == Codes::uint4) {
        pairs[0] = V::nibble_pairs<kCodes, 0>(own);
        pairs[1] = V::nibble_pairs<kCodes, 1>(own);
        pairs[2] = V::nibble_pairs<kCodes, 2>(own);
        pairs[3] = V::nibble_pairs<kCodes, 3>(own);
    } else {
        // 24 off the exponents; zero, which has none, stays what it is.
        const __m512i bytes = kCodes == Codes::uint8 ? _mm512_xor_si512(own, _mm512_set1_epi8(-128)) : own, shift = _mm512_set1_epi16(24 << 7);
        pairs[0] = _mm512_subs_epu16(pair_of(float_of_byte<0>(bytes), float_of_byte<1>(bytes)), shift);
        pairs[1] = _mm512_subs_epu16(pair_of(float_of_byte<2>(bytes), float_of_byte<3>(bytes)), shift);
    }
}

inline V::Reg add_pair(V::Reg sum, __m512i codes, const std::uint16_t* x) {
    std::int32_t two;
    __builtin_memcpy(&two, x, sizeof two);
    return _mm512_dpbf16_ps(sum, (__m512bh)codes, (__m512bh)_mm512_set1_epi32(two));
}

// A few tokens times codes as they are unpacked.
template <Codes kCodes, int kPanels, int kTokens>
void unpacking_tile(const ProductRun& run) {
    constexpr std::size_t kPairs = pairs_at_once<kCodes>(), kWords = words_at_once<kCodes>();
    over_segments<center<kCodes>(), kPanels, kTokens>(run, [&](std::size_t segment, V::Reg(&sums)[kTokens][kPanels]) {
        for (auto& token : sums) {
            for (V::Reg& sum : token) sum = V::set(0.0f);
        }
        const auto* x = static_cast<const std::uint16_t*>(run.x) + segment * run.length;
        const std::size_t words_each = run.length / codes_per_word<kCodes>(), first = segment * words_each;
        for (std::size_t word = first; word < first + words_each; word += kWords, x += 2 * kPairs) {
            read_ahead<kPanels>(run, word);
#pragma GCC unroll 4
            for (std::size_t panel = 0; panel < kPanels; ++panel) {
                __m512i pairs[kPairs];
                unpack_pairs<kCodes>(run.words + panel * run.panel_words + word * run.word_step, run.word_step, pairs);
#pragma GCC unroll 4
                for (std::size_t pair = 0; pair < kPairs; ++pair) {
#pragma GCC unroll 4
                    for (std::size_t t = 0; t < kTokens; ++t) sums[t][panel] = add_pair(sums[t][panel], pairs[pair], x + t * run.x_stride + 2 * pair);
                }
            }
        }
    });
}

// `scaled`, for activations without scales, and added; vectors may be anything's alias, so what `run` says is read first.
template <int kCenter, int kPanels, int kTokens>
inline __attribute__((always_inline)) void add_unpacked(const ProductRun& run, std::size_t segment, const V::Reg (&sums)[kTokens][kPanels]) {
    float* const totals = run.sums;
    const std::size_t stride = run.sum_stride, step = run.panel_scales;
    const float* const scales = run.scales + segment * run.scale_step;
    const float* const zeros = run.zeros != nullptr ? run.zeros + segment * run.scale_step : nullptr;
    const float* const x_sums = zeros != nullptr ? run.x_sums + segment * run.x_tokens : nullptr;
#pragma GCC unroll 8
    for (int panel = 0; panel < kPanels; ++panel) {
        const V::Reg scale = V::load(scales + static_cast<std::size_t>(panel) * step);
        V::Reg zero = V::set(0.0f);
        if (zeros != nullptr) zero = V::load(zeros + static_cast<std::size_t>(panel) * step);
        if (kCenter != 0) zero = V::add(zero, V::mul(scale, V::set(static_cast<float>(kCenter))));
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
            float* const total = totals + static_cast<std::size_t>(t) * stride + static_cast<std::size_t>(panel) * kPanel;
            V::Reg value = V::mul(sums[t][panel], scale);
            if (zeros != nullptr) value = V::add(value, V::mul(zero, V::set(x_sums[t])));
            V::store(total, V::add(V::load(total), value));
        }
    }
}

// Some tokens times the pairs of one segment of some panels: [kPanels][length / 2][kPanel].
template <int kCenter, int kPanels, int kTokens>
void unpacked_tile(const ProductRun& run, std::size_t segment, const std::uint32_t* pairs) {
    V::Reg sums[kTokens][kPanels];
    for (auto& token : sums) {
        for (V::Reg& sum : token) sum = V::set(0.0f);
    }
    const auto* x = static_cast<const std::uint16_t*>(run.x) + segment * run.length;
    const std::size_t each = run.length / 2;
    for (std::size_t pair = 0; pair < each; ++pair, x += 2) {
        V::Words codes[kPanels];
        for (std::size_t panel = 0; panel < kPanels; ++panel) codes[panel] = V::load_words(pairs + (panel * each + pair) * kPanel);
        for (std::size_t t = 0; t < kTokens; ++t) {
            for (std::size_t panel = 0; panel < kPanels; ++panel) sums[t][panel] = add_pair(sums[t][panel], codes[panel], x + t * run.x_stride);
        }
    }
    add_unpacked<kCenter, kPanels, kTokens>(run, segment, sums);
}

template <int kCenter, int kPanels, std::size_t kTokens>
void unpacked_tiles(const ProductRun& run, std::size_t segment, const std::uint32_t* pairs, std::size_t token, std::size_t tokens) {
    for (; token + kTokens <= tokens; token += kTokens) {
        unpacked_tile<kCenter, kPanels, static_cast<int>(kTokens)>(moved<std::uint16_t>(run, 0, token), segment, pairs);
    }
    if constexpr (kTokens > 1) unpacked_tiles<kCenter, kPanels, kTokens == kTile ? 4 : kTokens / 2>(run, segment, pairs, token, tokens);
}

template <Codes kCodes, int kPanels>
void multiply_panels(const ProductRun& run, std::size_t tokens) {
    if (tokens <= kInPlace) {
        if (tokens == 4) return unpacking_tile<kCodes, kPanels, 4>(run);
        if (tokens >= 2) unpacking_tile<kCodes, kPanels, 2>(run);
        if (tokens != 2) unpacking_tile<kCodes, kPanels, 1>(moved<std::uint16_t>(run, 0, tokens - 1));
        return;
    }
    constexpr std::size_t kPairs = pairs_at_once<kCodes>(), kWords = words_at_once<kCodes>();
    alignas(64) std::uint32_t room[kPanels * kSegment / 2 * kPanel];
    const std::size_t words_each = run.length / codes_per_word<kCodes>();
    for (std::size_t segment = 0; segment < run.segments; ++segment) {
        std::uint32_t* to = room;
        for (std::size_t panel = 0; panel < kPanels; ++panel) {
            const std::uint32_t* words = run.words + panel * run.panel_words + segment * words_each * run.word_step;
            for (std::size_t word = 0; word < words_each; word += kWords, words += kWords * run.word_step, to += kPairs * kPanel) {
                __m512i pairs[kPairs];
                unpack_pairs<kCodes>(words, run.word_step, pairs);
                for (std::size_t pair = 0; pair < kPairs; ++pair) _mm512_store_si512(to + pair * kPanel, pairs[pair]);
            }
        }
        unpacked_tiles<center<kCodes>(), kPanels, kTile>(run, segment, room, 0, tokens);
    }
}

template <Codes kCodes>
void multiply_codes(const ProductRun& run, std::size_t panels, std::size_t tokens) {
    std::size_t panel = 0;
    for (; panel + kMostPanels <= panels; panel += kMostPanels) multiply_panels<kCodes, kMostPanels>(moved<std::uint16_t>(run, panel, 0), tokens);
    for (; panel < panels; ++panel) multiply_panels<kCodes, 1>(moved<std::uint16_t>(run, panel, 0), tokens);
}

void multiply_bf16(const ProductRun& run, std::size_t panels, std::size_t tokens) {
    switch (run.codes) {
        case Codes::int8: return multiply_codes<Codes::int8>(run, panels, tokens);
        case Codes::uint8: return multiply_codes<Codes::uint8>(run, panels, tokens);
        case Codes::int4: return multiply_codes<Codes::int4>(run, panels, tokens);
        case Codes::uint4: return multiply_codes<Codes::uint4>(run, panels, tokens);
        case Codes::f32: return multiply_codes<Codes::f32>(run, panels, tokens);
    }
}

}  // namespace

const MatmulKernels* avx512_bf16_matmul() {
    if (avx512_vnni_matmul() == nullptr) return nullptr;
    static const MatmulKernels table{transpose, expand, multiply, avx512_vnni_matmul()->multiply_bytes, multiply_bf16, multiply_bf16};
    return &table;
}

}  // namespace drivetrain

#else

namespace drivetrain {

const MatmulKernels* avx512_bf16_matmul() { return nullptr; }

}  // namespace drivetrain

#endif

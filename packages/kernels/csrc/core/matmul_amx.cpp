// AMX: sixteen tokens times sixteen rows and 64 bytes of them in one instruction, of int8 or of bfloat16 with float32 sums. Worth its while
// from kTileRows tokens of int8 and kManyTokens of bfloat16; fewer go the way of AVX-512 VNNI, with the same bits, and of AVX-512 BF16. Sums of
// bfloat16 products differ in their last bits from those of other instruction sets: see matmul_avx512_bf16.cpp.
//
// A panel's words are a matrix B as the instructions want it, once codes are bytes or pairs of bfloat16: row w holds word w of sixteen rows.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "convert.h"
#include "matmul_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AMX_TILE__) && \
    defined(__AMX_INT8__) && defined(__AMX_BF16__)

#include "matmul_avx512.h"

namespace drivetrain {
namespace {

using V = Avx512Products;

}  // namespace
}  // namespace drivetrain

#include "matmul.inl"

namespace drivetrain {
namespace {

constexpr std::size_t kTileRows = 16;
constexpr std::size_t kTileBytes = 64;
constexpr std::size_t kGroupElements = 16;  // lengths of segments are multiples of it

// Tiles 0 to 3 are sums, of the first sixteen tokens with two panels and then of the next; 4 and 5 are the tokens; 6 and 7 the panels.
// The intrinsics of some compilers don't say that they touch memory.
template <int kTile>
void load_tile(const void* from, std::size_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
void store_tile(void* to) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(kTileBytes), "i"(kTile) : "memory");
}

template <int kTile>
void clear_tile() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

template <Codes kCodes, bool kBytes, int kSum, int kTokens, int kPanel>
void multiply_tile() {
    if constexpr (!kBytes) {
        __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kTokens), "i"(kPanel));
    } else if constexpr (kCodes == Codes::int8) {
        __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kTokens), "i"(kPanel));
    } else {
        __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kTokens), "i"(kPanel));
    }
}

// The shapes of all tiles, for as long as it lives: `tokens` rows, and `bytes` of each token at a time.
class TileShapes {
public:
    TileShapes(std::size_t tokens, std::size_t bytes) {
        palette_ = 1;
        for (int tile = 0; tile < 8; ++tile) {
            rows_[tile] = static_cast<std::uint8_t>(tile < 6 ? tokens : bytes / 4);
            row_bytes_[tile] = static_cast<std::uint16_t>(tile == 4 || tile == 5 ? bytes : kTileBytes);
        }
        __asm__ volatile("ldtilecfg %0" ::"m"(*this) : "memory");
    }
    TileShapes(const TileShapes&) = delete;
    TileShapes& operator=(const TileShapes&) = delete;
    ~TileShapes() { __asm__ volatile("tilerelease"); }

private:
    // As the instruction reads it.
    alignas(64) std::uint8_t palette_ = 0;
    std::uint8_t start_row_ = 0, reserved_[14] = {};
    std::uint16_t row_bytes_[16] = {};
    std::uint8_t rows_[16] = {};
};

// Two bfloat16 in each lane, the upper halves of two float32; codes are exact in them.
inline void write_pair(V::Reg first, V::Reg second, std::uint32_t* to) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
    _mm512_storeu_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_castps_si512(second)));
}

// Pairs in the order of the activations, which is that of `pair_order` with codes of four bits.
template <Codes kCodes, int kPair>
void write_pairs(V::Words words, std::uint32_t* to) {
    constexpr bool kHalves = codes_per_word<kCodes>() == 8;
    if constexpr (kPair < codes_per_word<kCodes>() / 2) {
        write_pair(V::code<kCodes, kHalves ? kPair : 2 * kPair>(words), V::code<kCodes, kHalves ? kPair + 4 : 2 * kPair + 1>(words), to);
        write_pairs<kCodes, kPair + 1>(words, to + kPanel);
    }
}

// A panel's codes over a segment as a matrix B, in `room` unless they are one already. kBytes: of bytes, else of bfloat16.
template <Codes kCodes, bool kBytes>
const std::uint32_t* as_matrix(const std::uint32_t* words, std::size_t step, std::size_t elements, std::uint32_t* room) {
    if constexpr (kBytes && (kCodes == Codes::int8 || kCodes == Codes::uint8)) {
        if (step == kPanel) return words;
        for (std::size_t word = 0; word < elements / 4; ++word) _mm512_storeu_si512(room + word * kPanel, V::load_words(words + word * step));
        return room;
    } else {
        constexpr std::size_t kPerWord = codes_per_word<kCodes>(), kRows = kBytes ? 2 : kPerWord / 2;
        std::uint32_t* to = room;
        if constexpr (kCodes == Codes::f32) {
            for (std::size_t k = 0; k < elements; k += 2, words += 2 * step, to += kPanel) {
                write_pair(_mm512_castsi512_ps(V::load_words(words)), _mm512_castsi512_ps(V::load_words(words + step)), to);
            }
        } else {
            for (std::size_t k = 0; k < elements; k += kPerWord, words += step, to += kRows * kPanel) {
                const V::Words own = V::load_words(words);
                if constexpr (kBytes) {
                    _mm512_storeu_si512(to, V::nibbles<kCodes, 0>(own));
                    _mm512_storeu_si512(to + kPanel, V::nibbles<kCodes, 1>(own));
                } else {
                    write_pairs<kCodes, 0>(own, to);
                }
            }
        }
        return room;
    }
}

// Scales and adds the sums of one segment over some tokens from `token` on and a panel, as a tile was stored.
template <Codes kCodes, bool kBytes>
void add_tile(const ProductRun& run, std::size_t segment, std::size_t panel, std::size_t token, std::size_t rows, const std::uint32_t* stored) {
    constexpr int kCenter = kBytes ? 0 : center<kCodes>();
    const std::size_t place = panel * run.panel_scales + segment * run.scale_step;
    float* sums = run.sums + token * run.sum_stride + panel * kPanel;
    for (std::size_t row = 0; row < rows; ++row, stored += kPanel, sums += run.sum_stride) {
        const V::Words own = V::load_words(stored);
        V::Reg sum = _mm512_castsi512_ps(own);
        if constexpr (kBytes) {
            constexpr float kOffset = kCodes == Codes::int4 ? 8.0f : 0.0f;  // of what `nibbles` makes of codes
            const auto offset = kOffset != 0.0f ? static_cast<std::int32_t>(kOffset * run.x_sums[segment * run.x_tokens + token + row]) : 0;
            sum = V::to_float(_mm512_sub_epi32(own, V::set_words(offset)));
        }
        const TokenScale scale(run, segment, token + row, kCenter);
        V::store(sums, V::add(V::load(sums), scaled<kCenter>(run, sum, scale, run.scales + place, run.zeros + place)));
    }
}

// `rows` tokens of each of some tiles of tokens, times one or two panels, over a segment.
template <Codes kCodes, bool kBytes, int kTokenTiles, int kPanels>
void multiply_segment(const ProductRun& run, std::size_t segment, std::size_t rows, std::size_t elements, const std::uint32_t* const* matrices) {
    using X = std::conditional_t<kBytes, std::int8_t, std::uint16_t>;
    const X* x = static_cast<const X*>(run.x) + segment * run.length;
    const std::size_t stride = run.x_stride * sizeof(X), matrix_step = elements * sizeof(X) / 4 * kPanel;
    clear_tile<0>();
    if constexpr (kPanels > 1) clear_tile<1>();
    if constexpr (kTokenTiles > 1) clear_tile<2>();
    if constexpr (kTokenTiles > 1 && kPanels > 1) clear_tile<3>();
    for (std::size_t k = 0, at = 0; k < run.length; k += elements, at += matrix_step) {
        load_tile<4>(x + k, stride);
        load_tile<6>(matrices[0] + at, kTileBytes);
        multiply_tile<kCodes, kBytes, 0, 4, 6>();
        if constexpr (kPanels > 1) {
            load_tile<7>(matrices[1] + at, kTileBytes);
            multiply_tile<kCodes, kBytes, 1, 4, 7>();
        }
        if constexpr (kTokenTiles > 1) {
            load_tile<5>(x + kTileRows * run.x_stride + k, stride);
            multiply_tile<kCodes, kBytes, 2, 5, 6>();
            if constexpr (kPanels > 1) multiply_tile<kCodes, kBytes, 3, 5, 7>();
        }
    }
    alignas(64) std::uint32_t stored[4][kTileRows * kPanel];
    store_tile<0>(stored[0]);
    if constexpr (kPanels > 1) store_tile<1>(stored[1]);
    if constexpr (kTokenTiles > 1) store_tile<2>(stored[2]);
    if constexpr (kTokenTiles > 1 && kPanels > 1) store_tile<3>(stored[3]);
    for (std::size_t tile = 0; tile < kTokenTiles; ++tile) {
        for (std::size_t panel = 0; panel < kPanels; ++panel) {
            add_tile<kCodes, kBytes>(run, segment, panel, tile * kTileRows, rows, stored[2 * tile + panel]);
        }
    }
}

template <Codes kCodes, bool kBytes, int kPanels>
void multiply_panels(const ProductRun& run, std::size_t tokens, std::size_t rows, std::size_t elements) {
    using X = std::conditional_t<kBytes, std::int8_t, std::uint16_t>;
    alignas(64) std::uint32_t room[2][kSegment * kPanel * sizeof(X) / 4];
    const std::size_t segment_words = run.length / codes_per_word<kCodes>() * run.word_step;
    for (std::size_t segment = 0; segment < run.segments; ++segment) {
        const std::uint32_t* matrices[2] = {};
        for (std::size_t panel = 0; panel < kPanels; ++panel) {
            const std::uint32_t* words = run.words + panel * run.panel_words + segment * segment_words;
            matrices[panel] = as_matrix<kCodes, kBytes>(words, run.word_step, run.length, room[panel]);
        }
        std::size_t token = 0;
        for (; token + 2 * kTileRows <= tokens; token += 2 * kTileRows) {
            multiply_segment<kCodes, kBytes, 2, kPanels>(moved<X>(run, 0, token), segment, rows, elements, matrices);
        }
        for (; token < tokens; token += rows) multiply_segment<kCodes, kBytes, 1, kPanels>(moved<X>(run, 0, token), segment, rows, elements, matrices);
    }
}

// `tokens`: a multiple of kTileRows, or fewer.
template <Codes kCodes, bool kBytes>
void multiply_tiles(const ProductRun& run, std::size_t panels, std::size_t tokens) {
    using X = std::conditional_t<kBytes, std::int8_t, std::uint16_t>;
    const std::size_t rows = std::min(tokens, kTileRows);
    std::size_t elements = kTileBytes / sizeof(X);
    while (run.length % elements != 0) elements -= kGroupElements;
    const TileShapes shapes(rows, elements * sizeof(X));
    std::size_t panel = 0;
    for (; panel + 2 <= panels; panel += 2) multiply_panels<kCodes, kBytes, 2>(moved<X>(run, panel, 0), tokens, rows, elements);
    if (panel < panels) multiply_panels<kCodes, kBytes, 1>(moved<X>(run, panel, 0), tokens, rows, elements);
}

template <bool kBytes>
void multiply_all(const ProductRun& run, std::size_t panels, std::size_t tokens) {
    switch (run.codes) {
        case Codes::int8: return multiply_tiles<Codes::int8, kBytes>(run, panels, tokens);
        case Codes::uint8: return multiply_tiles<Codes::uint8, kBytes>(run, panels, tokens);
        case Codes::int4: return multiply_tiles<Codes::int4, kBytes>(run, panels, tokens);
        case Codes::uint4: return multiply_tiles<Codes::uint4, kBytes>(run, panels, tokens);
        case Codes::f32:
            if constexpr (!kBytes) multiply_tiles<Codes::f32, false>(run, panels, tokens);
            return;
    }
}

void multiply_bytes(const ProductRun& run, std::size_t panels, std::size_t tokens) {
    const std::size_t whole = tokens / kTileRows * kTileRows;
    if (whole != 0) multiply_all<true>(run, panels, whole);
    if (whole != tokens) avx512_vnni_matmul()->multiply_bytes(moved<std::int8_t>(run, 0, whole), panels, tokens - whole);
}

void multiply_bf16(const ProductRun& run, std::size_t panels, std::size_t tokens) {
    const std::size_t whole = tokens / kTileRows * kTileRows;
    if (whole != 0) multiply_all<false>(run, panels, whole);
    if (whole != tokens) multiply_all<false>(moved<std::uint16_t>(run, 0, whole), panels, tokens - whole);
}

}  // namespace

const MatmulKernels* amx_matmul() {
    const MatmulKernels* few = avx512_bf16_matmul();
    if (few == nullptr) return nullptr;
    static const MatmulKernels table{transpose, expand, multiply, multiply_bytes, multiply_bf16, few->multiply_few_bf16};
    return &table;
}

}  // namespace drivetrain

#else

namespace drivetrain {

const MatmulKernels* amx_matmul() { return nullptr; }

}  // namespace drivetrain

#endif

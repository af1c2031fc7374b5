// The inner loops of products with a quantised weight, as each instruction set provides them (matmul.inl). See matmul.h for what they
// are for.
//
// Idea: the lanes of a vector are rows of the weight. Sixteen rows make a panel, stored as columns of 32-bit words: word w of its
// sixteen rows, then word w + 1, where a word holds consecutive codes of a row (four int8, eight int4, one float32). One load then
// serves sixteen rows, an element of the activations is broadcast, and nothing is summed across lanes.
// Invariant: what a row and a token give depends on nothing but them: codes are summed in the order of the elements within a segment, then
// scaled and added, segment after segment, whatever the width of vectors, the number of panels and of tokens. Products of codes with bfloat16,
// float16 or int8 activations are exact in float32, and sums of int8 products within a segment are too, so for these activations all
// instruction sets give the same bits; float32 products are fused where there is an instruction for it. Those of bfloat16 are added in pairs
// where instructions do so.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantize_kernels.h"

namespace drivetrain {

constexpr std::size_t kPanel = 16;     // rows
constexpr std::size_t kManyTokens = 8;  // of bfloat16: from which on matrix instructions are worth their while
constexpr std::size_t kSegment = 512;  // elements that are summed before their sum is scaled, at most: 512 * 255 * 127 < 2^24

// How a word holds codes. Signed integers are in two's complement.
enum class Codes : std::uint8_t { int8, uint8, int4, uint4, f32 };

// Some panels times some tokens, over consecutive segments of one length (a multiple of 16).
struct ProductRun {
    Codes codes;
    const std::uint32_t* words;  // of the first panel, at the first segment: kPanel; the next panel's lie `panel_words` further on
    std::size_t panel_words;
    std::size_t word_step;  // from a word of a panel to the next
    bool ahead;             // whether what follows in memory is what will be read next, so that it is worth asking for
    const float* scales;  // [kPanel] per segment; the next panel's lie `panel_scales` further on
    const float* zeros;   // likewise, or null
    std::size_t panel_scales;
    std::size_t scale_step;  // from a segment to the next, 0 where the segments are parts of one block
    const void* x;  // the first token's activations at the first segment; the next token's lie `x_stride` elements further on
    std::size_t x_stride;
    const float* x_scales;  // one per token, or null for ones; those of the next segment lie `x_tokens` further on
    const float* x_sums;    // sum of x over the segment, before x_scales; needed where there are zeros, and by multiply_bytes
    std::size_t x_tokens;
    std::size_t segments, length;
    float* sums;  // added to: [tokens][sum_stride], of which the first panels * kPanel are the rows'
    std::size_t sum_stride;
};

struct MatmulKernels {
    // to[w][kPanel] = word w of `rows` rows that lie `stride` bytes apart, zeros for rows that are missing.
    void (*transpose)(const void* from, std::size_t stride, std::size_t rows, std::size_t words, std::uint32_t* to);
    // to[k][kPanel] = element k of the panel's rows, before scaling; `format`: a float's; elements % kGroup == 0.
    void (*expand)(Format format, const std::uint32_t* words, std::size_t elements, float* to);
    // x: float32.
    void (*multiply)(const ProductRun& run, std::size_t panels, std::size_t tokens);
    // x: int8, in the order of `byte_order`; codes: integers. Null where float32 does as well.
    void (*multiply_bytes)(const ProductRun& run, std::size_t panels, std::size_t tokens);
    // x: bfloat16, with int4 codes in the order of `pair_order`. Null where float32 does as well.
    void (*multiply_bf16)(const ProductRun& run, std::size_t panels, std::size_t tokens);
    // The same where all tokens are fewer than kManyTokens.
    void (*multiply_few_bf16)(const ProductRun& run, std::size_t panels, std::size_t tokens);
};

// Place in each eight int8 activations of element k, for multiply_bytes with int4 codes: the even nibbles of a word and then the odd ones.
constexpr std::size_t byte_order(std::size_t k) { return (k & ~std::size_t{7}) | (k & 1) << 2 | (k & 7) >> 1; }

// Place in each eight bfloat16 activations of element k, for multiply_bf16 with int4 codes: pairs are as far apart as the halves of a word.
constexpr std::size_t pair_order(std::size_t k) { return (k & ~std::size_t{7}) | (k & 3) << 1 | (k & 7) >> 2; }

const MatmulKernels* baseline_matmul();
// Null where the architecture or the compiler of this build lacks the instruction set.
const MatmulKernels* avx2_matmul();
const MatmulKernels* avx512_matmul();
const MatmulKernels* avx512_vnni_matmul();
const MatmulKernels* avx512_bf16_matmul();
const MatmulKernels* amx_matmul();

}  // namespace drivetrain

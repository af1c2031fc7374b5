// Products with panels of a quantised weight, over the vector type `V` that the including file defines in the unnamed namespace.
// See matmul_kernels.h for the layout and the order of sums.

namespace drivetrain {
namespace {

// A panel is kVectors registers wide.
constexpr int kVectors = static_cast<int>(kPanel) / V::lanes;

template <Codes kCodes>
constexpr int codes_per_word() {
    return kCodes == Codes::f32 ? 1 : kCodes == Codes::int8 || kCodes == Codes::uint8 ? 4 : 8;
}

// Panels at a time for so many tokens: enough independent sums to hide the latency of an addition.
constexpr int panels_at_once(int tokens) { return tokens * kVectors >= 4 ? 1 : 4 / (tokens * kVectors); }

// What V::code takes off codes without a sign, so that sums stay small where weights are.
template <Codes kCodes>
constexpr int center() {
    return kCodes == Codes::uint8 ? 128 : kCodes == Codes::uint4 ? 8 : 0;
}

// What scaling the sums of a segment needs to know of a token.
struct TokenScale {
    TokenScale(const ProductRun& run, std::size_t segment, std::size_t token, int center) {
        const std::size_t at = segment * run.x_tokens + token;
        const float own = run.x_scales != nullptr ? run.x_scales[at] : 1.0f, sum = run.zeros != nullptr ? run.x_sums[at] : 0.0f;
        scale = V::set(own);
        scaled_sum = V::set(sum * own);
        centered_sum = V::set(sum * static_cast<float>(center));
    }
    V::Reg scale, scaled_sum, centered_sum;
};

// sum * (scale of the weight * scale of x) + zero * (sum of x * scale of x), where the codes in the sum have `kCenter` taken off. With int8
// activations that is put back, exactly; else it is made part of the zero.
template <int kCenter>
inline V::Reg scaled(const ProductRun& run, V::Reg sum, const TokenScale& token, const float* scales, const float* zeros) {
    const V::Reg scale = V::load(scales);
    if (kCenter != 0 && run.x_scales != nullptr) sum = V::add(sum, token.centered_sum);
    const V::Reg value = V::mul(sum, V::mul(scale, token.scale));
    if (run.zeros == nullptr) return value;
    V::Reg zero = V::load(zeros);
    if (kCenter != 0 && run.x_scales == nullptr) zero = V::add(zero, V::mul(scale, V::set(static_cast<float>(kCenter))));
    return V::add(value, V::mul(zero, token.scaled_sum));
}

// Adds what a segment has summed.
template <int kCenter, int kPanels, int kTokens>
inline __attribute__((always_inline)) void add_scaled(const ProductRun& run, std::size_t segment, const V::Reg (&sums)[kTokens][kPanels * kVectors],
                V::Reg (&totals)[kTokens][kPanels * kVectors]) {
    for (int t = 0; t < kTokens; ++t) {
        const TokenScale token(run, segment, static_cast<std::size_t>(t), kCenter);
        for (int i = 0; i < kPanels * kVectors; ++i) {
            const std::size_t place = static_cast<std::size_t>(i / kVectors) * run.panel_scales + segment * run.scale_step +
                                      static_cast<std::size_t>(i % kVectors * V::lanes);
            totals[t][i] = V::add(totals[t][i], scaled<kCenter>(run, sums[t][i], token, run.scales + place, run.zeros + place));
        }
    }
}

template <int kPanels>
inline void load_words(const ProductRun& run, std::size_t word, V::Words (&words)[kPanels * kVectors]) {
    for (int i = 0; i < kPanels * kVectors; ++i) {
        words[i] = V::load_words(run.words + static_cast<std::size_t>(i / kVectors) * run.panel_words + word * run.word_step +
                                 static_cast<std::size_t>(i % kVectors * V::lanes));
    }
}

// The processor guesses what comes next within a page only, so it is told.
template <int kPanels>
inline void read_ahead(const ProductRun& run, std::size_t word) {
    constexpr std::size_t kAhead = 16;  // words
    if (!run.ahead) return;
    for (std::size_t panel = 0; panel < kPanels; ++panel) __builtin_prefetch(run.words + panel * run.panel_words + (word + kAhead) * run.word_step);
}

template <int kPanels>
inline void read_scales_ahead(const ProductRun& run, std::size_t segment) {
    constexpr std::size_t kAhead = 4;  // segments
    if (!run.ahead) return;
    for (std::size_t panel = 0; panel < kPanels; ++panel) {
        const std::size_t place = panel * run.panel_scales + (segment + kAhead) * run.scale_step;
        __builtin_prefetch(run.scales + place);
        if (run.zeros != nullptr) __builtin_prefetch(run.zeros + place);
    }
}

// Calls body(segment, sums) for every segment, which writes the sums as float32, and scales and adds them.
template <int kCenter, int kPanels, int kTokens, typename Body>
inline void over_segments(const ProductRun& run, const Body& body) {
    V::Reg totals[kTokens][kPanels * kVectors];
    for (int t = 0; t < kTokens; ++t) {
        for (int i = 0; i < kPanels * kVectors; ++i) totals[t][i] = V::load(run.sums + t * run.sum_stride + static_cast<std::size_t>(i * V::lanes));
    }
    for (std::size_t segment = 0; segment < run.segments; ++segment) {
        V::Reg sums[kTokens][kPanels * kVectors];
        read_scales_ahead<kPanels>(run, segment);
        body(segment, sums);
        add_scaled<kCenter, kPanels, kTokens>(run, segment, sums, totals);
    }
    for (int t = 0; t < kTokens; ++t) {
        for (int i = 0; i < kPanels * kVectors; ++i) V::store(run.sums + t * run.sum_stride + static_cast<std::size_t>(i * V::lanes), totals[t][i]);
    }
}

// One element of each token times its codes.
template <Codes kCodes, int kPanels, int kTokens, int kPlace>
inline void add_products(const float* x, std::size_t x_stride, const V::Words (&words)[kPanels * kVectors], V::Reg (&sums)[kTokens][kPanels * kVectors]) {
    V::Reg codes[kPanels * kVectors];
    for (int i = 0; i < kPanels * kVectors; ++i) codes[i] = V::template code<kCodes, kPlace>(words[i]);
    for (int t = 0; t < kTokens; ++t) {
        const V::Reg element = V::set(x[t * x_stride + kPlace]);
        for (int i = 0; i < kPanels * kVectors; ++i) sums[t][i] = V::fma(codes[i], element, sums[t][i]);
    }
}

template <Codes kCodes, int kPanels, int kTokens>
void float_tile(const ProductRun& run) {
    constexpr int kPerWord = codes_per_word<kCodes>();
    over_segments<center<kCodes>(), kPanels, kTokens>(run, [&](std::size_t segment, V::Reg(&sums)[kTokens][kPanels * kVectors]) {
        for (auto& token : sums) {
            for (V::Reg& sum : token) sum = V::set(0.0f);
        }
        const float* x = static_cast<const float*>(run.x) + segment * run.length;
        const std::size_t words_each = run.length / kPerWord, first = segment * words_each;
        for (std::size_t word = 0; word < words_each; ++word, x += kPerWord) {
            V::Words words[kPanels * kVectors];
            load_words<kPanels>(run, first + word, words);
            read_ahead<kPanels>(run, first + word);
            add_products<kCodes, kPanels, kTokens, 0>(x, run.x_stride, words, sums);
            if constexpr (kPerWord >= 4) {
                add_products<kCodes, kPanels, kTokens, 1>(x, run.x_stride, words, sums);
                add_products<kCodes, kPanels, kTokens, 2>(x, run.x_stride, words, sums);
                add_products<kCodes, kPanels, kTokens, 3>(x, run.x_stride, words, sums);
            }
            if constexpr (kPerWord == 8) {
                add_products<kCodes, kPanels, kTokens, 4>(x, run.x_stride, words, sums);
                add_products<kCodes, kPanels, kTokens, 5>(x, run.x_stride, words, sums);
                add_products<kCodes, kPanels, kTokens, 6>(x, run.x_stride, words, sums);
                add_products<kCodes, kPanels, kTokens, 7>(x, run.x_stride, words, sums);
            }
        }
    });
}

template <typename X>
ProductRun moved(const ProductRun& run, std::size_t panel, std::size_t token) {
    ProductRun part = run;
    part.words += panel * run.panel_words;
    part.scales += panel * run.panel_scales;
    if (run.zeros != nullptr) part.zeros += panel * run.panel_scales;
    part.x = static_cast<const X*>(run.x) + token * run.x_stride;
    if (run.x_scales != nullptr) part.x_scales += token;
    if (run.x_sums != nullptr) part.x_sums += token;
    part.sums += token * run.sum_stride + panel * kPanel;
    return part;
}

// Cuts the work into tiles of at most V::tokens tokens. `Tile` has a static run<kCodes, kPanels, kTokens>(run) and the type X of activations.
template <typename Tile, Codes kCodes, int kTokens>
void tokens_tile(const ProductRun& run, std::size_t panels, std::size_t token) {
    constexpr int kPanels = panels_at_once(kTokens);
    std::size_t panel = 0;
    for (; panel + kPanels <= panels; panel += kPanels) Tile::template run<kCodes, kPanels, kTokens>(moved<typename Tile::X>(run, panel, token));
    if constexpr (kPanels > 1) {
        for (; panel < panels; ++panel) Tile::template run<kCodes, 1, kTokens>(moved<typename Tile::X>(run, panel, token));
    }
}

template <typename Tile, Codes kCodes>
void all_tiles(const ProductRun& run, std::size_t panels, std::size_t tokens) {
    constexpr auto kMost = static_cast<std::size_t>(V::tokens);
    std::size_t token = 0;
    for (; token + kMost <= tokens; token += kMost) tokens_tile<Tile, kCodes, V::tokens>(run, panels, token);
    if constexpr (kMost > 4) {
        for (; token + 4 <= tokens; token += 4) tokens_tile<Tile, kCodes, 4>(run, panels, token);
    }
    if constexpr (kMost > 2) {
        for (; token + 2 <= tokens; token += 2) tokens_tile<Tile, kCodes, 2>(run, panels, token);
    }
    for (; token < tokens; ++token) tokens_tile<Tile, kCodes, 1>(run, panels, token);
}

struct FloatTile {
    using X = float;
    template <Codes kCodes, int kPanels, int kTokens>
    static void run(const ProductRun& part) {
        float_tile<kCodes, kPanels, kTokens>(part);
    }
};

void multiply(const ProductRun& run, std::size_t panels, std::size_t tokens) {
    switch (run.codes) {
        case Codes::int8: return all_tiles<FloatTile, Codes::int8>(run, panels, tokens);
        case Codes::uint8: return all_tiles<FloatTile, Codes::uint8>(run, panels, tokens);
        case Codes::int4: return all_tiles<FloatTile, Codes::int4>(run, panels, tokens);
        case Codes::uint4: return all_tiles<FloatTile, Codes::uint4>(run, panels, tokens);
        case Codes::f32: return all_tiles<FloatTile, Codes::f32>(run, panels, tokens);
    }
}

// The number that a code of `kMantissa` and exponent bits below its sign bit stands for. Magnitudes from kSpecial on are no numbers; kInfinite: the
// first of them is an infinity.
template <int kMantissa, int kBias, int kSignBit, std::uint32_t kSpecial, bool kInfinite>
inline float number(std::uint32_t code) {
    const std::uint32_t magnitude = code & ((1u << kSignBit) - 1u), sign = (code >> kSignBit & 1u) << 31;
    const std::uint32_t normal = (magnitude << (23 - kMantissa)) + (static_cast<std::uint32_t>(127 - kBias) << 23);
    const float least = float_of(static_cast<std::uint32_t>(127 + 1 - kBias - kMantissa) << 23);  // the smallest subnormal
    std::uint32_t bits = magnitude >> kMantissa == 0 ? bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * least) : normal;
    bits = magnitude >= kSpecial ? (kInfinite && magnitude == kSpecial ? 0x7f800000u : 0x7fc00000u) : bits;
    return float_of(bits | sign);
}

template <typename Number>
void expand_bytes(Number number_of, const std::uint32_t* words, std::size_t elements, float* to) {
    for (std::size_t word = 0; word < elements / 4; ++word, words += kPanel) {
        for (std::size_t k = 0; k < 4; ++k, to += kPanel) {
            for (std::size_t row = 0; row < kPanel; ++row) to[row] = number_of(words[row] >> (8 * k) & 255u);
        }
    }
}

// Sixteen codes of six bits are three words; two of the sixteen lie across words.
void expand_e3m2(const std::uint32_t* words, std::size_t elements, float* to) {
    for (std::size_t group = 0; group < elements / 16; ++group, words += 3 * kPanel) {
        for (std::size_t k = 0; k < 16; ++k, to += kPanel) {
            const std::uint32_t* low = words + 6 * k / 32 * kPanel;
            const std::uint32_t* high = words + (6 * k + 5) / 32 * kPanel;
            const std::size_t shift = 6 * k % 32;
            const std::size_t back = (32 - shift) % 32;  // where both are one word, its lowest bits are masked out of what this adds
            const std::uint32_t mask = low == high ? 0u : 63u;
            for (std::size_t row = 0; row < kPanel; ++row) {
                to[row] = number<2, 3, 5, 0x20u, false>((low[row] >> shift | (high[row] << back & mask)) & 63u);
            }
        }
    }
}

void expand(Format format, const std::uint32_t* words, std::size_t elements, float* to) {
    switch (format) {
        case Format::e4m3: return expand_bytes([](std::uint32_t code) { return number<3, 7, 7, 0x7fu, false>(code); }, words, elements, to);
        case Format::e5m2: return expand_bytes([](std::uint32_t code) { return number<2, 15, 7, 0x7cu, true>(code); }, words, elements, to);
        case Format::e3m2: return expand_e3m2(words, elements, to);
        case Format::int8:
        case Format::int4: return;  // never asked for
    }
}

void transpose(const void* from, std::size_t stride, std::size_t rows, std::size_t words, std::uint32_t* to) {
    const auto* bytes = static_cast<const unsigned char*>(from);
    std::size_t done = rows == kPanel ? V::transpose(bytes, stride, words, to) : 0;
    for (; done < words; ++done) {
        for (std::size_t row = 0; row < kPanel; ++row) {
            std::uint32_t word = 0;
            if (row < rows) __builtin_memcpy(&word, bytes + row * stride + done * sizeof word, sizeof word);
            to[done * kPanel + row] = word;
        }
    }
}

}  // namespace
}  // namespace drivetrain

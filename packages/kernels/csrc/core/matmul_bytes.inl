// Products with int8 activations, for vector types that multiply bytes. Included after matmul.inl; see there.

namespace drivetrain {
namespace {

// Sums of products of bytes, integers throughout. V::byte_operand moves the codes into the range that V::dot takes, by V::byte_offset.
template <Codes kCodes, int kPanels, int kTokens>
void byte_tile(const ProductRun& run) {
    constexpr std::size_t kPerWord = codes_per_word<kCodes>();
    constexpr std::size_t kHalves = kPerWord / 4;
    over_segments<0, kPanels, kTokens>(run, [&](std::size_t segment, V::Reg(&sums)[kTokens][kPanels * kVectors]) {
        V::Words dots[kTokens][kPanels * kVectors];
        for (int t = 0; t < kTokens; ++t) {
            const auto x_sum = static_cast<std::int32_t>(run.x_sums[segment * run.x_tokens + static_cast<std::size_t>(t)]);
            for (V::Words& dot : dots[t]) dot = V::set_words(-V::template byte_offset<kCodes>() * x_sum);
        }
        const std::int8_t* x = static_cast<const std::int8_t*>(run.x) + segment * run.length;
        const std::size_t words_each = run.length / kPerWord, first = segment * words_each;
        for (std::size_t word = 0; word < words_each; ++word) {
            V::Words words[kPanels * kVectors];
            load_words<kPanels>(run, first + word, words);
            read_ahead<kPanels>(run, first + word);
            for (std::size_t half = 0; half < kHalves; ++half, x += 4) {
                typename V::Bytes bytes[kPanels * kVectors];
                for (int i = 0; i < kPanels * kVectors; ++i) {
                    bytes[i] = half == 0 ? V::template bytes<kCodes, 0>(words[i]) : V::template bytes<kCodes, 1>(words[i]);
                }
                for (int t = 0; t < kTokens; ++t) {
                    std::int32_t four;
                    __builtin_memcpy(&four, x + t * run.x_stride, sizeof four);
                    for (int i = 0; i < kPanels * kVectors; ++i) dots[t][i] = V::template dot<kCodes>(dots[t][i], bytes[i], four);
                }
            }
        }
        for (int t = 0; t < kTokens; ++t) {
            for (int i = 0; i < kPanels * kVectors; ++i) sums[t][i] = V::to_float(dots[t][i]);
        }
    });
}

struct ByteTile {
    using X = std::int8_t;
    template <Codes kCodes, int kPanels, int kTokens>
    static void run(const ProductRun& part) {
        byte_tile<kCodes, kPanels, kTokens>(part);
    }
};

void multiply_bytes(const ProductRun& run, std::size_t panels, std::size_t tokens) {
    switch (run.codes) {
        case Codes::int8: return all_tiles<ByteTile, Codes::int8>(run, panels, tokens);
        case Codes::uint8: return all_tiles<ByteTile, Codes::uint8>(run, panels, tokens);
        case Codes::int4: return all_tiles<ByteTile, Codes::int4>(run, panels, tokens);
        case Codes::uint4: return all_tiles<ByteTile, Codes::uint4>(run, panels, tokens);
        case Codes::f32: return;  // never asked for
    }
}

}  // namespace
}  // namespace drivetrain

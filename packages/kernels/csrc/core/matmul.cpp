#include "matmul.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu.h"
#include "elementwise.h"
#include "matmul_kernels.h"
#include "pool.h"

namespace drivetrain {
namespace {

constexpr std::size_t kPiecePanels = 4;   // panels that are worked on at a time
constexpr std::size_t kTurns = 8;         // about how many pieces a thread takes
constexpr std::size_t kTokenBlock = 128;  // tokens whose sums are kept at a time
constexpr std::size_t kLeastBlock = 32;   // and how few they may become where there are few panels: unpacking is worth less then
constexpr std::size_t kBatchRun = 1024;   // about how many elements of a row stay in cache while all tokens pass over them
constexpr std::size_t kMostBlocks = kSegment / kGroup;  // in a run of a weight without panels
constexpr std::size_t kWorthThreads = 1 << 17;  // bytes of weight, times a measure of tokens, below which waking threads costs more than it brings

std::size_t divided_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

std::size_t bits_of_code(Format format) { return format == Format::int4 ? 4 : format == Format::e3m2 ? 6 : 8; }

bool is_integer(Format format) { return format == Format::int8 || format == Format::int4; }

Codes codes_of(const QuantRule& rule) {
    if (rule.format == Format::int8) return rule.symmetric ? Codes::int8 : Codes::uint8;
    if (rule.format == Format::int4) return rule.symmetric ? Codes::int4 : Codes::uint4;
    return Codes::f32;  // expanded first
}

// How a row is cut: blocks have a scale, segments are blocks or, of long ones, parts.
struct Shape {
    explicit Shape(const QuantizedWeight& weight)
        : in(weight.in),
          block_size(weight.rule.block_size),
          blocks(in / block_size),
          per_block(divided_up(block_size, kSegment)),
          segments(blocks * per_block),
          bits(bits_of_code(weight.rule.format)),
          row_words(in * bits / 32),
          panels(divided_up(weight.out, kPanel)) {}

    std::size_t start(std::size_t segment) const { return segment / per_block * block_size + segment % per_block * kSegment; }
    std::size_t length(std::size_t segment) const { return std::min(kSegment, block_size - segment % per_block * kSegment); }

    // How many segments from this one on are of one length and, where blocks have several, of one block: at most about `elements`, at least one.
    std::size_t run(std::size_t segment, std::size_t elements) const {
        const std::size_t most = std::max<std::size_t>(1, elements / length(segment));
        if (per_block == 1) return std::min(most, segments - segment);
        const std::size_t whole = block_size / kSegment, part = segment % per_block;
        return part < whole ? std::min(most, whole - part) : 1;
    }

    std::size_t in, block_size, blocks, per_block, segments, bits, row_words, panels;
};

struct Product {
    explicit Product(const QuantizedWeight& of) : weight(of), shape(of), table(kernels()), loops(*table.matmul), integer(is_integer(of.rule.format)) {}

    const QuantizedWeight& weight;
    Shape shape;
    const KernelTable& table;  // one for the whole call: another thread may choose another
    const MatmulKernels& loops;
    bool integer;  // the codes
};

// to[word][kPanel]: words [first, first + count) of 32 bits of a panel's rows, which have `row_words`.
void transpose_panel(const Product& product, const void* from, std::size_t panel, std::size_t row_words, std::size_t first, std::size_t count, void* to) {
    const std::size_t row = panel * kPanel, stride = row_words * sizeof(std::uint32_t);
    product.loops.transpose(static_cast<const char*>(from) + row * stride + first * sizeof(std::uint32_t), stride,
                            std::min(kPanel, product.weight.out - row), count, static_cast<std::uint32_t*>(to));
}

// Where a panel lies among all, which are interleaved in fours where codes are integers: those of other formats are expanded one at a time.
struct PanelPlace {
    PanelPlace(const Product& product, std::size_t panel) {
        const std::size_t most = product.integer ? kPiecePanels : 1, first = panel / most * most;
        step = std::min(most, product.shape.panels - first) * kPanel;
        start = first * kPanel;
        inside = (panel - first) * kPanel;
    }
    // Of a column of rows that have `columns`: the sixteen rows' elements lie together, those of the next column `step` further on.
    std::size_t at(std::size_t columns, std::size_t column) const { return start * columns + column * step + inside; }
    std::size_t start, inside, step;
};

// The activations as the inner loops read them, with what they need of each segment.
class Tokens {
public:
    Tokens(const DenseArray& x, std::size_t tokens, const Product& product, Activations activations, int threads)
        : product_(product), shape_(product.shape), count_(tokens), form_(form_of(x, product, activations)) {
        if (activations == Activations::int8) {
            quantise(x, threads);
        } else if (form_ == Form::floats && x.dtype != Dtype::f32) {
            floats_.reset(new float[tokens * shape_.in]);
            each_token(threads, [&](std::size_t token) {
                const char* from = static_cast<const char*>(x.data) + token * shape_.in * size_of(x.dtype);
                convert(product.table, from, x.dtype, floats_.get() + token * shape_.in, Dtype::f32, shape_.in);
            });
        }
        read_ = static_cast<const char*>(form_ == Form::bytes ? bytes_.get() : floats_ != nullptr ? floats_.get() : x.data);
        if (form_ == Form::bytes || product.weight.zeros != nullptr) add_up(threads);
        if (form_ == Form::bytes && shape_.bits == 4) each_token(threads, [&](std::size_t token) { reorder(bytes_.get() + token * shape_.in); });
        if (form_ == Form::bf16 && shape_.bits == 4) pair_up(static_cast<const std::uint16_t*>(x.data), threads);
    }

    // The inner loop for tokens like these.
    auto loop() const {
        const MatmulKernels& loops = product_.loops;
        if (form_ == Form::bf16) return count_ < kManyTokens ? loops.multiply_few_bf16 : loops.multiply_bf16;
        return form_ == Form::bytes ? loops.multiply_bytes : loops.multiply;
    }

    // Sets what a run needs to know of the tokens from `token` on.
    void describe(ProductRun& run, std::size_t token, std::size_t segment) const {
        const std::size_t at = segment * count_ + token;
        run.x = read_ + (token * shape_.in + shape_.start(segment)) * element_bytes();
        run.x_stride = shape_.in;
        run.x_scales = scales_.empty() ? nullptr : scales_.data() + at;
        run.x_sums = sums_.empty() ? nullptr : sums_.data() + at;
        run.x_tokens = count_;
    }

private:
    enum class Form : std::uint8_t { floats, bytes, bf16 };

    static Form form_of(const DenseArray& x, const Product& product, Activations activations) {
        const MatmulKernels& loops = product.loops;
        if (activations == Activations::int8) return product.integer && loops.multiply_bytes != nullptr ? Form::bytes : Form::floats;
        return x.dtype == Dtype::bf16 && loops.multiply_bf16 != nullptr ? Form::bf16 : Form::floats;
    }

    std::size_t element_bytes() const { return form_ == Form::floats ? sizeof(float) : form_ == Form::bf16 ? 2 : 1; }

    template <typename Body>
    void each_token(int threads, const Body& body) const {
        Pool::shared().run(count_, threads, body);
    }

    void quantise(const DenseArray& x, int threads) {
        const std::size_t count = count_ * shape_.in, blocks = count_ * shape_.blocks;
        bytes_.reset(new std::int8_t[count]);
        std::vector<float> scales(blocks);
        const QuantRule rule{Format::int8, true, shape_.block_size};
        quantize(x, count, {rule, reinterpret_cast<std::uint8_t*>(bytes_.get()), scales.data(), nullptr}, {false, 0, 0}, threads);
        scales_.resize(count_ * shape_.segments);
        for (std::size_t segment = 0; segment < shape_.segments; ++segment) {
            for (std::size_t token = 0; token < count_; ++token) {
                scales_[segment * count_ + token] = scales[token * shape_.blocks + segment / shape_.per_block];
            }
        }
        if (form_ == Form::bytes) return;
        floats_.reset(new float[count]);
        for (std::size_t i = 0; i < count; ++i) floats_[i] = static_cast<float>(bytes_[i]);
    }

    void add_up(int threads) {
        sums_.resize(count_ * shape_.segments);
        each_token(threads, [&](std::size_t token) {
            for (std::size_t segment = 0; segment < shape_.segments; ++segment) {
                const char* from = read_ + (token * shape_.in + shape_.start(segment)) * element_bytes();
                sums_[segment * count_ + token] = sum(from, shape_.length(segment));
            }
        });
    }

    float sum(const char* from, std::size_t count) const {
        if (form_ == Form::bytes) {
            const auto* x = reinterpret_cast<const std::int8_t*>(from);
            std::int32_t total = 0;
            for (std::size_t i = 0; i < count; ++i) total += x[i];
            return static_cast<float>(total);
        }
        float room[kSegment];
        if (form_ == Form::bf16) convert(product_.table, from, Dtype::bf16, room, Dtype::f32, count);
        const float* x = form_ == Form::bf16 ? room : reinterpret_cast<const float*>(from);
        float lanes[kGroup] = {};
        for (std::size_t i = 0; i < count; i += kGroup) {
            for (std::size_t k = 0; k < kGroup; ++k) lanes[k] += x[i + k];
        }
        float total = 0.0f;
        for (const float lane : lanes) total += lane;
        return total;
    }

    // `byte_order`, eight bytes at a time in a register.
    void reorder(std::int8_t* x) const {
        const auto even_bytes = [](std::uint64_t a) {
            a &= 0x00ff00ff00ff00ffu;
            a = (a | a >> 8) & 0x0000ffff0000ffffu;
            return (a | a >> 16) & 0xffffffffu;
        };
        for (std::size_t i = 0; i < shape_.in; i += sizeof(std::uint64_t)) {
            std::uint64_t eight;
            std::memcpy(&eight, x + i, sizeof eight);
            eight = even_bytes(eight) | even_bytes(eight >> 8) << 32;
            std::memcpy(x + i, &eight, sizeof eight);
        }
    }

    // `pair_order`, into memory of its own.
    void pair_up(const std::uint16_t* x, int threads) {
        halves_.reset(new std::uint16_t[count_ * shape_.in]);
        each_token(threads, [&](std::size_t token) {
            const std::uint16_t* from = x + token * shape_.in;
            std::uint16_t* to = halves_.get() + token * shape_.in;
            for (std::size_t i = 0; i < shape_.in; i += 8) {
                for (std::size_t k = 0; k < 8; ++k) to[i + pair_order(k)] = from[i + k];
            }
        });
        read_ = reinterpret_cast<const char*>(halves_.get());
    }

    const Product& product_;
    const Shape& shape_;
    std::size_t count_;
    Form form_;
    std::unique_ptr<float[]> floats_;
    std::unique_ptr<std::uint16_t[]> halves_;
    std::unique_ptr<std::int8_t[]> bytes_;
    std::vector<float> scales_, sums_;  // [segments][tokens]
    const char* read_ = nullptr;
};

// The codes, scales and zeros of some panels over a run of segments: where they lie or, made for the purpose, in its own memory.
class Panels {
public:
    explicit Panels(const Product& product) : product_(product), weight_(product.weight), shape_(product.shape) {}

    // How many elements of a row a run may have, besides that it has at least one segment.
    std::size_t run_elements(std::size_t tokens) const {
        if (!weight_.panels || !product_.integer) return kSegment;
        return tokens <= 8 ? shape_.in : kBatchRun;
    }

    // How many panels `load` takes at a time.
    std::size_t at_once() const { return product_.integer ? kPiecePanels : 1; }

    void load(ProductRun& run, std::size_t panel, std::size_t count, std::size_t segment, std::size_t segments) {
        const std::size_t block = segment / shape_.per_block, blocks = shape_.per_block == 1 ? segments : 1;
        const std::size_t elements = segments * shape_.length(segment);
        const std::size_t first_word = shape_.start(segment) * shape_.bits / 32, words = elements * shape_.bits / 32;
        run.codes = codes_of(weight_.rule);
        if (weight_.panels) {
            const PanelPlace of(product_, panel);
            const std::size_t place = of.at(shape_.blocks, block);
            run.words = static_cast<const std::uint32_t*>(weight_.values) + of.at(shape_.row_words, first_word);
            run.panel_words = run.panel_scales = kPanel;
            run.word_step = of.step;
            run.ahead = product_.integer;
            run.scales = weight_.scales + place;
            run.zeros = weight_.zeros != nullptr ? weight_.zeros + place : nullptr;
            run.scale_step = of.step;
        } else {
            run.words = words_;
            run.word_step = run.scale_step = kPanel;
            run.panel_words = words * kPanel;
            run.scales = scales_;
            run.zeros = weight_.zeros != nullptr ? zeros_ : nullptr;
            run.panel_scales = kMostBlocks * kPanel;
            for (std::size_t i = 0; i < count; ++i) {
                transpose(weight_.values, panel + i, shape_.row_words, first_word, words, words_ + i * run.panel_words);
                transpose(weight_.scales, panel + i, shape_.blocks, block, blocks, scales_ + i * run.panel_scales);
                if (weight_.zeros != nullptr) transpose(weight_.zeros, panel + i, shape_.blocks, block, blocks, zeros_ + i * run.panel_scales);
            }
        }
        if (shape_.per_block > 1) run.scale_step = 0;
        if (product_.integer) return;
        product_.loops.expand(weight_.rule.format, run.words, elements, expanded_);
        run.word_step = kPanel;
        run.words = reinterpret_cast<const std::uint32_t*>(expanded_);
    }

private:
    // Columns [first, first + count) of 32 bits of a panel's rows.
    void transpose(const void* from, std::size_t panel, std::size_t row_words, std::size_t first, std::size_t count, void* to) const {
        transpose_panel(product_, from, panel, row_words, first, count, to);
    }

    const Product& product_;
    const QuantizedWeight& weight_;
    const Shape& shape_;
    alignas(64) std::uint32_t words_[kPiecePanels * kSegment / 4 * kPanel];
    alignas(64) float scales_[kPiecePanels * kMostBlocks * kPanel], zeros_[kPiecePanels * kMostBlocks * kPanel];
    alignas(64) float expanded_[kSegment * kPanel];
};

// A few panels at a time, times a block of tokens.
class Piece {
public:
    Piece(const Product& product, const Tokens& tokens, const DenseArray& bias, const DenseArray& y)
        : product_(product), tokens_(tokens), bias_(bias), y_(y), panels_(product) {}

    void run(std::size_t first_panel, std::size_t first_token, std::size_t tokens) {
        const Shape& shape = product_.shape;
        const std::size_t count = std::min(kPiecePanels, shape.panels - first_panel), elements = panels_.run_elements(tokens);
        std::fill_n(sums_, tokens * kWidth, 0.0f);
        for (std::size_t segment = 0, segments = 0; segment < shape.segments; segment += segments) {
            segments = shape.run(segment, elements);
            for (std::size_t panel = 0; panel < count; panel += panels_.at_once()) {
                ProductRun run{};
                const std::size_t some = std::min(panels_.at_once(), count - panel);
                panels_.load(run, first_panel + panel, some, segment, segments);
                tokens_.describe(run, first_token, segment);
                run.segments = segments;
                run.length = shape.length(segment);
                run.sums = sums_ + panel * kPanel;
                run.sum_stride = kWidth;
                tokens_.loop()(run, some, tokens);
            }
        }
        write(first_panel * kPanel, std::min(count * kPanel, product_.weight.out - first_panel * kPanel), first_token, tokens);
    }

private:
    static constexpr std::size_t kWidth = kPiecePanels * kPanel;

    // Rows [row, row + rows) of y for some tokens.
    void write(std::size_t row, std::size_t rows, std::size_t first_token, std::size_t tokens) {
        float added[kWidth] = {};
        if (bias_.data != nullptr) {
            convert(product_.table, static_cast<const char*>(bias_.data) + row * size_of(bias_.dtype), bias_.dtype, added, Dtype::f32, rows);
        }
        char* to = static_cast<char*>(y_.data) + (first_token * product_.weight.out + row) * size_of(y_.dtype);
        for (std::size_t token = 0; token < tokens; ++token, to += product_.weight.out * size_of(y_.dtype)) {
            float* sums = sums_ + token * kWidth;
            if (bias_.data != nullptr) {
                for (std::size_t i = 0; i < rows; ++i) sums[i] += added[i];
            }
            convert(product_.table, sums, Dtype::f32, to, y_.dtype, rows);
        }
    }

    const Product& product_;
    const Tokens& tokens_;
    const DenseArray &bias_, &y_;
    Panels panels_;
    alignas(64) float sums_[kTokenBlock * kWidth];
};

}  // namespace

std::size_t panel_rows(std::size_t out) { return divided_up(out, kPanel) * kPanel; }

void prepare_weight(const QuantizedWeight& weight, void* values, float* scales, float* zeros, int threads) {
    const Product product(weight);
    const Shape& shape = product.shape;
    Pool::shared().run(shape.panels, threads, [&](std::size_t panel) {
        const auto move = [&](const void* from, std::size_t words, void* to) {
            constexpr std::size_t kSome = 64;
            std::uint32_t some[kSome * kPanel];
            const PanelPlace of(product, panel);
            for (std::size_t first = 0; first < words; first += kSome) {
                const std::size_t count = std::min(kSome, words - first);
                transpose_panel(product, from, panel, words, first, count, some);
                for (std::size_t word = 0; word < count; ++word) {
                    std::copy_n(some + word * kPanel, kPanel, static_cast<std::uint32_t*>(to) + of.at(words, first + word));
                }
            }
        };
        move(weight.values, shape.row_words, values);
        move(weight.scales, shape.blocks, scales);
        if (weight.zeros != nullptr) move(weight.zeros, shape.blocks, zeros);
    });
}

void quantized_matmul(const DenseArray& x, std::size_t tokens, const QuantizedWeight& weight, const DenseArray& bias, const DenseArray& y,
                      Activations activations, int threads) {
    const Product product(weight);
    const std::size_t bytes = product.shape.row_words * sizeof(std::uint32_t) * weight.out;
    if (bytes * (1 + tokens / 4) < kWorthThreads) threads = 1;
    const Tokens prepared(x, tokens, product, activations, threads);
    // A thread takes neighbours, so that what it reads ahead is its own, but little enough that all end together; where that makes few pieces,
    // it takes fewer tokens at a time.
    const std::size_t groups = divided_up(product.shape.panels, kPiecePanels), wanted = static_cast<std::size_t>(threads) * kTurns;
    const std::size_t each = std::max<std::size_t>(1, groups / wanted), rows = divided_up(groups, each);
    std::size_t block = kTokenBlock;
    while (threads > 1 && block > kLeastBlock && rows * divided_up(tokens, block) < wanted) block /= 2;
    const std::size_t cuts = rows < wanted ? std::max<std::size_t>(1, divided_up(tokens, block)) : 1;
    Pool::shared().run(rows * cuts, threads, [&](std::size_t index) {
        Piece piece(product, prepared, bias, y);
        const std::size_t first = index / cuts * each, last = std::min(groups, first + each);
        for (std::size_t group = first; group < last; ++group) {
            for (std::size_t token = index % cuts * block; token < tokens; token += cuts * block) {
                piece.run(group * kPiecePanels, token, std::min(block, tokens - token));
            }
        }
    });
}

}  // namespace drivetrain

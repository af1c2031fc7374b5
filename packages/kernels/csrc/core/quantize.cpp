#include "quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "convert.h"
#include "cpu.h"
#include "elementwise.h"
#include "pool.h"

namespace drivetrain {
namespace {

constexpr std::size_t kChunk = 2048;   // elements staged at a time: a multiple of kGroup
constexpr std::size_t kPiece = 32768;  // about how many elements a thread takes at a time

std::size_t blocks_of(std::size_t count, std::size_t block_size) { return (count + block_size - 1) / block_size; }

// Byte at which the element of a group's start lies.
std::size_t byte_of(Format format, std::size_t element) {
    switch (format) {
        case Format::int4: return element / 2;
        case Format::e3m2: return element / 4 * 3;
        default: return element;
    }
}

void pack(Format format, std::uint8_t* codes, std::size_t count, std::uint8_t* to) {
    if (format == Format::int4) {
        if (count % 2 != 0) codes[count] = 0;
        for (std::size_t i = 0; i < (count + 1) / 2; ++i) to[i] = static_cast<std::uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
    } else if (format == Format::e3m2) {
        const std::size_t bytes = (count * 6 + 7) / 8;
        for (std::size_t k = 0; k < 3; ++k) codes[count + k] = 0;
        for (std::size_t i = 0, byte = 0; i < count; i += 4, byte += 3) {
            const std::uint32_t word = static_cast<std::uint32_t>(codes[i]) | static_cast<std::uint32_t>(codes[i + 1]) << 6 |
                                       static_cast<std::uint32_t>(codes[i + 2]) << 12 | static_cast<std::uint32_t>(codes[i + 3]) << 18;
            for (std::size_t k = 0; k < 3 && byte + k < bytes; ++k) to[byte + k] = static_cast<std::uint8_t>(word >> (8 * k));
        }
    } else {
        std::memcpy(to, codes, count);
    }
}

// The codes, one per byte: in `room` or, where they already are so, in place.
const std::uint8_t* unpack(Format format, const std::uint8_t* from, std::size_t count, std::uint8_t* room) {
    if (format == Format::int4) {
        for (std::size_t i = 0; i < count / 2; ++i) {
            room[2 * i] = from[i] & 15u;
            room[2 * i + 1] = static_cast<std::uint8_t>(from[i] >> 4);
        }
        if (count % 2 != 0) room[count - 1] = from[count / 2] & 15u;
        return room;
    }
    if (format == Format::e3m2) {
        const std::size_t whole = count / 4 * 4;
        for (std::size_t i = 0, byte = 0; i < whole; i += 4, byte += 3) {
            const std::uint32_t word = static_cast<std::uint32_t>(from[byte]) | static_cast<std::uint32_t>(from[byte + 1]) << 8 |
                                       static_cast<std::uint32_t>(from[byte + 2]) << 16;
            for (std::size_t k = 0; k < 4; ++k) room[i + k] = static_cast<std::uint8_t>(word >> (6 * k) & 63u);
        }
        for (std::size_t i = whole; i < count; ++i) {
            const std::size_t bit = 6 * (i % 4), byte = whole / 4 * 3 + bit / 8;
            unsigned word = from[byte];
            if (bit % 8 > 2) word |= static_cast<unsigned>(from[byte + 1]) << 8;
            room[i] = static_cast<std::uint8_t>(word >> (bit % 8) & 63u);
        }
        return room;
    }
    return from;
}

float largest_value(const QuantRule& rule) {
    switch (rule.format) {
        case Format::int8: return rule.symmetric ? 127.0f : 255.0f;
        case Format::int4: return rule.symmetric ? 7.0f : 15.0f;
        case Format::e4m3: return 448.0f;
        case Format::e5m2: return 57344.0f;
        default: return 28.0f;
    }
}

std::uint32_t mixed(std::uint32_t x) {  // `mix` of quantize.inl
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

// Reads float32 from somewhere: `load(start, count, room)` returns the elements, in `room` or in place. start % kGroup == 0.
class DenseReader {
public:
    explicit DenseReader(const DenseArray& source) : source_(source), table_(kernels()) {}
    const float* load(std::size_t start, std::size_t count, float* room) const {
        const char* from = static_cast<const char*>(source_.data) + start * size_of(source_.dtype);
        if (source_.dtype == Dtype::f32) return reinterpret_cast<const float*>(from);
        convert(table_, from, source_.dtype, room, Dtype::f32, count);
        return room;
    }

private:
    DenseArray source_;
    const KernelTable& table_;
};

class SumReader {
public:
    SumReader(const std::vector<QuantArray>& sources, float factor) : sources_(sources), factor_(factor), table_(kernels()) {}
    const float* load(std::size_t start, std::size_t count, float* room) const {
        for (std::size_t k = 0; k < sources_.size(); ++k) add(sources_[k], start, count, room, k != 0);
        if (factor_ != 1.0f) table_.quant.scale(room, factor_, count);
        return room;
    }

private:
    void add(const QuantArray& source, std::size_t start, std::size_t count, float* room, bool adds) const {
        const QuantRule& rule = source.rule;
        std::uint8_t codes[kChunk];
        for (std::size_t done = 0; done < count;) {
            const std::size_t block = (start + done) / rule.block_size;
            const std::size_t some = std::min(count - done, (block + 1) * rule.block_size - (start + done));
            const std::uint8_t* from = source.values + byte_of(rule.format, start + done);
            const DecodeCall call{rule.format, rule.symmetric, adds, source.scales[block], rule.symmetric ? 0.0f : source.zeros[block]};
            table_.quant.decode(call, unpack(rule.format, from, some, codes), room + done, some);
            done += some;
        }
    }

    const std::vector<QuantArray>& sources_;
    float factor_;
    const KernelTable& table_;
};

template <typename Reader>
class BlockWriter {
public:
    BlockWriter(const Reader& reader, std::size_t count, const QuantArray& target, const Rounding& rounding)
        : reader_(reader), count_(count), target_(target), rounding_(rounding), table_(kernels()) {}

    void run(int threads) const {
        const std::size_t size = target_.rule.block_size, blocks = blocks_of(count_, size);
        const std::size_t per_piece = std::max<std::size_t>(1, kPiece / size);
        Pool::shared().run(blocks_of(blocks, per_piece), threads, [&](std::size_t piece) {
            const std::size_t end = std::min(blocks, (piece + 1) * per_piece);
            for (std::size_t block = piece * per_piece; block < end; ++block) write(block);
        });
    }

private:
    void write(std::size_t block) const {
        alignas(64) float room[kChunk];
        const std::size_t start = block * target_.rule.block_size;
        const std::size_t size = std::min(target_.rule.block_size, count_ - start);
        // A block that fits is read once; a larger one twice, so that no memory is asked for.
        const bool fits = size <= kChunk;
        const float* whole = fits ? reader_.load(start, size, room) : nullptr;
        EncodeCall call = scaled(block, start, size, whole, room);
        for (std::size_t done = 0; done < size; done += kChunk) {
            const std::size_t some = std::min(kChunk, size - done);
            std::uint8_t codes[kChunk + 4] = {};
            if (std::isfinite(target_.scales[block])) {
                call.start = static_cast<std::uint32_t>(done);
                table_.quant.encode(call, fits ? whole : reader_.load(start + done, some, room), codes, some);
            }
            pack(target_.rule.format, codes, some, target_.values + byte_of(target_.rule.format, start + done));
        }
    }

    // Writes the block's scale and zero.
    EncodeCall scaled(std::size_t block, std::size_t start, std::size_t size, const float* whole, float* room) const {
        std::uint32_t magnitude = 0;
        std::int32_t low = INT32_MAX, high = INT32_MIN;
        for (std::size_t done = 0; done < size; done += kChunk) {
            const std::size_t some = std::min(kChunk, size - done);
            const float* x = whole != nullptr ? whole : reader_.load(start + done, some, room);
            if (target_.rule.symmetric) {
                magnitude = std::max(magnitude, table_.quant.largest(x, some));
            } else {
                table_.quant.extremes(x, some, &low, &high);
            }
        }
        float zero = 0.0f, range;
        if (target_.rule.symmetric) {
            range = float_of(magnitude);
        } else {
            zero = value_of(low) + 0.0f;  // never a negative zero
            range = value_of(high) - zero;
        }
        float scale = range / largest_value(target_.rule);
        if (scale < 1.17549435e-38f) scale = 0.0f;
        if (!std::isfinite(range) || !std::isfinite(zero)) {
            scale = float_of(0x7fc00000u);
            zero = 0.0f;
        }
        target_.scales[block] = scale;
        if (!target_.rule.symmetric) target_.zeros[block] = zero;
        EncodeCall call{target_.rule.format, target_.rule.symmetric, rounding_.stochastic, scale > 0.0f ? 1.0f / scale : 0.0f, zero, 0, 0, 0};
        const std::uint64_t index = rounding_.first_block + block;
        const std::uint32_t first = mixed(static_cast<std::uint32_t>(rounding_.seed) + 0x9e3779b9u);
        const std::uint32_t second = mixed(static_cast<std::uint32_t>(rounding_.seed >> 32) ^ first);
        call.key0 = mixed(static_cast<std::uint32_t>(index) ^ first);
        call.key1 = mixed(mixed(static_cast<std::uint32_t>(index >> 32) ^ call.key0) ^ second);
        return call;
    }

    static float value_of(std::int32_t ordered) { return float_of(static_cast<std::uint32_t>(ordered ^ (ordered >> 31 & 0x7fffffff))); }

    const Reader& reader_;
    std::size_t count_;
    const QuantArray& target_;
    const Rounding& rounding_;
    const KernelTable& table_;
};

void* at(const DenseArray& array, std::size_t index) { return static_cast<char*>(array.data) + index * size_of(array.dtype); }

// Calls body(start, count) for every chunk of [0, count), on the threads.
template <typename Body>
void for_chunks(std::size_t count, int threads, const Body& body) {
    Pool::shared().run(blocks_of(count, kPiece), threads, [&](std::size_t piece) {
        const std::size_t end = std::min(count, (piece + 1) * kPiece);
        for (std::size_t start = piece * kPiece; start < end; start += kChunk) body(start, std::min(kChunk, end - start));
    });
}

}  // namespace

void quantize(const DenseArray& source, std::size_t count, const QuantArray& target, const Rounding& rounding, int threads) {
    const DenseReader reader(source);
    BlockWriter<DenseReader>(reader, count, target, rounding).run(threads);
}

void reduce_quantized(const std::vector<QuantArray>& sources, float factor, std::size_t count, const QuantArray& target,
                      const Rounding& rounding, int threads) {
    const SumReader reader(sources, factor);
    BlockWriter<SumReader>(reader, count, target, rounding).run(threads);
}

void dequantize_reduce(const std::vector<QuantArray>& sources, float factor, std::size_t count, const DenseArray& target, int threads) {
    const SumReader reader(sources, factor);
    const KernelTable& table = kernels();
    for_chunks(count, threads, [&](std::size_t start, std::size_t some) {
        if (target.dtype == Dtype::f32) {
            reader.load(start, some, static_cast<float*>(at(target, start)));
            return;
        }
        alignas(64) float room[kChunk];
        reader.load(start, some, room);
        convert(table, room, Dtype::f32, at(target, start), target.dtype, some);
    });
}

void pack_signs(const DenseArray& source, std::size_t count, const SignArray& target, int threads) {
    const DenseReader reader(source);
    const KernelTable& table = kernels();
    // Blocks may be as large as the array: their sums are made by pieces, cut the same way whatever the number of threads.
    const std::size_t blocks = blocks_of(count, target.block_size), per_block = blocks_of(target.block_size, kPiece);
    std::vector<double> sums(blocks * per_block, 0.0);
    Pool::shared().run(sums.size(), threads, [&](std::size_t piece) {
        const std::size_t first = piece / per_block * target.block_size;
        const std::size_t block_end = std::min(count, first + target.block_size);
        const std::size_t begin = first + piece % per_block * kPiece, end = std::min(block_end, begin + kPiece);
        double lanes[kGroup] = {};
        alignas(64) float room[kChunk];
        for (std::size_t start = begin; start < end; start += kChunk) {
            const std::size_t some = std::min(kChunk, end - start);
            const float* x = reader.load(start, some, room);
            table.quant.magnitudes(x, some, target.root_mean_square, lanes);
            table.quant.pack_signs(x, target.bits + start / 8, some);
        }
        for (const double lane : lanes) sums[piece] += lane;
    });
    for (std::size_t block = 0; block < blocks; ++block) {
        double total = 0.0;
        for (std::size_t k = 0; k < per_block; ++k) total += sums[block * per_block + k];
        const double mean = total / static_cast<double>(std::min(target.block_size, count - block * target.block_size));
        target.scales[block] = static_cast<float>(target.root_mean_square ? std::sqrt(mean) : mean);
    }
}

void unpack_signs(const SignArray& source, std::size_t count, const DenseArray& target, int threads) {
    const KernelTable& table = kernels();
    for_chunks(count, threads, [&](std::size_t start, std::size_t some) {
        alignas(64) float room[kChunk];
        float* to = target.dtype == Dtype::f32 ? static_cast<float*>(at(target, start)) : room;
        for (std::size_t done = 0; done < some;) {
            const std::size_t block = (start + done) / source.block_size;
            const std::size_t part = std::min(some - done, (block + 1) * source.block_size - (start + done));
            table.quant.unpack_signs(source.bits + (start + done) / 8, source.scales[block], to + done, part);
            done += part;
        }
        if (target.dtype != Dtype::f32) convert(table, room, Dtype::f32, at(target, start), target.dtype, some);
    });
}

}  // namespace drivetrain

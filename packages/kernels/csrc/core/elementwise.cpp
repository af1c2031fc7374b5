#include "elementwise.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "cpu.h"
#include "pool.h"

namespace drivetrain {
namespace {

constexpr std::size_t kBlock = 1024;   // elements per call of a block function: five float32 streams of it fit a first-level cache
constexpr std::size_t kPiece = 32768;  // elements that a thread takes at a time; sums are made per piece, so it must not depend on threads

struct Piece {
    std::size_t tensor, start, count;
};

std::vector<Piece> cut(const std::vector<std::int64_t>& counts) {
    std::vector<Piece> pieces;
    for (std::size_t tensor = 0; tensor < counts.size(); ++tensor) {
        const auto count = static_cast<std::size_t>(counts[tensor]);
        for (std::size_t start = 0; start < count; start += kPiece) {
            pieces.push_back({tensor, start, std::min(kPiece, count - start)});
        }
    }
    return pieces;
}

void* at(const Operand& operand, std::size_t tensor, std::size_t index) {
    return reinterpret_cast<char*>(operand.addresses[tensor]) + index * size_of(operand.dtypes[tensor]);
}

// Staging buffers of one thread for one block.
struct Stage {
    alignas(64) float data[kMaxStreams][kBlock];
};

class Runner {
public:
    Runner(const Loop& loop, const Operands& operands) : loop_(loop), operands_(operands), table_(kernels()) {}

    // Runs one piece. `lanes`: loop.sums * kGroup accumulators, zero at first.
    void run(const Piece& piece, double* lanes) const {
        Stage stage;
        const void* scalars = loop_.scalars[loop_.scalars.size() == 1 ? 0 : piece.tensor];
        for (std::size_t done = 0; done < piece.count;) {
            std::size_t valid = std::min(kBlock, piece.count - done);
            if (valid > kGroup) valid = valid / kGroup * kGroup;  // whole groups in place; only the odd end is staged
            run_block(piece.tensor, piece.start + done, valid, scalars, stage, lanes);
            done += valid;
        }
    }

private:
    void run_block(std::size_t tensor, std::size_t start, std::size_t valid, const void* scalars, Stage& stage, double* lanes) const {
        const std::size_t padded = (valid + kGroup - 1) / kGroup * kGroup;
        float* streams[kMaxStreams] = {};
        for (std::size_t k = 0; k < loop_.access.size(); ++k) {
            const Operand& operand = operands_.streams[k];
            void* data = at(operand, tensor, start);
            if (operand.dtypes[tensor] == Dtype::f32 && padded == valid) {
                streams[k] = static_cast<float*>(data);
                continue;
            }
            streams[k] = stage.data[k];
            convert(table_, data, operand.dtypes[tensor], streams[k], Dtype::f32, valid);
            std::fill(streams[k] + valid, streams[k] + padded, 0.0f);
        }
        loop_.block(streams, padded, valid, scalars, lanes);
        for (std::size_t k = 0; k < loop_.access.size(); ++k) {
            if (streams[k] != stage.data[k] || loop_.access[k] == Access::read) continue;
            const Operand& operand = operands_.streams[k];
            convert(table_, streams[k], Dtype::f32, at(operand, tensor, start), operand.dtypes[tensor], valid);
        }
        if (!operands_.copy.addresses.empty() && operands_.copy.addresses[tensor] != 0) {
            convert(table_, streams[0], Dtype::f32, at(operands_.copy, tensor, start), operands_.copy.dtypes[tensor], valid);
        }
    }

    const Loop& loop_;
    const Operands& operands_;
    const KernelTable& table_;
};

}  // namespace

void convert(const KernelTable& table, const void* from, Dtype from_dtype, void* to, Dtype to_dtype, std::size_t count) {
    if (count == 0) return;  // an empty tensor may have no address at all
    if (from_dtype == to_dtype) {
        std::memcpy(to, from, count * size_of(from_dtype));
    } else if (from_dtype == Dtype::f32) {
        const auto narrow = to_dtype == Dtype::bf16 ? table.f32_to_bf16 : table.f32_to_f16;
        narrow(static_cast<const float*>(from), static_cast<std::uint16_t*>(to), count);
    } else if (to_dtype == Dtype::f32) {
        const auto widen = from_dtype == Dtype::bf16 ? table.bf16_to_f32 : table.f16_to_f32;
        widen(static_cast<const std::uint16_t*>(from), static_cast<float*>(to), count);
    } else {
        float middle[kGroup];
        const auto* source = static_cast<const char*>(from);
        auto* target = static_cast<char*>(to);
        for (std::size_t done = 0; done < count; done += kGroup) {
            const std::size_t some = std::min(kGroup, count - done);
            convert(table, source + done * 2, from_dtype, middle, Dtype::f32, some);
            convert(table, middle, Dtype::f32, target + done * 2, to_dtype, some);
        }
    }
}

std::vector<double> run_elementwise(const Loop& loop, const Operands& operands, int threads) {
    const std::vector<Piece> pieces = cut(operands.counts);
    const std::size_t lanes = loop.sums * kGroup;
    std::vector<double> partial(pieces.size() * lanes, 0.0);
    const Runner runner(loop, operands);
    Pool::shared().run(pieces.size(), threads, [&](std::size_t index) {
        runner.run(pieces[index], lanes == 0 ? nullptr : partial.data() + index * lanes);
    });
    std::vector<double> sums(operands.counts.size() * loop.sums, 0.0);
    for (std::size_t index = 0; index < pieces.size(); ++index) {
        for (std::size_t which = 0; which < loop.sums; ++which) {
            const double* from = partial.data() + index * lanes + which * kGroup;
            double total = 0.0;
            for (std::size_t lane = 0; lane < kGroup; ++lane) total += from[lane];
            sums[pieces[index].tensor * loop.sums + which] += total;
        }
    }
    return sums;
}

void cast(const std::vector<std::int64_t>& counts, const Operand& from, const Operand& to, int threads) {
    const std::vector<Piece> pieces = cut(counts);
    const KernelTable& table = kernels();
    Pool::shared().run(pieces.size(), threads, [&](std::size_t index) {
        const Piece& piece = pieces[index];
        convert(table, at(from, piece.tensor, piece.start), from.dtypes[piece.tensor], at(to, piece.tensor, piece.start),
                to.dtypes[piece.tensor], piece.count);
    });
}

}  // namespace drivetrain

#include "fold.h"

#include <algorithm>
#include <type_traits>

#include "cpu.h"

namespace drivetrain {
namespace {

constexpr std::size_t kBlock = 512;  // elements of the result that stay in the first-level cache while the parts pass

template <typename Type>
Type added(Type a, Type b) {
    if constexpr (std::is_integral_v<Type>) {
        using Wide = std::common_type_t<std::make_unsigned_t<Type>, unsigned>;  // wraps around, where signed types may not
        return static_cast<Type>(static_cast<Wide>(a) + static_cast<Wide>(b));
    } else {
        return a + b;
    }
}

template <typename Type>
Type combine(FoldOp op, Type a, Type b) {
    if (op == FoldOp::max) return a > b || a != a ? a : b;
    if (op == FoldOp::min) return a < b || a != a ? a : b;
    return added(a, b);
}

template <typename Type, FoldOp kOp>
void fold_plain(const void* const* parts, std::size_t count_of_parts, std::size_t count, void* out) {
    auto* to = static_cast<Type*>(out);
    Type total[kBlock];
    for (std::size_t start = 0; start < count; start += kBlock) {
        const std::size_t some = std::min(kBlock, count - start);
        std::copy_n(static_cast<const Type*>(parts[0]) + start, some, total);
        for (std::size_t k = 1; k < count_of_parts; ++k) {
            const auto* from = static_cast<const Type*>(parts[k]) + start;
            for (std::size_t i = 0; i < some; ++i) total[i] = combine(kOp, total[i], from[i]);
        }
        if constexpr (kOp == FoldOp::mean) {
            for (std::size_t i = 0; i < some; ++i) total[i] = static_cast<Type>(total[i] / static_cast<Type>(count_of_parts));
        }
        std::copy_n(total, some, to + start);
    }
}

template <typename Type>
void fold_by(FoldOp op, const void* const* parts, std::size_t count_of_parts, std::size_t count, void* out) {
    switch (op) {
        case FoldOp::sum: return fold_plain<Type, FoldOp::sum>(parts, count_of_parts, count, out);
        case FoldOp::mean: return fold_plain<Type, FoldOp::mean>(parts, count_of_parts, count, out);
        case FoldOp::max: return fold_plain<Type, FoldOp::max>(parts, count_of_parts, count, out);
        case FoldOp::min: return fold_plain<Type, FoldOp::min>(parts, count_of_parts, count, out);
    }
}

}  // namespace

std::size_t size_of(FoldType type) {
    switch (type) {
        case FoldType::i8:
        case FoldType::u8: return 1;
        case FoldType::bf16:
        case FoldType::f16:
        case FoldType::i16: return 2;
        case FoldType::f32:
        case FoldType::i32: return 4;
        case FoldType::f64:
        case FoldType::i64: return 8;
    }
    return 0;
}

void fold(FoldType type, FoldOp op, const void* const* parts, std::size_t count_of_parts, std::size_t count, void* out) {
    if (count == 0) return;
    const FoldKernels& vector = kernels().fold;
    switch (type) {
        case FoldType::f32: return vector.f32(op, parts, count_of_parts, count, out);
        case FoldType::bf16: return vector.bf16(op, parts, count_of_parts, count, out);
        case FoldType::f16: return vector.f16(op, parts, count_of_parts, count, out);
        case FoldType::f64: return fold_by<double>(op, parts, count_of_parts, count, out);
        case FoldType::i8: return fold_by<std::int8_t>(op, parts, count_of_parts, count, out);
        case FoldType::u8: return fold_by<std::uint8_t>(op, parts, count_of_parts, count, out);
        case FoldType::i16: return fold_by<std::int16_t>(op, parts, count_of_parts, count, out);
        case FoldType::i32: return fold_by<std::int32_t>(op, parts, count_of_parts, count, out);
        case FoldType::i64: return fold_by<std::int64_t>(op, parts, count_of_parts, count, out);
    }
}

}  // namespace drivetrain

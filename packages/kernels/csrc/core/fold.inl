// Folding several arrays into one, over the vector type `V`. Included by kernels.inl.
//
// A block of the result stays in registers while every part is added to it, so memory is read once per part and written once. Where
// vectors have one lane only, the block is longer, so that the compiler makes vectors of the loops over it.

namespace drivetrain {
namespace {

struct FoldF32 {
    using Type = float;
    static V::Reg load(const float* from) { return V::load(from); }
    static void store(float* to, V::Reg a) { V::store(to, a); }
    static float widen(float a) { return a; }
    static float narrow(float a) { return a; }
};

struct FoldBf16 {
    using Type = std::uint16_t;
    static V::Reg load(const std::uint16_t* from) { return V::bf16_load(from); }
    static void store(std::uint16_t* to, V::Reg a) { V::bf16_store(to, a); }
    static float widen(std::uint16_t a) { return one_bf16_to_f32(a); }
    static std::uint16_t narrow(float a) { return one_f32_to_bf16(a); }
};

struct FoldF16 {
    using Type = std::uint16_t;
    static V::Reg load(const std::uint16_t* from) { return V::f16_load(from); }
    static void store(std::uint16_t* to, V::Reg a) { V::f16_store(to, a); }
    static float widen(std::uint16_t a) { return one_f16_to_f32(a); }
    static std::uint16_t narrow(float a) { return one_f32_to_f16(a); }
};

template <FoldOp kOp>
V::Reg fold_two(V::Reg a, V::Reg b) {
    if constexpr (kOp == FoldOp::max) return V::maximum(a, b);
    if constexpr (kOp == FoldOp::min) return V::minimum(a, b);
    return V::add(a, b);
}

// As `fold_two`, for one element: of two that are equal the second, NaN where one is NaN.
template <FoldOp kOp>
float fold_one(float a, float b) {
    if constexpr (kOp == FoldOp::max) return a > b || a != a ? a : b;
    if constexpr (kOp == FoldOp::min) return a < b || a != a ? a : b;
    return a + b;
}

template <typename Element, FoldOp kOp>
void fold_parts(const void* const* parts, std::size_t count_of_parts, std::size_t count, void* out) {
    using Type = typename Element::Type;
    constexpr std::size_t kBlockRegs = V::width == 1 ? 64 : 4;
    constexpr std::size_t kBlock = kBlockRegs * V::width;
    const auto part = [parts](std::size_t k) { return static_cast<const Type*>(parts[k]); };
    const auto number = static_cast<float>(count_of_parts);
    auto* to = static_cast<Type*>(out);
    std::size_t i = 0;
    for (; i + kBlock <= count; i += kBlock) {
        V::Reg total[kBlockRegs];
        for (std::size_t j = 0; j < kBlockRegs; ++j) total[j] = Element::load(part(0) + i + j * V::width);
        for (std::size_t k = 1; k < count_of_parts; ++k) {
            const Type* from = part(k) + i;
            for (std::size_t j = 0; j < kBlockRegs; ++j) total[j] = fold_two<kOp>(total[j], Element::load(from + j * V::width));
        }
        for (std::size_t j = 0; j < kBlockRegs; ++j) {
            if constexpr (kOp == FoldOp::mean) total[j] = V::div(total[j], V::set(number));
            Element::store(to + i + j * V::width, total[j]);
        }
    }
    for (; i < count; ++i) {
        float total = Element::widen(part(0)[i]);
        for (std::size_t k = 1; k < count_of_parts; ++k) total = fold_one<kOp>(total, Element::widen(part(k)[i]));
        if constexpr (kOp == FoldOp::mean) total /= number;
        to[i] = Element::narrow(total);
    }
}

template <typename Element>
void fold_by(FoldOp op, const void* const* parts, std::size_t count_of_parts, std::size_t count, void* out) {
    switch (op) {
        case FoldOp::sum: return fold_parts<Element, FoldOp::sum>(parts, count_of_parts, count, out);
        case FoldOp::mean: return fold_parts<Element, FoldOp::mean>(parts, count_of_parts, count, out);
        case FoldOp::max: return fold_parts<Element, FoldOp::max>(parts, count_of_parts, count, out);
        case FoldOp::min: return fold_parts<Element, FoldOp::min>(parts, count_of_parts, count, out);
    }
}

constexpr FoldKernels kFoldKernels{fold_by<FoldF32>, fold_by<FoldBf16>, fold_by<FoldF16>};

}  // namespace
}  // namespace drivetrain

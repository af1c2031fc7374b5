// The inner loops, once, over a vector type `V`. Included by each translation unit of an instruction set after it has defined V:
//
//   V::width                       lanes
//   V::Reg                         a register of float32
//   load, store, set, add, sub, mul, div, sqrt, fma(a, b, c) = a*b + c
//   larger(a, b)                   a > b or a is NaN ? a : b
//   maximum(a, b), minimum(a, b)   NaN where one is NaN; b where they are equal (zeros of either sign are)
//   clamp_below(a)                 a > 0 ? a : 0, NaN kept
//   sign(a)                        1, -1, or 0 for zeros and NaN
//   bf16_load/bf16_store/f16_load/f16_store   width elements
//   V::Lanes                       kGroup double accumulators: load, store, square(k, reg) for the k-th register of a group
//
// See kernel_table.h for the invariants. Everything here has internal linkage, since the same template compiled under two instruction
// sets must not be merged by the linker.

#include "fold.inl"
#include "quantize.inl"

namespace drivetrain {
namespace {

constexpr int kRegs = static_cast<int>(kGroup) / V::width;
using Reg = V::Reg;

// The hardware prefetchers stop at the end of each page, and a step meets that end in all of its streams at once. Asking this far ahead
// (in elements) carries them over. Past the end of a buffer it does nothing.
constexpr std::size_t kAhead = 256;

template <int kForWriting>
void prefetch(const float* here) {
    __builtin_prefetch(reinterpret_cast<const char*>(here) + kAhead * sizeof(float), kForWriting);
}

// Conversions work in bursts of one block (elementwise.cpp), with the step itself between: they ask for the next block.
constexpr std::size_t kNextBlock = 1024;

template <int kForWriting, typename Element>
void prefetch_next(const Element* here) {
    __builtin_prefetch(reinterpret_cast<const char*>(here) + kNextBlock * sizeof(Element), kForWriting);
}

template <bool kL2, bool kAmsgrad>
void adam_block(float* const* s, std::size_t count, std::size_t, const void* scalars, double*) {
    const auto& c = *static_cast<const AdamScalars*>(scalars);
    float* __restrict p = s[0];
    const float* __restrict g = s[1];
    float* __restrict m = s[2];
    float* __restrict v = s[3];
    float* __restrict top = kAmsgrad ? s[4] : nullptr;
    const Reg factor = V::set(c.factor), beta1 = V::set(c.beta1), beta2 = V::set(c.beta2);
    const Reg rest1 = V::set(c.one_minus_beta1), rest2 = V::set(c.one_minus_beta2);
    const Reg decay = V::set(c.decay), l2 = V::set(c.l2), root2 = V::set(c.inverse_root2), eps = V::set(c.eps);
    const Reg minus_step = V::set(-c.step_size);
    for (std::size_t i = 0; i < count; i += V::width) {
        prefetch<1>(p + i);
        prefetch<0>(g + i);
        prefetch<1>(m + i);
        prefetch<1>(v + i);
        Reg param = V::load(p + i);
        Reg grad = V::mul(V::load(g + i), factor);
        if (kL2) grad = V::fma(l2, param, grad);
        const Reg first = V::fma(beta1, V::load(m + i), V::mul(rest1, grad));
        const Reg second = V::fma(beta2, V::load(v + i), V::mul(V::mul(rest2, grad), grad));
        V::store(m + i, first);
        V::store(v + i, second);
        Reg used = second;
        if (kAmsgrad) {
            used = V::larger(second, V::load(top + i));
            V::store(top + i, used);
        }
        const Reg denominator = V::fma(V::sqrt(used), root2, eps);
        param = V::fma(minus_step, V::div(first, denominator), V::mul(param, decay));
        V::store(p + i, param);
    }
}

void adam_rollback_block(float* const* s, std::size_t count, std::size_t, const void* scalars, double*) {
    const auto& c = *static_cast<const AdamScalars*>(scalars);
    float* __restrict p = s[0];
    const float* __restrict g = s[1];
    float* __restrict m = s[2];
    float* __restrict v = s[3];
    const Reg factor = V::set(c.factor), inverse1 = V::set(c.inverse_beta1), inverse2 = V::set(c.inverse_beta2);
    const Reg minus_rest1 = V::set(-c.one_minus_beta1), minus_rest2 = V::set(-c.one_minus_beta2);
    const Reg decay = V::set(c.decay), root2 = V::set(c.inverse_root2), eps = V::set(c.eps), step = V::set(c.step_size);
    for (std::size_t i = 0; i < count; i += V::width) {
        prefetch<1>(p + i);
        prefetch<0>(g + i);
        prefetch<1>(m + i);
        prefetch<1>(v + i);
        const Reg grad = V::mul(V::load(g + i), factor);
        const Reg first = V::load(m + i);
        const Reg second = V::load(v + i);
        const Reg denominator = V::fma(V::sqrt(second), root2, eps);
        V::store(p + i, V::div(V::fma(step, V::div(first, denominator), V::load(p + i)), decay));
        V::store(m + i, V::mul(V::fma(minus_rest1, grad, first), inverse1));
        // A second moment is never negative; rounding in the subtraction could make it so.
        V::store(v + i, V::clamp_below(V::mul(V::fma(V::mul(minus_rest2, grad), grad, second), inverse2)));
    }
}

void lion_block(float* const* s, std::size_t count, std::size_t, const void* scalars, double*) {
    const auto& c = *static_cast<const LionScalars*>(scalars);
    float* __restrict p = s[0];
    const float* __restrict g = s[1];
    float* __restrict m = s[2];
    const Reg factor = V::set(c.factor), beta1 = V::set(c.beta1), beta2 = V::set(c.beta2);
    const Reg rest1 = V::set(c.one_minus_beta1), rest2 = V::set(c.one_minus_beta2);
    const Reg decay = V::set(c.decay), minus_lr = V::set(-c.lr);
    for (std::size_t i = 0; i < count; i += V::width) {
        prefetch<1>(p + i);
        prefetch<0>(g + i);
        prefetch<1>(m + i);
        const Reg grad = V::mul(V::load(g + i), factor);
        const Reg momentum = V::load(m + i);
        const Reg direction = V::sign(V::fma(beta1, momentum, V::mul(rest1, grad)));
        V::store(p + i, V::fma(minus_lr, direction, V::mul(V::load(p + i), decay)));
        V::store(m + i, V::fma(beta2, momentum, V::mul(rest2, grad)));
    }
}

Reg lamb_direction(Reg param, Reg first, Reg second, const LambScalars& c) {
    const Reg v_hat = V::fma(second, V::set(c.inverse_correction2), V::set(c.eps_inside));
    const Reg denominator = V::add(V::sqrt(v_hat), V::set(c.eps_outside));
    return V::fma(V::set(c.weight_decay), param, V::div(V::mul(first, V::set(c.inverse_correction1)), denominator));
}

void lamb_moments_block(float* const* s, std::size_t count, std::size_t valid, const void* scalars, double* lanes) {
    const auto& c = *static_cast<const LambScalars*>(scalars);
    const float* __restrict p = s[0];
    const float* __restrict g = s[1];
    float* __restrict m = s[2];
    float* __restrict v = s[3];
    const Reg factor = V::set(c.factor), beta1 = V::set(c.beta1), beta2 = V::set(c.beta2);
    const Reg rest1 = V::set(c.one_minus_beta1), rest2 = V::set(c.one_minus_beta2);
    V::Lanes params(lanes), updates(lanes + kGroup);
    for (std::size_t start = 0; start < count; start += kGroup) {
        for (int k = 0; k < kRegs; ++k) {
            const std::size_t i = start + static_cast<std::size_t>(k * V::width);
            const Reg param = V::load(p + i);
            const Reg grad = V::mul(V::load(g + i), factor);
            const Reg first = V::fma(beta1, V::load(m + i), V::mul(rest1, grad));
            const Reg second = V::fma(beta2, V::load(v + i), V::mul(V::mul(rest2, grad), grad));
            V::store(m + i, first);
            V::store(v + i, second);
            Reg update = lamb_direction(param, first, second, c);
            if (i + V::width > valid) {  // padding must not enter the norm: without eps it is 0 / 0
                float kept[V::width];
                V::store(kept, update);
                for (int lane = 0; lane < V::width; ++lane) {
                    if (i + static_cast<std::size_t>(lane) >= valid) kept[lane] = 0.0f;
                }
                update = V::load(kept);
            }
            params.square(k, param);
            updates.square(k, update);
        }
    }
    params.store(lanes);
    updates.store(lanes + kGroup);
}

void lamb_apply_block(float* const* s, std::size_t count, std::size_t, const void* scalars, double*) {
    const auto& c = *static_cast<const LambScalars*>(scalars);
    float* __restrict p = s[0];
    const float* __restrict m = s[1];
    const float* __restrict v = s[2];
    const Reg minus_step = V::set(-c.step_size);
    for (std::size_t i = 0; i < count; i += V::width) {
        prefetch<1>(p + i);
        prefetch<0>(m + i);
        prefetch<0>(v + i);
        const Reg param = V::load(p + i);
        V::store(p + i, V::fma(minus_step, lamb_direction(param, V::load(m + i), V::load(v + i), c), param));
    }
}

void adagrad_block(float* const* s, std::size_t count, std::size_t, const void* scalars, double*) {
    const auto& c = *static_cast<const AdagradScalars*>(scalars);
    float* __restrict p = s[0];
    const float* __restrict g = s[1];
    float* __restrict sum = s[2];
    const Reg factor = V::set(c.factor), l2 = V::set(c.l2), eps = V::set(c.eps), minus_lr = V::set(-c.lr);
    const bool decays = c.l2 != 0.0f;
    for (std::size_t i = 0; i < count; i += V::width) {
        prefetch<1>(p + i);
        prefetch<0>(g + i);
        prefetch<1>(sum + i);
        const Reg param = V::load(p + i);
        Reg grad = V::mul(V::load(g + i), factor);
        if (decays) grad = V::fma(l2, param, grad);
        const Reg total = V::fma(grad, grad, V::load(sum + i));
        V::store(sum + i, total);
        V::store(p + i, V::fma(minus_lr, V::div(grad, V::add(V::sqrt(total), eps)), param));
    }
}

void sgd_block(float* const* s, std::size_t count, std::size_t, const void* scalars, double*) {
    const auto& c = *static_cast<const SgdScalars*>(scalars);
    float* __restrict p = s[0];
    const float* __restrict g = s[1];
    float* __restrict b = c.has_momentum ? s[2] : nullptr;
    const Reg factor = V::set(c.factor), l2 = V::set(c.l2), momentum = V::set(c.momentum);
    const Reg rest = V::set(c.one_minus_dampening), minus_lr = V::set(-c.lr);
    const bool decays = c.l2 != 0.0f;
    for (std::size_t i = 0; i < count; i += V::width) {
        const Reg param = V::load(p + i);
        Reg grad = V::mul(V::load(g + i), factor);
        if (decays) grad = V::fma(l2, param, grad);
        if (b != nullptr) {
            const Reg buffer = c.first ? grad : V::fma(momentum, V::load(b + i), V::mul(rest, grad));
            V::store(b + i, buffer);
            grad = c.nesterov ? V::fma(momentum, buffer, grad) : buffer;
        }
        V::store(p + i, V::fma(minus_lr, grad, param));
    }
}

template <bool kWrite>
void square_block(float* const* s, std::size_t count, std::size_t, const void* scalars, double* lanes) {
    const auto& c = *static_cast<const ScaleScalars*>(scalars);
    float* __restrict x = s[0];
    const Reg factor = V::set(c.factor);
    V::Lanes sums(lanes);
    for (std::size_t start = 0; start < count; start += kGroup) {
        for (int k = 0; k < kRegs; ++k) {
            const std::size_t i = start + static_cast<std::size_t>(k * V::width);
            const Reg scaled = V::mul(V::load(x + i), factor);
            if (kWrite) V::store(x + i, scaled);
            sums.square(k, scaled);
        }
    }
    sums.store(lanes);
}

void all_bf16_to_f32(const std::uint16_t* from, float* to, std::size_t count) {
    std::size_t i = 0;
    for (; i + V::width <= count; i += V::width) {
        prefetch_next<0>(from + i);
        V::store(to + i, V::bf16_load(from + i));
    }
    for (; i < count; ++i) to[i] = one_bf16_to_f32(from[i]);
}

void all_f32_to_bf16(const float* from, std::uint16_t* to, std::size_t count) {
    std::size_t i = 0;
    for (; i + V::width <= count; i += V::width) {
        prefetch_next<1>(to + i);
        V::bf16_store(to + i, V::load(from + i));
    }
    for (; i < count; ++i) to[i] = one_f32_to_bf16(from[i]);
}

void all_f16_to_f32(const std::uint16_t* from, float* to, std::size_t count) {
    std::size_t i = 0;
    for (; i + V::width <= count; i += V::width) {
        prefetch_next<0>(from + i);
        V::store(to + i, V::f16_load(from + i));
    }
    for (; i < count; ++i) to[i] = one_f16_to_f32(from[i]);
}

void all_f32_to_f16(const float* from, std::uint16_t* to, std::size_t count) {
    std::size_t i = 0;
    for (; i + V::width <= count; i += V::width) {
        prefetch_next<1>(to + i);
        V::f16_store(to + i, V::load(from + i));
    }
    for (; i < count; ++i) to[i] = one_f32_to_f16(from[i]);
}

constexpr KernelTable make_table(const char* name) {
    KernelTable table{};
    table.name = name;
    table.adam = adam_block<false, false>;
    table.adam_l2 = adam_block<true, false>;
    table.adam_amsgrad = adam_block<false, true>;
    table.adam_amsgrad_l2 = adam_block<true, true>;
    table.adam_rollback = adam_rollback_block;
    table.lion = lion_block;
    table.lamb_moments = lamb_moments_block;
    table.lamb_apply = lamb_apply_block;
    table.adagrad = adagrad_block;
    table.sgd = sgd_block;
    table.sum_of_squares = square_block<false>;
    table.unscale = square_block<true>;
    table.bf16_to_f32 = all_bf16_to_f32;
    table.f32_to_bf16 = all_f32_to_bf16;
    table.f16_to_f32 = all_f16_to_f32;
    table.f32_to_f16 = all_f32_to_f16;
    table.quant = kQuantKernels;
    table.fold = kFoldKernels;
    return table;
}

}  // namespace
}  // namespace drivetrain

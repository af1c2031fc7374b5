// The inner loops that every instruction set provides, as a table of function pointers.
//
// Problem: one binary must run on every CPU of its architecture and use what each has.
// Idea: each instruction set is one translation unit that instantiates the same templates (kernels.inl) over its own vector type and
// publishes one KernelTable. Which table is used is decided at run time (cpu.h).
// Invariants:
// - A block function sees float32 only, and element counts that are multiples of kGroup. Other element types and odd ends are
//   staged through small buffers by the driver (elementwise.cpp), so no inner loop has a tail, and an element's result
//   cannot depend on where a tensor was cut, on alignment or on the number of threads.
// - All tables give the same bits: fused multiply-add is explicit, contraction is off, square roots and divisions are the exact ones,
//   and sums run over kGroup double-precision lanes combined in one fixed order, whatever the vector width.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fold_kernels.h"
#include "matmul_kernels.h"
#include "quantize_kernels.h"

namespace drivetrain {

constexpr std::size_t kGroup = 16;  // elements per group; a multiple of every vector width
constexpr int kMaxStreams = 5;

struct AdamScalars {
    float factor, beta1, one_minus_beta1, beta2, one_minus_beta2;
    float decay;         // 1 - lr * weight_decay when decoupled, else 1
    float l2;            // weight decay added to the gradient, else 0
    float inverse_root2; // 1 / sqrt(1 - beta2^t)
    float eps;
    float step_size;     // lr / (1 - beta1^t)
    float inverse_beta1, inverse_beta2;  // for the rollback; 0 where beta is 0
};

struct LionScalars {
    float factor, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, lr;
};

struct LambScalars {
    float factor, beta1, one_minus_beta1, beta2, one_minus_beta2;
    float inverse_correction1, inverse_correction2;
    float eps_inside, eps_outside;  // one of them is eps, the other 0
    float weight_decay;
    float step_size;  // lr * trust ratio; only in the second phase
};

struct AdagradScalars {
    float factor, l2, eps, lr;
};

struct SgdScalars {
    float factor, l2, momentum, one_minus_dampening, lr;
    bool has_momentum, nesterov, first;
};

struct ScaleScalars {
    float factor;
};

// `streams`: float32 arrays of `count` elements, count % kGroup == 0, of which the first `valid` are real and the rest is padding.
// `lanes`: accumulators of the sums that the op makes, kGroup doubles per sum; null for ops that make none.
using BlockFunction = void (*)(float* const* streams, std::size_t count, std::size_t valid, const void* scalars, double* lanes);

struct KernelTable {
    const char* name;

    BlockFunction adam;               // p g m v
    BlockFunction adam_l2;            // p g m v
    BlockFunction adam_amsgrad;       // p g m v vmax
    BlockFunction adam_amsgrad_l2;    // p g m v vmax
    BlockFunction adam_rollback;      // p g m v
    BlockFunction lion;               // p g m
    BlockFunction lamb_moments;       // p g m v -> sum p^2, sum u^2
    BlockFunction lamb_apply;         // p m v
    BlockFunction adagrad;            // p g s
    BlockFunction sgd;                // p g [b]
    BlockFunction sum_of_squares;     // x -> sum (factor x)^2
    BlockFunction unscale;            // x -> sum (factor x)^2

    // Conversions of any number of elements; no alignment is asked for.
    void (*bf16_to_f32)(const std::uint16_t* from, float* to, std::size_t count);
    void (*f32_to_bf16)(const float* from, std::uint16_t* to, std::size_t count);
    void (*f16_to_f32)(const std::uint16_t* from, float* to, std::size_t count);
    void (*f32_to_f16)(const float* from, std::uint16_t* to, std::size_t count);

    QuantKernels quant;
    FoldKernels fold;

    const MatmulKernels* matmul;  // of translation units of its own: cpu.cpp puts it in
};

const KernelTable* baseline_kernels();
// Null where the architecture or the compiler of this build lacks the instruction set.
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();
const KernelTable* avx512_bf16_kernels();

}  // namespace drivetrain

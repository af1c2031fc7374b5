// Optimizer steps and reductions over many tensors, one pass over memory each. The formulas are those of reference.py.
#pragma once

#include <vector>

#include "elementwise.h"

namespace drivetrain {

struct AdamStep {
    double lr, beta1, beta2, eps, weight_decay;
    double correction1, correction2;  // 1 - beta^t, or 1
    bool decoupled;
    double factor;
};

struct LionStep {
    double lr, beta1, beta2, weight_decay, factor;
};

struct LambStep {
    double lr, beta1, beta2, eps, weight_decay;
    double correction1, correction2;
    bool eps_inside_sqrt;
    double factor;
};

struct AdagradStep {
    double lr, eps, weight_decay, factor;
};

struct SgdStep {
    double lr, momentum, dampening, weight_decay;
    bool nesterov, first;
    double factor;
};

// Streams: parameter, gradient, exp_avg, exp_avg_sq, and max_exp_avg_sq for AMSGrad.
void adam_step(const AdamStep& step, const Operands& operands, int threads);
// Streams: parameter, gradient, exp_avg, exp_avg_sq. Weight decay must be decoupled.
void adam_rollback(const AdamStep& step, const Operands& operands, int threads);
// Streams: parameter, gradient, exp_avg.
void lion_step(const LionStep& step, const Operands& operands, int threads);
// Streams: parameter, gradient, exp_avg, exp_avg_sq. Returns |p|^2 and |u|^2 of each tensor in turn.
std::vector<double> lamb_moments(const LambStep& step, const Operands& operands, int threads);
// Streams: parameter, exp_avg, exp_avg_sq.
void lamb_apply(const LambStep& step, const std::vector<double>& ratios, const Operands& operands, int threads);
// Streams: parameter, gradient, sum.
void adagrad_step(const AdagradStep& step, const Operands& operands, int threads);
// Streams: parameter, gradient, and the momentum buffer if momentum isn't 0.
void sgd_step(const SgdStep& step, const Operands& operands, int threads);
// Stream: x. Returns the sum of (factor * x)^2 over all tensors; finite exactly if every factor * x is.
double sum_of_squares(double factor, const Operands& operands, int threads);
// The same, and writes factor * x back.
double unscale(double factor, const Operands& operands, int threads);

}  // namespace drivetrain

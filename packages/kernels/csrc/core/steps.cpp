#include "steps.h"

#include <cmath>

#include "cpu.h"

namespace drivetrain {
namespace {

constexpr Access kRead = Access::read;
constexpr Access kWrite = Access::write_back;

float narrow(double value) { return static_cast<float>(value); }

AdamScalars scalars_of(const AdamStep& step) {
    AdamScalars c{};
    c.factor = narrow(step.factor);
    c.beta1 = narrow(step.beta1);
    c.one_minus_beta1 = narrow(1.0 - step.beta1);
    c.beta2 = narrow(step.beta2);
    c.one_minus_beta2 = narrow(1.0 - step.beta2);
    c.decay = step.decoupled ? narrow(1.0 - step.lr * step.weight_decay) : 1.0f;
    c.l2 = step.decoupled ? 0.0f : narrow(step.weight_decay);
    c.inverse_root2 = narrow(1.0 / std::sqrt(step.correction2));
    c.eps = narrow(step.eps);
    c.step_size = narrow(step.lr / step.correction1);
    c.inverse_beta1 = step.beta1 > 0.0 ? narrow(1.0 / step.beta1) : 0.0f;
    c.inverse_beta2 = step.beta2 > 0.0 ? narrow(1.0 / step.beta2) : 0.0f;
    return c;
}

LambScalars scalars_of(const LambStep& step) {
    LambScalars c{};
    c.factor = narrow(step.factor);
    c.beta1 = narrow(step.beta1);
    c.one_minus_beta1 = narrow(1.0 - step.beta1);
    c.beta2 = narrow(step.beta2);
    c.one_minus_beta2 = narrow(1.0 - step.beta2);
    c.inverse_correction1 = narrow(1.0 / step.correction1);
    c.inverse_correction2 = narrow(1.0 / step.correction2);
    c.eps_inside = step.eps_inside_sqrt ? narrow(step.eps) : 0.0f;
    c.eps_outside = step.eps_inside_sqrt ? 0.0f : narrow(step.eps);
    c.weight_decay = narrow(step.weight_decay);
    return c;
}

double total(const std::vector<double>& sums) {
    double all = 0.0;
    for (const double sum : sums) all += sum;
    return all;
}

}  // namespace

void adam_step(const AdamStep& step, const Operands& operands, int threads) {
    const AdamScalars scalars = scalars_of(step);
    const KernelTable& table = kernels();
    const bool l2 = scalars.l2 != 0.0f;
    Loop loop{l2 ? table.adam_l2 : table.adam, {kWrite, kRead, kWrite, kWrite}, {&scalars}};
    if (operands.streams.size() == 5) {
        loop.block = l2 ? table.adam_amsgrad_l2 : table.adam_amsgrad;
        loop.access.push_back(kWrite);
    }
    run_elementwise(loop, operands, threads);
}

void adam_rollback(const AdamStep& step, const Operands& operands, int threads) {
    const AdamScalars scalars = scalars_of(step);
    run_elementwise({kernels().adam_rollback, {kWrite, kRead, kWrite, kWrite}, {&scalars}}, operands, threads);
}

void lion_step(const LionStep& step, const Operands& operands, int threads) {
    LionScalars scalars{};
    scalars.factor = narrow(step.factor);
    scalars.beta1 = narrow(step.beta1);
    scalars.one_minus_beta1 = narrow(1.0 - step.beta1);
    scalars.beta2 = narrow(step.beta2);
    scalars.one_minus_beta2 = narrow(1.0 - step.beta2);
    scalars.decay = narrow(1.0 - step.lr * step.weight_decay);
    scalars.lr = narrow(step.lr);
    run_elementwise({kernels().lion, {kWrite, kRead, kWrite}, {&scalars}}, operands, threads);
}

std::vector<double> lamb_moments(const LambStep& step, const Operands& operands, int threads) {
    const LambScalars scalars = scalars_of(step);
    return run_elementwise({kernels().lamb_moments, {kRead, kRead, kWrite, kWrite}, {&scalars}, 2}, operands, threads);
}

void lamb_apply(const LambStep& step, const std::vector<double>& ratios, const Operands& operands, int threads) {
    std::vector<LambScalars> scalars(ratios.size(), scalars_of(step));
    Loop loop{kernels().lamb_apply, {kWrite, kRead, kRead}, {}};
    for (std::size_t tensor = 0; tensor < ratios.size(); ++tensor) {
        scalars[tensor].step_size = narrow(step.lr * ratios[tensor]);
        loop.scalars.push_back(&scalars[tensor]);
    }
    run_elementwise(loop, operands, threads);
}

void adagrad_step(const AdagradStep& step, const Operands& operands, int threads) {
    AdagradScalars scalars{};
    scalars.factor = narrow(step.factor);
    scalars.l2 = narrow(step.weight_decay);
    scalars.eps = narrow(step.eps);
    scalars.lr = narrow(step.lr);
    run_elementwise({kernels().adagrad, {kWrite, kRead, kWrite}, {&scalars}}, operands, threads);
}

void sgd_step(const SgdStep& step, const Operands& operands, int threads) {
    SgdScalars scalars{};
    scalars.factor = narrow(step.factor);
    scalars.l2 = narrow(step.weight_decay);
    scalars.momentum = narrow(step.momentum);
    scalars.one_minus_dampening = narrow(1.0 - step.dampening);
    scalars.lr = narrow(step.lr);
    scalars.has_momentum = operands.streams.size() == 3;
    scalars.nesterov = step.nesterov;
    scalars.first = step.first;
    Loop loop{kernels().sgd, {kWrite, kRead}, {&scalars}};
    if (scalars.has_momentum) loop.access.push_back(kWrite);
    run_elementwise(loop, operands, threads);
}

double sum_of_squares(double factor, const Operands& operands, int threads) {
    const ScaleScalars scalars{narrow(factor)};
    return total(run_elementwise({kernels().sum_of_squares, {kRead}, {&scalars}, 1}, operands, threads));
}

double unscale(double factor, const Operands& operands, int threads) {
    const ScaleScalars scalars{narrow(factor)};
    return total(run_elementwise({kernels().unscale, {kWrite}, {&scalars}, 1}, operands, threads));
}

}  // namespace drivetrain

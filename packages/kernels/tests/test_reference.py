"""The plain-torch ops against hand-written float64 formulas and against torch's own optimizers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import AdagradRule, AdamRule, LambRule, LionRule, SgdRule
from drivetrain.kernels.torch_ops import steps as reference

SIZES = [(0,), (1,), (5,), (123,), (4097,), (3, 5, 7)]


def _random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("amsgrad", [True, False])
def test_adam_equals_torch_over_100_steps(shape: tuple[int, ...], decoupled: bool, amsgrad: bool) -> None:
    ours = _random(shape, 0, torch.float32)
    theirs = torch.nn.Parameter(ours.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    peer = kind([theirs], lr=3e-3, betas=(0.9, 0.98), eps=1e-7, weight_decay=0.1, amsgrad=amsgrad, foreach=False)
    rule = AdamRule(lr=3e-3, beta1=0.9, beta2=0.98, eps=1e-7, weight_decay=0.1, decoupled=decoupled)
    m, v, top = torch.zeros_like(ours), torch.zeros_like(ours), torch.zeros_like(ours)
    for step in range(1, 101):
        grad = _random(shape, step, torch.float32)
        theirs.grad = grad.clone()
        peer.step()
        reference.adam_step([ours], [grad], [m], [v], rule=rule, step=step, max_exp_avg_sqs=[top] if amsgrad else None)
    torch.testing.assert_close(ours, theirs.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("lr_decay", [0.0, 0.01])
def test_adagrad_equals_torch_over_100_steps(shape: tuple[int, ...], lr_decay: float) -> None:
    ours = _random(shape, 0, torch.float32)
    theirs = torch.nn.Parameter(ours.clone())
    peer = torch.optim.Adagrad([theirs], lr=0.05, lr_decay=lr_decay, weight_decay=0.01, foreach=False)
    rule = AdagradRule(lr=0.05, lr_decay=lr_decay, weight_decay=0.01)
    total = torch.zeros_like(ours)
    for step in range(1, 101):
        grad = _random(shape, step, torch.float32)
        theirs.grad = grad.clone()
        peer.step()
        reference.adagrad_step([ours], [grad], [total], rule=rule, step=step)
    torch.testing.assert_close(ours, theirs.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"), [(0.0, 0.0, False), (0.9, 0.1, False), (0.9, 0.0, True)]
)
def test_sgd_equals_torch_over_100_steps(
    shape: tuple[int, ...], momentum: float, dampening: float, nesterov: bool
) -> None:
    ours = _random(shape, 0, torch.float32)
    theirs = torch.nn.Parameter(ours.clone())
    peer = torch.optim.SGD(
        [theirs], lr=0.01, momentum=momentum, dampening=dampening, nesterov=nesterov, weight_decay=0.01, foreach=False
    )
    rule = SgdRule(lr=0.01, momentum=momentum, dampening=dampening, nesterov=nesterov, weight_decay=0.01)
    buffers = [torch.zeros_like(ours)] if momentum else None
    for step in range(1, 101):
        grad = _random(shape, step, torch.float32)
        theirs.grad = grad.clone()
        peer.step()
        reference.sgd_step([ours], [grad], buffers, rule=rule, first=step == 1)
    torch.testing.assert_close(ours, theirs.detach(), atol=1e-6, rtol=1e-5)


def test_lion_follows_its_formula() -> None:
    p, m, g = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([0.1, -0.1, 0.0]), torch.tensor([-1.0, 0.5, 0.0])
    reference.lion_step([p], [g], [m], rule=LionRule(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.5))
    # 0.9*m + 0.1*g = [-0.01, -0.04, 0]: signs -1, -1, 0; decay multiplies by 0.95.
    torch.testing.assert_close(p, torch.tensor([1.05, -1.8, 0.475]))
    torch.testing.assert_close(m, torch.tensor([0.089, -0.094, 0.0]))


@pytest.mark.parametrize("eps_inside_sqrt", [False, True])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_lamb_follows_its_formula(eps_inside_sqrt: bool, bias_correction: bool) -> None:
    rule = LambRule(
        lr=0.1,
        beta1=0.8,
        beta2=0.9,
        eps=1e-3,
        eps_inside_sqrt=eps_inside_sqrt,
        weight_decay=0.01,
        bias_correction=bias_correction,
    )
    p, g = _random((37,), 1), _random((37,), 2)
    m, v = _random((37,), 3), _random((37,), 4).abs()
    expected_m = 0.8 * m + 0.2 * g
    expected_v = 0.9 * v + 0.1 * g * g
    m_hat = expected_m / (1 - 0.8**3) if bias_correction else expected_m
    v_hat = expected_v / (1 - 0.9**3) if bias_correction else expected_v
    denominator = (v_hat + 1e-3).sqrt() if eps_inside_sqrt else v_hat.sqrt() + 1e-3
    u = m_hat / denominator + 0.01 * p
    expected_p = p - 0.1 * (p.norm() / u.norm()).clamp(0.01, 10.0) * u

    norms = reference.lamb_moments([p], [g], [m], [v], rule=rule, step=3)
    torch.testing.assert_close(norms, torch.stack([p.norm(), u.norm()]).square().float()[None])
    reference.lamb_apply([p], [m], [v], reference.lamb_ratios(norms, rule), rule=rule, step=3)
    torch.testing.assert_close(m, expected_m)
    torch.testing.assert_close(v, expected_v)
    torch.testing.assert_close(p, expected_p, atol=1e-7, rtol=1e-6)  # the ratio is float32


def test_lamb_ratio_is_clamped_and_one_for_a_zero_norm() -> None:
    norms = torch.tensor([[0.0, 4.0], [4.0, 0.0], [4.0, 1.0], [1e6, 1.0], [1.0, 1e6]])
    assert reference.lamb_ratios(norms, LambRule()).tolist() == pytest.approx([1.0, 1.0, 2.0, 10.0, 0.01])


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_adam_rollback_undoes_a_step(beta1: float) -> None:
    rule = AdamRule(lr=1e-2, beta1=beta1, weight_decay=0.1)
    p, m, v = (
        _random((123,), 1, torch.float32),
        _random((123,), 2, torch.float32),
        _random((123,), 3, torch.float32).square(),
    )
    if beta1 == 0.0:
        m.zero_()
    before = (p.clone(), m.clone(), v.clone())
    grad = _random((123,), 4, torch.float32)
    reference.adam_step([p], [grad], [m], [v], rule=rule, step=7, factor=0.5)
    assert not torch.allclose(p, before[0], atol=1e-4)
    reference.adam_rollback([p], [grad], [m], [v], rule=rule, step=7, factor=0.5)
    for value, old in zip((p, m, v), before, strict=True):
        torch.testing.assert_close(value, old, atol=1e-6, rtol=1e-5)


def test_adam_rollback_refuses_coupled_weight_decay() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match=r"decoupled=False.*cannot be solved backwards.*weight_decay=0.1"):
        reference.adam_rollback([one], [one], [one], [one], rule=AdamRule(weight_decay=0.1, decoupled=False), step=1)


def test_factor_scales_the_gradient_and_leaves_it_untouched() -> None:
    grad = _random((11,), 5, torch.float32)
    kept = grad.clone()
    results = []
    for factor, used in ((0.25, grad), (1.0, grad * 0.25)):
        p, m, v = torch.ones(11), torch.zeros(11), torch.zeros(11)
        reference.adam_step([p], [used], [m], [v], rule=AdamRule(), step=1, factor=factor)
        results.append(p)
    assert torch.equal(results[0], results[1])
    assert torch.equal(grad, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_are_stepped_in_float32(dtype: torch.dtype) -> None:
    p, g = _random((63,), 1).to(dtype), _random((63,), 2).to(dtype)
    exact, m, v = p.float(), torch.zeros(63), torch.zeros(63)
    copy = torch.empty(63, dtype=torch.bfloat16)
    reference.adam_step([p], [g], [m], [v], rule=AdamRule(lr=0.1), step=1, copies=[copy])
    m2, v2 = torch.zeros(63), torch.zeros(63)
    reference.adam_step([exact], [g.float()], [m2], [v2], rule=AdamRule(lr=0.1), step=1)
    assert torch.equal(p, exact.to(dtype))
    assert torch.equal(copy, exact.bfloat16())
    assert torch.equal(m, m2)
    assert torch.equal(v, v2)


def test_sum_of_squares_tells_norm_and_overflow() -> None:
    huge = [torch.full((5,), 3e38), torch.tensor([2.0, 1.0]).bfloat16(), torch.empty(0)]
    total = reference.sum_of_squares(huge)
    assert total.dtype == torch.float64
    assert float(total) == pytest.approx(5 * float(torch.tensor(3e38)) ** 2, rel=1e-12)
    assert float(reference.sum_of_squares([torch.tensor([3.0, 4.0])], factor=0.5)) == 6.25
    assert float(reference.sum_of_squares([])) == 0.0
    for bad in (math.nan, math.inf, -math.inf):
        assert not math.isfinite(float(reference.sum_of_squares([torch.ones(3), torch.tensor([1.0, bad])])))


def test_unscale_writes_in_place_and_sums() -> None:
    tensors = [torch.tensor([2.0, 4.0]), torch.tensor([8.0]).half()]
    total = reference.unscale(tensors, 0.5)
    assert tensors[0].tolist() == [1.0, 2.0]
    assert tensors[1].tolist() == [4.0]
    assert float(total) == 21.0


def test_a_nan_in_one_element_stays_in_that_element() -> None:
    grad = torch.tensor([1.0, math.nan, math.inf, 1.0])
    p, m, v = torch.ones(4), torch.zeros(4), torch.zeros(4)
    reference.adam_step([p], [grad], [m], [v], rule=AdamRule(lr=0.1), step=1)
    assert torch.isnan(p).tolist() == [False, True, True, False]
    p, m = torch.ones(4), torch.zeros(4)
    reference.lion_step([p], [grad], [m], rule=LionRule(lr=0.1))
    assert torch.isnan(m).tolist() == [False, True, False, False]
    assert torch.isfinite(p).all()


def test_momentum_buffers_must_match_the_rule() -> None:
    with pytest.raises(ValueError, match=r"momentum=0\.9 and no buffers"):
        reference.sgd_step([torch.ones(1)], [torch.ones(1)], None, rule=SgdRule(momentum=0.9))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamRule(lr=-1.0), r"Adam: lr must be a finite number >= 0, found -1\.0"),
        (lambda: AdamRule(lr=math.nan), "Adam: lr must be a finite number"),
        (lambda: AdamRule(beta1=1.0), r"Adam: beta1 must lie in \[0, 1\), found 1\.0"),
        (lambda: LionRule(beta2=-0.1), r"Lion: beta2 must lie in \[0, 1\)"),
        (lambda: LambRule(min_coeff=2.0, max_coeff=1.0), "min_coeff must not be above max_coeff"),
        (lambda: AdagradRule(eps=-1e-3), "Adagrad: eps must be"),
        (lambda: SgdRule(nesterov=True), "nesterov needs momentum above 0"),
        (lambda: AdamRule().corrections(0), "counts from 1, found 0"),
    ],
)
def test_rules_refuse_bad_values(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()

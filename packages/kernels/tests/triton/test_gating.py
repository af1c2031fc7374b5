"""Routing in Triton against plain torch: the same experts, and weights and gradients as near as float32 allows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import implementation
from drivetrain.kernels.gating_rules import GatingRule

RULES = [
    GatingRule(k=2, experts=8),
    GatingRule(k=1, experts=5, renormalize=False, scale=3.0),
    GatingRule(k=3, experts=24, renormalize=False, groups=4, top_groups=2, group_best=1, scale=16.0),
    GatingRule(k=4, experts=21, scoring="sigmoid", groups=7, top_groups=3, scale=2.5),
    GatingRule(k=8, experts=256, scoring="sigmoid", groups=8, top_groups=4, scale=2.5),
    GatingRule(k=13, experts=123),
    GatingRule(k=5, experts=5),
    GatingRule(k=1, experts=1),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.k}of{r.experts}-{r.scoring}-{r.groups}")
NAN, INF = math.nan, math.inf


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _rounding(dtype: torch.dtype, device: str) -> float:
    """The largest relative error of one rounding to `dtype`. The interpreter cuts bfloat16 off instead."""
    return torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 and device == "cpu" else 2)


def _both(logits: Tensor, bias: Tensor | None, rule: GatingRule) -> list[tuple[Tensor, Tensor]]:
    return [implementation("top_k_gating", kind)(logits, bias, rule=rule) for kind in ("triton", "torch")]


@every_rule
@pytest.mark.parametrize(
    ("biased", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16), (True, torch.float16)]
)
def test_it_is_the_reference(device: str, rule: GatingRule, biased: bool, dtype: torch.dtype) -> None:
    logits = _random(19, rule.experts).to(device, dtype).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    bias = 0.1 * _random(rule.experts, seed=2).to(device) if biased else None
    weights, experts = implementation("top_k_gating", "triton")(logits, bias, rule=rule)
    expected, expected_experts = implementation("top_k_gating", "torch")(exact, bias, rule=rule)
    assert weights.dtype == torch.float32
    assert torch.equal(experts, expected_experts)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)
    incoming = _random(19, rule.k, seed=3).to(device)
    (grad,) = torch.autograd.grad(weights, logits, incoming)
    (expected_grad,) = torch.autograd.grad(expected, exact, incoming.double())
    assert grad.dtype == dtype
    rtol = _rounding(dtype, device) + 1e-5
    torch.testing.assert_close(grad.double(), expected_grad, rtol=rtol, atol=1e-6 * rule.scale)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [None, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_ties_are_broken_alike(device: str, scoring: str, groups: int | None, biased: bool) -> None:
    rule = GatingRule(
        k=4,
        experts=12,
        scoring=scoring,  # type: ignore[arg-type]
        groups=groups,
        top_groups=None if groups is None else 2,
    )
    # Of 0, 1 and 2 no two pairs have scores of nearly the same sum, whose order rounding would decide.
    logits = torch.randint(0, 3, (200, 12), generator=torch.Generator().manual_seed(1)).float().to(device)
    logits[logits == 0] *= -1.0  # zeros of both signs are equal
    logits[0] = 0.0
    bias = torch.full((12,), 0.25, device=device) if biased else None
    (_, experts), (_, expected) = _both(logits, bias, rule)
    assert torch.equal(experts, expected)
    assert experts[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [None, 3])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy's, of NaN and infinity
def test_nan_and_infinity_are_treated_alike(device: str, scoring: str, groups: int | None, biased: bool) -> None:
    rule = GatingRule(
        k=3,
        experts=6,
        scoring=scoring,  # type: ignore[arg-type]
        groups=groups,
        top_groups=None if groups is None else 2,
    )
    low = torch.finfo(torch.float32).min
    rows = [
        [NAN] * 6,
        [0, 1, 2, NAN, 4, 5],
        [-INF] * 6,
        [INF] * 6,
        [-INF, low, -INF, -INF, -INF, 1],
        [NAN, 1, -INF] * 2,
    ]
    logits = torch.tensor(rows, device=device)
    bias = torch.tensor([0.0, 0.1, -INF, 0.2, -INF, NAN], device=device) if biased else None
    (weights, experts), (expected_weights, expected) = _both(logits, bias, rule)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights, equal_nan=True)
    assert weights[0].isnan().all()


def test_no_tokens_strided_logits_and_float64(device: str) -> None:
    op = implementation("top_k_gating", "triton")
    rule = GatingRule(k=2, experts=4)
    empty = torch.empty(0, 4, device=device, requires_grad=True)
    weights, experts = op(empty, None, rule=rule)
    assert weights.shape == experts.shape == (0, 2)
    (grad,) = torch.autograd.grad(weights.sum(), empty)
    assert grad.shape == (0, 4)
    wide = _random(9, 7).to(device)
    incoming = _random(9, 2, seed=2).to(device)
    for view in (wide[:, 1:5], _random(4, 9).to(device).t()):
        strided = view.detach().requires_grad_()
        plain = view.detach().contiguous().requires_grad_()
        found, expected = op(strided, None, rule=rule), op(plain, None, rule=rule)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        (grad,) = torch.autograd.grad(found[0], strided, incoming)
        (expected_grad,) = torch.autograd.grad(expected[0], plain, incoming)
        assert torch.equal(grad, expected_grad)
    with pytest.raises(TypeError, match=r"dtype torch.float64; expected float32, bfloat16 or float16"):
        op(wide.double(), None, rule=GatingRule(k=2, experts=7))

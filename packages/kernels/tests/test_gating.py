"""Routing against its definition, written out for one token in plain Python, and its gradients against autograd's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.kernels import top_k_gating
from drivetrain.kernels.gating_rules import GatingRule, Scoring

RULES = [
    GatingRule(k=2, experts=8),
    GatingRule(k=1, experts=8, renormalize=False),
    GatingRule(k=5, experts=5, scoring="sigmoid"),
    GatingRule(k=3, experts=24, renormalize=False, groups=4, top_groups=2, group_best=1, scale=16.0),
    GatingRule(k=4, experts=21, scoring="sigmoid", groups=7, top_groups=3, scale=2.5),
    GatingRule(k=8, experts=256, scoring="sigmoid", groups=8, top_groups=4, scale=2.5),
    GatingRule(k=1, experts=1),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.k}of{r.experts}-{r.scoring}-{r.groups}")
NAN, INF = math.nan, math.inf


def _gate(logits: Tensor, rule: GatingRule, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return top_k_gating(
        logits,
        rule.k,
        scoring=rule.scoring,
        renormalize=rule.renormalize,
        bias=bias,
        groups=rule.groups,
        top_groups=rule.top_groups,
        group_best=rule.group_best,
        scale=rule.scale,
    )


def _random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _best(values: list[float], count: int, among: list[int]) -> list[int]:
    return sorted(among, key=lambda i: (-values[i], i))[:count]


def _chosen(logits: Tensor, bias: Tensor | None, rule: GatingRule) -> list[int]:
    """The definition, for one token."""
    scores = logits.softmax(0) if rule.scoring == "softmax" else logits.sigmoid()
    values = (scores if bias is None else scores + bias).tolist()
    allowed = list(range(rule.experts))
    if rule.groups is not None and rule.top_groups is not None:
        size = rule.group_size
        runs = [values[start : start + size] for start in range(0, rule.experts, size)]
        totals = [sum(sorted(run, reverse=True)[: rule.group_best]) for run in runs]
        best = _best(totals, rule.top_groups, list(range(rule.groups)))
        allowed = [expert for expert in allowed if expert // size in best]
    return _best(logits.tolist() if bias is None else values, rule.k, allowed)


def _weights(logits: Tensor, experts: Tensor, rule: GatingRule) -> Tensor:
    scores = logits.softmax(1) if rule.scoring == "softmax" else logits.sigmoid()
    weights = torch.einsum("te,tke->tk", scores, torch.nn.functional.one_hot(experts, rule.experts).to(scores.dtype))
    return rule.scale * (weights / weights.sum(1, keepdim=True) if rule.renormalize else weights)


@every_rule
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_its_definition(rule: GatingRule, biased: bool) -> None:
    logits = _random(29, rule.experts).requires_grad_()
    bias = 0.3 * _random(rule.experts, seed=2) if biased else None
    weights, experts = _gate(logits, rule, bias)
    assert experts.dtype == torch.int64
    assert experts.tolist() == [_chosen(row, bias, rule) for row in logits.detach()]
    expected = _weights(logits, experts, rule)
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=0.0)
    incoming = _random(29, rule.k, seed=3)
    (grad,) = torch.autograd.grad(weights, logits, incoming)
    (expected_grad,) = torch.autograd.grad(expected, logits, incoming)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-14)


# Of 0, 1 and 2 no two pairs have scores of nearly the same sum, whose order rounding would decide.
@given(
    logits=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    k=st.integers(1, 4),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    grouped=st.booleans(),
    biased=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_equal_logits_are_chosen_lowest_first(
    logits: list[int], k: int, scoring: Scoring, grouped: bool, biased: bool
) -> None:
    rule = GatingRule(k=k, experts=6, scoring=scoring)
    if grouped:
        rule = replace(rule, groups=3, top_groups=2)
    row = torch.tensor(logits, dtype=torch.float32)
    bias = torch.full((6,), 0.25) if biased else None
    assert _gate(row[None], rule, bias)[1].tolist() == [_chosen(row, bias, rule)]


def test_logits_decide_where_scores_are_rounded_to_the_same_number() -> None:
    logits = torch.tensor([[30.0, 31.0, -300.0, -200.0]])
    assert _gate(logits, GatingRule(k=4, experts=4, scoring="sigmoid"))[1].tolist() == [[1, 0, 3, 2]]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    bias = torch.tensor([0.0, 0.0, 9.0], requires_grad=True)
    weights, experts = top_k_gating(logits, 2, scoring="sigmoid", bias=bias, renormalize=False)
    assert experts.tolist() == [[2, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, torch.tensor(2.0).sigmoid().item()]]))
    weights.sum().backward()
    assert bias.grad is None
    assert logits.grad is not None
    assert logits.grad[0, 1] == 0


def test_renormalized_weights_sum_to_the_scale_even_when_scores_underflow() -> None:
    weights, _ = top_k_gating(_random(50, 16, dtype=torch.float32) * 9, 4, scale=2.5)
    torch.testing.assert_close(weights.sum(1), torch.full((50,), 2.5))
    assert top_k_gating(torch.full((1, 4), -1e4), 2, scoring="sigmoid")[0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [None, 3])
@pytest.mark.parametrize("biased", [False, True])
def test_nan_and_infinity_leave_indices_in_range_and_nan_is_seen(
    scoring: Scoring, groups: int | None, biased: bool
) -> None:
    logits = torch.tensor(
        [[NAN] * 6, [0, 1, 2, NAN, 4, 5], [-INF] * 6, [INF] * 6, [-INF, -INF, -INF, -INF, -INF, 1], [NAN, 1, -INF] * 2]
    )
    bias = torch.tensor([0.0, 0.1, -INF, 0.2, -INF, 0.0]) if biased else None
    top_groups = None if groups is None else 2
    weights, experts = top_k_gating(logits, 3, scoring=scoring, bias=bias, groups=groups, top_groups=top_groups)
    assert bool(((experts >= 0) & (experts < 6)).all())
    assert all(len(set(row)) == 3 for row in experts.tolist())
    assert weights[[0, 1, 5]].isnan().any(1).all()
    if not biased:
        assert experts[0].tolist() == [0, 1, 2]
        assert experts[4, 0] == 5
    if not biased and scoring == "sigmoid":
        assert experts[1, 0] == 3
        assert experts[5, :2].tolist() == [0, 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits = _random(40, 12, dtype=dtype).requires_grad_()
    wide = logits.detach().float().requires_grad_()
    found, expected = top_k_gating(logits, 3), top_k_gating(wide, 3)
    assert found[0].dtype == torch.float32
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    incoming = _random(40, 3, dtype=torch.float32)
    (grad,) = torch.autograd.grad(found[0], logits, incoming)
    (expected_grad,) = torch.autograd.grad(expected[0], wide, incoming)
    assert torch.equal(grad, expected_grad.to(dtype))


def test_no_tokens_and_strided_logits() -> None:
    weights, experts = top_k_gating(torch.empty(0, 4), 2, groups=2, top_groups=1)
    assert weights.shape == experts.shape == (0, 2)
    logits = _random(8, 30, dtype=torch.float32)
    for found, expected in zip(top_k_gating(logits.t(), 2), top_k_gating(logits.t().contiguous(), 2), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 7}, "k must lie in 1 to 6, the number of experts; found 7"),
        ({"k": 0}, "found 0"),
        ({"scoring": "relu"}, "softmax, sigmoid; found 'relu'"),
        ({"groups": 3}, "give both, or neither"),
        ({"groups": 4, "top_groups": 2}, "groups must divide the number of experts, 6; found 4"),
        ({"groups": 3, "top_groups": 4}, "top_groups must lie in 1 to 3; found 4"),
        ({"groups": 3, "top_groups": 1, "k": 3}, "1 groups of 2 experts hold only 2"),
        ({"groups": 3, "top_groups": 1, "group_best": 0}, "group_best must be at least 1"),
        ({"scale": NAN}, "scale must be finite"),
        ({"bias": torch.zeros(5)}, "one floating-point number for each of 6 experts"),
        ({"logits": torch.zeros(2, 3, 6)}, r"shape \(2, 3, 6\); expected \[tokens, experts\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"logits": torch.zeros(2, 6), "k": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        top_k_gating(**given)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"logits have dtype torch.int64"):
        top_k_gating(torch.zeros(2, 6, dtype=torch.int64), 2)

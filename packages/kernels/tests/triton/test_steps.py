"""Steps in Triton beside those in plain torch, in float64 and in their own dtype; equal bits however they are cut."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import AdagradRule, AdamRule, LambRule, LionRule, SgdRule, implementation
from drivetrain.kernels.torch_ops.steps import lamb_ratios

NAMES = ("adam_step", "adam_rollback", "lion_step", "lamb_moments", "lamb_apply", "adagrad_step", "sgd_step")
FAST, PLAIN = (
    SimpleNamespace(**{name: implementation(name, kind) for name in NAMES})  # type: ignore[arg-type]
    for kind in ("triton", "torch")
)
SIZES = [(0,), (1,), (5,), (123,), (1025,), (2, 3, 4)]
HALF = [torch.bfloat16, torch.float16]

# Every step as run(ops, p, g, m, v, copies): lists of tensors; m and v are states, v is not negative.
Run = Callable[[Any, list[Tensor], list[Tensor], list[Tensor], list[Tensor], Any], object]

ADAM = AdamRule(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1)
ADAM_L2 = AdamRule(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, decoupled=False)
NO_BETAS = AdamRule(lr=0.1, beta1=0.0, beta2=0.0, bias_correction=False)
LION = LionRule(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1)
LAMB = LambRule(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1)
LAMB_INSIDE = LambRule(lr=0.1, eps=1e-3, eps_inside_sqrt=True, bias_correction=False)
ADAGRAD = AdagradRule(lr=0.1, lr_decay=0.1, weight_decay=0.1)
SGD = SgdRule(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1)
NESTEROV = SgdRule(lr=0.1, momentum=0.9, nesterov=True)


def _lamb(rule: LambRule) -> Run:
    def run(ops: Any, p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor], copies: Any) -> object:
        norms = ops.lamb_moments(p, g, m, v, rule=rule, step=3, factor=0.5)
        ops.lamb_apply(p, m, v, lamb_ratios(norms, rule), rule=rule, step=3, copies=copies)
        return norms

    return run


STEPS: dict[str, Run] = {
    "adamw": lambda o, p, g, m, v, c: o.adam_step(p, g, m, v, rule=ADAM, step=3, factor=0.5, copies=c),
    "adam_l2": lambda o, p, g, m, v, c: o.adam_step(p, g, m, v, rule=ADAM_L2, step=3, copies=c),
    "amsgrad": lambda o, p, g, m, v, c: o.adam_step(
        p, g, m, v, rule=ADAM, step=3, max_exp_avg_sqs=[x.flip(0).clone() for x in v], copies=c
    ),
    "adam_rollback": lambda o, p, g, m, v, c: o.adam_rollback(p, g, m, v, rule=ADAM, step=3, factor=0.5, copies=c),
    "adam_rollback_no_betas": lambda o, p, g, m, v, c: o.adam_rollback(p, g, m, v, rule=NO_BETAS, step=3, copies=c),
    "lion": lambda o, p, g, m, v, c: o.lion_step(p, g, m, rule=LION, factor=0.5, copies=c),
    "lamb": _lamb(LAMB),
    "lamb_eps_inside": _lamb(LAMB_INSIDE),
    "adagrad": lambda o, p, g, m, v, c: o.adagrad_step(p, g, v, rule=ADAGRAD, step=3, factor=0.5, copies=c),
    "sgd": lambda o, p, g, m, v, c: o.sgd_step(p, g, m, rule=SGD, factor=0.5, copies=c),
    "sgd_first": lambda o, p, g, m, v, c: o.sgd_step(p, g, m, rule=SGD, first=True, copies=c),
    "sgd_nesterov": lambda o, p, g, m, v, c: o.sgd_step(p, g, m, rule=NESTEROV, copies=c),
    "sgd_plain": lambda o, p, g, m, v, c: o.sgd_step(p, g, None, rule=SgdRule(lr=0.1), copies=c),
}
steps = pytest.mark.parametrize("step", STEPS)


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _columns(shapes: list[tuple[int, ...]], dtypes: tuple[torch.dtype, ...], device: str) -> list[list[Tensor]]:
    """Parameters, gradients, first and second moments, one dtype each."""
    columns = [[_random(shape, 4 * i + j) for i, shape in enumerate(shapes)] for j in range(4)]
    columns[3] = [v.square() + 0.05 for v in columns[3]]
    return [[t.to(device, dtype) for t in column] for column, dtype in zip(columns, dtypes, strict=True)]


def _cast(columns: list[list[Tensor]], dtype: torch.dtype) -> list[list[Tensor]]:
    return [[t.to(dtype, copy=True) for t in column] for column in columns]


def _clone(columns: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[t.clone() for t in column] for column in columns]


@steps
def test_steps_equal_the_float64_reference(step: str, device: str) -> None:
    fast = _columns(SIZES, (torch.float32,) * 4, device)
    exact = _cast(fast, torch.float64)
    copies = [torch.zeros_like(p, dtype=torch.bfloat16) for p in fast[0]]
    STEPS[step](PLAIN, *exact, None)
    STEPS[step](FAST, *fast, copies)
    for got, want in zip(fast, exact, strict=True):
        for one, two in zip(got, want, strict=True):
            torch.testing.assert_close(one.double(), two, atol=2e-6, rtol=2e-6)
    for copy, p in zip(copies, fast[0], strict=True):
        assert torch.equal(copy, p.bfloat16())


@steps
def test_mixed_dtypes_go_together_and_are_rounded_once(step: str, device: str) -> None:
    """Three combinations of dtypes and one tensor for plain torch in one call, copies for some."""
    combinations = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float16)]
    parts = [_columns([(5,), (37,)], (a, b, b, a), device) for a, b in combinations]
    parts.append(_columns([(7,)], (torch.float64,) * 4, device))
    mine = [[t for part in parts for t in part[j]] for j in range(4)]
    theirs = _clone(mine)
    copies: list[list[Tensor | None]] = [
        [None if i % 3 == 0 else torch.zeros_like(p, dtype=HALF[i % 2]) for i, p in enumerate(mine[0])]
        for _ in range(2)
    ]
    STEPS[step](FAST, *mine, copies[0])
    STEPS[step](PLAIN, *theirs, copies[1])
    pairs = [*zip(mine[0], theirs[0], strict=True), *zip(mine[2], theirs[2], strict=True)]
    pairs += [(a, b) for a, b in zip(copies[0], copies[1], strict=True) if a is not None and b is not None]
    for one, two in pairs:
        # One unit in the last place, where float32 results on two sides of a rounding boundary part.
        last = torch.finfo(one.dtype).eps
        torch.testing.assert_close(one, two, atol=4e-6, rtol=max(last, 4e-6))


@pytest.mark.parametrize("step", ["adamw", "lion", "adagrad", "sgd"])
def test_slices_step_as_the_whole_bit_for_bit(step: str, device: str) -> None:
    whole = _columns([(1300,)], (torch.float32, torch.bfloat16, torch.float32, torch.float32), device)
    pieces = [[piece.clone() for piece in t.split([7, 1100, 193])] for (t,) in whole]
    STEPS[step](FAST, *whole, None)
    STEPS[step](FAST, *pieces, None)
    for (one,), many in zip(whole, pieces, strict=True):
        assert torch.equal(one, torch.cat(many))


def test_unaligned_views_and_strided_tensors(device: str) -> None:
    """Addresses that are no multiple of 16 take a kernel of their own, strided tensors plain torch."""
    base = _columns([(40,)], (torch.float32,) * 4, device)
    want, got = _clone(base), _clone(base)
    PLAIN.adam_step(*([t[1:39]] for (t,) in want), rule=ADAM, step=2)
    FAST.adam_step(*([t[1:39]] for (t,) in got), rule=ADAM, step=2)
    for (one,), (two,) in zip(got, want, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-6)
    PLAIN.lion_step(*([t[::3]] for (t,) in want[:3]), rule=LION)
    FAST.lion_step(*([t[::3]] for (t,) in got[:3]), rule=LION)
    for (one,), (two,) in zip(got[:3], want[:3], strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@steps
def test_nan_and_infinity_go_where_the_reference_lets_them(step: str, bad: float, device: str) -> None:
    mine = _columns([(5,)], (torch.float32,) * 4, device)
    mine[1][0][1] = bad
    mine[0][0][3] = bad
    theirs = _clone(mine)
    STEPS[step](FAST, *mine, None)
    STEPS[step](PLAIN, *theirs, None)
    for (one,), (two,) in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=2e-6, equal_nan=True)


def test_tables_follow_tensors_that_moved(device: str) -> None:
    """Lengths stay, addresses change, as gradients' do: the kept map serves, the kept table must not."""
    p = [_random((11,), 1).float().to(device)]
    want = p[0].clone()
    for seed in range(3):
        g = [_random((11,), seed).float().to(device)]
        FAST.sgd_step(p, g, None, rule=SgdRule(lr=0.5))
        want -= 0.5 * g[0]
    torch.testing.assert_close(p[0], want)


def test_norms_keep_the_callers_order(device: str) -> None:
    columns = _columns([(3,), (0,), (2049,), (4,)], (torch.float32,) * 4, device)
    columns[0][3] = columns[0][3].double()  # plain torch, amid the others
    exact = _cast(columns, torch.float64)
    got = FAST.lamb_moments(*columns, rule=LAMB, step=2)
    want = PLAIN.lamb_moments(*exact, rule=LAMB, step=2)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_sums_of_squares_and_unscaling(dtype: torch.dtype, device: str) -> None:
    sum_of_squares, unscale = implementation("sum_of_squares", "triton"), implementation("unscale", "triton")
    plain = implementation("unscale", "torch")
    tensors = [_random(shape, i).to(device, dtype) for i, shape in enumerate(SIZES)]
    tensors.append(_random((9,), 9).to(device))
    exact = [t.double() * 0.5 for t in tensors]
    want = torch.stack([t.square().sum() for t in exact]).sum()
    got = sum_of_squares(tensors, factor=0.5)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, atol=0.0, rtol=1e-6)
    copies = [t.clone() for t in tensors]
    torch.testing.assert_close(unscale(tensors, 0.3), plain(copies, 0.3), atol=0.0, rtol=1e-12)
    for one, two in zip(tensors, copies, strict=True):
        assert torch.equal(one, two)


def test_sums_of_squares_are_finite_exactly_when_everything_is(device: str) -> None:
    sum_of_squares = implementation("sum_of_squares", "triton")
    huge = torch.full((1500,), 3e38, device=device)
    assert float(sum_of_squares([huge])) == pytest.approx(1500 * 9e76)
    for bad in (float("nan"), float("inf")):
        huge[1499] = bad
        assert not torch.isfinite(sum_of_squares([huge]))
    assert float(sum_of_squares([])) == 0.0
    assert float(sum_of_squares([torch.empty(0, device=device)])) == 0.0


def test_casts_round_to_nearest_even(device: str) -> None:
    cast = implementation("cast", "triton")
    sources = [_random((size,), size).to(device, dtype) for dtype in (torch.float32, *HALF) for size in (1, 77)]
    sources.append(torch.tensor([1.00390625, 1.01171875, float("nan"), float("inf"), 1e-41, -0.0], device=device))
    for target_dtype in (torch.float32, *HALF):
        targets = [torch.empty_like(s, dtype=target_dtype) for s in sources]
        cast(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            want = source.to(target_dtype)
            assert torch.equal(target.nan_to_num(7.0), want.nan_to_num(7.0))


def test_what_is_not_parallel_is_refused(device: str) -> None:
    one, two = torch.ones(3, device=device), torch.ones(2, device=device)
    with pytest.raises(ValueError, match="lion_step: grads 0 has 2 elements, but its first operand has 3"):
        FAST.lion_step([one], [two], [one.clone()], rule=LION)
    with pytest.raises(ValueError, match="lion_step: 0 grads for 1 params; the lists must be parallel"):
        FAST.lion_step([one], [], [one.clone()], rule=LION)
    with pytest.raises(ValueError, match="momentum buffers go with a momentum above 0"):
        FAST.sgd_step([one], [one.clone()], None, rule=SGD)
    with pytest.raises(ValueError, match="cannot be solved backwards"):
        FAST.adam_rollback([one], [one.clone()], [one.clone()], [one.clone()], rule=ADAM_L2, step=1)
    with pytest.raises(ValueError, match="expected one ratio for each of 1 tensors"):
        FAST.lamb_apply([one], [one.clone()], [one.clone()], torch.ones(2), rule=LAMB, step=1)


def test_a_stale_saved_parameter_is_noticed(device: str) -> None:
    p = torch.ones(3, device=device, requires_grad=True)
    loss = (p * p).sum()
    with torch.no_grad():
        FAST.sgd_step([p], [torch.ones(3, device=device)], None, rule=SgdRule(lr=0.1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

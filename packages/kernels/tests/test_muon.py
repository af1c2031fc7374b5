"""Orthogonalisation against the exact polynomial of singular values, and `Muon` beside `torch.optim.Muon`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import Muon, MuonRule, orthogonalize
from drivetrain.kernels.rules import NewtonSchulzForm

FORMS: list[NewtonSchulzForm] = ["standard", "gram"]
forms = pytest.mark.parametrize("form", FORMS)
SHAPES = [(1, 1), (1, 5), (5, 1), (12, 12), (12, 31), (31, 12)]


def _random(shape: tuple[int, ...], seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _exact(matrix: Tensor, steps: int = 5) -> Tensor:
    """The polynomial on singular values, in float64."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-7)
    a, b, c = MuonRule().coefficients
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return (u * s[..., None, :]) @ v


@forms
@pytest.mark.parametrize("steps", [0, 1, 3, 4, 5, 7])
def test_the_iteration_is_its_polynomial(form: NewtonSchulzForm, steps: int) -> None:
    for shape in SHAPES:
        matrix = _random(shape)
        torch.testing.assert_close(
            orthogonalize(matrix, form=form, steps=steps), _exact(matrix, steps), atol=1e-9, rtol=1e-9
        )


@forms
def test_singular_values_come_near_one(form: NewtonSchulzForm) -> None:
    found = torch.linalg.svdvals(orthogonalize(_random((24, 96)), form=form))
    assert float(found.min()) > 0.65
    assert float(found.max()) < 1.25


@forms
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.float16, 1e-2), (torch.bfloat16, 8e-2)])
def test_low_precision_stays_near_float64(form: NewtonSchulzForm, dtype: torch.dtype, tolerance: float) -> None:
    for shape in ((24, 96), (96, 24), (48, 48)):
        matrix = _random(shape)
        found = orthogonalize(matrix, form=form, dtype=dtype)
        assert found.dtype == dtype
        want = _exact(matrix)
        assert float((found.double() - want).norm() / want.norm()) < tolerance


@forms
def test_spectra_of_many_orders_do_not_blow_up(form: NewtonSchulzForm) -> None:
    """Small eigenvalues of the Gram matrix drown in the rounding of the large ones; restarts keep that from growing."""
    u, v = torch.linalg.qr(_random((64, 64)))[0], torch.linalg.qr(_random((128, 64), 2))[0]
    for spectrum in (torch.logspace(0, -6, 64), torch.cat([torch.ones(4), torch.full((60,), 1e-3)])):
        matrix = u @ torch.diag(spectrum.double()) @ v.T
        found = orthogonalize(matrix, form=form, dtype=torch.bfloat16)
        assert float(torch.linalg.svdvals(found.double()).max()) < 1.3


@forms
def test_stacks_are_their_matrices(form: NewtonSchulzForm) -> None:
    stack = _random((2, 3, 6, 9))
    found = orthogonalize(stack, form=form)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(found[i, j], orthogonalize(stack[i, j], form=form), atol=1e-12, rtol=1e-12)


@forms
def test_zeros_empties_and_nan(form: NewtonSchulzForm) -> None:
    assert torch.equal(orthogonalize(torch.zeros(3, 5), form=form), torch.zeros(3, 5))
    assert orthogonalize(torch.empty(0, 5), form=form).shape == (0, 5)
    assert orthogonalize(torch.empty(2, 3, 0), form=form).shape == (2, 3, 0)
    bad = torch.ones(2, 2, 3)
    bad[0, 1, 1] = torch.nan
    found = orthogonalize(bad, form=form)
    assert bool(found[0].isnan().all())
    assert bool(found[1].isfinite().all())
    huge = orthogonalize(_random((4, 4)) * 1e30, form=form, dtype=torch.float16)  # scaled before it is rounded
    assert bool(huge.isfinite().all())


def test_a_matrix_without_elements_takes_no_step() -> None:
    empties = [torch.nn.Parameter(torch.empty(shape)) for shape in ((2, 0), (0, 3))]
    full = torch.nn.Parameter(torch.ones(3, 2))
    for param in (*empties, full):
        param.grad = torch.ones_like(param)
    Muon([*empties, full], lr=0.1).step()
    assert [tuple(param.shape) for param in empties] == [(2, 0), (0, 3)]
    assert full.isfinite().all()
    assert not torch.equal(full, torch.ones(3, 2))


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a matrix .* found shape \(3,\)"):
        orthogonalize(torch.ones(3))
    with pytest.raises(ValueError, match="expected floating-point dtypes"):
        orthogonalize(torch.ones(3, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="form must be one of standard, gram; found 'qr'"):
        orthogonalize(torch.ones(3, 3), form="qr")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="coefficients must be three finite numbers"):
        orthogonalize(torch.ones(3, 3), coefficients=(1.0, 2.0, float("inf")))


# ---------------------------------------------------------------------------------------------------------- optimizer

MATRICES = [(16, 48), (48, 16), (20, 20), (16, 48)]


def _params(seed: int, shapes: list[tuple[int, ...]] | None = None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [_random(shape, 10 * seed + i, dtype) for i, shape in enumerate(shapes or MATRICES)]


def _run(optimizer: Any, params: list[Tensor], steps: range) -> None:
    for step in steps:
        for param, grad in zip(params, _params(step, [tuple(p.shape) for p in params]), strict=True):
            param.grad = grad.to(param.dtype)
        optimizer.step()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "momentum": 0.9, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["default", "heavy_ball", "match_rms"])
def test_equal_to_torch_over_steps(options: dict[str, Any]) -> None:
    """torch rounds to bfloat16 before it divides by the norm, ours after: both lie about as far from float64."""
    ours, theirs, exact = _params(0), _params(0), _params(0, dtype=torch.float64)
    _run(Muon(ours, lr=0.02, **options), ours, range(1, 11))
    _run(torch.optim.Muon(theirs, lr=0.02, **options), theirs, range(1, 11))
    _run(Muon(exact, lr=0.02, **options), exact, range(1, 11))
    for one, two, want, start in zip(ours, theirs, exact, _params(0, dtype=torch.float64), strict=True):
        moved = (want - start).norm()
        apart, our_error, their_error = ((a - b).norm() / moved for a, b in ((one, two), (one, want), (two, want)))
        assert float(apart) < 0.02
        assert float(our_error) < 1.2 * float(their_error) < 0.02


def test_states_and_groups_go_both_ways() -> None:
    ours, theirs = _params(0), _params(0)
    mine, peer = Muon(ours, lr=0.02, momentum=0.9), torch.optim.Muon(theirs, lr=0.02, momentum=0.9)
    _run(mine, ours, range(1, 3))
    _run(peer, theirs, range(1, 3))
    swapped_mine, swapped_peer = Muon(ours, lr=1.0), torch.optim.Muon(theirs, lr=1.0)
    swapped_mine.load_state_dict(peer.state_dict())
    swapped_peer.load_state_dict(mine.state_dict())
    _run(swapped_mine, ours, range(3, 6))
    _run(swapped_peer, theirs, range(3, 6))
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            swapped_mine.state[one]["momentum_buffer"], swapped_peer.state[two]["momentum_buffer"]
        )
        torch.testing.assert_close(one, two, atol=5e-3, rtol=0.0)


def test_the_gram_form_steps_as_the_standard_form() -> None:
    standard, gram = (_params(0, dtype=torch.float64) for _ in range(2))
    _run(Muon(standard, lr=0.02), standard, range(1, 4))
    _run(Muon(gram, lr=0.02, ns_form="gram"), gram, range(1, 4))
    for one, two in zip(standard, gram, strict=True):
        torch.testing.assert_close(one, two, atol=1e-9, rtol=1e-9)
    low = _params(0)
    _run(Muon(low, lr=0.02, ns_form="gram"), low, range(1, 4))
    for one, two in zip(low, gram, strict=True):
        torch.testing.assert_close(one.double(), two, atol=2e-3, rtol=0.0)


def test_groups_without_muon_take_adamw() -> None:
    shapes: list[tuple[int, ...]] = [(8, 6), (6,), (10, 4)]
    ours, theirs = _params(0, shapes), _params(0, shapes)
    auxiliary = {"use_muon": False, "lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "adam_eps": 1e-10}
    mine = Muon([{"params": ours[:1]}, {"params": ours[1:], **auxiliary}], lr=0.02)
    peers = [
        torch.optim.Muon(theirs[:1], lr=0.02),
        torch.optim.AdamW(theirs[1:], lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-10),
    ]
    for step in range(1, 6):
        _run(mine, ours, range(step, step + 1))
        for param, grad in zip(theirs, _params(step, shapes), strict=True):
            param.grad = grad
        for peer in peers:
            peer.step()
    torch.testing.assert_close(ours[0], theirs[0], atol=3e-3, rtol=0.0)
    for one, two in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)
    resumed = Muon([{"params": _params(1, shapes)[:1]}, {"params": _params(1, shapes)[1:], **auxiliary}])
    resumed.load_state_dict(mine.state_dict())
    assert resumed.param_groups[1]["use_muon"] is False


def test_more_dimensions_are_flattened_or_stacked() -> None:
    for stacked in (False, True):
        (param,) = _params(0, [(4, 3, 5)], torch.float64)
        flat = [param.clone().view(4, 15)] if not stacked else list(param.clone().unbind())
        (grad,) = _params(1, [(4, 3, 5)], torch.float64)
        pieces = [grad.view(4, 15)] if not stacked else list(grad.unbind())
        param.grad = grad
        for one, piece in zip(flat, pieces, strict=True):
            one.grad = piece.clone()
        Muon([{"params": [param], "stacked": stacked}], lr=0.1).step()
        Muon(flat, lr=0.1).step()
        torch.testing.assert_close(param, (torch.stack(flat) if stacked else flat[0]).view(4, 3, 5))


def test_factor_and_copies_equal_separate_passes() -> None:
    fused, apart = _params(0, dtype=torch.bfloat16), _params(0, dtype=torch.bfloat16)
    first, second = Muon(fused, lr=0.02), Muon(apart, lr=0.02)
    copies = {param: torch.zeros_like(param, dtype=torch.float32) for param in fused}
    for side in (fused, apart):
        for param, grad in zip(side, _params(1), strict=True):
            low = grad.bfloat16()
            param.grad = low if side is fused else low * 0.25
    first.step(factor=0.25, copies=copies)
    second.step()
    for one, two in zip(fused, apart, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(copies[one].bfloat16(), one)
        assert first.state[one]["momentum_buffer"].dtype == torch.float32


def test_vectors_and_slices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter 1 of a group has shape \(6,\); expected a whole matrix"):
        Muon([torch.ones(2, 3), torch.ones(6)])
    with pytest.raises(ValueError, match="scale must be one of original, match_rms_adamw; found 'none'"):
        Muon([torch.ones(2, 3)], adjust_lr_fn="none")  # type: ignore[arg-type]


def test_large_stacks_go_through_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.kernels.muon._BATCH_ELEMENTS", 16 * 48 + 1)
    small, large = _params(0, dtype=torch.float64), _params(0, dtype=torch.float64)
    _run(Muon(small, lr=0.02), small, range(1, 3))
    monkeypatch.undo()
    _run(Muon(large, lr=0.02), large, range(1, 3))
    for one, two in zip(small, large, strict=True):
        torch.testing.assert_close(one, two, atol=1e-12, rtol=1e-12)

"""`Lion` and `Lamb` on whole parameters, on slices, with missing gradients, and through a save and a load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from drivetrain.kernels import Lamb, Lion

SHAPES = [(7, 3), (1,), (11,), (0,), (2, 2, 2)]


def _whole(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _cut(tensor: Tensor, ranks: int, rank: int) -> Tensor:
    """ZeRO's cut: equal parts of the flattened tensor, the last ones short or empty."""
    part = -(-tensor.numel() // ranks)
    return tensor.flatten()[min(rank * part, tensor.numel()) : min((rank + 1) * part, tensor.numel())].clone()


def _run_sliced(make: Callable[[list[Tensor]], Any], ranks: int, steps: int) -> list[Tensor]:
    """Step every rank's slices in lock step, as sharded training does, and put the parameters together again."""
    whole = _whole(0)
    slices = [[_cut(tensor, ranks, rank) for tensor in whole] for rank in range(ranks)]
    optimizers = [make(rank_slices) for rank_slices in slices]
    for step in range(1, steps + 1):
        grads = _whole(step)
        for rank, rank_slices in enumerate(slices):
            for piece, grad in zip(rank_slices, grads, strict=True):
                piece.grad = _cut(grad, ranks, rank)
        if isinstance(optimizers[0], Lamb):
            _lamb_lock_step(optimizers)
        else:
            for optimizer in optimizers:
                optimizer.step()
    return [torch.cat([slices[rank][index] for rank in range(ranks)]).view(shape) for index, shape in enumerate(SHAPES)]


class _Recorded(Exception):
    pass


def _lamb_lock_step(optimizers: list[Lamb]) -> None:
    """A sum over ranks without processes: a first, rolled-back run of each step records its norms; the second run gets
    the total."""
    vectors: list[Tensor] = []

    def record(vector: Tensor) -> None:
        vectors.append(vector.clone())
        raise _Recorded

    for optimizer in optimizers:
        saved = {param: {k: v.clone() for k, v in optimizer.state[param].items()} for param in optimizer.state}
        optimizer.reduce_norms = record
        with pytest.raises(_Recorded):
            optimizer.step()
        optimizer.state.clear()
        for param, state in saved.items():
            optimizer.state[param].update(state)
    total = torch.stack(vectors).sum(0)

    def give_total(vector: Tensor) -> None:
        vector.copy_(total)

    for optimizer in optimizers:
        optimizer.reduce_norms = give_total
        optimizer.step()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_lion_on_slices_equals_lion_on_the_whole_bitwise(ranks: int) -> None:
    def make(params: list[Tensor]) -> Lion:
        return Lion(params, lr=0.01, weight_decay=0.1)

    for one, many in zip(_run_sliced(make, 1, 10), _run_sliced(make, ranks, 10), strict=True):
        assert torch.equal(one, many)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_lamb_on_slices_equals_lamb_on_the_whole(ranks: int) -> None:
    def make(params: list[Tensor]) -> Lamb:
        return Lamb(params, lr=0.01, weight_decay=0.1)

    for one, many in zip(_run_sliced(make, 1, 10), _run_sliced(make, ranks, 10), strict=True):
        torch.testing.assert_close(one, many, atol=1e-6, rtol=1e-6)


def _lamb_float64(params: list[Tensor], steps: int, *, weight_decay: float) -> list[Tensor]:
    out = []
    for index, param in enumerate(params):
        p = param.double()
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for step in range(1, steps + 1):
            g = _whole(step)[index].double()
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            u = (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8) + weight_decay * p
            zero = bool(p.norm() == 0 or u.norm() == 0)
            p = p - 0.01 * (torch.ones(()) if zero else (p.norm() / u.norm()).clamp(0.01, 10.0)) * u
        out.append(p)
    return out


def test_lamb_equals_its_float64_formula_over_100_steps() -> None:
    params = _whole(0)
    expected = _lamb_float64(params, 100, weight_decay=0.1)
    optimizer = Lamb(params, lr=0.01, weight_decay=0.1)
    for step in range(1, 101):
        for param, grad in zip(params, _whole(step), strict=True):
            param.grad = grad
        optimizer.step()
    for got, want in zip(params, expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)


def test_lamb_keeps_a_place_for_every_parameter() -> None:
    params = [torch.full((4,), 2.0), torch.ones(3), torch.empty(0)]
    params[0].grad = torch.ones(4)
    params[2].grad = torch.empty(0)
    seen: list[Tensor] = []
    optimizer = Lamb(
        [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}], reduce_norms=lambda v: seen.append(v.clone())
    )
    optimizer.step()
    assert len(seen) == 1
    assert seen[0].dtype == torch.float32
    assert seen[0].shape == (6,)
    assert seen[0][0] == 16.0
    assert seen[0][1] == pytest.approx(4.0)
    assert seen[0][2:].tolist() == [0.0] * 4
    assert params[1].tolist() == [1.0] * 3
    assert params[1] not in optimizer.state


def test_lamb_reduces_even_when_no_gradient_is_there() -> None:
    calls: list[int] = []
    Lamb([torch.ones(2)], reduce_norms=lambda vector: calls.append(vector.numel())).step()
    assert calls == [2]
    assert Lamb.needs_whole_norms is True


@pytest.mark.parametrize("kind", [Lion, Lamb])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_are_float32_and_survive_a_load_unrounded(kind: type[Lion] | type[Lamb], dtype: torch.dtype) -> None:
    def fresh() -> Tensor:
        return torch.linspace(-1, 1, 33).to(dtype)

    first = fresh()
    optimizer = kind([first], lr=0.01)
    first.grad = torch.linspace(0.1, 3, 33).to(dtype)
    optimizer.step()
    assert optimizer.state[first]["exp_avg"].dtype == torch.float32

    second = first.clone()
    resumed = kind([second], lr=0.5)
    resumed.load_state_dict(optimizer.state_dict())
    for name, value in optimizer.state[first].items():
        assert torch.equal(resumed.state[second][name], value)
        assert resumed.state[second][name].dtype == torch.float32
        assert resumed.state[second][name] is not value
    second.grad = first.grad.clone()
    optimizer.step()
    resumed.step()
    assert torch.equal(first, second)


def test_a_schedule_and_a_tensor_learning_rate_are_followed() -> None:
    param = torch.ones(2)
    optimizer = Lion([param], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(2):
        param.grad = torch.ones(2)
        optimizer.step()
        schedule.step()
    assert param.tolist() == pytest.approx([0.85, 0.85])
    optimizer.param_groups[0]["lr"] = torch.tensor(0.2)
    optimizer.step()
    assert param.tolist() == pytest.approx([0.65, 0.65])


def test_closure_is_evaluated_with_gradients() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = Lamb([param], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert float(param.detach()[0]) < 1.0


@pytest.mark.parametrize("kind", [Lion, Lamb])
def test_bad_arguments_are_refused_in_words(kind: type[Lion] | type[Lamb]) -> None:
    with pytest.raises(ValueError, match="lr must be a finite number >= 0, found -1"):
        kind([torch.ones(1)], lr=-1.0)
    with pytest.raises(ValueError, match=r"beta1 must lie in \[0, 1\)"):
        kind([torch.ones(1)], betas=(1.0, 0.9))
    with pytest.raises(ValueError, match="state_dtype must be a floating-point dtype"):
        kind([torch.ones(1)], state_dtype=torch.int8)
    param = torch.ones(2, 2)
    param.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(ValueError, match=r"does not take sparse gradients.*\(2, 2\)"):
        kind([param]).step()


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4), ranks=st.integers(1, 4))
def test_lamb_squared_norms_of_slices_add_up_to_those_of_the_whole(sizes: list[int], ranks: int) -> None:
    whole = [torch.arange(1.0, size + 1.0) for size in sizes]

    def norms(params: list[Tensor], grads: list[Tensor]) -> Tensor:
        vectors: list[Tensor] = []
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        Lamb(params, weight_decay=0.5, reduce_norms=lambda vector: vectors.append(vector.clone())).step()
        return vectors[0]

    want = norms([w.clone() for w in whole], [w.clone() for w in whole])
    parts = [norms([_cut(w, ranks, r) for w in whole], [_cut(w, ranks, r) for w in whole]) for r in range(ranks)]
    torch.testing.assert_close(torch.stack(parts).sum(0), want)

"""Schedules: values against formulas written a second time, and the rule that step i is trained with f(i)."""

from __future__ import annotations

import copy
import json
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as torch_lr

from drivetrain.engine.config import load
from drivetrain.engine.config.schema.scheduler import NATIVE_SCHEDULERS
from drivetrain.engine.lr import (
    FORMULAS,
    FormulaSchedule,
    LRRangeTest,
    OneCycle,
    Schedule,
    TorchSchedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_schedule,
    preview,
)

BASE = 0.5


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(1))


def sgd(lr: float = BASE, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD([parameter()], lr=lr, **settings)


def section(type: str, **params: Any) -> Any:
    return load({"scheduler": {"type": type, "params": params}}).scheduler


# ----------------------------------------------------------------------------------------------------- tables of values


def close(values: list[float], expected: list[float]) -> None:
    assert values == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_range_test() -> None:
    rising = LRRangeTest(lr_range_test_min_lr=0.1, lr_range_test_step_size=2, lr_range_test_step_rate=3.0)
    close([rising.lr(t, BASE) for t in range(5)], [0.25, 0.4, 0.55, 0.7, 0.85])
    stairs = LRRangeTest(lr_range_test_min_lr=0.1, lr_range_test_step_size=2, lr_range_test_staircase=True)
    close([stairs.lr(t, BASE) for t in range(6)], [0.1, 0.2, 0.2, 0.3, 0.3, 0.4])


def test_warmup_linear() -> None:
    formula = WarmupLR(warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=4, warmup_type="linear")
    close([formula.lr(t, 9.0) for t in range(7)], [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])


def test_warmup_log() -> None:
    formula = WarmupLR(warmup_max_lr=1.0, warmup_num_steps=8)
    close([formula.lr(t, 9.0) for t in (0, 1, 3, 7, 8, 100)], [0.0, 1 / 3, 2 / 3, 1.0, 1.0, 1.0])


def test_warmup_goes_to_the_rate_of_the_optimizer() -> None:
    formula = WarmupLR(warmup_num_steps=10, warmup_type="linear")
    assert [formula.lr(t, 0.5) for t in (0, 1, 2, 10)] == [0.0, 0.05, 0.1, 0.5]  # no second step at 0
    assert formula.lr(10, 0.25) == 0.25


def test_a_warmup_of_one_step_counts_as_two() -> None:
    for formula in (
        WarmupLR(warmup_num_steps=1),
        WarmupDecayLR(total_num_steps=100, warmup_max_lr=BASE, warmup_num_steps=1),
    ):
        assert [formula.lr(t, BASE) for t in (0, 1, 2)] == [0.0, 0.5, 0.5]
    assert WarmupLR(warmup_num_steps=1, warmup_type="linear").lr(1, BASE) == 0.25


def test_warmup_then_decay() -> None:
    formula = WarmupDecayLR(total_num_steps=6, warmup_max_lr=1.0, warmup_num_steps=2, warmup_type="linear")
    close([formula.lr(t, 9.0) for t in range(9)], [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0])


def test_decay_goes_to_the_lowest_rate() -> None:
    formula = WarmupDecayLR(total_num_steps=4, warmup_min_lr=0.2, warmup_max_lr=None, warmup_num_steps=2)
    close([formula.lr(t, 1.0) for t in range(6)], [0.2, 1.0, 1.0, 0.6, 0.2, 0.2])


def test_warmup_then_cosine() -> None:
    formula = WarmupCosineLR(
        total_num_steps=6, warmup_min_ratio=0.5, warmup_num_steps=2, cos_min_ratio=0.0, warmup_type="linear"
    )
    half = math.sqrt(0.5)
    expected = [0.5, 0.75, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0, 0.0]
    close([formula.lr(t, 2.0) for t in range(7)], [2 * ratio for ratio in expected])


def test_cosine_ends_at_its_lowest_ratio() -> None:
    formula = WarmupCosineLR(total_num_steps=10, warmup_num_steps=2, cos_min_ratio=0.1)
    assert formula.lr(9, 1.0) == pytest.approx(0.1)
    assert formula.lr(1000, 1.0) == pytest.approx(0.1)


def test_one_cycle() -> None:
    formula = OneCycle(
        cycle_min_lr=0.0,
        cycle_max_lr=1.0,
        cycle_first_step_size=4,
        cycle_second_step_size=2,
        cycle_min_mom=0.8,
        cycle_max_mom=0.9,
    )
    close([formula.lr(t, 9.0) for t in range(8)], [0.25, 0.5, 0.75, 1.0, 0.5, 0.0, 0.0, 0.0])
    momenta = [formula.momentum(t) for t in range(7)]
    close([m for m in momenta if m is not None], [0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9])


def test_one_cycle_decays_afterwards() -> None:
    formula = OneCycle(
        cycle_min_lr=0.1,
        cycle_max_lr=1.0,
        cycle_first_step_size=1,
        decay_step_size=2,
        decay_lr_rate=0.5,
        decay_mom_rate=0.1,
        cycle_max_mom=0.5,
        cycle_min_mom=0.4,
    )
    # T = 2; d = (t - 1) / 2
    close([formula.lr(t, 9.0) for t in range(5)], [1.0, 0.1, 0.1 / 1.25, 0.1 / 1.5, 0.1 / 1.75])
    momenta = [formula.momentum(t) for t in range(4)]
    close([m for m in momenta if m is not None], [0.4, 0.5, 0.5 * 1.05, 0.5 * 1.1])


def test_one_cycle_with_stairs() -> None:
    formula = OneCycle(
        cycle_min_lr=0.0,
        cycle_max_lr=1.0,
        cycle_first_step_size=6,
        cycle_first_stair_count=2,
        cycle_second_step_size=3,
        cycle_second_stair_count=3,
    )
    close([formula.lr(t, 9.0) for t in range(9)], [0.0, 0.0, 0.5, 0.5, 0.5, 1.0, 2 / 3, 1 / 3, 0.0])
    assert OneCycle(cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_momentum=False).momentum(5) is None


# --------------------------------------------------------------------------------- formulas, written independently


def second_warmup(t: int, steps: int, shape: str) -> float:
    steps = 2 if steps < 2 else steps
    if t >= steps:
        return 1.0
    return math.log10(t + 1) / math.log10(steps) if shape == "log" else t / steps


def second_cycle(t: int, first: int, second: int) -> float:
    total = first + second
    x = (t + 1) / total - math.floor((t + 1) / total)
    r = first / total
    return x / r if x <= r else (x - 1) / (r - 1)


steps = st.integers(0, 3000)
counts = st.integers(1, 500)
rates = st.floats(1e-6, 10.0)
shapes = st.sampled_from(["log", "linear"])


@given(t=steps, warm=counts, total=counts, low=rates, high=rates, shape=shapes)
def test_decay_formula(t: int, warm: int, total: int, low: float, high: float, shape: Any) -> None:
    formula = WarmupDecayLR(
        total_num_steps=total, warmup_min_lr=low, warmup_max_lr=high, warmup_num_steps=warm, warmup_type=shape
    )
    whole = max(2, warm)
    share = second_warmup(t, warm, shape) if t < whole else max(0.0, (total - t) / max(1, total - whole))
    assert formula.lr(t, 1.0) == pytest.approx(low + (high - low) * share, rel=1e-9, abs=1e-12)


@given(t=steps, warm=counts, total=counts, base=rates, low=st.floats(0, 1), end=st.floats(0, 1), shape=shapes)
def test_cosine_formula(t: int, warm: int, total: int, base: float, low: float, end: float, shape: Any) -> None:
    formula = WarmupCosineLR(
        total_num_steps=total, warmup_min_ratio=low, warmup_num_steps=warm, cos_min_ratio=end, warmup_type=shape
    )
    whole = max(2, warm)
    if t < whole:
        ratio = low + (1 - low) * second_warmup(t, warm, shape)
    else:
        progress = min(1.0, (t - whole + 1) / max(1, total - whole))
        ratio = end + (1 - end) * 0.5 * (1 + math.cos(progress * math.pi))
    assert formula.lr(t, base) == pytest.approx(base * ratio, rel=1e-9, abs=1e-12)


@given(t=steps, first=counts, second=counts, low=rates, high=rates)
def test_cycle_formula(t: int, first: int, second: int, low: float, high: float) -> None:
    formula = OneCycle(cycle_min_lr=low, cycle_max_lr=high, cycle_first_step_size=first, cycle_second_step_size=second)
    scale = second_cycle(t, first, second) if t < first + second else 0.0
    assert formula.lr(t, 1.0) == pytest.approx(low + (high - low) * scale, rel=1e-6, abs=1e-9)
    momentum = formula.momentum(t)
    assert momentum == pytest.approx(0.9 - 0.1 * scale, rel=1e-6)


@given(t=steps, warm=counts, base=rates, shape=shapes)
def test_warmup_only_rises_and_stays_between_its_ends(t: int, warm: int, base: float, shape: Any) -> None:
    formula = WarmupLR(warmup_num_steps=warm, warmup_type=shape)
    assert 0.0 <= formula.lr(t, base) <= formula.lr(t + 1, base) <= base
    assert formula.lr(0, base) == 0.0
    assert formula.lr(max(2, warm), base) == base


@given(t=steps, base=rates, factor=st.floats(0.1, 10.0))
def test_what_follows_the_optimizer_scales_with_it(t: int, base: float, factor: float) -> None:
    for formula in (WarmupLR(), WarmupCosineLR(total_num_steps=2000)):
        assert formula.lr(t, base * factor) == pytest.approx(formula.lr(t, base) * factor, rel=1e-9)


def test_wrong_numbers() -> None:
    with pytest.raises(ValueError, match="step is -1; optimizer steps are counted from 0"):
        WarmupLR().lr(-1, BASE)
    with pytest.raises(ValueError, match="warmup_num_steps is 0; it must be at least 1"):
        WarmupLR(warmup_num_steps=0)
    with pytest.raises(ValueError, match="cycle_second_step_size is 0; it must be at least 1"):
        OneCycle(cycle_min_lr=0.0, cycle_max_lr=1.0, cycle_second_step_size=0)


def test_defaults_are_those_of_the_configuration() -> None:
    needed = {"total_num_steps": 10, "cycle_min_lr": 0.1, "cycle_max_lr": 1.0}
    assert set(FORMULAS) == {entry.name for entry in NATIVE_SCHEDULERS.values()}
    for entry in NATIVE_SCHEDULERS.values():
        given_arguments = {name: value for name, value in needed.items() if name in entry.params.model_fields}
        built = build_schedule(section(entry.name, **given_arguments), sgd(momentum=0.9))
        assert isinstance(built, FormulaSchedule)
        assert built.formula == FORMULAS[entry.name](**given_arguments)


# ----------------------------------------------------------------------------------------------- the rule: lr i is f(i)


def run(schedule: Schedule, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """A training loop that notes the rate with which each step was really taken."""
    used = []
    for step in steps:
        schedule.apply(step)
        group = optimizer.param_groups[0]
        weight = group["params"][0]
        weight.grad = torch.ones_like(weight)
        before = weight.detach().double().item()
        optimizer.step()
        used.append(group["lr"])
        if isinstance(optimizer, torch.optim.SGD) and not group["momentum"]:
            assert before - weight.detach().item() == pytest.approx(group["lr"], rel=1e-3, abs=1e-6)
    return used


def test_step_i_is_trained_with_f_of_i_from_the_first_on() -> None:
    optimizer = sgd()
    schedule = build_schedule(section("WarmupLR", warmup_num_steps=10, warmup_type="linear"), optimizer)
    assert schedule is not None
    assert run(schedule, optimizer, range(13)) == [min(t / 10, 1.0) * BASE for t in range(13)]


def test_a_skipped_step_does_not_count() -> None:
    optimizer = sgd()
    schedule = build_schedule(section("WarmupLR", warmup_num_steps=4, warmup_type="linear"), optimizer)
    assert schedule is not None
    rates = []
    for step in (0, 1, 1, 1, 2, 3):
        schedule.apply(step)
        rates += schedule.lrs()
    assert rates == [0.0, 0.125, 0.125, 0.125, 0.25, 0.375]


def test_every_group_has_its_own_base() -> None:
    groups = [{"params": [parameter()], "lr": 1.0}, {"params": [parameter()], "lr": 0.1}]
    schedule = build_schedule(section("WarmupLR", warmup_num_steps=2, warmup_type="linear"), torch.optim.SGD(groups))
    assert schedule is not None
    schedule.apply(1)
    assert schedule.lrs() == [0.5, 0.05]
    schedule.apply(2)
    assert schedule.lrs() == [1.0, 0.1]


def test_a_rate_in_a_tensor_stays_the_same_tensor() -> None:
    optimizer = torch.optim.AdamW([parameter()], lr=torch.tensor(0.5))
    rate = optimizer.param_groups[0]["lr"]
    schedule = build_schedule(section("WarmupLR", warmup_num_steps=4, warmup_type="linear"), optimizer)
    assert schedule is not None
    schedule.apply(2)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_momentum_goes_where_the_optimizer_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    cycle = section("OneCycle", cycle_min_lr=0.1, cycle_max_lr=1.0, cycle_first_step_size=2)
    adam = torch.optim.AdamW([parameter()])
    momentum = sgd(momentum=0.5)
    plain = sgd()
    for optimizer in (adam, momentum, plain):
        schedule = build_schedule(cycle, optimizer)
        assert schedule is not None
        schedule.apply(1)
        assert schedule.lrs() == [1.0]
    assert adam.param_groups[0]["betas"] == (pytest.approx(0.8), 0.99)
    assert momentum.param_groups[0]["momentum"] == pytest.approx(0.8)
    assert plain.param_groups[0]["momentum"] == 0
    assert [record.message for record in caplog.records] == [
        "the schedule moves momentum, and the optimizer has none: only the learning rate is moved"
    ]


def test_resume_of_a_formula(caplog: pytest.LogCaptureFixture) -> None:
    cosine = section("WarmupCosineLR", total_num_steps=20, warmup_num_steps=5)
    optimizer = sgd()
    schedule = build_schedule(cosine, optimizer)
    assert schedule is not None
    whole = run(schedule, optimizer, range(20))
    optimizer = sgd()
    schedule = build_schedule(cosine, optimizer)
    assert schedule is not None
    run(schedule, optimizer, range(9))
    schedule.apply(9)
    state = json.loads(json.dumps(schedule.state_dict()))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer = sgd()
    schedule = build_schedule(cosine, optimizer)
    assert schedule is not None
    optimizer.load_state_dict(saved)  # replaces the groups, and brings the scheduled rate
    schedule.load_state_dict(state)
    assert schedule.lrs() == [whole[9]]
    assert run(schedule, optimizer, range(9, 20)) == whole[9:]
    assert caplog.records == []


def test_the_configuration_in_force_wins_over_the_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    state = {"kind": "WarmupLR", "step": 2, "base_lrs": [9.0]}
    schedule = build_schedule(section("WarmupLR", warmup_num_steps=4, warmup_type="linear"), sgd())
    assert schedule is not None
    schedule.load_state_dict(state)
    assert schedule.lrs() == [0.25]
    assert "the checkpoint has base learning rates [9.0]; the configuration in force has [0.5]" in caplog.text


def test_the_base_rate_is_not_the_rate_of_the_moment() -> None:
    optimizer = sgd()
    warmup = section("WarmupLR", warmup_num_steps=4, warmup_type="linear")
    torch_lr.ConstantLR(optimizer, factor=0.5)  # leaves initial_lr behind
    assert optimizer.param_groups[0]["lr"] == BASE / 2
    schedule = build_schedule(warmup, optimizer)
    assert schedule is not None
    schedule.apply(4)
    assert schedule.lrs() == [BASE]


def test_states_that_do_not_fit() -> None:
    schedule = build_schedule(section("WarmupLR"), sgd())
    assert schedule is not None
    with pytest.raises(ValueError, match="the state of the schedule 'OneCycle', and this run has 'WarmupLR'"):
        schedule.load_state_dict({"kind": "OneCycle", "step": 1, "base_lrs": [1.0]})
    with pytest.raises(ValueError, match="the checkpoint's schedule has 2 parameter groups, and this optimizer 1"):
        schedule.load_state_dict({"kind": "WarmupLR", "step": 1, "base_lrs": [1.0, 2.0]})


# -------------------------------------------------------------------------------------------------- schedulers of torch

Make = Callable[[torch.optim.Optimizer], torch_lr.LRScheduler]
MAKERS: dict[str, Make] = {
    "StepLR": lambda o: torch_lr.StepLR(o, step_size=3, gamma=0.7),
    "MultiStepLR": lambda o: torch_lr.MultiStepLR(o, milestones=[2, 5], gamma=0.3),
    "ConstantLR": lambda o: torch_lr.ConstantLR(o, factor=0.1, total_iters=4),
    "LinearLR": lambda o: torch_lr.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: torch_lr.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: torch_lr.PolynomialLR(o, total_iters=8, power=2.0),
    "CosineAnnealingLR": lambda o: torch_lr.CosineAnnealingLR(o, T_max=7),
    "CosineAnnealingWarmRestarts": lambda o: torch_lr.CosineAnnealingWarmRestarts(o, T_0=4),
    "CyclicLR": lambda o: torch_lr.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "OneCycleLR": lambda o: torch_lr.OneCycleLR(o, max_lr=0.1, total_steps=30),
    "LambdaLR": lambda o: torch_lr.LambdaLR(o, lambda epoch: 0.95**epoch),
    "MultiplicativeLR": lambda o: torch_lr.MultiplicativeLR(o, lambda epoch: 0.95),
    "SequentialLR": lambda o: torch_lr.SequentialLR(
        o, [torch_lr.LinearLR(o, total_iters=3), torch_lr.ExponentialLR(o, gamma=0.9)], milestones=[3]
    ),
    "ChainedScheduler": lambda o: torch_lr.ChainedScheduler(
        [torch_lr.ConstantLR(o, factor=0.1, total_iters=4), torch_lr.ExponentialLR(o, gamma=0.9)]
    ),
}
KINDS: dict[str, Callable[[], torch.optim.Optimizer]] = {
    "SGD": lambda: sgd(momentum=0.9),
    "Adam": lambda: torch.optim.Adam([parameter()], lr=BASE),
}
NAMED = {
    "StepLR": {"step_size": 3, "gamma": 0.7},
    "MultiStepLR": {"milestones": [2, 5], "gamma": 0.3},
    "CosineAnnealingLR": {"T_max": 7},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 30},
}
STEPS = 14


def snapshot(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    return tuple((g["lr"], g.get("betas"), g.get("momentum")) for g in optimizer.param_groups)


def plain_loop(make: Make, optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    scheduler = make(optimizer)
    used = []
    for _ in range(STEPS):
        used.append(snapshot(optimizer))
        optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MAKERS)
def test_torch_schedulers_give_what_the_plain_loop_uses(name: str, kind: str) -> None:
    expected = plain_loop(MAKERS[name], KINDS[kind]())
    optimizer = KINDS[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        schedule = build_schedule(None, optimizer, MAKERS[name])
        assert isinstance(schedule, TorchSchedule)
        used = []
        for step in range(STEPS):
            schedule.apply(step)
            schedule.apply(step)  # a step that was skipped is tried again
            used.append(snapshot(optimizer))
            optimizer.step()
    assert used == expected


@pytest.mark.parametrize("name", MAKERS)
def test_torch_schedulers_resume_and_go_back(name: str) -> None:
    optimizer = sgd(momentum=0.9)
    expected = plain_loop(MAKERS[name], sgd(momentum=0.9))
    schedule = build_schedule(None, optimizer, MAKERS[name])
    assert schedule is not None
    schedule.apply(6)
    assert snapshot(optimizer) == expected[6]
    state = json.loads(json.dumps(schedule.state_dict()))
    saved = copy.deepcopy(optimizer.state_dict())
    schedule.apply(2)
    assert snapshot(optimizer) == expected[2]
    schedule.apply(9)
    assert snapshot(optimizer) == expected[9]

    optimizer = sgd(momentum=0.9)
    schedule = build_schedule(None, optimizer, MAKERS[name])
    assert schedule is not None
    optimizer.load_state_dict(saved)
    schedule.load_state_dict(state)
    for step in range(6, STEPS):
        schedule.apply(step)
        assert snapshot(optimizer) == expected[step]


@pytest.mark.parametrize("name", NAMED)
def test_torch_schedulers_by_name(name: str) -> None:
    optimizer = sgd(momentum=0.9)
    schedule = build_schedule(section(name, **NAMED[name]), optimizer)
    assert isinstance(schedule, TorchSchedule)
    used = []
    for step in range(STEPS):
        schedule.apply(step)
        used.append(snapshot(optimizer))
    assert used == plain_loop(MAKERS[name], sgd(momentum=0.9))


def test_a_scheduler_takes_the_place_of_the_section() -> None:
    optimizer = sgd()
    given_scheduler = torch_lr.ExponentialLR(optimizer, gamma=0.5)
    schedule = build_schedule(section("WarmupLR"), optimizer, given_scheduler)
    assert isinstance(schedule, TorchSchedule)
    schedule.apply(2)
    assert schedule.lrs() == [BASE / 4]
    assert build_schedule(None, optimizer) is None


def test_a_scheduler_of_another_optimizer_is_followed() -> None:
    other, optimizer = sgd(momentum=0.9), torch.optim.Adam([parameter()], lr=7.0)
    schedule = build_schedule(None, optimizer, torch_lr.OneCycleLR(other, max_lr=0.1, total_steps=30))
    expected = plain_loop(MAKERS["OneCycleLR"], sgd(momentum=0.9))
    assert schedule is not None
    for step in range(STEPS):
        schedule.apply(step)
        assert schedule.lrs() == [expected[step][0][0]]


def test_reduce_on_plateau_with_its_metric() -> None:
    losses = [1.0, 0.9, 0.9, 0.9, 0.9, 0.8, 0.8, 0.8, 0.8, 0.8]

    def make(optimizer: torch.optim.Optimizer) -> torch_lr.LRScheduler:
        return torch_lr.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)

    optimizer = sgd()
    plain = torch_lr.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    expected = []
    for loss in losses:
        expected.append(optimizer.param_groups[0]["lr"])
        plain.step(loss)
    assert len(set(expected)) == 3

    position = {"at": 0}
    optimizer = sgd()
    schedule = build_schedule(None, optimizer, make, metric=lambda: losses[position["at"]])
    assert schedule is not None
    used: list[float] = []
    for step in range(len(losses)):
        if step == 6:  # resume
            state = json.loads(json.dumps(schedule.state_dict()))
            optimizer = sgd()
            schedule = build_schedule(None, optimizer, make, metric=lambda: losses[position["at"]])
            assert schedule is not None
            schedule.load_state_dict(state)
        position["at"] = max(0, step - 1)
        schedule.apply(step)
        used += schedule.lrs()
    assert used == expected
    with pytest.raises(ValueError, match="it can't go back to step 3"):
        schedule.apply(3)


def test_an_optimizer_that_is_loaded_without_its_schedule_keeps_to_the_schedule() -> None:
    optimizer = sgd()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 99.0
    schedule = build_schedule(None, optimizer, MAKERS["ExponentialLR"])
    assert schedule is not None
    schedule.apply(2)
    optimizer.load_state_dict(saved)
    schedule.apply(2)
    assert schedule.lrs() == [BASE * 0.9 * 0.9]
    optimizer.load_state_dict(saved)
    schedule.apply(3)
    assert schedule.lrs() == [BASE * 0.9 * 0.9 * 0.9]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="ReduceLROnPlateau follows a metric, and none is given"):
        build_schedule(None, sgd(), torch_lr.ReduceLROnPlateau)
    two = torch.optim.SGD([{"params": [parameter()]}, {"params": [parameter()]}], lr=0.1)
    with pytest.raises(ValueError, match="made for 2 parameter groups, and the optimizer has 1"):
        build_schedule(None, sgd(), torch_lr.ExponentialLR(two, gamma=0.5))
    wrong: Any = lambda optimizer: 0.1  # noqa: E731
    with pytest.raises(TypeError, match=r"expected a torch.optim.lr_scheduler.LRScheduler, found float"):
        build_schedule(None, sgd(), wrong)
    wrong = "cosine"
    with pytest.raises(TypeError, match="found str"):
        build_schedule(None, sgd(), wrong)
    late = sgd()
    late.param_groups[0]["initial_lr"] = BASE
    schedule = build_schedule(None, late, torch_lr.ExponentialLR(late, gamma=0.5, last_epoch=4))
    assert schedule is not None
    with pytest.raises(ValueError, match="the scheduler was given at step 5, so it has no rate for step 2"):
        schedule.apply(2)


# ------------------------------------------------------------------------------------------------------------- preview


def test_preview() -> None:
    assert preview(section("WarmupLR", warmup_num_steps=10, warmup_type="linear"), 1.0, [0, 1, 5, 10]) == [
        0.0,
        0.1,
        0.5,
        1.0,
    ]
    assert preview(section("StepLR", step_size=2, gamma=0.5), 1.0, [0, 1, 2, 4]) == [1.0, 1.0, 0.5, 0.25]


def test_no_message_in_ordinary_use(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    schedule = build_schedule(section("WarmupLR"), sgd())
    assert schedule is not None
    schedule.apply(0)
    schedule.load_state_dict(schedule.state_dict())
    assert caplog.records == []

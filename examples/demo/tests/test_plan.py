from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from plan import CONFIG, Plan, read_json

from drivetrain.engine.config import examine

PLAN = Plan(device="cpu", ranks=2, quick=False, vocabulary=2048, seconds=100.0)


def test_the_config_file_has_no_problems_and_needs_no_notice() -> None:
    examination = examine(CONFIG)
    assert examination.problems == ()
    assert examination.notices == ()


def test_the_config_file_holds_nothing_that_only_drivetrain_knows() -> None:
    assert "drivetrain" not in read_json(CONFIG)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_is_the_only_thing_that_an_override_changes(stage: int) -> None:
    examination = examine(PLAN.config(stage=stage))
    assert examination.problems == ()
    assert examination.notices == ()
    assert examination.config.zero_optimization.stage == stage
    expected = examine(CONFIG).config.to_dict(only_given=True)
    changed = examination.config.to_dict(only_given=True)
    for values in (expected, changed):
        del values["zero_optimization"]
    assert changed == expected


def test_the_schedule_ends_with_the_training() -> None:
    plan = PLAN.with_speed(0.25)
    assert plan.steps == 400
    assert plan.save_at == 320
    assert examine(plan.config()).config.scheduler.arguments()["total_num_steps"] == 400  # type: ignore[union-attr]


@pytest.mark.parametrize(("seconds", "quick"), [(100.0, False), (1e-4, False), (100.0, True), (1e-4, True)])
def test_a_very_slow_or_fast_machine_gets_a_training_all_the_same(seconds: float, quick: bool) -> None:
    plan = dataclasses.replace(PLAN, quick=quick).with_speed(seconds)
    assert 0 < plan.validate_every <= plan.save_at < plan.steps <= 1000
    assert plan.steps >= 60


def test_a_plan_comes_back(tmp_path: Path) -> None:
    plan = PLAN.with_speed(0.3)
    plan.save(tmp_path)
    assert Plan.load(tmp_path) == plan

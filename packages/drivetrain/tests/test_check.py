"""`drivetrain check` and `drivetrain schema`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from drivetrain.engine.cli.check import check
from drivetrain.engine.cli.schema import schema
from drivetrain.engine.config import json_schema

GOOD: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
    "zero_optimization": {"stage": 3, "elastic_checkpoint": True},
    "tensorboard": {"enabled": False},
}


def run(tmp_path: Path, values: dict[str, Any] | str, *options: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    path = tmp_path / "run.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values, indent=1))
    app = typer.Typer()
    app.command()(check)
    monkeypatch.chdir(tmp_path)
    return CliRunner().invoke(app, ["run.json", *options])


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃").split("│")]


def test_a_valid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, GOOD, "--world-size", "2", "--optimizer-steps", "50", monkeypatch=monkeypatch)
    assert result.exit_code == 0, result.output
    rows = [cells(line) for line in result.output.split("\n")]
    assert ["zero_optimization.stage", "3", "file", "works"] in rows
    assert ["gradient_clipping", "1.0", "default", "works"] in rows
    assert ["optimizer.params.lr", "0.001", "file", "works"] in rows
    assert ["optimizer.params.betas", "[0.9, 0.999]", "default", "works"] in rows
    assert ["tensorboard.enabled", "false", "file", "planned"] in rows
    assert ["16", "2", "4", "2"] in rows
    assert ["lr", "0", "0.0001", "0.0002", "0.0003", "0.0004", "0.001", "0.001"] in rows
    assert "no effect (line 22): zero_optimization.elastic_checkpoint: has no effect: Every checkpoint" in result.output
    assert "run.json is valid for 2 ranks." in result.output
    assert "zenflow" not in result.output


def test_all_keys_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, {"train_batch_size": 1}, "--all", monkeypatch=monkeypatch)
    rows = [cells(line) for line in result.output.split("\n")]
    assert ["zero_optimization.zenflow", "null", "default", "planned"] in rows
    assert ["flops_profiler.enabled", "false", "default", "planned"] in rows


def test_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    result = run(tmp_path, {**values, "gradient_clipp1ng": 1}, "--world-size", "2", monkeypatch=monkeypatch)
    assert result.exit_code == 1
    assert result.output == (
        "2 problems in run.json\n\n"
        "run.json:5: gradient_clipp1ng = 1\n"
        "    unknown key\n"
        '    to fix it: did you mean "gradient_clipping"?\n\n'
        "run.json:2: train_batch_size = 7\n"
        "    the batch sizes don't fit together: train_micro_batch_size_per_gpu 2 * gradient_accumulation_steps 1 * "
        "2 data-parallel ranks = 4, not 7\n"
        "    to fix it: set train_batch_size to 4, or drop train_batch_size and let it follow from the other two\n"
    )


def test_syntax_and_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(tmp_path, '{"a": tru}', monkeypatch=monkeypatch)
    assert result.exit_code == 1
    assert "run.json:1: the configuration" in result.output
    assert "text needs quotes: the value of a starts with 'tru'" in result.output
    app = typer.Typer()
    app.command()(check)
    result = CliRunner().invoke(app, ["nope.json"])
    assert result.exit_code == 1
    assert "there is no such file" in result.output


def test_auto_and_hints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 10}},
    }
    result = run(tmp_path, values, monkeypatch=monkeypatch)
    assert result.exit_code == 1
    assert "3 problems in run.json" in result.output
    assert 'A value for "auto" can be tried with --hint KEY=VALUE' in result.output
    hints = ["--hint", "optimizer.params.lr=0.1", "--hint", "train_micro_batch_size_per_gpu=4"]
    result = run(tmp_path, values, *hints, "--optimizer-steps", "100", monkeypatch=monkeypatch)
    assert result.exit_code == 0, result.output
    assert 'auto (line 6): optimizer.params.lr: "auto" is 0.1, from a hint' in result.output
    result = run(tmp_path, values, "--hint", "nonsense", monkeypatch=monkeypatch)
    assert result.exit_code == 2


def test_a_schedule_without_an_optimizer_is_shown_relative_to_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "train_batch_size": 1,
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 5, "warmup_num_steps": 2}},
    }
    result = run(tmp_path, values, monkeypatch=monkeypatch)
    assert result.exit_code == 0, result.output
    assert "Learning rate by WarmupCosineLR, as a share of the optimizer's (no rate is in the file)" in result.output
    assert ["lr", "0", "1", "0.75", "0.2501", "0.0001"] in [cells(line) for line in result.output.split("\n")]


def test_secrets_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"train_batch_size": 1, "comet": {"enabled": False, "api_key": "sk-1"}}
    result = run(tmp_path, values, monkeypatch=monkeypatch)
    assert result.exit_code == 0
    assert "(secret)" in result.output
    assert "sk-1" not in result.output


def test_schema_prints_the_schema() -> None:
    app = typer.Typer()
    app.command()(schema)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    assert json.loads(result.output) == json_schema()


def test_check_needs_no_torch(tmp_path: Path) -> None:
    """So that it answers at once. Only schedules and names of torch need it."""
    path = tmp_path / "run.json"
    path.write_text('{"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}')
    code = (
        "import sys\n"
        "from drivetrain.engine.cli.check import check\n"
        "from drivetrain.engine.cli.schema import schema\n"
        f"check({str(path)!r})\n"
        "sys.exit(3 if 'torch' in sys.modules else 0)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr + finished.stdout

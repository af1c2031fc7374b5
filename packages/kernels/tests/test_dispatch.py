"""The table of implementations is whole and readable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import drivetrain.kernels
from drivetrain.kernels import available, resolve


def test_every_op_has_an_entry_for_every_device_and_a_reason_when_slow() -> None:
    table = available()
    assert len({(status.op, status.device) for status in table}) == len(table)
    ops = {status.op for status in table}
    assert {"adam_step", "lion_step", "lamb_moments", "sum_of_squares"} <= ops
    for device in ("cpu", "cuda"):
        assert {status.op for status in table if status.device == device} == ops
    for status in table:
        assert status.implementation
        assert status.reason or status.implementation != "torch"
        assert callable(resolve(status.op, status.device))


def test_without_the_native_core_everything_runs_on_torch_and_says_why(tmp_path: Path) -> None:
    source = Path(drivetrain.kernels.__file__).parent
    shutil.copytree(source, tmp_path / "drivetrain" / "kernels", ignore=shutil.ignore_patterns("*.so", "*.pyd"))
    code = (
        "import torch; from drivetrain.kernels import CpuAdam, available, get_num_threads, instruction_sets;"
        "p = torch.ones(3); p.grad = torch.ones(3); CpuAdam([p], lr=0.5).step();"
        "print([round(x, 6) for x in p.tolist()], instruction_sets(), get_num_threads() > 0, available()[0].reason)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("[0.5, 0.5, 0.5] () True the native core is not built for ")
    assert done.stderr == ""


def test_an_unknown_op_is_named_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"no op named 'warp'.*adam_step"):
        resolve("warp", "cpu")

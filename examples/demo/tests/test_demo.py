"""The demo itself, in its quick form, as a person runs it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run import choose_device
from sample import load

from drivetrain.engine.monitor import read_jsonl

RUN = Path(__file__).parents[1] / "run.py"
PNG = b"\x89PNG\r\n"


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(RUN), "--quick", "--device", "cpu", "--folder", str(folder), *arguments]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run that succeeded, and what it showed."""
    folder = tmp_path_factory.mktemp("demo") / "runs"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "left over").write_text("from an earlier run")
    (folder / "notes.txt").write_text("mine")
    result = subprocess.run(command(folder), capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder, result.stdout


@pytest.fixture(scope="module")
def summary(finished: tuple[Path, str]) -> dict[str, Any]:
    return json.loads((finished[0] / "summary.json").read_text())


pytestmark = pytest.mark.timeout(420)


def test_every_check_holds(summary: dict[str, Any]) -> None:
    assert summary["passed"]
    assert len(summary["checks"]) == 3


def test_only_what_the_demo_wrote_is_cleared(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    assert not (folder / "model" / "left over").exists()
    assert (folder / "notes.txt").read_text() == "mine"


def test_it_says_what_happens(finished: tuple[Path, str]) -> None:
    folder, shown = finished
    for text in (
        "1/6",
        "drivetrain run --nproc 2",
        "drivetrain run --nproc 1",
        "--resume --stage 1",
        "class",
        str(folder),
    ):
        assert text in shown
    assert "train 1/" in shown  # no terminal: plain lines in place of the bar
    assert "\x1b" not in shown


def test_metrics_go_on_over_the_resume_without_a_gap(finished: tuple[Path, str], summary: dict[str, Any]) -> None:
    folder, _ = finished
    records = read_jsonl(folder / "metrics.jsonl")
    first, second = summary["training"]
    assert [record["step"] for record in records] == list(range(second["last_step"] + 1))
    assert [record["ranks"] for record in records[1:]] == [2] * first["last_step"] + [1] * (
        second["last_step"] - first["last_step"]
    )
    assert len((folder / "metrics.csv").read_text().splitlines()) == len(records) + 1
    rates = [float(record["lr"]) for record in records[1:]]  # type: ignore[arg-type]
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_the_parts_ran_as_told(summary: dict[str, Any]) -> None:
    first, second = summary["training"]
    assert (first["ranks"], first["stage"], first["micro_batch"] * first["accumulation"] * 2) == (2, 3, 8)
    assert (second["ranks"], second["stage"], second["micro_batch"] * second["accumulation"]) == (1, 1, 8)
    assert second["first_step"] == first["last_step"] == summary["plan"]["save_at"]
    assert second["last_step"] == summary["plan"]["steps"]
    assert len(first["peak_bytes"]) == 2


def test_pictures_are_there(finished: tuple[Path, str]) -> None:
    for name in ("loss.png", "memory.png"):
        assert (finished[0] / name).read_bytes().startswith(PNG)


def test_measured_memory_is_what_the_formulas_say(summary: dict[str, Any]) -> None:
    parameters, stages = summary["memory"]["parameters"], summary["memory"]["stages"]
    expected = [(2, 2, 12), (2, 2, 6), (2, 1, 6), (1, 1, 6)]  # bytes per parameter on two ranks
    for row, per_parameter in zip(stages, expected, strict=True):
        measured = [row["measured"][name] for name in ("parameters", "gradients", "optimizer")]
        assert measured == pytest.approx([factor * parameters for factor in per_parameter], rel=0.02)


def test_the_export_loads_in_transformers_with_the_same_logits(finished: tuple[Path, str]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = finished[0] / "model"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours, tokenizer = load(folder, torch.device("cpu"))
    text = "class Stack:\n    def __init__(self):\n        self.items = []\n"
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert ids == tokenizer.encode(text)
    with torch.no_grad():
        tokens = torch.tensor([ids])
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-4, rtol=1e-4)


def test_the_sample_is_kept(finished: tuple[Path, str]) -> None:
    folder, shown = finished
    text = (folder / "sample.txt").read_text(encoding="utf-8")
    assert text.startswith("def ")
    assert text.splitlines()[0] in shown


def test_a_gpu_that_is_not_there_is_refused_in_words() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="finds no GPU"):
        choose_device("cuda")
    assert choose_device("auto") == choose_device("cpu") == ("cpu", 2)


def members(group: int) -> Iterator[int]:
    """The processes of a session."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(path.name)) == group:
                    yield int(path.name)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
def test_interrupted_it_leaves_no_process_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    shown = []
    for line in process.stdout:
        shown.append(line)
        if "stage 0" in line:  # the ranks are at work
            os.killpg(process.pid, signal.SIGINT)  # what a terminal does at Ctrl-C
            break
    shown += process.stdout.readlines()
    assert process.wait(timeout=60) == 130
    assert "Stopped." in shown[-1]
    assert "Traceback" not in "".join(shown)
    deadline = time.monotonic() + 10
    while list(members(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not list(members(process.pid))

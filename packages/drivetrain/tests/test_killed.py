"""Jobs of `drivetrain run` that lose a rank: they end at once, say why, and the same command goes on with nothing lost.

Every test starts a real job: the launcher, two ranks, a script on disk. A job is slow to start, so one run is killed
several times in a row, each time in another place, and each attempt checks the attempt before it: what it does must be,
bit for bit, what a run does that nobody kills.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from drivetrain.comm import shutdown
from drivetrain.engine.checkpoint import list_checkpoints, verify_checkpoint
from drivetrain_testkit import run_ranks

PATIENCE = 60.0  # seconds in which a job must have ended: far more than one takes, far less than a hang
AT_THE_END = ["global_step3", "global_step6", "global_step9", "latest"]

SCRIPT = '''
"""Trains, saves every third step, goes on from the last checkpoint, and writes down what it did."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import torch
from torch import nn

from drivetrain.engine import CheckpointNotFoundError, SaveOptions, initialize
from drivetrain.engine.checkpoint.files import BlockWriter

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--stage", type=int)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--at", default="nowhere")  # where the end comes, at which step, and to which rank
parser.add_argument("--step", type=int, default=-1)
parser.add_argument("--rank", type=int, default=-1)
options = parser.parse_args()
rank = int(os.environ["RANK"])
samples = []


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(64, 64), nn.Dropout(options.dropout)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.inner(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 1)

    def forward(self, numbers, x, y):
        samples.append(numbers.tolist())
        for block in self.blocks:
            x = block(x)
            if block is self.blocks[1] and due("backward"):
                x.register_hook(die)
        if due("exception"):
            raise ValueError("the batch is bad")
        return (self.head(x) - y).square().mean()


def due(place):
    return (options.at, options.step, options.rank) == (place, engine.global_steps, rank)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def phase(name):
    if due(name):
        die()
    if due("pause") and name == "data-written":
        (options.folder / "paused").touch()
        time.sleep(600)


def write(writer, data, plain=BlockWriter.write):
    plain(writer, data)
    written.append(len(data))
    if due("write") and len(written) % 8 == 0:
        die()


written = []
BlockWriter.write = write
config = {
    "train_batch_size": 12,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": 20}},
    "zero_optimization": {"stage": options.stage},
}
if options.stage == 3:
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 100
torch.manual_seed(7)
model = Model()
x = torch.randn(36, 64)
data = torch.utils.data.TensorDataset(torch.arange(36), x, x[:, :4].sum(1, keepdim=True))
torch.manual_seed(rank)
engine = initialize(model, config, training_data=data)
checkpoints = options.folder / "checkpoints"
log = open(options.folder / f"rank{rank}.jsonl", "a", buffering=1)
begin = {"pid": os.getpid(), "from": None}
try:
    report = engine.load(checkpoints).report
    begin["from"] = report.tag
except CheckpointNotFoundError:
    pass
if options.at == "pause":
    begin["child"] = subprocess.Popen(["sleep", "600"]).pid
log.write(json.dumps(begin) + "\\n")
while engine.global_steps < 10:
    samples.clear()
    loss, done = float(engine.train_batch()), engine.last_step
    line = {"step": done.step, "loss": loss, "norm": done.grad_norm, "lr": done.lr, "samples": samples}
    log.write(json.dumps(line) + "\\n")
    if engine.global_steps % 3 == 0:
        engine.save(checkpoints, options=SaveOptions(on_phase=phase))
engine.close()
'''


@dataclass(frozen=True, kw_only=True)
class Job:
    """A script in a folder, run by the same command again and again."""

    folder: Path
    options: tuple[str, ...]

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def command(self, nproc: int, *more: str) -> list[str]:
        script = self.folder / "train.py"
        script.write_text(SCRIPT)
        run = [sys.executable, "-m", "drivetrain.engine.cli", "run", "--nproc", str(nproc)]
        return [*run, str(script), str(self.folder), *self.options, *more]

    def run(self, nproc: int = 2, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(nproc, *more), capture_output=True, text=True, timeout=PATIENCE, env=environment(), check=False
        )

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """All that a rank wrote, over all attempts. A line that was cut by a kill is none."""
        path = self.folder / f"rank{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def last_attempt(self, rank: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        lines = self.lines(rank)
        begin = max(number for number, line in enumerate(lines) if "pid" in line)
        return lines[begin], lines[begin + 1 :]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def script_in_rank(rank: int, world_size: int, script: str, arguments: Sequence[str]) -> None:
    """The script, without a launcher: to see what it does when nobody kills it, at no cost."""
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    shutdown()


def undisturbed(folder: Path, *options: str) -> list[list[dict[str, Any]]]:
    """What each of two ranks writes in a run from start to end, a line per step."""
    folder.mkdir()
    job = Job(folder=folder, options=options)
    job.command(2)
    run_ranks(script_in_rank, 2, str(folder / "train.py"), [str(folder), *options])
    assert sorted(path.name for path in job.checkpoints.iterdir()) == AT_THE_END
    whole = [job.last_attempt(rank)[1] for rank in range(2)]
    assert [line["step"] for line in whole[0]] == list(range(10))
    assert whole[0][0]["loss"] > 1.5 * whole[0][-1]["loss"]
    return whole


class Kill(NamedTuple):
    """How one attempt ends, and what there must be afterwards."""

    at: str  # a place in the script: in backward, in the middle of a file, or at a phase of the save
    step: int  # the step, counted from 0, that is not finished; or the number of steps at the save
    rank: int
    begins_from: str | None  # the checkpoint that this attempt finds
    complete: list[str]  # the checkpoints that are whole afterwards
    left: str | None = None  # what lies there besides: a partial folder of this pattern


BACKWARD_TO_RENAME = [
    Kill("backward", 4, 1, None, ["global_step3"]),
    Kill("manifest-written", 6, 0, "global_step3", ["global_step3"], ".global_step6.partial-*"),
]
IN_THE_MIDDLE_OF_A_FILE = [Kill("write", 6, 1, None, ["global_step3"])]
WITH_ITS_DATA_WRITTEN = [Kill("data-written", 6, 1, None, ["global_step3"])]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("options", "kills", "last_nproc"),
    [
        pytest.param(("--stage", "0", "--dropout", "0.1"), BACKWARD_TO_RENAME, 2, id="stage 0"),
        pytest.param(
            *(("--stage", "2"), IN_THE_MIDDLE_OF_A_FILE, 2),
            id="stage 2, in the middle of a file",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            *(("--stage", "3"), WITH_ITS_DATA_WRITTEN, 3),
            id="stage 3, and in the end at another world size",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_run_that_is_killed_again_and_again_loses_nothing(
    tmp_path: Path, options: tuple[str, ...], kills: list[Kill], last_nproc: int
) -> None:
    whole = undisturbed(tmp_path / "undisturbed", *options)
    folder = tmp_path / "killed"
    folder.mkdir()
    job = Job(folder=folder, options=options)
    for kill in kills:
        ended = job.run(2, "--at", kill.at, "--step", str(kill.step), "--rank", str(kill.rank))
        check_death(ended, job, kill)
        check_attempt(job, kill, whole)
        check_checkpoints(job, kill)
    ended = job.run(last_nproc)
    assert ended.returncode == 0, ended.stderr
    check_the_rest(job, whole, last_nproc)


def check_death(ended: subprocess.CompletedProcess[str], job: Job, kill: Kill) -> None:
    """The job has failed as its killed rank did, and says so; what became of the other rank is told as what follows."""
    begin, _ = job.last_attempt(kill.rank)
    assert ended.returncode == 128 + signal.SIGKILL, (kill, ended.stderr)
    told = verdict(ended.stderr)
    assert told[0].startswith(f"drivetrain run: rank {kill.rank} (pid {begin['pid']}) was killed by SIGKILL"), kill
    assert told[1:] in followed(1 - kill.rank), (kill, ended.stderr)
    assert "Traceback" not in ended.stderr, (kill, ended.stderr)


def verdict(stderr: str) -> list[str]:
    """What the launcher says in the end. Warnings of libraries may stand before it."""
    return stderr[stderr.index("drivetrain run: ") :].splitlines()


def followed(rank: int) -> list[list[str]]:
    """What may be said of a rank that was well: it notices by itself, or is stopped before it does."""
    return [[f"(As a consequence: rank {rank} {what})"] for what in ("lost its connection", "was stopped")]


def check_attempt(job: Job, kill: Kill, whole: list[list[dict[str, Any]]]) -> None:
    """The attempt began at the last whole checkpoint, and did what an undisturbed run does, to the bit."""
    first = 0 if kill.begins_from is None else int(kill.begins_from.removeprefix("global_step"))
    for rank in range(2):
        begin, steps = job.last_attempt(rank)
        assert begin["from"] == kill.begins_from, kill
        assert steps == whole[rank][first : kill.step], kill


def check_checkpoints(job: Job, kill: Kill) -> None:
    """Whole checkpoints are the only ones that are seen, and nothing in them is damaged."""
    found = list_checkpoints(job.checkpoints)
    assert [entry.tag for entry in found] == kill.complete, kill
    assert [entry.fault for entry in found] == [None] * len(found), kill
    assert all(verify_checkpoint(job.checkpoints, tag) == [] for tag in kill.complete), kill
    assert [entry.tag for entry in found if entry.latest] == ["global_step3"], kill
    if kill.left is not None:
        (partial,) = job.checkpoints.glob(kill.left)
        assert (partial / "manifest.json").exists()


def check_the_rest(job: Job, whole: list[list[dict[str, Any]]], nproc: int) -> None:
    """The last attempt went on to the end, and nothing that died has left anything behind."""
    attempts = [job.last_attempt(rank) for rank in range(nproc)]
    assert {begin["from"] for begin, _ in attempts} == {"global_step3"}
    for number, theirs in enumerate(zip(*(steps for _, steps in attempts), strict=True), start=3):
        ours = [whole[rank][number] for rank in range(2)]
        if nproc == 2:
            assert list(theirs) == ours
            continue
        assert {line["step"] for line in theirs} == {number}
        assert {line["lr"] for line in theirs} == {ours[0]["lr"]}
        assert theirs[0]["loss"] == pytest.approx(ours[0]["loss"], rel=1e-5)
        assert theirs[0]["norm"] == pytest.approx(ours[0]["norm"], rel=1e-5)
        assert drawn(theirs) == drawn(ours)
    assert len(attempts[0][1]) == 7
    assert sorted(path.name for path in job.checkpoints.iterdir()) == AT_THE_END
    assert (job.checkpoints / "latest").read_text() == "global_step9"


def drawn(lines: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The samples of each micro-batch of a step, over all ranks."""
    return [sorted(n for line in lines for n in line["samples"][micro]) for micro in range(2)]


# ------------------------------------------------------------------------------------- the launcher is told to stop


@pytest.mark.timeout(300)
def test_a_launcher_that_is_told_to_stop_in_the_middle_of_a_save_leaves_no_process_and_a_good_checkpoint(
    tmp_path: Path,
) -> None:
    whole = undisturbed(tmp_path / "undisturbed", "--stage", "1")
    folder = tmp_path / "stopped"
    folder.mkdir()
    job = Job(folder=folder, options=("--stage", "1"))
    command = job.command(2, "--at", "pause", "--step", "6", "--rank", "0")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as launcher:
        wait_for(folder / "paused", launcher)
        pids = [pid for rank in range(2) for pid in process_ids(job, rank)]
        assert len(pids) == 4
        assert all(map(runs, pids))
        launcher.send_signal(signal.SIGTERM)
        _, told = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert verdict(told) == ["drivetrain run: stopped by SIGTERM; all ranks have ended"]
    assert not any(map(runs, pids))
    assert [(entry.tag, entry.fault) for entry in list_checkpoints(job.checkpoints)] == [("global_step3", None)]
    assert verify_checkpoint(job.checkpoints) == []
    run_ranks(script_in_rank, 2, str(folder / "train.py"), [str(folder), *job.options])
    for rank in range(2):
        begin, steps = job.last_attempt(rank)
        assert begin["from"] == "global_step3"
        assert steps == whole[rank][3:]
    assert not list(job.checkpoints.glob(".*"))


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.exists(), process.stderr.read() if process.poll() is not None and process.stderr else "it hangs"


def process_ids(job: Job, rank: int) -> Iterator[int]:
    begin, _ = job.last_attempt(rank)
    yield from (begin["pid"], begin["child"])


def runs(pid: int) -> bool:
    """Whether a process is there. One that has died and is not yet reaped by its new parent is not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


# ---------------------------------------------------------------------------------------------- a rank raises


@pytest.mark.timeout(300)
def test_the_traceback_of_the_rank_that_raised_is_shown_and_not_that_of_the_one_that_waited(tmp_path: Path) -> None:
    job = Job(folder=tmp_path, options=("--stage", "3"))
    ended = job.run(2, "--at", "exception", "--step", "4", "--rank", "1")
    assert ended.returncode == 1
    told = verdict(ended.stderr)
    assert told[:2] == ["drivetrain run: rank 1 failed:", "Traceback (most recent call last):"]
    assert ended.stderr.count("Traceback") == 1
    raised = told.index("ValueError: the batch is bad")
    assert told[raised - 1].strip() == 'raise ValueError("the batch is bad")'
    assert told[raised + 1 :] in followed(0)
    assert [line["step"] for line in job.last_attempt(1)[1]] == [0, 1, 2, 3]
    assert [entry.tag for entry in list_checkpoints(job.checkpoints) if entry.latest] == ["global_step3"]

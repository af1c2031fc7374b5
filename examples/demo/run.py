"""The demo: from the source of Python's standard library to a model that writes code, in a few minutes.

    nox -s demo                          or, in an environment that has drivetrain and matplotlib,
    python examples/demo/run.py [--device cpu|cuda] [--quick]

It prepares the text, measures the memory of each ZeRO stage and the speed of this machine, trains on two ranks at
stage 3, saves, goes on with one rank at stage 1, exports, lets the model write, and checks what came out. Each part is
a script of its own beside this one, and is shown with the command that starts it.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from data import prepare, read_facts, read_sources
from plan import (
    CHECKPOINTS,
    DATA,
    HERE,
    LOSS_PICTURE,
    MEMORY,
    MEMORY_PICTURE,
    METRICS,
    MODEL,
    PARTS,
    PLAN,
    SAMPLE,
    SUMMARY,
    TABLE,
    Plan,
    read_json,
    write_json,
)
from rich.console import Console

from drivetrain.engine.monitor import MemoryRow, ModelStates, loss_curve, memory_picture

VOCABULARY = 512
SECONDS, QUICK_SECONDS = 130.0, 6.0
LEAST_FALL, QUICK_LEAST_FALL = 0.40, 0.15
RESUME_TOLERANCE = 0.01  # nats per token: bf16 rounds differently where the work is cut differently
MEMORY_TOLERANCE = 0.02
OURS = (DATA, CHECKPOINTS, MODEL, PLAN, MEMORY, METRICS, TABLE, SUMMARY, SAMPLE, LOSS_PICTURE, MEMORY_PICTURE, *PARTS)
INTERRUPTED = 130


class Stopped(Exception):
    """A part of the demo ended badly, and has said why. `status` is the exit status to end with."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Check:
    """Something that the demo promises, and whether it came out."""

    holds: bool
    text: str


class Demo:
    """The parts in order. Each method is one."""

    def __init__(self, *, folder: Path, device: str, ranks: int, quick: bool) -> None:
        self.folder = folder
        self.plan = Plan(
            device=device,
            ranks=ranks,
            quick=quick,
            vocabulary=VOCABULARY,
            seconds=QUICK_SECONDS if quick else SECONDS,
        )
        self._console = Console(highlight=False)
        self._began = time.monotonic()
        self._part = 0
        self._parts = 6

    def run(self) -> bool:
        """All of it. Returns whether every check holds."""
        self._clear()
        self.text()
        self.measure()
        self.train()
        self.resume()
        self.write()
        return self.report()

    def text(self) -> None:
        """Read the standard library and learn a tokenizer."""
        self._head("Text", "the source of Python's standard library, cut into tokens")
        sources = read_sources()
        began = time.monotonic()
        corpus = prepare(self.folder / DATA, self.plan.vocabulary, sources[:: 4 if self.plan.quick else 1])
        self._say(
            f"{corpus.train_files} files to train on, {corpus.valid_files} held out: "
            f"{corpus.characters / 1e6:.1f} million characters, {corpus.train_tokens / 1e6:.1f} million tokens"
        )
        self._say(f"{corpus.vocabulary:,} different tokens, learned from this text in {time.monotonic() - began:.0f} s")
        self.plan.save(self.folder)

    def measure(self) -> None:
        """Memory at each stage, and speed."""
        self._head("Measure", "what a rank holds at each ZeRO stage, and how fast this machine is")
        self._drivetrain_run(self.plan.ranks, "measure.py")
        self.plan = Plan.load(self.folder)

    def train(self) -> None:
        """The first four fifths."""
        self._head("Train", "parameters, gradients and optimizer states split over the ranks")
        self._drivetrain_run(self.plan.ranks, "train.py")

    def resume(self) -> None:
        """The rest, on one rank at stage 1."""
        self._head("Resume", "the same checkpoint on one rank at stage 1, with nothing converted")
        self._drivetrain_run(1, "train.py", "--resume", "--stage", "1")

    def write(self) -> None:
        """Text by the exported model."""
        self._head("Write", "the exported weights go on with two beginnings")
        tokens = "40" if self.plan.quick else "150"
        target = self.folder / SAMPLE
        self._call(["python"], [sys.executable], "sample.py", MODEL, "--tokens", tokens, "--save", str(target))

    def report(self) -> bool:
        """Pictures, summary and checks."""
        self._head("Result", "")
        parts = [read_json(self.folder / name) for name in PARTS]
        memory = read_json(self.folder / MEMORY)
        rows = [
            MemoryRow(
                stage=row["stage"], measured=ModelStates(**row["measured"]), formula=ModelStates(**row["formula"])
            )
            for row in memory["stages"]
        ]
        loss_curve(self.folder / METRICS, self.folder / LOSS_PICTURE, title="Loss on the Python standard library")
        ranks = memory["ranks"]
        memory_picture(
            rows,
            self.folder / MEMORY_PICTURE,
            title=f"Model states per rank, {memory['parameters'] / 1e6:.1f} million parameters on {ranks} ranks",
        )
        checks = self._checks(parts, rows)
        for check in checks:
            mark = "[green]ok  [/green]" if check.holds else "[red]FAIL[/red]"
            self._console.print(f"      {mark} {check.text}", soft_wrap=True)
        self._summarise(parts, memory, checks)
        self._console.print(
            f"\n      {self._minutes()} in all. Everything is in [bold]{self.folder}[/bold]:\n"
            f"        {LOSS_PICTURE}, {MEMORY_PICTURE}   pictures\n"
            f"        {METRICS}, {TABLE}   loss, speed and memory of every step\n"
            f"        {MODEL}/   weights, config.json and tokenizer.json, as transformers loads them\n"
            f"        {CHECKPOINTS}/   to go on from      {SUMMARY}   all numbers      {SAMPLE}   the text above\n"
            f'      Let it write more:  python {_relative(HERE / "sample.py")} {self.folder / MODEL} "class Stack:"'
        )
        return all(check.holds for check in checks)

    def _checks(self, parts: Sequence[dict[str, Any]], rows: Sequence[MemoryRow]) -> list[Check]:
        first, last = parts[0]["valid_loss_before"], parts[1]["valid_loss_after"]
        fall, least = 1 - last / first, QUICK_LEAST_FALL if self.plan.quick else LEAST_FALL
        saved, loaded = parts[0]["valid_loss_after"], parts[1]["valid_loss_before"]
        worst = max(abs(row.measured.total / row.formula.total - 1) for row in rows)
        bits = last * read_facts(self.folder / DATA).bits_per_byte
        return [
            Check(
                holds=fall >= least,
                text=f"validation loss {first:.2f} -> {last:.2f} on files never seen, {fall:.0%} less "
                f"(at least {least:.0%} asked for); {bits:.2f} bits per byte",
            ),
            Check(
                holds=abs(saved - loaded) < RESUME_TOLERANCE,
                text=f"resumed where it stopped: {saved:.4f} with {parts[0]['ranks']} ranks at stage "
                f"{parts[0]['stage']}, {loaded:.4f} with {parts[1]['ranks']} at stage {parts[1]['stage']}",
            ),
            Check(
                holds=worst <= MEMORY_TOLERANCE,
                text=f"model states within {worst:.1%} of the published formulas at stages 0 to 3",
            ),
        ]

    def _summarise(self, parts: Sequence[dict[str, Any]], memory: dict[str, Any], checks: Sequence[Check]) -> None:
        config = self.plan.model
        summary = {
            "passed": all(check.holds for check in checks),
            "checks": [{"holds": check.holds, "text": check.text} for check in checks],
            "seconds": round(time.monotonic() - self._began, 1),
            "device": self.plan.device,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "drivetrain": _version(),
            "corpus": read_json(self.folder / DATA / "corpus.json"),
            "model": {"parameters": memory["parameters"], **config.to_dict()},
            "plan": read_json(self.folder / PLAN),
            "config": self.plan.config(),
            "training": parts,
            "memory": memory,
        }
        write_json(self.folder / SUMMARY, summary)

    def _clear(self) -> None:
        """Remove what an earlier run left, and nothing else."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in OURS:
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _drivetrain_run(self, ranks: int, script: str, *arguments: str) -> None:
        shown = ["drivetrain", "run", "--nproc", str(ranks)]
        self._call(shown, [sys.executable, "-m", "drivetrain.engine.cli", *shown[1:]], script, "", *arguments)

    def _call(self, shown: list[str], real: list[str], script: str, inside: str, *arguments: str) -> None:
        """Run a script on the folder (or on what is `inside` it) and wait; it writes to this terminal."""
        path = HERE / script
        rest = [str(self.folder / inside), *arguments]
        self._console.print(f"      [dim]$ {shlex.join([*shown, _relative(path), *rest])}[/dim]", soft_wrap=True)
        process = subprocess.Popen([*real, str(path), *rest])
        try:
            status = process.wait()
        except KeyboardInterrupt:
            _end(process)
            raise
        if status:
            raise Stopped(status)

    def _head(self, name: str, what: str) -> None:
        self._part += 1
        clock = "" if self._part == 1 else f"  [dim]{self._minutes()}[/dim]"
        self._console.print(
            f"\n[bold cyan]{self._part}/{self._parts}  {name}[/bold cyan]  {what}{clock}", soft_wrap=True
        )

    def _say(self, text: str) -> None:
        self._console.print(f"      {text}", soft_wrap=True)

    def _minutes(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self._began), 60)
        return f"{minutes}:{seconds:02d} min"


def choose_device(asked: str) -> tuple[str, int]:
    """The device and the number of ranks: two on the CPU, one per GPU and at most two on GPUs.

    Raises ValueError if a GPU is asked for and none is there.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cuda" and not gpus:
        raise ValueError(
            f"--device cuda: torch {torch.__version__} finds no GPU here (`drivetrain report` says more); "
            "leave the option out to run on the CPU"
        )
    if asked == "cpu" or not gpus:
        return "cpu", 2
    return "cuda", min(2, gpus)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that Ctrl-C has reached too; end it if it does not end."""
    for act in (process.terminate, process.kill):
        try:
            process.wait(timeout=15)
            return
        except subprocess.TimeoutExpired:
            act()
    process.wait()


def _version() -> str:
    try:
        return version("drivetrain")
    except PackageNotFoundError:
        return "from source"


def _relative(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def main() -> int:
    arguments = argparse.ArgumentParser(description="Train, resume and sample a small language model with ZeRO.")
    arguments.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU if there is one"
    )
    arguments.add_argument("--quick", action="store_true", help="half a minute, with a very small model")
    arguments.add_argument("--folder", type=Path, default=Path("runs/demo"), help="results (default %(default)s)")
    given = arguments.parse_args()
    try:
        device, ranks = choose_device(given.device)
    except ValueError as error:
        arguments.error(str(error))
    console = Console(highlight=False)
    console.print("[bold]Drivetrain[/bold] trains a language model with ZeRO, on this machine, from nothing.")
    demo = Demo(folder=given.folder, device=device, ranks=ranks, quick=given.quick)
    try:
        return 0 if demo.run() else 1
    except Stopped as stopped:
        console.print(f"\nThe demo stopped. What was written so far is in {given.folder}.", soft_wrap=True)
        return stopped.status
    except KeyboardInterrupt:
        console.print(
            f"\nStopped. What was written so far is in {given.folder}; nox -s demo starts anew.", soft_wrap=True
        )
        return INTERRUPTED
    except FileNotFoundError as error:
        console.print(f"\nThe demo can't run: {error}", soft_wrap=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())

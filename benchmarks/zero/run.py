"""Stages 0 to 3 beside torch DDP, FSDP2 and, where it is installed, DeepSpeed: tokens/s and peak memory, in one run.

    nox -s bench -- zero [--sizes 25M 135M] [--precisions fp32 bf16] [--rounds 3] [--steps 4] [--ranks 2]

Systems take turns: every round runs each one once, in an order that rotates, and ratios are formed within a round, so
that what else the machine does falls on all alike. Written to ``benchmarks/zero/results/``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
from pathlib import Path

import torch

from drivetrain_testkit import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
from systems import SYSTEMS, Measured, Work, run

RESULTS = Path(__file__).parent / "results"
RIVALS = {0: "ddp", 1: "ddp", 2: "ddp", 3: "fsdp2"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["25M", "135M"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--systems", nargs="+", default=None, choices=sorted(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    systems = options.systems or [name for name in SYSTEMS if available(name)]
    report = {"machine": machine(), "options": vars(options), "runs": []}
    for size in options.sizes:
        for precision in options.precisions:
            rounds = []
            for index in range(options.rounds):
                turn = index % len(systems)
                found: dict[str, dict[str, float]] = {}
                for system in systems[turn:] + systems[:turn]:
                    work = Work(
                        system=system,
                        size=size,
                        precision=precision,
                        batch=options.batch,
                        length=options.length,
                        warmup=options.warmup,
                        steps=options.steps,
                    )
                    found[system] = summary(run_ranks(run, options.ranks, work, timeout=900), work, options.ranks)
                    told = f"{size} {precision} round {index + 1} {system}: {found[system]}"
                    print(told, file=sys.stderr, flush=True)
                rounds.append(found)
            report["runs"].append({"size": size, "precision": precision, "rounds": rounds})
    RESULTS.mkdir(exist_ok=True)
    where = str(report["machine"]["device"]).replace(" ", "-")
    name = f"{where}-{options.ranks}-ranks-{'-'.join(options.sizes)}"
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1))
    text = table(report)
    (RESULTS / f"{name}.md").write_text(text)
    print(text)


def available(system: str) -> bool:
    return not system.startswith("deepspeed") or importlib.util.find_spec("deepspeed") is not None


def summary(ranks: list[Measured], work: Work, world_size: int) -> dict[str, float]:
    """Median step of the slowest rank, as tokens/s over all ranks; the largest peak over ranks."""
    slowest = max(statistics.median(rank.seconds) for rank in ranks)
    return {
        "tokens_per_second": round(work.batch * work.length * world_size / slowest, 1),
        "peak_mb": round(max(rank.peak_bytes for rank in ranks) / 2**20, 1),
        "loss": round(ranks[0].loss, 4),
    }


def table(report: dict) -> str:
    about = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    lines = [f"# ZeRO beside its peers\n\n{about}; {report['options']['ranks']} ranks, one thread each on CPUs.\n"]
    for entry in report["runs"]:
        rounds = entry["rounds"]
        lines += [
            f"## {entry['size']} parameters, {entry['precision']}\n",
            "| system | tokens/s, median (min to max) | peak MB per rank | speed beside peer | memory beside peer |",
            "|---|---|---|---|---|",
        ]
        for system in rounds[0]:
            speed = [r[system]["tokens_per_second"] for r in rounds]
            peak = statistics.median(r[system]["peak_mb"] for r in rounds)
            row = f"| {system} | {statistics.median(speed):.0f} ({min(speed):.0f} to {max(speed):.0f}) | {peak:.0f} "
            lines.append(row + beside(system, rounds))
        lines.append("")
    return "\n".join(lines)


def beside(system: str, rounds: list[dict]) -> str:
    """Ratios to the peer that the stage is measured against, within each round: median (min to max)."""
    kind, _, stage = system.partition("-")
    peer = RIVALS.get(int(stage)) if kind in ("drivetrain", "deepspeed") else None
    if peer is None or peer not in rounds[0]:
        return "| | |"
    cells = []
    for key in ("tokens_per_second", "peak_mb"):
        ratios = [r[system][key] / r[peer][key] for r in rounds]
        cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) x {peer}")
    return f"| {cells[0]} | {cells[1]} |"


def machine() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "device": device,
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()

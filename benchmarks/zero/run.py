"""Stages 0 to 3 beside torch DDP, FSDP2 and, where it is installed, DeepSpeed: tokens/s and peak memory, in one run.

    nox -s bench -- zero [--sizes 25M 135M] [--precisions fp32 bf16] [--steps 12] [--ranks 2]
    nox -s bench -- zero --systems drivetrain-3 graphs-3 inductor-3 --warmup 5     # hooks beside compiled graphs
    nox -s bench -- zero --ranks 1                                                 # what hooks cost: beside plain torch

Systems take turns step by step, in an order that rotates, and ratios are formed within a turn, so that what else the
machine does falls on all alike (see ``turns``). Where memory does not hold all at once, companies of ``--together``
systems run one after another, each with the peers that it is measured against. Written to
``benchmarks/zero/results/``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from drivetrain_testkit import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
from systems import SYSTEMS, Measured, Work, run
from turns import Caller

RESULTS = Path(__file__).parent / "results"
COMPILED = ("graphs", "inductor")  # only with --systems, beside hooks, and with --warmup 5 or more: they measure first
RIVALS = {0: "ddp", 1: "ddp", 2: "ddp", 3: "fsdp2"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["25M", "135M"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--systems", nargs="+", default=None, choices=sorted(SYSTEMS))
    parser.add_argument("--steps", type=int, default=12, help="measured turns of each system")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--together", type=int, default=None, help="systems alive at once; by default all, above 25M 2")
    options = parser.parse_args()
    systems = options.systems or [name for name in SYSTEMS if available(name, options.ranks)]
    report = {"machine": machine(), "options": vars(options), "runs": []}
    for size in options.sizes:
        together = options.together or (len(systems) if size == "25M" else 2)
        for precision in options.precisions:
            entry = {"size": size, "precision": precision, "companies": []}
            for company in companies(systems, together):
                works = [
                    Work(
                        system=system,
                        size=size,
                        precision=precision,
                        batch=options.batch,
                        length=options.length,
                        warmup=options.warmup,
                        steps=options.steps,
                    )
                    for system in company
                ]
                entry["companies"].append(in_turns(works, options.ranks))
            report["runs"].append(entry)
    RESULTS.mkdir(exist_ok=True)
    where = str(report["machine"]["device"]).replace(" ", "-")
    name = f"{where}-{options.ranks}-ranks-{'-'.join(options.sizes)}"
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1))
    text = table(report)
    (RESULTS / f"{name}.md").write_text(text)
    print(text)


def available(system: str, ranks: int) -> bool:
    """Whether it runs unasked."""
    if ranks == 1:
        return system.startswith(("torch", "drivetrain"))
    if system.startswith(COMPILED) or system == "torch":
        return False
    return not system.startswith("deepspeed") or importlib.util.find_spec("deepspeed") is not None


def companies(systems: list[str], together: int) -> Iterator[list[str]]:
    """Groups of at most that many systems, or two, each with the peers of its members."""
    peers = {peer_of(system, systems) for system in systems}
    alone = [system for system in systems if system not in peers]
    if len(systems) <= together or not alone:
        yield systems
        return
    company: list[str] = []
    for system in alone:
        wanted = [name for name in (peer_of(system, systems), system) if name in systems]
        joined = list(dict.fromkeys([*company, *wanted]))
        if company and len(joined) > together:
            yield company
            joined = wanted
        company = joined
    yield company


def peer_of(system: str, systems: Collection[str]) -> str | None:
    """Which of ``systems`` it is measured against."""
    kind, _, stage = system.partition("-")
    if kind == "drivetrain" and "torch" in systems:
        return "torch"
    if kind in COMPILED:
        return f"drivetrain-{stage}"
    return RIVALS.get(int(stage)) if kind in ("drivetrain", "deepspeed") else None


def in_turns(works: list[Work], ranks: int) -> dict[str, dict[str, object]]:
    """Run systems side by side, and say of each: tokens/s in every turn, its peak and its loss."""
    caller = Caller(ranks)
    names = [work.system for work in works]
    with ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(run_ranks, run, ranks, work, caller.port, timeout=3600) for work in works]
        for index in range(works[0].warmup + works[0].steps):
            caller.call(names, index, running)
        found = {work.system: summary(job.result(), work) for work, job in zip(works, running, strict=True)}
    for system, measured in found.items():
        speed = statistics.median(measured["tokens_per_second"])
        told = f"{works[0].size} {works[0].precision} {system}: {speed:.0f} tokens/s, {measured['peak_mb']} MB"
        print(told, file=sys.stderr, flush=True)
    return found


def summary(ranks: list[Measured], work: Work) -> dict[str, object]:
    """Each step of the slowest rank, as tokens/s over all ranks; the largest peak over ranks."""
    slowest = [max(step) for step in zip(*(rank.seconds for rank in ranks), strict=True)]
    return {
        "tokens_per_second": [round(work.batch * work.length * len(ranks) / seconds, 1) for seconds in slowest],
        "peak_mb": round(max(rank.peak_bytes for rank in ranks) / 2**20, 1),
        "loss": round(ranks[0].loss, 4),
    }


def table(report: dict) -> str:
    about = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    lines = [f"# ZeRO beside its peers\n\n{about}; {report['options']['ranks']} ranks, one thread each on CPUs.\n"]
    for entry in report["runs"]:
        lines += [
            f"## {entry['size']} parameters, {entry['precision']}\n",
            f"{report['options']['steps']} steps of each, in turns: median (25th to 75th percentile).\n",
            "| system | tokens/s | peak MB per rank | speed beside peer | memory beside peer |",
            "|---|---|---|---|---|",
        ]
        told = set()
        for company in entry["companies"]:
            for system, measured in company.items():
                if system not in told:
                    told.add(system)
                    speed = spread(measured["tokens_per_second"], "{:.0f}")
                    lines.append(f"| {system} | {speed} | {measured['peak_mb']:.0f} {beside(system, company)}")
        lines.append("")
    return "\n".join(lines)


def spread(values: list[float], form: str) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{form.format(middle)} ({form.format(low)} to {form.format(high)})"


def beside(system: str, company: dict[str, dict]) -> str:
    """Ratios to the peer that the stage is measured against, turn by turn."""
    peer = peer_of(system, company)
    if peer not in company:
        return "| | |"
    mine, theirs = company[system], company[peer]
    speeds = zip(mine["tokens_per_second"], theirs["tokens_per_second"], strict=True)
    speed = spread([own / other for own, other in speeds], "{:.2f}")
    return f"| {speed} x {peer} | {mine['peak_mb'] / theirs['peak_mb']:.2f} x {peer} |"


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

"""Drivetrain's collectives on gloo beside torch.distributed's own, in one run.

Both run on the same ranks, in turn, call by call, so that a change in the machine's load meets both. One sample is
the time from a barrier until the slowest rank has its result. Ratios are of medians: torch's time over ours, so above
1 we are faster. Memory is the growth of the peak resident set during a call, in units of the whole buffer, the
largest over the ranks (Linux only).

    python benchmarks/comm/run.py [--ranks 2 4] [--megabytes 1 8 64] [--dtypes float32 bfloat16] [--samples 15]
    [--name NAME]

Writes results/NAME.json and results/NAME.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from drivetrain import comm

OPS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure. All ranks get the same one."""

    ranks: int
    megabytes: tuple[float, ...]
    dtypes: tuple[str, ...]
    samples: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operation at one size. Times in milliseconds, spread as the quartiles; memory in units of the whole
    buffer.
    """

    op: str
    ranks: int
    dtype: str
    megabytes: float
    ours_ms: float
    ours_quartiles_ms: tuple[float, float]
    torch_ms: float
    torch_quartiles_ms: tuple[float, float]
    ratio: float
    ours_memory: float | None
    torch_memory: float | None


class Buffers:
    """The tensors of one case, touched once so that no contender pays for first use."""

    def __init__(self, plan: Plan, megabytes: float, dtype: torch.dtype, rank: int) -> None:
        numel = int(megabytes * 2**20) // (torch.finfo(dtype).bits // 8)
        numel -= numel % plan.ranks
        self.whole = torch.full((numel,), 1.0 + rank, dtype=dtype)
        self.part = torch.full((numel // plan.ranks,), 1.0, dtype=dtype)
        self.nbytes = numel * self.whole.element_size()


def contenders(
    op: str, buffers: Buffers, axis: comm.Axis, group: dist.ProcessGroup
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Ours and torch's call for ``op``, each blocking until done."""
    whole, part = buffers.whole, buffers.part
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "all_reduce": (
            lambda: comm.all_reduce(whole, axis).wait(),
            lambda: dist.all_reduce(whole, group=group),
        ),
        "all_gather": (
            lambda: comm.all_gather(whole, part, axis).wait(),
            lambda: dist.all_gather_into_tensor(whole, part, group=group),
        ),
        "reduce_scatter": (
            lambda: comm.reduce_scatter(part, whole, axis).wait(),
            lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        ),
    }
    return pairs[op]


def seconds(call: Callable[[], object], axis: comm.Axis, group: dist.ProcessGroup) -> float:
    comm.barrier(axis)
    start = time.perf_counter()
    call()
    elapsed = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(elapsed, dist.ReduceOp.MAX, group=group)
    return float(elapsed)


def peak_growth(call: Callable[[], object], group: dist.ProcessGroup) -> int | None:
    """Bytes by which one call raises the peak resident set of the worst rank."""
    if not sys.platform.startswith("linux"):
        return None
    Path("/proc/self/clear_refs").write_text("5")  # peak := current
    before = status_bytes("VmHWM")
    call()
    growth = torch.tensor([float(status_bytes("VmHWM") - before)])
    dist.all_reduce(growth, dist.ReduceOp.MAX, group=group)
    return int(growth)


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(plan: Plan, axis: comm.Axis, group: dist.ProcessGroup) -> list[Row]:
    rows = []
    for dtype_name in plan.dtypes:
        for megabytes in plan.megabytes:
            for op in OPS:
                buffers = Buffers(plan, megabytes, getattr(torch, dtype_name), axis.rank)
                ours, theirs = contenders(op, buffers, axis, group)
                for _ in range(2):
                    ours(), theirs()
                times: tuple[list[float], list[float]] = ([], [])
                for _ in range(plan.samples):
                    for call, samples in zip((ours, theirs), times, strict=True):
                        samples.append(seconds(call, axis, group) * 1e3)
                memory = [peak_growth(call, group) for call in (ours, theirs)]
                rows.append(row(plan, op, dtype_name, megabytes, times, memory, buffers.nbytes))
    return rows


def row(
    plan: Plan,
    op: str,
    dtype: str,
    megabytes: float,
    times: tuple[list[float], list[float]],
    memory: list[int | None],
    nbytes: int,
) -> Row:
    (ours, ours_quartiles), (theirs, their_quartiles) = summary(times[0]), summary(times[1])
    units = [None if growth is None else round(growth / nbytes, 2) for growth in memory]
    return Row(
        op=op,
        ranks=plan.ranks,
        dtype=dtype,
        megabytes=megabytes,
        ours_ms=ours,
        ours_quartiles_ms=ours_quartiles,
        torch_ms=theirs,
        torch_quartiles_ms=their_quartiles,
        ratio=round(theirs / ours, 2),
        ours_memory=units[0],
        torch_memory=units[1],
    )


def summary(samples: list[float]) -> tuple[float, tuple[float, float]]:
    low, _, high = statistics.quantiles(samples, n=4)
    return round(statistics.median(samples), 3), (round(low, 3), round(high, 3))


def rank_main(rank: int, plan: Plan, port: int, out: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(plan.ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    world = comm.init(backend="gloo", device="cpu")
    axis = comm.Mesh.create(world).axis("shard")
    rows = measure(plan, axis, dist.new_group(backend="gloo"))
    if rank == 0:
        Path(out).write_text(json.dumps([asdict(r) for r in rows]))
    comm.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


HEAD = """\
| op | ranks | dtype | MB | ours ms (quartiles) | torch ms (quartiles) | torch / ours | memory ours | memory torch |
|---|---|---|---|---|---|---|---|---|
"""


def line(row: Row) -> str:
    (ours_low, ours_high), (torch_low, torch_high) = row.ours_quartiles_ms, row.torch_quartiles_ms
    cells = [
        *(row.op, row.ranks, row.dtype, f"{row.megabytes:g}"),
        f"{row.ours_ms} ({ours_low}-{ours_high})",
        f"{row.torch_ms} ({torch_low}-{torch_high})",
        *(f"**{row.ratio}**", row.ours_memory, row.torch_memory),
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1, 8, 64])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--name", default="collectives")
    options = parser.parse_args()
    rows: list[Row] = []
    for ranks in options.ranks:
        plan = Plan(
            ranks=ranks, megabytes=tuple(options.megabytes), dtypes=tuple(options.dtypes), samples=options.samples
        )
        with tempfile.NamedTemporaryFile() as out:
            multiprocessing.spawn(rank_main, (plan, free_port(), out.name), nprocs=ranks)
            rows += [Row(**entry) for entry in json.loads(Path(out.name).read_text())]
    machine = (
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{options.name}.json").write_text(
        json.dumps({"machine": machine, "rows": [asdict(r) for r in rows]}, indent=1) + "\n"
    )
    text = (
        f"# Collectives on gloo\n\n{machine}. {options.samples} samples each.\n\n{HEAD}{''.join(line(r) for r in rows)}"
    )
    (folder / f"{options.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

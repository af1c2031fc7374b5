"""Drivetrain's collectives, over shared memory and over gloo, beside torch.distributed's own on gloo, in one run.

All run on the same ranks, in turn, call by call, so that a change in the machine's load meets all. One sample is the
time from a barrier until the slowest rank has its result. Ratios are formed call by call, against shared memory (the
other's time over its time, so above 1 it is faster), and given as median and quartiles. CPU time is that of all
threads of a rank, in user and kernel mode, the mean over ranks: what a call takes from a computation beside it. Memory
is the growth of the peak resident set during a call, in units of the whole buffer, the largest over the ranks (Linux
only).

    python benchmarks/comm/run.py [--ranks 2 4] [--megabytes 0.0625 1 8 100] [--dtypes float32 bfloat16] [--samples 15]
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
from drivetrain.kernels import SharedMemoryGroup, shared_memory_refusal

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
    """One operation at one size. By contender: times in milliseconds, how often its time is that of the first one
    (each as lower quartile, median, upper quartile), the median CPU time, and memory in units of the whole buffer.
    """

    op: str
    ranks: int
    dtype: str
    megabytes: float
    ms: dict[str, tuple[float, float, float]]
    ratio: dict[str, tuple[float, float, float]]
    cpu_ms: dict[str, float]
    memory: dict[str, float | None]


class Buffers:
    """The tensors of one case, touched once so that no contender pays for first use."""

    def __init__(self, plan: Plan, megabytes: float, dtype: torch.dtype, rank: int) -> None:
        numel = int(megabytes * 2**20) // (torch.finfo(dtype).bits // 8)
        numel -= numel % plan.ranks
        self.whole = torch.full((numel,), 1.0 + rank, dtype=dtype)
        self.part = torch.full((numel // plan.ranks,), 1.0, dtype=dtype)
        self.nbytes = numel * self.whole.element_size()


@dataclass(frozen=True, kw_only=True)
class Links:
    """The same ranks three times."""

    shared: comm.Axis
    gloo: comm.Axis
    group: dist.ProcessGroup


def contenders(op: str, buffers: Buffers, links: Links) -> dict[str, Callable[[], object]]:
    """Calls of ``op`` that block until done. The first is the one that the others are compared with."""
    whole, part = buffers.whole, buffers.part

    def ours(axis: comm.Axis) -> Callable[[], object]:
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: comm.all_reduce(whole, axis).wait(),
            "all_gather": lambda: comm.all_gather(whole, part, axis).wait(),
            "reduce_scatter": lambda: comm.reduce_scatter(part, whole, axis).wait(),
        }
        return calls[op]

    theirs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=links.group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=links.group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=links.group),
    }
    return {"shared memory": ours(links.shared), "gloo": ours(links.gloo), "torch": theirs[op]}


def sample(call: Callable[[], object], links: Links) -> tuple[float, float]:
    """Milliseconds until the slowest rank is done, and of CPU time, the mean over the ranks."""
    dist.barrier(links.group)
    cpu, start = time.process_time(), time.perf_counter()
    call()
    elapsed = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(elapsed, dist.ReduceOp.MAX, group=links.group)
    used = torch.tensor([time.process_time() - cpu])  # when no rank needs this one's threads any more
    dist.all_reduce(used, group=links.group)
    return float(elapsed) * 1e3, float(used) * 1e3 / links.shared.size


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


def measure(plan: Plan, links: Links) -> list[Row]:
    rows = []
    for dtype_name in plan.dtypes:
        for megabytes in plan.megabytes:
            for op in OPS:
                buffers = Buffers(plan, megabytes, getattr(torch, dtype_name), links.shared.rank)
                calls = contenders(op, buffers, links)
                times: dict[str, list[float]] = {name: [] for name in calls}
                cpu: dict[str, list[float]] = {name: [] for name in calls}
                for number in range(-2, plan.samples):
                    for name, call in calls.items():
                        elapsed, used = sample(call, links)
                        if number >= 0:
                            times[name].append(elapsed)
                            cpu[name].append(used)
                growth = {name: peak_growth(call, links.group) for name, call in calls.items()}
                first = next(iter(times.values()))
                ratios = {name: [b / a for a, b in zip(first, own, strict=True)] for name, own in times.items()}
                rows.append(
                    Row(
                        op=op,
                        ranks=plan.ranks,
                        dtype=dtype_name,
                        megabytes=megabytes,
                        ms={name: quartiles(own, 3) for name, own in times.items()},
                        ratio={name: quartiles(own, 2) for name, own in ratios.items()},
                        cpu_ms={name: round(statistics.median(own), 2) for name, own in cpu.items()},
                        memory={
                            name: None if more is None else round(more / buffers.nbytes, 2)
                            for name, more in growth.items()
                        },
                    )
                )
    return rows


def quartiles(samples: list[float], digits: int) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(samples, n=4)
    return round(low, digits), round(middle, digits), round(high, digits)


def rank_main(rank: int, plan: Plan, port: int, out: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(plan.ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    world = comm.init(backend="gloo", device="cpu")
    shared = comm.Mesh.create(world, shared_memory=SharedMemoryGroup).axis("shard")
    if shared.carrier != "shared memory":
        raise RuntimeError(
            f"these ranks cannot share memory: {shared_memory_refusal() or 'see the log at level debug'}"
        )
    links = Links(shared=shared, gloo=comm.Mesh.create(world).axis("shard"), group=dist.new_group(backend="gloo"))
    rows = measure(plan, links)
    if rank == 0:
        Path(out).write_text(json.dumps([asdict(r) for r in rows]))
    comm.shutdown()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


HEAD = """\
| op | ranks | dtype | MB | shared memory ms | gloo ms | torch ms | gloo / shared | torch / shared | CPU ms | memory |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def line(row: Row) -> str:
    cells = [row.op, str(row.ranks), row.dtype, f"{row.megabytes:g}"]
    cells += [f"{middle} ({low}-{high})" for low, middle, high in row.ms.values()]
    cells += [f"**{middle}** ({low}-{high})" for low, middle, high in list(row.ratio.values())[1:]]
    cells += [", ".join(str(value) for value in of_each.values()) for of_each in (row.cpu_ms, row.memory)]
    return "| " + " | ".join(cells) + " |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.0625, 1, 8, 100])
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
        f"# Collectives between ranks of one host\n\n{machine}. {options.samples} samples; median and quartiles. CPU "
        f"time and memory: of shared memory, gloo and torch.\n\n"
        f"{HEAD}{''.join(line(r) for r in rows)}"
    )
    (folder / f"{options.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

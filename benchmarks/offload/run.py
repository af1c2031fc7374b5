"""Optimizer steps on states that lie on a drive or in host memory, beside the floor of the drive or of the memory.

On a drive: a cycle fetches each record (master weights and both moments, float32), steps it with the native AdamW, and
releases it as changed. Every byte is read and written once per cycle, so no cycle is shorter than these bytes at the
drive's own rate. That rate is fio's where fio is installed (one run that reads and writes as much of each), else that
of plain transfers of `AsyncFile`, first one way and then the other or both at once, whichever is faster, with the block
size and depth of the store. It is measured in each round, beside the cycles with and without pipelining and the steps
alone; the order rotates, and ratios are formed within a round, as drives are shared and their rates wander. "of floor"
is the floor over the time of the cycle: 1.0 means that the drive is busy all the time, and does nothing in vain; beside
its median and quartiles stands the ratio of the best rounds, which says most where others use the machine meanwhile.

In host memory: the same cycle through `HostStore`, beside a plain in-place multiplication that moves as many bytes as
the step must read and write at least. All of it lies in large pages (`aligned_empty`), which double the rate of memory
in some virtual machines.
"memory MB" is what the store has taken; "extra MB" by how much a cycle raises resident memory above what was held.

    python benchmarks/offload/run.py FOLDER [--records 16] [--megabytes 48] [--buffers 4] [--rounds 9] [--json FILE]

FOLDER is on the drive to measure. Records are of --megabytes each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drivetrain.engine.file_speed import FileSetting, TrialFile
from drivetrain.kernels import AdamRule, AsyncFile, AsyncFileOptions, BufferPool, Ticket, aligned_empty, resolve
from drivetrain.offload import HostStore, NvmeStore

RULE = AdamRule(lr=1e-4, weight_decay=0.01)
BYTES_PER_ELEMENT = 28  # three states read and written, the gradient read


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a cycle does: so many records of three tensors of so many elements, and how the drive is asked."""

    records: int
    elements: int
    buffers: int
    options: AsyncFileOptions

    @property
    def keys(self) -> list[str]:
        return [f"states of group {index}" for index in range(self.records)]

    @property
    def bytes(self) -> int:
        return self.records * 12 * self.elements


def fill(store: NvmeStore | HostStore, work: Work) -> None:
    """Make all records, of numbers that no drive can compress."""
    generator = torch.Generator().manual_seed(0)
    for key in work.keys:
        for tensor in store.create(key, [torch.empty(work.elements, device="meta")] * 3):
            tensor.normal_(generator=generator).abs_()
        store.release(key, changed=True)
    store.flush()


def cycle(store: NvmeStore | HostStore, work: Work, gradient: torch.Tensor) -> None:
    """Step every record once."""
    adam_step = resolve("adam_step", "cpu")
    store.expect(work.keys)
    for key in work.keys:
        master, first, second = store.fetch(key)
        adam_step([master], [gradient], [first], [second], rule=RULE, step=10)
        store.release(key, changed=True)
    store.flush()


def steps_alone(work: Work, gradient: torch.Tensor) -> Callable[[], None]:
    """As many steps on one record that stays where it is."""
    adam_step = resolve("adam_step", "cpu")
    states = [aligned_empty(work.elements).normal_().abs_() for _ in range(3)]

    def run() -> None:
        for _ in range(work.records):
            adam_step([states[0]], [gradient], [states[1]], [states[2]], rule=RULE, step=10)

    return run


def both_ways_seconds(path: Path, work: Work, pool: BufferPool) -> float:
    """How long `AsyncFile` takes to read a cycle's bytes and to write as many, half a file apart, at the same time."""
    whole = work.bytes // pool.size * pool.size
    half = whole // pool.size // 2 * pool.size
    under_way: deque[tuple[Ticket, torch.Tensor]] = deque()
    with AsyncFile(path, "r+", options=work.options, buffers=pool) as file:
        start = time.perf_counter()
        for offset in range(0, whole, pool.size):
            for move, at in ((file.read, offset), (file.write, (offset + half) % whole)):
                if not pool.free:
                    ticket, buffer = under_way.popleft()
                    ticket.wait()
                    pool.release(buffer)
                buffer = pool.acquire()
                under_way.append((move(buffer, at), buffer))
        for ticket, buffer in under_way:
            ticket.wait()
            pool.release(buffer)
        return (time.perf_counter() - start) * work.bytes / whole


def fio_seconds(path: Path, work: Work) -> float:
    """How long fio takes to read as many bytes as a cycle, and to write as many, at the same time."""
    command = [
        *("fio", "--name=floor", f"--filename={path}", "--rw=rw", "--rwmixread=50", "--direct=1", "--overwrite=1"),
        *(f"--bs={work.options.block_size}", f"--iodepth={work.options.queue_depth}", "--ioengine=io_uring"),
        *(f"--size={work.bytes}", "--invalidate=0", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return 2 * work.bytes / (job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def peak_extra_bytes(run: Callable[[], object]) -> int | None:
    """By how much one run raises resident memory above what is held before it (Linux only)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS")
        run()
        return max(0, status_bytes("VmHWM") - before)
    except (OSError, KeyError):
        return None


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def in_rounds(contestants: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each in each round, in an order that rotates, after one round that isn't counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(-1, rounds):
        for place in range(len(names)):
            name = names[(place + turn) % len(names)]
            time.sleep(0.05)  # the threads of torch's OpenMP spin for a while after their last operation
            found = contestants[name]()
            if turn >= 0:
                seconds[name].append(found)
    return seconds


def ratio(floor: list[float], own: list[float]) -> list[float]:
    """Lower quartile, median and upper quartile of floor over own, round by round."""
    return statistics.quantiles([least / taken for least, taken in zip(floor, own, strict=True)], n=4)


def on_a_drive(folder: Path, work: Work, rounds: int) -> list[dict[str, Any]]:
    gradient = aligned_empty(work.elements).normal_(std=1e-3)
    settings = {
        "pipelined": {"buffer_count": work.buffers},
        "pipelined, three buffers": {"buffer_count": 3},
        "one after another": {"buffer_count": work.buffers, "pipeline_read": False, "pipeline_write": False},
    }
    stores = {
        name: NvmeStore(folder, rank=index, options=work.options, buffer_bytes=12 * work.elements + 4096, **setting)
        for index, (name, setting) in enumerate(settings.items())
    }
    pool = BufferPool(8, 8 << 20)
    pool.memory.random_()
    both_ways = folder / ".drivetrain-offload-both-ways"
    with AsyncFile(both_ways, "w", buffers=pool) as file:
        for offset in range(0, work.bytes, pool.size):
            file.write(pool.memory[offset // pool.size % pool.count], offset)
    raw = FileSetting(block_size=work.options.block_size, queue_depth=work.options.queue_depth, parallelism=1)
    try:
        with TrialFile(folder, work.bytes, [raw]) as trial:
            for store in stores.values():
                fill(store, work)
            contestants: dict[str, Callable[[], float]] = {
                name: lambda store=store: timed(lambda: cycle(store, work, gradient)) for name, store in stores.items()
            }
            alone = steps_alone(work, gradient)
            contestants["steps alone"] = lambda: timed(alone)
            contestants["plain, one way"] = lambda: 2 * work.bytes / trial.measure(raw).both
            contestants["plain, both ways"] = lambda: both_ways_seconds(both_ways, work, pool)
            fio = folder / ".drivetrain-offload-fio"
            if shutil.which("fio") is not None:
                contestants["fio"] = lambda: fio_seconds(fio, work)
            try:
                seconds = in_rounds(contestants, rounds)
            finally:
                fio.unlink(missing_ok=True)
            for remark in trial.remarks():
                print(remark)
        memory = {name: store.memory_bytes for name, store in stores.items()}
        extra = {name: peak_extra_bytes(partial(cycle, store, work, gradient)) for name, store in stores.items()}
    finally:
        both_ways.unlink(missing_ok=True)
        for store in stores.values():
            store.close()
    plain = [min(ways) for ways in zip(seconds["plain, one way"], seconds["plain, both ways"], strict=True)]
    floor = seconds.get("fio", plain)
    rows = []
    for name, own in seconds.items():
        row: dict[str, Any] = {"case": "drive", "name": name, "milliseconds": statistics.median(own) * 1e3}
        row["gigabytes_per_second"] = 2 * work.bytes / statistics.median(own) / 1e9
        row["of_floor_quartiles"] = ratio(floor, own)
        row["of_floor_best"] = min(floor) / min(own)
        row["memory_bytes"] = memory.get(name)
        row["extra_bytes"] = extra.get(name)
        rows.append(row)
    # No cycle is shorter than the longer of the two either.
    bounds = [max(both) for both in zip(floor, seconds["steps alone"], strict=True)]
    rows[0]["of_floor_and_steps_quartiles"] = ratio(bounds, seconds["pipelined"])
    return rows


def in_memory(work: Work, rounds: int) -> list[dict[str, Any]]:
    gradient = aligned_empty(work.elements).normal_(std=1e-3)
    moved = BYTES_PER_ELEMENT * work.records * work.elements
    stream = aligned_empty(moved // 8 // work.records).fill_(1)

    def run_stream() -> None:
        for _ in range(work.records):
            stream.mul_(1.0000001)

    with closing(HostStore()) as store:
        fill(store, work)
        held = store.memory_bytes
        extra = peak_extra_bytes(partial(cycle, store, work, gradient))
        contestants: dict[str, Callable[[], float]] = {
            "host store": lambda: timed(lambda: cycle(store, work, gradient)),
            "in-place stream": lambda: timed(run_stream),
        }
        seconds = in_rounds(contestants, rounds)
    return [
        {
            "case": "host memory",
            "name": name,
            "milliseconds": statistics.median(own) * 1e3,
            "gigabytes_per_second": moved / statistics.median(own) / 1e9,
            "of_floor_quartiles": ratio(seconds["in-place stream"], own),
            "of_floor_best": min(seconds["in-place stream"]) / min(own),
            "memory_bytes": held if name == "host store" else None,
            "extra_bytes": extra if name == "host store" else None,
        }
        for name, own in seconds.items()
    ]


def show(rows: list[dict[str, Any]], work: Work) -> None:
    for case in ("drive", "host memory"):
        print(f"\n{case}: {work.records} records of {12 * work.elements / 1e6:.1f} MB")
        print(
            f"  {'':26s} {'ms':>8s} {'GB/s':>6s}  {'of floor':>22s}  {'best':>5s} {'memory MB':>10s} {'extra MB':>8s}"
        )
        for row in rows:
            if row["case"] == case:
                low, middle, high = row["of_floor_quartiles"]
                held, extra = (
                    "" if row[kind] is None else f"{row[kind] / 1e6:.1f}" for kind in ("memory_bytes", "extra_bytes")
                )
                print(
                    f"  {row['name']:26s} {row['milliseconds']:8.1f} {row['gigabytes_per_second']:6.2f}  "
                    f"{middle:6.2f} ({low:.2f} to {high:.2f})  {row['of_floor_best']:5.2f} {held:>10s} {extra:>8s}"
                )
    low, middle, high = rows[0]["of_floor_and_steps_quartiles"]
    print(f"\npipelined, of the longer of floor and steps: {middle:.2f} ({low:.2f} to {high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on the drive to measure")
    parser.add_argument("--records", type=int, default=16)
    parser.add_argument("--megabytes", type=int, default=48)
    parser.add_argument("--buffers", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=1 << 20)
    parser.add_argument("--queue-depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    options = parser.parse_args()
    if not options.folder.is_dir():
        sys.exit(f"{options.folder} is not a folder; name one on the drive to measure")
    work = Work(
        records=options.records,
        elements=options.megabytes * 1_000_000 // 12,
        buffers=options.buffers,
        options=AsyncFileOptions(block_size=options.block_size, queue_depth=options.queue_depth),
    )
    before = os.getloadavg()[0]
    rows = [*on_a_drive(options.folder, work, options.rounds), *in_memory(work, options.rounds)]
    show(rows, work)
    if options.json is not None:
        about = {
            "machine": platform.machine(),
            "system": platform.release(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "records": work.records,
            "record_bytes": 12 * work.elements,
            "block_size": options.block_size,
            "queue_depth": options.queue_depth,
            "rounds": options.rounds,
            "load_average_before": before,
            "load_average_after": os.getloadavg()[0],
        }
        options.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

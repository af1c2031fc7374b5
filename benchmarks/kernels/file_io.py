"""AsyncFile beside fio on the same file, with the same block size, depth and engine.

Both move the whole file once per run, with O_DIRECT, in rotating order; a ratio is taken within a round and the table
shows the median and the quartiles. AsyncFile moves one tensor per run, so its time includes the cut into blocks, the
hand-over between threads and the wait; fio's bandwidth is the one that it reports, without its start. Its memory is
that of `aligned_empty`; fio's is what fio takes by itself, one block per request under way.

"held": AsyncFile moves the file through a few buffers of a `BufferPool`, one request each, waiting for the one that
used the buffer before; fio has its buffers and its file registered with the ring too.

Needs fio (Debian and Ubuntu: apt install fio).

    python benchmarks/kernels/file_io.py FOLDER [--megabytes 1024] [--rounds 15] [--json FILE]
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from drivetrain.kernels import AsyncFile, AsyncFileOptions, BufferPool, Ticket, aligned_empty

POOL = (8, 8 << 20)  # buffers, bytes of each


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way of moving the file."""

    op: Literal["read", "write"]
    engine: Literal["io_uring", "threads"]
    block_size: int
    depth: int
    held: bool

    @property
    def name(self) -> str:
        """As the table shows it."""
        engine = self.engine + (", held" if self.held else "")
        return f"{self.op}, {engine}, block {self.block_size >> 10} KiB, depth {self.depth}"


CASES = [
    Case(op=op, engine=engine, block_size=block, depth=depth, held=held)
    for op in ("read", "write")
    for engine, block, depth, held in (
        ("io_uring", 1 << 20, 32, False),
        ("io_uring", 128 << 10, 32, False),
        ("io_uring", 128 << 10, 32, True),
        ("threads", 1 << 20, 8, False),
    )
]


def fio_rate(case: Case, path: Path, size: int) -> float:
    """Bytes per second that fio reports."""
    engine = (
        ["--ioengine=io_uring", f"--iodepth={case.depth}"]
        if case.engine == "io_uring"
        else ["--ioengine=psync", "--thread", f"--numjobs={case.depth}", f"--offset_increment={size // case.depth}"]
    )
    if case.held:
        engine += ["--fixedbufs=1", "--registerfiles=1"]
    per_job = size if case.engine == "io_uring" else size // case.depth
    command = [
        "fio",
        "--name=peer",
        f"--filename={path}",
        f"--rw={case.op}",
        f"--bs={case.block_size}",
        f"--size={per_job}",
        "--direct=1",
        "--overwrite=1",
        "--invalidate=0",
        "--group_reporting",
        "--output-format=json",
        *engine,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return float(report["jobs"][0][case.op]["bw_bytes"])


def our_rate(case: Case, path: Path, data: torch.Tensor, pool: BufferPool) -> float:
    """Bytes per second from the first request to the end of the last wait."""
    options = AsyncFileOptions(
        block_size=case.block_size,
        queue_depth=case.depth,
        parallelism=1 if case.engine == "io_uring" else case.depth,
        engine=case.engine,
    )
    with AsyncFile(path, "r+", options=options, buffers=pool if case.held else None) as file:
        if not file.direct:
            sys.exit(f"{path}: the file system refuses O_DIRECT; name a folder on a disk")
        if case.held and not file.holds_buffers:
            sys.exit(f"{path}: the kernel doesn't hold the buffers; is `ulimit -l` below {pool.memory.nbytes >> 10}?")
        start = time.perf_counter()
        if case.held:
            through_pool(file, case, data.numel(), pool)
        else:
            (file.read(data) if case.op == "read" else file.write(data)).wait()
        return data.numel() / (time.perf_counter() - start)


def through_pool(file: AsyncFile, case: Case, size: int, pool: BufferPool) -> None:
    """Move `size` bytes of the file by all buffers of the pool in turn."""
    start = file.read if case.op == "read" else file.write
    under_way: deque[tuple[Ticket, torch.Tensor]] = deque()
    for offset in range(0, size, pool.size):
        if pool.free == 0:
            ticket, buffer = under_way.popleft()
            ticket.wait()
            pool.release(buffer)
        buffer = pool.acquire()[: size - offset]
        under_way.append((start(buffer, offset), buffer))
    for ticket, buffer in under_way:
        ticket.wait()
        pool.release(buffer)


def measure(case: Case, path: Path, data: torch.Tensor, pool: BufferPool, rounds: int) -> dict[str, Any]:
    """Median rates, and the median and quartiles of the ratio within a round."""
    ours, peers = [], []
    for index in range(rounds + 1):
        if index % 2 == 0:
            ours.append(our_rate(case, path, data, pool))
            peers.append(fio_rate(case, path, data.numel()))
        else:
            peers.append(fio_rate(case, path, data.numel()))
            ours.append(our_rate(case, path, data, pool))
    ratios = [a / b for a, b in zip(ours[1:], peers[1:], strict=True)]  # the first round warms up
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "case": case.name,
        "ours_gb_s": statistics.median(ours[1:]) / 1e9,
        "fio_gb_s": statistics.median(peers[1:]) / 1e9,
        "ratio": statistics.median(ratios),
        "quartiles": [low, high],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="AsyncFile beside fio, in one run.")
    parser.add_argument("folder", type=Path, help="on the drive to measure")
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        sys.exit("fio was not found; install it (Debian and Ubuntu: apt install fio)")
    size = options.megabytes << 20
    data = aligned_empty(size, dtype=torch.uint8)
    data.random_(generator=torch.Generator().manual_seed(0))
    pool = BufferPool(*POOL)
    for buffer, part in zip(pool.memory, data.split(pool.size), strict=False):
        buffer[: len(part)].copy_(part)
    path = options.folder / "drivetrain_file_io"
    machine = {
        "machine": platform.machine(),
        "system": platform.release(),
        "cores": os.cpu_count(),
        "fio": subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip(),
        "megabytes": options.megabytes,
        "rounds": options.rounds,
        "load_average_before": os.getloadavg()[0],
    }
    rows = []
    try:
        with AsyncFile(path, "w") as file:
            file.write(data)
            file.sync()
        print(f"{'case':50} {'ours GB/s':>10} {'fio GB/s':>10} {'ratio':>6}  quartiles")
        for case in CASES:
            row = measure(case, path, data, pool, options.rounds)
            rows.append(row)
            low, high = row["quartiles"]
            print(
                f"{row['case']:50} {row['ours_gb_s']:10.2f} {row['fio_gb_s']:10.2f} {row['ratio']:6.2f}  "
                f"{low:.2f} to {high:.2f}"
            )
    finally:
        path.unlink(missing_ok=True)
    machine["load_average_after"] = os.getloadavg()[0]
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

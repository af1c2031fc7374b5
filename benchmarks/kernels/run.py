"""Optimizer steps in host memory beside torch's, as ratios within one run.

Machines differ and are shared, so no absolute figure is worth much: each round times every contestant once, in rotating
order, and a ratio is taken within the round; the table shows the median ratio and its quartiles, and beside them the
ratio of the best rounds, which says most where others use the machine at the same time. Before each timing
there is a short pause, because the threads of torch's OpenMP keep spinning for some milliseconds after its last
operation and would slow down whoever comes next.

Bandwidth is what limits these steps. "of stream" is the time of a plain in-place multiplication over as many bytes as
the step must read and write at least, over the time of the step: 1.0 means that the step moves memory as fast as the
machine does.

DeepSpeed's CPU Adam takes part where it is installed (peers.txt) and its op compiles, which it does at first use and
takes minutes; TORCH_EXTENSIONS_DIR, if set, keeps the result for the next run.

    python benchmarks/kernels/run.py [--elements 50e6] [--rounds 15] [--threads N] [--only CASE ...] [--json FILE]
    python benchmarks/kernels/run.py products ...    products with quantised weights: see quantized_matmul.py
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from drivetrain.kernels import (
    CpuAdagrad,
    CpuAdam,
    CpuLamb,
    CpuLion,
    LambRule,
    LionRule,
    available,
    instruction_sets,
    resolve,
)
from drivetrain.kernels.torch_ops import steps as reference

SCALE = 1024.0
CLIP = 1.0


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """`run` does the work once; `bytes_moved` is the least that it must read and write."""

    name: str
    run: Callable[[], object]
    bytes_moved: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """Contestants that do the same work, the peer to compare with first."""

    title: str
    contestants: list[Contestant]


def parameters(elements: int) -> list[torch.nn.Parameter]:
    """Parameters as a transformer has them: large matrices with small vectors between, `elements` in all."""
    sizes: list[int] = []
    left = elements
    while left > 0:
        sizes.extend(min(size, left) for size in (1024 * 1024, 4099) if left > 0)
        left = elements - sum(sizes)
    params = [torch.nn.Parameter(torch.randn(size) * 0.02) for size in sizes if size > 0]
    for param in params:
        param.grad = torch.randn_like(param) * 1e-3
    return params


def deepspeed_adam(params: list[torch.nn.Parameter], **settings: Any) -> torch.optim.Optimizer | None:
    """The peer with its op compiled, for AdamW; None, after a sentence, where it can't be had."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("MAX_JOBS", "2")
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # its op brings an OpenMP of its own, which reads this
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        place = tempfile.mkdtemp(prefix="drivetrain-bench-")
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        os.environ["TORCH_EXTENSIONS_DIR"] = place
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(params, adamw_mode=True, **settings)
        optimizer.step()
    except Exception as error:
        print(f"DeepSpeed's CPU Adam is left out: {type(error).__name__}: {str(error).splitlines()[0]}")
        return None
    return optimizer


def step_case(elements: int) -> Case:
    """The optimizer step alone, float32: parameter and moments read and written, gradient read: 28 bytes per
    element."""
    peers = [
        ("torch AdamW fused", torch.optim.AdamW(parameters(elements), weight_decay=0.01, fused=True)),
        ("torch AdamW foreach", torch.optim.AdamW(parameters(elements), weight_decay=0.01, foreach=True)),
        ("CpuAdam", CpuAdam(parameters(elements), weight_decay=0.01)),
    ]
    contestants = [Contestant(name=name, run=peer.step, bytes_moved=28 * elements) for name, peer in peers]
    return Case(title="AdamW step, float32", contestants=contestants)


def deepspeed_case(elements: int) -> Case:
    """The same beside DeepSpeed's CPU Adam; a case of its own, and the last, as its op starts threads of its own."""
    peers = [
        ("DeepSpeed CPU Adam", deepspeed_adam(parameters(elements), lr=1e-3, weight_decay=0.01)),
        ("torch AdamW fused", torch.optim.AdamW(parameters(elements), weight_decay=0.01, fused=True)),
        ("CpuAdam", CpuAdam(parameters(elements), weight_decay=0.01)),
    ]
    contestants = [
        Contestant(name=name, run=peer.step, bytes_moved=28 * elements) for name, peer in peers if peer is not None
    ]
    return Case(title="AdamW step, float32, beside DeepSpeed", contestants=contestants)


def low_state_case(elements: int) -> Case:
    """bfloat16 moments: 16 bytes of traffic per element with float32 parameters, 20 less 4; beside torch's fused
    step."""
    fused = torch.optim.AdamW(parameters(elements), weight_decay=0.01, fused=True)
    low = CpuAdam(parameters(elements), weight_decay=0.01, state_dtype=torch.bfloat16)
    return Case(
        title="AdamW step, bfloat16 moments beside float32 ones",
        contestants=[
            Contestant(name="torch AdamW fused, float32", run=fused.step, bytes_moved=28 * elements),
            Contestant(name="CpuAdam, bfloat16 moments", run=low.step, bytes_moved=20 * elements),
        ],
    )


def whole_step_case(elements: int) -> Case:
    """What mixed precision does each step: unscale, find overflow and norm, clip, step, write bfloat16 parameters."""
    ours, torchs, passes = parameters(elements), parameters(elements), parameters(elements)
    fused = CpuAdam(ours, weight_decay=0.01)
    peer = torch.optim.AdamW(torchs, weight_decay=0.01, fused=True)
    apart = CpuAdam(passes, weight_decay=0.01)
    copies = {param: torch.empty_like(param, dtype=torch.bfloat16) for param in ours}
    peer_copies = [torch.empty_like(param, dtype=torch.bfloat16) for param in torchs]
    pass_copies = [torch.empty_like(param, dtype=torch.bfloat16) for param in passes]

    def grads(params: list[torch.nn.Parameter]) -> list[Tensor]:
        return [param.grad for param in params if param.grad is not None]

    def coefficient(norm: float) -> float:
        return min(1.0, CLIP / (norm + 1e-6))

    def run_fused() -> None:
        squares = float(resolve("sum_of_squares", "cpu")(grads(ours), factor=1.0 / SCALE))
        fused.step(factor=coefficient(squares**0.5) / SCALE, copies=copies)

    def run_torch() -> None:
        gradients = grads(torchs)
        torch._foreach_mul_(gradients, 1.0)  # by 1: repeated rounds must not shrink the gradients
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        coefficient(float(norm))
        torch._foreach_mul_(gradients, 1.0)
        peer.step()
        with torch.no_grad():
            torch._foreach_copy_(peer_copies, torchs)

    def run_passes() -> None:
        gradients = grads(passes)
        resolve("unscale", "cpu")(gradients, 1.0)
        resolve("unscale", "cpu")(gradients, 1.0)
        apart.step()
        resolve("cast", "cpu")([param.detach() for param in passes], pass_copies)

    return Case(
        title="unscale + norm + clip + AdamW step + bfloat16 copy",
        contestants=[
            Contestant(name="torch, separate passes", run=run_torch, bytes_moved=54 * elements),
            Contestant(name="ours, separate passes", run=run_passes, bytes_moved=50 * elements),
            Contestant(name="ours, fused", run=run_fused, bytes_moved=34 * elements),
        ],
    )


def adagrad_case(elements: int) -> Case:
    """Adagrad, float32: parameter and sum read and written, gradient read: 20 bytes per element."""
    peers: list[tuple[str, Any]] = [
        ("torch Adagrad fused", torch.optim.Adagrad(parameters(elements), fused=True)),
        ("CpuAdagrad", CpuAdagrad(parameters(elements))),
    ]
    contestants = [Contestant(name=name, run=peer.step, bytes_moved=20 * elements) for name, peer in peers]
    return Case(title="Adagrad step, float32", contestants=contestants)


def lion_case(elements: int) -> Case:
    """Lion, which torch lacks, beside this wheel's plain-torch reference: 20 bytes per element."""
    params = parameters(elements)
    values, grads = [param.detach() for param in params], [torch.randn_like(param) for param in params]
    momenta = [torch.zeros_like(value) for value in values]
    native = CpuLion(parameters(elements), lr=1e-4)
    rule = LionRule(lr=1e-4)
    return Case(
        title="Lion step, float32",
        contestants=[
            Contestant(
                name="plain torch",
                run=lambda: reference.lion_step(values, grads, momenta, rule=rule),
                bytes_moved=20 * elements,
            ),
            Contestant(name="CpuLion", run=native.step, bytes_moved=20 * elements),
        ],
    )


def lamb_case(elements: int) -> Case:
    """LAMB, which torch lacks, beside this wheel's plain-torch reference: 24 bytes, then 16, per element."""
    params = parameters(elements)
    values, grads = [param.detach() for param in params], [torch.randn_like(param) for param in params]
    first, second = ([torch.zeros_like(value) for value in values] for _ in range(2))
    native = CpuLamb(parameters(elements), lr=1e-4)
    rule = LambRule(lr=1e-4)

    def plain() -> None:
        norms = reference.lamb_moments(values, grads, first, second, rule=rule, step=2)
        reference.lamb_apply(values, first, second, reference.lamb_ratios(norms, rule), rule=rule, step=2)

    return Case(
        title="LAMB step, float32",
        contestants=[
            Contestant(name="plain torch", run=plain, bytes_moved=40 * elements),
            Contestant(name="CpuLamb", run=native.step, bytes_moved=40 * elements),
        ],
    )


def stream(bytes_moved: int) -> Contestant:
    """A plain in-place multiplication that reads and writes `bytes_moved` in all."""
    buffer = torch.ones(bytes_moved // 8)
    return Contestant(name="in-place stream", run=lambda: buffer.mul_(1.0000001), bytes_moved=bytes_moved)


def measure(contestants: list[Contestant], rounds: int, pause: float) -> dict[str, list[float]]:
    """Seconds of each contestant in each round, after one untimed round."""
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for turn in range(-1, rounds):
        for place in range(len(contestants)):
            contestant = contestants[(place + turn) % len(contestants)]
            time.sleep(pause)
            start = time.perf_counter()
            contestant.run()
            if turn >= 0:
                seconds[contestant.name].append(time.perf_counter() - start)
    return seconds


def peak_extra_bytes(run: Callable[[], object]) -> int | None:
    """By how much one run raises resident memory above what is held before it (Linux only)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
        run()
        return max(0, _status_bytes("VmHWM") - before)
    except (OSError, KeyError):
        return None


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def import_milliseconds(starts: int) -> float:
    """What `import drivetrain.kernels` adds to `import torch`: the least over several fresh processes."""
    code = (
        "import time, torch; start = time.perf_counter(); import drivetrain.kernels;"
        "print((time.perf_counter() - start) * 1e3)"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(starts)]
    return min(float(run.stdout) for run in runs)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def report(case: Case, rounds: int, pause: float) -> list[dict[str, Any]]:
    """Measure one case, print its table and return its rows."""
    baseline = case.contestants[0]
    plain = stream(28 * (baseline.bytes_moved // 28))
    seconds = measure([*case.contestants, plain], rounds, pause)
    rate = [plain.bytes_moved / value for value in seconds[plain.name]]
    print(f"\n{case.title}")
    beside = "speed beside " + baseline.name
    print(f"  {'':28s} {'ms':>7s}  {beside:>38s}  {'best':>5s}  {'of stream':>18s}  {'extra MB':>8s}")
    rows = []
    for contestant in case.contestants:
        own = seconds[contestant.name]
        ratio = quartiles([peer / mine for peer, mine in zip(seconds[baseline.name], own, strict=True)])
        fraction = quartiles([contestant.bytes_moved / mine / full for mine, full in zip(own, rate, strict=True)])
        extra = peak_extra_bytes(contestant.run)
        row = {
            "case": case.title,
            "name": contestant.name,
            "milliseconds": statistics.median(own) * 1e3,
            "best_milliseconds": min(own) * 1e3,
            "speed_ratio_of_best": min(seconds[baseline.name]) / min(own),
            "speed_ratio_quartiles": ratio,
            "stream_fraction_quartiles": fraction,
            "extra_bytes": extra,
        }
        rows.append(row)
        print(
            f"  {contestant.name:28s} {row['milliseconds']:7.1f}  {ratio[1]:21.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})  "
            f"{row['speed_ratio_of_best']:5.2f}  "
            f"{fraction[1]:4.2f} ({fraction[0]:.2f}-{fraction[2]:.2f})  "
            f"{'?' if extra is None else f'{extra / 1e6:.1f}':>8s}"
        )
    print(f"  {plain.name:28s} {statistics.median(rate) / 1e9:7.1f} GB/s")
    rows.append({"case": case.title, "name": plain.name, "gigabytes_per_second": statistics.median(rate) / 1e9})
    return rows


CASES: Mapping[str, Callable[[int], Case]] = MappingProxyType(
    {
        "step": step_case,
        "low-states": low_state_case,
        "whole-step": whole_step_case,
        "adagrad": adagrad_case,
        "lion": lion_case,
        "lamb": lamb_case,
        "deepspeed": deepspeed_case,
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Host optimizer steps beside torch's, in one run.")
    parser.add_argument("--elements", type=lambda text: int(float(text)), default=50_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=None, help="for torch and the native core alike")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds before each timing")
    parser.add_argument("--only", nargs="*", choices=sorted(CASES), default=list(CASES), help="which cases to run")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    status = next(entry for entry in available() if entry.op == "adam_step" and entry.device == "cpu")
    machine = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "elements": options.elements,
        "rounds": options.rounds,
        "implementation": status.implementation,
        "usable_instruction_sets": list(instruction_sets()),
        "import_milliseconds_after_torch": import_milliseconds(5),
        "load_average_before": os.getloadavg()[0],
    }
    for key, value in machine.items():
        print(f"{key}: {value}")
    rows: list[dict[str, Any]] = []
    for name in options.only:
        rows += report(CASES[name](options.elements), options.rounds, options.pause)
    machine["load_average_after"] = os.getloadavg()[0]
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["products"]:
        from quantized_matmul import main as products  # which takes `measure` and its kin from here

        products(sys.argv[2:])
    else:
        main()

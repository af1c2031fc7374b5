"""A model whose states are many times the memory: trained within a limit on the process, everything on a disk.

    python benchmarks/offload/real_size.py FOLDER [--layers 22] [--width 2048] [--steps 5] [--limit-gb 4] [--early]

FOLDER is on the disk to use. 1.2 billion parameters by default: 14 GB of master weights and moments, 2.4 GB of bf16
parameters, 2.4 GB of gradients. The model is built on the meta device and its first values are drawn as they are read,
so that it never exists as a whole. A process of its own trains; it prints what is resident at its peak beside the
prediction that was made before (see `predict`), and where memory cgroups can be made, runs in one with the limit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "zero"))
from transformer import Decoder, Shape

from drivetrain.engine import Engine, initialize

MB = 2**20
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
"""glibc keeps freed pieces of up to 32 MB for itself unless told a fixed limit: 420 MB of the default model's."""


class Drawn:
    """A `TensorSource`: numbers that are drawn when they are read, the same for a name and place every time."""

    def __init__(self, module: nn.Module) -> None:
        self._shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(stop - start)
        generator = torch.Generator().manual_seed(hash((name, start)) % 2**31)
        return torch.empty(stop - start).normal_(0.0, 0.5 / math.sqrt(shape[-1]), generator=generator)


def peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def config(folder: Path, batch: int, sub_group: int, early: bool, clipping: float) -> dict[str, object]:
    where = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": sub_group,
            "offload_optimizer": {**where, "super_offload": early},
            "offload_param": {**where, "max_in_cpu": 0},
        },
    }


def predict(engine: Engine, start: int) -> dict[str, int]:
    """Bytes resident at the peak of a pass and of a step, from the sizes of buckets alone.

    Both begin with what the process has at the start, whatever stays on the device, and the buffers of the stores, as
    large as the largest records. In a pass: the root and two blocks whole, the gradients of a block as they are made
    and of three buckets on their way. In a step, of the largest bucket: its gradient in fp32, and when its moments are
    made, these and the master weights, before they are in the buffer.
    """
    zero = engine.config.zero_optimization
    assert zero.offload_optimizer is not None
    assert zero.offload_param is not None
    kept, masters, half = 12, 4, 2  # bytes per element: of states, of masters and of what is in bf16
    buckets, units = engine.sharded.buckets, engine.sharded.units
    sizes = sorted((bucket.numel for bucket in buckets if not bucket.resident), reverse=True)
    buffers = sum(sizes[: zero.offload_optimizer.buffer_count]) * kept
    buffers += sum(sizes[: zero.offload_param.buffer_count]) * half
    resident = sum(bucket.numel for bucket in buckets if bucket.resident) * half
    root, block = units[0].numel, max(unit.numel for unit in units[1:])
    in_pass = (root + 2 * block) * half + (block + 3 * sizes[0]) * half
    in_step = sizes[0] * (masters + kept)
    common = start + buffers + resident
    return {"pass": common + in_pass, "step": common + in_step}


def outline(options: argparse.Namespace) -> Decoder:
    """The model, on the meta device."""
    shape = Shape(
        vocabulary=options.vocabulary,
        width=options.width,
        layers=options.layers,
        heads=options.width // 128,
        hidden=options.width * 11 // 4,
    )
    with torch.device("meta"):
        return Decoder(shape)


def build(model: Decoder, options: argparse.Namespace, folder: Path, early: bool) -> Engine:
    """An engine with everything on the disk, in ``folder``."""
    settings = config(folder, options.batch, options.sub_group, early, options.clipping)
    return initialize(model, settings, weights=Drawn(model))


def batch(options: argparse.Namespace, generator: torch.Generator) -> torch.Tensor:
    """Tokens [batch, length + 1]."""
    return torch.randint(0, options.vocabulary, (options.batch, options.length + 1), generator=generator)


def give_memory_back() -> None:
    """Start this program again with a fixed `THRESHOLD`, unless it has one: it counts when a process starts."""
    if THRESHOLD not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, THRESHOLD: str(4 * MB)})


def train(options: argparse.Namespace) -> None:
    model = outline(options)
    numel = sum(p.numel() for p in model.parameters())
    start = peak_resident()
    began = time.perf_counter()
    engine = build(model, options, options.folder, options.early)
    predicted = predict(engine, start)
    print(f"{numel / 1e9:.2f}B parameters, laid out in {time.perf_counter() - began:.0f} s", flush=True)
    generator = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        tokens = batch(options, generator)
        began = time.perf_counter()
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        passed = time.perf_counter()
        before = peak_resident()
        record = engine.step()
        ended = time.perf_counter()
        print(
            f"step {step}: loss {float(loss.detach()):.3f}, norm {record.grad_norm:.2f}, "
            f"passes {passed - began:.1f} s, update {ended - passed:.1f} s; "
            f"peak {before / MB:.0f} MB in passes, {peak_resident() / MB:.0f} MB so far",
            flush=True,
        )
    peak, expected = peak_resident(), max(predicted.values())
    kept = sum(store.bytes for store in engine.sharded.stores.all())
    found = {
        "parameters": numel,
        "states_mb": round(kept / MB),
        "start_mb": round(start / MB),
        "predicted_mb": {name: round(value / MB) for name, value in predicted.items()},
        "peak_mb": round(peak / MB),
        "peak_of_prediction": round(peak / expected, 3),
    }
    engine.close()
    print(json.dumps(found))


def within(limit: int) -> str:
    """Put this process into a memory cgroup with a limit; says what became of it."""
    for parent in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        name = "memory.limit_in_bytes" if parent.name == "memory" else "memory.max"
        group = parent / f"drivetrain-real-size-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            (group / name).write_text(str(limit))
            (group / "cgroup.procs").write_text(str(os.getpid()))
            return f"in a memory cgroup of {limit / 2**30:g} GiB"
    return "without a limit: this system lets no memory cgroup be made"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sub-group", type=int, default=12_000_000)
    parser.add_argument("--early", action="store_true", help="super_offload: updates begin in backward")
    parser.add_argument("--clipping", type=float, default=1.0, help="largest norm; early updates need steps below it")
    parser.add_argument("--limit-gb", type=float, default=4.0)
    options = parser.parse_args()
    give_memory_back()
    print(within(int(options.limit_gb * 2**30)), flush=True)
    train(options)


if __name__ == "__main__":
    main()

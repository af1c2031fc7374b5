"""Steps whose updates begin in backward beside those that wait for it, in turn, from one disk.

    python benchmarks/offload/early.py FOLDER [--layers 2] [--width 2048] [--steps 6] [--clipping 1e4]

Two engines train the same model on the same batches; the model, the options and what is drawn are those of
`real_size.py`. Printed are the medians, over the steps from the third on, of the seconds of the passes, of the update
and of both. The losses must be the same to the bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
from real_size import batch, build, give_memory_back, outline

from drivetrain.zero import EarlyUpdates

NAMES = {False: "at the step", True: "early"}
SETTLING = 2  # steps in which moments are made, and the files grow


def train(options: argparse.Namespace) -> None:
    engines = {early: build(outline(options), options, options.folder / NAMES[early], early) for early in NAMES}
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    generator = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        tokens = batch(options, generator)
        losses = []
        for early, engine in sorted(engines.items(), reverse=step % 2 == 1):
            os.sync()
            began = time.perf_counter()
            loss = engine(tokens[:, :-1], tokens[:, 1:])
            engine.backward(loss)
            passed = time.perf_counter()
            engine.step()
            for store in engine.sharded.stores.all():
                store.flush()
            times[early].append((passed - began, time.perf_counter() - passed))
            losses.append(float(loss.detach()))
        assert losses[0] == losses[1], losses
        print(step, *(f"{pair[-1][0]:.2f} + {pair[-1][1]:.2f} s" for pair in times.values()), sep="\t", flush=True)
    for early, engine in engines.items():
        counted = times[early][SETTLING:]
        passes, update, both = (
            statistics.median(values) for values in zip(*((p, u, p + u) for p, u in counted), strict=True)
        )
        policy = engine.optimizer.policy if engine.optimizer is not None else None
        kept = f", {policy.kept} updates kept, {policy.fallen} fallen" if isinstance(policy, EarlyUpdates) else ""
        print(f"{NAMES[early]}: passes {passes:.2f} s, update {update:.2f} s, both {both:.2f} s{kept}")
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sub-group", type=int, default=4_000_000)
    parser.add_argument("--clipping", type=float, default=1e4)
    options = parser.parse_args()
    give_memory_back()
    options.folder.mkdir(parents=True, exist_ok=True)
    train(options)


if __name__ == "__main__":
    main()

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
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "zero"))
from real_size import MB, THRESHOLD, Drawn, config
from transformer import Decoder, Shape

from drivetrain.engine import Engine, initialize
from drivetrain.zero import EarlyUpdates

SETTLING = 2  # steps in which moments are made, and the files grow


def build(options: argparse.Namespace, shape: Shape, early: bool) -> Engine:
    folder = options.folder / ("early" if early else "at the step")
    settings = config(folder, options.batch, options.sub_group, early, options.clipping)
    with torch.device("meta"):
        model = Decoder(shape)
    return initialize(model, settings, weights=Drawn(model))


def train(options: argparse.Namespace) -> None:
    shape = Shape(
        vocabulary=options.vocabulary,
        width=options.width,
        layers=options.layers,
        heads=options.width // 128,
        hidden=options.width * 11 // 4,
    )
    engines = {early: build(options, shape, early) for early in (False, True)}
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    generator = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        tokens = torch.randint(0, shape.vocabulary, (options.batch, options.length + 1), generator=generator)
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
        name = "early" if early else "at the step"
        print(f"{name}: passes {passes:.2f} s, update {update:.2f} s, both {both:.2f} s{kept}")
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
    if THRESHOLD not in os.environ:  # it counts when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, THRESHOLD: str(4 * MB)})
    options.folder.mkdir(parents=True, exist_ok=True)
    train(options)


if __name__ == "__main__":
    main()

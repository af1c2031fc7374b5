"""Products with quantised weights beside torch's own, as ratios within one run.

Each case multiplies tokens by copies of one weight, one copy after another, as a model does with its layers: enough
copies that their int8 codes are `--megabytes` in all, so that what the caches of this machine hold is a choice and not
an accident. Contestants take turns, and a ratio is taken within a round (see run.py).

With one token such a product is as fast as the weight is read. "of floor" is the time of a plain sum over as many bytes
as the contestant's weights have, scales included, over its own time.

Peers: `torch._weight_int8pack_mm` (one scale per row), `torch._weight_int4pack_mm_for_cpu` (groups), linear layers in
bfloat16 and, where its wheel is installed, llama.cpp (q8_0 and q4_0; it turns x into int8 as well). That wheel has one
instruction set; `--instruction-set` makes ours the same.

    python benchmarks/kernels/run.py products [--threads N] [--tokens 1 16] [--sizes 4096x11008] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import torch
from run import Case, Contestant, measure, quartiles
from torch import Tensor

from drivetrain.kernels import (
    QuantizationRule,
    QuantizedWeight,
    available,
    choose_instruction_set,
    quantize_weight,
    quantized_linear,
)

SIZES = ["576x1536", "1536x576", "49152x576", "4096x11008", "11008x4096"]  # SmolLM2-135M, Llama-7B: out x in


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`copies` weights [rows, columns], all the same, times `tokens`."""

    rows: int
    columns: int
    copies: int
    tokens: int

    @property
    def title(self) -> str:
        """As the table shows it."""
        tokens = "1 token" if self.tokens == 1 else f"{self.tokens} tokens"
        return f"[{self.rows}, {self.columns}] times {tokens}, {self.copies} weights"

    @property
    def group(self) -> int:
        """A group of int4 codes: 128, or what divides the columns and torch takes."""
        return next(size for size in (128, 64, 32) if self.columns % size == 0)

    def all_of(self, name: str, weights: list[Any], call: Callable[[Any], object], bytes_each: int) -> Contestant:
        """A contestant that multiplies by one weight after another."""

        def run() -> None:
            for weight in weights:
                call(weight)

        return Contestant(name=name, run=run, bytes_moved=bytes_each * len(weights))


def ours(problem: Problem, name: str, rule: QuantizationRule, x: Tensor, activations: Any, dense: Tensor) -> Contestant:
    first = quantize_weight(dense, rule)
    weights = [first, *(copy_of(first) for _ in range(problem.copies - 1))]
    stored = first.quantized
    bytes_each = stored.values.numel() + stored.scales.numel() * 4
    return problem.all_of(name, weights, lambda w: quantized_linear(x, w, activations=activations), bytes_each)


def copy_of(weight: QuantizedWeight) -> QuantizedWeight:
    """One with memory of its own."""
    stored = weight.quantized
    parts = {"values": stored.values.clone(), "scales": stored.scales.clone(), "zeros": None}
    quantized = type(stored)(**parts, numel=stored.numel, rule=stored.rule)
    return QuantizedWeight(quantized=quantized, out_features=weight.out_features, in_features=weight.in_features)


def int8_case(problem: Problem, dense: Tensor, x: Tensor) -> Case:
    """One scale per row."""
    low = x.bfloat16()
    codes = torch.randint(-127, 128, dense.shape, dtype=torch.int8)
    scales = torch.rand(problem.rows).bfloat16()
    peers = [codes.clone() for _ in range(problem.copies)]
    rule = QuantizationRule(format="int8", block_size=problem.columns)
    size = problem.rows * problem.columns
    return Case(
        title=f"int8, {problem.title}",
        contestants=[
            problem.all_of(
                "torch int8", peers, lambda w: torch._weight_int8pack_mm(low, w, scales), size + 2 * problem.rows
            ),
            ours(problem, "ours, bfloat16 x", rule, low, "native", dense),
            ours(problem, "ours, float32 x", rule, x, "native", dense),
            ours(problem, "ours, int8 activations", rule, low, "int8", dense),
            *llama(problem, "q8_0", dense, x),
            dense_bf16(problem, dense, low),
        ],
    )


def int4_case(problem: Problem, dense: Tensor, x: Tensor) -> Case:
    """Groups of 128, or 64 or 32 where they don't fit."""
    low, group = x.bfloat16(), problem.group
    packed = torch._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, dense.shape, dtype=torch.int32), 1)
    scales = torch.rand(problem.columns // group, problem.rows, 2).bfloat16()
    peers = [(packed.clone(), scales.clone()) for _ in range(problem.copies)]
    rule = QuantizationRule(format="int4", block_size=group)
    size = problem.rows * problem.columns
    return Case(
        title=f"int4 in groups of {group}, {problem.title}",
        contestants=[
            problem.all_of(
                "torch int4",
                peers,
                lambda w: torch._weight_int4pack_mm_for_cpu(low, w[0], group, w[1]),
                size // 2 + 4 * size // group,
            ),
            ours(problem, "ours, bfloat16 x", rule, low, "native", dense),
            ours(problem, "ours, float32 x", rule, x, "native", dense),
            ours(problem, "ours, int8 activations", rule, low, "int8", dense),
            *llama(problem, "q4_0", dense, x),
            dense_bf16(problem, dense, low),
        ],
    )


def llama(problem: Problem, kind: str, dense: Tensor, x: Tensor) -> list[Contestant]:
    """llama.cpp's products, if its wheel is here."""
    library = llama_cpp.find()
    if library is None:
        return []
    products = llama_cpp.Products(library, dense, x, kind, problem.copies, torch.get_num_threads())
    name = f"llama.cpp {kind} ({products.layout})"
    return [Contestant(name=name, run=products.run, bytes_moved=products.bytes_each * problem.copies)]


def dense_bf16(problem: Problem, dense: Tensor, x: Tensor) -> Contestant:
    weights = [dense.bfloat16() for _ in range(problem.copies)]
    bytes_each = 2 * problem.rows * problem.columns
    return problem.all_of("torch bfloat16", weights, lambda w: torch.nn.functional.linear(x, w), bytes_each)


def stream(bytes_moved: int) -> Contestant:
    """A plain sum over `bytes_moved`, which reads and doesn't write."""
    buffer = torch.ones(bytes_moved // 8, dtype=torch.int64)
    return Contestant(name="stream", run=buffer.sum, bytes_moved=bytes_moved)


def report(case: Case, rounds: int, pause: float) -> list[dict[str, Any]]:
    """Measure one case, print its table and return its rows."""
    peer = case.contestants[0]
    floors = {c.name: stream(c.bytes_moved) for c in case.contestants}
    timed = [*case.contestants, *(Contestant(name="floor " + n, run=f.run, bytes_moved=0) for n, f in floors.items())]
    seconds = measure(timed, rounds, pause)
    print(f"\n{case.title}")
    print(f"  {'':26s} {'ms':>8s} {'GB/s':>6s}  {'speed beside ' + peer.name:>30s}  {'of floor':>18s}")
    rows = []
    for contestant in case.contestants:
        own, floor = seconds[contestant.name], seconds["floor " + contestant.name]
        ratio = quartiles([theirs / mine for theirs, mine in zip(seconds[peer.name], own, strict=True)])
        fraction = quartiles([least / mine for least, mine in zip(floor, own, strict=True)])
        row = {
            "case": case.title,
            "name": contestant.name,
            "milliseconds": statistics.median(own) * 1e3,
            "gigabytes_per_second": contestant.bytes_moved / statistics.median(own) / 1e9,
            "speed_ratio_quartiles": ratio,
            "floor_fraction_quartiles": fraction,
        }
        rows.append(row)
        print(
            f"  {contestant.name:26s} {row['milliseconds']:8.3f} {row['gigabytes_per_second']:6.1f}  "
            f"{ratio[1]:14.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})  "
            f"{fraction[1]:6.2f} ({fraction[0]:.2f}-{fraction[2]:.2f})",
            flush=True,
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Products with quantised weights beside torch's, in one run.")
    parser.add_argument("--sizes", nargs="*", default=SIZES, help="out x in, as 4096x11008")
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 16, 128])
    parser.add_argument("--megabytes", type=int, default=128, help="of int8 codes in all copies of a weight")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=None, help="for torch and the native core alike")
    parser.add_argument("--instruction-set", default=None, help="of the native core; by default the best there is")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds before each timing")
    parser.add_argument("--json", type=Path, default=None, help="write the figures to this file")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.instruction_set is not None:
        choose_instruction_set(options.instruction_set)
    library = llama_cpp.find()
    status = next(entry for entry in available() if entry.op == "quantized_matmul" and entry.device == "cpu")
    machine = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "megabytes": options.megabytes,
        "rounds": options.rounds,
        "implementation": status.implementation,
        "llama.cpp": "not installed" if library is None else f"built for {llama_cpp.instruction_set(library)}",
        "load_average_before": os.getloadavg()[0],
    }
    for key, value in machine.items():
        print(f"{key}: {value}")
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for size in options.sizes:
            out_features, in_features = (int(part) for part in size.split("x"))
            dense = torch.randn(out_features, in_features)
            copies = max(1, round(options.megabytes * 1e6 / dense.numel()))
            for tokens in options.tokens:
                problem = Problem(rows=out_features, columns=in_features, copies=copies, tokens=tokens)
                x = torch.randn(tokens, in_features)
                for make in (int8_case, int4_case):
                    rows += report(make(problem, dense, x), options.rounds, options.pause)
    machine["load_average_after"] = os.getloadavg()[0]
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Faults that people have reported of training systems like this one, each in its smallest case, with the right value.

`DS#n` is an issue or pull request of DeepSpeed. What two features cause when they meet is a cell of the parity matrix,
run here by name so that it stays whatever the matrix picks; what needs a model or a loop of its own is written out.

Reports whose case is elsewhere: settings that are misspelled (DS#653) and batch sizes that do not multiply (DS#6914) in
`test_config_schema.py`, `test_check.py` and `test_bad_input.py`; a warm-up with two dead steps (DS#5731) also in
`test_lr.py`; resuming on another number of ranks (DS#5405) in `test_engine.py`; a matrix that lies across the border of
two shards (DS#7807) in zero's `test_muon.py`; recomputed adapters (transformers#47254) and models in lock-step
(accelerate#2496) in zero's `test_hooks.py`; saving halfway through an accumulation (DS#982) in `test_bad_input.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_ranks import run_all
from parity_recipe import STAGES, Cell, Crew
from torch import nn

from drivetrain.engine import initialize
from drivetrain.engine.assemble import zero_policy
from drivetrain.engine.config import load
from drivetrain.engine.precision import Precision
from drivetrain_testkit import relative_error, run_ranks

pytestmark = pytest.mark.timeout(300)  # the first test of each half waits for all cells, or all scenes

# Combinations ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report as cells: every stage with every precision, and what must meet."""

    source: str
    features: tuple[str, ...]
    stages: tuple[int, ...] = STAGES
    precisions: tuple[str, ...] = ("fp32",)
    ranks: int = 2

    def cells(self) -> Iterator[Cell]:
        for stage, precision in product(self.stages, self.precisions):
            yield Cell(stage, precision, self.features)


REPORTS = {
    "two backward passes before a step lose one at stages 1 and 2": Report(
        source="open-instruct#1498, accelerate#3877", features=("second loss",), precisions=("fp32", "bf16")
    ),
    "no_sync is refused where gradients are split": Report(source="DS#6793", features=("no_sync",)),
    "a shared block that is recomputed gets its gradient twice": Report(
        source="DS#988", features=("accumulation", "module used twice", "recomputed, reentrant")
    ),
    "a shared block that is recomputed loses a gradient between small buckets": Report(
        source="DS#988",
        features=("accumulation", "module used twice", "recomputed, reentrant", "small buckets"),
    ),
    "one use of a module that is applied twice is lost under overlap": Report(
        source="DS#8224, DS#7718",
        features=("accumulation", "module used twice", "second loss", "clipping"),
        precisions=("fp32", "bf16"),
    ),
    "so it is without overlap": Report(
        source="DS#8224", features=("accumulation", "module used twice", "no overlap"), precisions=("bf16",)
    ),
    "bf16 without ZeRO divides by a loss scale that it never applied": Report(
        source="DS#7837, DS#5154", features=("accumulation", "clipping"), stages=(0,), precisions=("bf16",)
    ),
    "fp16 without ZeRO divides by the loss scale twice": Report(
        source="DS#8393", features=(), precisions=("fp16 static", "fp16 dynamic")
    ),
    "the norm that fp16 reports still carries the loss scale": Report(
        source="DS#8588, DS#7220", features=("clipping",), precisions=("fp16 static", "fp16 dynamic")
    ),
    "accumulation and the loss scale divide twice": Report(
        source="Megatron-DeepSpeed#42",
        features=("accumulation", "unmanaged", "clipping"),
        precisions=("fp16 static", "fp16 dynamic"),
    ),
    "the last micro-batch misses the average over ranks": Report(
        source="DS#7985", features=("accumulation", "added in fp32"), precisions=("bf16",)
    ),
    "training gets worse with the size of buckets": Report(
        source="DS#6351", features=("small buckets", "sent in bf16", "added in fp32", "clipping"), precisions=("bf16",)
    ),
    "gradients in bf16 on the wire fail at stage 1": Report(
        source="DS#7653", features=("sent in bf16",), precisions=("fp32", "fp16 static", "bf16")
    ),
    "stages differ when they accumulate": Report(
        source="DS#966, DS#1488", features=("accumulation", "AdamW", "clipping"), precisions=("fp32", "bf16")
    ),
    "weights that are tied and divide unevenly go without their update": Report(
        source="pytorch#176076", features=("tied weights", "three ranks"), ranks=3
    ),
    "frozen parameters break recomputation": Report(
        source="transformers#47254", features=("frozen", "recomputed, non-reentrant")
    ),
    "the plainest Muon trains with SGD without ZeRO": Report(source="DS#8441", features=("Muon",)),
    "Muon sees less than a matrix": Report(source="DS#7807", features=("Muon", "small buckets", "accumulation")),
    "a warm-up has two steps at its lowest rate": Report(source="DS#5731, DS#5287", features=("warm-up",)),
    "the schedule counts micro-batches and ranks": Report(
        source="accelerate#662, accelerate#2124", features=("warm-up", "accumulation")
    ),
    "the schedule counts steps that were skipped": Report(
        source="DS#5731", features=("warm-up",), precisions=("fp16 dynamic",)
    ),
    "parameters smaller than the number of ranks": Report(
        source="DS#1192", features=("small parameters", "three ranks", "AdamW"), ranks=3, precisions=("fp32", "bf16")
    ),
    "parameters of no elements": Report(source="DS#3864", features=("empty parameters", "clipping", "resumed")),
    "evaluation between steps disturbs the order of gathers": Report(
        source="DS#6870, DS#5662", features=("evaluation", "fewer blocks now and then", "large prefetch")
    ),
    "experts that some ranks have no token for": Report(
        source="DS#1888, DS#5618", features=("experts", "small buckets", "accumulation")
    ),
}


def cells_of(ranks: int) -> list[Cell]:
    return list(dict.fromkeys(c for report in REPORTS.values() if report.ranks == ranks for c in report.cells()))


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found: dict[str, str] = {}
    for ranks in (2, 3):
        found |= run_all(cells_of(ranks), Crew(ranks), tmp_path_factory.mktemp(f"of-{ranks}"), 280)
    return found


@pytest.mark.parametrize("name", REPORTS)
def test_it_does_not_happen_here(name: str, wrong: dict[str, str]) -> None:
    for cell in REPORTS[name].cells():
        assert str(cell) not in wrong, f"{REPORTS[name].source}: {cell}\n{wrong[str(cell)]}"


# Models and loops of their own ----------------------------------------------------------------------------------------


def config(stage: int, *, lr: float = 0.1, **changes: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **changes.pop("zero_optimization", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": lr}},
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        **changes,
    }


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def whole(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.float() for name, value in engine.sharded.full_parameters()}


class Tower(nn.Module):
    """Three layers that are called in the order that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return x.float().square().mean()


@dataclass
class Outcome:
    """What the scenes found, on one rank."""

    errors: dict[str, float] = field(default_factory=dict)
    same: dict[str, bool] = field(default_factory=dict)
    norms: dict[str, list[float]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def other_orders_on_other_ranks(rank: int, outcome: Outcome, folder: Path) -> None:
    """DS#2343: gradients come in another order on each rank, and buckets that are full at the same time differ."""
    orders = ((0, 1, 2), (2, 0, 1))
    for stage, size in product((0, 1, 2), (64, 500_000)):
        plain = Tower()
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        buckets = {"reduce_bucket_size": size, "allgather_bucket_size": size}
        engine = initialize(Tower(), config(stage, zero_optimization=buckets))
        for step in range(3):
            engine.backward(engine(inputs(step, rank), orders[rank]))
            engine.step()
            for other in range(2):
                (plain(inputs(step, other), orders[other]) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = dict(plain.named_parameters())
        found = whole(engine)
        key = f"orders, stage {stage}, buckets of {size}"
        outcome.errors[key] = relative_error((found[name] for name in expected), expected.values())


def sizes_of_buckets(rank: int, outcome: Outcome, folder: Path) -> None:
    """DS#6351: whatever the buckets, the overlap and the prefetch, the bits are the same."""
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"reduce_bucket_size": 64, "allgather_bucket_size": 64},
        {"reduce_bucket_size": 200, "allgather_bucket_size": 200, "overlap_comm": False},
        {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0},
        {"stage3_param_persistence_threshold": 9, "stage3_max_reuse_distance": 1_000_000},
    )
    accumulating = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.05, "bf16": {"enabled": True}}
    for stage in STAGES:
        found = []
        for change in changes:
            engine = initialize(Tower(), config(stage, lr=0.5, zero_optimization=change, **accumulating))
            for step in range(4):
                engine.backward(engine(inputs(step, rank).bfloat16(), (0, 1, 1, 2)))
                engine.step()
            found.append(whole(engine))
        for change, parameters in zip(changes, found, strict=True):
            same = all(torch.equal(parameters[name], found[0][name]) for name in parameters)
            outcome.same[f"stage {stage}, {change}"] = same


def a_constant_batch(rank: int, outcome: Outcome, folder: Path) -> None:
    """DS#7837: with nothing learned, every step has the same norm; gradients are not carried over."""
    for stage, half in product(STAGES, ("none", "bf16", "fp16")):
        precision = {} if half == "none" else {half: {"enabled": True}}
        engine = initialize(Tower(), config(stage, lr=0.0, **precision))
        norms = []
        for _ in range(4):
            engine.backward(engine(inputs(0, rank).to(engine.sharded.buckets[0].dtype)))
            norms.append(engine.step().grad_norm)
        outcome.norms[f"stage {stage}, {half}"] = norms


def groups_with_gaps(rank: int, outcome: Outcome, folder: Path) -> None:
    """DS#5063, DS#6878: groups are what was given. What is in none stays; what is in two is refused."""
    for stage in STAGES:
        model = Tower()
        first, second, third = model.layers
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        groups = [{"params": [first.weight], "lr": 0.0}, {"params": [second.weight, third.bias], "lr": 0.1}]
        engine = initialize(model, config(stage), model_parameters=groups)
        names = engine.optimizer.names
        outcome.same[f"groups, stage {stage}"] = names == [["layers.0.weight"], ["layers.1.weight", "layers.2.bias"]]
        engine.backward(engine(inputs(0, rank)))
        engine.step()
        moved = {name for name, value in whole(engine).items() if not torch.equal(value, start[name])}
        outcome.same[f"moved, stage {stage}"] = moved == {"layers.1.weight", "layers.2.bias"}
        other = Tower()
        twice = [{"params": [*other.layers[0].parameters()]}, {"params": [other.layers[0].bias], "lr": 0.2}]
        try:
            initialize(other, config(stage), model_parameters=twice)
        except ValueError as error:
            outcome.texts[f"twice, stage {stage}"] = str(error)


def frozen_weights_on_disk(rank: int, outcome: Outcome, folder: Path) -> None:
    """DS#5439, DS#3090: frozen weights are in the checkpoint and in the export, at every stage."""
    from safetensors.torch import load_file

    for stage in STAGES:
        model = Tower()
        model.layers[0].weight.requires_grad_(False)
        frozen = model.layers[0].weight.detach().clone()
        engine = initialize(model, config(stage))
        engine.backward(engine(inputs(0, rank)))
        engine.step()
        engine.save(folder / f"run{stage}")
        engine.export(folder / f"export{stage}")
        exported = load_file(folder / f"export{stage}" / "model.safetensors")
        fresh = Tower()
        nn.init.zeros_(fresh.layers[0].weight)
        fresh.layers[0].weight.requires_grad_(False)
        other = initialize(fresh, config(3 - stage))
        other.load(folder / f"run{stage}")
        loaded = whole(other)
        trained = whole(engine)
        outcome.same[f"frozen, stage {stage}"] = (
            torch.equal(exported["layers.0.weight"], frozen)
            and torch.equal(loaded["layers.0.weight"], frozen)
            and all(torch.equal(loaded[name], trained[name]) and name in exported for name in trained)
        )


SCENES: tuple[Callable[[int, Outcome, Path], None], ...] = (
    other_orders_on_other_ranks,
    sizes_of_buckets,
    a_constant_batch,
    groups_with_gaps,
    frozen_weights_on_disk,
)


def play_all(rank: int, world_size: int, folder: str) -> Outcome:
    outcome = Outcome()
    for scene in SCENES:
        scene(rank, outcome, Path(folder))
    return outcome


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return run_ranks(play_all, 2, str(tmp_path_factory.mktemp("scenes")), timeout=280)


def test_ranks_may_make_their_gradients_in_different_orders(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert len(outcome.errors) == 6
        assert all(error < 1e-6 for error in outcome.errors.values()), outcome.errors


def test_how_things_are_sent_changes_no_bit(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        same = {key: value for key, value in outcome.same.items() if "{" in key}
        assert len(same) == 20
        assert all(same.values()), same


def test_a_constant_batch_has_a_constant_norm(outcomes: list[Outcome]) -> None:
    plain = Tower()
    for rank in range(2):
        (plain(inputs(0, rank)) / 2).backward()
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), float("inf")))
    for outcome in outcomes:
        assert len(outcome.norms) == 12
        for key, norms in outcome.norms.items():
            assert norms == [norms[0]] * 4, key
            assert norms[0] == pytest.approx(norm, rel=1e-6 if "none" in key else 1e-2), key


def test_groups_are_what_was_given(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        for stage in STAGES:
            assert outcome.same[f"groups, stage {stage}"]
            assert outcome.same[f"moved, stage {stage}"]
            assert "appear in more than one parameter group" in outcome.texts[f"twice, stage {stage}"]


def test_frozen_weights_are_on_disk(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert all(outcome.same[f"frozen, stage {stage}"] for stage in STAGES), outcome.same


def test_a_logger_that_is_off_changes_nothing() -> None:
    """DS#2861: with the section there, and disabled, communication was no longer overlapped."""
    with_section = load({**config(2), "comms_logger": {"enabled": False}})

    class Ranks:
        sizes = {"shard": 2, "data": 1}  # noqa: RUF012
        world = type("World", (), {"local_size": 2})

    policies = [
        zero_policy(each, Ranks(), Precision.of(each, torch.device("cpu")))  # type: ignore[arg-type]
        for each in (with_section, load(config(2)))
    ]
    assert policies[0] == policies[1]

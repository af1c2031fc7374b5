"""Training whose states live on a disk: equal to the bit, at every stage and setting, and it goes on anywhere.

On a CPU host memory is the device's own, so that only NVMe moves anything; zero's `test_store.py` has both kinds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import signal
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.engine import CheckpointError, Engine, initialize
from drivetrain.engine.checkpoint import list_checkpoints
from drivetrain.engine.config import ConfigError, load
from drivetrain.offload import NvmeStore
from drivetrain.zero import EarlyUpdates
from drivetrain_testkit import RankError, run_ranks

WIDTH, STEPS = 48, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner = nn.Linear(10, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x.to(self.head.weight.dtype))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).float()


@dataclass(frozen=True, kw_only=True)
class Case:
    stage: int
    precision: str = "fp32"
    optimizer: dict[str, Any] = field(default_factory=dict)
    param: dict[str, Any] | None = None
    sub_group_size: int = 2000
    accumulation: int = 1
    clipping: float = 0.3

    def config(self, folder: Path | None) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "sub_group_size": self.sub_group_size}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = 100
        if folder is not None:
            where = {"device": "nvme", "nvme_path": str(folder)}
            zero["offload_optimizer"] = {**where, **self.optimizer}
            if self.param is not None:
                zero["offload_param"] = {**where, "max_in_cpu": 0, **self.param}
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": zero,
            "bf16": {"enabled": self.precision == "bf16"},
            "fp16": {"enabled": self.precision == "fp16", "initial_scale_power": 4},
        }


def train(engine: Engine, rank: int, steps: range) -> list[tuple[float, float]]:
    found = []
    for step in steps:
        while True:
            generator = torch.Generator().manual_seed(1000 * step + 10 * engine.counters.micro_steps % 7 + rank)
            loss = engine(torch.randn(4, 10, generator=generator)).square().mean()
            engine.backward(loss)
            record = engine.step()
            if record.stepped:
                break
        found.append((float(loss.detach()), record.grad_norm))
    return found


def whole(engine: Engine) -> dict[str, torch.Tensor]:
    return dict(engine.sharded.full_parameters())


def compare(rank: int, world_size: int, folder: str, cases: list[Case]) -> None:
    mesh = Mesh.create(init())
    for number, case in enumerate(cases):
        plain = initialize(Net(), case.config(None), mesh=mesh)
        kept = initialize(Net(), case.config(Path(folder) / str(number)), mesh=mesh)
        assert train(kept, rank, range(STEPS)) == train(plain, rank, range(STEPS)), case
        expected = whole(plain)
        for name, value in whole(kept).items():
            assert torch.equal(value, expected[name]), (case, name)
        assert any(store.bytes for store in kept.sharded.stores.all()) or case.optimizer.get("ratio") == 0.0, case
        kept.close()
        plain.close()
        left = list((Path(folder) / str(number)).glob(f"drivetrain-offload-*-{rank:05d}"))
        assert not left, (case, left)


def pipelines() -> list[Case]:
    flags = [{"pipeline_read": read, "pipeline_write": write} for read, write in product((False, True), repeat=2)]
    return [
        *(Case(stage=stage, optimizer=flag, param={} if stage == 3 else None) for stage in (1, 2, 3) for flag in flags),
        *(Case(stage=stage, precision="bf16", param={} if stage == 3 else None) for stage in (1, 2, 3)),
        *(Case(stage=stage, precision=kind, optimizer={"ratio": ratio})
          for stage, kind, ratio in ((1, "bf16", 0.5), (2, "fp32", 0.3), (3, "bf16", 0.7), (3, "fp32", 0.0))),
        Case(stage=3, precision="fp16", param={}, accumulation=2),
        Case(stage=2, precision="bf16", optimizer={"buffer_count": 2}, accumulation=2),
        Case(stage=3, precision="bf16", optimizer={"buffer_count": 8}, param={"buffer_count": 2, "max_in_cpu": 3000}),
    ]  # fmt: skip


def test_training_is_the_same_to_the_bit_at_every_setting(tmp_path: Path) -> None:
    run_ranks(compare, 2, str(tmp_path), pipelines(), timeout=110)


def super_cases() -> list[Case]:
    early: dict[str, Any] = {"super_offload": True}
    return [
        Case(stage=1, precision="bf16", optimizer=early, clipping=50.0),
        Case(stage=2, precision="fp16", optimizer={**early, "buffer_count": 2}, accumulation=2, clipping=50.0),
        Case(stage=3, precision="bf16", optimizer=early, param={}, clipping=50.0),
        Case(stage=3, precision="bf16", optimizer=early, param={"max_in_cpu": 3000, "buffer_count": 2}, clipping=0.0),
        Case(stage=3, precision="bf16", optimizer=early, param={}),  # is clipped in every step
    ]


def compare_super(rank: int, world_size: int, folder: str, cases: list[Case]) -> None:
    """With a learning rate for each step, a batch that overflows, and checkpoints: at once, and where none can be."""
    mesh = Mesh.create(init())
    for number, case in enumerate(cases):
        place, found = Path(folder) / str(number), []
        for early in (False, True):
            config = case.config(Path(folder) / f"disk {number}")
            config["zero_optimization"]["offload_optimizer"]["super_offload"] = early
            config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
            engine = initialize(Net(), config, mesh=mesh)
            results: list[Any] = train(engine, rank, range(3))
            policy = engine.optimizer.policy  # type: ignore[union-attr]
            assert isinstance(policy, EarlyUpdates) is early
            kept = policy.kept if isinstance(policy, EarlyUpdates) else 0
            assert (kept > 0) is (early and case.clipping != 0.3), case
            for micro in range(case.accumulation):
                loss = engine(torch.ones(4, 10)).sum()
                last = micro == case.accumulation - 1
                handle = engine.module.inner.weight.register_hook(lambda g, bad=last: g * float("inf") if bad else g)
                engine.backward(loss)
                handle.remove()
                if last:
                    with pytest.raises(RuntimeError, match=r"save (between backward and step|in the middle of)"):
                        engine.save(place / "torn")
                stepped = engine.step().stepped
            assert not stepped, case
            if isinstance(policy, EarlyUpdates):
                assert (policy.fallen > 0) is (case.clipping != 0.3), case
            engine.save(place / f"checkpoints {early}")
            results += train(engine, rank, range(3, 5))
            found.append((results, whole(engine)))
            engine.close()
            again = initialize(Net(), config, mesh=mesh)
            again.load(place / f"checkpoints {early}")
            assert train(again, rank, range(3, 5)) == results[-2:], case
            again.close()
        assert found[0][0] == found[1][0], case
        for name, value in found[0][1].items():
            assert torch.equal(found[1][1][name], value), (case, name)


def test_updates_that_begin_in_backward_are_the_same_to_the_bit(tmp_path: Path) -> None:
    run_ranks(compare_super, 2, str(tmp_path), super_cases(), timeout=110)


PLACES: dict[str, Case | None] = {
    "in memory": None,
    "states on disk": Case(stage=2),
    "all on disk": Case(stage=3, param={}),
}


def begin(rank: int, world_size: int, folder: str, place: str) -> tuple[list[Any], list[Any]]:
    case = PLACES[place]
    config = Case(stage=1).config(None) if case is None else case.config(Path(folder) / "states")
    engine = initialize(Net(), config)
    before = train(engine, rank, range(2))
    engine.save(Path(folder) / "checkpoints")
    after = train(engine, rank, range(2, 4))
    engine.close()
    return before, after


def go_on(rank: int, world_size: int, folder: str, place: str) -> list[Any]:
    case = PLACES[place]
    config = Case(stage=1).config(None) if case is None else case.config(Path(folder) / f"states {world_size}")
    engine = initialize(Net(), config)
    engine.load(Path(folder) / "checkpoints")
    after = train(engine, rank, range(2, 4))
    engine.close()
    return after


@pytest.mark.parametrize("saved", PLACES)
def test_a_checkpoint_goes_on_wherever_states_live(tmp_path: Path, saved: str) -> None:
    """On the same ranks to the bit; on others the batches are others, so that only the start can be compared."""
    expected = [after for _, after in run_ranks(begin, 2, str(tmp_path), saved)]
    for loaded in PLACES:
        assert run_ranks(go_on, 2, str(tmp_path), loaded) == expected, loaded
    for ranks, loaded in ((1, "all on disk"), (3, "in memory")):
        (loss, _), *_ = run_ranks(go_on, ranks, str(tmp_path), loaded)[0]
        assert loss == pytest.approx(expected[0][0][0], rel=1e-5)


def refuse_cpu(rank: int, world_size: int) -> None:
    config = Case(stage=3).config(None)
    for section in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][section] = {"device": "cpu"}
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("drivetrain.engine").addHandler(handler)
    engine = initialize(Net(), config)
    told = [record.getMessage() for record in records if "changes nothing here" in record.getMessage()]
    assert len(told) == (2 if rank == 0 else 0)
    assert not list(engine.sharded.stores.all())
    train(engine, rank, range(1))


def test_on_a_cpu_host_memory_is_the_device_and_a_line_says_so() -> None:
    run_ranks(refuse_cpu, 2)


def start_in(rank: int, world_size: int, folder: str) -> None:
    initialize(Net(), Case(stage=1).config(Path(folder)))


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(RankError, match=r"offload_optimizer\.nvme_path: .*file cannot be written to: File exists"):
        run_ranks(start_in, 1, str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("zero", "text"),
    [
        (
            {"stage": 0, "offload_optimizer": {"device": "cpu"}},
            "a shard of the states is what moves out, and ZeRO stage 0",
        ),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "shards of parameters are what moves out, and ZeRO stage 2"),
        ({"stage": 2, "offload_optimizer": {"device": "nvme"}}, 'device "nvme" needs a folder on the disk'),
        (
            {"stage": 2, "offload_optimizer": {"device": "none", "super_offload": True}},
            "only states that are moved out are updated early, and device none keeps them all",
        ),
        (
            {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/n", "buffer_count": 1}},
            "states and gradients are in a buffer each",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_at_start_up(zero: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})


# Faults ---------------------------------------------------------------------------------------------------------------


def damaged(rank: int, world_size: int, folder: str) -> str:
    """The file is cut off between two steps. Nothing goes on, or is saved, from what is left; a checkpoint loads."""
    place = Path(folder)
    engine = initialize(Net(), Case(stage=2, precision="bf16", optimizer={"buffer_count": 2}).config(place / "disk"))
    train(engine, rank, range(1))
    engine.save(place / "checkpoints")
    expected = train(engine, rank, range(1, 2))
    (data,) = (place / "disk").rglob("data")
    os.truncate(data, 4096)
    with pytest.raises((OSError, EOFError)) as caught:
        train(engine, rank, range(2, 3))
    text = str(caught.value)
    with pytest.raises(CheckpointError, match=r"record 'states of .*' could not be read: it was cut off"):
        engine.save(place / "checkpoints", tag="torn")
    assert [entry.tag for entry in list_checkpoints(place / "checkpoints")] == ["global_step1"]
    with contextlib.suppress(OSError):
        engine.close()
    fresh = initialize(Net(), Case(stage=2, precision="bf16").config(place / "another disk"), mesh=engine.mesh)
    fresh.load(place / "checkpoints")
    assert train(fresh, rank, range(1, 2)) == expected
    fresh.close()
    return text


def test_a_file_that_is_cut_off_underneath_stops_the_step_and_a_checkpoint_loads_again(tmp_path: Path) -> None:
    (text,) = run_ranks(damaged, 1, str(tmp_path))
    assert re.search("record '(states|gradients) of .* it was cut off", text)


def full_disk(rank: int, world_size: int, folder: str) -> str:
    """No file may grow beyond what masters and gradients take: the moments, made in the first step, have no room."""
    engine = initialize(Net(), Case(stage=2, precision="bf16").config(Path(folder)))
    engine.backward(engine(torch.randn(4, 10)).square().mean())
    engine.sharded.reducer.drain()
    (data,) = Path(folder).rglob("data")
    resource.setrlimit(resource.RLIMIT_FSIZE, (data.stat().st_size, data.stat().st_size))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.raises(OSError, match="for which there is no room") as caught:
        engine.step()
    assert engine.optimizer is not None
    with pytest.raises(RuntimeError, match="an optimizer step after the update of step 1 failed"):
        engine.optimizer.step()
    engine.zero_grad()
    with pytest.raises(RuntimeError, match=r"saving after the update of step 1 failed .* load a checkpoint first"):
        engine.save(Path(folder) / "checkpoints")
    return str(caught.value)


def test_a_disk_that_is_full_in_the_middle_of_a_step_is_told_with_what_is_wanted(tmp_path: Path) -> None:
    (text,) = run_ranks(full_disk, 1, str(tmp_path))
    assert "record 'states of " in text


def killed(rank: int, world_size: int, folder: str, dies: bool) -> list[Any]:
    place = Path(folder)
    engine = initialize(Net(), Case(stage=3, precision="bf16", param={}).config(place / "disk"))
    if not dies:
        engine.load(place / "checkpoints")
        return train(engine, rank, range(2, 4))
    train(engine, rank, range(2))
    engine.save(place / "checkpoints")
    expected = train(engine, rank, range(2, 4))
    (place / f"expected{rank}.json").write_text(json.dumps(expected))
    states = engine.sharded.stores.states
    assert isinstance(states, NvmeStore)
    release = states.release

    def release_and_die(key: str, *, changed: bool) -> None:
        release(key, changed=changed)
        if rank == 0 and changed and key.startswith("states of blocks"):
            os.kill(os.getpid(), signal.SIGKILL)  # its write is under way

    states.release = release_and_die  # type: ignore[method-assign]
    train(engine, rank, range(4, 5))
    raise AssertionError("a rank was to be killed")


def test_a_rank_that_is_killed_while_it_writes_leaves_nothing_that_is_used_again(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="rank 1 raised"):
        run_ranks(killed, 2, str(tmp_path), True)
    assert list((tmp_path / "disk").rglob("drivetrain-offload-*-00000"))
    resumed = run_ranks(killed, 2, str(tmp_path), False)
    for rank, found in enumerate(resumed):
        assert [list(pair) for pair in found] == json.loads((tmp_path / f"expected{rank}.json").read_text())

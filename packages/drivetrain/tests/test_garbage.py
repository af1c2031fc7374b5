"""Python's garbage collector while an engine works, and what is left of it whatever happens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.engine import ConfigError, initialize
from drivetrain.engine.config import load
from drivetrain.engine.garbage import GarbageCollection
from drivetrain_testkit import run_ranks


@pytest.fixture(autouse=True)
def switched_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def cycle() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def test_a_call_restores_what_it_found() -> None:
    ours, theirs = (GarbageCollection(managed=True) for _ in range(2))
    with ours.held():
        assert not gc.isenabled()
        with theirs.held(), ours.held():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), ours.held(), theirs.held():
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    with ours.held():
        pass
    assert not gc.isenabled()


def test_calls_that_overlap_leave_it_on() -> None:
    """As those of two threads may: neither is inside of the other."""
    first, second = (GarbageCollection(managed=True).held() for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_young_objects_every_so_many_steps_and_all_of_them_in_a_pause() -> None:
    found = GarbageCollection(managed=True, interval=2)
    gc.disable()
    young = cycle()
    found.stepped()
    assert young() is not None
    found.stepped()
    assert young() is None
    held = Cycle()
    old = weakref.ref(held)
    gc.collect(1)  # it survives, and belongs to the old ones
    del held
    found.stepped()
    found.stepped()
    assert old() is not None
    found.boundary()
    assert old() is None
    late = cycle()
    found.boundary()  # no step since: nothing to look for
    assert late() is not None


def test_python_is_left_alone_unless_asked() -> None:
    left = GarbageCollection(managed=False)
    gc.disable()
    young = cycle()
    with left.held():
        left.stepped()
        left.boundary()
    assert young() is not None
    gc.enable()
    with left.held():
        assert gc.isenabled()


class Model(nn.Module):
    """Notes whether the collector is on in forward and backward; runs another engine inside; fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.seen: list[bool] = []
        self.teacher: Any = None
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.teacher is not None:
            with torch.no_grad():
                self.teacher(x.detach())
        self.seen.append(gc.isenabled())
        if self.fails:
            raise ZeroDivisionError
        if x.requires_grad:
            x.register_hook(lambda _: self.seen.append(gc.isenabled()))
        return x.square().mean()


def config(**drivetrain: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "drivetrain": drivetrain,
    }


def _engine(rank: int, world_size: int, folder: Path) -> None:
    searches: list[int] = []
    gc.callbacks.append(lambda phase, info: searches.append(info["generation"]) if phase == "start" else None)
    x = torch.ones(2, 3)

    def taken(action: Any) -> list[int]:
        """Generations that the engine asked to search: while the automatic search is off there are no others."""
        searches.clear()
        action()
        return list(searches)

    model, teacher = Model(), Model()
    engine = initialize(model, config(garbage_collection="managed"))
    model.teacher = initialize(teacher, config(garbage_collection="managed"))
    for _ in range(2):
        engine.backward(engine(x))
        assert gc.isenabled()
        engine.step()
    engine.train_batch(iter([x, x]))
    engine.eval_batch(x)
    assert model.seen == [False] * 9
    assert teacher.seen == [False] * 5
    assert gc.isenabled()

    gc.disable()
    assert taken(lambda: engine.train_batch(iter([x, x]))) == [1]
    assert taken(lambda: engine.save(folder)) == [2]
    assert taken(lambda: [engine.eval_batch(x), engine.eval(), engine.save(folder), engine.train()]) == []
    assert taken(lambda: [engine.train_batch(iter([x, x])), engine.eval()]) == [1, 2]
    gc.enable()

    model.fails = True
    for call in (lambda: engine(x), lambda: engine.train_batch(iter([x, x])), lambda: engine.eval_batch(x)):
        with pytest.raises(ZeroDivisionError):
            call()
        assert gc.isenabled()
    model.fails = False
    loss = engine(x)
    engine.backward(loss)
    with pytest.raises(RuntimeError, match="retain_graph"):
        engine.backward(loss)
    assert gc.isenabled()
    engine.close()
    assert gc.isenabled()

    plain = Model()
    untouched = initialize(plain, config())
    untouched.train_batch(iter([x, x]))
    assert plain.seen == [True] * 4


def test_an_engine_keeps_searches_out_of_its_work_and_leaves_python_as_it_was(tmp_path: Path) -> None:
    run_ranks(_engine, 1, tmp_path)


def test_the_keys() -> None:
    assert load({"train_batch_size": 1}).drivetrain.garbage_collection == "python"
    with pytest.raises(ConfigError, match=r'write "drivetrain": \{"garbage_collection": "managed"\}'):
        load({"train_batch_size": 1, "python_gc_policy": "managed"})
    with pytest.raises(ConfigError, match=r"drivetrain.garbage_collection_interval"):
        load({"train_batch_size": 1, "drivetrain": {"garbage_collection_interval": 0}})

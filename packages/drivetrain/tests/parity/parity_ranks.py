"""Runs many cells on the ranks of one call, and collects what is wrong with each."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from parity_cover import Matrix
from parity_features import FEATURES, PRECISIONS
from parity_recipe import Cell, Crew, Recipe, spell_out
from parity_train import EngineSide, PlainSide, Trained, differences

from drivetrain.comm import Mesh, World, init
from drivetrain.kernels import SharedMemoryGroup
from drivetrain_testkit import run_ranks

MATRIX = Matrix(PRECISIONS, FEATURES)
_PATIENCE = timedelta(seconds=120)
"""How long a rank that is through with a cell waits for the others before it takes the run for lost."""


def run_all(cells: Sequence[Cell], crew: Crew, folder: Path, seconds: float) -> dict[str, str]:
    """Run cells that need this crew. What is wrong, by cell, with the ranks that found it; ``folder`` is empty."""
    env = {"LOCAL_WORLD_SIZE": str(crew.ranks // crew.hosts)}
    found = run_ranks(run_cells, crew.ranks, list(cells), str(folder), timeout=seconds, env=env)
    wrong: dict[str, str] = {}
    for cell in map(str, cells):
        texts = {rank: problems[cell] for rank, problems in enumerate(found) if cell in problems}
        for text in dict.fromkeys(texts.values()):
            ranks = ", ".join(str(rank) for rank, other in texts.items() if other == text)
            wrong[cell] = wrong.get(cell, "") + f"on rank {ranks}: {text}\n"
    return wrong


def run_cells(rank: int, world_size: int, cells: Sequence[Cell], folder: str) -> dict[str, str]:
    """What is wrong, by cell. Collective; ``folder`` is an empty one on all ranks."""
    logging.getLogger("drivetrain").setLevel(logging.ERROR)  # most cells have settings that their stage does not use
    ranks = Ranks(init(), Path(folder))
    ranks.play(cells)
    problems = {}
    for index, cell in enumerate(cells):
        print(cell, flush=True)  # shown where the call fails: the last line is where it hangs
        problem, raised = run_cell(cell, ranks, index)
        if problem:
            problems[str(cell)] = problem
        ranks.meet(str(index), raised, problem)
    return problems


def run_cell(cell: Cell, ranks: Ranks, index: int) -> tuple[str, bool]:
    """What is wrong on this rank, and whether it is an exception."""
    recipe = spell_out(cell, PRECISIONS, FEATURES)
    refusals = MATRIX.refusals(cell)
    try:
        mesh = ranks.mesh(recipe.replicas)
        if refusals:
            return _refused(recipe, mesh, [refusal.text for refusal in refusals]), False
        found = EngineSide(recipe, mesh, ranks.folder / str(index)).train()
        return "\n".join(differences(found, ranks.expected(cell), recipe)), False
    except Exception:
        return traceback.format_exc(), True


def _refused(recipe: Recipe, mesh: Mesh, texts: list[str]) -> str:
    try:
        EngineSide(recipe, mesh, Path())
    except (ValueError, TypeError, RuntimeError) as error:
        said = str(error)
        return "" if any(re.search(text, said) for text in texts) else f"refused in other words: {said}"
    return f"was not refused; expected one of {texts}"


def _played(recipe: Recipe) -> list[Trained] | str:
    try:
        return PlainSide(recipe).train()
    except Exception:
        return traceback.format_exc()


@dataclass
class Ranks:
    """What the cells of a call share: process groups, and the results of plain torch."""

    world: World
    folder: Path
    meshes: dict[int, Mesh] = field(default_factory=dict)

    def __post_init__(self) -> None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = dist.PrefixStore("cells", dist.TCPStore(address, port, is_master=False))

    def mesh(self, replicas: int) -> Mesh:
        if replicas not in self.meshes:
            self.meshes[replicas] = Mesh.create(self.world, data=replicas, shared_memory=SharedMemoryGroup)
        return self.meshes[replicas]

    def play(self, cells: Sequence[Cell]) -> None:
        """Run the cells in plain torch. Each rank plays some of them, for all ranks, and leaves them in the folder."""
        wanted = {self._path(cell): cell for cell in cells if not MATRIX.refusals(cell)}
        for path, cell in list(wanted.items())[self.world.rank :: self.world.size]:
            path.write_bytes(pickle.dumps(_played(spell_out(cell, PRECISIONS, FEATURES))))
        self.meet("played", raised=False, problem="")

    def expected(self, cell: Cell) -> Trained:
        results: list[Trained] | str = pickle.loads(self._path(cell).read_bytes())
        if isinstance(results, str):
            raise RuntimeError(f"plain torch failed:\n{results}")
        return results[self.world.rank]

    def _path(self, cell: Cell) -> Path:
        """Stages differ on the plain side only in where gradients are rounded."""
        exact = not PRECISIONS[cell.precision].half and "sent in bf16" not in cell.features
        rounding = 0 if exact else min(cell.stage, 2)
        key = f"{rounding} {cell.precision} {cell.features}"
        return self.folder / hashlib.sha256(key.encode()).hexdigest()

    def meet(self, place: str, raised: bool, problem: str) -> None:
        """Go on together: an exception on all ranks is a result, one on some of them leaves the others waiting."""
        keys = [f"{place}/{rank}" for rank in range(self.world.size)]
        self.store.set(keys[self.world.rank], "raised" if raised else "done")
        try:
            self.store.wait(keys, _PATIENCE)
        except RuntimeError as error:
            raise RuntimeError(f"{place}: some ranks did not come to its end. On this one:\n{problem}") from error
        if raised and any(self.store.get(key) != b"raised" for key in keys):
            raise RuntimeError(f"{place}: only some of the ranks raised. This one did:\n{problem}")

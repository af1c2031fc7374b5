"""Which cores of a host do what.

Problem: an optimizer on the processor, loaders and the threads that drive a GPU disturb each other: each is scheduled
on any core, and threads on two siblings of one core share its units.
Idea: a rank gets its part of the host, whole cores of as few NUMA nodes as possible, and divides it by shares among
what it does. That is arithmetic over what the system says; binding is a second, small step, which may be forbidden.
Invariants: nobody is left without a cpu; parts are disjoint as long as there are enough cpus; the siblings of a core
go to one part unless there are fewer cores than takers.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

__all__ = ["CoreBinding", "CorePlan", "CoreShares", "Cpu", "plan_cores", "read_cpus"]

_SYSTEM: Final = Path("/sys/devices/system")
T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Cpu:
    """One cpu as the scheduler counts them: a thread `number` of core `core` of a package, near the memory of
    `node`."""

    node: int
    package: int
    core: int
    number: int


def read_cpus(allowed: Iterable[int] | None = None, *, system: Path = _SYSTEM) -> tuple[Cpu, ...]:
    """What is known of these cpus; by default those that this thread may run on.

    What sysfs does not tell, counts as one node of cores without siblings.
    """
    return tuple(sorted(_read_cpu(number, system) for number in (_allowed() if allowed is None else set(allowed))))


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _read_cpu(number: int, system: Path) -> Cpu:
    folder = system / "cpu" / f"cpu{number}"
    node = 0
    if folder.is_dir():
        nodes = [re.fullmatch(r"node(\d+)", each.name) for each in folder.iterdir()]
        node = min((int(match[1]) for match in nodes if match), default=0)
    package = _read_number(folder / "topology" / "physical_package_id")
    core = _read_number(folder / "topology" / "core_id")
    if package is None or core is None:
        return Cpu(node, package or 0, number, number)
    return Cpu(node, package, core, number)


def _read_number(path: Path) -> int | None:
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return number if number >= 0 else None


@dataclass(frozen=True, kw_only=True)
class CoreShares:
    """How a rank divides its cores, in any unit: 2, 1, 1 is the same as 0.5, 0.25, 0.25.

    `compute`: the threads that run the model or drive the GPU. `optimizer`: workers that update states in host memory.
    `loading`: workers that prepare data. `communication`: threads that carry tensors between ranks. What has no share
    runs on the cores of `compute`.
    """

    compute: float = 1.0
    optimizer: float = 0.0
    loading: float = 0.0
    communication: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            share = getattr(self, each.name)
            if not 0 <= share < float("inf"):
                raise ValueError(f"{each.name}: expected a share of at least 0; found {share}")
        if self.compute == 0:
            raise ValueError("compute: expected a share above 0: something must run the training loop")

    @classmethod
    def for_optimizer(cls, part: float) -> CoreShares:
        """`part` of the cores (above 0, below 1) for the optimizer's workers, the rest for computing.

        The key `cpuadam_cores_perc` is this part; `pt_reserved_cores_perc` is one minus it.
        """
        if not 0 < part < 1:
            raise ValueError(f"part: expected a number between 0 and 1, both excluded; found {part}")
        return cls(compute=1 - part, optimizer=part)


@dataclass(frozen=True, kw_only=True)
class CorePlan:
    """The cpus of one rank, by what they are for. None is empty.

    `overlapping`: some cpus are in two of the parts that have a share, or belong to another rank too, as there are too
    few.
    """

    compute: frozenset[int]
    optimizer: frozenset[int]
    loading: frozenset[int]
    communication: frozenset[int]
    overlapping: bool

    @property
    def all(self) -> frozenset[int]:
        """Every cpu of the rank."""
        return self.compute | self.optimizer | self.loading | self.communication


def plan_cores(
    cpus: Sequence[Cpu], *, local_rank: int = 0, local_world_size: int = 1, shares: CoreShares | None = None
) -> CorePlan:
    """The part of rank `local_rank` of the `local_world_size` that share these cpus, divided by `shares`.

    All ranks of the host must plan with the same cpus.
    """
    if not cpus:
        raise ValueError("cpus: expected at least one; found none")
    if not 0 <= local_rank < local_world_size:
        raise ValueError(f"local_rank: expected 0 to {local_world_size - 1}; found {local_rank}")
    mine, alone = _part_of_rank(sorted(cpus), local_rank, local_world_size)
    chosen = CoreShares() if shares is None else shares
    wanted = {each.name: getattr(chosen, each.name) for each in fields(chosen) if getattr(chosen, each.name) > 0}
    parts, disjoint = _divide(mine, wanted)
    return CorePlan(
        compute=parts["compute"],
        optimizer=parts.get("optimizer", parts["compute"]),
        loading=parts.get("loading", parts["compute"]),
        communication=parts.get("communication", parts["compute"]),
        overlapping=not (alone and disjoint),
    )


def _part_of_rank(cpus: Sequence[Cpu], rank: int, ranks: int) -> tuple[list[Cpu], bool]:
    """The cpus of one rank, and whether it has them for itself."""
    nodes: list[list[Cpu]] = [[cpu for cpu in cpus if cpu.node == node] for node in sorted({cpu.node for cpu in cpus})]
    if ranks % len(nodes) == 0:
        # Each node serves as many ranks, and none has cores of two.
        ranks //= len(nodes)
        cpus, rank = nodes[rank // ranks], rank % ranks
    units = _units(cpus, ranks)
    if len(units) < ranks:
        return units[rank % len(units)], False
    return [cpu for unit in _slice(units, rank, ranks) for cpu in unit], True


def _units(cpus: Sequence[Cpu], takers: int) -> list[list[Cpu]]:
    """What is given away as one: cores with all of their threads, or threads if there are fewer cores than takers."""
    cores: dict[tuple[int, int, int], list[Cpu]] = {}
    for cpu in cpus:
        cores.setdefault((cpu.node, cpu.package, cpu.core), []).append(cpu)
    return list(cores.values()) if len(cores) >= takers else [[cpu] for cpu in cpus]


def _slice(items: Sequence[T], index: int, parts: int) -> Sequence[T]:
    return items[index * len(items) // parts : (index + 1) * len(items) // parts]


def _divide(cpus: Sequence[Cpu], shares: dict[str, float]) -> tuple[dict[str, frozenset[int]], bool]:
    """The cpus of each name, and whether no two have one in common."""
    units = _units(cpus, len(shares))
    order = sorted(shares, key=lambda name: (name != "compute", -shares[name]))  # stable
    if len(units) < len(order):
        # The first have one each, the rest share the last.
        named = {name: units[min(index, len(units) - 1)] for index, name in enumerate(order)}
        return {name: frozenset(cpu.number for cpu in unit) for name, unit in named.items()}, False
    counts = _counts(len(units), shares)
    parts: dict[str, frozenset[int]] = {}
    start = 0
    for name in shares:
        end = start + counts[name]
        parts[name] = frozenset(cpu.number for unit in units[start:end] for cpu in unit)
        start = end
    return parts, True


def _counts(units: int, shares: dict[str, float]) -> dict[str, int]:
    """Whole numbers that add up to `units` (at least one for each), by largest remainders."""
    total = sum(shares.values())
    exact = {name: units * share / total for name, share in shares.items()}
    counts = {name: max(1, int(number)) for name, number in exact.items()}
    while sum(counts.values()) < units:
        counts[max(shares, key=lambda name: exact[name] - counts[name])] += 1
    while sum(counts.values()) > units:
        counts[min((name for name in shares if counts[name] > 1), key=lambda name: exact[name] - counts[name])] -= 1
    return counts


class CoreBinding:
    """Binds a thread, by default the calling one, to cpus: from now until `restore`, or for a `with` block.

    `thread`: a native id (`threading.get_native_id`). Threads that it starts afterwards are bound as it is; those that
    it has started before are not, such as the workers of torch after the first parallel operation. `reason`: None, or
    why the binding is what it was, which is no error: a system without affinities, or cpus that a cgroup forbids.
    """

    def __init__(self, cpus: Collection[int], *, thread: int | None = None) -> None:
        if not cpus:
            raise ValueError("cpus: expected at least one; found none")
        self._thread = threading.get_native_id() if thread is None else thread
        self._before: set[int] | None = None
        self.reason: str | None = None
        if not hasattr(os, "sched_setaffinity"):
            self.reason = "this system doesn't let a thread choose its cpus"
            return
        try:
            before = set(os.sched_getaffinity(self._thread))
            os.sched_setaffinity(self._thread, cpus)
        except OSError as error:
            self.reason = (
                f"the system refused to bind thread {self._thread} to cpus {_in_words(cpus)}: {error.strerror}; "
                "is it a container with fewer cpus?"
            )
        else:
            self._before = before

    @property
    def bound(self) -> bool:
        """Whether the thread is bound by this object."""
        return self._before is not None

    def restore(self) -> None:
        """Let the thread run where it could before. Nothing happens if it has ended, or isn't bound."""
        before, self._before = self._before, None
        if before is not None:
            try:
                os.sched_setaffinity(self._thread, before)
            except OSError as error:
                self.reason = f"the cpus {_in_words(before)} could not be had back: {error.strerror}"

    def __enter__(self) -> CoreBinding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def _in_words(cpus: Iterable[int]) -> str:
    """0-3, 8"""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

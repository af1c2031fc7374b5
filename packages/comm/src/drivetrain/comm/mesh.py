"""Ranks arranged along named axes, and the communicators over them.

Problem: a job with several kinds of parallelism needs many overlapping groups of ranks, and a process group can only
be made if all ranks make the same ones in the same order.

Idea: the ranks are the cells of one grid, row-major over ``AXES``: neighbours along the last axes are neighbours in
rank, so the axes that talk most (tensor, expert) stay inside a host. A group is asked for by the names of the axes
that it runs along. ``Mesh`` is the only maker of process groups.

Invariants:

- ``Mesh.axis`` is collective over the world the first time for given names and channel, and a look-up afterwards;
- within a group, ranks are in the order of the grid, first-named axis outermost, whatever order the names were given
  in;
- an axis of one rank owns no process group unless somebody asks for it (``Axis.group``).
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from drivetrain.comm.comparison import Comparison
from drivetrain.comm.errors import CollectiveError
from drivetrain.comm.ledger import Ledger
from drivetrain.comm.safeguards import Safeguards
from drivetrain.comm.setup import World
from drivetrain.comm.shared_memory import SharedGroup, SharedMemory, connect
from drivetrain.comm.trail import Trail
from drivetrain.comm.watch import Watch

_LOG = logging.getLogger("drivetrain.comm")

AXES = ("pipeline", "data", "shard", "sequence", "tensor", "expert")
"""The names of the axes, outermost first."""


class Axis:
    """A communicator over one or several axes of a mesh: what collectives take. Made by ``Mesh.axis`` only.

    Attributes:
        name: the axes' names joined by ``+``.
        channel: which of several independent streams of collectives over the same ranks.
        size, rank: how many ranks, and which of them this is.
        ranks: the ranks in the world, by rank in the axis.
        backend, device: the process group's backend, and where tensors live.
        control_device: where small tensors live whose values the program reads.
        shared: carries the tensors instead of gloo, where the ranks can share memory.
        ledger: where collectives on this axis are counted.
        trail: what was issued on it.
        watch: explains what does not complete.
        comparison: compares what ranks issue, where the mesh asks for it.
    """

    def __init__(
        self,
        *,
        name: str,
        channel: str,
        ranks: tuple[int, ...],
        world: World,
        ledger: Ledger,
        make: Callable[[], dist.ProcessGroup],
        watch: Watch,
        check: bool = False,
        shared_memory: SharedMemory | None = None,
    ) -> None:
        self.name = name
        self.channel = channel
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(world.rank)
        self.world = world
        self.backend = world.backend
        self.device = world.device
        self.control_device = world.control_device
        self.ledger = ledger
        self.trail = Trail(name, channel, world.rank, ranks)
        self.watch = watch
        self.comparison: Comparison | None = None
        self._make = make
        self._group = make() if self.size > 1 and not world.dry else None
        self._sequence = itertools.count()
        if self._group is not None:
            self._guard(self._group, check)
        self.shared = self._share(shared_memory)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of torch.distributed. COLLECTIVE on the first use where the axis has one rank.

        Raises:
            RuntimeError: the world is a dry one, and has none.
        """
        if self.world.dry:
            raise RuntimeError(
                f"axis '{self.name}' belongs to a dry world, in which no process group exists; start the ranks, and "
                "use init() in place of dry_world()"
            )
        if self._group is None:
            self._group = self._make()
        return self._group

    @property
    def carrier(self) -> str:
        """What carries the tensors: ``"shared memory"``, or the backend's name."""
        return self.backend if self.shared is None else "shared memory"

    def _guard(self, group: dist.ProcessGroup, check: bool) -> None:
        """Agree with the other ranks on what the axis is called in the store, and on whether it is checked."""
        agreed = torch.tensor(
            [int.from_bytes(os.urandom(7), "little"), int(check)], dtype=torch.int64, device=self.device
        )
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
        token, checked = agreed.tolist()
        self.trail.token = f"{token:x}"
        mailbox = self.watch.follow(self.trail)
        if checked:
            self.comparison = Comparison(self.trail, mailbox, self.watch.timeout)

    def _share(self, shared_memory: SharedMemory | None) -> SharedGroup | None:
        if self._group is None or self.backend != "gloo":
            return None
        shared, reason = connect(shared_memory, self._group, self.watch.timeout)
        carrier = "shared memory" if shared is not None else f"gloo, not shared memory: {reason}"
        _LOG.debug("axis %s, channel %s: carried by %s", self.name, self.channel, carrier)
        return shared

    def next_sequence(self) -> int:
        """The number of the next round of messages, the same on all ranks as they issue the same collectives."""
        return next(self._sequence)

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, channel={self.channel!r}, rank={self.rank}, ranks={self.ranks})"


class Mesh:
    """The grid of all ranks along named axes.

    Attributes:
        world: this process' place.
        ledger: counts the collectives on all axes.
        device: where tensors live.
        sizes: the length of every axis of ``AXES``, in that order.
        safeguards: how it guards against ranks that go different ways.
        timeout: seconds without progress after which a collective fails.
    """

    def __init__(
        self,
        world: World,
        sizes: dict[str, int],
        ledger: Ledger,
        shared_memory: SharedMemory | None = None,
        safeguards: Safeguards | None = None,
    ) -> None:
        self.world = world
        self.ledger = ledger
        self.device = world.device
        self.sizes = sizes
        self.safeguards = (safeguards or Safeguards()).overridden(os.environ)
        self.timeout = self.safeguards.timeout or _default_timeout(world)
        self._watch = Watch(world.rank, self.timeout if world.backend == "gloo" else 0.9 * self.timeout)
        self._shared_memory = shared_memory
        self._axes: dict[tuple[str, str], Axis] = {}
        self._device_mesh: DeviceMesh | None = None

    @classmethod
    def create(
        cls,
        world: World,
        *,
        pipeline: int = 1,
        data: int = 1,
        shard: int | None = None,
        sequence: int = 1,
        tensor: int = 1,
        expert: int = 1,
        ledger: Ledger | None = None,
        shared_memory: SharedMemory | None = None,
        safeguards: Safeguards | None = None,
    ) -> Mesh:
        """Arrange all ranks of ``world``. ``shard=None`` takes the ranks that the other axes leave.

        ``shared_memory`` makes groups that carry the tensors of axes within one host faster than gloo; see
        ``shared_memory.py`` for what fits. ``safeguards`` say how long ranks wait for each other, and whether they
        compare what they do; the environment comes before them.

        Raises:
            ValueError: a size is not positive, or the product of the sizes is not the number of ranks; the environment
                holds a wrong setting.
        """
        given = {
            "pipeline": pipeline,
            "data": data,
            "shard": shard,
            "sequence": sequence,
            "tensor": tensor,
            "expert": expert,
        }
        for name, size in given.items():
            if size is not None and size < 1:
                raise ValueError(f"mesh axis '{name}' has size {size}; it must be at least 1")
        fixed = math.prod(size for size in given.values() if size is not None)
        if shard is None and world.size % fixed:
            raise ValueError(
                f"{_product(given)} = {fixed} does not divide the world of {world.size} ranks: "
                "no size is left for 'shard'"
            )
        sizes = {name: world.size // fixed if size is None else size for name, size in given.items()}
        if math.prod(sizes.values()) != world.size:
            raise ValueError(
                f"{_product(given)} = {fixed}, but the world has {world.size} ranks; the product must be that number"
            )
        return cls(world, sizes, ledger if ledger is not None else Ledger(), shared_memory, safeguards)

    def axis(self, *names: str, channel: str = "main") -> Axis:
        """The communicator of this rank along the named axes.

        COLLECTIVE over the world on the first use of these names with this channel. A channel is a separate process
        group over the same ranks, so that independent streams of collectives don't get in each other's order.

        Raises:
            ValueError: no name, an unknown name, or a name given twice.
        """
        for name in names:
            if name not in AXES:
                raise ValueError(f"unknown mesh axis '{name}'; the axes are {', '.join(AXES)}")
        if not names or len(set(names)) != len(names):
            raise ValueError(
                f"axis() takes one or several different names, got {names}; the axes are {', '.join(AXES)}"
            )
        ordered = tuple(name for name in AXES if name in names)
        return self._make_axis("+".join(ordered), lambda: self._groups(ordered), channel)

    def _make_axis(self, name: str, groups: Callable[[], Iterable[tuple[int, ...]]], channel: str) -> Axis:
        """``groups`` lists all groups of the axis, which only its making needs: there may be one for every rank."""
        key = (name, channel)
        if key not in self._axes:
            mine = next(ranks for ranks in groups() if self.world.rank in ranks)
            self._axes[key] = Axis(
                name=name,
                channel=channel,
                ranks=mine,
                world=self.world,
                ledger=self.ledger,
                make=lambda: self._make_group(list(groups()), mine, name, channel),
                watch=self._watch,
                check=self.safeguards.check,
                shared_memory=self._shared_memory,
            )
        return self._axes[key]

    def split(self, name: str, size: int, *, channel: str = "main") -> tuple[Axis, Axis]:
        """Cut an axis into runs of ``size`` neighbours: ``(within, between)``.

        ``within`` holds the ranks of this rank's run, ``between`` those at the same place in the other runs; a rank of
        the whole axis is ``between.rank * size + within.rank``. A run of the whole axis is the axis itself. COLLECTIVE
        over the world on the first use.

        Raises:
            ValueError: ``size`` does not divide the axis.
        """
        if name not in AXES:
            raise ValueError(f"unknown mesh axis '{name}'; the axes are {', '.join(AXES)}")
        if size < 1 or self.sizes[name] % size:
            raise ValueError(f"mesh axis '{name}' of {self.sizes[name]} ranks cannot be cut into runs of {size}")

        def runs() -> Iterator[tuple[int, ...]]:
            return (whole[at : at + size] for whole in self._groups((name,)) for at in range(0, len(whole), size))

        def across() -> Iterator[tuple[int, ...]]:
            return (whole[place::size] for whole in self._groups((name,)) for place in range(size))

        whole = size == self.sizes[name]
        return (
            self.axis(name, channel=channel) if whole else self._make_axis(f"{name}/{size} within", runs, channel),
            self._make_axis(f"{name}/{size} between", across, channel),
        )

    @property
    def device_mesh(self) -> DeviceMesh:
        """The same grid for torch's DTensor and checkpoint. COLLECTIVE over the world on the first use."""
        if self._device_mesh is None:
            grid = torch.arange(self.world.size, dtype=torch.int).reshape(tuple(self.sizes.values()))
            self._device_mesh = DeviceMesh.from_group(
                [self.axis(name).group for name in AXES], self.device.type, mesh=grid, mesh_dim_names=AXES
            )
        return self._device_mesh

    def _groups(self, names: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
        """All groups along ``names``, in the order that every rank makes them."""
        return groups_along(self.sizes, names)

    def _make_group(
        self, groups: list[tuple[int, ...]], mine: tuple[int, ...], name: str, channel: str
    ) -> dist.ProcessGroup:
        world: dist.ProcessGroup | None = dist.group.WORLD
        if world is None:
            raise RuntimeError(
                f"axis '{name}': no process group is running. Call drivetrain.comm.init() before Mesh.create()."
            )
        # The world's group has the timeout of the world; and on gloo our point-to-point tags must not meet those of its
        # other users.
        shared = self.world.backend != "gloo" and self.safeguards.timeout is None
        if self.world.size == 1 or (len(groups) == 1 and channel == "main" and shared):
            return world
        description = f"{name}:{channel}"
        if len(mine) == 1:
            return self._new_group(mine, description, only_members=True)
        made = {ranks: self._new_group(ranks, description) for ranks in groups}
        return made[mine]

    def _new_group(self, ranks: tuple[int, ...], description: str, *, only_members: bool = False) -> dist.ProcessGroup:
        try:
            group: dist.ProcessGroup = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=self.timeout),
                backend=self.world.backend,
                use_local_synchronization=only_members,
                group_desc=description,
            )
        except RuntimeError as error:
            reason = f"the ranks {ranks} did not all come, or cannot reach each other. torch says: {error}"
            rank = self.world.rank
            raise CollectiveError(reason, op="the making of a group", axis=description, rank=rank) from error
        return group


def _default_timeout(world: World) -> float:
    """Seconds that collectives may take in ``world``."""
    usual = default_pg_nccl_timeout if world.backend == "nccl" else default_pg_timeout
    return (world.timeout or usual or default_pg_timeout).total_seconds()


def groups_along(sizes: dict[str, int], names: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
    """The groups of ranks of a row-major grid that differ only along ``names``.

    The groups partition all ranks; each is in ascending order, and the groups are ordered by their first rank.
    """
    stride, strides = 1, {}
    for name in reversed(tuple(sizes)):
        strides[name] = stride
        stride *= sizes[name]

    def offsets(along: tuple[str, ...]) -> list[int]:
        steps = [[i * strides[name] for i in range(sizes[name])] for name in along]
        return [sum(step) for step in itertools.product(*steps)]

    within = offsets(tuple(name for name in sizes if name in names))
    for start in offsets(tuple(name for name in sizes if name not in names)):
        yield tuple(start + step for step in within)


def _product(sizes: dict[str, int | None]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)

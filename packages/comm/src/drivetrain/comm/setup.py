"""Joining the job: from the environment that ``torchrun`` sets, or alone in one process.

The process group of torch.distributed is process-wide, so what ``init`` made is remembered per group: a group that is
destroyed takes its ``World`` with it, and ``shutdown`` never destroys a group that somebody else made.

`dry_world` is a place in a job that nobody runs: plans are made in it, and what one rank of a large job costs is
counted in it.

A world of one rank takes no network port for the rendezvous (the store lives in memory). Where all ranks are on this
host (``MASTER_ADDR`` is the loopback), gloo is told to stay on the loopback interface too: it would otherwise resolve
the host's name, which fails on many laptops and opens the job to the network.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_LOG = logging.getLogger("drivetrain.comm")

DRY: Final = "dry"
"""The backend of a world that nobody runs."""

_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, kw_only=True)
class World:
    """This process' place among all ranks of the job."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this host
    local_size: int
    device: torch.device
    backend: str  # "gloo", "nccl", ...; "dry" where no job runs
    timeout: timedelta | None = None  # of every collective, if the mesh says nothing; None: torch's default

    @property
    def dry(self) -> bool:
        """Nobody else is there: see `dry_world`."""
        return self.backend == DRY

    @property
    def control_device(self) -> torch.device:
        """Where small tensors live whose values the program reads: ``device``, or the CPU if that has no values."""
        return torch.device("cpu") if self.device.type == "meta" else self.device


_MADE: Final = WeakKeyDictionary[dist.ProcessGroup, World]()  # state: mirrors torch's default group


def init(
    *,
    backend: str | None = None,
    device: torch.device | str | None = None,
    timeout: timedelta | None = None,
) -> World:
    """Join the job's process group, or make one of a single rank where no launcher set ``RANK`` and ``WORLD_SIZE``.

    Idempotent: while a process group runs, whoever made it, its ``World`` is returned.

    Args:
        backend: default ``"nccl"`` for a CUDA device, else ``"gloo"``.
        device: default ``cuda:LOCAL_RANK`` where CUDA is there (and the backend is not gloo), else the CPU.
        timeout: how long a collective, and the rendezvous, may wait for the other ranks.

    Raises:
        ValueError: the environment is incomplete or contradictory, or the backend does not fit the device or the
            running group.
        RuntimeError: the backend is not in this build of torch.
        TimeoutError: the other ranks did not come.
    """
    if dist.is_initialized():
        return _running(backend, None if device is None else torch.device(device))
    place = _place(os.environ)
    chosen = _device(backend, device, place.local_rank)
    name = backend or ("nccl" if chosen.type == "cuda" else "gloo")
    _check_backend(name, chosen)
    world = replace(place, device=chosen, backend=name, timeout=timeout)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    _join(world)
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError(f"rank {world.rank}: torch.distributed made no process group")
    _MADE[group] = world
    _LOG.debug("rank %d of %d joined over %s on %s", world.rank, world.size, name, chosen)
    return world


def dry_world(size: int, *, rank: int = 0, local_size: int = 1, device: torch.device | str = "meta") -> World:
    """The place of ``rank`` among ``size`` ranks that nobody runs.

    A `Mesh` over it has all its axes and no process group. Collectives are checked and counted in the ledger, and move
    nothing: what they would fill keeps what it has, and objects that are gathered are this rank's own. Takes no
    process group, port or environment.

    Args:
        size, rank: of the job.
        local_size: ranks per host.
        device: where tensors live; on the meta device nothing takes memory, whatever the size of the model.

    Raises:
        ValueError: there is no such rank.
    """
    if not 0 <= rank < size or local_size < 1:
        raise ValueError(f"a dry world of {size} ranks, {local_size} on each host, has no rank {rank}")
    return World(
        rank=rank,
        size=size,
        local_rank=rank % local_size,
        local_size=local_size,
        device=torch.device(device),
        backend=DRY,
    )


def shutdown() -> None:
    """Destroy the process group if ``init`` made it. Safe to call twice, and without any group."""
    if dist.is_initialized() and dist.group.WORLD in _MADE:
        dist.destroy_process_group()


def _running(backend: str | None, device: torch.device | None) -> World:
    name = dist.get_backend()
    if backend is not None and backend != name:
        raise ValueError(
            f"rank {dist.get_rank()}: the running process group uses the backend '{name}', but init was asked for "
            f"'{backend}'. Call shutdown() first, or leave backend out."
        )
    group = dist.group.WORLD
    world = _MADE.get(group) if group is not None else None
    if world is None:
        rank, size = dist.get_rank(), dist.get_world_size()
        local_rank = _integer(os.environ, "LOCAL_RANK", rank)
        where = device or _device(name, None, local_rank)
        local_size = _integer(os.environ, "LOCAL_WORLD_SIZE", size)
        world = World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, device=where, backend=name)
    if device is not None and device != world.device:
        raise ValueError(
            f"rank {world.rank}: the running process group works on {world.device}, but init was asked for {device}. "
            "Call shutdown() first, or leave device out."
        )
    return world


def _place(env: Mapping[str, str]) -> World:
    """Ranks and sizes as the launcher set them; device and backend are still to be chosen."""
    if "RANK" not in env and "WORLD_SIZE" not in env:
        return World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"), backend="")
    for have, lack in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if lack not in env:
            raise ValueError(
                f"{have}={env[have]} is set but {lack} is not. Start the script with torchrun or `drivetrain run`, "
                f"or unset {have} to run alone in one process."
            )
    rank, size = _integer(env, "RANK", 0), _integer(env, "WORLD_SIZE", 1)
    if not 0 <= rank < size:
        raise ValueError(f"RANK={rank} is not in 0..{size - 1} (WORLD_SIZE={size}). Check what the launcher sets.")
    if size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in env:
                raise ValueError(
                    f"rank {rank} of {size}: {name} is not set, so the ranks cannot find each other. "
                    f"Start the script with torchrun or `drivetrain run`, or set {name} on all ranks to that of rank 0."
                )
        _integer(env, "MASTER_PORT", 0)
    local_rank = _integer(env, "LOCAL_RANK", rank)
    local_size = _integer(env, "LOCAL_WORLD_SIZE", size)
    return World(
        rank=rank, size=size, local_rank=local_rank, local_size=local_size, device=torch.device("cpu"), backend=""
    )


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}='{text}' is not a whole number. Check what the launcher sets.") from None


def _device(backend: str | None, device: torch.device | str | None, local_rank: int) -> torch.device:
    if device is not None:
        chosen = torch.device(device)
        return torch.device("cuda", local_rank) if chosen.type == "cuda" and chosen.index is None else chosen
    if torch.cuda.is_available() and backend != "gloo":
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def _check_backend(name: str, device: torch.device) -> None:
    if name not in dist.Backend.backend_list:
        known = ", ".join(b for b in dist.Backend.backend_list if b != "undefined")
        raise ValueError(f"backend '{name}' is not known to torch.distributed. Known: {known}.")
    if name == "nccl" and device.type != "cuda":
        why = "this process sees no CUDA device" if not torch.cuda.is_available() else f"the device is {device}"
        raise ValueError(f"backend 'nccl' moves CUDA tensors, but {why}. Use backend='gloo' for the CPU.")
    if name == "gloo" and device.type != "cpu":
        raise ValueError(
            f"backend 'gloo' moves CPU tensors here, but the device is {device}. Use backend='nccl' for CUDA."
        )
    if not dist.is_backend_available(name):
        raise RuntimeError(
            f"backend '{name}' is not in this build of torch ({torch.__version__}). Install a build that has it."
        )


def _join(world: World) -> None:
    device_id = world.device if world.device.type == "cuda" else None
    if world.backend == "gloo" and (world.size == 1 or os.environ.get("MASTER_ADDR") in _LOOPBACK):
        _stay_on_loopback()
    if world.size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch documents it, but doesn't export it by name
        name, wait = world.backend, world.timeout
        dist.init_process_group(name, store=store, rank=0, world_size=1, timeout=wait, device_id=device_id)
        return
    try:
        dist.init_process_group(world.backend, init_method="env://", timeout=world.timeout, device_id=device_id)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise TimeoutError(
            f"rank {world.rank} of {world.size}: the ranks did not all meet at {where}. Check that {world.size} ranks "
            "were started, that they are alive, and that this address reaches rank 0 from every host. "
            f"torch says: {error}"
        ) from error


def _stay_on_loopback() -> None:
    """Gloo reads the interface from the environment, each time that it makes a group."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])

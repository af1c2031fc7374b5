"""Named meshes, typed collectives and a ledger of what they cost."""

from __future__ import annotations

from drivetrain.comm.codec import Codec
from drivetrain.comm.collectives import (
    Handle,
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce_scatter,
)
from drivetrain.comm.compressed import (
    Staged,
    Waitable,
    all_gather_encoded,
    all_gather_in_two,
    reduce_scatter_encoded,
)
from drivetrain.comm.errors import CollectiveError
from drivetrain.comm.ledger import Ledger, LedgerEntry
from drivetrain.comm.mesh import AXES, Axis, Mesh
from drivetrain.comm.safeguards import CHECK_VARIABLE, TIMEOUT_VARIABLE, Safeguards
from drivetrain.comm.setup import World, dry_world, init, shutdown
from drivetrain.comm.shared_memory import SHARED_MEMORY_VARIABLE, SharedGroup, SharedMemory
from drivetrain.comm.trail import Purpose

__all__ = [
    "AXES",
    "CHECK_VARIABLE",
    "SHARED_MEMORY_VARIABLE",
    "TIMEOUT_VARIABLE",
    "Axis",
    "Codec",
    "CollectiveError",
    "Handle",
    "Ledger",
    "LedgerEntry",
    "Mesh",
    "Purpose",
    "Safeguards",
    "SharedGroup",
    "SharedMemory",
    "Staged",
    "Waitable",
    "World",
    "all_gather",
    "all_gather_encoded",
    "all_gather_in_two",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "dry_world",
    "init",
    "reduce_scatter",
    "reduce_scatter_encoded",
    "shutdown",
]

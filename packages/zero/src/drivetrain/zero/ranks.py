"""Which ranks share one copy of the model, and which hold copies of each other.

Ranks form a grid of two axes: along ``shard`` each holds a part of the model states, along ``data`` the same part is
held again (hybrid sharding; MiCS, Zhang et al. 2022). With one rank along ``data`` this is plain ZeRO.
"""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.comm import Axis, Mesh


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Communicators over the grid, as seen by one rank.

    Attributes:
        shard: the ranks that share one copy of the model states with this one; gathers have it to themselves.
        reduce: the same ranks; reductions of gradients have it to themselves.
        replicas: the ranks that hold the same part as this one.
        everyone: all ranks that train the model on data of their own.
    """

    shard: Axis
    reduce: Axis
    replicas: Axis
    everyone: Axis

    @classmethod
    def of(cls, mesh: Mesh) -> Ranks:
        """The communicators of ``mesh``. Collective."""
        shard = mesh.axis("shard")
        return cls(
            shard=shard,
            reduce=mesh.axis("shard", channel="reduce"),
            replicas=mesh.axis("data"),
            everyone=mesh.axis("data", "shard") if mesh.sizes["data"] > 1 else shard,
        )

    @property
    def writes(self) -> bool:
        """This rank writes its part to checkpoints; its replicas need not."""
        return self.replicas.rank == 0

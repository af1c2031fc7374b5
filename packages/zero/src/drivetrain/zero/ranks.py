"""Which ranks share one copy of the model, and which hold copies of each other.

Ranks form a grid of two axes: along ``shard`` each holds a part of the model states, along ``data`` the same part is
held again (hybrid sharding; MiCS, Zhang et al. 2022). With one rank along ``data`` this is plain ZeRO.
"""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.comm import Axis, Mesh
from drivetrain.zero.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The shard axis cut into nodes: the ranks within this rank's, and those at its place in the others."""

    within: Axis
    between: Axis


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Communicators over the grid, as seen by one rank.

    Attributes:
        shard: the ranks that share one copy of the model states with this one; gathers have it to themselves.
        reduce: the same ranks; reductions of gradients have it to themselves.
        replicas: the ranks that hold the same part as this one.
        everyone: all ranks that train the model on data of their own.
        gather_nodes, reduce_nodes: nodes, for gathers and for reductions. All ranks are one node where the policy does
            nothing by nodes: groups of ranks take time to make.
    """

    shard: Axis
    reduce: Axis
    replicas: Axis
    everyone: Axis
    gather_nodes: Nodes
    reduce_nodes: Nodes

    @classmethod
    def of(cls, mesh: Mesh, policy: Policy) -> Ranks:
        """The communicators of ``mesh`` that ``policy`` needs. Collective.

        Raises:
            ValueError: the policy's nodes do not divide the shard axis.
        """
        shard = mesh.axis("shard")
        size = policy.node_ranks or shard.size
        if shard.size % size:
            raise ValueError(
                f"nodes of {size} ranks (node_ranks, or the size of the secondary partition) do not divide the "
                f"{shard.size} ranks that share one copy of the model"
            )
        gathers = policy.gather_in_two or policy.secondary_ranks > 1
        return cls(
            shard=shard,
            reduce=mesh.axis("shard", channel="reduce"),
            replicas=mesh.axis("data"),
            everyone=mesh.axis("data", "shard") if mesh.sizes["data"] > 1 else shard,
            gather_nodes=_nodes(mesh, size if gathers else shard.size, "main"),
            reduce_nodes=_nodes(mesh, size if policy.reduce_rule else shard.size, "reduce"),
        )

    @property
    def writes(self) -> bool:
        """This rank writes its part to checkpoints; its replicas need not."""
        return self.replicas.rank == 0


def _nodes(mesh: Mesh, size: int, channel: str) -> Nodes:
    within, between = mesh.split("shard", size, channel=channel)
    return Nodes(within=within, between=between)

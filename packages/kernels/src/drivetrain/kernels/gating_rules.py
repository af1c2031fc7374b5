"""How a router turns logits into experts and weights: the numbers that say so, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

__all__ = ["GatingRule", "Scoring"]

Scoring = Literal["softmax", "sigmoid"]
_SCORINGS: Final = get_args(Scoring)


@dataclass(frozen=True, kw_only=True)
class GatingRule:
    """The choice of `k` experts per token, and their weights. `groups` and `top_groups` come together or not at all."""

    k: int
    experts: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    groups: int | None = None
    top_groups: int | None = None
    group_best: int = 2
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in _SCORINGS:
            raise ValueError(f"top_k_gating: scoring must be one of {', '.join(_SCORINGS)}; found {self.scoring!r}")
        if not 1 <= self.k <= self.experts:
            raise ValueError(f"top_k_gating: k must lie in 1 to {self.experts}, the number of experts; found {self.k}")
        if not math.isfinite(self.scale):
            raise ValueError(f"top_k_gating: scale must be finite; found {self.scale}")
        self._check_groups()

    def _check_groups(self) -> None:
        if self.groups is None or self.top_groups is None:
            if self.groups is not self.top_groups:
                raise ValueError(
                    f"top_k_gating: groups ({self.groups}) and top_groups ({self.top_groups}) go together: "
                    "give both, or neither for a choice among all experts"
                )
            return
        if self.groups < 1 or self.experts % self.groups:
            raise ValueError(
                f"top_k_gating: groups must divide the number of experts, {self.experts}; found {self.groups}"
            )
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_k_gating: top_groups must lie in 1 to {self.groups}; found {self.top_groups}")
        if self.group_best < 1:
            raise ValueError(f"top_k_gating: group_best must be at least 1; found {self.group_best}")
        allowed = self.top_groups * self.group_size
        if self.k > allowed:
            raise ValueError(
                f"top_k_gating: k is {self.k}, but {self.top_groups} groups of {self.group_size} experts hold only "
                f"{allowed}: raise top_groups or lower k"
            )

    @property
    def group_size(self) -> int:
        """Experts per group; without groups, all of them."""
        return self.experts // (self.groups or 1)

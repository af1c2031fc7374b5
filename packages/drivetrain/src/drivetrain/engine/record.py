"""How far training has come, and what one step did: plain records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What `Engine.step` did.

    Attributes:
        step: optimizer steps taken before this call, skipped ones not counted: the i of the schedule's f(i).
        stepped: parameters were updated.
        reason: why not, if not: still accumulating, or gradients that are not finite.
        grad_norm: global norm of the unscaled gradients before clipping; None while accumulating.
        clip_coefficient: what the gradients were multiplied by; 1 where clipping did not bite.
        lr: the learning rate of the first parameter group in this step.
        loss_scale: the scale that the gradients carried.
    """

    step: int
    stepped: bool
    reason: str | None
    grad_norm: float | None
    clip_coefficient: float
    lr: float
    loss_scale: float


@dataclass(kw_only=True)
class Counters:
    """How far training has come. Part of every checkpoint."""

    global_steps: int = 0  # optimizer steps attempted
    skipped_steps: int = 0  # of these, skipped because gradients were not finite
    micro_steps: int = 0  # micro-batches
    global_samples: int = 0  # samples, over all ranks

    @property
    def applied_steps(self) -> int:
        """Optimizer steps that updated the parameters."""
        return self.global_steps - self.skipped_steps

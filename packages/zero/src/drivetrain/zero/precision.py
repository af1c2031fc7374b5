"""Loss scaling for fp16, whose gradients underflow otherwise (Micikevicius et al., "Mixed Precision Training")."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class LossScalePolicy:
    """How the loss scale moves.

    Attributes:
        initial: the first scale. With ``dynamic`` False it never changes.
        dynamic: halve on overflow, double after ``window`` good steps.
        window: good steps in a row (since the last overflow) before the scale doubles.
        hysteresis: overflows to bear before the scale is halved.
        consecutive_hysteresis: every good step restores the hysteresis; else only a doubling does.
        minimum: a dynamic scale never goes below this.
    """

    initial: float = 65536.0
    dynamic: bool = True
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.initial) and self.initial > 0):
            raise ValueError(f"the loss scale must be positive and finite, got {self.initial}")
        if self.dynamic and (self.window < 1 or self.hysteresis < 1 or not self.minimum > 0):
            raise ValueError(
                "a dynamic loss scale needs window >= 1, hysteresis >= 1 and minimum > 0, got "
                f"window={self.window}, hysteresis={self.hysteresis}, minimum={self.minimum}"
            )


NO_SCALING = LossScalePolicy(initial=1.0, dynamic=False)


@dataclass
class _ScaleState:
    scale: float
    hysteresis: int
    step: int = 0
    last_overflow: int = -1


class LossScaler:
    """The current loss scale. `update` is told of every attempted step."""

    def __init__(self, policy: LossScalePolicy = NO_SCALING) -> None:
        self.policy = policy
        self._state = _ScaleState(scale=policy.initial, hysteresis=policy.hysteresis)

    @property
    def scale(self) -> float:
        return self._state.scale

    @property
    def active(self) -> bool:
        """The loss carries a scale: gradients that come without one are an error."""
        return self.policy != NO_SCALING

    @property
    def at_minimum(self) -> bool:
        """Another overflow could not lower the scale."""
        return not self.policy.dynamic or self._state.scale <= self.policy.minimum

    def update(self, *, overflow: bool) -> None:
        """Move the scale after a step that overflowed (and was skipped) or went well."""
        policy, state = self.policy, self._state
        if not policy.dynamic:
            return
        if overflow:
            if state.hysteresis <= 1:
                state.scale = max(state.scale / 2, policy.minimum)
            else:
                state.hysteresis -= 1
            state.last_overflow = state.step
        else:
            if policy.consecutive_hysteresis:
                state.hysteresis = policy.hysteresis
            good = state.step - state.last_overflow
            if good % policy.window == 0:
                state.scale *= 2
                if not policy.consecutive_hysteresis:
                    state.hysteresis = policy.hysteresis
        state.step += 1

    def state_dict(self) -> dict[str, float | int | bool]:
        return {**asdict(self._state), "dynamic": self.policy.dynamic}

    def load_state_dict(self, state: dict[str, float | int | bool]) -> None:
        """Go on from where a dynamic scale was.

        Only from a dynamic scale to a dynamic one: a constant scale is the policy's, whatever was saved, and one that
        starts to move starts where its policy says. The policy's minimum and hysteresis hold for what is loaded too.
        """
        moved = state.get("dynamic", state["step"] > 0)  # constant scales count no steps
        if not (self.policy.dynamic and moved):
            return
        self._state = _ScaleState(
            scale=max(float(state["scale"]), self.policy.minimum),
            hysteresis=min(int(state["hysteresis"]), self.policy.hysteresis),
            step=int(state["step"]),
            last_overflow=int(state["last_overflow"]),
        )

"""The section `scheduler`, and the parameters of each schedule. The formulas themselves are in
`drivetrain.engine.lr`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from drivetrain.engine.config.schema.keys import (
    Auto,
    Count,
    Flag,
    Fraction,
    Key,
    Momentum,
    NonNegative,
    Positive,
    Section,
    Text,
    in_any_case,
    lowered,
)

WarmupType = Annotated[Literal["log", "linear"], BeforeValidator(lowered), in_any_case("log", "linear")]
_NO_DEAD_STEP = "Counted from the first optimizer step; upstream spends two steps on the first value."

_TOTAL = Key(
    "Optimizer steps in the whole run.", auto=Auto.NEEDED, auto_text="the number of optimizer steps in the whole run"
)
_WARMUP_STEPS = Key(
    "Optimizer steps of warm-up; 1 counts as 2.",
    auto=Auto.NEEDED,
    auto_text="the number of optimizer steps of warm-up",
    differs=_NO_DEAD_STEP,
)
_WARMUP_TYPE = Key("Shape of the warm-up.", differs="Another word is refused; upstream warns and takes log.")
_MIN_LR = Key("Learning rate of the first step.", auto_text="0")


class LRRangeTestParams(Section):
    """Raise the learning rate steadily, to find the range in which training is stable (Smith, 2017)."""

    lr_range_test_min_lr: Annotated[NonNegative, Key("Learning rate at the start.")] = 1e-3
    lr_range_test_step_size: Annotated[Positive, Key("Optimizer steps in an interval.")] = 2000
    lr_range_test_step_rate: Annotated[NonNegative, Key("Growth in an interval, in units of the first rate.")] = 1.0
    lr_range_test_staircase: Annotated[Flag, Key("Grow at the end of each interval, not steadily.")] = False


class OneCycleParams(Section):
    """One rise and fall of the learning rate with momentum moving against it, then decay (Smith, 2018)."""

    cycle_min_lr: Annotated[
        NonNegative, Key("Lowest learning rate of the cycle.", auto=Auto.NEEDED, auto_text="the lowest learning rate")
    ]
    cycle_max_lr: Annotated[
        NonNegative, Key("Highest learning rate of the cycle.", auto=Auto.NEEDED, auto_text="the highest learning rate")
    ]
    decay_lr_rate: Annotated[NonNegative, Key("Decay after the cycle, for each `decay_step_size` steps; 0 holds.")] = (
        0.0
    )
    cycle_first_step_size: Annotated[Positive, Key("Optimizer steps of the rise.")] = 2000
    cycle_second_step_size: Annotated[Positive | None, Key("Optimizer steps of the fall; null is as the rise.")] = None
    cycle_first_stair_count: Annotated[Count, Key("Stairs of the rise; 0 is a straight line.")] = 0
    cycle_second_stair_count: Annotated[Count | None, Key("Stairs of the fall; null is as the rise.")] = None
    decay_step_size: Annotated[Count, Key("Optimizer steps for one unit of decay; 0 holds.")] = 0
    cycle_momentum: Annotated[Flag, Key("Move momentum too, from high to low and back.")] = True
    cycle_min_mom: Annotated[Momentum, Key("Momentum at the highest learning rate.")] = 0.8
    cycle_max_mom: Annotated[Momentum, Key("Momentum at the lowest learning rate.")] = 0.9
    decay_mom_rate: Annotated[NonNegative, Key("Growth of momentum after the cycle; 0 holds.")] = 0.0


class WarmupLRParams(Section):
    """Raise the learning rate to its value, then hold it."""

    warmup_min_lr: Annotated[NonNegative, _MIN_LR] = 0.0
    warmup_max_lr: Annotated[
        NonNegative | None,
        Key("Learning rate after the warm-up; null is the optimizer's.", auto_text="the optimizer's lr"),
    ] = None
    warmup_num_steps: Annotated[Positive, _WARMUP_STEPS] = 1000
    warmup_type: Annotated[WarmupType, _WARMUP_TYPE] = "log"


class WarmupDecayLRParams(Section):
    """Raise the learning rate to its value, then lower it to 0 along a straight line."""

    total_num_steps: Annotated[Positive, _TOTAL]
    warmup_min_lr: Annotated[NonNegative, _MIN_LR] = 0.0
    warmup_max_lr: Annotated[
        NonNegative | None,
        Key(
            "Learning rate after the warm-up; null is the optimizer's.", auto=Auto.NULL, auto_text="the optimizer's lr"
        ),
    ] = 1e-3
    warmup_num_steps: Annotated[Positive, _WARMUP_STEPS] = 1000
    warmup_type: Annotated[WarmupType, _WARMUP_TYPE] = "log"


class WarmupCosineLRParams(Section):
    """Raise the learning rate to the optimizer's, then lower it along half a cosine (Loshchilov and Hutter, 2017)."""

    total_num_steps: Annotated[Positive, _TOTAL]
    warmup_min_ratio: Annotated[Fraction, Key("First learning rate, as a share of the optimizer's.")] = 0.0
    warmup_num_steps: Annotated[Positive, _WARMUP_STEPS] = 1000
    cos_min_ratio: Annotated[Fraction, Key("Last learning rate, as a share of the optimizer's.")] = 1e-4
    warmup_type: Annotated[WarmupType, _WARMUP_TYPE] = "log"


@dataclass(frozen=True, kw_only=True)
class NativeScheduler:
    """A schedule whose parameters are described here."""

    name: str
    params: type[Section]


NATIVE_SCHEDULERS: Mapping[str, NativeScheduler] = MappingProxyType(
    {
        name.lower(): NativeScheduler(name=name, params=params)
        for name, params in (
            ("LRRangeTest", LRRangeTestParams),
            ("OneCycle", OneCycleParams),
            ("WarmupLR", WarmupLRParams),
            ("WarmupDecayLR", WarmupDecayLRParams),
            ("WarmupCosineLR", WarmupCosineLRParams),
        )
    }
)
"""Lower-case type to schedule. Read-only."""


class Scheduler(Section):
    """How the learning rate changes from step to step. A scheduler given to `initialize` takes its place."""

    shorthand: ClassVar[str] = "type"

    type: Annotated[
        Text,
        Key(
            "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR or WarmupCosineLR in any case, or the exact name of a "
            "class in torch.optim.lr_scheduler.",
            auto=Auto.NEEDED,
            auto_text="the name of a schedule",
        ),
    ]
    params: Annotated[dict[str, Any], Key("Arguments of the schedule. Steps are optimizer steps.")] = Field(
        default_factory=dict
    )

    @property
    def native(self) -> NativeScheduler | None:
        """The description of the type, or None when it is torch's."""
        return NATIVE_SCHEDULERS.get(self.type.lower())

    def arguments(self) -> dict[str, Any]:
        """The parameters with defaults filled in; for a type of torch only those given."""
        if self.native is None:
            return dict(self.params)
        return self.native.params.model_validate(self.params).model_dump()

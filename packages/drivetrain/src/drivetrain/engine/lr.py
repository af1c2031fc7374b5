"""Learning-rate schedules: pure formulas, and the objects that write them into an optimizer.

The problem: a schedule that counts its own calls drifts. A call too early or too late shifts the whole curve (two
steps at rate 0 at the start of a warm-up, say), a skipped step or a resume shifts it again, and counting batches
instead of optimizer steps makes the curve depend on accumulation and on the number of ranks.

The idea: a schedule is a function f of the optimizer step and the base learning rate. It has no counter; who drives the
training says which step is about to happen.

Invariants, for every schedule here:

- **the learning rate used at optimizer step i (the first is 0) is f(i)**, also after a resume and after skipped steps;
- steps are optimizer steps, whatever the accumulation and the number of ranks. A step that is skipped (overflow) does
not
  count: the caller applies the same i again;
- each parameter group has its own base learning rate, the one it had when the schedule was built.

The formulas are those of the standard configuration (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR),
with t = i. By the formula both shapes of warm-up begin at their minimum: log has ln(1)/ln(W) = 0 and linear 0/W = 0
at t = 0. So f(0) is `warmup_min_lr`, for that one step. The implementation that the configuration comes from uses
that value for two steps; this one does not.

Sources: L. N. Smith, "Cyclical Learning Rates for Training Neural Networks", 2017 (range test), and "A Disciplined
Approach to Neural Network Hyper-Parameters: Part 1", 2018 (one cycle); I. Loshchilov and F. Hutter, "SGDR: Stochastic
Gradient Descent with Warm Restarts", 2017 (cosine).
"""

from __future__ import annotations

import copy
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from drivetrain.engine.config import Scheduler

_LOG = logging.getLogger("drivetrain.lr")

ParamGroup = dict[str, Any]
"""A parameter group of an optimizer: `lr` and other settings."""
MakeScheduler = Callable[[torch.optim.Optimizer], LRScheduler]

# ----------------------------------------------------------------------------------------------------------- formulas


class Formula(Protocol):
    """A learning rate as a function of the step. Implementations are frozen dataclasses."""

    def lr(self, step: int, base_lr: float) -> float:
        """The learning rate of optimizer step `step` (the first is 0) for a group whose own rate is `base_lr`."""

    def momentum(self, step: int) -> float | None:
        """The momentum of optimizer step `step`, or None when the schedule leaves momentum alone."""


@dataclass(frozen=True, kw_only=True)
class _Rate:
    """What the formulas that leave momentum alone share."""

    def momentum(self, step: int) -> float | None:
        return None


@dataclass(frozen=True, kw_only=True)
class LRRangeTest(_Rate):
    """lr = min * (1 + rate * I) with I = (t + 1) / size, rounded down when `staircase`. The base rate is not used."""

    lr_range_test_min_lr: float = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def __post_init__(self) -> None:
        _at_least(1, lr_range_test_step_size=self.lr_range_test_step_size)

    def lr(self, step: int, base_lr: float) -> float:
        interval = (_checked(step) + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            interval = math.floor(interval)
        return self.lr_range_test_min_lr * (1 + self.lr_range_test_step_rate * interval)


@dataclass(frozen=True, kw_only=True)
class OneCycle:
    """Rise over s1 steps, fall over s2 steps, then decay. The base rate is not used.

    With T = s1 + s2 and p = (t + 1) mod T, the scale is p / s1 while p <= s1 and (T - p) / s2 after; with n stairs
    floor(scale * n) / n. For t < T

        lr = min + (max - min) * scale              momentum = max_mom - (max_mom - min_mom) * scale

    and for t >= T, with d = (t - T + 1) / decay_step_size,

        lr = min / (1 + decay_lr_rate * d)          momentum = max_mom * (1 + decay_mom_rate * d)

    A `decay_step_size` of 0 holds both at their value, and so does a rate of 0 for its own.
    """

    cycle_min_lr: float
    cycle_max_lr: float
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: float = 0.8
    cycle_max_mom: float = 0.9
    decay_mom_rate: float = 0.0

    def __post_init__(self) -> None:
        _at_least(1, cycle_first_step_size=self.cycle_first_step_size, cycle_second_step_size=self.second)
        _at_least(0, decay_step_size=self.decay_step_size, cycle_first_stair_count=self.cycle_first_stair_count)

    @property
    def second(self) -> int:
        """Steps of the fall."""
        return self.cycle_first_step_size if self.cycle_second_step_size is None else self.cycle_second_step_size

    @property
    def total(self) -> int:
        """Steps of the cycle."""
        return self.cycle_first_step_size + self.second

    def scale(self, step: int) -> float:
        """Height of the cycle at a step before `total`, from 0 to 1."""
        position = (step + 1) % self.total
        if position <= self.cycle_first_step_size:
            part, whole, stairs = position, self.cycle_first_step_size, self.cycle_first_stair_count
        else:
            part, whole = self.total - position, self.second
            second = self.cycle_second_stair_count
            stairs = self.cycle_first_stair_count if second is None else second
        # In whole numbers, so that a stair is not missed by a rounding error.
        return (part * stairs // whole) / stairs if stairs else part / whole

    def lr(self, step: int, base_lr: float) -> float:
        if _checked(step) >= self.total:
            return self.cycle_min_lr / (1 + self.decay_lr_rate * self._decay(step))
        return self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * self.scale(step)

    def momentum(self, step: int) -> float | None:
        if not self.cycle_momentum:
            return None
        if _checked(step) >= self.total:
            return self.cycle_max_mom * (1 + self.decay_mom_rate * self._decay(step))
        return self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * self.scale(step)

    def _decay(self, step: int) -> float:
        return (step - self.total + 1) / self.decay_step_size if self.decay_step_size else 0.0


@dataclass(frozen=True, kw_only=True)
class WarmupLR(_Rate):
    """lr = min + (max - min) * g with g rising from 0 to 1 over W steps, then 1.

    For t < W: log g = ln(t + 1) / ln(W), linear g = t / W. W is at least 2. `warmup_max_lr` None is the base rate.
    """

    warmup_min_lr: float = 0.0
    warmup_max_lr: float | None = None
    warmup_num_steps: int = 1000
    warmup_type: Literal["log", "linear"] = "log"

    def __post_init__(self) -> None:
        _at_least(1, warmup_num_steps=self.warmup_num_steps)

    def lr(self, step: int, base_lr: float) -> float:
        top = base_lr if self.warmup_max_lr is None else self.warmup_max_lr
        share = warmup(_checked(step), self.warmup_num_steps, self.warmup_type)
        return self.warmup_min_lr + (top - self.warmup_min_lr) * share


@dataclass(frozen=True, kw_only=True)
class WarmupDecayLR(_Rate):
    """As WarmupLR while t < W; from there g = max(0, (total - t) / max(1, total - W))."""

    total_num_steps: int
    warmup_min_lr: float = 0.0
    warmup_max_lr: float | None = 1e-3
    warmup_num_steps: int = 1000
    warmup_type: Literal["log", "linear"] = "log"

    def __post_init__(self) -> None:
        _at_least(1, warmup_num_steps=self.warmup_num_steps, total_num_steps=self.total_num_steps)

    def lr(self, step: int, base_lr: float) -> float:
        top = base_lr if self.warmup_max_lr is None else self.warmup_max_lr
        steps = warmup_steps(self.warmup_num_steps)
        if _checked(step) < steps:
            share = warmup(step, self.warmup_num_steps, self.warmup_type)
        else:
            share = max(0.0, (self.total_num_steps - step) / max(1, self.total_num_steps - steps))
        return self.warmup_min_lr + (top - self.warmup_min_lr) * share


@dataclass(frozen=True, kw_only=True)
class WarmupCosineLR(_Rate):
    """lr = base * ratio.

    For t < W: ratio = min_ratio + (1 - min_ratio) * g with g as in WarmupLR. From there, with
    p = min(1, (t - W + 1) / max(1, total - W)): ratio = cos_min + (1 - cos_min) * (1 + cos(pi * p)) / 2.
    """

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 1e-4
    warmup_type: Literal["log", "linear"] = "log"

    def __post_init__(self) -> None:
        _at_least(1, warmup_num_steps=self.warmup_num_steps, total_num_steps=self.total_num_steps)

    def lr(self, step: int, base_lr: float) -> float:
        steps = warmup_steps(self.warmup_num_steps)
        if _checked(step) < steps:
            share = warmup(step, self.warmup_num_steps, self.warmup_type)
            return base_lr * (self.warmup_min_ratio + (1 - self.warmup_min_ratio) * share)
        progress = min(1.0, (step - steps + 1) / max(1, self.total_num_steps - steps))
        return base_lr * (self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def warmup_steps(configured: int) -> int:
    """W of the formulas: at least 2, since ln(W) divides."""
    return max(2, configured)


def warmup(step: int, configured: int, shape: Literal["log", "linear"]) -> float:
    """g of the formulas: 0 at step 0, 1 from step W on."""
    steps = warmup_steps(configured)
    if step >= steps:
        return 1.0
    return math.log(step + 1) / math.log(steps) if shape == "log" else step / steps


def _checked(step: int) -> int:
    if step < 0:
        raise ValueError(f"step is {step}; optimizer steps are counted from 0")
    return step


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


# ---------------------------------------------------------------------------------------------------------- schedules


class Schedule(ABC):
    """What sets the learning rate of parameter groups before each optimizer step.

        schedule.apply(step)      # step: how many optimizer steps have been taken
        optimizer.step()

    `apply` may be called again with the same step (it was skipped), and with any step after a resume.
    """

    optimizer: torch.optim.Optimizer

    @abstractmethod
    def apply(self, step: int) -> None:
        """Set the parameter groups for optimizer step `step` (the first is 0)."""

    @abstractmethod
    def require_new_groups(self) -> None:
        """Refuse parameter groups that are added later, where the schedule can't follow.

        Raises:
            ValueError: it can't.
        """

    def lrs(self) -> list[float]:
        """The learning rates now in the parameter groups."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON values."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state that `state_dict` gave.

        Raises:
            ValueError: the state is of another kind of schedule, or of another number of parameter groups.
        """


class FormulaSchedule(Schedule):
    """A formula written into the parameter groups of an optimizer. It has no state: the step says everything.

    Momentum, where the formula has one, goes into `betas` (as beta1, with beta2 at 0.99 as in the standard) or into
    `momentum` where that is above 0; groups with neither keep what they have.

    After a resume the configuration in force decides: a checkpoint with other base rates is mentioned in the log, and
    not followed.
    """

    BETA2 = 0.99

    def __init__(self, formula: Formula, optimizer: torch.optim.Optimizer) -> None:
        self.formula = formula
        self.optimizer = optimizer
        self.base_lrs: tuple[float, ...] = ()
        self.step = -1
        """The last step applied; -1 before the first."""
        self._moved: tuple[bool, ...] = ()
        self._take_groups()
        if formula.momentum(0) is not None and not any(self._moved):
            _LOG.warning("the schedule moves momentum, and the optimizer has none: only the learning rate is moved")

    def require_new_groups(self) -> None:
        """Any may come."""

    def _take_groups(self) -> None:
        """Start from the rates of groups that are new."""
        new = self.optimizer.param_groups[len(self.base_lrs) :]
        moves = self.formula.momentum(0) is not None
        self.base_lrs += tuple(float(group.get("initial_lr", group["lr"])) for group in new)
        self._moved += tuple(moves and _has_momentum(group) for group in new)

    def apply(self, step: int) -> None:
        self._take_groups()
        momentum = self.formula.momentum(step)
        for group, base, moved in zip(self.optimizer.param_groups, self.base_lrs, self._moved, strict=True):
            _set_lr(group, self.formula.lr(step, base))
            if moved and "betas" in group:
                group["betas"] = (momentum, self.BETA2)
            elif moved:
                group["momentum"] = momentum
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        self._take_groups()
        return {"kind": type(self.formula).__name__, "step": self.step, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._take_groups()
        _check_state(state, type(self.formula).__name__, len(self.base_lrs))
        if tuple(state["base_lrs"]) != self.base_lrs:
            _LOG.warning(
                "the checkpoint has base learning rates %s; the configuration in force has %s and is followed",
                state["base_lrs"],
                list(self.base_lrs),
            )
        if state["step"] >= 0:
            self.apply(state["step"])


class TorchSchedule(Schedule):
    """A scheduler of torch, held to the same rule.

    The learning rate at step i is the one that the plain loop `optimizer.step(); scheduler.step()` uses at its i-th
    step, bit for bit. Schedulers of torch are recursive, so one is stepped exactly i times; for an earlier step than
    the last, and after a resume, it is set back to its start and stepped again. ReduceLROnPlateau, which follows a
    metric and can't be replayed, keeps its state in the checkpoint instead.

    Args:
        scheduler: made for `optimizer`; one that was made for another optimizer, with as many groups, is followed.
        optimizer: whose parameter groups are set.
        metric: ReduceLROnPlateau only: gives the value that it watches, once for each step after the first.

    Raises:
        TypeError: not a scheduler of torch.
        ValueError: ReduceLROnPlateau without a metric; a scheduler made for another number of groups.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizer: torch.optim.Optimizer,
        *,
        metric: Callable[[], float] | None = None,
    ) -> None:
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                f"expected a torch.optim.lr_scheduler.LRScheduler, found {type(scheduler).__name__}; "
                "a formula of your own goes into LambdaLR"
            )
        follows = isinstance(scheduler, ReduceLROnPlateau)
        if follows and metric is None:
            raise ValueError(
                "ReduceLROnPlateau follows a metric, and none is given: pass metric=, a function that returns the "
                "value to watch, or use a schedule of steps"
            )
        groups, own = len(optimizer.param_groups), len(scheduler.optimizer.param_groups)
        if groups != own:
            raise ValueError(
                f"the scheduler was made for {own} parameter groups, and the optimizer has {groups}; make it for this "
                "optimizer, or pass a function that makes it from the optimizer"
            )
        self.scheduler = scheduler
        self.optimizer = optimizer
        self.metric = metric if follows else None
        self.step = int(getattr(scheduler, "last_epoch", 0))
        """Where the scheduler stands: the step whose learning rate it has set."""
        self._start_step = self.step
        self._start = copy.deepcopy((scheduler.state_dict(), self._settings()))
        self._set = self._settings()
        self._follow()

    def apply(self, step: int) -> None:
        if _checked(step) < self.step:
            self._check_replay(step)
            self._reset()
        else:
            self._write(self._set)  # a loaded optimizer brings rates of its own, from which torch would go on
        while self.step < step:
            self._advance()
        self._set = self._settings()
        self._follow()

    def state_dict(self) -> dict[str, Any]:
        state = {"kind": type(self.scheduler).__name__, "step": self.step, "lrs": self.lrs()}
        if self.metric is not None:
            inner = self.scheduler.state_dict()
            state["watched"] = {k: v for k, v in inner.items() if isinstance(v, bool | int | float | str | None)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        groups = self.scheduler.optimizer.param_groups
        _check_state(state, type(self.scheduler).__name__, len(groups))
        if self.metric is None:
            self._check_replay(state["step"])
            self._reset()
            self.apply(state["step"])
            return
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), **state["watched"]})
        for group, rate in zip(groups, state["lrs"], strict=True):
            _set_lr(group, rate)
        self.step = state["step"]
        self._set = self._settings()
        self._follow()

    def require_new_groups(self) -> None:
        raise ValueError(
            f"a {type(self.scheduler).__name__} of torch moves the learning rates, and knows only the parameter groups "
            "that it was made for; add new parameters to one of these (engine.adopt() without settings does), or name "
            "a schedule in the configuration"
        )

    def _check_replay(self, step: int) -> None:
        if self.metric is not None:
            raise ValueError(
                f"the scheduler follows a metric and stands at step {self.step}; it can't go back to step {step}. "
                "Load the checkpoint of that step instead"
            )
        if step < self._start_step:
            raise ValueError(f"the scheduler was given at step {self._start_step}, so it has no rate for step {step}")

    def _reset(self) -> None:
        state, settings = copy.deepcopy(self._start)
        self.scheduler.load_state_dict(state)
        self._write(settings)
        self.step = self._start_step

    def _write(self, settings: list[dict[str, Any]]) -> None:
        for group, values in zip(self.scheduler.optimizer.param_groups, settings, strict=True):
            group.update({name: value for name, value in values.items() if name != "lr"})
            _set_lr(group, values["lr"])

    def _advance(self) -> None:
        # torch warns when a scheduler is stepped before its optimizer, which happens here while steps are replayed.
        setattr(self.scheduler.optimizer, "_opt_called", True)  # noqa: B010
        if isinstance(self.scheduler, ReduceLROnPlateau):
            assert self.metric is not None
            self.scheduler.step(self.metric())
        else:
            self.scheduler.step()
        self.step += 1

    def _follow(self) -> None:
        """Bring what the scheduler has set into the optimizer, where that is another than its own."""
        if self.scheduler.optimizer is self.optimizer:
            return
        for target, values in zip(self.optimizer.param_groups, self._settings(), strict=True):
            for name in _MOVED & target.keys() & values.keys():
                target[name] = values[name]
            _set_lr(target, values["lr"])

    def _settings(self) -> list[dict[str, Any]]:
        """What schedulers write into the groups, besides parameters."""
        names = _MOVED | _KEPT
        groups = self.scheduler.optimizer.param_groups
        return [{"lr": float(group["lr"]), **{name: group[name] for name in names & group.keys()}} for group in groups]


_MOVED = frozenset({"betas", "momentum"})
"""Settings of a group besides `lr` that schedulers of torch change from step to step."""
_KEPT = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
"""Settings of a group in which schedulers of torch keep notes."""


# ----------------------------------------------------------------------------------------------------------- building

FORMULAS: Mapping[str, Callable[..., Formula]] = MappingProxyType(
    {
        "LRRangeTest": LRRangeTest,
        "OneCycle": OneCycle,
        "WarmupLR": WarmupLR,
        "WarmupDecayLR": WarmupDecayLR,
        "WarmupCosineLR": WarmupCosineLR,
    }
)
"""Type in the configuration to formula."""


def build_schedule(
    section: Scheduler | None,
    optimizer: torch.optim.Optimizer,
    given: LRScheduler | MakeScheduler | None = None,
    *,
    metric: Callable[[], float] | None = None,
) -> Schedule | None:
    """The schedule for an optimizer, or None when nothing asks for one.

    Args:
        section: `scheduler` of the configuration.
        optimizer: before its first step; the learning rates of its groups are the base rates.
        given: a scheduler of torch, or a function that makes one from the optimizer. It takes the section's place.
        metric: what ReduceLROnPlateau watches.

    Raises:
        TypeError: `given` is, or makes, something else than a scheduler of torch.
        ValueError: a type that neither this module nor torch has, wrong arguments, ReduceLROnPlateau without a metric.
    """
    if given is not None:
        made = given if isinstance(given, LRScheduler) or not callable(given) else given(optimizer)
        return TorchSchedule(made, optimizer, metric=metric)
    if section is None:
        return None
    if section.native is not None:
        return FormulaSchedule(FORMULAS[section.native.name](**section.arguments()), optimizer)
    found = getattr(torch.optim.lr_scheduler, section.type, None)
    if not (isinstance(found, type) and issubclass(found, LRScheduler)):
        raise ValueError(
            f"scheduler.type is {section.type!r}; it must be one of {', '.join(FORMULAS)}, or the name of a class in "
            "torch.optim.lr_scheduler"
        )
    try:
        made = found(optimizer, **section.arguments())
    except TypeError as error:
        raise ValueError(f"scheduler.params does not fit torch's {section.type}: {error}") from error
    return TorchSchedule(made, optimizer, metric=metric)


def preview(section: Scheduler, base_lr: float, steps: Sequence[int]) -> list[float]:
    """The learning rates that a configuration comes to at some optimizer steps, without an optimizer of one's own."""
    stand_in = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=base_lr)
    schedule = build_schedule(section, stand_in)
    assert schedule is not None
    rates = []
    for step in steps:
        schedule.apply(step)
        rates += schedule.lrs()
    return rates


def _has_momentum(group: ParamGroup) -> bool:
    return "betas" in group or bool(group.get("momentum"))


def _set_lr(group: ParamGroup, rate: float) -> None:
    """Write a learning rate, into the tensor where it is one (captured graphs read it there)."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _check_state(state: Mapping[str, Any], kind: str, groups: int) -> None:
    if state.get("kind") != kind:
        raise ValueError(
            f"the checkpoint holds the state of the schedule {state.get('kind')!r}, and this run has {kind!r}; use the "
            "same scheduler, or load without the schedule"
        )
    saved = state["base_lrs"] if "base_lrs" in state else state["lrs"]
    if len(saved) != groups:
        raise ValueError(
            f"the checkpoint's schedule has {len(saved)} parameter groups, and this optimizer {groups}; pass the same "
            "groups, or load without the schedule"
        )

"""A sharded module compiled: its communication is placed in the graphs of forward and backward, not in hooks.

    compiled = compile_sharded(sharded, CompileOptions(backend="eager"))
    loss = sharded.module(batch)                               # captured at the first call
    print(compiled.report)

The problem: hooks know of a module when it is called, so they can neither send for parameters in the middle of what came
before, nor know how much memory there will be. The idea (DeepCompile, Tanaka et al., arXiv:2504.09983): let torch
capture the whole forward pass, and the backward pass with it, put the gathers into these graphs, measure a few runs, and
then plan: how far ahead each gather starts, and which parameters stay whole for the rest of a step.

Ranks must not drift apart: they compile on their own, when the shapes of their own inputs ask for it. So

- every forward pass begins with a handshake of a few bytes. Each rank says which agreed plan its graph goes by, that it
  has a graph which no plan covers, or that it has none. In the first case all go on; in the second they agree on a new
  plan, in the third all go back to hooks, for good, before anything was sent.
- a plan is what all ranks must do alike: which buckets, in which order, and which are kept. Where each rank puts the
  events in its own graph is its own affair.

Gradients go the way that they always go: into their buckets as soon as they are whole, and from there to their owners in
the reducer's order.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, Literal

import torch
from torch import fx

from drivetrain.comm import all_gather_object, all_reduce
from drivetrain.zero.api import ShardedModule
from drivetrain.zero.gathers import BackwardGathers, Gathers
from drivetrain.zero.graph import internals
from drivetrain.zero.graph.internals import UnsupportedGraphError
from drivetrain.zero.graph.keep import Run, choose_kept, keep, occupancy
from drivetrain.zero.graph.prefetch import Costs, prefetch
from drivetrain.zero.graph.profile import Profile, ProfilingRun, no_profile
from drivetrain.zero.graph.reads import Groups
from drivetrain.zero.graph.rewrite import Actions, Place, ReadGraph
from drivetrain.zero.graph.schedule import Schedule, check, on_demand, spans

log = logging.getLogger("drivetrain.zero")

NO_PLAN, NO_GRAPH = 1 << 30, 1 << 31
"""What a rank says in a handshake instead of the number of a plan."""
PREFETCH_NUMEL = 50_000_000
"""Elements sent for ahead of need, where the policy names none."""
UNBOUNDED = 1 << 62


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """How a sharded module is compiled.

    Attributes:
        backend: ``eager`` runs the graphs operation by operation, and gives the bits that hooks give; ``inductor``
            compiles what lies between the communication.
        dynamic: as for ``torch.compile``: None compiles for other shapes once they come, True at once, False one
            version for each.
        budget_bytes: the most bytes of whole parameters (those that are released) at any moment, as long as what is
            needed at once fits; None goes by the policy's ``max_live_numel`` and by the memory that is free.
        profiled_calls: forward passes of training that are measured, after the one that compiles, before planning.
        synchronous: wait for every gather where it starts: to find faults, not to train.
    """

    backend: Literal["eager", "inductor"] = "inductor"
    dynamic: bool | None = None
    budget_bytes: int | None = None
    profiled_calls: int = 2
    synchronous: bool = False

    def __post_init__(self) -> None:
        if self.backend not in ("eager", "inductor"):
            raise ValueError(f'backend must be "eager" or "inductor", got {self.backend!r}')
        if self.profiled_calls < 1:
            raise ValueError(f"profiled_calls must be at least 1, got {self.profiled_calls}")


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What became of compiling, on this rank, so far.

    Attributes:
        state: ``waiting`` for the first call, ``measuring``, ``planned``, or ``hooks``: fell back.
        reason: why it fell back.
        graphs: forward graphs captured so far: one for each kind of input.
        gathers: buckets fetched in a forward and in a backward pass of training.
        kept: parameters that stay whole for the rest of a step, by the first name in each bucket.
        ahead: gathers that start before the node that waits for them, forward and backward.
        budget_bytes: the most bytes of whole parameters that were allowed; None without a bound.
        planned_bytes: the most that the plan comes to.
        peak_bytes: the most that there were since it was made.
    """

    state: Literal["waiting", "measuring", "planned", "hooks"]
    reason: str | None
    graphs: int
    gathers: tuple[int, int]
    kept: tuple[str, ...]
    ahead: tuple[int, int]
    budget_bytes: int | None
    planned_bytes: int
    peak_bytes: int


Needs = tuple[Groups, Groups]
"""Buckets that a graph reads in forward and in backward."""


@dataclass(kw_only=True)
class _Plan:
    """What all ranks agreed on for graphs with the same needs."""

    number: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    kept: frozenset[int] = frozenset()
    calls: int = 0
    final: bool = False


@dataclass(kw_only=True)
class _Side:
    """A forward or a backward graph of one variant, and the program that runs it."""

    graph: ReadGraph
    actions: Actions
    profile: Profile | None = None
    schedule: Schedule = ()
    module: fx.GraphModule | None = None
    positions: Mapping[str, int] = field(default_factory=dict)
    program: Callable[[list[Any]], Any] | None = None

    @property
    def measured(self) -> Profile:
        return self.profile or no_profile(self.graph.operations)

    def write(self, schedule: Schedule) -> None:
        check(schedule, self.graph.reads)
        self.schedule = schedule
        self.module, self.positions = self.graph.write(schedule, self.actions)
        self.program = internals.boxed(self.module)


class _FallBackError(Exception):
    """All ranks go back to hooks; nothing of the forward pass has run."""


class _Variant:
    """One captured forward pass, for one kind of input, with its backward pass if it has one."""

    def __init__(self, owner: CompiledModule, places: Sequence[Place | None]) -> None:
        self._owner = owner
        self._places = places
        self._fetched: dict[str, Place] = {}
        self.forward: _Side | None = None
        self.backward: _Side | None = None
        self.plan: tuple[int, frozenset[int]] | None = None  # what the programs were made for
        self.calls = 0
        self.measuring = False

    # built by AOTAutograd ---------------------------------------------------------------------------------------------

    def compile_forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Read a forward graph; it runs once ranks have agreed on a plan."""
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        if len(names) != len(self._places):
            raise UnsupportedGraphError(f"it has {len(names)} inputs where {len(self._places)} were captured")
        for name, place in zip(names, self._places, strict=True):
            if place is not None and self._owner.splits(place):
                self._fetched[name] = place
        self.forward = _Side(graph=ReadGraph(module, self._fetched), actions=self._owner.forward_actions)
        return self._run_forward

    def compile_backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """Read a backward graph."""
        takes = [place if place is not None and self._owner.trains(place) else None for place in self._places]
        graph = ReadGraph(module, self._fetched, takes)
        self.backward = _Side(graph=graph, actions=self._owner.backward_actions)
        return self._run_backward

    def _run_forward(self, args: list[Any]) -> Any:
        self._owner.enter(self)
        assert self.forward is not None
        return self._run(self.forward, args)

    def _run_backward(self, args: list[Any]) -> Any:
        assert self.backward is not None
        return self._run(self.backward, args)

    def _run(self, side: _Side, args: list[Any]) -> Any:
        assert side.program is not None
        assert side.module is not None
        if not self.measuring:
            return side.program(args)
        owner = self._owner
        run = ProfilingRun(side.module, side.positions, owner.bucket_storages, owner.device)
        owner.gathers.timed = True
        try:
            result = run.run_list(args)
        finally:
            owner.gathers.timed = False
        side.profile = run.profile.merged(side.profile)
        return result

    # planned ----------------------------------------------------------------------------------------------------------

    @property
    def sides(self) -> list[_Side]:
        return [side for side in (self.forward, self.backward) if side is not None]

    def order(self, backward: bool) -> list[int]:
        """The buckets that it reads, in the order of first readers."""
        side = self.backward if backward else self.forward
        return [] if side is None else list(spans(side.graph.reads))

    @property
    def needs(self) -> Needs:
        return frozenset(self.order(False)), frozenset(self.order(True))


class CompiledModule:
    """Takes the place of a sharded module's forward. Made by `compile_sharded`."""

    def __init__(self, sharded: ShardedModule, options: CompileOptions) -> None:
        self._sharded = sharded
        self._options = options
        self._module = sharded.module
        self._replaced = self._module.__dict__.get("forward")
        self._forward: Callable[..., Any] = self._module.forward
        self.device = sharded.axis.device
        self.gathers = Gathers(sharded.units, sharded.parameters, synchronous=options.synchronous)
        self.forward_actions: Actions = _ForwardActions(self.gathers)
        hooks = sharded.hooks
        self.backward_actions: Actions = BackwardGathers(
            self.gathers, hooks.backward.enter, self._take, lambda: sharded.closes_step
        )
        self._places = {
            id(slot.parameter): Place(number, index)
            for number, bucket in enumerate(sharded.buckets)
            for index, slot in enumerate(bucket.slots)
        }
        trainable = [number for number, bucket in enumerate(sharded.buckets) if bucket.trainable]
        self._lanes = {number: lane for lane, number in enumerate(trainable)}
        self.bucket_storages = frozenset(bucket.full.untyped_storage()._cdata for bucket in sharded.buckets)
        self._reason: str | None = None
        self._variants: list[_Variant] = []
        self._plans: list[_Plan] = []
        self._plan_of: dict[Needs, int] = {}
        self._agreed = False  # the handshake of this call is done
        self._calls_in_step = 0
        self._accumulates = False
        self._compiled: Callable[..., Any] | None = None
        self._last: _Variant | None = None

    def install(self) -> None:
        """Put it in place of the module's forward, and the module's hooks to rest."""
        self._compiled = internals.compile_whole(self._forward, self._capture, dynamic=self._options.dynamic)
        self._sharded.residency.release_all()
        self._sharded.residency.others.append(self._release_all)
        self._sharded.hooks.suspend()
        self._module.__dict__["forward"] = _like(self._forward, self)

    def splits(self, place: Place) -> bool:
        """Whether a parameter must be fetched."""
        return not self._sharded.buckets[place.group].resident

    def trains(self, place: Place) -> bool:
        return self._sharded.buckets[place.group].trainable

    def _take(self, group: int, slot: int, gradient: torch.Tensor) -> None:
        sharded = self._sharded
        sharded.hooks.backward.enter()
        sharded.reducer.take(self._lanes[group], slot, gradient, reduces=sharded.reduces())

    def _release_all(self) -> None:
        self._calls_in_step = 0
        self.gathers.release_all()

    # one call ---------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        assert self._compiled is not None
        self._agreed = False
        live = [unit for unit in self._sharded.units if unit.live and not unit.resident]
        for bucket in (bucket for unit in live for bucket in unit.buckets):
            bucket.detach()
        try:
            result = self._call(args, kwargs)
            if self._agreed:
                return result
            # Nothing was captured, so that what ran has read placeholders.
            self._give_up("torch.compile captured nothing (is it switched off?)")
        except _FallBackError:
            pass
        except BaseException:
            self.gathers.release_all()
            raise
        finally:
            for bucket in (bucket for unit in live for bucket in unit.buckets):
                bucket.attach()
        self._fall_back()
        self._sharded.hooks.enter_root(args, kwargs)
        return self._forward(*args, **kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._compiled is not None
        self._sharded.residency.held = True  # until the step, which releases all
        try:
            return self._compiled(*args, **kwargs)
        except internals.compile_errors() as error:
            if self._agreed:
                raise
            self._give_up(internals.reason_of(error))

    def _capture(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend of torch.compile."""
        places = [self._places.get(id(value)) if isinstance(value, torch.Tensor) else None for value in inputs]
        variant = _Variant(self, places)
        split = [i for i, place in enumerate(places) if place is not None and self.splits(place)]
        lowered = internals.lower(
            module,
            inputs,
            split,
            forward=variant.compile_forward,
            backward=variant.compile_backward,
            inference=variant.compile_forward,
        )
        self._variants.append(variant)
        return lowered

    # agreement --------------------------------------------------------------------------------------------------------

    def enter(self, variant: _Variant) -> None:
        """A forward graph is about to run: agree with all ranks on what they do, and be ready for it."""
        training = variant.backward is not None
        plan = self._common_plan(variant)
        if training:
            plan.calls += 1
            self._calls_in_step += 1
            self._accumulates |= self._calls_in_step > 1
            if not plan.final and plan.calls > 1 + self._options.profiled_calls:
                self._decide(plan)
        self._last = variant
        self._prepare(variant, plan)

    def _common_plan(self, variant: _Variant) -> _Plan:
        mine = self._plan_of.get(variant.needs, NO_PLAN)
        most, least = self._handshake(mine)
        if most == NO_GRAPH:
            self._exchange_reasons(None)
        if most == NO_PLAN or most != least:
            self._agree_on_plan(variant)
            mine = self._plan_of[variant.needs]
        return self._plans[mine]

    def _handshake(self, mine: int) -> tuple[int, int]:
        """The largest and the smallest of what the ranks say."""
        self._agreed = True
        said = torch.tensor([mine, -mine], dtype=torch.int64, device=self.device)
        all_reduce(said, self._sharded.ranks.everyone, op="max").wait()
        most, negated = said.tolist()
        return most, -negated

    def _give_up(self, reason: str) -> None:
        if not self._agreed:
            self._handshake(NO_GRAPH)
        self._exchange_reasons(reason)

    def _exchange_reasons(self, mine: str | None) -> None:
        everyone = self._sharded.ranks.everyone
        reasons = all_gather_object(mine, everyone)
        rank = next(rank for rank, reason in enumerate(reasons) if reason is not None)
        alone = sum(reason is not None for reason in reasons) < len(reasons)
        self._reason = f"rank {everyone.ranks[rank]}: {reasons[rank]}" if alone else reasons[rank]
        raise _FallBackError

    def _agree_on_plan(self, variant: _Variant) -> None:
        """One plan for the graphs of all ranks: rank 0's order, then what others need besides."""
        orders = all_gather_object((variant.order(False), variant.order(True)), self._sharded.ranks.everyone)
        forward = tuple(dict.fromkeys(group for order, _ in orders for group in order))
        backward = tuple(dict.fromkeys(group for _, order in orders for group in order))
        needs = (frozenset(forward), frozenset(backward))
        number = self._plan_of.get(needs)
        if number is None:
            number = len(self._plans)
            self._plans.append(_Plan(number=number, forward=forward, backward=backward))
        for own_forward, own_backward in orders:
            self._plan_of[frozenset(own_forward), frozenset(own_backward)] = number
        self._plan_of[needs] = number

    def _fall_back(self) -> None:
        """Hooks again, from the middle of a call of the module on."""
        sharded = self._sharded
        sharded.residency.release_all()
        sharded.residency.others.remove(self._release_all)
        if self._replaced is None:
            del self._module.__dict__["forward"]
        else:
            self._module.__dict__["forward"] = self._replaced
        sharded.hooks.resume()
        if sharded.axis.world.rank == 0:
            log.warning("compiling was given up, parameters are gathered by hooks: %s", self._reason)

    # planning ---------------------------------------------------------------------------------------------------------

    def _prepare(self, variant: _Variant, plan: _Plan) -> None:
        """Programs that do what ``plan`` says."""
        wanted = (plan.number, plan.kept)
        variant.calls += 1
        profiled = self._options.profiled_calls
        variant.measuring = variant.backward is not None and 1 < variant.calls <= 1 + profiled
        if variant.plan != wanted or variant.calls == 2 + profiled:
            variant.plan = wanted
            for side, order in zip(variant.sides, (plan.forward, plan.backward), strict=False):
                side.write(self._scheduled(side, order, plan.kept))

    def _scheduled(self, side: _Side, order: Sequence[int], kept: frozenset[int]) -> Schedule:
        sizes, measured = self.gathers.sizes(), side.measured
        nodes = len(side.graph.operations)
        plain = on_demand(side.graph.reads, order)
        run = self._run_of(side, plain)
        schedule = keep(plain, kept, nodes)
        held = occupancy(run, sizes, kept)
        counted = _live(schedule, sizes, nodes)
        ahead = self._sharded.policy.prefetch_numel
        costs = Costs(
            sizes=sizes,
            gather_seconds={} if side.profile is None else self.gathers.seconds,
            node_seconds=measured.seconds,
            budget=[most - (all_held - seen) for most, all_held, seen in zip(run.budget, held, counted, strict=True)],
            ahead=(PREFETCH_NUMEL if ahead is None else ahead) * self._itemsize(),
        )
        return prefetch(schedule, costs)

    def _itemsize(self) -> int:
        return max((bucket.full.element_size() for bucket in self._sharded.buckets if not bucket.resident), default=1)

    def _run_of(self, side: _Side, schedule: Schedule) -> Run:
        bound = self._bound()
        return Run(
            schedule=schedule,
            budget=[bound] * len(side.graph.operations),
            backward=side.graph.backward,
            accumulates=self._accumulates,
        )

    def _bound(self) -> int:
        if self._options.budget_bytes is not None:
            return self._options.budget_bytes
        most = self._sharded.policy.max_live_numel
        return UNBOUNDED if most is None else most * self._itemsize()

    def _decide(self, plan: _Plan) -> None:
        """All ranks know what gathers cost: agree on what to keep."""
        everyone = self._sharded.ranks.everyone
        seconds: dict[int, float] = {}
        for measured in all_gather_object(self.gathers.seconds, everyone):
            for group, value in measured.items():
                seconds[group] = max(value, seconds.get(group, 0.0))
        runs = [
            self._run_of(side, on_demand(side.graph.reads, order))
            for variant in self._variants
            if variant.plan is not None and variant.plan[0] == plan.number
            for side, order in zip(variant.sides, (plan.forward, plan.backward), strict=False)
        ]
        useful = plan.forward if self._accumulates else [g for g in plan.forward if g in plan.backward]
        mine = choose_kept(runs, self.gathers.sizes(), seconds, useful)
        votes = all_gather_object(mine, everyone)
        plan.kept = frozenset(votes[0]).intersection(*votes)
        plan.final = True
        self.gathers.seconds.update(seconds)
        self.gathers.peak_bytes = self.gathers.live_bytes

    # telling ----------------------------------------------------------------------------------------------------------

    @property
    def report(self) -> CompileReport:
        """What became of it so far."""
        plan = self._plans[self._plan_of[self._last.needs]] if self._last and self._reason is None else None
        state: Literal["waiting", "measuring", "planned", "hooks"] = "waiting"
        if self._reason is not None:
            state = "hooks"
        elif plan is not None:
            state = "planned" if plan.final else "measuring"
        kept = plan.kept if plan else frozenset()
        sides = self._last.sides if self._last and plan else []
        ahead = [sum(f.start < f.first for f in side.schedule) for side in sides] + [0, 0]
        bound = self._bound()
        return CompileReport(
            state=state,
            reason=self._reason,
            graphs=len(self._variants),
            gathers=(len(plan.forward), len(plan.backward)) if plan else (0, 0),
            kept=tuple(self._sharded.buckets[number].slots[0].name for number in sorted(kept)),
            ahead=(ahead[0], ahead[1]),
            budget_bytes=None if bound == UNBOUNDED else bound,
            planned_bytes=self._planned_bytes(kept),
            peak_bytes=self.gathers.peak_bytes,
        )

    def _planned_bytes(self, kept: frozenset[int]) -> int:
        sizes = self.gathers.sizes()
        return max(
            (
                max(occupancy(self._run_of(side, side.schedule), sizes, kept))
                for variant in self._variants
                for side in variant.sides
                if side.schedule
            ),
            default=0,
        )


def _live(schedule: Schedule, sizes: Mapping[int, int], nodes: int) -> list[int]:
    from drivetrain.zero.graph.schedule import live_bytes

    return live_bytes(schedule, sizes, nodes)


class _ForwardActions:
    """What nodes of forward graphs do."""

    def __init__(self, gathers: Gathers) -> None:
        self.start = gathers.start
        self.wait = gathers.wait
        self.release = gathers.release
        self.keep = gathers.keep

    def begin(self) -> None:
        """Nothing: forward has begun already."""

    def take(self, group: int, slot: int, gradient: torch.Tensor) -> None:
        """Never called: forward makes no gradients."""


def _like(forward: Callable[..., Any], compiled: CompiledModule) -> Callable[..., Any]:
    """``compiled`` as a function with the signature of ``forward``, which data loaders and trainers look at."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    update_wrapper(call, forward)
    call.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return torch.compiler.disable(call)  # type: ignore[no-any-return]


def compile_sharded(sharded: ShardedModule, options: CompileOptions | None = None) -> CompiledModule:
    """Compile a sharded module at its next forward pass, with its communication in the graphs. Collective.

    Every forward pass works as before, with the same results. What cannot be compiled as one graph goes on with hooks,
    on all ranks; `CompiledModule.report` says why.
    """
    compiled = CompiledModule(sharded, options or CompileOptions())
    compiled.install()
    return compiled

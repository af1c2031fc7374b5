"""A sharded module compiled: its communication is placed in the graphs of forward and backward, not in hooks.

    compiled = compile_sharded(sharded, CompileOptions(backend="eager"))
    loss = sharded.module(batch)                               # captured at the first call
    print(compiled.report)

The problem: hooks know of a module when it is called, so they can neither send for parameters in the middle of what
came before, nor know how much memory there will be. The idea (DeepCompile, Tanaka et al., arXiv:2504.09983): let torch
capture the whole forward pass, and the backward pass with it, put the gathers into these graphs, measure a few runs,
and then plan: how far ahead each gather starts, and which parameters stay whole for the rest of a step.

What ranks do alike is a `Plan`, agreed on before anything of a forward pass runs (see `plans`): which buckets, in which
order, and which are kept. Where a rank puts these events in its own graph is its own affair. If any rank has no graph,
all go back to hooks, for good, and the report says why.

Gradients go the way that they always go: into their buckets as soon as they are whole, and from there to their owners
in the reducer's order. The parameters themselves stay placeholders: readers in the graph are given whole tensors.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, update_wrapper
from typing import Any, Literal

import torch
from torch import fx
from torch.utils.hooks import RemovableHandle

from drivetrain.comm import all_gather_object
from drivetrain.zero.api import ShardedModule
from drivetrain.zero.gathers import NOWHERE, BackwardGathers, ForwardGathers, Gathers, Synchronous, wait_for
from drivetrain.zero.graph import internals
from drivetrain.zero.graph.internals import UnsupportedGraphError
from drivetrain.zero.graph.keep import choose_kept
from drivetrain.zero.graph.pieces import in_pieces
from drivetrain.zero.graph.planner import UNBOUNDED, Memory, Task, plan
from drivetrain.zero.graph.program import Program
from drivetrain.zero.graph.rewrite import Place, ReadGraph
from drivetrain.zero.graph.schedule import spans
from drivetrain.zero.hooks import tensors_in
from drivetrain.zero.plans import GiveUpError, Plan, Plans, Reading

log = logging.getLogger("drivetrain.zero")

PREFETCH_NUMEL = 50_000_000
"""Elements sent for ahead of need, where the policy names none."""
SPARED = 0.9
"""The part of the device's free memory that plans use: allocators lose some to gaps, and steps differ."""

State = Literal["waiting", "measuring", "planned", "hooks"]
Ops = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """How a sharded module is compiled.

    Attributes:
        backend: ``eager`` runs the graphs operation by operation, and gives the bits that hooks give; ``inductor``
            compiles what lies between the communication.
        dynamic: as for ``torch.compile``: None compiles for other shapes once they come, True at once, False one
            version for each.
        budget_bytes: the most bytes of whole parameters (of those that are let go) at any moment, as long as what is
            needed at once fits; None goes by the policy's ``max_live_numel``. On CUDA, free memory bounds them too.
        measured_calls: forward passes that are measured, after the one that compiles, before planning.
        synchronous: where to wait for communication; to find faults, not to train.
        tell: log each plan.
    """

    backend: Literal["eager", "inductor"] = "inductor"
    dynamic: bool | None = None
    budget_bytes: int | None = None
    measured_calls: int = 2
    synchronous: Synchronous = NOWHERE
    tell: bool = False

    def __post_init__(self) -> None:
        if self.backend not in ("eager", "inductor"):
            raise ValueError(f'the backend of compiling must be "inductor" or "eager", got {self.backend!r}')
        if self.measured_calls < 1:
            raise ValueError(f"measured_calls must be at least 1, got {self.measured_calls}")
        if self.budget_bytes is not None and self.budget_bytes < 0:
            raise ValueError(f"budget_bytes cannot be negative, got {self.budget_bytes}")


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What became of compiling, on this rank, so far. About the graphs of the last forward pass, but for the peaks.

    Attributes:
        state: ``waiting`` for the first forward pass, ``measuring``, ``planned``, or back to ``hooks``.
        reason: why it went back to hooks.
        graphs: forward passes captured so far: one for each kind of input.
        gathers: buckets fetched in forward and in backward.
        ahead: those of them that are sent for ahead of need.
        kept: buckets that stay whole for the rest of a step, by their first parameter.
        budget_bytes: the most bytes of whole parameters that are allowed; None without a limit of that kind.
        planned_bytes: the most that the schedules in use come to.
        peak_bytes: the most that there were since the last plan.
    """

    state: State
    reason: str | None
    graphs: int
    gathers: tuple[int, int]
    ahead: tuple[int, int]
    kept: tuple[str, ...]
    budget_bytes: int | None
    planned_bytes: int
    peak_bytes: int


class _Variant:
    """One captured forward pass, for one kind of input, with its backward pass if it has one.

    Args:
        owner: what it belongs to.
        places: for each input of the graph, the parameter that it is, or None.
    """

    forward: Program
    backward: Program | None

    def __init__(self, owner: CompiledModule, places: Sequence[Place | None]) -> None:
        self._owner = owner
        self._places = places
        self._fetched: dict[str, Place] = {}
        self.backward = None
        self.calls = 0
        self.measuring = False
        self.made_for: tuple[Plan, frozenset[int], bool] | None = None

    def compile_forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Ops:
        """Read a forward graph; it runs once ranks have agreed on a plan."""
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        if len(names) != len(self._places):
            raise UnsupportedGraphError(f"the graph has {len(names)} inputs where {len(self._places)} were captured")
        pairs = zip(names, self._places, strict=True)
        self._fetched.update((name, place) for name, place in pairs if place and self._owner.splits(place))
        graph = self._owner.compile(ReadGraph(module, self._fetched))
        self.forward = Program(graph, self._owner.forward_actions)
        return self._run_forward

    def compile_backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Ops:
        """Read a backward graph."""
        takes = [place if place and self._owner.trains(place) else None for place in self._places]
        graph = self._owner.compile(ReadGraph(module, self._fetched, takes))
        self.backward = Program(graph, self._owner.backward_actions)
        return self._run_backward

    def _run_forward(self, args: list[Any]) -> Any:
        self._owner.enter(self)
        return self._run(self.forward, args)

    def _run_backward(self, args: list[Any]) -> Any:
        assert self.backward is not None
        self._owner.enter_backward(self)
        return self._run(self.backward, args)

    def _run(self, program: Program, args: list[Any]) -> Any:
        return self._owner.measure(program, args) if self.measuring else program.run(args)

    @property
    def programs(self) -> list[Program]:
        return [self.forward] if self.backward is None else [self.forward, self.backward]

    @cached_property
    def reading(self) -> Reading:
        """What it reads, for ranks to agree on."""
        forward = tuple(spans(self.forward.graph.reads))
        if self.backward is None:
            return Reading(forward=forward, backward=(), sequence="none")
        graph = self.backward.graph
        read = spans(graph.reads)
        # At one node, what is read arrives before it, and what it makes is there after it.
        events = [(first, 0, group) for group, (first, _) in read.items()]
        events += [(max(positions), 1, group) for group, positions in graph.made_at().items()]
        sequence = json.dumps([event[1:] for event in sorted(events)])
        return Reading(
            forward=forward, backward=tuple(read), sequence=hashlib.sha256(sequence.encode()).hexdigest()[:16]
        )


class CompiledModule:
    """Stands in for a sharded module's forward. Made by `compile_sharded`."""

    def __init__(self, sharded: ShardedModule, options: CompileOptions) -> None:
        self._sharded = sharded
        self._options = options
        self._module = sharded.module
        self._replaced = self._module.__dict__.get("forward")
        self._forward: Callable[..., Any] = self._module.forward
        self._gathers = Gathers(sharded.units, sharded.parameters, options.synchronous)
        self.forward_actions = ForwardGathers(self._gathers)
        self.backward_actions = BackwardGathers(
            self._gathers, sharded.hooks.backward.enter, self._take, lambda: sharded.closes_step
        )
        self._places = {
            id(slot.parameter): Place(number, index)
            for number, bucket in enumerate(sharded.buckets)
            for index, slot in enumerate(bucket.slots)
        }
        self._storages = frozenset(bucket.full.untyped_storage()._cdata for bucket in sharded.buckets)
        self._placeholders = frozenset(
            storage_of(slot.placeholder)
            for bucket in sharded.buckets
            for slot in bucket.slots
            if not bucket.resident and slot.numel
        )
        self._plans = Plans(sharded.ranks.everyone)
        self._variants: list[_Variant] = []
        self._last: tuple[_Variant, Plan] | None = None
        self._calling = False
        self._agreed = False  # with the other ranks, in this call
        self._passes_in_step = 0
        self._accumulates = False
        self._free = UNBOUNDED
        self._compiled: Callable[..., Any] | None = None
        self._handles: list[RemovableHandle] = []
        self._reason = internals.unsupported()
        if self._reason is None:
            self._install()
        else:
            self._tell_reason()

    def _leave(self, reason: str) -> None:
        """Hooks from here on: all ranks have agreed to it."""
        self._reason = reason
        self._tell_reason()
        self.remove()

    def _install(self) -> None:
        self._compiled = internals.compile_whole(self._forward, self._capture, dynamic=self._options.dynamic)
        self._sharded.residency.release_all()
        self._sharded.residency.others.append(self._release)
        self._sharded.hooks.suspend()
        self._module.__dict__["forward"] = _like(self._forward, self)
        split = [slot for bucket in self._sharded.buckets if not bucket.resident for slot in bucket.slots]
        owned = {id(slot.parameter) for slot in split}
        for name, module in self._module.named_modules():
            if module is not self._module and any(id(parameter) in owned for parameter in module.parameters()):
                hook = self._stray_call(name)
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))

    def _stray_call(self, name: str) -> Callable[[torch.nn.Module, Any, Any], tuple[Any, Any] | None]:
        """A part of the module is called by itself, where no graph brings in its parameters."""

        def before(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            if torch.compiler.is_compiling() or self._alone:
                return None
            if self._calling:  # it has run the module instead of compiling it
                self._plans.give_up("torch.compile is switched off")
            try:
                self._plans.give_up(f"'{name}' was called by itself, not by the forward pass of the whole module")
            except GiveUpError as error:
                self._leave(str(error))
            return self._sharded.hooks.enter_late(module, args, kwargs)

        return before

    def remove(self) -> None:
        """Hooks again."""
        if self._compiled is None:
            return
        self._compiled = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        sharded = self._sharded
        sharded.residency.release_all()
        sharded.residency.others.remove(self._release)
        if self._replaced is None:
            del self._module.__dict__["forward"]
        else:
            self._module.__dict__["forward"] = self._replaced
        sharded.hooks.resume()

    def _release(self) -> None:
        self._passes_in_step = 0
        self._gathers.release_all()

    def _tell_reason(self) -> None:
        if self._sharded.axis.world.rank == 0:
            log.warning("not compiled, hooks gather parameters: %s", self._reason)

    # what graphs are made of ------------------------------------------------------------------------------------------

    def splits(self, place: Place) -> bool:
        """Whether a parameter must be fetched."""
        return not self._sharded.buckets[place.group].resident

    def trains(self, place: Place) -> bool:
        """Whether a parameter's gradient is wanted, if there is one."""
        return self._sharded.buckets[place.group].trainable

    def compile(self, graph: ReadGraph) -> ReadGraph:
        """``graph``, its operations compiled if the backend does that."""
        return graph if self._options.backend == "eager" else in_pieces(graph, internals.compile_with_inductor)

    def _take(self, group: int, slot: int, gradient: torch.Tensor) -> None:
        sharded, synchronous = self._sharded, self._options.synchronous
        sharded.hooks.backward.enter()
        if synchronous.before_reduction:
            wait_for(gradient.device)
        gradient = sharded.hooks.backward.converted(gradient)
        lane = sharded.reducer.lane(sharded.buckets[group])
        sharded.reducer.take(lane, slot, gradient, reduces=sharded.reduces())
        if synchronous.after_reduction:
            sharded.reducer.drain()

    def measure(self, program: Program, args: list[Any]) -> Any:
        """Run ``program`` and measure it."""
        self._gathers.timed = True
        try:
            return program.measure(args, self._storages, self._sharded.axis.device)
        finally:
            self._gathers.timed = False

    # one forward pass -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if self._alone:
            return self._forward(*args, **kwargs)
        self._agreed, self._calling = False, True
        live = [unit for unit in self._sharded.units if unit.live and not unit.resident]
        shown = [bucket for unit in live for bucket in unit.buckets]
        for bucket in shown:  # or torch would compile anew for parameters that look different
            bucket.detach()
        try:
            return self._call(args, kwargs)
        except GiveUpError as error:
            reason = str(error)
        except BaseException:
            self._gathers.release_all()
            raise
        finally:
            self._calling = False
            for bucket in shown:
                bucket.attach()
        self._leave(reason)
        self._sharded.hooks.enter_late(self._module, args, kwargs)
        return self._forward(*args, **kwargs)

    @property
    def _alone(self) -> bool:
        """Nothing is needed from other ranks, which may not be making this pass: all is whole, and stays so."""
        return self._sharded.residency.all_pinned and not torch.is_grad_enabled()

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._compiled is not None
        self._sharded.residency.held = True  # what is kept stays, until the step releases all
        try:
            result = self._compiled(*args, **kwargs)
        except internals.compile_errors() as error:
            if self._agreed:
                raise
            self._plans.give_up(internals.reason_of(error))
        if not self._agreed:  # it ran, then, on placeholders, and nobody asked us
            self._plans.give_up("torch.compile captured no graph")
        self._check_result(result)
        return result

    def _check_result(self, result: object) -> None:
        """Refuse parameters, or views of them, among what the forward pass returns: they are placeholders."""
        found = next((t for t in tensors_in(result) if storage_of(t) in self._placeholders), None)
        complaint = None
        if found is not None:
            complaint = (
                "the forward pass returns a parameter that is split over ranks, or a view of it "
                f"({tuple(found.shape)}); return a copy"
            )
        if self._last is not None and self._last[1].calls == 1:
            self._plans.confirm(complaint)
        elif complaint is not None:
            raise RuntimeError(f"rank {self._sharded.axis.world.rank}: {complaint}, or train without compiling")

    def _capture(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend of torch.compile."""
        if next(module.parameters(), None) is not None:
            raise UnsupportedGraphError("torch captured parameters as constants (inline_inbuilt_nn_modules is off)")
        places = [self._places.get(id(value)) for value in inputs]
        variant = _Variant(self, places)
        lowered = internals.lower(
            module,
            inputs,
            [index for index, place in enumerate(places) if place and self.splits(place)],
            forward=variant.compile_forward,
            backward=variant.compile_backward,
            decompositions=internals.inductor_decompositions() if self._options.backend == "inductor" else None,
        )
        self._variants.append(variant)
        return lowered

    def enter(self, variant: _Variant) -> None:
        """A forward graph is about to run: agree with all ranks on what they do, and be ready for it."""
        self._agreed = True
        agreed = self._plans.common(variant.reading)
        agreed.calls += 1
        variant.calls += 1
        if variant.backward is not None:
            self._passes_in_step += 1
            self._accumulates |= self._passes_in_step > 1
        measured = 1 + self._options.measured_calls
        if agreed.calls > measured and not agreed.final:
            self._decide(agreed)
        variant.measuring = 1 < variant.calls <= measured
        self._schedule(variant, agreed, informed=variant.calls > measured)
        self._last = (variant, agreed)

    def enter_backward(self, variant: _Variant) -> None:
        """A backward graph is about to run."""
        assert variant.made_for is not None
        self._sharded.hooks.backward.enter()
        self._sharded.reducer.alike = variant.made_for[0].alike

    # planning ---------------------------------------------------------------------------------------------------------

    def _schedule(self, variant: _Variant, agreed: Plan, *, informed: bool) -> None:
        """Have the programs of ``variant`` do what was agreed on; with ``informed``, in the best way that is known."""
        held = frozenset().union(*(known.kept for known in self._plans.known()))
        if variant.made_for == (agreed, held, informed):
            return
        variant.made_for = (agreed, held, informed)
        memory = self._memory()
        for program, task in zip(variant.programs, self._tasks(variant, agreed), strict=True):
            seconds = self._gathers.seconds if informed else {}
            planned = plan(task, memory, seconds, agreed.kept, held)
            program.follow(planned.schedule, planned.peak_bytes)
        self._gathers.peak_bytes = self._gathers.live_bytes
        if self._options.tell and informed and self._sharded.axis.world.rank == 0:
            log.info("compiled: %s", self.report)

    def _tasks(self, variant: _Variant, agreed: Plan) -> list[Task]:
        return [
            Task(
                reads=program.graph.reads,
                order=order,
                backward=program.graph.backward,
                # Evaluation meets what training keeps.
                accumulates=self._accumulates or variant.backward is None,
                node_seconds=program.node_seconds,
                live_bytes=program.live_bytes,
            )
            for program, order in zip(variant.programs, (agreed.forward, agreed.backward), strict=False)
        ]

    def _memory(self) -> Memory:
        sharded, policy = self._sharded, self._sharded.policy
        split = [bucket for bucket in sharded.buckets if not bucket.resident]
        width = max((bucket.full.element_size() for bucket in split), default=1)
        most = self._options.budget_bytes
        if most is None:
            most = UNBOUNDED if policy.max_live_numel is None else policy.max_live_numel * width
        ahead = PREFETCH_NUMEL if policy.prefetch_numel is None else policy.prefetch_numel
        return Memory(sizes=self._gathers.sizes(), most=most, free=self._free, ahead=ahead * width)

    def _decide(self, agreed: Plan) -> None:
        """All ranks have measured: agree on what to keep. Each may keep what fits on it, all keep what fits on all."""
        everyone = self._sharded.ranks.everyone
        self._free = _free_bytes(self._sharded.axis.device)
        seconds = self._gathers.seconds
        for measured in all_gather_object(list(seconds.items()), everyone, purpose="measured gathers"):
            for group, value in measured:
                seconds[group] = max(value, seconds.get(group, 0.0))
        memory = self._memory()
        variants = [variant for variant in self._variants if variant.made_for and variant.made_for[0] is agreed]
        runs = [task.run(memory) for variant in variants for task in self._tasks(variant, agreed)]
        again = agreed.forward if self._accumulates else [g for g in agreed.forward if g in agreed.backward]
        useful = again if agreed.backward else []
        mine = choose_kept(runs, memory.sizes, seconds, useful)
        votes = all_gather_object(mine, everyone, purpose="buckets to keep until the step")
        agreed.kept = frozenset(votes[0]).intersection(*votes)
        agreed.final = True

    # telling ----------------------------------------------------------------------------------------------------------

    @property
    def called(self) -> bool:
        """Whether there was a forward pass."""
        return self._last is not None or self._reason is not None

    @property
    def report(self) -> CompileReport:
        """What became of it so far."""
        most = self._memory().most
        programs: list[Program] = []
        gathers, kept = (0, 0), frozenset[int]()
        state: State = "waiting" if self._reason is None else "hooks"
        if self._last is not None and self._reason is None:
            variant, agreed = self._last
            programs, gathers, kept = variant.programs, (len(agreed.forward), len(agreed.backward)), agreed.kept
            state = "planned" if agreed.final else "measuring"
        ahead = [sum(fetch.start < fetch.first for fetch in program.schedule) for program in programs]
        everything = [program for variant in self._variants for program in variant.programs]
        return CompileReport(
            state=state,
            reason=self._reason,
            graphs=len(self._variants),
            gathers=gathers,
            ahead=(ahead[0] if ahead else 0, ahead[1] if len(ahead) > 1 else 0),
            kept=tuple(self._sharded.buckets[number].slots[0].name for number in sorted(kept)),
            budget_bytes=None if most == UNBOUNDED else most,
            planned_bytes=max((program.peak_bytes for program in everything), default=0),
            peak_bytes=self._gathers.peak_bytes,
        )


def storage_of(tensor: torch.Tensor) -> int:
    """Where the memory of ``tensor`` begins; 0 for a kind of tensor that has none."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else 0


def _free_bytes(device: torch.device) -> int:
    """What plans may use of a device that holds neither activations nor whole parameters now."""
    if device.type != "cuda":
        return UNBOUNDED  # the host's memory is shared with everybody: only the policy bounds it
    free, _ = torch.cuda.mem_get_info(device)
    return int(SPARED * (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)))


def _like(forward: Callable[..., Any], compiled: CompiledModule) -> Callable[..., Any]:
    """``compiled`` as a function with the signature of ``forward``, which data loaders and trainers look at."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    untraced: Callable[..., Any] = torch.compiler.disable(update_wrapper(call, forward))
    return untraced


def compile_sharded(sharded: ShardedModule, options: CompileOptions | None = None) -> CompiledModule:
    """Compile a sharded module at its next forward pass, with its communication in the graphs. Collective.

    The module is used as before, and gives the same results. What cannot be captured as one graph, for instance because
    it branches on the values of tensors, goes on with hooks, on all ranks: see `CompiledModule.report`.
    """
    return CompiledModule(sharded, options or CompileOptions())

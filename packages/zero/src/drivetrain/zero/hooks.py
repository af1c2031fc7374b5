"""Where ZeRO meets autograd: module and tensor hooks, and the life of one backward pass.

                  root pre-forward: new pass
    forward       unit pre-forward  -> parameters in        unit post-forward -> parameters out
                  owner pre-forward -> parameters in        owner post-forward: watch its outputs
    backward      gradient of a watched output -> parameters in, and the pass has begun
                  a parameter's gradient is ready           -> into its bucket, before autograd stores it
                  gradient of the unit's input is there, and its own too -> parameters out
                  the engine's final callback               -> send the rest, everything out

An owner is a module that holds parameters of a unit directly. Watching every owner's outputs, and not only the
unit's, is what makes the release in backward safe: the hook on an owner's output runs right before the nodes that
read its parameters, so a unit that went too early comes back (at a cost) instead of being read after it was freed.

A call is open from the gradient of its first output to that of its last input, and a unit stays while one is. That is
needed for safety too: a module that holds parameters directly may read them long after its output's hook has run.

Entering a unit in backward is also where ranks agree that those entered before have given all their gradients, whatever
has not come: see the note in `reducer`. What they go by, the calls, is the same on all ranks; what arrives need not be.

Recomputation (activation checkpointing, both kinds) runs forward hooks inside backward. There a forward call does not
release: the backward that it is for comes next. The non-reentrant kind recomputes for a call that is open, on a graph
that nobody runs backward; the reentrant kind, whose first forward pass had no graph, opens the recomputed call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from drivetrain.zero.bucket import Bucket
from drivetrain.zero.casts import CastCopies
from drivetrain.zero.looks import away
from drivetrain.zero.order import Phase
from drivetrain.zero.provenance import mark_call, mark_parameter
from drivetrain.zero.reducer import GradientReducer
from drivetrain.zero.residency import Residency
from drivetrain.zero.trained import Trained
from drivetrain.zero.unit import Call, Unit

Gradients = tuple[torch.Tensor | None, ...]


def accumulator(parameter: nn.Parameter) -> Node:
    """The autograd node that would add gradients to ``parameter.grad``, now or when it is trained later."""
    trained = parameter.requires_grad
    with torch.enable_grad():
        view = parameter.requires_grad_().expand_as(parameter)
    parameter.requires_grad_(trained)
    assert view.grad_fn is not None
    node = view.grad_fn.next_functions[0][0]
    assert node is not None
    return node


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """``hook``, kept out of the graph where ``torch.compile`` of a block traces into its hooks."""
    kept_out: Callable[..., Any] = torch.compiler.disable(hook)
    return kept_out


def inside_backward() -> bool:
    """Whether the autograd engine is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists, sets, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors_in(getattr(value, entry.name, None))


def memory_of(tensor: torch.Tensor) -> int | None:
    """Tells storages apart; None for what has none."""
    plain = tensor.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return int(tensor.untyped_storage()._cdata) if plain else None


def differentiable(value: object) -> list[torch.Tensor]:
    """The tensors in ``value`` that backward will reach, in order."""
    return [t for t in tensors_in(value) if t.requires_grad] if torch.is_grad_enabled() else []


def kept_by(module: nn.Module) -> list[object]:
    """What a module keeps as attributes and may hold tensors, such as an auxiliary loss that is fetched later."""
    held = (value for name, value in vars(module).items() if not name.startswith("_"))
    return [value for value in held if isinstance(value, (torch.Tensor, list, tuple, dict))]


def own_views(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with views of the differentiable tensors in place of all but the first of these.

    What all blocks read besides, such as an encoder's output, has its gradient only when backward is almost over; a
    call's own view of it has its gradient when backward is through the call. Containers that the callee might change
    keep the tensors that they hold.
    """
    first = next(iter(differentiable((args, kwargs))), None)

    def own(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            plain = value.layout == torch.strided and value.requires_grad
            apart = plain and (value is not first or isinstance(value, nn.Parameter))
            return value.view_as(value) if apart else value
        return tuple(own(item) for item in value) if type(value) is tuple else value

    return own(args), {name: own(value) for name, value in kwargs.items()}


def _nothing() -> None:
    """Nobody objects to a pass."""


def _anything(scale: float | None) -> None:
    """The check of gradients that nobody objects to."""


class BackwardPass:
    """Knows whether a backward pass is under way and what it carries, and runs what must happen at its end.

    Attributes:
        number: passes begun so far.
        admit: called when a pass begins; may raise to refuse it.
        check: called before the first gradient of a parameter is taken, with the loss scale that the pass carries, as
            far as that is known; may raise to refuse it.
        own_scale: the loss scale that gradients are stored with.
        trains: there are parameters that take gradients.
    """

    def __init__(
        self, on_begin: Callable[[], None], on_end: Callable[[], None], on_abandon: Callable[[], None]
    ) -> None:
        self._on_begin = on_begin
        self._on_end = on_end
        self._on_abandon = on_abandon
        self.active = False
        self.number = 0
        self.check: Callable[[float | None], None] = _anything
        self.admit: Callable[[], None] = _nothing
        self.own_scale: Callable[[], float] = lambda: 1.0
        self.trains = False
        self._carried: float | None = None
        self._factor: float | None = None

    def enter(self) -> None:
        """Called by every hook that runs inside backward; the first call begins the pass."""
        if not self.active:
            self.admit()
            self.active = True
            self.number += 1
            self._factor = None
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
            self._on_begin()

    def _end(self) -> None:
        self.active = False
        self._on_end()

    def carry(self, scale: float) -> None:
        """The pass that runs now brings gradients that are ``scale`` times those of the loss.

        Raises:
            RuntimeError: another scale was announced for the same pass.
        """
        if self._carried is None:
            torch.autograd.Variable._execution_engine.queue_callback(self._carry_nothing)
        elif self._carried != scale:
            raise RuntimeError(
                f"one backward pass brings gradients with the loss scales {self._carried:g} and {scale:g} to the same "
                "parameters: several engines have scaled parts of a loss. Add the parts up and let one engine scale "
                "the sum, or run a backward pass for each"
            )
        self._carried = scale

    def _carry_nothing(self) -> None:
        self._carried = None

    def converted(self, gradient: torch.Tensor) -> torch.Tensor:
        """A parameter's gradient of the running pass, with the loss scale that gradients are stored with."""
        if self._factor is None:
            self.check(self._carried)
            self._factor = 1.0 if self._carried is None else self.own_scale() / self._carried
        return gradient if self._factor == 1.0 else gradient * self._factor

    def settle(self) -> None:
        """Outside backward: if the last pass never ended, an exception stopped it. Clean up after it."""
        if inside_backward():
            return
        self._carried = None
        if self.active:
            self.active = False
            self._on_abandon()


class Hooks:
    """Installs ZeRO's hooks on a module tree and holds what they share.

    Args:
        root: the module that was sharded.
        units: all units.
        residency: brings parameters in and lets them go.
        reducer: takes gradients.
        trained: which parameters these are for.
        reduces: asks whether the current backward pass reduces gradients or only accumulates them.
        closes: asks whether it is the last one before the optimizer step.
    """

    def __init__(
        self,
        root: nn.Module,
        units: tuple[Unit, ...],
        residency: Residency,
        reducer: GradientReducer,
        trained: Trained,
        reduces: Callable[[], bool],
        closes: Callable[[], bool],
    ) -> None:
        self._root = root
        self._units = units
        self._residency = residency
        self._reducer = reducer
        self._trained = trained
        self._reduces = reduces
        self._closes = closes
        self.suspended = False  # others bring parameters in
        self._inside = False  # the root's forward runs
        self._away = away(self._bring)
        self._unit_of: dict[int, Unit] = {}  # by the id of a parameter
        self._handles: list[RemovableHandle] = []
        self._unit_handles: list[RemovableHandle] = []
        self._copies: dict[int, CastCopies] = {}  # by unit
        self._entered: dict[Unit, tuple[int, ...]] = {}  # units that this backward pass has reached, and their lanes
        self._lanes_of: dict[Unit, tuple[int, ...]] = {}
        self._accumulators: list[Node] = []  # autograd forgets one that nobody holds, and its hooks with it
        self.backward = BackwardPass(self._begin_backward, self._end_backward, self._abandon_backward)
        self._install()
        trained.tell(self._on_trained)

    def _install(self) -> None:
        add = self._handles.append
        add(self._root.register_forward_pre_hook(self._before_root, prepend=True))
        add(self._root.register_forward_hook(self._leave_root, always_call=True))
        add(self._root.register_forward_hook(self._after_root, with_kwargs=True))
        self.resume()
        for unit in self._units:
            self._take_gradients(unit, unit.buckets)

    def _take_gradients(self, unit: Unit, buckets: Sequence[Bucket]) -> None:
        """Have the gradients of ``buckets``, which are of ``unit``."""
        for bucket in buckets:
            if not bucket.trainable:
                continue
            lane = self._reducer.lane(bucket)
            self._lanes_of[unit] = (*self._lanes_of.get(unit, ()), lane)
            for index, slot in enumerate(bucket.slots):
                node = accumulator(slot.parameter)
                self._accumulators.append(node)
                mark_parameter(node, self.backward)
                self._handles.append(node.register_prehook(self._taker(unit, lane, index)))
        self._lanes_of.setdefault(unit, ())

    def adopt(self, units: tuple[Unit, ...], fresh: Mapping[Bucket, Unit]) -> None:
        """Go on with ``units``, in which there are ``fresh`` buckets; modules may be new too."""
        self.suspend()
        self._units = units
        self._copies.clear()
        for bucket, unit in fresh.items():
            self._take_gradients(unit, [bucket])
        for unit in units:
            self._lanes_of.setdefault(unit, ())
        self.resume()

    def _on_trained(self) -> None:
        self.backward.trains = any(bucket.trained for unit in self._units for bucket in unit.buckets)

    def suspend(self) -> None:
        """Leave it to others to bring parameters in. Gradients and the ends of passes are seen to as before."""
        self.suspended = True
        self._set_away(None)
        for handle in self._unit_handles:
            handle.remove()
        self._unit_handles.clear()

    def resume(self) -> None:
        """Bring parameters in around the calls of modules."""
        self.suspended = False
        owners = self._find_owners()
        for unit in self._units:
            if not unit.resident:
                self._install_unit(unit, owners)
        self._unit_of = {
            id(slot.parameter): unit
            for unit in self._units
            if not unit.resident
            for bucket in unit.buckets
            for slot in bucket.slots
        }
        self._set_away(self._away)

    def _set_away(self, kind: type[nn.Parameter] | None) -> None:
        for unit in self._units:
            for bucket in unit.buckets if not unit.resident else ():
                bucket.away = kind

    def _bring(self, parameter: nn.Parameter) -> None:
        """Something reads ``parameter``, which is away. Backward over what it makes comes without a sign."""
        unit = self._unit_of.get(id(parameter))
        if not self._inside or unit is None or inside_backward():
            return
        self._residency.need(unit, self._phase())
        unit.unseen |= torch.is_grad_enabled()

    def enter_late(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the hooks that `resume` put back would have done, had they been there when ``module`` was called.

        Returns:
            The arguments to go on with.
        """
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        for unit in self._units:
            if unit.resident:
                continue
            if module in unit.modules:
                args, kwargs = self._unit_entrance(unit)(module, args, kwargs) or (args, kwargs)
            elif any(id(slot.parameter) in own for bucket in unit.buckets for slot in bucket.slots):
                self._owner_entrance(unit)(module, args)
        return args, kwargs

    def _find_owners(self) -> dict[int, list[nn.Module]]:
        """By the id of a parameter, the modules that hold it directly."""
        owners: dict[int, list[nn.Module]] = {}
        for module in self._root.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), []).append(module)
        return owners

    def _copies_of(self, unit: Unit) -> CastCopies:
        if unit.index not in self._copies:
            parameters = [slot.parameter for bucket in unit.buckets for slot in bucket.slots]
            restore = partial(self._residency.restore, unit)
            self._copies[unit.index] = CastCopies(parameters, parameters[0].device, restore)
        return self._copies[unit.index]

    def _install_unit(self, unit: Unit, owners: Mapping[int, list[nn.Module]]) -> None:
        add = self._unit_handles.append
        parameters = [slot.parameter for bucket in unit.buckets for slot in bucket.slots]
        owning = dict.fromkeys(module for parameter in parameters for module in owners[id(parameter)])
        for module in unit.modules:
            add(module.register_forward_pre_hook(untraced(self._unit_entrance(unit)), prepend=True, with_kwargs=True))
            add(module.register_forward_hook(untraced(self._unit_exit(unit)), with_kwargs=True))
        entrance, exit = untraced(self._owner_entrance(unit)), untraced(self._owner_exit(unit))
        for module in owning:
            if module not in unit.modules:
                add(module.register_forward_pre_hook(entrance, prepend=True))
                add(module.register_forward_hook(exit))

    def remove(self) -> None:
        """Take every hook out again."""
        self.suspend()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # forward ----------------------------------------------------------------------------------------------------------

    def _phase(self) -> Phase:
        if inside_backward():
            return Phase.BACKWARD
        return Phase.FORWARD if torch.is_grad_enabled() else Phase.INFERENCE

    def _before_root(self, module: nn.Module, args: Any) -> None:
        if inside_backward():
            return
        self.backward.settle()
        self._residency.restart()
        self._inside = True
        if torch.is_grad_enabled() and not any(unit.pins for unit in self._units):
            self._trained.refresh()

    def _leave_root(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside &= inside_backward()

    def _after_root(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if inside_backward():
            return
        outputs = differentiable(output)
        for tensor in outputs:
            tensor.register_hook(self._on_root_gradient)
        mark_call(differentiable((args, kwargs)), outputs, self.backward)
        # With gradients enabled backward may come, though the output hides its tensors from us: stay until it has.
        if not torch.is_grad_enabled():
            self._residency.release_idle()

    def _unit_entrance(self, unit: Unit) -> Callable[..., tuple[Any, Any] | None]:
        copies = self._copies_of(unit)

        def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            self._residency.need(unit, self._phase())
            unit.call = call = Call()
            copies.begin()
            if not torch.is_grad_enabled() or module is self._root:
                return None
            args, kwargs = own_views(args, kwargs)
            inputs = differentiable((args, kwargs))
            for tensor in inputs:
                tensor.register_hook(lambda _: self._on_input_done(unit, call))
            call.inputs = len(inputs)
            call.given = frozenset((id(tensor), tensor._version) for tensor in inputs)
            return args, kwargs

        return before

    def _unit_exit(self, unit: Unit) -> Callable[..., None]:
        copies = self._copies_of(unit)
        memory = {memory_of(bucket.full) for bucket in unit.buckets}

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            watched = differentiable(output)
            before_backward = self._unit_watcher(unit, unit.call)
            for tensor in differentiable((output, kept_by(module))):
                if isinstance(tensor, nn.Parameter):
                    continue  # it would keep the hook for good
                # An input that is handed on as it came owes nothing to the parameters.
                if (id(tensor), tensor._version) not in unit.call.given:
                    tensor.register_hook(before_backward)
            unit.unseen |= any(memory_of(tensor) in memory for tensor in tensors_in(output))
            if watched and not inside_backward() and not unit.pins:  # else it may be this rank's own call
                unit.ahead += 1
                unit.call.ahead = True
            if inside_backward() or (module is self._root and watched):
                return
            # Outputs may hide their tensors from us, and backward come unseen: then the unit stays until it has.
            if torch.is_grad_enabled() and not watched:
                unit.unseen |= unit.trainable_count > 0 or next(tensors_in(output), None) is None
            if not unit.unseen:
                self._residency.done(unit)
            if not unit.live and copies.active:
                copies.see(module, output)
                copies.end(differentiable((output, kept_by(module))))

        return after

    def _owner_entrance(self, unit: Unit) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            if not unit.live:
                self._residency.need(unit, self._phase())

        return before

    def _owner_exit(self, unit: Unit) -> Callable[..., None]:
        copies = self._copies_of(unit)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            given = {id(tensor) for tensor in differentiable(args)}
            kept = (tensor for tensor in differentiable(kept_by(module)) if id(tensor) not in given)
            for tensor in (*differentiable(output), *kept):
                if not isinstance(tensor, nn.Parameter):
                    tensor.register_hook(self._owner_watcher(unit))
            if copies.active:
                copies.see(module, output)

        return after

    # backward ---------------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        # With create_graph, what is made now can be differentiated, in nodes that read parameters and that no hook of
        # ours precedes. So all that is whole stays, until the optimizer step.
        if torch.is_grad_enabled():
            self._residency.hold()
        for unit in self._units:
            unit.missing = unit.trainable_count
            unit.open_calls.clear()
        self._entered.clear()

    def _on_root_gradient(self, gradient: torch.Tensor) -> None:
        self.backward.enter()

    def _unit_watcher(self, unit: Unit, call: Call) -> Callable[[torch.Tensor], None]:
        """One watcher serves all outputs of a call; the first gradient to arrive is the use that is recorded."""

        def before_backward(gradient: torch.Tensor) -> None:
            self.backward.enter()
            if call.last_pass != self.backward.number:
                call.last_pass, call.waiting = self.backward.number, call.inputs
                unit.open_calls.add(call)
                self._enter(unit, call)
                self._residency.need(unit, Phase.BACKWARD)
            elif not unit.live:
                self._residency.restore(unit)

        return before_backward

    def _enter(self, unit: Unit, call: Call) -> None:
        """A backward pass comes to ``call`` of ``unit``: it is through with units that have no other call ahead."""
        if call.ahead:
            call.ahead = False
            unit.ahead = max(0, unit.ahead - 1)
        if self._root in unit.modules:
            return  # its call is around all others, and may begin with the same output as the last of them
        through = [other for other in self._entered if other is not unit and not other.ahead]
        lanes = [lane for other in through for lane in self._entered.pop(other)]
        self._entered[unit] = self._lanes_of[unit]
        if lanes:
            self._reducer.due(lanes, reduces=self._reduces())

    def forget_calls(self) -> None:
        """The optimizer steps: no backward pass comes to the calls made so far."""
        for unit in self._units:
            unit.ahead = 0

    def _owner_watcher(self, unit: Unit) -> Callable[[torch.Tensor], None]:
        def before_backward(gradient: torch.Tensor) -> None:
            self.backward.enter()
            if not unit.live:
                self._residency.restore(unit)

        return before_backward

    def _taker(self, unit: Unit, lane: int, index: int) -> Callable[[Gradients], Gradients]:
        """Takes a gradient on its way into ``.grad``.

        Weight gradients of linear layers come transposed. Autograd would lay them out anew to store them, and the
        bucket would copy them once more; so the bucket does both in one pass, and autograd is given nothing to store.
        """

        def take(gradients: Gradients) -> Gradients:
            self.backward.enter()
            if gradients[0] is not None:
                gradient = self.backward.converted(gradients[0])
                self._reducer.take(lane, index, gradient, reduces=self._reduces())
                unit.missing -= 1
                self._release_if_done(unit)
            return (None,)

        return take

    def _on_input_done(self, unit: Unit, call: Call) -> None:
        call.waiting -= 1
        if call.waiting == 0:
            unit.open_calls.discard(call)
            self._release_if_done(unit)

    def _release_if_done(self, unit: Unit) -> None:
        if unit.done and self._root not in unit.modules:
            self._residency.done(unit)

    def _end_backward(self) -> None:
        self._reducer.finish_backward(reduces=self._reduces(), closes=self._closes())
        self._residency.release_idle()

    def _abandon_backward(self) -> None:
        self._residency.release_idle()
        self._residency.release_others()
        self._reducer.abandon_backward()

"""What a program does to a sharded module besides calling it: let it work, or refuse it in words.

The problem: a module has doors that know nothing of sharding. `state_dict` hands out placeholders, `load_state_dict`
and changes in place write into them, or into low-precision copies that the next step overwrites; ``module.half()`` and
assignments to ``.data`` put tensors in the parameters' place that nobody updates, and adapters add some; a pickle or a
copy of the module takes buckets and process groups along. Each of these goes wrong without a word, and is found days
later. The idea: torch has a hook at each of these doors, and a version for each tensor; looking costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from drivetrain.zero.bucket import Slot
from drivetrain.zero.parking import PARAMETERS, WEIGHTS, MovedStates
from drivetrain.zero.unit import Unit

_Place = tuple[dict[str, nn.Parameter | None], str, Slot, int]
"""A place of a parameter in the tree: the owner's table, the name in it, the slot, where its memory begins at rest."""


class _Shape:
    """What a module tree is made of at one moment. Made to be compared before every forward pass."""

    def __init__(self, root: nn.Module) -> None:
        self._modules = list(root.modules())  # held, so that no new module gets the id of one that is gone
        self._known = {id(module) for module in self._modules}
        self._tables = [(m._parameters, len(m._parameters), m._modules, len(m._modules)) for m in self._modules]
        self._children = [m._modules for m in self._modules if m._modules]
        self._without = [(m._parameters, name) for m in self._modules for name, p in m._parameters.items() if p is None]

    def changed(self) -> bool:
        """Whether modules or parameters came, went or were replaced; a parameter in another's place is not seen."""
        for parameters, count, children, child_count in self._tables:
            if len(parameters) != count or len(children) != child_count:
                return True
        for children in self._children:
            for child in children.values():
                if child is not None and id(child) not in self._known:
                    return True
        return any(parameters.get(name) is not None for parameters, name in self._without)


class Guard:
    """Stands at the doors of a module tree, from when it is sharded.

    Args:
        root: the module that was sharded.
        units: all its units.
        rank: this process, for messages.
        moved: what is away.
    """

    def __init__(self, root: nn.Module, units: Sequence[Unit], rank: int, moved: MovedStates) -> None:
        self._root = root
        self._rank = rank
        self._moved = moved
        self._guarded: dict[int, nn.Module] = {}  # by id; held, so that no new module gets the id of one that is gone
        self.adopt(units)
        root.register_forward_pre_hook(self._before_forward, prepend=True)

    def adopt(self, units: Sequence[Unit]) -> None:
        """Go on with ``units`` and the module tree as it is."""
        self._units = tuple(units)
        self._slots: dict[int, Slot] = {id(slot.parameter): slot for unit in units for slot in _slots(unit)}
        self._versions = {key: slot.parameter._version for key, slot in self._slots.items()}
        self._places = list(self._find_places(self._root))
        self._shape = _Shape(self._root)
        for module in self._root.modules():
            if id(module) not in self._guarded:
                self._guarded[id(module)] = module
                module.register_state_dict_pre_hook(self._before_state_dict)
                module.register_load_state_dict_pre_hook(self._before_load_state_dict)
                module.register_load_state_dict_post_hook(self._after_load_state_dict)

    def knows(self, module: nn.Module) -> bool:
        """Whether it was there when parameters were laid into buckets."""
        return id(module) in self._guarded

    def _find_places(self, root: nn.Module) -> Iterator[_Place]:
        resident = {id(slot) for unit in self._units if unit.resident for slot in _slots(unit)}
        for owner in root.modules():
            for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
                slot = self._slots[id(parameter)]
                usual = slot.whole if id(slot) in resident else slot.placeholder
                yield owner._parameters, name, slot, usual.data_ptr()

    @staticmethod
    def of(module: nn.Module) -> Guard | None:
        """The guard of a module that is sharded, or has a sharded part."""
        hooks = (hook for part in module.modules() for hook in part._state_dict_pre_hooks.values())
        return next((owner for hook in hooks if isinstance(owner := getattr(hook, "__self__", None), Guard)), None)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a module that drivetrain has sharded cannot be pickled or copied: its parameters are parts of buckets. "
            "Save it with engine.save or engine.export; copy or pickle the model before it is sharded."
        )

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        """Find parameters that are no longer what is gathered and updated: other objects, or over other memory."""
        self._moved.require("a forward pass", PARAMETERS)
        with torch._C.DisableTorchFunctionSubclass():
            for parameters, name, slot, usual in self._places:
                found = parameters.get(name)
                if found is not slot.parameter:
                    self._refuse_change(slot, "was replaced by another object", found)
                elif found.data_ptr() != usual and found.data_ptr() != slot.whole.data_ptr():
                    self._refuse_change(slot, "was given other memory", found)
        if self._shape.changed():
            self._refuse_added()
        self.take_edits()

    def edited(self) -> Iterator[Slot]:
        """What was written to in place since it was last accepted. (Writes through ``.data`` are not seen.)"""
        versions = self._versions
        with torch._C.DisableTorchFunctionSubclass():  # those that are away would be slow
            return iter([slot for key, slot in self._slots.items() if slot.parameter._version != versions[key]])

    def accept(self, slots: Iterable[Slot]) -> None:
        """What was written to these is kept."""
        with torch._C.DisableTorchFunctionSubclass():
            self._versions.update((id(slot.parameter), slot.parameter._version) for slot in slots)

    def take_edits(self) -> None:
        """Keep what a program wrote to parameters in place, or refuse it where it would be lost.

        Parameters that are pinned wait: whoever pinned them decides at the end.
        """
        changed = {id(slot.parameter) for slot in self.edited()}
        if not changed:
            return
        lost: list[Slot] = []
        for bucket in (bucket for unit in self._units if not unit.pins for bucket in unit.buckets):
            found = [slot for slot in bucket.slots if id(slot.parameter) in changed]
            self.accept(found)
            if found and bucket.resident:
                bucket.adopt_published()
            elif found:
                lost += found
        if lost:
            raise RuntimeError(
                f"rank {self._rank}: parameter '{lost[0].name}' was changed in place, one of {len(lost)}, and the "
                "change is lost: at stage 3 a parameter is whole only around its use, and what a rank writes to it is "
                "not kept. Change it inside of `with engine.gathered(parameters):` (drivetrain.zero.gathered), and "
                "name there each one that is changed"
            )

    def _refuse_added(self) -> None:
        """Modules may be added and wrapped, parameters may not."""
        added = [name for name, p in self._root.named_parameters() if id(p) not in self._slots]
        if added:
            raise RuntimeError(
                f"rank {self._rank}: parameter '{added[0]}' was added after the model was sharded, one of "
                f"{len(added)}, and nobody would reduce its gradient, update or save it. Call engine.adopt() "
                "(drivetrain.zero.adopt) on all ranks once adapters, heads and embeddings are in place, or remove them."
            )
        self._shape = _Shape(self._root)

    def _refuse_change(self, slot: Slot, what: str, found: torch.Tensor | None) -> NoReturn:
        now = "now None" if found is None else f"now {found.dtype} of shape {tuple(found.shape)}"
        raise RuntimeError(
            f"rank {self._rank}: parameter '{slot.name}' {what} ({now}) after the model was sharded, and no step would "
            "update it. Do what replaces parameters (module.to, .half, .cuda, tying, an assignment to .data) before "
            "drivetrain shards the model; change values in place, under torch.no_grad. A new parameter in the place of "
            "an old one is taken over by engine.adopt() (drivetrain.zero.adopt)."
        )

    def _released(self, module: nn.Module) -> str | None:
        """The first parameter of ``module`` that is a placeholder now."""
        away = {id(slot.parameter) for unit in self._units if not unit.live for slot in _slots(unit)}
        found = next((p for p in module.parameters() if id(p) in away), None) if away else None
        return None if found is None else self._slots[id(found)].name

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        name = self._released(module)
        if name is not None:
            raise RuntimeError(
                f"rank {self._rank}: state_dict() would hold placeholders: at stage 3 parameters such as '{name}' are "
                "not whole on a rank between their uses. Save with engine.save, write whole weights with "
                "engine.export, or read them one by one from ShardedModule.full_parameters()."
            )

    def _before_load_state_dict(self, module: nn.Module, *args: Any) -> None:
        self._moved.require("load_state_dict()", WEIGHTS)
        name = self._released(module)
        if name is not None:
            raise RuntimeError(
                f"rank {self._rank}: load_state_dict() would write into placeholders: at stage 3 parameters such as "
                f"'{name}' are not whole on a rank between their uses. Load the weights before drivetrain shards the "
                "model, or load a checkpoint with engine.load."
            )

    def _after_load_state_dict(self, module: nn.Module, keys: Any) -> None:
        """What was loaded becomes the master weights, or the next step would undo it."""
        own = {id(parameter) for parameter in module.parameters(recurse=False)}
        for bucket in (bucket for unit in self._units for bucket in unit.buckets):
            if bucket.resident and any(id(slot.parameter) in own for slot in bucket.slots):
                bucket.adopt_published()
                self.accept(slot for slot in bucket.slots if id(slot.parameter) in own)


def _slots(unit: Unit) -> list[Slot]:
    return [slot for bucket in unit.buckets for slot in bucket.slots]

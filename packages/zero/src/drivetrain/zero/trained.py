"""Which parameters are trained at this moment: ``requires_grad``, as all ranks have it.

The problem: programs freeze and unfreeze parameters between steps, on the parameters themselves, and nobody is told.
What is reduced, and at stage 3 what backward gathers, follows from it, so ranks that differ would wait for each other
or exchange the wrong data. The idea: each training forward pass compares the flags with those of the last one, a list
against a list. Where something has changed, ranks compare theirs before anything else happens; where nothing
has, nothing is sent.

A rank that alone has changed something meets others that go on to something else. So the comparison is made where they
will be next, and is called by the parameter's name: what compares collectives (see ``drivetrain.comm``) says the rest.

A bucket that has gradients of the current step stays trained until these are used; then it is looked at again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from drivetrain.comm import all_gather_object, all_reduce
from drivetrain.zero.bucket import Bucket, Slot
from drivetrain.zero.ranks import Ranks


class Trained:
    """Keeps `Bucket.trained` right.

    Args:
        buckets: all of a module.
        ranks: that train it.
        gathers: ranks gather parameters in forward passes.
        holds_gradients: whether this rank has gradients that no step has used.
    """

    def __init__(
        self, buckets: Sequence[Bucket], ranks: Ranks, *, gathers: bool, holds_gradients: Callable[[], bool]
    ) -> None:
        self._ranks = ranks
        self._next = ranks.shard if gathers else ranks.reduce  # where a rank that has changed nothing will be
        self._holds_gradients = holds_gradients
        self._listeners: list[Callable[[], None]] = []
        self.adopt(buckets)

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Go on with ``buckets``, whose flags are the same on all ranks."""
        self._buckets = tuple(buckets)
        self._slots: list[Slot] = [slot for bucket in buckets for slot in bucket.slots]
        self._parameters = [slot.parameter for slot in self._slots]
        self._flags = self._read()
        self._apply(held=False)

    def _apply(self, *, held: bool) -> None:
        """Go by the flags, and tell who has to know. ``held``: a rank has gradients, which are to be used first."""
        self._settled = True
        for bucket in self._buckets:
            wanted = bucket.trainable and any(slot.parameter.requires_grad for slot in bucket.slots)
            if held and bucket.trained and not wanted:
                self._settled = False
                continue
            bucket.trained = wanted
            if wanted:
                bucket.make_master()
        for listener in self._listeners:
            listener()

    def tell(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` now, and whenever other parameters are trained."""
        self._listeners.append(listener)
        listener()

    def _read(self) -> list[bool]:
        with torch._C.DisableTorchFunctionSubclass():  # those that are away would be slow
            return [parameter.requires_grad for parameter in self._parameters]

    def refresh(self) -> None:
        """A training forward pass begins. Collective if something has changed.

        Raises:
            RuntimeError: a parameter cannot be trained, or ranks differ.
        """
        if not self._settled or self._read() != self._flags:
            self.agree()

    def agree(self) -> None:
        """Compare with the other ranks what is trained, and go by it from here on. Collective.

        Raises:
            RuntimeError: a parameter cannot be trained, or ranks differ.
        """
        flags = self._read()
        self._refuse_packed()
        held = self._compare(flags)
        self._flags = flags
        self._apply(held=held)

    def _refuse_packed(self) -> None:
        for bucket in self._buckets:
            slots = () if bucket.packed is None else bucket.slots
            found = next((slot for slot in slots if slot.parameter.requires_grad), None)
            if found is not None:
                raise RuntimeError(
                    f"rank {self._ranks.shard.world.rank}: parameter '{found.name}' was frozen when the model was "
                    "sharded and has requires_grad=True now, and it is kept as int8 blocks only "
                    "(zero_quantized_nontrainable_weights, Policy.frozen_rule), which cannot be trained. Unfreeze it "
                    "before drivetrain shards the model, or switch that off"
                )

    def _compare(self, flags: list[bool]) -> bool:
        """Whether any rank holds gradients; an error on all of them if their ``flags`` differ."""
        purpose = f"comparison of what is trained{self._changed(flags)}"
        digest = int.from_bytes(hashlib.sha256(bytes(flags)).digest()[:7], "big")
        mine = [digest, ~digest, int(self._holds_gradients())]  # the largest of all complements is the smallest's
        most = torch.tensor(mine, dtype=torch.int64, device=self._next.control_device)
        all_reduce(most, self._next, op="max", purpose=purpose).wait()
        all_reduce(most, self._ranks.replicas, op="max", purpose=purpose).wait()
        largest, smallest, held = most.tolist()
        if largest != ~smallest:
            self._refuse_difference(flags, purpose)
        return bool(held)

    def _changed(self, flags: list[bool]) -> str:
        changed = [index for index, flag in enumerate(flags) if flag != self._flags[index]]
        if not changed:
            return ""
        more = f" and of {len(changed) - 1} more" if len(changed) > 1 else ""
        return f", as requires_grad of '{self._slots[changed[0]].name}'{more} is now {flags[changed[0]]}"

    def _refuse_difference(self, flags: list[bool], purpose: str) -> None:
        axis = self._ranks.everyone
        everybody = all_gather_object(flags, axis, purpose=purpose)
        for rank, theirs in enumerate(everybody):
            for slot, first, other in zip(self._slots, everybody[0], theirs, strict=True):
                if first != other:
                    raise RuntimeError(
                        f"rank {axis.world.rank}: requires_grad of parameter '{slot.name}' is {first} on rank "
                        f"{axis.ranks[0]} and {other} on rank {axis.ranks[rank]}. All ranks must freeze and unfreeze "
                        "the same parameters between the same forward passes"
                    )

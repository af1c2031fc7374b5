"""A unit: the parameters that are gathered and released together, and where it stands in the current pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from drivetrain.comm import Waitable
from drivetrain.zero.bucket import Bucket
from drivetrain.zero.fetch import ParameterExchange


class Call:
    """One forward call of a unit, to which backward passes come back: from its outputs to its inputs.

    Attributes:
        given: the differentiable inputs, by identity and version, while forward runs.
        inputs: how many there are; each tells when it has its gradient.
        waiting: those that the current backward pass has not reached.
        last_pass: number of the last backward pass that reached an output.
        ahead: it counts among its unit's ``ahead``.
    """

    def __init__(self) -> None:
        self.given: frozenset[tuple[int, int]] = frozenset()
        self.inputs = 0
        self.waiting = 0
        self.last_pass = 0
        self.ahead = False


class Presence:
    """How much is here at this moment of what can be released, in elements. One for all units of a module.

    Attributes:
        live: whole and readable.
        coming: under way.
    """

    def __init__(self) -> None:
        self.live = 0
        self.coming = 0


class Unit:
    """Buckets of one block (or of the root), with the modules whose forward needs them.

    Attributes:
        numel: elements that gathering this unit brings in.
        live: the parameters are whole and readable.
        call: the forward call that was begun last.
        open_calls: calls that the current backward pass has entered by an output and not left by all inputs.
        unseen: since the last step there was a call whose outputs hide their tensors, so that backward comes without a
            sign. Then the parameters stay until the next one.
        missing: gradients of parameters still to come in this backward pass.
        ahead: calls of this step, made in forward, that no backward pass has reached.
        pins: how many contexts ask for the parameters to stay whole.
    """

    def __init__(
        self,
        index: int,
        name: str,
        modules: Sequence[nn.Module],
        buckets: Sequence[Bucket],
        exchange: ParameterExchange,
        presence: Presence,
    ) -> None:
        self.index = index
        self.name = name
        self.modules = tuple(modules)
        self._exchange = exchange
        self._presence = presence
        self.resident = all(b.resident for b in buckets)
        self.live = self.resident
        self.set_buckets(buckets)
        self.call = Call()
        self.open_calls: set[Call] = set()
        self.unseen = False
        self.missing = 0
        self.ahead = 0
        self.pins = 0
        self._handles: list[Waitable] | None = None

    def set_buckets(self, buckets: Sequence[Bucket]) -> None:
        """Consist of these, which are resident like those before. While it is released, if it can be."""
        self.buckets = tuple(buckets)
        self.numel = sum(bucket.numel for bucket in buckets)

    @property
    def in_flight(self) -> bool:
        return self._handles is not None

    @property
    def trainable_count(self) -> int:
        """Parameters that a backward pass can bring a gradient for now."""
        with torch._C.DisableTorchFunctionSubclass():
            return sum(slot.parameter.requires_grad for b in self.buckets if b.trained for slot in b.slots)

    @property
    def done(self) -> bool:
        """As far as hooks tell, the current backward pass will not read the parameters again."""
        return self.missing <= 0 and not self.open_calls and not self.unseen

    def start_gather(self, *, exact: bool = False, during: str = "") -> None:
        """Send for the parameters unless they are here or under way; ``exact``: as they are stored.

        ``during`` says what asks for them, for errors.
        """
        if exact and self._exchange.lossy:
            self.release()
        if not self.live and self._handles is None:
            self._handles = [self._exchange.start(bucket, exact=exact, during=during) for bucket in self.buckets]
            self._presence.coming += self.numel

    def finish_gather(self) -> None:
        """Block until the parameters are here, and make them readable."""
        if self._handles is None:
            return
        handles, self._handles = self._handles, None
        self._presence.coming -= self.numel
        for handle in handles:
            handle.wait()
        for bucket in self.buckets:
            bucket.attach()
        self.live = True
        self._presence.live += self.numel

    def release(self) -> None:
        """Let the parameters go (a gather under way is completed first: its buffer is in use)."""
        if self.resident:
            return
        self.finish_gather()
        if self.live and not self.pins:
            for bucket in self.buckets:
                bucket.release()
            self.live = False
            self._presence.live -= self.numel

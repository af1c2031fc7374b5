"""Takes gradients as backward makes them and sends them off bucket by bucket while it computes on.

The problem: ranks must start the same reductions in the same order, though a parameter may get no gradient on one rank,
or gradients more than once in a pass (a shared block under reentrant recomputation). The idea: buckets are sent in one
fixed order, each exactly once per backward pass that reduces: when it is full and its turn has come, else at the end of
the pass, with zeros for what is missing. What arrives for a bucket that has been sent already waits in the bucket,
and is reduced with the next pass or, at the latest, by the optimizer step, which asks all ranks who still has some. So
no rank ever sends something that another does not expect, and nothing is lost.

The fixed order starts as the reverse of the model's, and becomes rank 0's observed order at the first step.

Buckets whose gradients are rows are sent when the pass is over: ranks then wait for each other to learn how many rows
there are, which within a pass might be for ever, and embeddings have their gradients last anyway.

[Note: Waiting for each other] Where parameters are gathered in backward, a rank that waits for a reduction keeps others
waiting for its part of the next gather. One of them may hold back its part of the reduction until the pass ends,
because a bucket stays short there (an expert that got no token): a deadlock. So all ranks pass the same marks, the
gathers, and before each of them send what is `due`, full or not. Whoever has passed a mark may wait for what was due at
it, and for nothing else until the pass ends. Where the ranks are known to go through the same sequence of gathers and
gradients (`alike`), each of these is such a mark, and nothing more needs to be said.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from drivetrain.comm import Waitable, broadcast
from drivetrain.kernels import prefer_large_pages
from drivetrain.zero.bucket import Bucket
from drivetrain.zero.exchange import GradientExchange, Pending
from drivetrain.zero.ranks import Ranks
from drivetrain.zero.rows import Rows

IN_FLIGHT = 2
"""Reductions under way at once: each holds its bucket's gradients, so more of them would cost memory for no overlap."""


@dataclass
class _Lane:
    """A bucket's progress through one backward pass."""

    bucket: Bucket
    gaps: list[slice]
    expected: int = 0  # slots that are trained
    filled: list[bool] = field(default_factory=list)  # slots of bucket.local that hold gradients
    arrived: set[int] = field(default_factory=set)  # slots that got a gradient in this pass
    sent: bool = False

    @property
    def full(self) -> bool:
        return 0 < self.expected <= len(self.arrived)


def _as_it_is(pending: Pending) -> Pending:
    return pending


def _gaps(bucket: Bucket) -> list[slice]:
    """The padding of a bucket, as slices."""
    edges = [(slot.start, slot.start + slot.numel) for slot in bucket.slots]
    starts = [start for start, _ in edges[1:]] + [bucket.numel]
    return [slice(end, start) for (_, end), start in zip(edges, starts, strict=True) if end < start]


class GradientReducer:
    """Collects gradients into buckets and reduces them.

    Args:
        buckets: those that can be trained, in model order. Only what is trained takes part; see `set_trained`.
        exchange: how a bucket is reduced.
        ranks: the ranks that train.
        overlap: send buckets during backward rather than at its end.
        gathers: parameters are gathered in backward; then `due` is called.

    Attributes:
        watch: what is kept of a reduction that was started, in its place.
        alike: in the rest of this backward pass, all ranks come by the same gathers and gradients in the same sequence.
    """

    def __init__(
        self, buckets: Sequence[Bucket], exchange: GradientExchange, ranks: Ranks, *, overlap: bool, gathers: bool
    ) -> None:
        self._lanes: list[_Lane] = []
        self._lane_of: dict[Bucket, int] = {}
        self._exchange = exchange
        self._ranks = ranks
        self._overlap = overlap
        self._gathers = gathers
        self.watch: Callable[[Pending], Pending] = _as_it_is
        self.alike = False
        self._active: list[int] = []  # lanes of what is trained
        self._rows: list[int] = []
        self._order: list[int] = []
        self._turn = 0  # how many of the order have been sent in this pass
        self._due = 0  # how many of the order all ranks send before they wait for anything else
        self._observed: list[int] = []
        self._agreed = True
        self._pending: deque[Pending] = deque()
        self._averaging: list[Waitable] = []
        self.extend(buckets)

    def extend(self, buckets: Sequence[Bucket]) -> None:
        """Reduce these too. Outside of backward passes; `set_trained` follows."""
        for bucket in buckets:
            self._lane_of[bucket] = len(self._lanes)
            self._lanes.append(_Lane(bucket, _gaps(bucket)))

    def lane(self, bucket: Bucket) -> int:
        """By which number `take` and `due` know ``bucket``."""
        return self._lane_of[bucket]

    def set_trained(self) -> None:
        """Other buckets, or parameters in them, are trained from here on, on all ranks.

        Not during a backward pass. Gradients for others are kept until `stray` is asked.
        """
        self.drain()
        for lane in self._lanes:
            slots = lane.bucket.slots if lane.bucket.trained else ()
            lane.expected = sum(slot.parameter.requires_grad for slot in slots)
        self._active = [index for index, lane in enumerate(self._lanes) if lane.bucket.trained]
        self._rows = [index for index in self._active if self._lanes[index].bucket.row_width is not None]
        # Small parameters that stay whole lie together, from all over the model: theirs is full when the pass ends.
        backwards = sorted(self._active, key=lambda index: (self._lanes[index].bucket.resident, -index))
        self._order = [index for index in backwards if index not in self._rows]
        self._observed.clear()
        self._agreed = len(self._order) < 2

    @torch.no_grad()
    def take(self, lane_index: int, slot_index: int, gradient: torch.Tensor, *, reduces: bool) -> None:
        """Put a gradient into its bucket; send the bucket if that was the last one it waited for."""
        lane = self._lanes[lane_index]
        bucket = lane.bucket
        slot = bucket.slots[slot_index]
        bucket.used[slot_index] = True
        if bucket.row_width is not None:
            self._take_rows(bucket, gradient)
            return
        self._make_room(lane)
        assert isinstance(bucket.local, torch.Tensor)
        place = bucket.local[slot.start : slot.start + slot.numel].view(slot.shape)
        dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
        if lane.filled[slot_index]:
            place.add_(dense)
        else:
            place.copy_(dense)
            lane.filled[slot_index] = True
        lane.arrived.add(slot_index)
        if lane.full and reduces:
            if not self._agreed and lane_index not in self._observed:
                self._observed.append(lane_index)
            if self._overlap and not lane.sent:
                self._send_in_turn(0)

    def _take_rows(self, bucket: Bucket, gradient: torch.Tensor) -> None:
        if bucket.local is None:
            self._finish_averaging()
            self._exchange.reopen(bucket)
        rows = Rows.of(gradient, self._exchange.accumulate_dtype(bucket))
        bucket.local = bucket.local.plus(rows) if isinstance(bucket.local, Rows) else rows

    def _make_room(self, lane: _Lane) -> None:
        bucket = lane.bucket
        if bucket.local is not None:
            return
        self._finish_averaging()
        self._exchange.reopen(bucket)
        if bucket.local is not None:
            lane.filled = [True] * len(bucket.slots)
            return
        dtype = self._exchange.accumulate_dtype(bucket)
        bucket.local = prefer_large_pages(torch.empty(bucket.numel, dtype=dtype, device=self._ranks.shard.device))
        lane.filled = [False] * len(bucket.slots)

    def due(self, lanes: Collection[int], *, reduces: bool) -> None:
        """No gradient of ``lanes`` is expected any more in this pass: send them, and what is before them in the order.

        All ranks call it with the same lanes at the same place of the pass, before a gather. A gradient that comes
        nevertheless is late, not lost.
        """
        if not (reduces and self._overlap):
            return
        end = max((place + 1 for place, index in enumerate(self._order) if index in lanes), default=0)
        self._due = max(self._due, end)
        self._send_in_turn(self._due)

    def finish_backward(self, *, reduces: bool, closes: bool) -> None:
        """The backward pass has ended: send what has not been sent, and if it closes the step, tell the replicas."""
        self._due = len(self._order)
        if reduces:
            self._send_in_turn(self._due)
            self._send_rows(self._rows)
            if closes:
                self.average_replicas()
        self._turn = self._due = 0
        self.alike = False
        for lane in self._lanes:
            lane.arrived.clear()
            lane.sent = False

    def abandon_backward(self) -> None:
        """The backward pass died of an exception: forget its progress, and every gradient of the current step."""
        self.finish_backward(reduces=False, closes=False)
        while self._pending:
            self._pending.popleft().drop()
        self._finish_averaging()
        self.clear()

    def _send_in_turn(self, until: int) -> None:
        """Send the first ``until`` of the order, and those after them that are full."""
        while self._turn < len(self._order):
            lane = self._lanes[self._order[self._turn]]
            if self._turn >= until and not lane.full:
                return
            self._turn += 1
            lane.sent = True
            self._send(lane)

    def _send_rows(self, which: Sequence[int]) -> None:
        buckets = [self._lanes[index].bucket for index in which]
        if not buckets:
            return
        for bucket, counts in zip(buckets, self._exchange.count_rows(buckets), strict=True):
            self._make_way(bucket)
            self._pending.append(self._exchange.start_rows(bucket, counts))

    def _send(self, lane: _Lane) -> None:
        bucket = lane.bucket
        if isinstance(bucket.local, torch.Tensor):
            for slot, filled in zip(bucket.slots, lane.filled, strict=True):
                if not filled:
                    bucket.local[slot.start : slot.start + slot.numel].zero_()
            for gap in lane.gaps:
                bucket.local[gap].zero_()
        self._make_way(bucket)
        self._pending.append(self.watch(self._exchange.start(bucket)))

    def _make_way(self, bucket: Bucket) -> None:
        """Before ``bucket`` is sent: finish what must not be under way at the same time."""
        while (self._may_wait and len(self._pending) >= IN_FLIGHT) or any(p.bucket is bucket for p in self._pending):
            self._pending.popleft().wait()
        self._finish_averaging()
        self._exchange.reopen(bucket)

    @property
    def _may_wait(self) -> bool:
        """Whether all ranks are bound to send what the oldest reduction under way waits for; see the note."""
        early = max(0, self._turn - 1 - self._due) if self._gathers and not self.alike else 0
        return len(self._pending) > early

    def drain(self) -> None:
        """Block until every reduction under way has completed."""
        while self._pending:
            self._pending.popleft().wait()
        self._finish_averaging()

    def _finish_averaging(self) -> None:
        while self._averaging:
            self._averaging.pop().wait()

    def average_replicas(self) -> None:
        """Start to reduce over the replicas what is reduced within each of them only. Collective."""
        if self._ranks.replicas.size == 1:
            return
        self.drain()
        for index in (*self._order, *self._rows):
            bucket = self._lanes[index].bucket
            if not bucket.averaged:
                self._averaging.append(self._exchange.average(bucket))

    @property
    def holds_gradients(self) -> bool:
        """Whether there is a gradient here, accumulating, under way or reduced."""
        buckets = (lane.bucket for lane in self._lanes)
        return bool(self._pending) or any(b.local is not None or b.reduced is not None for b in buckets)

    @property
    def stray(self) -> bool:
        """Whether this rank holds gradients of a bucket that ranks have not agreed to train."""
        buckets = (lane.bucket for lane in self._lanes)
        return any(not b.trained and (b.local is not None or b.reduced is not None) for b in buckets)

    def unsent(self) -> list[bool]:
        """For each trained bucket, whether this rank holds gradients of it that are not reduced over all ranks."""
        replicated = self._ranks.replicas.size > 1
        buckets = [self._lanes[index].bucket for index in self._active]
        return [b.local is not None or (replicated and b.reduced is not None and not b.averaged) for b in buckets]

    def reduce(self, which: Sequence[bool]) -> None:
        """Reduce the trained buckets that any rank holds gradients of; all ranks must pass the same ``which``."""
        wanted = {index for index, chosen in zip(self._active, which, strict=True) if chosen}
        for index in self._order:
            if index in wanted:
                self._send(self._lanes[index])
        self._send_rows([index for index in self._rows if index in wanted])
        self.average_replicas()
        self.drain()

    def agree_on_order(self) -> None:
        """Adopt the order in which rank 0 saw buckets fill up. Collective; does something only the first time."""
        if self._agreed:
            return
        rest = [index for index in self._order if index not in self._observed]
        order = torch.tensor(self._observed + rest, dtype=torch.int64, device=self._ranks.shard.control_device)
        broadcast(order, self._ranks.everyone, purpose="the order in which gradients are reduced").wait()
        self._order = order.tolist()
        self._agreed = True

    def kept_errors(self) -> Iterator[torch.Tensor]:
        """The memory in which errors of quantised gradients are kept."""
        return self._exchange.kept_errors()

    def step_taken(self, *, trusted: bool) -> None:
        """The optimizer has used the gradients, or (``trusted=False``) found them useless."""
        self._exchange.step_taken(trusted=trusted)

    def clear(self) -> None:
        """Forget all gradients."""
        for lane in self._lanes:
            lane.bucket.local = None
            lane.bucket.forget_gradients()
            lane.bucket.used = [False] * len(lane.bucket.slots)

"""How gradients of a bucket travel: from every rank's contribution to the sum, or mean, that the optimizer sees.

Stateless but for the bucket it is given. At stage 0 the whole is reduced to every rank, above it each rank gets its
shard; the arithmetic per element is the same (``drivetrain.comm`` adds in rank order), so stages agree bitwise. Where
shards are held by several replicas, what was reduced within each is reduced over them once per step.

Gradients of embeddings may travel as rows (see `rows`). Such a bucket is never quantised, and what has been reduced of
it is never sent again: later gradients of the same step are reduced by themselves and added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from drivetrain.comm import Staged, Waitable, all_reduce, reduce_scatter, reduce_scatter_encoded
from drivetrain.kernels import prefer_large_pages
from drivetrain.zero.bucket import Bucket
from drivetrain.zero.codec import NEAR, BlockCodec
from drivetrain.zero.feedback import ErrorMemory
from drivetrain.zero.policy import Policy, ReduceOp
from drivetrain.zero.ranks import Ranks
from drivetrain.zero.row_exchange import Counts, PendingRows, count_rows, rows_pay
from drivetrain.zero.rows import Rows


class Pending(Protocol):
    """A reduction on its way. `wait` adds the result to ``bucket.reduced``, `drop` forgets it; both wait for its end.

    Further calls of either do nothing.
    """

    bucket: Bucket

    def wait(self) -> None: ...

    def drop(self) -> None: ...


class PendingReduction:
    """The reduction of a whole bucket. See `Pending`."""

    def __init__(
        self, bucket: Bucket, handle: Waitable, result: torch.Tensor, scale: float, dtype: torch.dtype
    ) -> None:
        self.bucket = bucket
        self._handle = handle
        self._result: torch.Tensor | None = result
        self._scale = scale
        self._dtype = dtype

    def wait(self) -> None:
        """Block until the gradients are reduced. Further calls do nothing."""
        if self._result is None:
            return
        self._handle.wait()
        bucket, result = self.bucket, self._result.to(self._dtype)
        self._result = None
        if self._scale != 1.0:
            result.mul_(self._scale)
        bucket.add_reduced(result)

    def drop(self) -> None:
        """Block until the gradients are reduced, and forget them."""
        if self._result is not None:
            self._handle.wait()
            self._result = None


class GradientExchange:
    """Reduces buckets the way a policy says.

    The mean over n ranks with predivide factor f is computed as ``sum(g / f) * (f / n)``; the plain mean (f = 1) leaves
    the division to the collective, which does it in the precision that it adds in.
    """

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self._policy = policy
        self._axis = ranks.reduce
        self._nodes = ranks.reduce_nodes
        self._replicas = ranks.replicas
        self._codec = None if policy.reduce_rule is None else BlockCodec(policy.reduce_rule)
        self._near = BlockCodec(NEAR)
        self._errors = ErrorMemory(policy.error_feedback) if policy.error_feedback else None

    def accumulate_dtype(self, bucket: Bucket) -> torch.dtype:
        """The dtype that gradients of ``bucket`` are summed in."""
        return self._policy.accumulate_dtype or bucket.dtype

    def _wire_dtype(self, bucket: Bucket) -> torch.dtype:
        """The dtype that gradients of ``bucket`` travel in, unless they are quantised."""
        return bucket.wire or self._policy.reduce_dtype or self.accumulate_dtype(bucket)

    def _arithmetic(self) -> tuple[ReduceOp, float, float]:
        """How gradients are reduced, and what they are multiplied by before they travel and after it."""
        op, factor = self._policy.reduce_op, self._policy.predivide_factor
        return ("sum", 1.0 / factor, factor / self._axis.size) if op == "mean" and factor != 1.0 else (op, 1.0, 1.0)

    def start(self, bucket: Bucket) -> Pending:
        """Send off ``bucket.local`` (zeros if there is none), which belongs to the reduction from here on."""
        kept, wire = self.accumulate_dtype(bucket), self._wire_dtype(bucket)
        op, before, scale = self._arithmetic()
        local, bucket.local = bucket.local, None
        assert not isinstance(local, Rows)
        if local is None:
            local = torch.zeros(bucket.numel, dtype=wire, device=self._axis.device)
        local = local.to(wire)
        if before != 1.0:
            local.mul_(before)
        purpose = f"reduction of the gradients of {bucket.title}"
        if not bucket.split:
            handle = all_reduce(local, self._axis, op=op, purpose=purpose)
            return PendingReduction(bucket, handle, local, scale, kept)
        whole = bucket.layout.shard_numel == bucket.numel
        output = local if whole else prefer_large_pages(local.new_empty(bucket.layout.shard_numel))
        if self._codec is not None and not whole and bucket.row_width is None:
            return PendingReduction(bucket, self._encoded(bucket, output, local, op, purpose), output, scale, kept)
        handle = reduce_scatter(output, local, self._axis, op=op, purpose=purpose)
        return PendingReduction(bucket, handle, output, scale, kept)

    def count_rows(self, buckets: Sequence[Bucket]) -> list[Counts]:
        """What `start_rows` must know of each of ``buckets``. Collective."""
        return count_rows(buckets, self._axis)

    def start_rows(self, bucket: Bucket, counts: Counts) -> Pending:
        """`start` for a bucket whose gradients are rows; as a whole if that moves fewer bytes."""
        assert bucket.row_width is not None
        kept, wire = self.accumulate_dtype(bucket), self._wire_dtype(bucket)
        rows, bucket.local = bucket.local, None
        if not isinstance(rows, Rows):
            rows = Rows.none(bucket.row_width, kept, self._axis.device)
        if not rows_pay(bucket, counts, wire):
            bucket.local = torch.zeros(bucket.numel, dtype=kept, device=self._axis.device)
            rows.add_to(bucket.local, 0)
            return self.start(bucket)
        op, before, scale = self._arithmetic()
        values = rows.values.to(wire)
        sent = Rows(indices=rows.indices, values=values if before == 1.0 else values * before)
        return PendingRows(bucket, sent, counts, self._axis, mean=op == "mean", scale=scale, dtype=kept)

    def _encoded(
        self, bucket: Bucket, output: torch.Tensor, local: torch.Tensor, op: ReduceOp, purpose: str
    ) -> Waitable:
        assert self._codec is not None
        codec, errors = self._codec, self._errors
        return reduce_scatter_encoded(
            output,
            local,
            self._nodes.within,
            self._nodes.between,
            codec,
            near=self._near,
            adjust=None if errors is None else lambda pieces: errors.compensate(bucket, pieces, codec),
            op=op,
            purpose=purpose,
        )

    def kept_errors(self) -> Iterator[torch.Tensor]:
        """The memory in which errors of quantised gradients are kept."""
        if self._errors is not None:
            yield from self._errors.tensors()

    def step_taken(self, *, trusted: bool) -> None:
        """One optimizer step is over; ``trusted`` tells whether its gradients were finite."""
        if self._errors is not None:
            self._errors.step_taken(trusted=trusted)

    def average(self, bucket: Bucket) -> Waitable:
        """Reduce ``bucket.reduced`` over the replicas, in place. All of them must have it."""
        if bucket.reduced is None:
            region = bucket.region.stop - bucket.region.start
            bucket.add_reduced(torch.zeros(region, dtype=self.accumulate_dtype(bucket), device=self._axis.device))
        assert bucket.reduced is not None
        bucket.averaged = True
        purpose = f"reduction over replicas of the gradients of {bucket.title}"
        kept = bucket.reduced
        if bucket.homes.gradients is not None:
            with bucket.gradients_at_hand(changes=True):
                sent = kept.to(self._axis.device, self._wire_dtype(bucket), copy=True)
                handle = all_reduce(sent, self._replicas, op=self._policy.reduce_op, purpose=purpose)
                handle.wait()
                kept.copy_(sent)
            return handle
        sent = kept.to(self._wire_dtype(bucket))
        handle = all_reduce(sent, self._replicas, op=self._policy.reduce_op, purpose=purpose)
        if sent is kept:
            return handle

        def store() -> None:
            kept.copy_(sent)

        return Staged(handle, store)

    def unaverage(self, bucket: Bucket) -> None:
        """Before more is added to gradients that are averaged: leave a share that the next average makes whole."""
        if bucket.averaged and bucket.reduced is not None and self._policy.reduce_op == "sum":
            with bucket.gradients_at_hand(changes=True):
                bucket.reduced.div_(self._replicas.size)
        bucket.averaged = False

    def reopen(self, bucket: Bucket) -> None:
        """Let a bucket that is reduced already take more gradients without a second buffer.

        Only where every rank holds the whole result R (stage 0): with R as its own contribution, the next mean over
        ranks is R plus the mean of what is new; a sum needs R divided by the number of ranks first. That holds if all
        ranks contribute R, so a rank with nothing new, or that had R too late, does it when the bucket is sent. Not
        where the policy asks for a reduction per micro-batch: that promises the additions in that order.
        """
        self.unaverage(bucket)
        if (
            bucket.row_width is not None
            or bucket.split
            or self._policy.reduces_every_micro_batch
            or bucket.reduced is None
        ):
            return
        done, bucket.reduced = bucket.reduced, None
        if self._policy.reduce_op == "sum":
            done.div_(self._axis.size)
        bucket.local = bucket.local.add_(done) if isinstance(bucket.local, torch.Tensor) else done

"""How a released bucket's parameters come back: from all shards, plain or quantised, in one hop or two, or from nearby.

With a second copy of the shards within each node (hpZ of ZeRO++, arXiv:2306.10209), the first gather after an optimizer
step crosses between nodes and fills it, and every further one (backward, the next micro-batch) stays within the node.
Quantised gathers (qwZ), and rounded ones (see `wire`), give every rank the same values, which are not quite the
optimizer's: who wants those, to show or to change them, asks for an exact gather. Frozen parameters that are kept
quantised (see `packed`) are gathered as they are kept, in the same ways.
"""

from __future__ import annotations

import torch

from drivetrain.comm import Codec, Purpose, Staged, Waitable, all_gather, all_gather_encoded, all_gather_in_two
from drivetrain.zero.bucket import Bucket
from drivetrain.zero.codec import BlockCodec
from drivetrain.zero.parking import PARAMETERS, MovedStates
from drivetrain.zero.policy import Policy
from drivetrain.zero.ranks import Ranks
from drivetrain.zero.wire import CastCodec


class ParameterExchange:
    """Gathers buckets the way a policy says, unless they are among what is ``moved``."""

    def __init__(self, policy: Policy, ranks: Ranks, moved: MovedStates) -> None:
        self._moved = moved
        self._axis = ranks.shard
        self._nodes = ranks.gather_nodes
        self._in_two = policy.gather_in_two
        self._codec: Codec | None = None if policy.gather_rule is None else BlockCodec(policy.gather_rule)
        self._rounding = None if policy.wire_rule is None else CastCodec(policy.wire_rule.dtype)
        self._seconds = policy.secondary_ranks > 1

    @property
    def lossy(self) -> bool:
        """What is gathered is not exactly what is stored."""
        return self._codec is not None or self._rounding is not None

    def start(self, bucket: Bucket, *, exact: bool = False, during: str = "") -> Waitable:
        """Send for the whole of ``bucket``. Call `Bucket.attach` after waiting, if it was released.

        ``during`` says what asks for it, for errors.
        """
        self._moved.require("a gather of parameters", PARAMETERS)
        bucket.make_room()
        packed, purpose = bucket.packed, Purpose(f"gather of {bucket.title}", during)
        if packed is not None:
            wire = packed.encoded.new_empty(self._axis.size * packed.encoded.numel())
            first = self._gather(bucket, wire, packed.encoded, purpose, exact=exact)
            return Staged(first, lambda: packed.decode(wire, bucket.full))
        if bucket.resident:
            return all_gather(bucket.full, bucket.shard, self._axis, purpose=purpose)
        return self._gather(bucket, bucket.full, self._shard_of(bucket), purpose, exact=exact)

    def _shard_of(self, bucket: Bucket) -> torch.Tensor:
        """The shard, from which a gather may take as long as it will. From a store it goes where it belongs at once."""
        home = bucket.homes.shard
        if home is None:
            return bucket.shard
        with home.at_hand(changes=False):
            if self._in_two:
                return bucket.shard.to(self._axis.device, copy=True)
            return bucket.full[bucket.own].copy_(bucket.shard)

    def _codec_of(self, bucket: Bucket) -> Codec | None:
        if bucket.packed is not None:
            return None
        return self._rounding if self._codec is None and bucket.wire is not None else self._codec

    def _gather(
        self, bucket: Bucket, whole: torch.Tensor, shard: torch.Tensor, purpose: Purpose, *, exact: bool
    ) -> Waitable:
        codec = self._codec_of(bucket)  # then what a second copy holds is not what is stored
        if self._seconds and bucket.secondary is not None and not (exact and codec is not None):
            return all_gather(whole, bucket.secondary, self._nodes.within, purpose=purpose)
        first = self._from_all(whole, shard, None if exact else codec, purpose)
        if not self._seconds or exact:
            return first
        return Staged(first, lambda: bucket.keep_second_copy(whole, self._nodes.within))

    def _from_all(self, whole: torch.Tensor, shard: torch.Tensor, codec: Codec | None, purpose: Purpose) -> Waitable:
        within, between = self._nodes.within, self._nodes.between
        if self._in_two and within.size > 1 and between.size > 1:
            return all_gather_in_two(whole, shard, within, between, codec, purpose=purpose)
        if codec is not None:
            return all_gather_encoded(whole, shard, self._axis, codec, purpose=purpose)
        return all_gather(whole, shard, self._axis, purpose=purpose)

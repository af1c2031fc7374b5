"""Frozen parameters kept as quantised blocks: what a rank has of them, and how it is read and changed.

The problem: in fine-tuning nearly all parameters are frozen, and keeping and gathering them costs as much as if they
were trained. The idea (``zero_quantized_nontrainable_weights`` of ZeRO++): a rank's shard is codes and scales, these
are what is gathered, and they are decoded into the whole parameters.

Invariants:
- Blocks begin where their parameter does and no shard cuts one (the bucket is aligned to them). So the values are those
  of `drivetrain.kernels.quantize` for each parameter by itself, on any number of ranks.
- Whoever reads gets codes times scale, in fp32; the whole parameters hold that, rounded once to what they compute in.
- Writing back what was read changes nothing: a scale is some magnitude divided by the largest code, and for such
  numbers multiplying by that code and dividing again, rounding each time, gives the same (tested for every mantissa).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drivetrain.kernels import QuantizationRule, Quantized, dequantize, quantize
from drivetrain.zero.codec import BlockCodec
from drivetrain.zero.layout import round_up
from drivetrain.zero.state import FlatSlice

PACKABLE = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that can be quantised."""


class PackedShard:
    """A rank's shard of frozen parameters, quantised.

    Positions are elements of the shard.

    Args:
        values: the shard, [a multiple of the block size], zero between parameters.
        rule: how it is quantised.
    """

    encoded: torch.Tensor  # [bytes] uint8: all codes, then all scales

    def __init__(self, values: torch.Tensor, rule: QuantizationRule) -> None:
        self.rule = rule
        self._codec = BlockCodec(rule)
        self._numel = values.numel()
        self.encoded = torch.empty(self._codec.encoded_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        self._codec.encode(values, self.encoded)
        self._edges: dict[int, tuple[torch.Tensor, int]] = {}  # blocks of which a part has arrived: values, how many

    def decode(self, wire: torch.Tensor, out: torch.Tensor) -> None:
        """Write to ``out`` what all ranks' shards stand for, which lie end to end in ``wire``."""
        for encoded, place in zip(wire.view(-1, self.encoded.numel()), out.view(-1, self._numel), strict=True):
            self._codec.decode_sum([encoded], place)

    def read(self, start: int, numel: int) -> torch.Tensor:
        """Elements from ``start`` on, in fp32."""
        first = start // self.rule.block_size * self.rule.block_size
        return dequantize(self._part(first, start + numel - first))[start - first :]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Replace the elements from ``start`` on, the first of a block, by ``values``: whole blocks, but that the last
        may be a parameter's shorter one."""
        if values.numel() == 0:
            return
        part = self._part(start, round_up(values.numel(), self.rule.block_size))
        filled = torch.zeros(part.numel, dtype=values.dtype, device=part.values.device)
        filled[: values.numel()].copy_(values)
        quantize(filled, self.rule, out=part)

    def shown(self, values: torch.Tensor) -> torch.Tensor:
        """What ``values``, a whole parameter, become when they are written."""
        return dequantize(quantize(values.contiguous(), self.rule)).view_as(values)

    def adopt(self, values: torch.Tensor) -> None:
        """Take over ``values``, the whole shard; blocks that are as they were read keep their codes."""
        old, new = self._part(0, self._numel), quantize(values, self.rule)
        same = self._blocks(dequantize(old, dtype=values.dtype) == values).all(dim=1, keepdim=True)
        for kept, fresh in zip(old.stored, new.stored, strict=True):
            if kept is not None and fresh is not None:
                blocks = kept.view(same.numel(), -1)
                blocks.copy_(torch.where(same, blocks, fresh.view_as(blocks)))

    def arrive(self, start: int, values: torch.Tensor, end: int) -> None:
        """`write` for ``values`` that may begin and stop within a block, of a parameter that ends at ``end``.

        A block is written when all of it has arrived.
        """
        size, stop = self.rule.block_size, start + values.numel()
        first = min(round_up(start, size), stop)
        last = stop if stop == end else max(first, stop // size * size)
        self.write(first, values[first - start : last - start])
        for low, high in ((start, first), (last, stop)):
            if low < high:
                self._arrive_in(low // size, low % size, values[low - start : high - start], end)

    def _arrive_in(self, block: int, offset: int, values: torch.Tensor, end: int) -> None:
        start = block * self.rule.block_size
        length = min(self.rule.block_size, end - start)
        held, count = self._edges.pop(block, (values.new_empty(length), 0))
        held[offset : offset + values.numel()].copy_(values)
        if count + values.numel() < length:
            self._edges[block] = held, count + values.numel()
        else:
            self.write(start, held)

    def forget_arrivals(self) -> None:
        """Drop parts of blocks whose other parts never came."""
        self._edges.clear()

    def _part(self, start: int, numel: int) -> Quantized:
        """``numel`` elements from ``start`` on, the first of a block, as views."""
        whole, rule = self._codec.view(self.encoded, self._numel), self.rule
        low, block = rule.packed_bytes(start), start // rule.block_size
        blocks = slice(block, block + rule.blocks(numel))
        return Quantized(
            values=whole.values[low : low + rule.packed_bytes(numel)],
            scales=whole.scales[blocks],
            zeros=None if whole.zeros is None else whole.zeros[blocks],
            numel=numel,
            rule=rule,
        )

    def _blocks(self, values: torch.Tensor) -> torch.Tensor:
        return values.view(-1, self.rule.block_size)


@dataclass(frozen=True, kw_only=True)
class PackedSlice(FlatSlice):
    """A part of one parameter in a `PackedShard`: ``data`` tells size and dtype only, and lies on the meta device."""

    packed: PackedShard
    start: int  # in the shard

    def read(self, start: int, numel: int) -> torch.Tensor:
        return self.packed.read(self.start + start, numel)

    def target(self, start: int, numel: int) -> torch.Tensor:
        return torch.empty(numel, dtype=self.data.dtype, device=self.packed.encoded.device)

    def commit(self, start: int, values: torch.Tensor) -> None:
        self.packed.arrive(self.start + start, values, self.start + self.data.numel())

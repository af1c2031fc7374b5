"""Block quantisation as a codec for the wire: `drivetrain.kernels` behind the protocol of `drivetrain.comm`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drivetrain.kernels import QuantizationRule, Quantized, dequantize_reduce, quantize

INT8_WEIGHTS = QuantizationRule(format="int8", block_size=2048)
"""For gathers of parameters (qwZ): half the bytes of bf16."""

INT4_GRADIENTS = QuantizationRule(format="int4", block_size=128)
"""For gradients between nodes (qgZ): a quarter of the bytes of bf16."""

NEAR = QuantizationRule(format="int8", block_size=256)
"""For what stays within a node, where bytes are cheap: gradients meet the coarser rule once only, as a node's sum."""


class BlockCodec:
    """Codes of ``rule``, then the scales (and zeros) of all blocks. A `drivetrain.comm.Codec`."""

    def __init__(self, rule: QuantizationRule) -> None:
        self.rule = rule

    def encoded_bytes(self, numel: int) -> int:
        return self._scales_at(numel) + 4 * self.rule.blocks(numel) * (1 if self.rule.symmetric else 2)

    def _scales_at(self, numel: int) -> int:
        return -(-self.rule.packed_bytes(numel) // 4) * 4

    def view(self, encoded: torch.Tensor, numel: int) -> Quantized:
        """The tensors that ``numel`` elements are ``encoded`` in."""
        start, blocks = self._scales_at(numel), self.rule.blocks(numel)
        numbers = encoded[start:].view(torch.float32)
        return Quantized(
            values=encoded[: self.rule.packed_bytes(numel)],
            scales=numbers[:blocks],
            zeros=None if self.rule.symmetric else numbers[blocks:],
            numel=numel,
            rule=self.rule,
        )

    def encode(self, source: torch.Tensor, encoded: torch.Tensor) -> None:
        quantize(source, self.rule, out=self.view(encoded, source.numel()))

    def decode_sum(self, encoded: Sequence[torch.Tensor], out: torch.Tensor, *, factor: float = 1.0) -> None:
        dequantize_reduce([self.view(one, out.numel()) for one in encoded], factor=factor, out=out)

    def roundtrip(self, x: torch.Tensor) -> torch.Tensor:
        """What ``x`` is after it has been encoded and decoded."""
        encoded = torch.empty(self.encoded_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        self.encode(x, encoded)
        decoded = torch.empty_like(x)
        self.decode_sum([encoded], decoded)
        return decoded

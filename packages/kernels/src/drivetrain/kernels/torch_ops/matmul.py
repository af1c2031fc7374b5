"""Products with quantised weights in plain torch: oracle of the faster ones, and fallback on any device.

Arithmetic, the same in all rooms up to rounding ("native") or to the bit ("int8" with int8 and int4 codes):
- a row of the weight is cut into its blocks, and a block into segments of at most 512 elements, in their order;
- a segment gives `sum(code * x) * scale + sum(x) * zero`, and the segments of a row are added in order in float32;
- "int8" replaces x by `quantize(x, int8 with the weight's block size)`: the sums above are then sums of integers below
  2**24, exact in float32, and `scale` and `sum(x)` are multiplied by the scale of x's block.

"native" is written here in the simplest way, as the product with the dequantised weight, in float64 if x is.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from drivetrain.kernels.quantize_rules import QuantizationRule
from drivetrain.kernels.torch_ops.quantize import Stored, dequantize_reduce, quantize, unpack

__all__ = ["Activations", "prepare_weight", "quantized_matmul"]

Activations = Literal["native", "int8"]

_SEGMENT: Final = 512


def prepare_weight(
    values: Tensor, scales: Tensor, zeros: Tensor | None, *, rule: QuantizationRule, out_features: int
) -> None:
    """The weight in an order that `quantized_matmul` reads faster: here there is none."""


def quantized_matmul(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    rule: QuantizationRule,
    out_features: int,
    bias: Tensor | None = None,
    activations: Activations = "native",
    prepared: object = None,
) -> Tensor:
    """`x @ W.T + bias` of x [tokens, in] and a weight [out_features, in], stored row-major in blocks that do not cross
    rows, as [tokens, out_features] of x's dtype. `prepared`: what `prepare_weight` of the same room made of the weight,
    if anything."""
    stored = (values, scales, zeros)
    shape = (out_features, x.shape[1])
    product = _native if activations == "native" else _int8
    y = product(x, stored, rule, shape)
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)


def _native(x: Tensor, stored: Stored, rule: QuantizationRule, shape: tuple[int, int]) -> Tensor:
    weight = torch.empty(shape, dtype=torch.float32, device=x.device)
    dequantize_reduce([stored], weight, rules=[rule])
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.to(dtype) @ weight.to(dtype).t()


def _int8(x: Tensor, stored: Stored, rule: QuantizationRule, shape: tuple[int, int]) -> Tensor:
    tokens, (rows, columns), size = x.shape[0], shape, rule.block_size
    blocks = columns // size
    codes = unpack(stored[0], rule, rows * columns).view(rows, blocks, size)
    scales = stored[1].view(rows, blocks)
    x_rule = QuantizationRule(format="int8", block_size=size)
    x_values = torch.empty(tokens * columns, dtype=torch.uint8, device=x.device)
    x_scales = torch.empty(tokens * blocks, dtype=torch.float32, device=x.device)
    quantize(x, (x_values, x_scales, None), rule=x_rule)
    x_codes = unpack(x_values, x_rule, tokens * columns).view(tokens, blocks, size)
    x_scales = x_scales.view(tokens, blocks)
    y = torch.zeros(tokens, rows, dtype=torch.float32, device=x.device)
    for block in range(blocks):
        x_scale = x_scales[:, block, None]
        for start in range(0, size, _SEGMENT):
            part = x_codes[:, block, start : start + _SEGMENT]
            value = (part @ codes[:, block, start : start + _SEGMENT].t()) * (scales[:, block] * x_scale)
            if stored[2] is not None:
                value = value + stored[2].view(rows, blocks)[:, block] * (part.sum(dim=1, keepdim=True) * x_scale)
            y = y + value
    return y

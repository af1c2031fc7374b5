"""`torch_ops.matmul` on host memory through the native core: addresses of tensors that `matmul` has checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from drivetrain.kernels.core import get_num_threads
from drivetrain.kernels.native_ops.quantize import core, dtype_number, stored_array
from drivetrain.kernels.quantize_rules import QuantizationRule
from drivetrain.kernels.torch_ops.matmul import Activations
from drivetrain.kernels.torch_ops.quantize import Stored

__all__ = ["NativeWeight", "prepare_weight", "quantized_matmul"]

_DTYPES: Final[Mapping[torch.dtype, int]] = MappingProxyType(
    {dtype: dtype_number(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeWeight:
    """A weight as the core sees it: `handle` points into `stored`, whose rows may be interleaved in sixteens.

    Calling it is `quantized_matmul` with that weight. That happens once per token and layer, after which a small weight
    takes the processor's caches: few objects are touched on the way.
    """

    stored: Stored
    handle: Any
    out_features: int
    multiply: Callable[..., None]

    def __call__(self, x: Tensor, bias: Tensor | None = None, activations: Activations = "native") -> Tensor:
        """`x @ W.T + bias` for a contiguous x [tokens, in]."""
        tokens = x.shape[0]
        y = x.new_empty(tokens, self.out_features)
        dtype = _DTYPES[x.dtype]
        added, added_dtype = (0, 0) if bias is None else (bias.data_ptr(), _DTYPES[bias.dtype])
        self.multiply(
            self.handle,
            x.data_ptr(),
            dtype,
            tokens,
            added,
            added_dtype,
            y.data_ptr(),
            dtype,
            activations == "int8",
            torch.get_num_threads(),
        )
        return y


def _handle(stored: Stored, rule: QuantizationRule, shape: tuple[int, int], panels: bool) -> Any:
    array = stored_array(stored, rule)
    return core().QuantizedWeight(stored=array, rows=shape[0], columns=shape[1], panels=panels)


def prepare_weight(
    values: Tensor, scales: Tensor, zeros: Tensor | None, *, rule: QuantizationRule, out_features: int
) -> NativeWeight:
    """The weight in panels: as many bytes as it has, rows filled up to a multiple of 16."""
    columns = scales.numel() // max(out_features, 1) * rule.block_size
    rows = core().panel_rows(out_features)
    panels = (
        torch.empty(rule.packed_bytes(rows * columns), dtype=torch.uint8),
        torch.empty(rule.blocks(rows * columns), dtype=torch.float32),
        None if zeros is None else torch.empty(rule.blocks(rows * columns), dtype=torch.float32),
    )
    shape = (out_features, columns)
    source = _handle((values, scales, zeros), rule, shape, panels=False)
    core().prepare_weight(source, stored_array(panels, rule), get_num_threads())
    handle = _handle(panels, rule, shape, panels=True)
    return NativeWeight(stored=panels, handle=handle, out_features=out_features, multiply=core().quantized_matmul)


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
    prepared: NativeWeight | None = None,
) -> Tensor:
    """`torch_ops.matmul.quantized_matmul`: the weight is read once per 64 tokens and unpacked in registers."""
    if prepared is None:
        stored = (values, scales, zeros)
        handle = _handle(stored, rule, (out_features, x.shape[1]), panels=False)
        multiply = core().quantized_matmul
        prepared = NativeWeight(stored=stored, handle=handle, out_features=out_features, multiply=multiply)
    return prepared(x, bias, activations)

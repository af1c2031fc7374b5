"""`torch_ops.matmul` on host memory through the native core: addresses of tensors that `matmul` has checked."""

from __future__ import annotations

from collections.abc import Mapping
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

__all__ = ["Panels", "prepare_weight", "quantized_matmul"]

_ACTIVATIONS: Final[Mapping[str, int]] = MappingProxyType({"native": 0, "int8": 1})


@dataclass(frozen=True, kw_only=True)
class Panels:
    """A weight whose rows lie interleaved in sixteens, as the inner loops read them; `handle` points into `stored`."""

    stored: Stored
    handle: Any


def _handle(stored: Stored, rule: QuantizationRule, shape: tuple[int, int], panels: bool) -> Any:
    array = stored_array(stored, rule)
    return core().QuantizedWeight(stored=array, rows=shape[0], columns=shape[1], panels=panels)


def prepare_weight(
    values: Tensor, scales: Tensor, zeros: Tensor | None, *, rule: QuantizationRule, out_features: int
) -> Panels:
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
    return Panels(stored=panels, handle=_handle(panels, rule, shape, panels=True))


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
    prepared: Panels | None = None,
) -> Tensor:
    """`torch_ops.matmul.quantized_matmul`: the weight is read once per 64 tokens and unpacked in registers."""
    tokens, columns = x.shape
    y = torch.empty((tokens, out_features), dtype=x.dtype)
    dtype = dtype_number(x.dtype)
    if prepared is None:
        handle = _handle((values, scales, zeros), rule, (out_features, columns), panels=False)
    else:
        handle = prepared.handle
    core().quantized_matmul(
        handle,
        x.data_ptr(),
        dtype,
        tokens,
        0 if bias is None else bias.data_ptr(),
        0 if bias is None else dtype_number(bias.dtype),
        y.data_ptr(),
        dtype,
        _ACTIVATIONS[activations],
        get_num_threads(),
    )
    return y

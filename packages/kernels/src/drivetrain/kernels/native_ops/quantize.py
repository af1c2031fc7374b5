"""`torch_ops.quantize` on host memory through the native core: addresses of tensors that `quantization` has checked.

Invariant: the same bits as the reference, but for the scales of signs, whose sums round differently in the last place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from drivetrain.kernels.core import CORE, get_num_threads
from drivetrain.kernels.quantize_rules import QuantizationRule, SignRule
from drivetrain.kernels.torch_ops.quantize import Stored

__all__ = [
    "core",
    "dequantize_reduce",
    "dtype_number",
    "pack_signs",
    "quantize",
    "reduce_quantized",
    "stored_array",
    "unpack_signs",
]

_DTYPES: Final[Mapping[torch.dtype, int]] = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})
_FORMATS: Final[Mapping[str, int]] = MappingProxyType(
    {"int8": 0, "int4": 1, "fp8_e4m3": 2, "fp8_e5m2": 3, "fp6_e3m2": 4}
)
_GROUP: Final = 16


def core() -> Any:
    """The native module."""
    if CORE.module is None:
        raise RuntimeError(CORE.reason)
    return CORE.module


def dtype_number(dtype: torch.dtype) -> int:
    """The core's number of an element type."""
    return _DTYPES[dtype]


def _dense(tensor: Tensor) -> Any:
    return core().DenseArray(data=tensor.data_ptr(), dtype=dtype_number(tensor.dtype))


def stored_array(stored: Stored, rule: QuantizationRule) -> Any:
    """The core's view of quantised tensors."""
    values, scales, zeros = stored
    return core().QuantArray(
        format=_FORMATS[rule.format],
        block_size=rule.block_size,
        values=values.data_ptr(),
        scales=scales.data_ptr(),
        zeros=0 if zeros is None else zeros.data_ptr(),
        symmetric=rule.symmetric,
    )


def _rounding(seed: int | None, first_block: int) -> Any:
    return core().Rounding(stochastic=seed is not None, seed=seed or 0, first_block=first_block)


def _signs(bits: Tensor, scales: Tensor, rule: SignRule, count: int) -> Any:
    return core().SignArray(
        block_size=rule.block_size or -(-max(count, 1) // _GROUP) * _GROUP,
        root_mean_square=rule.scale == "rms",
        bits=bits.data_ptr(),
        scales=scales.data_ptr(),
    )


def quantize(
    source: Tensor, target: Stored, *, rule: QuantizationRule, seed: int | None = None, first_block: int = 0
) -> None:
    """`torch_ops.quantize.quantize`, on all threads."""
    core().quantize(
        _dense(source), source.numel(), stored_array(target, rule), _rounding(seed, first_block), get_num_threads()
    )


def dequantize_reduce(
    sources: Sequence[Stored], target: Tensor, *, rules: Sequence[QuantizationRule], factor: float = 1.0
) -> None:
    """`torch_ops.quantize.dequantize_reduce`, in one pass over memory."""
    arrays = [stored_array(stored, rule) for stored, rule in zip(sources, rules, strict=True)]
    core().dequantize_reduce(arrays, factor, target.numel(), _dense(target), get_num_threads())


def reduce_quantized(
    sources: Sequence[Stored],
    target: Stored,
    *,
    count: int,
    rules: Sequence[QuantizationRule],
    rule: QuantizationRule,
    factor: float = 1.0,
    seed: int | None = None,
    first_block: int = 0,
) -> None:
    """`torch_ops.quantize.reduce_quantized`, in one pass over memory; no float32 array is made."""
    arrays = [stored_array(stored, each) for stored, each in zip(sources, rules, strict=True)]
    rounding = _rounding(seed, first_block)
    core().reduce_quantized(arrays, factor, count, stored_array(target, rule), rounding, get_num_threads())


def pack_signs(source: Tensor, bits: Tensor, scales: Tensor, *, rule: SignRule) -> None:
    """`torch_ops.quantize.pack_signs`, on all threads."""
    count = source.numel()
    core().pack_signs(_dense(source), count, _signs(bits, scales, rule, count), get_num_threads())


def unpack_signs(bits: Tensor, scales: Tensor, target: Tensor, *, rule: SignRule) -> None:
    """`torch_ops.quantize.unpack_signs`, on all threads."""
    count = target.numel()
    core().unpack_signs(_signs(bits, scales, rule, count), count, _dense(target), get_num_threads())

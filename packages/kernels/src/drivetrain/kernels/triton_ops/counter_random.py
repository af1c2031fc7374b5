"""`torch_ops.counter_random` inside kernels: the same bits."""

from __future__ import annotations

import triton
import triton.language as tl

from drivetrain.kernels.torch_ops.counter_random import seed_keys

__all__ = ["random_bits", "signed_keys"]


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


# row  int64 [rows]        column  integer [columns]        key0, key1  int32, `signed_keys` of the seed
@triton.jit
def random_bits(row, column, key0, key1):
    """24 random bits, uint32 [rows, columns]."""
    first = _mix(row.to(tl.uint32) ^ key0.to(tl.uint32))
    second = _mix(_mix((row >> 32).to(tl.uint32) ^ first) ^ key1.to(tl.uint32))
    return _mix(_mix(column.to(tl.uint32)[None, :] ^ first[:, None]) + second[:, None]) >> 8


def signed_keys(seed: int) -> tuple[int, int]:
    """The keys of `seed` as 32-bit signed numbers, so that their type doesn't depend on their value."""
    first, second = seed_keys(seed)
    return first - ((first >> 31) << 32), second - ((second >> 31) << 32)

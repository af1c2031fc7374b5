"""Sizes as people write and read them."""

from __future__ import annotations

import re
from types import MappingProxyType

_UNITS = MappingProxyType(
    {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
)


def parse_bytes(text: str) -> int:
    """`"5GB"` -> 5_000_000_000; units kB, MB, GB (powers of 1000), KiB, MiB, GiB (of 1024), or none for bytes.

    Raises ValueError for anything else, and for less than one byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise ValueError(f"a size of {text!r} is not understood; expected a number and a unit, such as 5GB or 500MiB")
    return size


def human_bytes(size: float) -> str:
    """A size in the unit that keeps it readable: `37 B`, `4.2 MB`."""
    for unit, digits in (("B", 0), ("kB", 1), ("MB", 1), ("GB", 1)):
        if round(size, digits) < 1000:
            return f"{size:.{digits}f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def binary_bytes(size: int) -> str:
    """A power of two as such: `256 KiB`, `4 MiB`; other sizes as `human_bytes` has them."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size % factor == 0 and size >= factor:
            return f"{size // factor} {unit}"
    return human_bytes(size)

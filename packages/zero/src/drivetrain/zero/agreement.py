"""Do all ranks hold the same values? Answered with sixteen bytes per tensor, however many ranks there are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from drivetrain.comm import Axis, all_gather_object, all_reduce

_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that multiplying by it loses nothing modulo 2**64


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit sum of the bits of ``tensor``, each element's times a number of its own: order matters, and NaN is equal
    to itself. 0 on the meta device, where there are no values."""
    if tensor.is_meta:
        return 0
    flat = tensor.detach().reshape(-1)
    width = flat.element_size()
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(as_integers[width]).to(torch.int64) if flat.numel() else flat.new_zeros(0, dtype=torch.int64)
    place = torch.arange(1, bits.numel() + 1, dtype=torch.int64, device=bits.device)
    mixed = (place * _MULTIPLIER) ^ bits
    return int((mixed * _MULTIPLIER ^ (mixed >> 29)).sum().item())


def require_same(tensors: Mapping[str, torch.Tensor], axis: Axis) -> None:
    """Refuse, on every rank, tensors that are not the same on all of them. Collective."""
    told = f"comparison of '{next(iter(tensors), '')}'"
    mine = torch.tensor([checksum(tensor) for tensor in tensors.values()], dtype=torch.int64)
    most = torch.stack((mine, ~mine)).to(axis.control_device)  # the largest of all complements is that of the smallest
    all_reduce(most, axis, op="max", purpose=told).wait()
    if torch.equal(most[0], ~most[1]):
        return
    everybody = all_gather_object(mine.tolist(), axis, purpose=told)
    for index, name in enumerate(tensors):
        for rank, theirs in enumerate(everybody):
            if theirs[index] != everybody[0][index]:
                raise ValueError(
                    f"rank {axis.world.rank}: rank {axis.ranks[rank]} has other values for '{name}' than rank "
                    f"{axis.ranks[0]}. What is written to a parameter must be the same on all ranks: compute it from "
                    "the same seed, or broadcast it first"
                )

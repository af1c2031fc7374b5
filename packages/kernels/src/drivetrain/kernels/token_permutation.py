"""Moving tokens to their experts and back: rows sorted by expert, so that each expert's are one matrix.

Problem: the experts chosen for a token lie anywhere. A product per expert wants its tokens together, and the results
must find their way back, the same on every run.
Idea: `TokenPermutation` holds both directions of one map, so that each move and each gradient is a gather: no row is
written twice, and no sum depends on the order in which threads arrive.
Invariant: an expert's rows are in the order of tokens (and of the choices of one token); what is computed depends on
neither device nor number of threads. No op waits for the device: sizes are bounds, known from shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from .dispatch import resolve, resolve_for

__all__ = ["TokenPermutation", "expert_histogram", "permutation", "permute_tokens", "unpermute_tokens"]

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LIMIT: Final = 2**31 - 2**16  # kernels count in 32 bits, in blocks


@dataclass(frozen=True, kw_only=True)
class TokenPermutation:
    """Where each of the `k` assignments of each token went. All tensors are int32, on one device.

    `assignments` [rows]: the assignment in a row, `token * k + choice`, or -1 in rows of padding.
    `destinations` [tokens, k]: the row of an assignment, or -1 if it was dropped.
    `offsets` [experts + 1]: expert e has the rows `offsets[e]` up to `offsets[e + 1]`, padding last; rows from
    `offsets[-1]` on, up to `rows`, belong to no expert and are padding.
    """

    assignments: Tensor
    destinations: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        parts = {
            "assignments": (self.assignments, 1),
            "destinations": (self.destinations, 2),
            "offsets": (self.offsets, 1),
        }
        for name, (part, dim) in parts.items():
            if part.dtype != torch.int32 or part.dim() != dim or not part.is_contiguous():
                raise ValueError(
                    f"{name}: expected a contiguous int32 tensor of {dim} dimensions; found {part.dtype} of shape "
                    f"{tuple(part.shape)}, strides {part.stride()}"
                )
            if part.device != self.offsets.device:
                raise ValueError(f"{name} lie on {part.device}, offsets on {self.offsets.device}")

    @property
    def rows(self) -> int:
        """Rows of a permuted tensor, padding included."""
        return self.assignments.numel()

    @property
    def tokens(self) -> int:
        return self.destinations.shape[0]

    @property
    def k(self) -> int:
        return self.destinations.shape[1]

    @property
    def num_experts(self) -> int:
        return self.offsets.numel() - 1

    @property
    def sources(self) -> Tensor:
        """The token in each row, int32 [rows], or -1 in rows of padding."""
        return torch.where(self.assignments < 0, -1, self.assignments // max(self.k, 1)).to(torch.int32)

    @property
    def dropped(self) -> Tensor:
        """True for assignments that no row holds, bool [tokens, k]."""
        return self.destinations < 0


def expert_histogram(experts: Tensor, num_experts: int) -> Tensor:
    """How many of `experts` (int32 or int64, any shape) name each expert: int32 [num_experts].

    Numbers outside 0 to `num_experts - 1` name none and are not counted.
    """
    _check_experts("expert_histogram", experts, num_experts)
    counts: Tensor = resolve("expert_histogram", experts.device)(experts, num_experts)
    return counts


def permutation(
    experts: Tensor, num_experts: int, *, capacity: int | None = None, alignment: int = 1
) -> TokenPermutation:
    """Sort the assignments `experts` (int32 or int64 [tokens, k]) by expert, keeping their order within each.

    `capacity`: an expert takes its first so many assignments and drops the rest (None: all). `alignment`: each
    expert's rows are filled up with padding to a multiple of it, so that tiles of a grouped product belong to one
    expert; experts without tokens get no rows. Numbers outside 0 to `num_experts - 1` (-1, say, for another rank's
    experts) are assignments to none, and dropped.

    The number of rows is the most that these shapes can need, so that the device is not waited for:
    `tokens * k` without capacity and alignment.
    """
    _check_experts("permutation", experts, num_experts)
    if experts.dim() != 2:
        raise ValueError(f"permutation: experts have shape {tuple(experts.shape)}; expected [tokens, k]")
    if capacity is not None and capacity < 1:
        raise ValueError(f"permutation: capacity must be at least 1, or None to drop nothing; found {capacity}")
    if alignment < 1:
        raise ValueError(f"permutation: alignment must be at least 1; found {alignment}")
    rows = _most_rows(experts.numel(), num_experts, capacity, alignment)
    if rows > _LIMIT:
        raise ValueError(f"permutation: {rows} rows do not fit 32-bit indices: route fewer tokens at a time")
    assignments, destinations, offsets = resolve("permutation", experts.device)(
        experts, num_experts, rows=rows, capacity=capacity, alignment=alignment
    )
    return TokenPermutation(assignments=assignments, destinations=destinations, offsets=offsets)


def _most_rows(count: int, num_experts: int, capacity: int | None, alignment: int) -> int:
    """The most rows that `count` assignments can fill: a multiple of `alignment`."""
    used = min(count, num_experts)  # experts with a row
    most = (count + used * (alignment - 1)) // alignment
    if capacity is not None:
        most = min(most, used * -(-capacity // alignment))
    return most * alignment


def permute_tokens(x: Tensor, p: TokenPermutation) -> Tensor:
    """`x` [tokens, hidden] copied to the rows of its experts: [p.rows, hidden], zero in rows of padding.

    The gradient of a token is the sum over its rows, in the order of its choices, added in float32.
    """
    _check_moved("permute_tokens", "x", x, p.tokens, p)
    moved: Tensor = resolve_for("permute_tokens", x)(x, p.assignments, p.destinations)
    return moved


def unpermute_tokens(y: Tensor, p: TokenPermutation, weights: Tensor | None) -> Tensor:
    """The rows of each token, times `weights` (floating point [tokens, k]; None: 1), summed: [tokens, hidden].

    `y` [p.rows, hidden]. Products and sums are in float32 (float64 for float64 `y`), in the order of choices, and
    rounded once to the dtype of `y`; dropped assignments count as zero, whatever their weight. Gradients for `y` (zero
    in rows of padding) and `weights` (zero for dropped assignments).
    """
    _check_moved("unpermute_tokens", "y", y, p.rows, p)
    if weights is not None:
        if weights.shape != p.destinations.shape or not weights.is_floating_point():
            raise ValueError(
                f"unpermute_tokens: weights are {weights.dtype} of shape {tuple(weights.shape)}; expected "
                f"floating-point numbers of shape {tuple(p.destinations.shape)}, [tokens, k]"
            )
        if weights.device != y.device:
            raise ValueError(f"unpermute_tokens: weights lie on {weights.device}, y on {y.device}")
    summed: Tensor = resolve_for("unpermute_tokens", y)(y, p.assignments, p.destinations, weights)
    return summed


def _check_experts(op: str, experts: Tensor, num_experts: int) -> None:
    if experts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{op}: experts have dtype {experts.dtype}; expected int32 or int64")
    if num_experts < 1:
        raise ValueError(f"{op}: num_experts must be at least 1; found {num_experts}")
    if experts.numel() > _LIMIT:
        raise ValueError(f"{op}: {experts.numel()} assignments do not fit 32-bit counts: route fewer tokens at a time")


def _check_moved(op: str, role: str, tensor: Tensor, rows: int, p: TokenPermutation) -> None:
    if tensor.dtype not in _DTYPES:
        raise TypeError(f"{op}: {role} has dtype {tensor.dtype}; expected float32, bfloat16, float16 or float64")
    if tensor.dim() != 2 or tensor.shape[0] != rows:
        raise ValueError(f"{op}: {role} has shape {tuple(tensor.shape)}; this permutation expects [{rows}, hidden]")
    if tensor.device != p.offsets.device:
        raise ValueError(f"{op}: {role} lies on {tensor.device}, the permutation on {p.offsets.device}")

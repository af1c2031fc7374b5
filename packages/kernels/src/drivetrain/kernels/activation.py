"""Activations of feed-forward layers, fused with what stands around them: gates, biases, dropout, residuals.

Problem: element by element there is next to nothing to compute, and every op of its own is another trip of the largest
activations of the model through memory, and often another copy kept for backward.
Idea: one kernel forward and one backward; backward computes the activation again from the inputs, and dropout's mask
again from the seed, so neither is kept. The gradient of a bias is summed on the way, in a fixed order.

Bytes moved on a GPU, in units of one tensor of the output's size:
- `swiglu`, `geglu`: forward 2 reads + 1 write, backward 3 reads + 2 writes;
- `bias_gelu`: forward 1 + 1, backward 2 + 1;
- `bias_dropout_residual`: forward 2 + 1, backward 1 + 1 (without dropout 1 + 0 for the bias alone).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .checks import check_floating, check_fraction, check_same_device, check_shape
from .dispatch import resolve_for

__all__ = ["bias_dropout_residual", "bias_gelu", "geglu", "swiglu"]

Approximation = Literal["none", "tanh"]


def _check_gate(op: str, gate: Tensor, up: Tensor | None) -> None:
    check_floating(op, gate=gate, up=up)
    check_same_device(op, gate=gate, up=up)
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2:
            raise ValueError(
                f"{op}: gate has shape {tuple(gate.shape)}; without up it holds both, so its last dimension "
                "must be even"
            )
        return
    check_shape(op, "up", up, gate.shape, "the shape of gate")
    if up.dtype != gate.dtype:
        raise TypeError(f"{op}: gate is {gate.dtype}, up {up.dtype}: convert one of them")


def _check_approximation(op: str, approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"{op}: approximate must be 'none' or 'tanh'; found {approximate!r}")


def _check_bias(op: str, x: Tensor, bias: Tensor | None) -> None:
    if x.dim() == 0:
        raise ValueError(f"{op}: x has no dimensions; expected [..., columns]")
    if bias is not None:
        check_shape(op, "bias", bias, x.shape[-1:], "the size of x's last dimension")


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`silu(gate) * up` (Shazeer, 2020, arXiv:2002.05202), of gate's shape and dtype.

    gate, up [..., columns], of one dtype: float32, bfloat16, float16 or float64. Without `up`, gate is [..., 2 *
    columns] and holds both, gate first, as one projection for both puts them out; backward then writes one gradient,
    where that of two halves of a tensor would have to be put together by another pass.

    Rows at regular distances (halves of a wider tensor) are read in place on a GPU, other layouts are copied.
    """
    _check_gate("swiglu", gate, up)
    result: Tensor = resolve_for("swiglu", gate)(gate, up)
    return result


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: Approximation = "none") -> Tensor:
    """`gelu(gate) * up` (Shazeer, 2020), arguments as in `swiglu`.

    `approximate`: "none" for the exact GELU (the error function), "tanh" for the usual approximation.
    """
    _check_gate("geglu", gate, up)
    _check_approximation("geglu", approximate)
    result: Tensor = resolve_for("geglu", gate)(gate, up, approximate=approximate)
    return result


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: Approximation = "none") -> Tensor:
    """`gelu(x + bias)` (Hendrycks and Gimpel, 2016), of x's shape and dtype; the sum isn't rounded in between.

    x [..., columns], bias [columns], float32, bfloat16, float16 or float64, not necessarily the same.
    """
    check_floating("bias_gelu", x=x, bias=bias)
    check_same_device("bias_gelu", x=x, bias=bias)
    _check_bias("bias_gelu", x, bias)
    _check_approximation("bias_gelu", approximate)
    result: Tensor = resolve_for("bias_gelu", x)(x, bias, approximate=approximate)
    return result


def bias_dropout_residual(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    p: float,
    training: bool = True,
    seed: int,
    first_row: int = 0,
) -> Tensor:
    """`residual + dropout(x + bias)`, in the residual's dtype.

    x and residual [..., columns], bias [columns] or None; float32, bfloat16, float16 or float64, not necessarily the
    same. An element is dropped with probability `p` in [0, 1), rounded to a multiple of 2**-24, and multiplied by 1 /
    (1 - p) otherwise; what is dropped counts as zero even if it was NaN or infinite. Without `training` nothing is
    dropped.

    The mask is a function of `seed` (in [0, 2**63)), the index of the row and the column: the same on every device, and
    made again in backward instead of being kept. `first_row` is the index of x's first row where x is a slice of
    something larger (a shard of the sequence): the parts then drop what the whole would. Each call of a step needs a
    seed of its own.
    """
    op = "bias_dropout_residual"
    check_floating(op, x=x, bias=bias, residual=residual)
    check_same_device(op, x=x, bias=bias, residual=residual)
    _check_bias(op, x, bias)
    check_shape(op, "residual", residual, x.shape, "the shape of x")
    check_fraction(op, p=p)
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"{op}: seed must lie in [0, 2**63); found {seed}")
    if first_row < 0:
        raise ValueError(f"{op}: first_row must not be negative; found {first_row}")
    result: Tensor = resolve_for(op, residual)(
        x, bias, residual, p=p, training=training, seed=seed, first_row=first_row
    )
    return result

"""Cross entropy over a vocabulary, from logits or straight from hidden states.

Problem: logits [tokens, vocabulary] are by far the largest activations of a language model; a softmax kept for
backward, a float32 copy and a gradient make it three or four of them.
Idea: `cross_entropy` reads the logits once for a running maximum and sum, keeps one float32 number per token, and
computes the gradient from the logits when it is asked for. `linear_cross_entropy` includes the projection and works
through the tokens in chunks, so that the logits of one chunk are all that is ever there; `torch_ops.chunked_loss` says
how.

Bytes moved on a GPU by `cross_entropy`, in units of the logits: forward 1 read, backward 1 read + 1 write.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from .checks import check_at_least, check_floating, check_fraction, check_same_device, check_shape
from .dispatch import resolve_for

__all__ = ["cross_entropy", "linear_cross_entropy"]

Reduction = Literal["mean", "sum", "none"]


def _check_labels(op: str, labels: Tensor, tokens: torch.Size, vocabulary: int, ignore_index: int) -> None:
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: labels has dtype {labels.dtype}; expected int64 or int32")
    check_shape(op, "labels", labels, tokens, "one label for every token")
    if labels.device.type != "cpu":
        return  # looking at them would have to wait for the device
    wrong = ((labels < 0) | (labels >= vocabulary)) & (labels != ignore_index)
    if bool(wrong.any()):
        first = int(labels[wrong].reshape(-1)[0])
        raise IndexError(
            f"{op}: labels contains {first}; expected 0 to {vocabulary - 1}, or ignore_index ({ignore_index})"
        )


def _check_rule(op: str, label_smoothing: float, z_loss: float, reduction: str) -> None:
    check_fraction(op, label_smoothing=label_smoothing)
    check_at_least(op, 0.0, z_loss=z_loss)
    if reduction not in get_args(Reduction):
        raise ValueError(f"{op}: reduction must be 'mean', 'sum' or 'none'; found {reduction!r}")


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross entropy of logits [tokens..., vocabulary] and labels [tokens...] (int64 or int32).

    The logits are float32, bfloat16, float16 or float64; the loss is float32 (float64 for float64), a scalar or, with
    reduction "none", [tokens...]. Everything between is float32, the gradient has the logits' dtype.

    Tokens whose label is `ignore_index` have neither loss nor gradient, and "mean" divides by the number of the others;
    without any the mean is zero (torch's is NaN). Label smoothing e gives the label 1 - e and spreads e evenly over the
    vocabulary. `z_loss` adds z_loss * log(sum(exp(logits)))**2 per token, which keeps the logits from drifting (PaLM,
    arXiv:2204.02311).

    A label outside the vocabulary raises IndexError in host memory and makes the loss and the token's gradient NaN on a
    GPU. Logits whose rows are contiguous and at regular distances (a slice of a padded vocabulary) are read in place on
    a GPU, others are copied.
    """
    op = "cross_entropy"
    check_floating(op, logits=logits)
    check_same_device(op, logits=logits, labels=labels)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"{op}: logits has shape {tuple(logits.shape)}; expected [tokens..., vocabulary], not empty")
    _check_labels(op, labels, logits.shape[:-1], logits.shape[-1], ignore_index)
    _check_rule(op, label_smoothing, z_loss, reduction)
    result: Tensor = resolve_for(op, logits)(
        logits,
        labels,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
    )
    return result


def _check_projection(op: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if hidden.dim() == 0 or weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{op}: hidden has shape {tuple(hidden.shape)}, weight {tuple(weight.shape)}; expected "
            "[tokens..., features] and [vocabulary, features]"
        )
    if bias is not None:
        check_shape(op, "bias", bias, weight.shape[:1], "the vocabulary")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise TypeError(f"{op}: hidden is {hidden.dtype}, {name} {tensor.dtype}: convert one of them")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    chunk_tokens: int | None = None,
) -> Tensor:
    """`cross_entropy(hidden @ weight.T + bias, labels)` without ever having all logits in memory.

    hidden [tokens..., features], weight [vocabulary, features], bias [vocabulary] or None, of one dtype; labels
    [tokens...] and everything else as in `cross_entropy`. Logits are rounded to that dtype, as those of a layer of its
    own would be; autocast doesn't reach inside.

    Memory, beside the inputs: the logits of one chunk, [chunk_tokens, vocabulary] in hidden's dtype (and, in plain
    torch, a float32 copy of them where that is smaller), and the gradients: hidden's in its dtype, weight's and bias's
    in float32, kept from the forward pass to backward, which makes the final ones of them. With reduction "none"
    forward keeps nothing but the inputs, and backward computes the logits again.

    `chunk_tokens` (None: as many as features, at least 2048, which makes a chunk's logits about as large as the weight)
    trades memory for the size of the matrix products. The gradient of weight is summed over chunks in float32.
    """
    op = "linear_cross_entropy"
    check_floating(op, hidden=hidden, weight=weight, bias=bias)
    check_same_device(op, hidden=hidden, weight=weight, bias=bias, labels=labels)
    _check_projection(op, hidden, weight, bias)
    _check_labels(op, labels, hidden.shape[:-1], weight.shape[0], ignore_index)
    _check_rule(op, label_smoothing, z_loss, reduction)
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"{op}: chunk_tokens must be at least 1 or None; found {chunk_tokens}")
    result: Tensor = resolve_for(op, hidden)(
        hidden,
        weight,
        labels,
        bias=bias,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
        chunk_tokens=chunk_tokens,
    )
    return result

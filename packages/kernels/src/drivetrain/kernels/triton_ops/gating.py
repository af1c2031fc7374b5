"""Routing on GPUs. `drivetrain.kernels.gating` says what is computed.

A key of 64 bits orders the experts of a token: above, its number mapped to an integer of the same order (NaN greatest);
below, how far it is from the last expert. No two are equal, and the greatest is the best with the lowest index, so that
the choice is `k` rounds of one integer maximum.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from drivetrain.kernels.gating_rules import GatingRule

__all__ = ["top_k_gating"]

_EPSILON: Final = tl.constexpr(1e-20)
_EXCLUDED: Final = tl.constexpr(-(2**63))  # below every key
_LOWEST: Final = tl.constexpr(-3.4028234663852886e38)
_TILE: Final = 2048  # logits a program holds, as long as that is more than one token's

# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _keys(values, places, count: tl.constexpr):
    """int64 keys of float32 `values` at `places` 0 to `count - 1`."""
    finite = tl.where(values < _LOWEST, _LOWEST, values) + 0.0  # adding makes a negative zero positive
    bits = finite.to(tl.int32, bitcast=True)
    ordered = tl.where(finite == finite, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (count - 1 - places).to(tl.int64)


@triton.jit
def _value(key):
    """The float32 number of a key."""
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _place(key, count: tl.constexpr):
    return count - 1 - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _scores(logits, mask, SIGMOID: tl.constexpr):
    """Scores of a tile [tokens, experts] of float32 logits; 0 where `mask` [1, experts] is false."""
    if SIGMOID:
        return tl.where(mask, 1.0 / (1.0 + tl.exp(-logits)), 0.0)
    shifted = tl.where(mask, logits, float("-inf"))
    shifted = tl.exp(shifted - tl.max(shifted, axis=1)[:, None])
    shifted = tl.where(mask, shifted, 0.0)
    return shifted / tl.sum(shifted, axis=1)[:, None]


@triton.jit
def _keep_groups(
    keys,
    values,
    real,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """`keys` [tokens, groups * size] without those outside the best groups."""
    size_places = tl.arange(0, BLOCK_G * BLOCK_S) % BLOCK_S
    inside = tl.where(real, _keys(values, size_places[None, :], BLOCK_S), _EXCLUDED)
    inside = tl.reshape(inside, (BLOCK_T, BLOCK_G, BLOCK_S))
    total = tl.zeros((BLOCK_T, BLOCK_G), dtype=tl.float32)
    for _ in tl.static_range(GROUP_BEST):
        best = tl.max(inside, axis=2)
        total += _value(best)
        inside = tl.where(inside == best[:, :, None], _EXCLUDED, inside)
    groups = tl.arange(0, BLOCK_G)[None, :]
    left = tl.where(groups < GROUPS, _keys(total, groups, BLOCK_G), _EXCLUDED)
    taken = tl.zeros((BLOCK_T, BLOCK_G), dtype=tl.int32)
    for _ in range(TOP_GROUPS):
        best_group = tl.max(left, axis=1)[:, None]
        taken = tl.where(left == best_group, 1, taken)
        left = tl.where(left == best_group, _EXCLUDED, left)
    spread = tl.broadcast_to(taken[:, :, None], (BLOCK_T, BLOCK_G, BLOCK_S))
    spread = tl.reshape(spread, (BLOCK_T, BLOCK_G * BLOCK_S))
    return tl.where(spread != 0, keys, _EXCLUDED)


# logits   [tokens, experts]  float32, bfloat16 or float16; rows `stride` apart
# bias     [experts]          float32, if HAS_BIAS
# weights  [tokens, K]        float32
# chosen   [tokens, K]        int64
# A program has BLOCK_T tokens, and their experts as BLOCK_G groups (1 without groups) of BLOCK_S places.
@triton.jit
def _gating_kernel(
    logits,
    bias,
    weights,
    chosen,
    tokens,
    stride,
    scale,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    place = tl.arange(0, BLOCK_G * BLOCK_S)
    expert = place // BLOCK_S * SIZE + place % BLOCK_S
    is_expert = (place // BLOCK_S < GROUPS) & (place % BLOCK_S < SIZE)
    real = (token < tokens)[:, None] & is_expert[None, :]
    rows = token.to(tl.int64)[:, None]
    x = tl.load(logits + rows * stride + expert[None, :], mask=real, other=0.0).to(tl.float32)
    scores = _scores(x, is_expert[None, :], SIGMOID)
    values = scores
    if HAS_BIAS:
        values += tl.load(bias + expert, mask=is_expert, other=0.0)[None, :]
        keys = _keys(values, place[None, :], BLOCK_G * BLOCK_S)
    else:
        keys = _keys(x, place[None, :], BLOCK_G * BLOCK_S)
    keys = tl.where(is_expert[None, :], keys, _EXCLUDED)
    if TOP_GROUPS < GROUPS:
        keys = _keep_groups(keys, values, is_expert[None, :], GROUPS, TOP_GROUPS, GROUP_BEST, BLOCK_T, BLOCK_G, BLOCK_S)
    choice = tl.arange(0, BLOCK_K)[None, :]
    found = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.int32)
    weight = tl.zeros((BLOCK_T, BLOCK_K), dtype=tl.float32)
    for i in range(K):
        best = tl.max(keys, axis=1)[:, None]
        at = _place(best, BLOCK_G * BLOCK_S)
        found = tl.where(choice == i, at // BLOCK_S * SIZE + at % BLOCK_S, found)
        score = tl.sum(tl.where(place[None, :] == at, scores, 0.0), axis=1)[:, None]
        weight = tl.where(choice == i, score, weight)
        keys = tl.where(keys == best, _EXCLUDED, keys)
    if RENORMALIZE:
        weight = weight / (tl.sum(weight, axis=1)[:, None] + _EPSILON)
    out = rows * K + choice
    stored = (token < tokens)[:, None] & (choice < K)
    tl.store(weights + out, weight * scale, mask=stored)
    tl.store(chosen + out, found.to(tl.int64), mask=stored)


# logits        [tokens, experts]  as above
# chosen        [tokens, K]        int64
# grad_weights  [tokens, K]        float32
# grad_logits   [tokens, experts]  as logits
# With s the scores of the chosen, S their sum and g the gradients of the weights:
# ds = scale * (g - sum(g * s) / S) / S if RENORMALIZE, else scale * g; then through softmax or sigmoid.
@triton.jit
def _gating_backward_kernel(
    logits,
    chosen,
    grad_weights,
    grad_logits,
    tokens,
    experts,
    stride,
    scale,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)[None, :]
    in_tokens = token < tokens
    real = in_tokens[:, None] & (expert < experts)
    rows = token.to(tl.int64)
    x = tl.load(logits + rows[:, None] * stride + expert, mask=real, other=0.0).to(tl.float32)
    scores = _scores(x, expert < experts, SIGMOID)
    grads = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.float32)
    is_chosen = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int32)
    for i in range(K):
        hit = expert == tl.load(chosen + rows * K + i, mask=in_tokens, other=0)[:, None]
        grads = tl.where(hit, tl.load(grad_weights + rows * K + i, mask=in_tokens, other=0.0)[:, None], grads)
        is_chosen = tl.where(hit, 1, is_chosen)
    if RENORMALIZE:
        total = tl.sum(tl.where(is_chosen != 0, scores, 0.0), axis=1)[:, None] + _EPSILON
        # Only what was chosen has a gradient: elsewhere a NaN score times zero must not count.
        mean = tl.sum(tl.where(is_chosen != 0, grads * scores, 0.0), axis=1)[:, None] / total
        grads = tl.where(is_chosen != 0, (grads - mean) / total, 0.0)
    grads *= scale
    if SIGMOID:
        grads = grads * scores * (1.0 - scores)
    else:
        grads = scores * (grads - tl.sum(grads * scores, axis=1)[:, None])
    out = grad_logits + rows[:, None] * experts + expert
    tl.store(out, grads.to(grad_logits.dtype.element_ty), mask=real)


# ----------------------------------------------------------------------------------------------------------- launchers


def _check(logits: Tensor) -> None:
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"top_k_gating in Triton: logits have dtype {logits.dtype}; expected float32, bfloat16 or float16"
        )


def _tokens_per_program(width: int) -> int:
    return max(1, _TILE // width)


def _forward(logits: Tensor, bias: Tensor | None, rule: GatingRule) -> tuple[Tensor, Tensor]:
    tokens = logits.shape[0]
    weights = torch.empty(tokens, rule.k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, rule.k, dtype=torch.int64, device=logits.device)
    if tokens == 0:
        return weights, experts
    groups = rule.groups or 1
    block_g = triton.next_power_of_2(groups)
    block_s = triton.next_power_of_2(rule.group_size)
    block_t = _tokens_per_program(block_g * block_s)
    with torch.cuda.device_of(logits):
        _gating_kernel[(triton.cdiv(tokens, block_t),)](
            logits,
            logits if bias is None else bias.to(torch.float32).contiguous(),
            weights,
            experts,
            tokens,
            logits.stride(0),
            rule.scale,
            K=rule.k,
            SIGMOID=rule.scoring == "sigmoid",
            RENORMALIZE=rule.renormalize,
            HAS_BIAS=bias is not None,
            GROUPS=groups,
            SIZE=rule.group_size,
            TOP_GROUPS=rule.top_groups or 1,
            GROUP_BEST=min(rule.group_best, rule.group_size),
            BLOCK_T=block_t,
            BLOCK_G=block_g,
            BLOCK_S=block_s,
            BLOCK_K=triton.next_power_of_2(rule.k),
        )
    return weights, experts


def _backward(logits: Tensor, experts: Tensor, grad_weights: Tensor, rule: GatingRule) -> Tensor:
    tokens, count = logits.shape
    grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if tokens == 0:
        return grad_logits
    block_e = triton.next_power_of_2(count)
    block_t = _tokens_per_program(block_e)
    with torch.cuda.device_of(logits):
        _gating_backward_kernel[(triton.cdiv(tokens, block_t),)](
            logits,
            experts,
            grad_weights.contiguous(),
            grad_logits,
            tokens,
            count,
            logits.stride(0),
            rule.scale,
            K=rule.k,
            SIGMOID=rule.scoring == "sigmoid",
            RENORMALIZE=rule.renormalize,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
        )
    return grad_logits


# ----------------------------------------------------------------------------------------------------------- functions


class _TopKGating(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor | None, rule: GatingRule) -> tuple[Tensor, Tensor]:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        weights, experts = _forward(logits, bias, rule)
        ctx.mark_non_differentiable(experts)
        ctx.save_for_backward(logits, experts)
        ctx.rule = rule
        return weights, experts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_weights: Tensor, _: None) -> tuple[Tensor, None, None]:
        logits, experts = ctx.saved_tensors
        return _backward(logits, experts, grad_weights, ctx.rule), None, None


def top_k_gating(logits: Tensor, bias: Tensor | None, *, rule: GatingRule) -> tuple[Tensor, Tensor]:
    """Weights [tokens, k] and experts [tokens, k] for `logits` [tokens, experts] and `bias` [experts] or None."""
    _check(logits)
    weights, experts = _TopKGating.apply(logits, bias, rule)  # type: ignore[no-untyped-call]
    return weights, experts

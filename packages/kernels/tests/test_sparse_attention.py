"""Layouts by their properties, and block-sparse attention against torch's own with a mask written out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from drivetrain.kernels import (
    BigBirdLayout,
    BlockLists,
    BSLongformerLayout,
    DenseLayout,
    FixedLayout,
    LocalSlidingWindowLayout,
    SparseLayout,
    VariableLayout,
    block_sparse_attention,
)

TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DIRECTIONS = st.sampled_from(["bidirectional", "unidirectional"])
COMMON = {"num_heads": st.integers(1, 3), "different_layout_per_head": st.booleans(), "attention": DIRECTIONS}
COUNTS = st.integers(0, 4)
PLACES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
WIDTHS = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
FIXED = st.builds(
    FixedLayout, num_heads=st.integers(1, 3), attention=DIRECTIONS, num_local_blocks=st.sampled_from([2, 4, 6])
)
VARIABLE = st.builds(
    VariableLayout, **COMMON, num_random_blocks=COUNTS, local_window_blocks=WIDTHS, global_block_indices=PLACES
)
BIG_BIRD = st.builds(
    BigBirdLayout,
    **COMMON,
    num_random_blocks=COUNTS,
    num_sliding_window_blocks=st.integers(1, 5),
    num_global_blocks=COUNTS,
)
LONGFORMER = st.builds(
    BSLongformerLayout, **COMMON, num_sliding_window_blocks=st.integers(1, 5), global_block_indices=PLACES
)
LOCAL = st.builds(LocalSlidingWindowLayout, **COMMON, num_sliding_window_blocks=st.integers(1, 5))
some_examples = settings(max_examples=50, deadline=None)
RULES = st.one_of(st.builds(DenseLayout, **COMMON), FIXED, VARIABLE, BIG_BIRD, LONGFORMER, LOCAL)


def picture(layout: Tensor) -> list[str]:
    return ["".join("x" if seen else "." for seen in row) for row in layout.tolist()]


@some_examples
@given(rule=RULES, blocks=st.integers(0, 10))
def test_every_rule(rule: SparseLayout, blocks: int) -> None:
    """Shape, direction, sameness of heads, repeatability; and every block sees itself."""
    layout = rule.layout(blocks * rule.block)
    assert layout.dtype == torch.bool
    assert layout.shape == (rule.num_heads, blocks, blocks)
    assert bool(layout.diagonal(dim1=1, dim2=2).all())
    if rule.attention == "unidirectional":
        assert not bool(layout.triu(1).any())
    if not rule.different_layout_per_head:
        assert torch.equal(layout, layout[:1].expand_as(layout))
    assert torch.equal(layout, rule.layout(blocks * rule.block))
    assert torch.equal(layout, replace(rule, block=64).layout(blocks * 64))


@some_examples
@given(rule=RULES, blocks=st.integers(1, 10))
def test_unidirectional_is_the_lower_half_but_for_random_blocks(rule: SparseLayout, blocks: int) -> None:
    if isinstance(rule, (VariableLayout, BigBirdLayout)):
        rule = replace(rule, num_random_blocks=0)
    both = replace(rule, attention="bidirectional").layout(blocks * rule.block)
    half = replace(rule, attention="unidirectional").layout(blocks * rule.block)
    assert torch.equal(half, both.tril())


@some_examples
@given(rule=st.one_of(VARIABLE, BIG_BIRD), blocks=st.integers(1, 10))
def test_random_blocks_are_as_many_as_asked_for(rule: VariableLayout | BigBirdLayout, blocks: int) -> None:
    """Seen alone: one block wide windows and no global ones."""
    alone = {"global_block_indices": (), "local_window_blocks": (1,)}
    if isinstance(rule, BigBirdLayout):
        alone = {"num_global_blocks": 0, "num_sliding_window_blocks": 1}
    rule = replace(rule, **alone)
    layout = rule.layout(blocks * rule.block)
    room = torch.arange(blocks) + 1 if rule.attention == "unidirectional" else torch.full((blocks,), blocks)
    drawn = layout.sum(dim=-1)
    assert bool((drawn >= room.clamp(max=max(rule.num_random_blocks, 1))).all())
    assert bool((drawn <= room.clamp(max=rule.num_random_blocks + 1)).all())


def test_random_blocks_follow_seed_and_head() -> None:
    rule = BigBirdLayout(num_heads=2, different_layout_per_head=True, num_random_blocks=2)
    layout = rule.layout(640)
    assert not torch.equal(layout[0], layout[1])
    assert not torch.equal(layout, replace(rule, seed=1).layout(640))
    assert torch.equal(layout, replace(rule, seed=0).layout(640))
    assert layout.sum() < 2 * 40 * (3 + 2 + 1) + 2 * 40


def test_fixed_windows_and_their_summaries() -> None:
    rule = FixedLayout(num_heads=1, num_local_blocks=3)
    assert picture(rule.layout(7 * 16)[0]) == [
        "xxx..xx",
        "xxx..xx",
        "xxx..xx",
        "..xxxxx",
        "..xxxxx",
        "..xxxxx",
        "..x..xx",
    ]
    ahead = replace(rule, horizontal_global_attention=True).layout(7 * 16)[0]
    assert [row for row in picture(ahead) if row == "xxxxxxx"] == ["xxxxxxx"] * 3
    assert picture(replace(rule, attention="unidirectional").layout(7 * 16)[0])[3:] == [
        "..xx...",
        "..xxx..",
        "..xxxx.",
        "..x..xx",
    ]


def test_fixed_patterns_differ_by_head_and_come_round() -> None:
    rule = FixedLayout(num_heads=5, different_layout_per_head=True, num_different_global_patterns=4)
    layout = rule.layout(8 * 16)
    assert [picture(head)[0][4:] for head in layout] == ["...x", "..x.", ".x..", "x...", "...x"]
    wide = FixedLayout(
        num_heads=2, different_layout_per_head=True, num_different_global_patterns=2, num_global_blocks=2
    )
    assert [picture(head)[0][4:] for head in wide.layout(8 * 16)] == ["..xx", "xx.."]


def test_variable_windows_and_global_ranges() -> None:
    rule = VariableLayout(
        num_heads=1, local_window_blocks=(1, 2), global_block_indices=(4,), global_block_end_indices=(6,)
    )
    assert picture(rule.layout(7 * 16)[0]) == [
        "x...xx.",
        ".xx.xx.",
        ".xx.xx.",
        "...xxx.",
        "...xxx.",
        "....xxx",
        "....xxx",
    ]
    assert picture(replace(rule, horizontal_global_attention=True).layout(7 * 16)[0])[4:6] == ["xxxxxxx"] * 2


def test_sliding_windows_and_global_blocks() -> None:
    assert picture(BigBirdLayout(num_heads=1, num_random_blocks=0).layout(5 * 16)[0]) == [
        "xxxxx",
        "xxx..",
        "xxxx.",
        "x.xxx",
        "x..xx",
    ]
    longformer = BSLongformerLayout(num_heads=1, global_block_indices=(2,), num_sliding_window_blocks=1)
    assert picture(longformer.layout(5 * 16)[0]) == ["x.x..", ".xx..", "xxxxx", "..xx.", "..x.x"]
    assert picture(LocalSlidingWindowLayout(num_heads=1).layout(4 * 16)[0]) == ["x...", "xx..", ".xx.", "..xx"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DenseLayout(num_heads=0), "num_heads: expected 1 or more; found 0"),
        (lambda: DenseLayout(num_heads=1, block=24), "block: expected a power of two, 16 or more; found 24"),
        (lambda: DenseLayout(num_heads=1).layout(17), "seq_len: expected a multiple of the block of 16; found 17"),
        (lambda: DenseLayout(num_heads=1, attention="ahead"), "attention: expected one of .*; found 'ahead'"),
        (
            lambda: FixedLayout(num_heads=1, num_global_blocks=3),
            "num_local_blocks: expected a multiple of .*, 3; found 4",
        ),
        (
            lambda: FixedLayout(num_heads=1, num_different_global_patterns=2),
            "num_different_global_patterns above 1 needs different_layout_per_head=True",
        ),
        (
            lambda: FixedLayout(num_heads=1, different_layout_per_head=True, num_different_global_patterns=5),
            "a window of 4 blocks has 4 groups of 1; found 5",
        ),
        (
            lambda: FixedLayout(num_heads=1, attention="unidirectional", horizontal_global_attention=True),
            "horizontal_global_attention looks ahead and needs attention='bidirectional'",
        ),
        (lambda: VariableLayout(num_heads=1, local_window_blocks=()), "local_window_blocks: expected at least one"),
        (lambda: VariableLayout(num_heads=1, local_window_blocks=(2, 0)), r"local_window_blocks\[1\]: expected 1 or"),
        (lambda: VariableLayout(num_heads=1, global_block_indices=(-1,)), r"global_block_indices\[0\]: expected 0 or"),
        (
            lambda: BSLongformerLayout(num_heads=1, global_block_end_indices=(1, 2)),
            "global_block_end_indices: expected one end for each of the 1 global_block_indices; found 2",
        ),
        (
            lambda: BSLongformerLayout(num_heads=1, global_block_indices=(3,), global_block_end_indices=(3,)),
            "global_block_end_indices: 3 is not behind its start, 3",
        ),
        (lambda: BigBirdLayout(num_heads=1, seed=-1), "seed: expected 0 or more; found -1"),
        (lambda: LocalSlidingWindowLayout(num_heads=1, num_sliding_window_blocks=0), "expected 1 or more; found 0"),
        (
            lambda: BlockLists.of(torch.ones(1, 2, 3, dtype=torch.bool)),
            r"layout: expected bool \[heads, blocks, blocks\]",
        ),
    ],
)
def test_bad_rules_are_refused_by_name(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


@some_examples
@given(seed=st.integers(0, 999), heads=st.integers(1, 3), blocks=st.integers(0, 6))
def test_lists_say_what_the_layout_says(seed: int, heads: int, blocks: int) -> None:
    layout = torch.rand(heads, blocks, blocks, generator=torch.Generator().manual_seed(seed)) < 0.4
    lists = BlockLists.of(layout)
    for head in range(heads):
        for line in range(blocks):
            at = head * blocks + line
            seen = layout[head, line].nonzero().flatten().tolist()
            start, end = lists.row_starts[at : at + 2].tolist()
            assert lists.columns[start:end].tolist() == seen
            assert lists.columns[start : lists.row_ends[at]].tolist() == [c for c in seen if c <= line]
            seers = layout[head, :, line].nonzero().flatten().tolist()
            start, end = lists.column_starts[at : at + 2].tolist()
            assert lists.rows[start:end].tolist() == seers
            assert lists.rows[lists.column_begins[at] : end].tolist() == [r for r in seers if r >= line]


def make(
    batch: int, heads: int, length: int, size: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(batch, heads, length, size, generator=generator, dtype=torch.float64) for _ in range(3))
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_equals_masked_attention(dtype: torch.dtype, causal: bool, padded: bool) -> None:
    rule = BigBirdLayout(num_heads=2, different_layout_per_head=True, num_global_blocks=0)
    layout = rule.layout(7 * 16)
    q, k, v = make(2, 2, 7 * 16, 20, dtype)
    keep = torch.rand(2, 7 * 16, generator=torch.Generator().manual_seed(0)) < 0.8
    keep[:, ::16] = True
    mask = layout.repeat_interleave(16, dim=1).repeat_interleave(16, dim=2).expand(2, -1, -1, -1)
    if causal:
        mask = mask.tril()
    if padded:
        mask = mask & keep[:, None, None]
    wanted = scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask, scale=0.3)
    options = {"block": 16, "causal": causal, "scale": 0.3, "key_padding_mask": keep if padded else None}
    for form in (layout, BlockLists.of(layout)):
        found = block_sparse_attention(q, k, v, form, **options)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), wanted, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_gradients_by_differences_with_rows_that_see_nothing() -> None:
    layout = torch.tensor([[[True, False], [False, False]]])
    inputs = tuple(x.requires_grad_() for x in make(1, 1, 32, 2))
    found = block_sparse_attention(*inputs, layout, block=16, causal=True)
    assert not bool(found[:, :, 16:].any())
    assert torch.autograd.gradcheck(lambda *x: block_sparse_attention(*x, layout, block=16, causal=True), inputs)


def test_hidden_nan_is_not_seen_and_visible_nan_is() -> None:
    q, k, v = make(1, 1, 32, 4, torch.float32)
    layout = torch.tensor([[[True, False], [True, True]]])
    k[0, 0, 20] = math.nan
    found = block_sparse_attention(q, k, v, layout, block=16)
    assert bool(found[0, 0, :16].isfinite().all())
    assert bool(found[0, 0, 16:].isnan().all())


def test_empty_operands() -> None:
    for batch, heads, length in ((0, 2, 32), (1, 0, 32), (1, 2, 0)):
        layout = torch.ones(heads, length // 16, length // 16, dtype=torch.bool)
        found = block_sparse_attention(*make(batch, heads, length, 8), layout, block=16)
        assert found.shape == (batch, heads, length, 8)


def test_bad_arguments_are_refused_by_name() -> None:
    q, k, v = make(2, 1, 32, 8, torch.float32)
    layout = torch.ones(1, 2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"q has shape \(1, 32, 8\); expected \[batch, heads, length, head_dim\]"):
        block_sparse_attention(q[0], k, v, layout, block=16)
    with pytest.raises(ValueError, match=r"k is torch.float32 of shape \(2, 1, 16, 8\)"):
        block_sparse_attention(q, k[:, :, :16], v, layout, block=16)
    with pytest.raises(TypeError, match=r"q has dtype torch.int64"):
        block_sparse_attention(q.long(), k, v, layout, block=16)
    with pytest.raises(ValueError, match="block: expected a power of two, 16 or more; found 8"):
        block_sparse_attention(q, k, v, layout, block=8)
    with pytest.raises(
        ValueError, match=r"a layout of shape \(1, 2, 2\) with blocks of 32 is not for 1 heads of length"
    ):
        block_sparse_attention(q, k, v, layout, block=32)
    with pytest.raises(
        ValueError, match=r"key_padding_mask is torch.float32 of shape \(2, 32\); expected bool \(2, 32\)"
    ):
        block_sparse_attention(q, k, v, layout, block=16, key_padding_mask=q[:, 0, :, 0])
    with pytest.raises(ValueError, match=r"head_dim must lie in 1..256; found 300"):
        block_sparse_attention(*[torch.zeros(1, 1, 16, 300)] * 3, layout, block=16)

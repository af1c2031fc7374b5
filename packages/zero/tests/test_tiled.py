"""A linear layer in tiles: the same function as one that is whole, of which little is whole at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.zero import LeafRule, Policy, ShardedOptimizer, TiledLinear, shard
from drivetrain.zero.grouping import group_parameters
from drivetrain.zero.tiled import split_sizes
from drivetrain_testkit import run_ranks


@given(total=st.integers(1, 50), splits=st.integers(1, 50))
def test_parts_are_as_even_as_can_be(total: int, splits: int) -> None:
    sizes = split_sizes(total, splits)
    assert len(sizes) == splits
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=40, deadline=None)
@given(
    features=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    splits=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    bias=st.booleans(),
    batch=st.sampled_from([(3,), (2, 3), ()]),
)
def test_it_is_the_same_function(
    features: tuple[int, int], splits: tuple[int, int], bias: bool, batch: tuple[int, ...]
) -> None:
    (inputs, outputs), (in_splits, out_splits) = features, map(min, splits, features)
    linear = nn.Linear(inputs, outputs, bias, dtype=torch.float64)
    tiled = TiledLinear.from_linear(linear, in_splits=in_splits, out_splits=out_splits)
    results = []
    for layer in (linear, tiled):
        x = torch.arange(1.0, 1.0 + inputs, dtype=torch.float64).expand(*batch, inputs).clone().requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    torch.testing.assert_close(results[1], results[0])
    again = TiledLinear(inputs, outputs, bias, in_splits=in_splits, out_splits=out_splits, dtype=torch.float64)
    assert linear.weight.grad is not None
    again.copy_from(linear.weight.grad, linear.bias.grad if bias else None)
    for tile, expected in zip(tiled.tiles, again.tiles, strict=True):
        for name, parameter in tile.named_parameters():
            torch.testing.assert_close(parameter.grad, expected.get_parameter(name).data)


def test_it_is_made_like_the_layer_that_it_is_made_from() -> None:
    linear = nn.Linear(6, 5, dtype=torch.bfloat16).eval()
    linear.weight.requires_grad_(False)
    tiled = TiledLinear.from_linear(linear, in_splits=2, out_splits=3)
    assert [tuple(tile.weight.shape) for tile in tiled.tiles] == [(2, 3), (2, 3), (2, 3), (2, 3), (1, 3), (1, 3)]
    assert [tile.bias is not None for tile in tiled.tiles] == [True, False] * 3
    assert {p.dtype for p in tiled.parameters()} == {torch.bfloat16}
    assert {name.split(".")[-1] for name, p in tiled.named_parameters() if p.requires_grad} == {"bias"}
    assert not tiled.training
    assert "in_features=6, out_features=5, bias=True, in_splits=2, out_splits=3" in repr(tiled)
    meta = TiledLinear.from_linear(nn.Linear(6, 5, device="meta"), out_splits=2)
    assert all(p.is_meta for p in meta.parameters())


def test_values_are_drawn_as_for_the_whole_layer() -> None:
    torch.manual_seed(0)
    tiled = TiledLinear(10_000, 4, in_splits=100)
    values = torch.cat([p.detach().flatten() for p in tiled.parameters()])
    assert 0.009 < float(values.abs().max()) <= 0.01
    with torch.no_grad():
        for tile in tiled.tiles:
            tile.weight.zero_()
    tiled.reset_parameters()
    assert 0.009 < float(tiled.tiles[7].weight.abs().max()) <= 0.01


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="out_splits is 5; it must lie between 1 and out_features, 4"):
        TiledLinear(3, 4, out_splits=5)
    with pytest.raises(ValueError, match="in_splits is 0; it must lie between 1 and in_features, 3"):
        TiledLinear(3, 4, in_splits=0)
    tiled = TiledLinear(4, 3, out_splits=2)
    with pytest.raises(ValueError, match=r"whose last dimension is in_features, 4; got a tensor of shape \(2, 3\)"):
        tiled(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"a weight of shape \(3, 4\), got one of \(4, 3\)"):
        tiled.copy_from(torch.zeros(4, 3), None)
    with pytest.raises(ValueError, match="the layer has a bias, and got none"):
        tiled.copy_from(torch.zeros(3, 4), None)


# at stage 3 -----------------------------------------------------------------------------------------------------------

WIDTH, VOCABULARY = 32, 96


class Block(nn.Module):
    def __init__(self, splits: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = TiledLinear(WIDTH, 4 * WIDTH, out_splits=splits)
        self.down = TiledLinear(4 * WIDTH, WIDTH, in_splits=splits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tiles in blocks, and beside them."""

    def __init__(self, splits: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block(splits) for _ in range(2))
        self.head = TiledLinear(WIDTH, VOCABULARY, bias=False, out_splits=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gain
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def names_of_units(model: nn.Module, leaf: LeafRule) -> list[str]:
    groups = group_parameters(model, releases=True, persistence_numel=0, persistence_total_numel=None, leaf=leaf)
    return [group.name for group in groups]


def test_each_tile_is_a_unit_but_in_leaves() -> None:
    model = Model(2)
    tiles = [f"{part}.tiles.{index}" for part in ("up", "down") for index in range(2)]
    head = [f"head.tiles.{index}" for index in range(3)]
    blocks = [["blocks.0", *(f"blocks.0.{tile}" for tile in tiles)], ["blocks.1", *(f"blocks.1.{t}" for t in tiles)]]
    assert names_of_units(model, LeafRule()) == ["root", *blocks[0], *blocks[1], *head]
    assert names_of_units(model, LeafRule(names=("blocks.1",))) == ["root", *blocks[0], "blocks.1", *head]
    assert names_of_units(model, LeafRule(suffixes=("down",))) == [
        *("root", "blocks.0", "blocks.0.up.tiles.0", "blocks.0.up.tiles.1"),
        *("blocks.1", "blocks.1.up.tiles.0", "blocks.1.up.tiles.1"),
        *head,
    ]
    assert names_of_units(Model(1), LeafRule()) == [
        *("root", "blocks.0", "blocks.0.up.tiles.0", "blocks.0.down.tiles.0"),
        *("blocks.1", "blocks.1.up.tiles.0", "blocks.1.down.tiles.0"),
        *head,
    ]


def batch(rank: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(rank))


@dataclass(frozen=True, kw_only=True)
class Watched:
    forward: float  # most elements that were gathered at once, in tiles, beside what is in none
    backward: float
    weights: dict[str, torch.Tensor]


def watch(rank: int, world_size: int) -> Watched:
    model = Model()
    sharded = shard(
        model, Mesh.create(init()), Policy(stage=3, persistence_numel=WIDTH + 1, prefetch_numel=0, max_reuse_numel=-1)
    )
    optimizer = ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=0.1))
    seen: dict[str, list[int]] = {"forward": [], "backward": []}
    phase = "forward"

    def look(*_: object) -> None:
        seen[phase].append(sharded.bytes().gathered // 4)

    def watch_output(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(look)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(look)
            module.register_forward_hook(watch_output)
    for _ in range(2):
        phase = "forward"
        loss = model(batch(rank)).square().mean()
        phase = "backward"
        loss.backward()
        optimizer.step()
    tile = max(unit.numel for unit in sharded.units if "tiles" in unit.name)
    weights = dict(sharded.full_parameters())
    return Watched(forward=max(seen["forward"]) / tile, backward=max(seen["backward"]) / tile, weights=weights)


def test_one_tile_is_whole_at_a_time() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        sum(model(batch(rank)).square().mean() / 2 for rank in range(2)).backward()
        optimizer.step()
    for found in run_ranks(watch, 2):
        assert found.forward == 1
        assert 1 <= found.backward <= 2
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found.weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)

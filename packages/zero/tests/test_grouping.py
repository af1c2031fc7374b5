"""Which parameters form a unit, read off the module tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drivetrain.zero.grouping import (
    MERGE_NUMEL,
    Group,
    find_blocks,
    group_parameters,
    named_parameters,
    split_by_kind,
)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)


class Tower(nn.Module):
    def __init__(self, depth: int = 3, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 7, bias=False)


def groups(
    module: nn.Module, *, releases: bool = True, persistence: int = 0, total: int | None = None
) -> dict[str, list[str]]:
    """Names of the parameters in each group."""
    found = group_parameters(module, releases=releases, persistence_numel=persistence, persistence_total_numel=total)
    return {group.name: [p.name for p in group.parameters] for group in found}


def names(prefix: str) -> list[str]:
    return [f"{prefix}.{leaf}" for leaf in ("norm.weight", "norm.bias", "linear.weight", "linear.bias")]


def test_blocks_are_units_and_the_rest_is_root() -> None:
    assert groups(Tower()) == {
        "root": ["embed.weight", "norm.weight", "norm.bias", "head.weight"],
        "blocks.0": names("blocks.0"),
        "blocks.1": names("blocks.1"),
        "blocks.2": names("blocks.2"),
    }


def test_each_group_names_the_modules_whose_forward_needs_it() -> None:
    model = Tower()
    found = group_parameters(model, releases=True, persistence_numel=0, persistence_total_numel=None)
    assert [group.modules for group in found] == [(model,), *((block,) for block in model.blocks)]
    assert not any(group.resident for group in found)


@pytest.mark.parametrize(
    "container",
    [
        nn.ModuleList([Block(), Block()]),
        nn.Sequential(Block(), Block()),
        nn.ModuleDict({"0": Block(), "1": Block()}),
        nn.Sequential(nn.Linear(4, 4), Block(), nn.ReLU(), Block()),
    ],
    ids=lambda c: type(c).__name__,
)
def test_repeated_elements_of_any_container_are_blocks(container: nn.Module) -> None:
    blocks = [block for _, block in find_blocks(nn.ModuleDict({"tower": container}))]
    assert blocks == [child for child in container.children() if isinstance(child, Block)]


def test_a_container_that_is_the_model_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert groups(model) == {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}


def test_what_is_not_repeated_is_root() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4))
    assert list(groups(model)) == ["root"]
    assert list(groups(nn.Linear(3, 2))) == ["root"]


def test_nested_lists_are_searched_for_the_outermost_blocks() -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

    nested = nn.ModuleDict({"a": nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])])})
    assert [name for name, _ in find_blocks(nested)] == ["a.0.0", "a.0.1", "a.1.0", "a.1.1"]
    stages = nn.ModuleDict({"stages": nn.ModuleList([Stage(), Stage()]), "single": Stage()})
    assert [name for name, _ in find_blocks(stages)] == ["stages.0", "stages.1", "single.layers.0", "single.layers.1"]


def test_blocks_without_parameters_are_no_units() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert [name for name, _ in find_blocks(model)] == ["1", "3"]


def test_a_block_that_stands_in_two_places_is_one_unit() -> None:
    model = Tower(depth=3)
    model.again = nn.ModuleList([model.blocks[1], model.blocks[0]])
    assert list(groups(model)) == ["root", "blocks.0", "blocks.1", "blocks.2"]
    by_name = {p.name: p.names for p in named_parameters(model)}
    assert by_name["blocks.0.linear.weight"] == ("blocks.0.linear.weight", "again.1.linear.weight")


def test_weights_tied_between_two_blocks_are_root() -> None:
    model = Tower()
    model.blocks[2].linear.weight = model.blocks[0].linear.weight
    found = groups(model)
    assert "blocks.0.linear.weight" in found["root"]
    assert "blocks.0.linear.weight" not in found["blocks.0"]
    assert found["blocks.2"] == ["blocks.2.norm.weight", "blocks.2.norm.bias", "blocks.2.linear.bias"]


def test_weights_tied_between_a_block_and_the_root_are_root() -> None:
    model = Tower(width=7)
    model.head.weight = model.blocks[1].linear.weight
    assert "blocks.1.linear.weight" in groups(model)["root"]
    by_name = {p.name: p.names for p in named_parameters(model)}
    assert by_name["blocks.1.linear.weight"] == ("blocks.1.linear.weight", "head.weight")


def test_weights_tied_inside_one_block_stay_with_it() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

    model = nn.Sequential(Pair(), Pair())
    assert groups(model)["0"] == ["0.a.weight", "0.a.bias", "0.b.bias"]


def test_tied_weights_appear_once_with_all_their_names() -> None:
    model = Tower()
    model.head.weight = model.embed.weight
    assert groups(model)["root"] == ["embed.weight", "norm.weight", "norm.bias"]
    assert next(p.names for p in named_parameters(model)) == ("embed.weight", "head.weight")


def test_small_parameters_stay_whole_in_a_group_of_their_own() -> None:
    """Of 16 and 4 elements in blocks and 28 outside, those below 16 are small."""
    found = group_parameters(Tower(), releases=True, persistence_numel=16, persistence_total_numel=None)
    small = found[-1]
    assert (small.name, small.resident, small.modules) == ("small", True, ())
    assert {p.parameter.numel() for p in small.parameters} == {4}
    assert len(small.parameters) == 3 * 3 + 2
    assert all(not group.resident for group in found[:-1])


def test_the_smallest_are_taken_first_up_to_the_total() -> None:
    model = nn.ParameterDict({f"p{n}": nn.Parameter(torch.zeros(n)) for n in (9, 2, 5, 3, 8)})
    assert groups(model, persistence=9, total=10)["small"] == ["p2", "p3", "p5"]
    assert groups(model, persistence=9, total=9)["small"] == ["p2", "p3"]
    assert groups(model, persistence=9)["small"] == ["p2", "p3", "p5", "p8"]
    assert "small" not in groups(model, persistence=2)
    assert "small" not in groups(model, persistence=9, total=1)


def test_a_unit_whose_parameters_are_all_small_disappears() -> None:
    assert list(groups(Tower(), persistence=17)) == ["root", "small"]
    assert list(groups(Tower(), persistence=1000)) == ["small"]


def test_below_stage_three_small_groups_are_merged() -> None:
    model = Tower()
    (merged,) = group_parameters(model, releases=False, persistence_numel=1000, persistence_total_numel=None)
    assert merged.resident
    assert [p.name for p in merged.parameters] == [
        "embed.weight",
        "norm.weight",
        "norm.bias",
        "head.weight",
        *names("blocks.0"),
        *names("blocks.1"),
        *names("blocks.2"),
    ]
    assert merged.modules == (model, *model.blocks)


def test_merging_stops_at_its_limit() -> None:
    with torch.device("meta"):
        model = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(9))
    found = group_parameters(model, releases=False, persistence_numel=0, persistence_total_numel=None)
    assert MERGE_NUMEL == 4 * 1024 * 1024
    assert [len(group.parameters) for group in found] == [4, 4, 1]
    assert [p.name for group in found for p in group.parameters] == [f"{i}.weight" for i in range(9)]


def test_kinds_are_separated_by_dtype_by_training_and_by_what_travels() -> None:
    model = Tower(depth=2)
    model.blocks[0].linear.weight.requires_grad_(False)
    model.blocks[0].norm.to(torch.bfloat16)
    (block,) = (
        group
        for group in group_parameters(model, releases=True, persistence_numel=0, persistence_total_numel=None)
        if group.name == "blocks.0"
    )
    kinds = split_by_kind(block.parameters, {id(model.blocks[0].norm.bias)})
    assert {kind: [p.name for p in members] for kind, members in kinds.items()} == {
        (torch.bfloat16, True, False): ["blocks.0.norm.weight"],
        (torch.bfloat16, True, True): ["blocks.0.norm.bias"],
        (torch.float32, False, False): ["blocks.0.linear.weight"],
        (torch.float32, True, False): ["blocks.0.linear.bias"],
    }


Shape = list  # recursive: a leaf is the number of a shared parameter, a list is a module


def _modules(depth: int) -> st.SearchStrategy[Shape]:
    leaf = st.lists(st.integers(0, 9), max_size=3)
    return st.recursive(leaf, lambda inner: st.lists(inner, min_size=1, max_size=4), max_leaves=depth)


def _build(shape: Shape, parameters: Sequence[nn.Parameter]) -> nn.Module:
    if all(isinstance(item, int) for item in shape):
        leaf = nn.Module()
        for position, index in enumerate(shape):
            leaf.register_parameter(f"p{position}", parameters[index])
        return leaf
    return nn.ModuleList(_build(item, parameters) for item in shape)


@given(shape=_modules(8), releases=st.booleans(), persistence=st.integers(0, 12), total=st.none() | st.integers(0, 60))
def test_any_tree_is_cut_into_disjoint_groups(
    shape: Shape, releases: bool, persistence: int, total: int | None
) -> None:
    parameters = [nn.Parameter(torch.zeros(size + 1)) for size in range(10)]
    root = nn.ModuleDict({"tree": _build(shape, parameters)})
    found: list[Group] = group_parameters(
        root, releases=releases, persistence_numel=persistence, persistence_total_numel=total
    )
    counted = Counter(id(p.parameter) for group in found for p in group.parameters)
    assert counted == Counter({id(p): 1 for p in root.parameters()})
    assert all(group.parameters for group in found)
    kept = sum(group.numel for group in found if group.resident)
    if releases:
        assert kept <= (total if total is not None else sum(n for n in range(1, persistence)))
    else:
        assert kept == sum(p.numel() for p in root.parameters())


@given(shape=_modules(8))
def test_a_block_holds_no_parameter_that_anything_outside_it_uses(shape: Shape) -> None:
    """What lets a unit be released when its block is done."""
    parameters = [nn.Parameter(torch.zeros(size + 1)) for size in range(10)]
    root = nn.ModuleDict({"tree": _build(shape, parameters)})
    for group in group_parameters(root, releases=True, persistence_numel=0, persistence_total_numel=None):
        if group.name == "root":
            continue
        (block,) = group.modules
        inside = set(block.modules())
        mine = {id(p.parameter) for p in group.parameters}
        for module in root.modules():
            if module not in inside:
                assert not any(id(p) in mine for p in module.parameters(recurse=False))

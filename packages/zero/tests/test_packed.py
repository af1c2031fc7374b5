"""Frozen parameters that are kept quantised: what they are worth, what they cost, and what can be done to them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.kernels import QuantizationRule, dequantize, quantize
from drivetrain.zero import INT8_WEIGHTS, Init, ParameterAccess, Policy, ShardedOptimizer, gathered, shard
from drivetrain.zero.packed import PackedShard, PackedSlice
from drivetrain_testkit import run_ranks

WIDTH = 72
PACKED = Policy(stage=3, persistence_numel=0, frozen_rule=INT8_WEIGHTS)
PLAIN = replace(PACKED, frozen_rule=None)


class Adapted(nn.Module):
    """A frozen layer with a trained low-rank bypass."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.base.requires_grad_(False)
        self.norm.requires_grad_(False)
        self.a = nn.Linear(width, 2, bias=False)
        self.b = nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(self.norm(x)) + self.b(self.a(x)))


class Model(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.table = nn.Embedding(41, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted(width) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


FROZEN = ("table.weight", *(f"blocks.{index}.base.weight" for index in range(3)))


def coarse(value: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Quantised and back, in one process."""
    return dequantize(quantize(value.detach().flatten(), INT8_WEIGHTS), dtype=dtype).view(value.shape)


def coarse_model(dtype: torch.dtype = torch.float32) -> Model:
    """With frozen weights as a model that computes in ``dtype`` has them."""
    model = Model()
    for name in FROZEN:
        parameter = model.get_parameter(name)
        parameter.data = coarse(parameter, dtype).float()
    return model


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 41, (5, 3), generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, mesh: Mesh, policy: Policy, rank: int) -> tuple[Any, list[float], dict[str, torch.Tensor]]:
    sharded = shard(model, mesh, policy)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = ShardedOptimizer(sharded, torch.optim.AdamW(trained, lr=0.05))
    losses = []
    for step in range(3):
        loss = model(tokens(rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sharded, losses, dict(sharded.full_parameters())


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def _trains(rank: int, world_size: int) -> None:
    """As the same model does whose frozen weights were quantised and dequantised beforehand, to the bit."""
    mesh = Mesh.create(init())
    for dtype in (torch.float32, torch.bfloat16):
        start = coarse_model(dtype).to(dtype)
        with torch.no_grad():
            first = start(tokens(rank, 0)).item()
        sharded, losses, found = train(Model(), mesh, replace(PACKED, param_dtype=dtype), rank)
        _, expected, whole = train(coarse_model(dtype), mesh, replace(PLAIN, param_dtype=dtype), rank)
        assert losses[0] == first != losses[1]
        assert losses == expected
        assert equal(found, whole)
        assert all(torch.equal(found[name], start.get_parameter(name)) for name in FROZEN)
        _memory(sharded)


def _memory(sharded: Any) -> None:
    packed = [bucket for bucket in sharded.buckets if bucket.packed is not None]
    assert [slot.name for bucket in packed for slot in bucket.slots] == list(FROZEN)
    for bucket in packed:
        held, padding = bucket.parameter_bytes, 2048 * (len(bucket.slots) + bucket.axis.size)
        numel = sum(slot.numel for slot in bucket.slots)
        assert held == bucket.layout.shard_numel * (1 + 4 / 2048)
        assert held <= (numel + padding) / bucket.axis.size * (1 + 4 / 2048)
    assert sharded.bytes().gathered == 0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_is_that_of_the_dequantised_model_on_any_number_of_ranks(ranks: int) -> None:
    run_ranks(_trains, ranks)


class Source:
    """A `TensorSource` over a state dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> torch.Size:
        return self._tensors[name].shape

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._tensors[name].flatten()[start:stop]


def _ways(rank: int, world_size: int) -> None:
    """However the model came to be and is gathered, the frozen weights are the same."""
    mesh, wanted = Mesh.create(init()), coarse_model()
    with Init(mesh):
        built = Model()
    with torch.device("meta"):
        empty = Model()
    for model, policy, values in (
        (built, PACKED, None),
        (empty, replace(PACKED, gather_rule=INT8_WEIGHTS), Source(Model().state_dict())),
        (Model(), replace(PACKED, node_ranks=2, secondary_ranks=2), None),
        (Model(), replace(PACKED, node_ranks=2, secondary_ranks=2, gather_in_two=True, gather_rule=INT8_WEIGHTS), None),
        (Model(), replace(PACKED, node_ranks=2, gather_in_two=True), None),
    ):
        sharded = shard(model, mesh, policy, values=values)
        base, weight = model.blocks[1].base, wanted.blocks[1].base.weight
        seen: list[bool] = []
        base.register_forward_pre_hook(
            lambda module, _, weight=weight, seen=seen: seen.append(module.weight.equal(weight))
        )
        for _ in range(2):  # from the shards, and from the second copy
            model(tokens(rank, 0)).backward()
        assert seen == [True, True]
        found = dict(sharded.full_parameters())
        assert all(torch.equal(found[name], wanted.get_parameter(name)) for name in FROZEN)
        sharded.zero_grad()

    # What is small, whole on every rank for good, or a vector is as it was.
    exact = Model()
    for policy, packed in ((PACKED, FROZEN), (replace(PACKED, persistence_numel=WIDTH * 42), FROZEN[1:])):
        sharded = shard(Model(), mesh, policy)
        buckets = [bucket for bucket in sharded.buckets if bucket.packed is not None]
        assert tuple(slot.name for bucket in buckets for slot in bucket.slots) == packed
        for name, value in sharded.full_parameters():
            same = torch.equal(value, exact.get_parameter(name))
            assert same == (name not in packed), name

    unit = shard(Model(width=512), mesh, PACKED).units[2]
    mesh.ledger.reset()
    unit.start_gather()
    unit.finish_gather()
    others = sum(bucket.numel * 4 for bucket in unit.buckets if bucket.packed is None)
    assert mesh.ledger.total_bytes("all_gather") - others == 512 * 512 * (1 + 4 / 2048)


def _edits(rank: int, world_size: int) -> None:
    mesh = Mesh.create(init())
    for dtype in (torch.float32, torch.bfloat16):
        model, wanted = Model(), coarse_model(dtype).to(dtype)
        sharded = shard(model, mesh, replace(PACKED, param_dtype=dtype))
        access = ParameterAccess(sharded)
        weight, exact = model.blocks[1].base.weight, coarse(Model().blocks[1].base.weight)
        packed = next(b.packed for b in sharded.buckets for s in b.slots if s.parameter is weight)
        before = packed.encoded.clone()

        # Looking changes nothing, and neither does writing what was seen.
        with gathered(sharded, weight):
            assert torch.equal(weight, wanted.blocks[1].base.weight)
        assert torch.equal(access.master.full(weight), exact)
        access.master.set_full(weight, exact)
        assert torch.equal(packed.encoded, before)

        # An edit re-quantises the blocks that it changes, on all ranks alike.
        with gathered(sharded, weight, modifier_rank=world_size - 1), torch.no_grad():
            if rank == world_size - 1:
                weight[3] = torch.linspace(-9, 9, WIDTH)
        edited = wanted.blocks[1].base.weight.detach().clone()
        edited[3] = torch.linspace(-9, 9, WIDTH)
        shown, flat = access.master.full(weight), exact.flatten().clone()
        flat[:2048] = coarse(edited.flatten()[:2048])
        assert torch.equal(shown.flatten(), flat)

        # Written whole, or this rank's part.
        value = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
        with gathered(sharded, weight):
            access.master.set_full(weight, value)
            assert torch.equal(weight, coarse(value, dtype))
        assert torch.equal(access.master.full(weight), coarse(value))
        access.master.set_local(weight, access.master.local(weight) * 2)
        assert torch.equal(access.master.full(weight), coarse(value) * 2)
        with pytest.raises(ValueError, match="rank 1 has other values for"), gathered(sharded, weight), torch.no_grad():
            weight.fill_(float(rank))
        assert torch.equal(access.master.full(weight), coarse(value) * 2)


def _ways_and_edits(rank: int, world_size: int) -> None:
    _ways(rank, world_size)
    _edits(rank, world_size)


def test_any_way_to_build_and_to_gather_and_edits() -> None:
    run_ranks(_ways_and_edits, 4)


# One shard, in one process --------------------------------------------------------------------------------------------

RULE = QuantizationRule(format="int8", block_size=16)
SIZE = 16


def rough(values: torch.Tensor) -> torch.Tensor:
    return dequantize(quantize(values, RULE))


def test_decoded_values_give_the_codes_that_they_came_from() -> None:
    """So what is saved and loaded again does not drift."""
    mantissas = (torch.arange(1 << 23, dtype=torch.int32) | (127 << 23)).view(torch.float32)
    scales = mantissas / 127.0
    assert torch.equal(scales * 127.0 / 127.0, scales)
    values = torch.randn(5000 * SIZE, generator=torch.Generator().manual_seed(1)).exp() - 1.0
    values[:SIZE] = 0.0
    shard = PackedShard(values, RULE)
    codes, shown = shard.encoded.clone(), shard.read(0, values.numel())
    shard.write(0, torch.ones_like(values))
    assert torch.equal(shard.read(0, values.numel()), torch.ones_like(values))
    shard.write(0, shown)
    assert torch.equal(shard.encoded, codes)


@given(data=st.data(), blocks=st.integers(1, 4), missing=st.integers(0, SIZE - 1))
def test_parts_that_arrive_in_any_order_are_the_whole(data: st.DataObject, blocks: int, missing: int) -> None:
    """A parameter that begins with the second block and ends within the last; another one before it."""
    numel = blocks * SIZE - missing
    values = torch.randn(numel, generator=torch.Generator().manual_seed(blocks))
    shard = PackedShard(torch.ones((blocks + 2) * SIZE), RULE)
    part = PackedSlice(
        data=torch.empty(numel, device="meta"), offset=0, shape=torch.Size([numel]), packed=shard, start=SIZE
    )
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, numel - 1)), max_size=5)) | {0, numel})
    for low, high in data.draw(st.permutations(list(pairwise(cuts)))):
        target = part.target(low, high - low)
        target.copy_(values[low:high])
        part.commit(low, target)
    assert torch.equal(part.read(0, numel), rough(values))
    low = data.draw(st.integers(0, numel))
    assert torch.equal(part.read(low, numel - low), rough(values)[low:])
    assert torch.equal(shard.read(0, SIZE), torch.ones(SIZE))
    assert not shard._edges


def test_stages_that_keep_parameters_whole_refuse_to_quantise_them() -> None:
    with pytest.raises(ValueError, match="ZeRO stage 2 keeps parameters whole; use stage 3"):
        Policy(stage=2, frozen_rule=INT8_WEIGHTS)

"""Single parameters, gradients and optimizer state, read and written while they are split, against one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.zero import LossScalePolicy, LossScaler, ParameterAccess, Policy, ShardedOptimizer, gathered, shard
from drivetrain_testkit import run_ranks

STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    """Blocks of sizes that no number of ranks divides; a scalar, an empty and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([nn.Linear(13, 13) for _ in range(3)])
        self.gain = nn.Parameter(torch.tensor([1.5]))
        self.nothing = nn.Parameter(torch.empty(0))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x.to(block.weight.dtype)))
        return (x.float() * self.gain.float()).square().sum()


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 13, generator=torch.Generator().manual_seed(100 * step + rank))


def make(rank: int, stage: int, *, dtype: torch.dtype | None = None, scaler: LossScaler | None = None) -> Any:
    model = Net()
    policy = Policy(stage=stage, param_dtype=dtype, accumulate_dtype=torch.float32, persistence_numel=0)
    sharded = shard(model, Mesh.create(init()), policy)
    optimizer = ShardedOptimizer(sharded, torch.optim.AdamW(model.parameters(), lr=0.01), scaler=scaler)
    return model, sharded, optimizer, ParameterAccess(sharded, optimizer)


def plain(world_size: int, steps: int = 1) -> tuple[Net, dict[str, torch.Tensor], torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            (model(batch(rank, step)) / world_size).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return model, gradients, optimizer


def _reads(rank: int, world_size: int) -> None:
    for stage in STAGES:
        model, _, optimizer, access = make(rank, stage)
        names = dict(model.named_parameters())
        start = dict(Net().named_parameters())
        assert access.gradient.full(model.gain) is None
        assert access.state("exp_avg").full(model.gain) is None
        model(batch(rank)).backward()
        expected, gradients, reference = plain(world_size)
        for name, parameter in names.items():
            found = access.gradient.full(parameter)
            assert (found is None) == (name not in gradients), (stage, name)
            if found is not None:
                torch.testing.assert_close(found, gradients[name], rtol=1e-5, atol=1e-7)
            assert torch.equal(access.master.full(parameter), start[name]), (stage, name)
        optimizer.step()
        wholes = access.master.full_many(list(names.values()))
        moments = access.state("exp_avg").full_many(list(names.values()))
        for (name, parameter), whole, moment in zip(names.items(), wholes, moments, strict=True):
            want = dict(expected.named_parameters())[name]
            torch.testing.assert_close(whole, want.detach(), rtol=1e-5, atol=1e-6)
            known = reference.state.get(want, {}).get("exp_avg")
            if parameter.numel() and known is not None:
                torch.testing.assert_close(moment, known, rtol=1e-5, atol=1e-7)
            local = access.master.local(parameter)
            offset = 0 if stage == 0 else None
            if offset is not None and rank == 0:
                assert torch.equal(local, whole.reshape(-1)[: local.numel()])


def test_parameters_gradients_and_state_read_whole_at_every_stage() -> None:
    run_ranks(_reads, 3)


def _writes(rank: int, world_size: int, dtype: torch.dtype | None) -> None:
    for stage in STAGES:
        model, sharded, optimizer, access = make(rank, stage, dtype=dtype)
        weight = model.blocks[1].weight
        value = torch.linspace(-1, 1, weight.numel()).view(weight.shape)
        access.master.set_full(weight, value)
        assert torch.equal(access.master.full(weight), value)
        whole = dict(sharded.full_parameters())
        assert torch.equal(whole["blocks.1.weight"], value.to(weight.dtype)), stage
        model(batch(rank)).backward()
        gradient = torch.full_like(value, 0.25)
        access.gradient.set_full(weight, gradient)
        assert torch.equal(access.gradient.full(weight), gradient)
        optimizer.step()
        access.state("exp_avg").set_full(weight, gradient * 2)
        access.state("exp_avg_sq").set_full_many([weight, model.gain], [gradient**2, torch.tensor([0.5])])
        assert torch.equal(access.state("exp_avg").full(weight), gradient * 2)
        assert torch.equal(access.state("exp_avg_sq").full(model.gain), torch.tensor([0.5]))
        reference = nn.Parameter(value.clone())
        plain_optimizer = torch.optim.AdamW([reference], lr=0.01)
        reference.grad = gradient.clone()
        plain_optimizer.step()
        torch.testing.assert_close(access.master.full(weight), reference.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_is_written_is_what_the_next_pass_and_step_use(dtype: torch.dtype | None) -> None:
    run_ranks(_writes, 2, dtype)


def _slices(rank: int, world_size: int) -> None:
    for stage in STAGES:
        model, _, optimizer, access = make(rank, stage)
        model(batch(rank)).backward()
        for quantity in (access.master, access.gradient):
            for name, parameter in model.named_parameters():
                local = quantity.local(parameter)
                if local is None or name == "unused":
                    continue
                kept = copy.deepcopy(local)
                quantity.set_local(parameter, local * 2)
                assert torch.equal(quantity.local(parameter), kept * 2), (stage, name)
                whole = quantity.full(parameter)
                if stage > 0 and parameter.numel():
                    quantity.set_local(parameter, torch.full_like(local, float(rank)))
                    shares = quantity.full(parameter)
                    assert whole.shape == shares.shape == parameter.shape
                    assert int((shares == rank).sum()) == local.numel()
        optimizer.step()


def test_slices_are_read_and_written_without_the_others() -> None:
    run_ranks(_slices, 2)


def _scaled(rank: int, world_size: int) -> None:
    for stage in STAGES:
        scaler = LossScaler(LossScalePolicy(initial=1024.0))
        model, _, optimizer, access = make(rank, stage, dtype=torch.float16, scaler=scaler)
        (model(batch(rank)) * scaler.scale).backward()
        _, gradients, _ = plain(world_size)
        found = access.gradient.full(model.blocks[0].weight)
        torch.testing.assert_close(found, gradients["blocks.0.weight"], rtol=2e-2, atol=1e-3)
        access.gradient.set_full(model.gain, torch.tensor([0.125]))
        assert access.gradient.full(model.gain).tolist() == [0.125]
        optimizer.step()


def test_gradients_are_shown_without_the_loss_scale() -> None:
    run_ranks(_scaled, 2)


def _refuses(rank: int, world_size: int) -> None:
    model, _, _, access = make(rank, 3)
    with pytest.raises(ValueError, match=r"rank \d: 'gain' has shape \(1,\), got \(2,\)"):
        access.master.set_full(model.gain, torch.zeros(2))
    with pytest.raises(ValueError, match=r"rank 1 has other values for 'gain' than rank 0"):
        access.master.set_full(model.gain, torch.full((1,), float(rank)))
    assert access.master.full(model.gain).tolist() == [1.5]
    with pytest.raises(KeyError, match="does not belong to this sharded module"):
        access.master.full(nn.Parameter(torch.zeros(2)))
    with pytest.raises(KeyError, match="there is no optimizer state 'exp_avg' of 'gain' to write to"):
        access.state("exp_avg").set_full(model.gain, torch.zeros(1))
    model(batch(rank)).backward()
    accumulating, sharded, *_ = make(rank, 1)
    with sharded.no_sync():
        accumulating(batch(rank)).backward()
    with pytest.raises(RuntimeError, match="is still being accumulated on each rank"):
        ParameterAccess(sharded).gradient.full(accumulating.gain)
    with pytest.raises(ValueError, match="there is no optimizer whose state"):
        ParameterAccess(sharded).state("exp_avg")


def test_wrong_access_is_refused_in_words() -> None:
    run_ranks(_refuses, 2)


def _gathers(rank: int, world_size: int, dtype: torch.dtype | None) -> None:
    for stage in STAGES:
        model, sharded, optimizer, access = make(rank, stage, dtype=dtype)
        weight = model.blocks[2].weight
        start = dict(Net().named_parameters())["blocks.2.weight"].detach()
        with gathered(sharded, model.blocks[2]):
            assert torch.equal(weight, start.to(weight.dtype))
            loss = model(batch(rank))
        # In place, on one rank, which wins.
        with gathered(sharded, weight, modifier_rank=1), torch.no_grad():
            if rank == 1:
                weight.fill_(0.5)
        assert torch.equal(access.master.full(weight), torch.full((13, 13), 0.5))
        # In place, the same everywhere.
        with gathered(sharded, [weight, model.gain]), torch.no_grad():
            weight.data.mul_(2)
            model.gain.add_(1)
        assert torch.equal(access.master.full(weight), torch.ones(13, 13))
        assert access.master.full(model.gain).tolist() == [2.5]
        if stage == 3:
            assert sharded.bytes().gathered == 0
            with pytest.raises(ValueError, match=r"rank 1 has other values for 'blocks.2.weight'"):
                with gathered(sharded, weight), torch.no_grad():
                    weight.fill_(float(rank))
            assert torch.equal(access.master.full(weight), torch.ones(13, 13))
        model(batch(rank)).backward()
        with pytest.raises(RuntimeError, match="leave the context first"), gathered(sharded, weight):
            optimizer.step()
        optimizer.step()
        assert loss.isfinite()
    with pytest.raises(ValueError, match="modifier_rank must be one of the 2 ranks, got 2"):
        with gathered(sharded, weight, modifier_rank=2):
            pass
    with pytest.raises(KeyError, match=r"1 of the parameters do not belong to the sharded Net; their shapes: \(3,\)"):
        with gathered(sharded, nn.Parameter(torch.zeros(3))):
            pass


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gathered_parameters_are_whole_and_keep_what_is_written(dtype: torch.dtype | None) -> None:
    run_ranks(_gathers, 2, dtype)

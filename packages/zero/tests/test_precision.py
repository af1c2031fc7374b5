"""Dtypes of parameters, sums and messages; clipping; skipped steps: the same rules at every stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.zero import LossScalePolicy, LossScaler, NonFiniteGradientError, Policy, ShardedOptimizer, shard
from drivetrain_testkit import relative_error, run_ranks

WIDTH = 24
STAGES = range(4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.leave = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x.to(self.enter.weight.dtype))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.leave(x).float().square().mean()


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(50 * step + rank))


def flat(parameters: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for _, p in sorted(parameters)])


class Weight(nn.Module):
    """One parameter, whose gradient is whatever is asked for."""

    def __init__(self, numel: int = 200) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, gradient: float) -> torch.Tensor:
        return (self.weight * gradient).sum()


# Clipping and norms ---------------------------------------------------------------------------------------------------

LR = 0.1
PRECISIONS = {None: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # how near the norm is to fp32's


@dataclass(frozen=True)
class Clipping:
    stage: int
    dtype: torch.dtype | None
    max_norm: float
    accumulation: int


CLIPPINGS = [
    Clipping(stage, dtype, max_norm, 1 + (stage + turn) % 2)
    for stage in STAGES
    for turn, dtype in enumerate(PRECISIONS)
    for max_norm in (0.0, 1e-3, 1e3)
]


def clip_all(rank: int, world_size: int) -> list[dict[str, Any]]:
    mesh = Mesh.create(init())
    return [clip(mesh, rank, case) for case in CLIPPINGS]


def clip(mesh: Mesh, rank: int, case: Clipping) -> dict[str, Any]:
    model = Net()
    sharded = shard(model, mesh, Policy(stage=case.stage, param_dtype=case.dtype, persistence_numel=0))
    scaler = LossScaler(LossScalePolicy(initial=64.0) if case.dtype is torch.float16 else LossScalePolicy(initial=1.0))
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer = ShardedOptimizer(sharded, inner, max_norm=case.max_norm, scaler=scaler)
    masters = [part.data for part in sharded.model_slices().values()]
    before = [m.clone() for m in masters]
    for micro in range(case.accumulation):
        sharded.closes_step = micro == case.accumulation - 1
        (model(inputs(micro, rank)) * scaler.scale / case.accumulation).backward()
    result = optimizer.step()
    moved = sum(float((after - old).double().square().sum()) for after, old in zip(masters, before, strict=True))
    return {"norm": result.grad_norm, "coefficient": result.clip_coefficient, "moved": moved}


def norm_of_plain(accumulation: int, world_size: int) -> float:
    model = Net()
    for micro in range(accumulation):
        for rank in range(world_size):
            (model(inputs(micro, rank)) / accumulation / world_size).backward()
    return float(nn.utils.clip_grad_norm_(model.parameters(), float("inf")))


def test_the_update_is_as_long_as_the_clipped_norm_says() -> None:
    """With SGD that is ``min(norm, max_norm) * lr``, and the norm reported is the unscaled and unclipped one."""
    norms = {accumulation: norm_of_plain(accumulation, 2) for accumulation in (1, 2)}
    for case, *ranks in zip(CLIPPINGS, *run_ranks(clip_all, 2), strict=True):
        norm = ranks[0]["norm"]
        assert norm == ranks[1]["norm"], case
        assert norm == pytest.approx(norms[case.accumulation], rel=PRECISIONS[case.dtype]), case
        length = sum(rank["moved"] for rank in ranks) ** 0.5
        bound = case.max_norm or float("inf")
        assert length == pytest.approx(LR * min(norm, bound), rel=2e-3), case
        assert ranks[0]["coefficient"] == pytest.approx(min(1.0, bound / norm), rel=2e-3), case


# The dtypes of sums and messages --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sum:
    """Gradients of each rank, micro-batch by micro-batch, and what their sum over micro-batches should be."""

    gradients: tuple[tuple[float, ...], ...]
    expected: float
    policy: Policy


def bf16(**options: Any) -> Policy:
    return Policy(param_dtype=torch.bfloat16, persistence_numel=0, **options)


# bf16 has 8 bits: 256 + 1 is 256 in it, and 256 + 3 is 260.
SUMS = {
    "micro-batches in bf16": Sum(((256, 1, 1, 1), (256, 1, 1, 1)), 256, bf16()),
    "micro-batches in fp32": Sum(((256, 1, 1, 1), (256, 1, 1, 1)), 259, bf16(accumulate_dtype=torch.float32)),
    "ranks in bf16": Sum(((256,), (1,)), 256, bf16(reduce_op="sum")),
    "ranks in fp32, kept in bf16": Sum(((256,), (1,)), 256, bf16(reduce_op="sum", reduce_dtype=torch.float32)),
    "ranks in fp32": Sum(((256,), (1,)), 257, bf16(reduce_op="sum", accumulate_dtype=torch.float32)),
    "bf16 on the wire, kept in fp32": Sum(
        ((256,), (1,)),
        256,
        bf16(reduce_op="sum", accumulate_dtype=torch.float32, reduce_dtype=torch.bfloat16),
    ),
    "fp16 sums that overflow as a sum": Sum(
        ((40_000,), (40_000,)), float("inf"), Policy(param_dtype=torch.float16, reduce_op="sum")
    ),
    "fp16 means do not": Sum(((40_000,), (40_000,)), 40_000, Policy(param_dtype=torch.float16)),
    "nor do they divided before": Sum(
        ((40_000,), (40_000,)), 40_000, Policy(param_dtype=torch.float16, predivide_factor=2.0)
    ),
    "a sum divided before": Sum(((40_000,), (24_000,)), 64_000, Policy(reduce_op="sum", predivide_factor=4.0)),
    "a mean divided before": Sum(((6,), (10,)), 8, Policy(predivide_factor=4.0)),
}


def sum_all(rank: int, world_size: int) -> dict[tuple[str, int], float]:
    mesh, found = Mesh.create(init()), {}
    for name, case in SUMS.items():
        for stage in STAGES:
            model = Weight()
            sharded = shard(model, mesh, replace(case.policy, stage=stage))
            for gradient in case.gradients[rank]:
                model(gradient).backward()
            optimizer = ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=1.0), skip_non_finite=False)
            optimizer.step()
            (part,) = sharded.model_slices().values()
            values = set((-part.data).tolist())
            assert len(values) == 1, values
            found[name, stage] = values.pop()
    return found


def test_sums_round_where_the_policy_says() -> None:
    for rank, found in enumerate(run_ranks(sum_all, 2)):
        for (name, stage), value in found.items():
            assert value == SUMS[name].expected, f"rank {rank}, stage {stage}, {name}"


# Half precision against loops written out -----------------------------------------------------------------------------


def train_by_hand(dtype: torch.dtype, scale: float, steps: int) -> torch.Tensor:
    """Mixed precision on one rank as the papers have it: fp32 masters, gradients and arithmetic in ``dtype``."""
    model = Net()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.to(dtype)
    optimizer = torch.optim.AdamW(masters, lr=1e-2)
    for step in range(steps):
        (model(inputs(step, 0)) * scale).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float() * (1 / scale)
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return torch.cat([m.detach().flatten() for m in masters])


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 256.0)])
def test_one_rank_is_mixed_precision_to_the_bit(dtype: torch.dtype, scale: float) -> None:
    expected = train_by_hand(dtype, scale, 5)
    mesh = Mesh.create(init())
    for stage in STAGES:
        model = Net()
        sharded = shard(model, mesh, Policy(stage=stage, param_dtype=dtype))
        scaler = LossScaler(LossScalePolicy(initial=scale))
        optimizer = ShardedOptimizer(sharded, torch.optim.AdamW(model.parameters(), lr=1e-2), scaler=scaler)
        for step in range(5):
            (model(inputs(step, 0)) * scale).backward()
            assert optimizer.step().stepped
        names = [name for name, _ in model.named_parameters()]
        slices = sharded.model_slices()
        assert torch.equal(torch.cat([slices[name].data for name in names]), expected), f"stage {stage}"


def half_all(rank: int, world_size: int) -> dict[tuple[str, int], tuple[torch.Tensor, list[float]]]:
    mesh, found = Mesh.create(init()), {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for accumulates in (None, torch.float32):
            for stage in STAGES:
                model, scaler = Net(), LossScaler(LossScalePolicy(initial=128.0))
                policy = Policy(
                    stage=stage,
                    param_dtype=dtype,
                    accumulate_dtype=accumulates,
                    reduce_every_micro_batch=True,
                    persistence_numel=0,
                )
                sharded, norms = shard(model, mesh, policy), []
                inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
                optimizer = ShardedOptimizer(sharded, inner, scaler=scaler, max_norm=0.05)
                for step in range(4):
                    for micro in range(2):
                        (model(inputs(2 * step + micro, rank)) * scaler.scale / 2).backward()
                    norms.append(optimizer.step().grad_norm)
                found[f"{name}, {accumulates}", stage] = flat(sharded.full_parameters()), norms
    return found


def test_stages_agree_to_the_bit_in_half_precision() -> None:
    for found in run_ranks(half_all, 2):
        for (name, stage), (parameters, norms) in found.items():
            assert torch.equal(parameters, found[name, 0][0]), (name, stage)
            assert norms == found[name, 0][1], (name, stage)


class Mixed(nn.Module):
    """Parameters of several dtypes, one of them no float, as a model may come."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.narrow = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)
        self.usual = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 1).double()
        self.places = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
        self.flags = nn.Parameter(torch.arange(WIDTH) % 3 > 0, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.narrow(x.bfloat16()))
        x = torch.tanh(self.usual(x.float()))[:, self.places] * self.flags
        return self.wide(x.double()).square().mean()


def mixed_all(rank: int, world_size: int) -> dict[int, dict[str, torch.Tensor]]:
    mesh, found = Mesh.create(init()), {}
    for stage in STAGES:
        model = Mixed()
        sharded = shard(model, mesh, Policy(stage=stage, persistence_numel=0))
        optimizer = ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            model(inputs(step, rank)).backward()
            assert optimizer.step().stepped
        found[stage] = dict(sharded.full_parameters())
    return found


def test_each_parameter_keeps_its_own_dtype_without_a_policy_for_it() -> None:
    """Also: bf16 parameters get fp32 master weights, which a plain optimizer over them would not have."""
    oracle = Mixed()
    masters = {
        name: p.detach().to(torch.promote_types(p.dtype, torch.float32)) for name, p in oracle.named_parameters()
    }
    for step in range(3):
        for rank in range(2):
            (oracle(inputs(step, rank)) / 2).backward()
        for name, p in oracle.named_parameters():
            if p.grad is not None:
                masters[name] -= 0.1 * p.grad
                p.data.copy_(masters[name])
                p.grad = None
    for found in run_ranks(mixed_all, 2):
        for stage, parameters in found.items():
            for name, p in oracle.named_parameters():
                assert parameters[name].dtype == p.dtype
                tolerance = 1e-2 if p.dtype == torch.bfloat16 else 2e-3  # bf16's rounding reaches all of them
                assert relative_error(parameters[name], p) < tolerance, (stage, name)
            assert torch.equal(parameters["places"], oracle.places)
            assert torch.equal(parameters["flags"], oracle.flags)


# Steps that are skipped -----------------------------------------------------------------------------------------------


def skip_all(rank: int, world_size: int) -> dict[int, dict[str, Any]]:
    mesh = Mesh.create(init())
    return {stage: skip(mesh, rank, stage) for stage in STAGES}


def skip(mesh: Mesh, rank: int, stage: int) -> dict[str, Any]:
    """Good and bad steps in turn; a bad one overflows on rank 1 only. Then the same good steps alone."""
    runs = []
    for bad_steps in ((1, 2, 4), ()):
        model, scaler = Net(), LossScaler(LossScalePolicy(initial=1024.0, hysteresis=2))
        sharded = shard(model, mesh, Policy(stage=stage, param_dtype=torch.float16, persistence_numel=0))
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer, good, scales, stepped = ShardedOptimizer(sharded, inner, scaler=scaler), 0, [], []
        for step in range(6 if bad_steps else 3):
            bad = step in bad_steps
            (model(inputs(good, rank)) * (1e9 if bad and rank == 1 else scaler.scale)).backward()
            before = flat(sharded.full_parameters())
            result = optimizer.step()
            assert sharded.bytes().gradients == 0
            assert torch.equal(before, flat(sharded.full_parameters())) == bad
            good += not bad
            scales.append(scaler.scale)
            stepped.append(result.stepped)
        runs.append({"parameters": flat(sharded.full_parameters()), "scales": scales, "stepped": stepped})
    return {"with": runs[0], "without": runs[1]}


def test_a_skipped_step_leaves_no_trace() -> None:
    """One rank overflows and all skip; the scale is halved when the hysteresis is used up, and stays."""
    for rank, found in enumerate(run_ranks(skip_all, 2)):
        for stage, runs in found.items():
            assert runs["with"]["stepped"] == [True, False, False, True, False, True], (rank, stage)
            assert runs["with"]["scales"] == [1024, 1024, 512, 512, 256, 256], (rank, stage)
            error = relative_error(runs["with"]["parameters"].float(), runs["without"]["parameters"].float())
            assert error < 1e-3, (rank, stage)  # the smaller scale rounds otherwise


def name_all(rank: int, world_size: int) -> dict[int, str]:
    mesh, found = Mesh.create(init()), {}
    for stage in STAGES:
        model = Net()
        sharded = shard(model, mesh, Policy(stage=stage, param_dtype=torch.float16, persistence_numel=0))
        scaler = LossScaler(LossScalePolicy(initial=4.0, minimum=1.0, hysteresis=1))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = ShardedOptimizer(sharded, inner, scaler=scaler, patience=3)
        model.blocks[2].weight.register_hook(lambda g: torch.full_like(g, torch.nan) if rank == 1 else g)
        try:
            for step in range(10):
                model(inputs(step, rank)).backward()
                result = optimizer.step()
                assert not result.stepped
                assert result.grad_norm != result.grad_norm
        except NonFiniteGradientError as error:
            found[stage] = f"{step} {error}"
    return found


def test_endless_overflow_raises_and_names_the_parameter_on_every_rank() -> None:
    """Two steps bring the scale from 4 to its minimum; three more at the minimum are too many."""
    for rank, found in enumerate(run_ranks(name_all, 2)):
        assert found.keys() == set(STAGES)
        for text in found.values():
            assert text.startswith("4 ")
            assert f"rank {rank}: gradients were not finite in 3 steps in a row at loss scale 1" in text
            assert "'blocks.2.weight'" in text


@pytest.mark.parametrize("stage", STAGES)
def test_non_finite_gradients_are_applied_if_asked(stage: int) -> None:
    model = Weight()
    sharded = shard(model, Mesh.create(init()), Policy(stage=stage))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ShardedOptimizer(sharded, inner, skip_non_finite=False)
    model(torch.inf).backward()
    result = optimizer.step()
    assert result.stepped
    assert result.grad_norm == torch.inf
    assert model.weight.isinf().all()


BAD_SCALES: dict[str, Callable[[], LossScalePolicy]] = {
    "positive and finite, got 0": partial(LossScalePolicy, initial=0),
    "positive and finite, got inf": partial(LossScalePolicy, initial=float("inf")),
    "positive and finite, got nan": partial(LossScalePolicy, initial=float("nan")),
    "window=0": partial(LossScalePolicy, window=0),
    "hysteresis=0": partial(LossScalePolicy, hysteresis=0),
    "minimum=0": partial(LossScalePolicy, minimum=0),
}


@pytest.mark.parametrize("text", BAD_SCALES)
def test_wrong_loss_scales_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BAD_SCALES[text]()


BAD_POLICIES: dict[str, Callable[[], Policy]] = {
    "stage must be 0, 1, 2 or 3, got 4": partial(Policy, stage=4),
    "reduce_op must be 'mean' or 'sum', got 'max'": partial(Policy, reduce_op="max"),
    "predivide_factor must be positive, got 0": partial(Policy, predivide_factor=0),
    "bucket_numel must be at least 1, got 0": partial(Policy, bucket_numel=0),
    "persistence_numel cannot be negative, got -1": partial(Policy, persistence_numel=-1),
    "param_dtype must be a floating-point dtype, got torch.int8": partial(Policy, param_dtype=torch.int8),
    "reduce_dtype must be a floating-point dtype": partial(Policy, reduce_dtype=torch.int64),
    "accumulate_dtype must be a floating-point dtype": partial(Policy, accumulate_dtype=torch.bool),
}


@pytest.mark.parametrize("text", BAD_POLICIES)
def test_wrong_policies_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BAD_POLICIES[text]()


def test_a_negative_norm_to_clip_to_is_refused() -> None:
    model = Weight()
    sharded = shard(model, Mesh.create(init()), Policy())
    with pytest.raises(ValueError, match=r"max_norm cannot be negative, got -1\.0"):
        ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=0.1), max_norm=-1.0)

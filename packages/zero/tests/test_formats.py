"""Every mix of number formats, at every stage: the same bits as one process that follows the same rules, and the bytes
that the documentation says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.kernels import FusedAdagrad, FusedAdam, FusedSgd, Lion
from drivetrain.zero import (
    LossScalePolicy,
    LossScaler,
    ParameterAccess,
    Policy,
    ShardedModule,
    ShardedOptimizer,
    WireRule,
    shard,
)
from drivetrain_testkit import relative_error, run_ranks

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
WIDTH, RANKS, MICRO = 64, 2, 2
STAGES = range(4)


class Scaled(nn.Module):
    """Not one of the classes that autocast lowers."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 2 * WIDTH).view(2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain[0] + self.gain[1]


class Net(nn.Module):
    """No parameter needs padding on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scaled = Scaled()
        self.last = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.scaled(self.first(x.to(self.first.weight.dtype))))
        return self.last(x).float().square().mean()


NUMEL = WIDTH * WIDTH + 4 * WIDTH


def inputs(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Formats, an optimizer for them, and the bytes per parameter that they take."""

    policy: Policy = field(default_factory=Policy)
    make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5)
    autocast: torch.dtype | None = None
    scale: float = 1.0
    steps: int = 2
    master_bytes: int = 0
    state_bytes: int = 4

    @property
    def compute(self) -> torch.dtype:
        return self.policy.param_dtype or FP32

    @property
    def master(self) -> torch.dtype:
        return (self.policy.master_dtype or FP32) if self.compute != FP32 else FP32

    @property
    def kept(self) -> torch.dtype:
        return self.policy.accumulate_dtype or self.compute

    def wire(self, name: str) -> torch.dtype:
        rule = self.policy.wire_rule
        lowered = rule is not None and name != "scaled.gain"
        return rule.dtype if lowered and rule else self.policy.reduce_dtype or self.kept

    def forward_context(self) -> Any:
        return torch.autocast("cpu", self.autocast, cache_enabled=False) if self.autocast else nullcontext()


def adam(state_dtype: torch.dtype) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda p: FusedAdam(p, lr=0.01, weight_decay=0.1, state_dtype=state_dtype)


def mixes() -> Iterator[tuple[str, Setting]]:
    """What gradients are made, added and sent in, all against all."""
    for compute in (FP32, BF16, FP16):
        for kept in (FP32, BF16, FP16):
            for wire in (FP32, BF16, FP16):
                policy = Policy(
                    param_dtype=None if compute == FP32 else compute,
                    accumulate_dtype=None if kept == compute else kept,
                    reduce_dtype=None if wire == kept else wire,
                )
                half = compute != FP32
                scale = 64.0 if compute == FP16 else 1.0
                setting = Setting(policy=policy, scale=scale, steps=1, master_bytes=4 * half)
                yield f"{compute}, added in {kept}, sent in {wire}", setting


LOW: dict[str, Setting] = {
    "bf16, moments in bf16": Setting(policy=Policy(param_dtype=BF16), make=adam(BF16), master_bytes=4, state_bytes=4),
    "bf16, masters in bf16": Setting(
        policy=Policy(param_dtype=BF16, master_dtype=BF16), make=adam(FP32), state_bytes=8
    ),
    "bf16, masters in bf16, added in fp32": Setting(
        policy=Policy(param_dtype=BF16, master_dtype=BF16, accumulate_dtype=FP32), make=adam(FP32), state_bytes=8
    ),
    "bf16 all through": Setting(policy=Policy(param_dtype=BF16, master_dtype=BF16), make=adam(BF16), state_bytes=4),
    "bf16 all through, Lion": Setting(
        policy=Policy(param_dtype=BF16, master_dtype=BF16),
        make=lambda p: Lion(p, lr=0.01, state_dtype=BF16),
        state_bytes=2,
    ),
    "bf16 all through, torch's AdamW": Setting(
        policy=Policy(param_dtype=BF16, master_dtype=BF16),
        make=lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        state_bytes=4,
    ),
    "bf16 all through, torch's RMSprop": Setting(
        policy=Policy(param_dtype=BF16, master_dtype=BF16),
        make=lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=False),
        state_bytes=2,
    ),
    "fp16, masters in fp16": Setting(
        policy=Policy(param_dtype=FP16, master_dtype=FP16), make=adam(FP32), scale=1024.0, state_bytes=8
    ),
    "fp16, masters in fp16, SGD": Setting(
        policy=Policy(param_dtype=FP16, master_dtype=FP16),
        make=lambda p: FusedSgd(p, lr=0.5, momentum=0.5),
        scale=1024.0,
    ),
    "fp16, masters in fp16, Adagrad": Setting(
        policy=Policy(param_dtype=FP16, master_dtype=FP16), make=lambda p: FusedAdagrad(p, lr=0.05), scale=1024.0
    ),
    "autocast in bf16": Setting(policy=Policy(wire_rule=WireRule(dtype=BF16)), autocast=BF16),
    "autocast in fp16": Setting(policy=Policy(wire_rule=WireRule(dtype=FP16)), autocast=FP16, scale=256.0),
    "autocast in bf16, the rest in fp16": Setting(
        policy=Policy(wire_rule=WireRule(dtype=BF16), reduce_dtype=FP16), autocast=BF16
    ),
}
SETTINGS = {**dict(mixes()), **LOW}


def train_by_hand(setting: Setting, *, per_micro_batch: bool) -> dict[str, torch.Tensor]:
    """All ranks' work in one process: the masters after the last step."""
    model = Net().to(setting.compute)
    masters = {n: p.detach().to(setting.master).requires_grad_() for n, p in Net().named_parameters()}
    optimizer = setting.make(masters.values())
    for step in range(setting.steps):
        local: list[dict[str, torch.Tensor]] = [{} for _ in range(RANKS)]
        reduced: dict[str, torch.Tensor] = {}
        for micro in range(MICRO):
            for rank in range(RANKS):
                with setting.forward_context():
                    loss = model(inputs(step, micro, rank))
                (loss * (setting.scale / MICRO)).backward()
                for name, p in model.named_parameters():
                    if name in local[rank]:
                        local[rank][name].add_(p.grad)
                    else:
                        local[rank][name] = p.grad.to(setting.kept)
                    p.grad = None
            if per_micro_batch or micro == MICRO - 1:
                for name in masters:
                    wire = setting.wire(name)
                    total = sum(own.pop(name).to(wire).float() for own in local) / RANKS
                    mean = total.to(wire).to(setting.kept)
                    reduced[name] = reduced[name].add_(mean) if name in reduced else mean
        takes_factor = getattr(optimizer, "takes_factor", False)
        for name, master in masters.items():
            gradient = reduced[name]
            if setting.scale != 1.0 and not takes_factor:
                gradient = gradient.to(torch.promote_types(gradient.dtype, setting.master)) / setting.scale
            master.grad = gradient.to(setting.master)
        optimizer.step(**({"factor": 1.0 / setting.scale} if takes_factor else {}))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    return masters


def setup(mesh: Mesh, setting: Setting, stage: int) -> tuple[Net, ShardedModule, ShardedOptimizer]:
    model = Net()
    sharded = shard(model, mesh, replace(setting.policy, stage=stage, persistence_numel=0))
    scaler = LossScaler(LossScalePolicy(initial=setting.scale, dynamic=False))
    return model, sharded, ShardedOptimizer(sharded, setting.make(model.parameters()), scaler=scaler)


def train(mesh: Mesh, setting: Setting, stage: int, rank: int) -> dict[str, torch.Tensor | None]:
    model, sharded, optimizer = setup(mesh, setting, stage)
    for step in range(setting.steps):
        for micro in range(MICRO):
            sharded.closes_step = micro == MICRO - 1
            with setting.forward_context():
                loss = model(inputs(step, micro, rank))
            (loss * (setting.scale / MICRO)).backward()
        sharded.reducer.drain()
        check_bytes(sharded, setting, stage)
        assert optimizer.step().stepped
    small = 8 * len(list(model.parameters()))  # step counts
    expected = setting.state_bytes * NUMEL // (RANKS if stage else 1)
    assert expected <= optimizer.state_bytes <= expected + small
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, ParameterAccess(sharded).master.full_many(parameters), strict=True))


def check_bytes(sharded: ShardedModule, setting: Setting, stage: int) -> None:
    """What a rank holds of parameters, reduced gradients and master weights."""
    held = sharded.bytes()
    own = NUMEL // (RANKS if stage else 1)
    assert held.parameters - held.gathered == setting.compute.itemsize * NUMEL // (RANKS if stage == 3 else 1)
    assert held.gradients == setting.kept.itemsize * own
    assert held.master == setting.master_bytes * own


def all_settings(rank: int, world_size: int, thorough: bool) -> list[str]:
    torch.set_num_threads(1)
    mesh, wrong = Mesh.create(init()), []
    for number, (name, setting) in enumerate(SETTINGS.items()):
        expected = {late: train_by_hand(setting, per_micro_batch=late) for late in (False, True)}
        for stage in STAGES if thorough or name in LOW else (number % 2, 2 + number // 2 % 2):
            for key, value in train(mesh, setting, stage, rank).items():
                if value.dtype != setting.master or not torch.equal(value, expected[stage >= 2][key]):
                    wrong.append(f"{name}, stage {stage}: {key} {relative_error(value, expected[stage >= 2][key])}")
    return wrong


@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["part", "whole"])
def test_every_mix_at_every_stage_is_what_one_process_computes(thorough: bool) -> None:
    """To the bit, in the master weights; and every rank holds as many bytes as the formats take."""
    for wrong in run_ranks(all_settings, RANKS, thorough):
        assert wrong == []


# Single parameters ----------------------------------------------------------------------------------------------------


def access_all(rank: int, world_size: int) -> None:
    mesh = Mesh.create(init())
    for name, setting in LOW.items():
        for stage in STAGES:
            look_and_write(mesh, setting, stage, f"{name}, stage {stage}")


def look_and_write(mesh: Mesh, setting: Setting, stage: int, case: str) -> None:
    model, sharded, optimizer = setup(mesh, setting, stage)
    access, p = ParameterAccess(sharded, optimizer), model.first.weight
    with setting.forward_context():
        loss = model(inputs(0, 0, 0))
    (loss * setting.scale).backward()
    # What is left of such a gradient without its scale is 0 in fp16.
    tiny = 6e-8 * 2**-4 if setting.scale > 1 else 2.0**-20
    access.gradient.set_full(p, torch.full_like(p, tiny, dtype=FP32))
    gradient = access.gradient.full(p)
    assert gradient is not None, case
    assert torch.allclose(gradient.float(), torch.tensor(tiny), rtol=1e-1, atol=0.0), case
    optimizer.step()
    key = next(iter(k for k, v in optimizer.state_of(p).items() if k != "step" and v.dtype.is_floating_point), None)
    if key is not None:
        moment = access.state(key)
        wanted = getattr(optimizer.optimizer, "state_dtype", setting.master)
        assert moment.full(p).dtype == wanted, case
        moment.set_full(p, torch.full(p.shape, 0.5))
        assert (moment.full(p) == 0.5).all(), case
    written = torch.full(p.shape, 1 + 2.0**-12)
    access.master.set_full(p, written)
    assert torch.equal(access.master.full(p), written.to(setting.master)), case
    assert torch.equal(dict(sharded.full_parameters())["first.weight"], written.to(setting.compute)), case


def test_parameter_access_in_every_format() -> None:
    run_ranks(access_all, RANKS)


# What travels in fewer bits -------------------------------------------------------------------------------------------


def traffic(mesh: Mesh, policy: Policy) -> tuple[int, int]:
    """Bytes that a step gathers, and that it reduces."""
    model = Net()
    sharded = shard(model, mesh, replace(policy, stage=3, persistence_numel=0))
    optimizer = ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=0.1))
    mesh.ledger.reset()
    with torch.autocast("cpu", BF16, cache_enabled=False):
        loss = model(inputs(0, 0, 0))
    loss.backward()
    sharded.reducer.drain()
    counted = {entry.op: entry.bytes for entry in mesh.ledger.entries()}
    optimizer.step()
    return counted["all_gather"], counted["reduce_scatter"]


def traffic_all(rank: int, world_size: int) -> list[tuple[int, int]]:
    mesh = Mesh.create(init())
    rules = (None, WireRule(dtype=BF16), WireRule(dtype=BF16, classes=()), WireRule(dtype=BF16, classes=("Scaled",)))
    return [traffic(mesh, Policy(wire_rule=rule)) for rule in rules]


def test_parameters_and_gradients_of_safe_modules_travel_in_half_of_the_bytes() -> None:
    linear, gain = NUMEL - 2 * WIDTH, 2 * WIDTH
    for plain, default, none, named in run_ranks(traffic_all, RANKS):
        passes = plain[0] // (4 * NUMEL)  # gathers in forward, and again in backward unless it was kept
        assert plain == (passes * 4 * NUMEL, 4 * NUMEL)
        assert default == (passes * (2 * linear + 4 * gain), 2 * linear + 4 * gain)
        assert none == plain
        assert named == (passes * (4 * linear + 2 * gain), 4 * linear + 2 * gain)


def replica_traffic(rank: int, world_size: int) -> None:
    """Two replicas with one rank each: all that travels are gradients, summed over micro-batches in fp32."""
    mesh = Mesh.create(init(), data=2)
    for wire, size in ((None, 4), (BF16, 2)):
        model = Net()
        sharded = shard(model, mesh, Policy(stage=1, param_dtype=BF16, accumulate_dtype=FP32, reduce_dtype=wire))
        optimizer = ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=0.1))
        (bucket,) = sharded.buckets
        mesh.ledger.reset()
        model(inputs(0, 0, rank)).backward()
        sharded.reducer.drain()
        assert [(entry.op, entry.bytes) for entry in mesh.ledger.entries()] == [("all_reduce", size * NUMEL)]
        assert bucket.reduced is not None
        assert bucket.reduced.dtype == FP32
        assert optimizer.step().stepped


def test_what_replicas_exchange_travels_in_the_same_format() -> None:
    run_ranks(replica_traffic, 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)
        self.head.weight = self.table.weight


def test_only_parameters_that_no_other_class_owns_travel_in_fewer_bits() -> None:
    model = Tied()

    def chosen(*classes: Any) -> set[str]:
        ids = WireRule(dtype=BF16, **({"classes": classes} if classes else {})).parameters(model)
        return {name for name, p in model.named_parameters() if id(p) in ids}

    linear = {"inner.weight", "inner.bias", "head.bias"}
    assert chosen() == linear
    for spelling in (nn.Linear, "Linear", "torch.nn.Linear", "torch.nn.modules.linear.Linear"):
        assert chosen(spelling) == linear, spelling
    assert chosen(nn.Linear, "torch.nn.Embedding") == {*linear, "table.weight"}
    assert chosen("torch.nn.Conv2d") == set()
    names = ("torch.nn.Conv2d", "torch.nn.Linaer", "Linaer", "nowhere.Linear")
    with pytest.raises(
        ValueError, match=r"^'torch\.nn\.Linaer', 'Linaer', 'nowhere\.Linear': no class of this name is"
    ):
        shard(model, Mesh.create(init()), Policy(wire_rule=WireRule(dtype=BF16, classes=names)))


# The loss scale -------------------------------------------------------------------------------------------------------

SCALED: dict[str, Setting] = {
    "fp16": Setting(policy=Policy(param_dtype=FP16)),
    "fp16, added in fp32": Setting(policy=Policy(param_dtype=FP16, accumulate_dtype=FP32)),
    "fp16, masters in fp16": Setting(
        policy=Policy(param_dtype=FP16, master_dtype=FP16), make=lambda p: FusedSgd(p, lr=0.5)
    ),
    "autocast in fp16": Setting(policy=Policy(wire_rule=WireRule(dtype=FP16)), autocast=FP16),
}


def scale_all(rank: int, world_size: int) -> dict[tuple[str, int], list[tuple[torch.Tensor, list[float]]]]:
    """The same training under several initial scales, with accumulation and clipping."""
    mesh, found = Mesh.create(init()), {}
    for name, setting in SCALED.items():
        for stage in STAGES:
            found[name, stage] = [scaled_run(mesh, setting, stage, rank, 2.0**power) for power in (4, 8, 12)]
    return found


def scaled_run(mesh: Mesh, setting: Setting, stage: int, rank: int, initial: float) -> tuple[torch.Tensor, list[float]]:
    model, records = Net(), []
    sharded = shard(model, mesh, replace(setting.policy, stage=stage, persistence_numel=0))
    optimizer = ShardedOptimizer(
        sharded,
        setting.make(model.parameters()),
        scaler=LossScaler(LossScalePolicy(initial=initial)),
        max_norm=0.05,
    )
    for step in range(3):
        for micro in range(MICRO):
            sharded.closes_step = micro == MICRO - 1
            with setting.forward_context():
                loss = model(inputs(step, micro, rank))
            (loss * (initial / MICRO)).backward()
        result = optimizer.step()
        assert result.stepped
        assert result.loss_scale == initial
        assert result.clip_coefficient < 1
        records.append(result.grad_norm)
    masters = ParameterAccess(sharded).master.full_many(list(model.parameters()))
    moved = [(m - p.to(m.dtype)).flatten() for m, p in zip(masters, Net().parameters(), strict=True) if m is not None]
    return torch.cat(moved), records


def test_the_update_does_not_depend_on_the_initial_scale() -> None:
    for found in run_ranks(scale_all, RANKS):
        for case, runs in found.items():
            moved, norms = runs[-1]
            for other, other_norms in runs[:-1]:
                assert relative_error(other, moved) < 1e-6, case
                assert other_norms == pytest.approx(norms, rel=1e-6), case


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a scale moves: one sign per step, ``-`` for an overflow."""

    policy: LossScalePolicy
    steps: str
    scales: list[float]


COURSES = {
    "halves when the hysteresis is used up": Course(
        policy=LossScalePolicy(initial=16, hysteresis=2, window=100), steps="--+-", scales=[16, 8, 8, 4]
    ),
    "a good step restores a consecutive hysteresis": Course(
        policy=LossScalePolicy(initial=16, hysteresis=2, window=100, consecutive_hysteresis=True),
        steps="-+-+--",
        scales=[16, 16, 16, 16, 16, 8],
    ),
    "a window of good steps doubles, and restores the hysteresis": Course(
        policy=LossScalePolicy(initial=16, hysteresis=2, window=2),
        steps="-++-+++-",
        scales=[16, 16, 32, 32, 32, 64, 64, 64],
    ),
    "an overflow starts the window anew": Course(
        policy=LossScalePolicy(initial=16, hysteresis=1, window=3), steps="++-+++", scales=[16, 16, 8, 8, 8, 16]
    ),
    "never below the minimum": Course(
        policy=LossScalePolicy(initial=16, hysteresis=1, minimum=6), steps="---", scales=[8, 6, 6]
    ),
    "a constant scale stays": Course(
        policy=LossScalePolicy(initial=16, dynamic=False, window=1), steps="-+-+", scales=[16] * 4
    ),
}


@pytest.mark.parametrize("name", COURSES)
def test_how_a_scale_moves(name: str) -> None:
    """Also when it is saved and loaded before every step."""
    course = COURSES[name]
    scaler, scales = LossScaler(course.policy), []
    for step in course.steps:
        scaler.update(overflow=step == "-")
        scales.append(scaler.scale)
        loaded = LossScaler(course.policy)
        loaded.load_state_dict(scaler.state_dict())
        assert loaded.state_dict() == scaler.state_dict()
        scaler = loaded
    assert scales == course.scales


def test_only_a_dynamic_scale_goes_on_from_a_dynamic_one() -> None:
    moved, constant, none = (
        LossScaler(LossScalePolicy(initial=64, hysteresis=1)),
        LossScaler(LossScalePolicy(initial=7, dynamic=False)),
        LossScaler(),
    )
    moved.update(overflow=True)
    for policy, saved, scale in (
        (LossScalePolicy(initial=1024), moved, 32),
        (LossScalePolicy(initial=1024, minimum=48), moved, 48),
        (LossScalePolicy(initial=1024), constant, 1024),
        (LossScalePolicy(initial=1024), none, 1024),
        (constant.policy, moved, 7),
        (none.policy, moved, 1),
    ):
        scaler = LossScaler(policy)
        scaler.load_state_dict(saved.state_dict())
        assert scaler.scale == scale, (policy, saved.policy)
        older = {key: value for key, value in saved.state_dict().items() if key != "dynamic"}
        scaler = LossScaler(policy)
        scaler.load_state_dict(older)
        assert scaler.scale == scale, (policy, saved.policy)


# What is refused ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, Callable[[], object]] = {
    r"master_dtype is torch\.bfloat16 and param_dtype None; master weights are fp32": lambda: Policy(master_dtype=BF16),
    r"master_dtype is torch\.float16 and param_dtype torch\.bfloat16; master weights": lambda: Policy(
        param_dtype=BF16, master_dtype=FP16
    ),
    r"master_dtype must be a floating-point dtype, got torch\.int8": lambda: Policy(master_dtype=torch.int8),
    r"accumulate_dtype is torch\.float32: a sum that carries the loss scale may not fit fp16": lambda: Policy(
        param_dtype=FP16, master_dtype=FP16, accumulate_dtype=FP32
    ),
    r"wire_rule: the dtype must be torch\.bfloat16 or torch\.float16, got torch\.float32": lambda: WireRule(dtype=FP32),
    r"SGD would be given fp16 gradients without their loss scale, since master weights are fp16": lambda: setup(
        Mesh.create(init()), Setting(policy=Policy(param_dtype=FP16, master_dtype=FP16)), 0
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_formats_that_do_not_go_together_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        REFUSED[text]()

"""Optimizer state as named slices: written at one stage and number of ranks, loaded at another, training goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.kernels import Lamb, Lion
from drivetrain.zero import FlatSlice, Policy, ShardedModule, ShardedOptimizer, shard
from drivetrain_testkit import relative_error, run_ranks

WIDTH, BEFORE, AFTER = 10, 3, 2


class Net(nn.Module):
    """A part that is never trained at all, one of a single element, one without a gradient, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.gain = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().float().mean()
        x = self.frozen(x.to(self.gain.dtype))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.gain).float().square().mean()


class Numbers(torch.optim.Optimizer):
    """Keeps Python numbers and a flag in its state, beside a moment of another dtype, and updates by all of them."""

    elementwise = True

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {
                        "count": 0,
                        "decay": 1.0,
                        "odd": False,
                        "moment": torch.zeros_like(p, dtype=torch.float64),
                    }
                state["count"] += 1
                state["decay"] *= 0.75
                state["odd"] = not state["odd"]
                state["moment"] += p.grad
                factor = group["lr"] * state["decay"] / state["count"] * (1.0 if state["odd"] else 0.5)
                p -= (factor * state["moment"]).to(p.dtype)


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Lion": lambda p: Lion(p, lr=0.003),
    "Lamb": lambda p: Lamb(p, lr=0.02),
    "Numbers": lambda p: Numbers(p, lr=0.05),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}
WHOLE = ("Adafactor",)  # whose state has shapes of its own
EVERY_STAGE = ("AdamW", "Numbers")  # whose state is of all kinds; others have no more of them


def stages_of(name: str) -> tuple[int, ...]:
    return (0,) if name in WHOLE else (0, 1, 2, 3) if name in EVERY_STAGE else (0, 3)


@dataclass(frozen=True)
class Key:
    optimizer: str
    stage: int
    dtype: torch.dtype | None = None


KEYS = [
    *(Key(name, stage) for name in MAKERS for stage in stages_of(name)),
    *(Key("AdamW", stage, torch.bfloat16) for stage in range(4)),
]


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A `FlatSlice` that can be sent between processes."""

    values: torch.Tensor
    offset: int
    shape: tuple[int, ...]
    writes: bool

    @classmethod
    def of(cls, part: FlatSlice) -> Slice:
        return cls(values=part.data.clone(), offset=part.offset, shape=tuple(part.shape), writes=part.writes)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What one rank gives to a checkpoint, and where training went from there."""

    slices: dict[str, Slice]
    schema: dict[str, dict[str, str]]
    hyperparameters: list[dict[str, Any]]
    final: dict[str, torch.Tensor]


def setup(mesh: Mesh, key: Key, seed: int = 2) -> tuple[Net, ShardedModule, ShardedOptimizer]:
    model = Net()
    torch.manual_seed(seed)
    if seed != 2:
        for p in model.parameters():
            nn.init.normal_(p)
    policy = Policy(stage=key.stage, param_dtype=key.dtype, persistence_numel=5, bucket_numel=150)
    sharded = shard(model, mesh, policy)
    groups = [
        {"params": [*model.layers.parameters(), *model.unused.parameters()]},
        {"params": [model.gain], "lr": 0.03},
    ]
    return model, sharded, ShardedOptimizer(sharded, MAKERS[key.optimizer](groups))


def train(model: Net, optimizer: ShardedOptimizer, steps: range) -> None:
    """On the same data on all ranks, so that the number of ranks makes no difference."""
    for step in steps:
        model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))).backward()
        assert optimizer.step().stepped


def outcome(model: Net, sharded: ShardedModule) -> dict[str, torch.Tensor]:
    return {**dict(sharded.full_parameters()), "seen": model.seen.clone()}


def slices_of(sharded: ShardedModule, optimizer: ShardedOptimizer, purpose: Any) -> dict[str, FlatSlice]:
    return {**sharded.model_slices(), **sharded.buffer_slices(), **optimizer.state_slices(purpose)}


def save(mesh: Mesh, key: Key) -> Saved:
    model, sharded, optimizer = setup(mesh, key)
    train(model, optimizer, range(BEFORE))
    slices = {name: Slice.of(part) for name, part in slices_of(sharded, optimizer, "save").items()}
    schema, hyperparameters = optimizer.state_schema(), optimizer.hyperparameters()
    train(model, optimizer, range(BEFORE, BEFORE + AFTER))
    return Saved(slices=slices, schema=schema, hyperparameters=hyperparameters, final=outcome(model, sharded))


def save_all(rank: int, world_size: int) -> dict[Key, Saved]:
    mesh = Mesh.create(init())
    return {key: save(mesh, key) for key in KEYS}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    tensors: dict[str, torch.Tensor]
    stored: dict[str, dict[str, torch.Size]]
    schema: dict[str, dict[str, str]]
    hyperparameters: list[dict[str, Any]]


def assemble(ranks: list[Saved]) -> Checkpoint:
    """Whole tensors from what the ranks write. Every element must be written, and by one rank only."""
    tensors: dict[str, torch.Tensor] = {}
    written: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, part in rank.slices.items():
            whole = tensors.setdefault(name, torch.zeros(part.shape, dtype=part.values.dtype))
            counts = written.setdefault(name, torch.zeros(part.shape, dtype=torch.int64))
            assert tuple(whole.shape) == part.shape
            if part.writes:
                place = slice(part.offset, part.offset + part.values.numel())
                whole.view(-1)[place] = part.values
                counts.view(-1)[place] += 1
    for name, counts in written.items():
        assert (counts == 1).all(), f"{name} is written {counts.min()} to {counts.max()} times"
    stored: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in tensors.items():
        if "/" in name:
            parameter, state = name.split("/")
            stored.setdefault(parameter, {})[state] = tensor.shape
    schema = {state: entry for rank in ranks for state, entry in rank.schema.items()}
    return Checkpoint(tensors=tensors, stored=stored, schema=schema, hyperparameters=ranks[0].hyperparameters)


def load(mesh: Mesh, key: Key, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    model, sharded, optimizer = setup(mesh, key, seed=99)
    optimizer.load_hyperparameters(checkpoint.hyperparameters)
    optimizer.prepare_state(checkpoint.stored, checkpoint.schema)
    for name, part in slices_of(sharded, optimizer, "load").items():
        whole = checkpoint.tensors[name]
        assert whole.shape == part.shape, name
        part.data.copy_(whole.view(-1)[part.offset : part.offset + part.data.numel()])
    optimizer.finish_load()
    sharded.refresh_parameters()
    train(model, optimizer, range(BEFORE, BEFORE + AFTER))
    return outcome(model, sharded)


def load_all(rank: int, world_size: int, checkpoints: dict[Key, Checkpoint]) -> dict[Key, dict[str, torch.Tensor]]:
    mesh = Mesh.create(init())
    return {key: load(mesh, key, checkpoint) for key, checkpoint in checkpoints.items()}


@pytest.fixture(scope="module")
def saved() -> list[dict[Key, Saved]]:
    return run_ranks(save_all, 2)


def other_stage(key: Key) -> Key:
    return key if key.optimizer in WHOLE else replace(key, stage=3 - key.stage)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_goes_on_at_another_stage_and_world_size(saved: list[dict[Key, Saved]], world_size: int) -> None:
    """What stage s wrote is loaded at stage 3 - s, where the optimizer works on slices; to the bit, but for the mean
    over three ranks and Lamb's norms."""
    checkpoints = {other_stage(key): assemble([rank[key] for rank in saved]) for key in KEYS}
    for rank, found in enumerate(run_ranks(load_all, world_size, checkpoints)):
        for key, parameters in found.items():
            expected = saved[0][other_stage(key)].final
            for name, value in parameters.items():
                if world_size == 3 or key.optimizer == "Lamb":
                    assert relative_error(value, expected[name]) < 1e-5, (rank, key, name)
                else:
                    assert torch.equal(value, expected[name]), (rank, key, name)


def test_what_has_no_state_is_not_in_the_slices(saved: list[dict[Key, Saved]]) -> None:
    """A parameter that never had a gradient has no moments; a frozen one has values only."""
    for rank in saved:
        for key, rank_saved in rank.items():
            states = {name for name in rank_saved.slices if "/" in name}
            if key.optimizer != "Adagrad":  # which makes its state with itself
                assert not any(name.startswith("unused") for name in states), key
            assert not any(name.startswith("frozen") for name in states), key
            assert {"frozen.weight", "unused.weight", "gain", "seen"} <= rank_saved.slices.keys()


def test_the_schema_says_what_numbers_are(saved: list[dict[Key, Saved]]) -> None:
    schema = saved[0][Key("Numbers", 3)].schema
    assert schema == {
        "count": {"kind": "int", "dtype": "float64"},
        "decay": {"kind": "float", "dtype": "float64"},
        "odd": {"kind": "bool", "dtype": "float64"},
        "moment": {"kind": "elementwise", "dtype": "float64"},
    }
    assert saved[0][Key("AdamW", 0)].schema["step"] == {"kind": "tensor", "dtype": "float32"}


def test_loaded_numbers_keep_their_types() -> None:
    mesh, key = Mesh.create(init()), Key("Numbers", 1)
    model, _, optimizer = setup(mesh, key)
    train(model, optimizer, range(3))
    state = {name: part.data.clone() for name, part in optimizer.state_slices("save").items()}
    shapes = {"count": torch.Size(()), "decay": torch.Size(()), "odd": torch.Size(()), "moment": torch.Size((1,))}
    stored = {name.split("/")[0]: shapes for name in state}
    schema = optimizer.state_schema()
    _, _, other = setup(mesh, key)
    other.prepare_state(stored, schema)
    for name, part in other.state_slices("load").items():
        part.data.copy_(state[name])
    other.finish_load()
    loaded = [(s["count"], s["decay"], s["odd"]) for s in other.optimizer.state.values()]
    assert loaded == [(3, 0.75**3, True)] * 5
    assert {type(value) for values in loaded for value in values} == {int, float, bool}


# Schedules and hyperparameters ----------------------------------------------------------------------------------------


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    cold = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cold], milestones=[3])


@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("stage", range(4))
def test_a_schedule_of_the_clients_goes_on_working(stage: int, before: bool) -> None:
    def run(sharding: bool) -> tuple[torch.Tensor, list[float]]:
        model = Net()
        inner = torch.optim.AdamW([{"params": model.layers.parameters()}, {"params": [model.gain], "lr": 0.5}], lr=0.1)
        scheduler = schedule(inner) if before else None
        stepper: Any = inner
        if sharding:
            stepper = ShardedOptimizer(shard(model, Mesh.create(init()), Policy(stage=stage)), inner)
        scheduler = scheduler or schedule(inner)
        rates = []
        for step in range(6):
            stepper.zero_grad()
            model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))).backward()
            stepper.step()
            rates += [group["lr"] for group in stepper.param_groups]
            scheduler.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()]), rates

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*epoch parameter.*")  # torch's SequentialLR warns of itself
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        parameters, rates = run(sharding=True)
        expected, expected_rates = run(sharding=False)
    assert rates == expected_rates
    assert len(set(rates[::2])) > 3
    assert relative_error(parameters, expected) < 1e-6


class Counting(torch.optim.Optimizer):
    """Keeps its step count in its groups, and divides by it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] / group["count"] * p.grad)


class ElementwiseCounting(Counting):
    elementwise = True


@pytest.mark.parametrize(
    ("kind", "stage"), [(Counting, 0), *((ElementwiseCounting, stage) for stage in range(4))], ids=str
)
def test_what_an_optimizer_writes_into_its_groups_is_kept_and_written_once(kind: type[Counting], stage: int) -> None:
    """In steps that go bucket by bucket too."""
    model, oracle = Net(), Net()
    sharded = shard(model, Mesh.create(init()), Policy(stage=stage, bucket_numel=50))
    assert len(sharded.trained_buckets) > 3
    optimizer = ShardedOptimizer(sharded, kind(model.parameters()))
    train(model, optimizer, range(3))
    plain = kind(oracle.parameters())
    for step in range(3):
        plain.zero_grad()
        oracle(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))).backward()
        plain.step()
    assert optimizer.param_groups[0]["count"] == plain.param_groups[0]["count"] == 3
    assert relative_error(model.parameters(), oracle.parameters()) < 1e-6


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


NEED_WHOLE = {
    "Muon": lambda p: torch.optim.Muon(p, lr=0.05),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}


@pytest.mark.parametrize("name", NEED_WHOLE)
def test_optimizers_that_need_whole_tensors_get_them_at_stage_zero(name: str) -> None:
    mesh, model, oracle = Mesh.create(init()), Matrices(), Matrices()
    optimizer = ShardedOptimizer(shard(model, mesh, Policy(stage=0)), NEED_WHOLE[name](model.parameters()))
    plain = NEED_WHOLE[name](oracle.parameters())
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).backward()
        optimizer.step()
        plain.zero_grad()
        oracle(x).backward()
        plain.step()
    assert relative_error(model.parameters(), oracle.parameters()) < 1e-6
    for stage in (1, 2, 3):
        other = Matrices()
        sharded = shard(other, mesh, Policy(stage=stage))
        with pytest.raises(ValueError, match=rf"{name} is not known to .*ZeRO stage {stage} gives .*slices"):
            ShardedOptimizer(sharded, NEED_WHOLE[name](other.parameters()))


@pytest.mark.parametrize("stage", range(4))
def test_optimizers_that_a_sharded_step_cannot_serve_are_refused(stage: int) -> None:
    model = Net()
    sharded = shard(model, Mesh.create(init()), Policy(stage=stage))
    with pytest.raises(ValueError, match="LBFGS evaluates the model several times within a step"):
        ShardedOptimizer(sharded, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="SparseAdam takes sparse gradients"):
        ShardedOptimizer(sharded, torch.optim.SparseAdam(model.parameters()))
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, found something of type list"):
        ShardedOptimizer(sharded, [])  # type: ignore[arg-type]


def test_hyperparameters_are_put_back_by_position() -> None:
    mesh = Mesh.create(init())
    _, _, optimizer = setup(mesh, Key("AdamW", 1))
    optimizer.param_groups[1]["lr"] = 0.125
    saved = optimizer.hyperparameters()
    assert [group["params"] for group in saved][1] == ["gain"]
    _, _, other = setup(mesh, Key("AdamW", 3))
    other.load_hyperparameters(saved)
    assert [group["lr"] for group in other.param_groups] == [0.01, 0.125]
    assert other.param_groups[0]["betas"] == (0.9, 0.999)


def test_another_number_of_groups_is_refused() -> None:
    mesh = Mesh.create(init())
    _, _, optimizer = setup(mesh, Key("AdamW", 1))
    with pytest.raises(ValueError, match="the checkpoint has 3 parameter groups, the optimizer 2; build the optimizer"):
        optimizer.load_hyperparameters([{}, {}, {}])


def test_parameters_of_another_model_are_refused() -> None:
    model, other = Net(), Net()
    sharded = shard(model, Mesh.create(init()), Policy(stage=1))
    optimizer = torch.optim.AdamW([*model.layers.parameters(), other.gain])
    with pytest.raises(ValueError, match=r"1 of the 5 parameters in AdamW do not belong to the sharded Net"):
        ShardedOptimizer(sharded, optimizer)

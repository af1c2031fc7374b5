"""States that leave their device and come back: every byte freed, every bit the same, and nobody reads what is away.

On a machine with CPUs alone states move from host memory to host memory, which takes the same path: the copy is another
storage, and the one that the states had is emptied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from drivetrain.comm import Mesh, dry_world, init
from drivetrain.zero import (
    INT4_GRADIENTS,
    ErrorFeedback,
    ParameterAccess,
    Policy,
    ShardedModule,
    ShardedOptimizer,
    StateKind,
    gathered,
    move_states,
    return_states,
    shard,
    state_kinds,
)
from drivetrain_testkit import run_ranks

WIDTH = 24


class Model(nn.Module):
    """Trained and frozen parameters, tied ones, and a table whose gradient has few rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(self.frozen(x)))
        return self.head(x).float().square().mean()


POLICIES = {
    **{f"stage {stage}, fp32": Policy(stage=stage, persistence_numel=WIDTH + 1) for stage in range(4)},
    **{
        f"stage {stage}, bf16": Policy(stage=stage, param_dtype=torch.bfloat16, persistence_numel=WIDTH + 1)
        for stage in range(4)
    },
    "second copies": Policy(stage=3, persistence_numel=0, secondary_ranks=2, node_ranks=2),
    "error feedback": Policy(stage=2, reduce_rule=INT4_GRADIENTS, error_feedback=ErrorFeedback()),
}


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 40, (6,), generator=torch.Generator().manual_seed(10 * step + rank))


class Training:
    def __init__(self, mesh: Mesh, rank: int, policy: Policy) -> None:
        self.rank = rank
        self.model = Model()
        self.sharded = shard(self.model, mesh, policy)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = ShardedOptimizer(self.sharded, torch.optim.AdamW(trained, lr=0.1), max_norm=1.0)

    def backward(self, step: int) -> None:
        self.model(batch(self.rank, step)).backward()

    def states(self) -> dict[str, torch.Tensor]:
        """A copy of everything that can move, by name, and of what programs see of it."""
        self.sharded.reducer.drain()
        found: dict[str, torch.Tensor] = {}
        for index, bucket in enumerate(self.sharded.buckets):
            for name in ("full", "shard", "master", "local", "reduced", "secondary"):
                tensor = getattr(bucket, name)
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().size():
                    found[f"{name} {index}"] = tensor.clone()
        for index, tensor in enumerate(self.sharded.reducer.kept_errors()):
            found[f"error {index}"] = tensor.clone()
        return {**found, **self.seen()}

    def seen(self) -> dict[str, torch.Tensor]:
        found = {}
        for index, group in enumerate(self.optimizer.param_groups):
            for number, tensor in enumerate(group["params"]):
                found[f"parameter {index} {number}"] = tensor.clone()
                for key, value in self.optimizer.optimizer.state[tensor].items():
                    found[f"{key} {index} {number}"] = value.clone()
        return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """To the bit: what was never written may be NaN."""

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten().view(torch.uint8)

    return a.keys() == b.keys() and all(torch.equal(bits(a[name]), bits(b[name])) for name in a)


def held(training: Training) -> int:
    bytes_ = training.sharded.bytes()
    return bytes_.parameters + bytes_.gradients + bytes_.master + training.optimizer.state_bytes


def refused(work: Callable[[], object]) -> str:
    try:
        work()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was said")


def _there_and_back(rank: int, world_size: int) -> None:
    mesh = Mesh.create(init())
    for name, policy in POLICIES.items():
        moved, steady = (Training(mesh, rank, policy) for _ in range(2))
        for training in (moved, steady):
            training.backward(0)
            training.optimizer.step()
            with training.sharded.no_sync():
                training.backward(1)  # below stage 2 this stays unreduced
        before, total = moved.states(), held(moved)
        count = move_states(moved.sharded, moved.optimizer)
        assert held(moved) == 0, name
        counts = 4 * len(moved.optimizer.optimizer.state)  # of steps: single numbers, which stay
        assert count == moved.sharded.moved.bytes >= total - counts, name
        shown = moved.seen()
        assert all(torch.equal(shown[key], before[key]) for key in shown), name
        assert move_states(moved.sharded, moved.optimizer) == 0
        if rank == 0:  # no rank needs another to be refused
            assert "rank 0: a forward pass needs lp_params" in refused(lambda moved=moved: moved.backward(2))
        assert return_states(moved.sharded) == count
        assert moved.sharded.moved.away == ()
        assert return_states(moved.sharded) == 0
        assert same(moved.states(), before), name
        assert held(moved) == total
        for training in (moved, steady):
            training.backward(2)
            training.optimizer.step()
            training.backward(3)
            training.optimizer.step()
        assert same(moved.states(), steady.states()), name
        for mine, other in zip(moved.sharded.full_parameters(), steady.sharded.full_parameters(), strict=True):
            assert torch.equal(mine[1], other[1]), name


def test_everything_leaves_and_comes_back_to_the_last_bit() -> None:
    run_ranks(_there_and_back, 2)


def _graph_in_between(rank: int, world_size: int) -> None:
    """States leave between forward and backward: the graph finds its weights again."""
    mesh = Mesh.create(init())
    for stage in (1, 3):
        moved, steady = (Training(mesh, rank, Policy(stage=stage, persistence_numel=0)) for _ in range(2))
        losses = [training.model(batch(rank, 0)) for training in (moved, steady)]
        move_states(moved.sharded, moved.optimizer)
        assert "a backward pass needs lp_params" in refused(losses[0].backward)
        return_states(moved.sharded)
        for loss in losses:
            loss.backward()
        for training in (moved, steady):
            training.optimizer.step()
        assert same(moved.states(), steady.states())


def test_a_graph_outlives_the_move() -> None:
    run_ranks(_graph_in_between, 2)


def alone(stage: int, dtype: torch.dtype | None = torch.bfloat16) -> Training:
    """One of two ranks, the other of which is not there."""
    mesh = Mesh.create(dry_world(2, device="cpu"))
    training = Training(mesh, 0, Policy(stage=stage, param_dtype=dtype, persistence_numel=0, max_reuse_numel=-1))
    for bucket in training.sharded.buckets:
        bucket.full.fill_(0.01) if bucket.resident else None
    training.optimizer._skip_non_finite = False
    training.backward(0)
    training.optimizer.step()
    training.backward(1)
    return training


USES: dict[str, tuple[Callable[[Training], object], set[str]]] = {
    "a forward pass": (lambda t: t.backward(5), {"lp_params"}),
    "an optimizer step": (lambda t: t.optimizer.step(), {"optim_states", "hp_params", "lp_params", "lp_grads"}),
    "zero_grad()": (lambda t: t.optimizer.zero_grad(), {"lp_grads"}),
    "full_parameters()": (lambda t: list(t.sharded.full_parameters()), {"lp_params"}),
    "refresh_parameters()": (lambda t: t.sharded.refresh_parameters(), {"hp_params", "lp_params"}),
    "saving or loading the model": (lambda t: t.sharded.model_slices(), {"hp_params", "lp_params"}),
    "saving or loading optimizer state": (lambda t: t.optimizer.state_slices("save"), {"optim_states"}),
    "loading optimizer state": (lambda t: t.optimizer.prepare_state({}, {}), {"optim_states"}),
    "load_state_dict()": (lambda t: t.model.load_state_dict({}), {"hp_params", "lp_params"}),
    "access to master weights": (
        lambda t: ParameterAccess(t.sharded, t.optimizer).master.full(t.model.embed.weight),
        {"hp_params", "lp_params"},
    ),
    "access to gradients": (
        lambda t: ParameterAccess(t.sharded, t.optimizer).gradient.full(t.model.embed.weight),
        {"lp_grads"},
    ),
    "access to optimizer state": (
        lambda t: ParameterAccess(t.sharded, t.optimizer).state("exp_avg").full(t.model.embed.weight),
        {"optim_states"},
    ),
    "`gathered`": (lambda t: gathered(t.sharded, t.model.embed).__enter__(), {"hp_params", "lp_params"}),
}


@pytest.mark.parametrize("stage", [2, 3])
def test_who_needs_what_is_away_is_told_so(stage: int) -> None:
    training = alone(stage)
    for kind in ("optim_states", "hp_params", "lp_params", "lp_grads"):
        move_states(training.sharded, training.optimizer, [kind])
        assert training.sharded.moved.away == (StateKind(kind),)
        for name, (use, needs) in USES.items():
            if kind in needs:
                with pytest.raises(RuntimeError, match=f"needs {kind}, which offload_states has moved to cpu") as told:
                    use(training)
                assert name in str(told.value)
                assert "call reload_states() first" in str(told.value)
        return_states(training.sharded)


def test_whole_modules_called_by_themselves_are_told_so_too() -> None:
    training = alone(3)
    move_states(training.sharded, kinds=["lp_params"])
    with pytest.raises(RuntimeError, match="a gather of parameters needs lp_params"):
        training.model.blocks[0](torch.zeros(2, WIDTH, dtype=torch.bfloat16))


def test_only_the_kinds_that_are_named_leave() -> None:
    training = alone(1)
    training.sharded.reducer.drain()
    before = training.sharded.bytes()
    moved = move_states(training.sharded, training.optimizer, [StateKind.OPTIM_STATES])
    assert moved > 0
    assert training.sharded.bytes() == before
    assert training.optimizer.state_bytes == 0
    training.backward(3)  # nobody needs the moments for this
    move_states(training.sharded, training.optimizer, "hp_params")
    assert training.sharded.bytes().master == 0
    assert training.sharded.bytes().parameters == before.parameters
    training.model.state_dict()
    return_states(training.sharded)
    assert training.sharded.bytes().master == before.master
    training.optimizer.step()


def test_weights_that_are_their_own_masters_leave_as_parameters() -> None:
    training = alone(2, dtype=None)
    assert move_states(training.sharded, training.optimizer, ["hp_params"]) == 0
    training.backward(4)
    assert move_states(training.sharded, training.optimizer, ["lp_params"]) > 0
    assert training.sharded.bytes().parameters == 0
    weight = training.optimizer.param_groups[0]["params"][0]
    weight.clone()  # what the optimizer has can be looked at
    return_states(training.sharded)
    assert weight.untyped_storage()._cdata == training.sharded.buckets[0].master.untyped_storage()._cdata


def test_memory_that_others_see_cannot_leave() -> None:
    training = alone(1)
    state = next(iter(training.optimizer.optimizer.state.values()))
    assert state["exp_avg"].numpy() is not None
    with pytest.raises(RuntimeError, match="rank 0: optim_states cannot be moved: the memory of some was handed to"):
        move_states(training.sharded, training.optimizer)
    assert training.sharded.moved.away == ()


def test_kinds_are_known_by_name() -> None:
    assert state_kinds(None) == tuple(StateKind)
    assert state_kinds(["lp_grads", StateKind.OPTIM_STATES]) == (StateKind.OPTIM_STATES, StateKind.LP_GRADS)
    with pytest.raises(ValueError, match="no states of kind 'momentum' to move; the kinds are optim_states, hp_params"):
        state_kinds(["momentum"])


def test_not_while_parameters_are_asked_to_stay() -> None:
    mesh = Mesh.create(dry_world(2, device="cpu"))
    model: Any = Model()
    sharded: ShardedModule = shard(model, mesh, Policy(stage=3, persistence_numel=0))
    with gathered(sharded, model.frozen), pytest.raises(RuntimeError, match="inside a `gathered` context"):
        move_states(sharded)

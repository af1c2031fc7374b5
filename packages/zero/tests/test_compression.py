"""ZeRO++ and its kin on four ranks that play two nodes: what crosses between nodes, and what becomes of the values."""

from __future__ import annotations

import math
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from drivetrain.comm import Mesh, init
from drivetrain.zero import (
    INT4_GRADIENTS,
    INT8_WEIGHTS,
    ErrorFeedback,
    ParameterAccess,
    Policy,
    ShardedOptimizer,
    gathered,
    shard,
)
from drivetrain_testkit import relative_error, run_ranks

RANKS, NODE = 4, 2
WEIGHTS, GRADIENTS = INT8_WEIGHTS, INT4_GRADIENTS
PLAIN = Policy(stage=3, persistence_numel=0)


class Tower(nn.Module):
    def __init__(self, width: int = 96, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x.to(block.weight.dtype)))
        return x.float().square().mean()


def batch(rank: int, step: int, width: int = 96) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + rank))


def train(rank: int, mesh: Mesh, policy: Policy, steps: int = 3, micro: int = 2) -> torch.Tensor:
    model = Tower()
    sharded = shard(model, mesh, policy)
    optimizer = ShardedOptimizer(sharded, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in range(steps):
        for index in range(micro):
            (model(batch(rank, 2 * step + index)) / micro).backward()
        optimizer.step()
    return torch.cat([p.flatten().float() for _, p in sorted(sharded.full_parameters())])


def exact(rank: int, mesh: Mesh) -> None:
    expected = train(rank, mesh, PLAIN)
    for changes in (
        {"node_ranks": NODE, "secondary_ranks": NODE},
        {"node_ranks": NODE, "gather_in_two": True},
        {"node_ranks": NODE, "secondary_ranks": NODE, "gather_in_two": True},
        {"node_ranks": 1},
    ):
        assert torch.equal(train(rank, mesh, replace(PLAIN, **changes)), expected), changes  # type: ignore[arg-type]


def test_other_ways_to_gather_give_the_same_bits(played: Played) -> None:
    results(played, exact)


def lossy(rank: int, mesh: Mesh) -> list[torch.Tensor]:
    expected = train(rank, mesh, PLAIN)
    found = []
    for changes, tolerance in (
        ({"gather_rule": WEIGHTS}, 3e-3),
        ({"gather_rule": WEIGHTS, "node_ranks": NODE, "secondary_ranks": NODE}, 3e-3),
        ({"reduce_rule": GRADIENTS, "node_ranks": NODE}, 6e-2),
        ({"reduce_rule": GRADIENTS}, 6e-2),
        ({"reduce_rule": GRADIENTS, "error_feedback": ErrorFeedback(), "stage": 1}, 6e-2),
        ({"reduce_rule": WEIGHTS, "stage": 2, "node_ranks": 1}, 3e-3),
    ):
        got = train(rank, mesh, replace(PLAIN, **changes))  # type: ignore[arg-type]
        assert 0 < relative_error(got, expected) < tolerance, changes
        found.append(got)
    return found


def test_quantised_exchange_stays_close_and_ranks_stay_equal(played: Played) -> None:
    everybody = results(played, lossy)
    for found in everybody:
        assert all(torch.equal(a, b) for a, b in zip(found, everybody[0], strict=True))


def crossing(mesh: Mesh) -> float:
    """Bytes per rank that a step sent to other nodes, by the ledger: what a flat collective sends to ranks elsewhere,
    were every byte sent there but once, and all that travels between nodes on axes of their own."""
    total = 0.0
    for entry in mesh.ledger.entries():
        if entry.bytes < 1000:
            continue
        if entry.axis == "shard":
            total += entry.bytes / NODE * (1 - NODE / RANKS)
        elif entry.axis.endswith("between"):
            total += entry.bytes * (1 - NODE / RANKS)
    return total


def traffic(rank: int, mesh: Mesh) -> list[float]:
    """Of a second step, without and with all of ZeRO++."""
    stage3 = replace(PLAIN, param_dtype=torch.bfloat16)
    rules = {"gather_rule": WEIGHTS, "reduce_rule": GRADIENTS, "gather_in_two": True}
    found = []
    for policy in (stage3, replace(stage3, node_ranks=NODE, secondary_ranks=NODE, **rules)):
        model = Tower(width=128, depth=40)
        sharded = shard(model, mesh, policy)
        optimizer = ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=1e-3))
        for _ in range(2):
            mesh.ledger.reset()
            model(torch.ones(2, 128)).backward()
            optimizer.step()
        found.append(crossing(mesh))
    return found


def test_four_times_less_crosses_between_nodes(played: Played) -> None:
    model = 2 * 40 * (128 * 128 + 128)
    for plain, compressed in results(played, traffic):
        assert plain == pytest.approx(3 * model / NODE * (1 - NODE / RANKS), rel=0.03)
        assert compressed / plain == pytest.approx(0.25, rel=0.04), "blocks' scales make up the rest"


def feedback(rank: int, mesh: Mesh) -> dict[str, float]:
    """A gradient with one large and many small elements: int4 rounds the small ones to zero, step after step."""
    errors = {}
    target = torch.full((64, 64), 0.05)
    target[0, 0] = 1.0
    for name, feedback in (
        ("without", None),
        ("with", ErrorFeedback(beta=0.5, reset_every=None)),
        ("reset at every step", ErrorFeedback(beta=0.5, reset_every=1)),
    ):
        model = nn.Linear(64, 64, bias=False)
        nn.init.zeros_(model.weight)
        policy = Policy(stage=2, reduce_rule=GRADIENTS, error_feedback=feedback, reduce_every_micro_batch=True)
        sharded = shard(model, mesh, policy)
        optimizer = ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=1.0))
        for _ in range(20):
            (model.weight * target).sum().backward()
            optimizer.step()
        total = -ParameterAccess(sharded).master.full(model.weight) / 20
        errors[name] = relative_error(total[1:2], target[1:2])  # the rest of the large element's block
    return errors


def test_error_feedback_lets_small_gradients_count(played: Played) -> None:
    errors = results(played, feedback)[0]
    assert errors["without"] > 0.9
    assert errors["with"] < 0.3
    assert errors["reset at every step"] == errors["without"]


def overflow(rank: int, mesh: Mesh) -> None:
    policy = Policy(stage=3, persistence_numel=0, reduce_rule=GRADIENTS, error_feedback=ErrorFeedback())
    model = Tower()
    sharded = shard(model, mesh, policy)
    optimizer = ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        loss = model(batch(rank, step))
        (loss * math.inf if step == 1 and rank == 1 else loss).backward()
        assert optimizer.step().stepped == (step != 1)
    assert all(p.isfinite().all() for _, p in sharded.full_parameters())


def test_an_overflow_is_seen_and_leaves_no_error_behind(played: Played) -> None:
    results(played, overflow)


def shown(rank: int, mesh: Mesh) -> None:
    policy = replace(PLAIN, gather_rule=WEIGHTS, node_ranks=NODE, secondary_ranks=NODE)
    model = Tower()
    start = dict(Tower().named_parameters())
    sharded = shard(model, mesh, policy)
    model(batch(rank, 0)).backward()
    sharded.zero_grad()
    for name, whole in sharded.full_parameters():
        assert torch.equal(whole, start[name])
    first = model.blocks[0]
    with gathered(sharded, first.bias), torch.no_grad():
        assert torch.equal(first.weight, start["blocks.0.weight"])
        first.bias.fill_(3.0)
    whole = dict(sharded.full_parameters())
    assert torch.equal(whole["blocks.0.weight"], start["blocks.0.weight"])
    assert whole["blocks.0.bias"].tolist() == [3.0] * 96
    with torch.no_grad():
        hook = first.register_forward_pre_hook(lambda module, args: seen.append(module.bias.clone()))
        seen: list[torch.Tensor] = []
        model(batch(rank, 0))
        hook.remove()
    torch.testing.assert_close(seen[0], torch.full((96,), 3.0), rtol=0.01, atol=0.01)


def test_what_is_shown_and_kept_is_exact(played: Played) -> None:
    results(played, shown)


SCENES = (exact, lossy, traffic, feedback, overflow, shown)


def play_all(rank: int, world_size: int) -> dict[str, tuple[Any, str]]:
    """All scenes in one start of the ranks: for each what it found, or how it failed."""
    mesh, found = Mesh.create(init()), {}
    for scene in SCENES:
        mesh.ledger.reset()
        try:
            found[scene.__name__] = scene(rank, mesh), ""
        except Exception:
            found[scene.__name__] = None, traceback.format_exc()
    return found


Played = list[dict[str, tuple[Any, str]]]


@pytest.fixture(scope="module")
def played() -> Played:
    return run_ranks(play_all, RANKS, timeout=110)


def results(played: Played, scene: Callable[[int, Mesh], Any]) -> list[Any]:
    """What each rank found."""
    for rank, found in enumerate(played):
        assert not found[scene.__name__][1], f"rank {rank}: {found[scene.__name__][1]}"
    return [found[scene.__name__][0] for found in played]


REFUSED = (
    ({"stage": 2, "gather_rule": WEIGHTS}, "ZeRO stage 2 keeps them whole; use stage 3"),
    ({"stage": 2, "secondary_ranks": 2, "node_ranks": 2}, "ZeRO stage 2 keeps them whole; use stage 3"),
    ({"stage": 0, "reduce_rule": GRADIENTS}, "stage 0 has none: use stage 1"),
    ({"stage": 3, "error_feedback": ErrorFeedback()}, "give a reduce_rule too"),
    ({"stage": 3, "secondary_ranks": 4, "node_ranks": 2}, "secondary_ranks is 4 and node_ranks 2"),
    ({"stage": 3, "node_ranks": 0}, "node_ranks must be at least 1, got 0"),
)


@pytest.mark.parametrize(("settings", "text"), REFUSED)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Policy(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"beta must lie in \[0, 1\), got 1.0"):
        ErrorFeedback(beta=1.0)


def _uneven(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"nodes of 2 ranks .* do not divide the 3 ranks"):
        shard(Tower(), Mesh.create(init()), replace(PLAIN, node_ranks=2, secondary_ranks=2))


def test_nodes_that_do_not_divide_the_ranks_are_refused() -> None:
    run_ranks(_uneven, 3)


class Language(nn.Module):
    """A small byte-level language model: a causal convolution and a tower of perceptrons."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(nn.Conv1d(width, width, 3) for _ in range(4))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1]).transpose(1, 2)
        for block in self.blocks:
            x = x + functional.gelu(block(functional.pad(x, (2, 0))))
        logits = self.head(x.transpose(1, 2))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _language(rank: int, world_size: int, policies: tuple[Policy, ...], steps: int) -> list[float]:
    library = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((library / name).read_bytes() for name in ("argparse.py", "datetime.py", "inspect.py"))
    corpus = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    mesh, losses = Mesh.create(init()), []
    for policy in policies:
        model = Language()
        sharded = shard(model, mesh, policy)
        optimizer = ShardedOptimizer(sharded, torch.optim.AdamW(model.parameters(), lr=3e-3), max_norm=1.0)
        places = torch.Generator().manual_seed(rank)
        total = 0.0
        for step in range(steps):
            starts = torch.randint(0, corpus.numel() - 65, (4,), generator=places)
            loss = model(torch.stack([corpus[start : start + 65] for start in starts.tolist()]))
            loss.backward()
            optimizer.step()
            total += loss.item() if step >= steps - 20 else 0.0
        losses.append(total / 20)
    return losses


@pytest.mark.parametrize(
    ("steps", "learned"), [pytest.param(200, 3.0, marks=[pytest.mark.thorough, pytest.mark.timeout(300)])]
)
def test_a_language_model_learns_as_well(steps: int, learned: float) -> None:
    """On the source text of the standard library: the loss of the last twenty steps, within 1 percent."""
    plus = replace(PLAIN, gather_rule=WEIGHTS, reduce_rule=GRADIENTS, node_ranks=NODE, secondary_ranks=NODE)
    found = run_ranks(_language, RANKS, (PLAIN, plus), steps, timeout=250)
    plain, compressed = (sum(losses) / RANKS for losses in zip(*found, strict=True))
    assert plain < learned, "it must have learned something"
    assert compressed == pytest.approx(plain, rel=0.01)
    print(f"loss after {steps} steps: {plain:.4f} plain, {compressed:.4f} ZeRO++")

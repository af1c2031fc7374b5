"""Every stage against plain torch in one process, and against the other stages bit by bit.

The engine's tests hold a matrix of combinations against plain torch; here the stages are held against each other, where
no rounding hides anything, and over more steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.zero import Policy, ShardedOptimizer, shard
from drivetrain_testkit import relative_error, run_ranks

STEPS = 8
BATCH = 12  # divisible by 1, 2, 3 and 4 ranks


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks and head, with everything that has made sharded training go wrong somewhere."""

    def __init__(self, *, tied: bool = False, frozen: bool = False, twice: bool = False, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        width, vocabulary = 20, 37
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.twice = twice
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.blocks[1].requires_grad_(False)
            self.blocks[2].up.weight.requires_grad_(False)
        if unused:
            self.never = nn.Linear(3, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.twice:
            x = self.blocks[0](x) + self.blocks[3](x)
        return self.head(x * self.scale)


@dataclass(frozen=True)
class Case:
    stage: int = 0
    accumulation: int = 1
    max_norm: float = 0.0
    tied: bool = False
    frozen: bool = False
    twice: bool = False
    unused: bool = False
    dtype: torch.dtype | None = None
    persistence: int = 0
    bucket: int = 500_000_000
    prefetch: int | None = None
    reduce_every_micro_batch: bool | None = None

    def model(self) -> Model:
        return Model(tied=self.tied, frozen=self.frozen, twice=self.twice, unused=self.unused)


def batch(step: int, micro: int, accumulation: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + micro)
    tokens = torch.randint(0, 37, (BATCH, 6), generator=generator)
    return tokens, (tokens * 5 + step) % 37


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), target.flatten())


def train_plain(case: Case) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The oracle: one process, plain torch, fp32."""
    torch.set_num_threads(1)
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(case.accumulation):
            (loss_of(model, *batch(step, micro, case.accumulation)) / case.accumulation).backward()
        bound = case.max_norm or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), bound)))
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, norms


Trained = tuple[dict[str, torch.Tensor], list[float]]  # parameters, gradient norms


def train_sharded(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, Trained]:
    """Every case in turn: starting ranks takes longer than most of them."""
    mesh = Mesh.create(init())
    return {key: train_case(mesh, rank, world_size, case) for key, case in cases.items()}


def train_case(mesh: Mesh, rank: int, world_size: int, case: Case) -> Trained:
    model = case.model()
    policy = Policy(
        stage=case.stage,
        param_dtype=case.dtype,
        persistence_numel=case.persistence,
        bucket_numel=case.bucket,
        prefetch_numel=case.prefetch,
        reduce_every_micro_batch=case.reduce_every_micro_batch,
    )
    sharded = shard(model, mesh, policy)
    optimizer = ShardedOptimizer(
        sharded, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), max_norm=case.max_norm
    )
    norms = []
    for step in range(STEPS):
        for micro in range(case.accumulation):
            tokens, target = batch(step, micro, case.accumulation)
            sharded.closes_step = micro == case.accumulation - 1
            loss = loss_of(model, tokens.chunk(world_size)[rank], target.chunk(world_size)[rank])
            (loss / case.accumulation).backward()
        norms.append(optimizer.step().grad_norm)
        assert sharded.bytes().gathered == 0, "gathered parameters are alive after the step"
        assert sharded.bytes().gradients == 0
    return dict(sharded.full_parameters()), norms


def joined(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([parameters[name].flatten() for name in sorted(parameters)])


FEATURES = {
    "plain": {},
    "accumulation": {"accumulation": 3},
    "clipping": {"max_norm": 0.5},
    "tied": {"tied": True},
    "frozen": {"frozen": True},
    "twice": {"twice": True},
    "unused": {"unused": True},
    "all": {
        "accumulation": 2,
        "max_norm": 0.5,
        "tied": True,
        "frozen": True,
        "twice": True,
        "unused": True,
        "persistence": 500,
        "bucket": 900,
        "prefetch": 10_000,
    },
}


ACCUMULATING = [feature for feature in FEATURES if "accumulation" in FEATURES[feature]]
ALIKE = {
    f"alike, {feature} {stage}": Case(stage=stage, **{**FEATURES[feature], "reduce_every_micro_batch": True})
    for feature in ACCUMULATING
    for stage in range(4)
}
TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
HALF = {f"{dtype} {stage}": Case(stage=stage, dtype=dtype) for dtype in TOLERANCES for stage in range(4)}
WORLDS = {1: ("plain", "all"), 2: tuple(FEATURES), 3: ("all",), 4: ("all",)}


@pytest.fixture(scope="module")
def trained() -> dict[int, list[dict[str, Trained]]]:
    """By number of ranks, what each rank found."""
    found = {}
    for world_size, features in WORLDS.items():
        cases = {f"{name} {stage}": Case(stage=stage, **FEATURES[name]) for name in features for stage in range(4)}
        if world_size == 2:
            cases |= ALIKE | HALF
        found[world_size] = run_ranks(train_sharded, world_size, cases, timeout=110)
    return found


@pytest.fixture(scope="module")
def oracles() -> dict[str, Trained]:
    return {feature: train_plain(Case(**options)) for feature, options in FEATURES.items()}


def assert_stages_agree_bitwise(ranks: list[dict[str, Trained]], feature: str) -> None:
    first, first_norms = ranks[0][f"{feature} 0"]
    for rank, found in enumerate(ranks):
        for stage in range(4):
            parameters, norms = found[f"{feature} {stage}"]
            assert norms == first_norms, f"{feature}, stage {stage}, rank {rank}"
            for name, value in parameters.items():
                assert torch.equal(value, first[name]), f"{feature}, stage {stage}, rank {rank}, {name}"


@pytest.mark.parametrize("feature", FEATURES)
def test_equals_plain_torch(
    trained: dict[int, list[dict[str, Trained]]], oracles: dict[str, Trained], feature: str
) -> None:
    oracle, norms = oracles[feature]
    for world_size in (size for size, features in WORLDS.items() if feature in features):
        for found in trained[world_size]:
            for stage in range(4):
                parameters, found_norms = found[f"{feature} {stage}"]
                assert parameters.keys() == oracle.keys()
                error = relative_error(joined(parameters), joined(oracle))
                assert error < 1e-6, f"stage {stage} on {world_size} ranks"
                assert found_norms == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("feature", [feature for feature in FEATURES if "accumulation" not in FEATURES[feature]])
def test_stages_agree_bitwise(trained: dict[int, list[dict[str, Trained]]], feature: str) -> None:
    for world_size in (size for size, features in WORLDS.items() if feature in features):
        assert_stages_agree_bitwise(trained[world_size], feature)


def test_stages_agree_bitwise_when_they_accumulate(trained: dict[int, list[dict[str, Trained]]]) -> None:
    """With accumulation the order of additions is part of the arithmetic, so all stages are told to reduce alike."""
    for feature in ACCUMULATING:
        assert_stages_agree_bitwise(trained[2], f"alike, {feature}")


def test_half_precision_with_fp32_masters_stays_near(
    trained: dict[int, list[dict[str, Trained]]], oracles: dict[str, Trained]
) -> None:
    oracle, _ = oracles["plain"]
    for found in trained[2]:
        for key, case in HALF.items():
            parameters, _ = found[key]
            assert all(value.dtype == case.dtype for value in parameters.values())
            assert relative_error(joined(parameters).float(), joined(oracle)) < TOLERANCES[case.dtype], key

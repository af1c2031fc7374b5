"""Embeddings whose gradients travel as rows: against the dense way bit by bit, and against one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drivetrain.comm import Mesh, init
from drivetrain.zero import INT4_GRADIENTS, ParameterAccess, Policy, ShardedOptimizer, shard
from drivetrain.zero.grouping import row_parameters
from drivetrain.zero.policy import ReduceOp
from drivetrain.zero.rows import Rows, add_up
from drivetrain_testkit import relative_error, run_ranks

RANKS, STEPS, MICRO, VOCABULARY, WIDTH = 4, 2, 2, 300, 7  # no shard ends where a row does


class Tables(nn.Module):
    """A table that is looked up twice, one that bags and not all batches use, one for few ids, and a dense rest."""

    def __init__(self, *, sparse: bool = True, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
        self.bag = nn.EmbeddingBag(VOCABULARY // 2, WIDTH, mode="sum", sparse=sparse)
        self.kinds = nn.Embedding(3, WIDTH, sparse=sparse)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor, *, bags: bool) -> torch.Tensor:
        x = self.words(tokens) + self.words(tokens.flip(1)) + self.kinds(tokens % 3)
        if bags:
            x = x + self.bag(tokens // 2)[:, None]
        return self.head(torch.tanh(self.mix(x.to(self.mix.weight.dtype)))).float()


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    """Few ids, several of them twice; another number of different ones on each rank."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(0, VOCABULARY, (2, 2 + rank), generator=generator).repeat(1, 2)


def uses_bags(step: int, micro: int, rank: int) -> bool:
    """Rank 3 never does; in the last step only rank 0, and in the second micro-batch of the first nobody."""
    return rank != 3 and (step < STEPS - 1 or rank == 0) and (step, micro) != (0, 1)


def loss_of(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    tokens = batch(step, micro, rank)
    output = model(tokens, bags=uses_bags(step, micro, rank))
    return nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten()) / MICRO


@dataclass(frozen=True, kw_only=True)
class Case:
    policy: Policy
    data: int = 1
    sparse: bool = True
    tied: bool = False
    max_norm: float = 0.05


def train(mesh: Mesh, rank: int, case: Case, *, rows: bool) -> tuple[dict[str, torch.Tensor], list[float], int]:
    """Parameters, gradient norms, and bytes of all collectives after the first step."""
    model = Tables(sparse=case.sparse, tied=case.tied)
    policy = Policy(**{**vars(case.policy), "sparse_gradients": rows})
    sharded = shard(model, mesh, policy)
    optimizer = ShardedOptimizer(sharded, torch.optim.AdamW(model.parameters(), lr=0.01), max_norm=case.max_norm)
    norms = []
    for step in range(STEPS):
        if step == 1:
            mesh.ledger.reset()
        for micro in range(MICRO):
            sharded.closes_step = micro == MICRO - 1
            loss_of(model, step, micro, rank).backward()
        norms.append(optimizer.step().grad_norm)
        assert not sharded.holds_gradients
        assert sharded.bytes().gradients == 0
    return dict(sharded.full_parameters()), norms, mesh.ledger.total_moved_bytes()


def plain(op: ReduceOp) -> dict[str, torch.Tensor]:
    model = Tables(sparse=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for parameter in model.parameters():
            parameter.grad = None
        for micro in range(MICRO):
            for rank in range(RANKS):
                loss = loss_of(model, step, micro, rank)
                (loss if op == "sum" else loss / RANKS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
    return dict(model.named_parameters())


def cases() -> dict[str, Case]:
    bf16, fp32 = torch.bfloat16, torch.float32
    wanted: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {  # stages, of the policy, of the case
        "mean": ((0, 1, 2, 3), {"reduce_every_micro_batch": True}, {}),
        "once per step": ((0, 1), {}, {}),
        "sum": ((0, 2), {"reduce_op": "sum"}, {}),
        "predivided": ((0, 3), {"predivide_factor": 3.0}, {}),
        "bf16": ((0, 2), {"param_dtype": bf16, "reduce_every_micro_batch": True}, {}),
        "bf16 kept in fp32": ((1,), {"param_dtype": bf16, "accumulate_dtype": fp32}, {}),
        "bf16 on the wire": ((0, 3), {"reduce_dtype": bf16}, {}),
        "not sparse": ((1, 3), {}, {"sparse": False}),
        "tied": ((0, 3), {}, {"tied": True}),
        "replicas": ((0, 1, 3), {}, {"data": 2}),
        "replicas, sum": ((0, 2), {"reduce_op": "sum"}, {"data": 2}),
    }
    return {
        f"{name}, stage {stage}": Case(policy=Policy(stage=stage, persistence_numel=0, **policy), **case)
        for name, (stages, policy, case) in wanted.items()
        for stage in stages
    }


CASES = cases()


def _train(rank: int, world_size: int) -> dict[str, tuple[dict[str, torch.Tensor], list[float]]]:
    world, found = init(), {}
    meshes = {data: Mesh.create(world, data=data, shard=world_size // data) for data in (1, 2)}
    for name, case in CASES.items():
        parameters, norms, moved = train(meshes[case.data], rank, case, rows=True)
        dense, dense_norms, dense_moved = train(meshes[case.data], rank, case, rows=False)
        assert norms == dense_norms, name
        assert all(torch.equal(value, dense[key]) for key, value in parameters.items()), name
        assert moved < dense_moved, name
        found[name] = (parameters, norms)
    return found


@pytest.fixture(scope="module")
def trained() -> list[dict[str, tuple[dict[str, torch.Tensor], list[float]]]]:
    return run_ranks(_train, RANKS, timeout=100)


def test_rows_give_the_bits_of_whole_gradients_on_every_rank_and_move_less(trained: list) -> None:
    for found in trained:
        for name, (parameters, norms) in found.items():
            first, first_norms = trained[0][name]
            assert norms == first_norms
            assert all(torch.equal(value, first[key]) for key, value in parameters.items()), name
            if CASES[name].policy.reduce_every_micro_batch:
                stage0, _ = found[name[:-1] + "0"]
                assert all(torch.equal(value, stage0[key]) for key, value in parameters.items()), name


def flat(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([parameters[name].detach().float().flatten() for name in sorted(parameters)])


def test_rows_train_like_one_process(trained: list) -> None:
    expected = {op: flat(plain(op)) for op in ("mean", "sum")}
    for name, (parameters, _) in trained[0].items():
        if not name.startswith(("tied", "bf16")):
            assert relative_error(flat(parameters), expected["sum" if "sum" in name else "mean"]) < 1e-6, name


def _apart(rank: int, world_size: int) -> None:
    """Whose gradients travel as rows is read off the module tree; quantisation passes them by."""
    mesh = Mesh.create(init())
    for tied, words in ((False, WIDTH), (True, None)):
        model = Tables(tied=tied)
        sharded = shard(model, mesh, Policy(stage=2, sparse_gradients=True, reduce_rule=INT4_GRADIENTS))
        width = {slot.name: bucket.row_width for bucket in sharded.buckets for slot in bucket.slots}
        assert (width["words.weight"], width["kinds.weight"], width["mix.weight"]) == (words, WIDTH, None)
        assert all(len(bucket.slots) == 1 for bucket in sharded.buckets if bucket.row_width)
        loss_of(model, 0, 0, rank).backward()
        found = ParameterAccess(sharded).gradient.full(model.bag.weight)
        exact = Tables(tied=tied)
        for other in range(world_size):
            (loss_of(exact, 0, 0, other) / world_size).backward()
        assert found is not None
        assert torch.allclose(found, exact.bag.weight.grad.to_dense(), rtol=1e-5, atol=1e-8)
        sharded.zero_grad()


class ById(nn.Module):
    """The table is also the output layer, which the tree does not show: its gradient comes as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 8, sparse=True)

    def forward(self, ids: list[int], *, functional: bool) -> torch.Tensor:
        x = self.table(torch.tensor(ids, dtype=torch.int64))
        return (nn.functional.linear(x, self.table.weight) if functional else x).square().sum()


def _chosen(rank: int, world_size: int) -> None:
    """How many rows there are decides in each pass, alike on all ranks, how they travel."""
    mesh, size = Mesh.create(init()), 1000 * 8 * 4
    model, exact = ById(), ById()
    exact.load_state_dict(model.state_dict())
    for stage in (0, 1):
        sharded = shard(model, mesh, Policy(stage=stage, sparse_gradients=True))
        optimizer = ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=1.0))
        access = ParameterAccess(sharded, optimizer)
        whole = "reduce_scatter" if stage else "all_reduce"
        everybody = list(range(1000))
        for ids, functional, rows in (
            ([[3, 3, 900], [3, 901]], False, True),
            ([everybody, [5]], False, False),  # one rank's rows are enough to make the whole the cheaper way
            ([[], []], False, True),
            ([[3], [4]], True, False),
            ([[999], []], False, True),
        ):
            expected = torch.zeros(1000, 8)
            for own in ids:
                exact.zero_grad()
                exact(own, functional=functional).backward()
                expected += exact.table.weight.grad.to_dense() / 2
            mesh.ledger.reset()
            sharded.closes_step = False  # stages 0 and 1 keep gradients to themselves meanwhile
            model(ids[rank], functional=functional).backward()
            if rows:
                assert sharded.bytes().gradients <= 100 * len(ids[rank])
            sharded.closes_step = True
            model([], functional=False).backward()
            sharded.reducer.drain()
            assert mesh.ledger.total_bytes(whole) == (0 if rows else 4 * sharded.buckets[0].numel)
            assert mesh.ledger.total_bytes("all_gather") < size / 10
            found = access.gradient.full(model.table.weight)
            assert found is not None
            assert torch.allclose(found, expected, rtol=1e-6)
            assert sharded.holds_gradients
            sharded.zero_grad()
            assert not sharded.holds_gradients
        model = ById()
        model.load_state_dict(exact.state_dict())


def test_the_tree_and_the_number_of_rows_decide() -> None:
    run_ranks(_both, 2)


def _both(rank: int, world_size: int) -> None:
    _apart(rank, world_size)
    _chosen(rank, world_size)


def _other_tree(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Embedding(5, 2))
    if rank == 1:
        model[0] = nn.Linear(2, 5, bias=False)
    with pytest.raises(
        ValueError, match=r"rank 1 has another model than rank 0: '0\.weight' is .* an embedding's weight"
    ):
        shard(model, Mesh.create(init()), Policy(sparse_gradients=True))


def test_ranks_that_would_not_agree_are_told() -> None:
    run_ranks(_other_tree, 2)


def test_which_parameters_have_few_rows() -> None:
    model = nn.ModuleDict(
        {
            "a": nn.Embedding(5, 2, sparse=True),
            "b": nn.EmbeddingBag(5, 2),
            "frozen": nn.Embedding(5, 2).requires_grad_(False),
            "tied": nn.Embedding(5, 2),
            "head": nn.Linear(2, 5),
        }
    )
    model["head"].weight = model["tied"].weight
    model["same"] = nn.Embedding(5, 2)
    model["same"].weight = model["a"].weight
    assert row_parameters(model) == {id(model["a"].weight), id(model["b"].weight)}


def matrices(rows: int, width: int, dtype: torch.dtype = torch.float64) -> st.SearchStrategy[torch.Tensor]:
    """Whole numbers, which add up exactly, in few of the rows."""
    row = st.one_of(st.just([0.0] * width), st.lists(st.integers(-9, 9).map(float), min_size=width, max_size=width))
    return st.lists(row, min_size=rows, max_size=rows).map(lambda values: torch.tensor(values, dtype=dtype))


@given(data=st.data(), rows=st.integers(1, 6), width=st.integers(1, 5), sparse=st.booleans())
def test_rows_are_the_matrix(data: st.DataObject, rows: int, width: int, sparse: bool) -> None:
    dense = [data.draw(matrices(rows, width)) for _ in range(3)]
    parts = [Rows.of(matrix.to_sparse(1) if sparse else matrix, torch.float64) for matrix in dense]
    for matrix, part in zip(dense, parts, strict=True):
        assert part.indices.tolist() == matrix.any(dim=1).nonzero().flatten().tolist()
    start = data.draw(st.integers(0, rows * width))
    flat = torch.full((data.draw(st.integers(0, rows * width + 3)),), 100.0, dtype=torch.float64)
    for mean in (False, True):
        whole = sum(dense) / (3 if mean else 1)
        total = add_up(parts, mean=mean)
        expected = torch.cat([whole.flatten(), torch.zeros(flat.numel() + 3)])[start : start + flat.numel()]
        found = flat.clone()
        total.add_to(found, start)
        assert torch.equal(found, expected + 100.0)
    assert torch.equal(parts[0].plus(parts[1]).plus(parts[2]).indices, add_up(parts, mean=False).indices)


def test_a_gradient_that_names_rows_twice_is_the_sum_that_torch_makes() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ids = torch.randint(0, 9, (200,), generator=generator)
        table = torch.randn(20, 5, generator=generator).to(dtype).requires_grad_()
        nn.functional.embedding(ids, table, sparse=True).float().tanh().sum().backward()
        gradient = table.grad
        rows = Rows.of(gradient, torch.float32)
        found = torch.zeros(100)
        rows.add_to(found, 0)
        assert torch.equal(found, gradient.to_dense().float().flatten())
        assert len(Rows.of(gradient.to_dense().T.contiguous().T, dtype)) == len(rows) == 9

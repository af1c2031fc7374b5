from __future__ import annotations

import pytest
import torch

from drivetrain_testkit import models


@pytest.mark.parametrize("name", models.CASES)
def test_every_case_learns_its_batch(name: str) -> None:
    case = models.CASES[name]
    torch.manual_seed(0)
    model = case.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = case.batch(6, seed=1)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = case.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", models.CASES)
def test_batches_and_models_are_reproducible(name: str) -> None:
    case = models.CASES[name]
    for a, b in zip(case.batch(3, seed=5), case.batch(3, seed=5), strict=True):
        assert torch.equal(a, b)
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(case.make().state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_each_model_has_its_property() -> None:
    tied = models.TiedModel()
    assert tied.head.weight is tied.embedding.weight
    assert sorted(p.numel() for p in models.Uneven().parameters()) == [1, 5, 123]
    assert {p.requires_grad for p in models.FrozenPart().parameters()} == {True, False}
    branch = models.UnusedBranch()
    branch(torch.ones(2, 16)).sum().backward()
    assert branch.unused.weight.grad is None
    batch_norm = models.WithBatchNorm()
    assert {b.dtype for b in batch_norm.buffers()} == {torch.float32, torch.int64}
    transformer = models.TinyTransformer()
    before = transformer(torch.tensor([[1, 2, 3]]))
    after = transformer(torch.tensor([[1, 2, 4]]))
    assert torch.equal(before[:, :2], after[:, :2])  # causal
    assert not torch.equal(before[:, 2], after[:, 2])

"""Encoded and two-hop collectives against the same computation in one process, to the bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from drivetrain.comm import (
    Mesh,
    all_gather_encoded,
    all_gather_in_two,
    all_reduce,
    init,
    reduce_scatter_encoded,
)
from drivetrain_testkit import run_ranks


class Coarse:
    """A codec that anyone can check: bfloat16."""

    def encoded_bytes(self, numel: int) -> int:
        return 4 * -(-numel // 2)

    def encode(self, source: torch.Tensor, encoded: torch.Tensor) -> None:
        encoded.zero_()
        encoded[: 2 * source.numel()].copy_(source.to(torch.bfloat16).view(torch.uint8))

    def decode_sum(self, encoded: Sequence[torch.Tensor], out: torch.Tensor, *, factor: float = 1.0) -> None:
        total = torch.zeros(out.numel())
        for one in encoded:
            total += one[: 2 * out.numel()].view(torch.bfloat16).float()
        out.copy_(total * factor)


LENGTHS = (1, 5, 4097)


def made(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 30


def coarse(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


def summed(rank: int, numel: int, ranks: int, inner: int) -> torch.Tensor:
    """Piece ``rank`` of the sum, rounded where a hop ends."""
    pieces = [coarse(made(peer, ranks * numel).view(ranks, numel)[rank]) for peer in range(ranks)]
    partial = []
    for outer in range(ranks // inner):
        total = torch.zeros(numel)
        for piece in pieces[outer * inner : (outer + 1) * inner]:
            total += piece
        partial.append(coarse(total) if 1 < inner < ranks else total)
    total = torch.zeros(numel)
    for part in partial:
        total += part
    return total


def _checks(rank: int, ranks: int) -> None:
    mesh, codec = Mesh.create(init()), Coarse()
    axis = mesh.axis("shard")
    for numel in LENGTHS:
        expected = torch.cat([made(peer, numel) for peer in range(ranks)])
        output = torch.empty(ranks * numel)
        all_gather_encoded(output, made(rank, numel), axis, codec).wait()
        assert torch.equal(output, coarse(expected))
        for inner in (size for size in (1, 2, 4) if ranks % size == 0):
            within, between = mesh.split("shard", inner)
            assert (within.size, between.size) == (inner, ranks // inner)
            assert rank == between.rank * inner + within.rank
            for chosen, want in ((None, expected), (codec, coarse(expected))):
                output = torch.full((ranks * numel,), 7.0)
                all_gather_in_two(output, made(rank, numel), within, between, chosen).wait()
                assert torch.equal(output, want), (numel, inner)
            for op in ("sum", "mean"):
                part = torch.empty(numel)
                pending = reduce_scatter_encoded(part, made(rank, ranks * numel), within, between, codec, op=op)
                pending.wait()
                pending.wait()
                want = summed(rank, numel, ranks, inner) * (1 / ranks if op == "mean" else 1)
                assert torch.equal(part, want), (numel, inner, op)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_encoded_collectives_are_the_definition(ranks: int) -> None:
    run_ranks(_checks, ranks)


def _bytes(rank: int, ranks: int) -> dict[str, int]:
    mesh, codec, numel = Mesh.create(init()), Coarse(), 10_000
    within, between = mesh.split("shard", 2)
    all_gather_in_two(torch.empty(ranks * numel), torch.ones(numel), within, between, codec).wait()
    found = {f"{entry.axis} {entry.op}": entry.moved_bytes for entry in mesh.ledger.entries()}
    mesh.ledger.reset()
    reduce_scatter_encoded(torch.empty(numel), torch.ones(ranks * numel), within, between, codec).wait()
    return {**found, **{f"{entry.axis} {entry.op}": entry.moved_bytes for entry in mesh.ledger.entries()}}


def test_few_bytes_cross_between_hosts() -> None:
    encoded = 20_000  # of one shard; the ledger counts whole buffers, this rank's own part included
    for found in run_ranks(_bytes, 4):
        assert found["shard/2 between all_gather"] == 2 * encoded  # of four shards
        assert found["shard/2 within all_gather"] == 4 * encoded
        assert found["shard/2 within all_to_all"] == 4 * encoded
        assert found["shard/2 between all_to_all"] == 2 * encoded


def _refused(rank: int, ranks: int) -> None:
    mesh = Mesh.create(init())
    with pytest.raises(ValueError, match="mesh axis 'shard' of 3 ranks cannot be cut into runs of 2"):
        mesh.split("shard", 2)
    with pytest.raises(ValueError, match="unknown mesh axis 'node'"):
        mesh.split("node", 1)
    all_reduce(torch.ones(1), mesh.axis("shard")).wait()


def test_a_cut_that_does_not_fit_is_refused() -> None:
    run_ranks(_refused, 3)

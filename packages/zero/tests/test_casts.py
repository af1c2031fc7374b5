"""No gathered weight, and no copy of one, outlives its use: measured in the bytes that the allocator has handed out."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from drivetrain.comm import Mesh, init
from drivetrain.zero import Policy, gathered, shard
from drivetrain_testkit import relative_error, run_ranks

WIDTH, DEPTH, TOKENS = 256, 6, 4
WEIGHT = WIDTH * WIDTH


class Heap(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def bytes_in_use() -> int:
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = Heap
    heap = library.mallinfo2()
    return int(heap.uordblks + heap.hblkhd)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Frozen(Linear):
    """As with adapters: a frozen layer, whose weight backward reads, and a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        self.inner.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.inner(x)


class Products(nn.Module):
    """Weights seen in several ways."""

    def __init__(self, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.product(x, self.weight)


def transposed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, w.t())


def batched(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x.view(4, TOKENS, -1), w.view(4, -1, WIDTH)).sum(0)


def convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.conv1d(x.unsqueeze(-1), w.unsqueeze(-1)).squeeze(-1)


def reformatted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A conversion by hand that lays the copy out otherwise: it is kept, and must not be taken for a plain one."""
    return x.to(torch.bfloat16) @ w.t().to(torch.bfloat16, memory_format=torch.contiguous_format)


def experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tgd,gdf->tgf", x.view(TOKENS, 4, -1), w.view(4, WIDTH // 4, WIDTH)).sum(1)


def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w) @ w.t()


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "nn.Linear": Linear,
    "frozen nn.Linear": Frozen,
    "product": partial(Products, torch.matmul),
    "linear of a transposed view": partial(Products, transposed),
    "batched product": partial(Products, batched),
    "convolution": partial(Products, convolution),
    "two products": partial(Products, twice),
    "einsum of experts": partial(Products, experts),
    "another memory format": partial(Products, reformatted),
}


class Tower(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.gain
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def batch(rank: int) -> torch.Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))


@dataclass(frozen=True, kw_only=True)
class Found:
    """Bytes kept, in weights of fp32, and the gradients that came of it."""

    between: float  # forward and backward
    evaluated: float  # after a pass without gradients, inside autocast
    gradients: dict[str, torch.Tensor]
    input_gradient: torch.Tensor


def watch(mesh: Mesh, rank: int, make: Callable[[], nn.Module], *, autocast: bool, recompute: bool = False) -> Found:
    model = Tower(make, recompute)
    policy = Policy(stage=3, persistence_numel=WIDTH + 1, prefetch_numel=0, max_reuse_numel=-1)
    sharded = shard(model, mesh, policy)
    x = batch(rank).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for step in range(2):  # what is allocated once only is there after the first
            gc.collect()  # else models of earlier cases are freed in between
            sharded.zero_grad()
            x.grad = None
            before = bytes_in_use()
            loss = model(x).float().square().sum()
            between = bytes_in_use() - before
            if step:
                assert sharded.bytes().gathered == 0
            loss.backward()
            sharded.reducer.drain()
            del loss
        gradients = {
            slot.name: bucket.reduced[piece.shard_offset : piece.shard_offset + piece.numel].clone()
            for bucket in sharded.trained_buckets
            for slot, piece in zip(bucket.slots, bucket.region_pieces(), strict=True)
            if bucket.reduced is not None
        }
        sharded.zero_grad()
        with torch.no_grad():
            before = bytes_in_use()
            model(x)
            evaluated = bytes_in_use() - before
    sharded.hooks.remove()
    assert x.grad is not None
    scale = 4 * WEIGHT
    return Found(
        between=between / scale, evaluated=evaluated / scale, gradients=gradients, input_gradient=x.grad.clone()
    )


def watch_all(rank: int, world_size: int) -> dict[tuple[str, bool, bool], Found]:
    mesh = Mesh.create(init())
    cases = [(name, autocast, False) for name in BLOCKS for autocast in (False, True)]
    cases += [("nn.Linear", True, True), ("frozen nn.Linear", True, True)]
    return {
        (name, autocast, recompute): watch(mesh, rank, BLOCKS[name], autocast=autocast, recompute=recompute)
        for name, autocast, recompute in cases
    }


@pytest.fixture(scope="module")
def found() -> list[dict[tuple[str, bool, bool], Found]]:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("bytes in use are asked of glibc")
    return run_ranks(watch_all, 2, env={"DRIVETRAIN_SHARED_MEMORY": "0"})


def plain(make: Callable[[], nn.Module], *, autocast: bool) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Mean gradients of one process over the batches of two ranks, and those of its inputs."""
    model, inputs = Tower(make), []
    for rank in range(2):
        x = batch(rank).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().sum()
        loss.backward()
        assert x.grad is not None
        inputs.append(x.grad)
    return {name: p.grad / 2 for name, p in model.named_parameters() if p.grad is not None}, inputs


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", BLOCKS)
def test_nothing_of_a_weight_is_kept_from_forward_to_backward(
    found: list[dict[tuple[str, bool, bool], Found]], name: str, autocast: bool
) -> None:
    """A tower of six weights; activations are a few kilobytes."""
    if name == "another memory format":
        assert found[0][name, True, False].between == pytest.approx(DEPTH / 2, rel=0.1)
        return
    for rank in found:
        assert rank[name, autocast, False].between < 0.6
        assert rank[name, autocast, False].evaluated < 0.3


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_are_those_of_one_process(
    found: list[dict[tuple[str, bool, bool], Found]], name: str, autocast: bool
) -> None:
    gradients, inputs = plain(BLOCKS[name], autocast=autocast)
    for rank, ours in enumerate(found):
        case = ours[name, autocast, False]
        assert relative_error(case.input_gradient, inputs[rank]) < 1e-6
    for parameter, expected in gradients.items():
        parts = [ours[name, autocast, False].gradients[parameter] for ours in found]
        assert relative_error(torch.cat(parts), expected.flatten()) < 1e-6


@pytest.mark.parametrize("name", ["nn.Linear", "frozen nn.Linear"])
def test_recomputation_gives_the_same_and_keeps_nothing(
    found: list[dict[tuple[str, bool, bool], Found]], name: str
) -> None:
    for rank in found:
        usual, recomputed = rank[name, True, False], rank[name, True, True]
        assert recomputed.between < 0.6
        assert torch.equal(usual.input_gradient, recomputed.input_gradient)
        for parameter, gradient in usual.gradients.items():
            assert torch.equal(gradient, recomputed.gradients[parameter])


def _look_again(rank: int, world_size: int) -> str:
    """Two backward passes over one graph, then one over a graph whose weight has changed."""
    model = Tower(Linear)
    policy = Policy(stage=3, persistence_numel=WIDTH + 1, prefetch_numel=0, max_reuse_numel=-1)
    sharded = shard(model, Mesh.create(init()), policy)
    gradients = []
    for passes in (1, 2):
        x = batch(rank).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().sum()
        for _ in range(passes):
            loss.backward(retain_graph=True)
        sharded.zero_grad()
        gradients.append(x.grad)
    assert torch.equal(2 * gradients[0], gradients[1])
    with gathered(sharded, model.blocks[0]), torch.no_grad():
        model.blocks[0].inner.weight.mul_(2)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "nothing was said"


def test_a_graph_can_be_walked_again_but_not_after_a_change() -> None:
    for said in run_ranks(_look_again, 2):
        assert "was changed in place between forward and backward" in said

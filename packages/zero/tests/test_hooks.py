"""Ways to use a module that have made sharded training go wrong: each against plain torch, at every stage.

A scene is a piece of training code that is run twice, on a plain model over the data of all ranks and on a sharded one
over this rank's data; the parameters must agree after it. All scenes run in one pair of ranks, each at all stages.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain.comm import Mesh, init
from drivetrain.zero import Policy, ShardedOptimizer, shard
from drivetrain_testkit import relative_error, run_ranks

WIDTH, BATCH = 12, 4
BUCKETS = (50, 500_000)
TOLERANCE = 2e-6


class Run:
    """One run of a scene: what differs between plain and sharded training is in here."""

    def __init__(self, model: nn.Module, ranks: list[int], share: float) -> None:
        self.model = model
        self.ranks = ranks  # whose data this run sees
        self.share = share  # of each rank's loss in the gradient that this run computes
        self.results: list[torch.Tensor] = []  # compared besides the parameters

    @property
    def plain(self) -> bool:
        raise TypeError

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None, **options: Any) -> None:
        given = torch.ones_like(loss) if gradient is None else gradient
        loss.backward(given * self.share, **options)

    @contextlib.contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Around each micro-batch."""
        yield

    def step(self) -> None: ...

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


class PlainRun(Run):
    plain = True

    def __init__(self, model: nn.Module, world_size: int) -> None:
        super().__init__(model, list(range(world_size)), 1 / world_size)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class ShardedRun(Run):
    plain = False

    def __init__(self, model: nn.Module, rank: int, mesh: Mesh, policy: Policy) -> None:
        super().__init__(model, [rank], 1.0)
        self.sharded = shard(model, mesh, policy)
        self._optimizer = ShardedOptimizer(self.sharded, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))

    @contextlib.contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if last else self.sharded.no_sync():
            yield

    def step(self) -> None:
        result = self._optimizer.step()
        assert result.stepped, result.reason
        held = self.sharded.bytes()
        assert (held.gathered, held.gradients) == (0, 0), held

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: p.clone() for name, p in self.sharded.full_parameters()}


def inputs(step: int, rank: int, *, salt: int = 0) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1 + step + 100 * rank + 10_000 * salt))


# Models ---------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * torch.tanh(self.linear(self.norm(x)))


class HalfFrozen(nn.Module):
    """Reads a frozen and a trained parameter of its own: the frozen one after the trained one has its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2, requires_grad=False)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) * self.gain


class Adapted(nn.Module):
    """Frozen norm and linear, trained rank-2 adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + torch.tanh(self.linear(h) + self.b(self.a(h)))


def call(block: nn.Module, x: torch.Tensor, recompute: str) -> torch.Tensor:
    return block(x) if recompute == "none" else checkpoint(block, x, use_reentrant=recompute == "reentrant")


class Tower(nn.Module):
    """Blocks between an input and an output layer, which are the root's."""

    def __init__(self, block: Callable[[], nn.Module] = Block, *, depth: int = 3, recompute: str = "none") -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = call(block, x, self.recompute)
        return self.leave(x) * self.scale


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.roll(1, 1)).square().mean()


# Scenes ---------------------------------------------------------------------------------------------------------------


def simply(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            run.backward(loss_of(run.model, inputs(step, rank)))
        run.step()


def accumulating(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            for micro in range(2):
                with run.accumulating(last=micro == 1):
                    run.backward(loss_of(run.model, inputs(step, rank, salt=micro)))
        run.step()


def two_backwards_one_step(run: Run) -> None:
    """No context, no counter, just two calls of backward."""
    for step in range(2):
        for rank in run.ranks:
            run.backward(loss_of(run.model, inputs(step, rank)))
            run.backward(loss_of(run.model, inputs(step, rank, salt=1)) * 3)
        run.step()


def several_losses_of_one_forward(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            out = run.model(inputs(step, rank))
            run.backward(out.square().mean(), retain_graph=True)
            run.backward((out - 1).abs().mean())
        run.step()


def the_same_graph_twice(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            loss = loss_of(run.model, inputs(step, rank))
            for _ in range(2):
                run.backward(loss, retain_graph=True)
            run.backward(loss)
        run.step()


def a_gradient_is_given(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            run.backward(run.model(inputs(step, rank)), inputs(step, rank, salt=2))
        run.step()


def several_roots_of_one_backward(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            first, second = run.model(inputs(step, rank)), run.model(inputs(step, rank, salt=1))
            given = [torch.full_like(first, run.share), second.detach() * run.share]
            torch.autograd.backward([first, second], given)
        run.step()


def two_forwards_before_one_backward(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            a, b = run.model(inputs(step, rank)), run.model(inputs(step, rank, salt=1))
            run.backward((a - b).square().mean() + a.mean())
        run.step()


def a_graph_outlives_another_training_pass(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            early = loss_of(run.model, inputs(step, rank))
            run.backward(loss_of(run.model, inputs(step, rank, salt=1)))
            run.backward(early)
        run.step()


def input_gradients_in_between(run: Run) -> None:
    """Saliency: a gradient with regard to the inputs only, which must leave no trace."""
    for step in range(2):
        for rank in run.ranks:
            x = inputs(step, rank).requires_grad_()
            run.backward(loss_of(run.model, inputs(step, rank, salt=1)))
            (saliency,) = torch.autograd.grad(run.model(x).sum(), x)
            if rank == 0:
                run.results.append(saliency)
            run.backward(loss_of(run.model, x.detach() + saliency))
        run.step()


def gradient_penalty(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            x = inputs(step, rank).requires_grad_()
            out = run.model(x)
            (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            run.backward(out.mean() + (slope.norm(dim=1) - 1).square().mean())
        run.step()


def parameter_gradients_by_hand(run: Run) -> None:
    """``autograd.grad`` with regard to parameters gives this rank's own gradients and accumulates none."""
    for step in range(2):
        for rank in run.ranks:
            weights = [p for p in run.model.parameters() if p.requires_grad]
            found = torch.autograd.grad(loss_of(run.model, inputs(step, rank, salt=3)), weights)
            if rank == 0:
                run.results.extend(found)
            run.backward(loss_of(run.model, inputs(step, rank)))
        run.step()


def evaluation_between_forward_and_backward(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            loss = loss_of(run.model, inputs(step, rank))
            run.model.eval()
            with torch.no_grad():
                seen = run.model(inputs(step, rank, salt=1))
            run.model.train()
            if rank == 0:
                run.results.append(seen)
            run.backward(loss)
        with torch.inference_mode():
            run.model(inputs(step, 0, salt=2))
        run.step()


def forwards_without_a_backward(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            run.model(inputs(step, rank, salt=1))
            loss = loss_of(run.model, inputs(step, rank))
            run.model(inputs(step, rank, salt=2))
            run.backward(loss)
            run.model(inputs(step, rank, salt=3))
        run.step()


def forward_fails_now_and_then(run: Run) -> None:
    model = run.model
    for step in range(3):
        if not run.plain:
            handle = model.blocks[1].linear.register_forward_hook(_raise)
            with pytest.raises(ArithmeticError):
                loss_of(model, inputs(step, 0))
            handle.remove()
        for rank in run.ranks:
            run.backward(loss_of(model, inputs(step, rank)))
        run.step()


def backward_fails_now_and_then(run: Run) -> None:
    """The attempt fails half way through, when some buckets are under way, and is repeated."""
    for step in range(3):
        if not run.plain:
            out = run.model.enter(inputs(step, 0))
            for block in run.model.blocks:
                out = block(out)
                if block is run.model.blocks[1]:
                    out.register_hook(_raise)
            with pytest.raises(ArithmeticError):
                run.backward(out.sum())
            handle = run.model.blocks[1].register_forward_hook(lambda _, __, out: out.register_hook(_raise) and None)
            loss = loss_of(run.model, inputs(step, 0))
            handle.remove()
            with pytest.raises(ArithmeticError):
                run.backward(loss)
        for rank in run.ranks:
            run.backward(loss_of(run.model, inputs(step, rank)))
        run.step()


def backward_fails_and_the_step_is_given_up(run: Run) -> None:
    for step in range(3):
        if not run.plain:
            run.backward(loss_of(run.model, inputs(step, 0)))
            out = run.model(inputs(step, 0))
            hidden = out.grad_fn.next_functions[0][0]
            hidden.register_prehook(_raise)
            with pytest.raises(ArithmeticError):
                run.backward(out.sum())
            run.sharded.zero_grad()
        for rank in run.ranks:
            run.backward(loss_of(run.model, inputs(step, rank)))
        run.step()


def _raise(*_: object) -> None:
    raise ArithmeticError("on purpose")


def gradients_are_forgotten(run: Run) -> None:
    for step in range(3):
        if not run.plain:
            run.backward(loss_of(run.model, inputs(step, 7)))
            with run.sharded.no_sync():
                run.backward(loss_of(run.model, inputs(step, 8)))
            run.sharded.zero_grad()
            assert run.sharded.bytes().gradients == 0
        for rank in run.ranks:
            run.backward(loss_of(run.model, inputs(step, rank)))
        run.step()


def submodules_called_directly(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            model, x = run.model, inputs(step, rank)
            run.backward(model.leave(model.blocks[1](model.enter(x))).square().mean())
            run.backward(model.blocks[2].linear(x).square().mean() + loss_of(model, x))
        with torch.no_grad():
            run.results.append(run.model.blocks[0](inputs(step, 0)))
        run.step()


def blocks_called_a_different_number_of_times(run: Run) -> None:
    for step, turns in enumerate([(0, 1, 2), (0, 0, 1, 1, 2), (2, 0), (1,), (0, 1, 2), (0, 1, 2, 2, 2)]):
        for rank in run.ranks:
            x = run.model.enter(inputs(step, rank))
            for turn in turns:
                x = run.model.blocks[turn](x)
            run.backward(run.model.leave(x).square().mean())
        run.step()


def freezing_after_sharding(run: Run) -> None:
    simply(run)
    run.model.blocks[1].requires_grad_(False)
    run.model.leave.bias.requires_grad_(False)
    simply(run)


def in_place_changes_of_a_blocks_output(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            x = run.model.enter(inputs(step, rank))
            for block in run.model.blocks:
                x = block(x)
                x += 1.0
                x.mul_(0.5)
            run.backward(run.model.leave(x.relu_()).square().mean())
        run.step()


def outputs_that_need_no_gradient(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            hint = run.model(inputs(step, rank)).detach()
            run.backward((run.model(inputs(step, rank, salt=1)) - hint).square().mean())
        run.step()


def backward_keeps_its_graph(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            run.backward(loss_of(run.model, inputs(step, rank)), create_graph=True)
        run.step()


def only_one_rank_uses_a_block(run: Run) -> None:
    """Not at stage 3, where a block that one rank does not call cannot be gathered."""
    for step in range(2):
        for rank in run.ranks:
            model, x = run.model, inputs(step, rank)
            run.backward(loss_of(model, x))
            h = model.blocks[0](x)
            if rank == step % 2:
                h = model.blocks[2](h)
            run.backward(h.square().mean())
        run.step()


def only_one_rank_has_a_second_backward(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            model, x = run.model, inputs(step, rank)
            run.backward(model.leave(model.blocks[1](x)).square().mean())
            with run.accumulating(last=False):
                if rank == 1:
                    run.backward(model.blocks[1](x).square().mean())
        run.step()


# Models whose shape is the point --------------------------------------------------------------------------------------


class Siamese(nn.Module):
    """One encoder of two layers used twice in a forward pass."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([Block(), Block()])
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.recompute = recompute

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.encoder:
            x = call(block, x, self.recompute)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute == "reentrant":
            x = x.requires_grad_()
        return self.leave(self.encode(x) * self.encode(x.flip(0)))


class SideBySide(nn.Module):
    """An encoder's second use belongs to a subgraph that the first does not touch, an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.extra = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        main = self.tower(x)
        aside = self.extra(self.tower.blocks[1](self.tower.enter(x.detach() * 2)))
        return main + 0.1 * aside.square().mean()


@dataclass
class Pair:
    hidden: torch.Tensor
    extra: dict[str, list[torch.Tensor]]


class Opaque:
    """Holds a tensor where nobody looks for one."""

    __slots__ = ("_hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden

    def reveal(self) -> torch.Tensor:
        return self._hidden


class WrappingBlock(nn.Module):
    """Takes and gives tensors in a container, and reads a parameter of its own last."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any], unwrap: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.inner = Block()
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.wrap, self.unwrap = wrap, unwrap

    def forward(self, value: Any) -> Any:
        return self.wrap(self.inner(self.unwrap(value)) * self.gain)


WRAPPERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda x: (None, (x,), 3), lambda v: v[1][0]),
    "dict": (lambda x: {"a": {"b": x}}, lambda v: v["a"]["b"]),
    "dataclass": (lambda x: Pair(x * 1, {"x": [x]}), lambda v: v.hidden * 0.5 + v.extra["x"][0] * 0.5),
    "opaque": (Opaque, Opaque.reveal),
}


class Wrapping(nn.Module):
    """``bare``: the model's output is in a container too."""

    def __init__(self, kind: str, *, bare: bool) -> None:
        super().__init__()
        self.wrap, self.unwrap = WRAPPERS[kind]
        self.blocks = nn.ModuleList(WrappingBlock(self.wrap, self.unwrap) for _ in range(3))
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.bare = bare

    def forward(self, x: torch.Tensor) -> Any:
        value = self.wrap(x * 1.0)
        for block in self.blocks:
            value = block(value)
        out = self.unwrap(value) * self.gain
        return out if self.bare else self.wrap(out)


def wrapped(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            x, out = inputs(step, rank), run.model(inputs(step, rank))
            out = out if isinstance(out, torch.Tensor) else run.model.unwrap(out)
            run.backward((out - x).square().mean())
        run.step()


class RouterBlock(nn.Module):
    """Keeps an auxiliary loss as an attribute, as routers of experts do; it is computed after the output."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.inner = Block()
        self.aux: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        weights = self.router(x.detach()).softmax(-1)
        self.aux = (weights * weights.log()).sum(-1).mean()
        return out


class OwnRouterBlock(nn.Module):
    """As `RouterBlock`, with weights that no module but itself holds, and losses in a container."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(WIDTH, 3) * 0.2)
        self.inner = Block()
        self.kept: dict[str, list[torch.Tensor]] = {}

    @property
    def aux(self) -> torch.Tensor:
        return self.kept["losses"][0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        weights = (torch.tanh(x) @ self.gate).softmax(-1)
        self.kept = {"losses": [(weights * weights.log()).sum(-1).mean()]}
        return out


def auxiliary_losses(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            loss = loss_of(run.model, inputs(step, rank))
            run.backward(loss + 0.1 * sum(block.aux for block in run.model.blocks))
        run.step()


class CrossTower(nn.Module):
    """All blocks read an encoder's output beside their own input: its gradient is there only when all are done."""

    def __init__(self, *, memory_first: bool, frozen: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(CrossBlock() for _ in range(3))
        for block in self.blocks:
            block.attention.requires_grad_(not frozen)
        self.memory_first = memory_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(x)
        h = memory.roll(1, 0)
        for block in self.blocks:
            h = block(memory=memory, h=h) if self.memory_first else block(h, memory=memory)
        return h


class CrossBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.after = Block()

    def forward(self, h: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        attended, _ = self.attention(h[None], memory[None], memory[None])
        return self.after(h + attended[0])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True, kdim=WIDTH, vdim=WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.encoder(x[None])
        return self.attention(h, h, h, need_weights=False)[0][0]


def with_evaluation(run: Run) -> None:
    for step in range(2):
        simply(run)
        run.model.eval()
        with torch.no_grad():  # the fast paths of attention read weights that no module's forward was called for
            run.results.append(run.model(inputs(step, 0, salt=4)))
        run.model.train()


class Odd(nn.Module):
    """Parameters of no elements, of no dimensions, and of fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OddLayer() for _ in range(2))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.double_nothing = nn.Parameter(torch.zeros(0, dtype=torch.float64))
        self.number = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.number + self.nothing.sum() + self.double_nothing.sum().float()


class OddLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))
        self.number = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(2, 0))
        self.strided = nn.Parameter(torch.randn(WIDTH, 5).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.one + self.number + torch.tanh(x @ self.strided.t()) @ self.strided + self.empty.sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, 2), nn.LSTM(WIDTH, WIDTH, 1, bidirectional=True)])
        self.leave = nn.utils.parametrizations.weight_norm(nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for rnn in self.rnn:
            x = rnn(x)[0]
        return self.leave(x)


class TiedByHand(nn.Module):
    """The output layer is the embedding's weight in a function call; the embedding's gradient is sparse."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Parameter(torch.randn(9, WIDTH) * 0.1)
        self.sparse = sparse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x.abs().mul(9).long() % 9).mean(1)
        for block in self.blocks:
            h = block(h)
        return nn.functional.linear(h, self.head if self.sparse else self.embed.weight)


def classify(run: Run) -> None:
    for step in range(2):
        for rank in run.ranks:
            x = inputs(step, rank)
            run.backward(nn.functional.cross_entropy(run.model(x), torch.arange(BATCH) + step))
        run.step()


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(2))
        self.register_buffer("mask", torch.arange(WIDTH) % 2 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * self.mask
        return x


def batch_norm(run: Run) -> None:
    """Running statistics are each rank's own: of the plain run, rank 0's are kept."""
    for step in range(2):
        for rank in reversed(run.ranks):
            before = {name: b.clone() for name, b in run.model.named_buffers()}
            run.backward(loss_of(run.model, inputs(step, rank)))
            if rank:
                for name, buffer in run.model.named_buffers():
                    buffer.copy_(before[name])
        run.step()
        if run.plain or run.ranks == [0]:
            run.results.extend(b.clone() for b in run.model.buffers())


class Frozen(nn.Module):
    """Frozen below, frozen in the middle and frozen on top of what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(depth=5)
        for index in (0, 2, 4):
            self.tower.blocks[index].requires_grad_(False)
        self.tower.enter.requires_grad_(False)
        self.tower.leave.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tower(x)


class Compiled(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = torch.compile(self.blocks[0], backend="eager")
        self.blocks[1].compile(backend="eager")


# The table of scenes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    play: Callable[[Run], None]
    model: Callable[[], nn.Module] = Tower
    stages: tuple[int, ...] = (0, 1, 2, 3)


RECOMPUTES = ("none", "non-reentrant", "reentrant")
RELEASES = (2, 3)
"""For what can only go wrong where parameters come and go: stage 3, and one that shares all but that with it."""
SCENES: dict[str, Scene] = {
    **{
        play.__name__.replace("_", " "): Scene(play)
        for play in (
            simply,
            accumulating,
            two_backwards_one_step,
            several_losses_of_one_forward,
            the_same_graph_twice,
            a_gradient_is_given,
            several_roots_of_one_backward,
            two_forwards_before_one_backward,
            a_graph_outlives_another_training_pass,
            input_gradients_in_between,
            gradient_penalty,
            parameter_gradients_by_hand,
            evaluation_between_forward_and_backward,
            forwards_without_a_backward,
            forward_fails_now_and_then,
            backward_fails_now_and_then,
            backward_fails_and_the_step_is_given_up,
            gradients_are_forgotten,
            submodules_called_directly,
            blocks_called_a_different_number_of_times,
            freezing_after_sharding,
            in_place_changes_of_a_blocks_output,
            outputs_that_need_no_gradient,
            backward_keeps_its_graph,
        )
    },
    "only one rank uses a block": Scene(only_one_rank_uses_a_block, stages=(0, 1, 2)),
    "only one rank has a second backward": Scene(only_one_rank_has_a_second_backward, stages=(0, 1)),
    **{f"blocks, {how}": Scene(accumulating, partial(Tower, recompute=how)) for how in RECOMPUTES[1:]},
    **{f"adapters, {how}": Scene(accumulating, partial(Tower, Adapted, recompute=how), RELEASES) for how in RECOMPUTES},
    **{f"siamese, {how}": Scene(accumulating, partial(Siamese, how)) for how in RECOMPUTES},
    **{
        f"{play.__name__.replace('_', ' ')}, {name}, {how}": Scene(play, partial(Tower, block, recompute=how), RELEASES)
        for play in (two_forwards_before_one_backward, the_same_graph_twice, evaluation_between_forward_and_backward)
        for name, block in (("adapters", Adapted), ("half frozen", HalfFrozen))
        for how in RECOMPUTES[:2]
    },
    "an encoder in two subgraphs": Scene(accumulating, SideBySide),
    **{
        f"{what} wraps its output in a {kind}": Scene(wrapped, partial(Wrapping, kind, bare=bare), RELEASES)
        for what, bare in (("a block", True), ("the model", False))
        for kind in WRAPPERS
    },
    "auxiliary losses as attributes": Scene(auxiliary_losses, partial(Tower, RouterBlock), RELEASES),
    "auxiliary losses of a block's own": Scene(auxiliary_losses, partial(Tower, OwnRouterBlock), RELEASES),
    "cross attention": Scene(accumulating, partial(CrossTower, memory_first=False), RELEASES),
    "cross attention, memory first": Scene(accumulating, partial(CrossTower, memory_first=True), RELEASES),
    "cross attention, frozen": Scene(accumulating, partial(CrossTower, memory_first=False, frozen=True), RELEASES),
    "torch's transformer": Scene(with_evaluation, Transformer, RELEASES),
    "odd parameters": Scene(accumulating, Odd),
    "recurrent and parametrized": Scene(with_evaluation, Recurrent),
    "tied by hand": Scene(classify, partial(TiedByHand, sparse=False)),
    "sparse gradients": Scene(classify, partial(TiedByHand, sparse=True)),
    "batch norm": Scene(batch_norm, WithBatchNorm),
    "frozen below, between and above": Scene(accumulating, Frozen),
    "penalty through frozen blocks": Scene(gradient_penalty, Frozen, RELEASES),
    "compiled blocks": Scene(simply, Compiled, RELEASES),
}


def build(scene: Scene) -> nn.Module:
    torch.manual_seed(5)
    return scene.model()


def sizes_of(name: str, stage: int) -> tuple[int, ...]:
    """Sizes of buckets, both where they have mattered, else in turn."""
    return BUCKETS if name.startswith("siamese") else (BUCKETS[(len(name) + stage) % 2],)


def compare(scene: Scene, rank: int, mesh: Mesh, policy: Policy, oracle: Run) -> str:
    """What is wrong with the sharded run, or nothing."""
    run = ShardedRun(build(scene), rank, mesh, policy)
    try:
        scene.play(run)
    except Exception:
        return traceback.format_exc()
    expected, found = oracle.parameters(), run.parameters()
    assert found.keys() == expected.keys()
    wrong = {name: relative_error(found[name], expected[name]) for name in expected}
    results = zip(run.results, oracle.results, strict=False)
    wrong |= {f"result {i}": relative_error(*pair) for i, pair in enumerate(results)}
    single = {name for name, value in expected.items() if value.numel() == 1}  # where no rounding averages out
    limits = {name: 10 * TOLERANCE if name in single else TOLERANCE for name in wrong}
    return "".join(f"{name} is off by {error:.2e}\n" for name, error in wrong.items() if not error < limits[name])


def play_all(rank: int, world_size: int, chosen: dict[str, list[int]]) -> dict[tuple[str, int], str]:
    mesh = Mesh.create(init())
    problems = {}
    for name, stages in chosen.items():
        scene = SCENES[name]
        oracle = PlainRun(build(scene), world_size)
        scene.play(oracle)
        assert all(p.isfinite().all() for p in oracle.parameters().values()), name
        for stage in stages:
            for size in sizes_of(name, stage):
                policy = Policy(stage=stage, persistence_numel=0, bucket_numel=size)
                if problem := compare(scene, rank, mesh, policy, oracle):
                    problems[name, stage] = f"with buckets of {size}: {problem}"
    return problems


def cells() -> list[object]:
    """Each scene at each of its stages. On every change it is the last one, in every third scene another one too."""
    found: list[object] = []
    for number, (name, scene) in enumerate(SCENES.items()):
        usual = {scene.stages[-1], scene.stages[number // 3 % len(scene.stages) if number % 3 == 0 else -1]}
        for stage in scene.stages:
            found.append(pytest.param(name, stage, marks=() if stage in usual else pytest.mark.thorough))
    return found


@pytest.fixture(scope="module")
def problems(request: pytest.FixtureRequest) -> list[dict[tuple[str, int], str]]:
    chosen: dict[str, list[int]] = {}
    for item in request.session.items:
        if item.path == request.path and "problems" in getattr(item, "fixturenames", ()):
            cell = item.callspec.params  # type: ignore[attr-defined]
            chosen.setdefault(cell["name"], []).append(cell["stage"])
    return run_ranks(play_all, 2, chosen, timeout=110)


@pytest.mark.parametrize(("name", "stage"), cells())
def test_equals_plain_torch(problems: list[dict[tuple[str, int], str]], name: str, stage: int) -> None:
    for rank, found in enumerate(problems):
        assert (name, stage) not in found, f"rank {rank}, stage {stage}\n{found[name, stage]}"


# Refusals -------------------------------------------------------------------------------------------------------------


def refuse_all(rank: int, world_size: int) -> dict[str, str]:
    mesh, found = Mesh.create(init()), {}
    for stage in range(4):
        try:
            go_back_after_a_step(ShardedRun(Tower(), rank, mesh, Policy(stage=stage)))
        except RuntimeError as error:
            found[f"stale {stage}"] = str(error)
    return found


def go_back_after_a_step(run: Run) -> None:
    """As in plain torch, the parameters that the graph's backward would read are gone."""
    loss = loss_of(run.model, inputs(0, 0))
    run.backward(loss, retain_graph=True)
    run.step()
    run.backward(loss)


def test_what_would_go_wrong_without_a_word_is_refused() -> None:
    for found in run_ranks(refuse_all, 2):
        for stage in range(4):
            assert "modified by an inplace operation" in found[f"stale {stage}"]


# Several models in one process ----------------------------------------------------------------------------------------

PAIRS = [
    (Policy(stage=3, persistence_numel=0), Policy(stage=s, persistence_numel=0, bucket_numel=50)) for s in range(4)
]


class Trainee:
    """A model with its own stage and dtype, trained to agree with another one."""

    def __init__(self, policy: Policy, seed: int, rank: int, mesh: Mesh) -> None:
        torch.manual_seed(seed)
        self.dtype = policy.param_dtype or torch.float32
        self.model = Tower()
        self.rank = rank
        self.sharded = shard(self.model, mesh, policy)
        self.optimizer = ShardedOptimizer(self.sharded, torch.optim.AdamW(self.model.parameters(), lr=1e-2))

    def out(self, step: int) -> torch.Tensor:
        return self.model(inputs(step, self.rank).to(self.dtype)).float()

    def train(self, step: int) -> None:
        self.out(step).square().mean().backward()
        self.optimizer.step()

    def parameters(self) -> dict[str, torch.Tensor]:
        return dict(self.sharded.full_parameters())


def train_pairs(rank: int, world_size: int) -> list[str]:
    mesh, wrong = Mesh.create(init()), []
    for first, second in PAIRS:
        policies = (first, replace(second, param_dtype=torch.bfloat16))
        alone = []
        for policy in policies:
            trainee = Trainee(policy, 1, rank, mesh)
            for step in range(3):
                trainee.train(step)
            alone.append(trainee.parameters())
        together = [Trainee(policy, 1, rank, mesh) for policy in policies]
        for step in range(3):
            losses = [trainee.out(step).square().mean() for trainee in together]
            if step == 1:  # one backward pass through both models
                sum(losses).backward()
            else:  # two, the first forward's last
                for loss in reversed(losses):
                    loss.backward()
            for trainee in together:
                trainee.optimizer.step()
        for trainee, expected in zip(together, alone, strict=True):
            found = trainee.parameters()
            wrong += [f"{trainee.sharded.policy}: {n}" for n in expected if not torch.equal(found[n], expected[n])]
    return wrong


def test_two_models_in_lock_step_are_as_alone() -> None:
    assert run_ranks(train_pairs, 2) == [[], []]


def distill(rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A sharded student learns from a sharded teacher that is not trained; and the same in plain torch."""
    mesh = Mesh.create(init())
    plain: list[Tower] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        plain.append(Tower())
    models = [copy.deepcopy(model) for model in plain]
    sharded = [shard(model, mesh, Policy(stage=3, persistence_numel=0)) for model in models]
    optimizer = ShardedOptimizer(sharded[0], torch.optim.SGD(models[0].parameters(), lr=0.1))
    oracle = torch.optim.SGD(plain[0].parameters(), lr=0.1)
    for step in range(3):
        for which, ranks in ((models, [rank]), (plain, range(world_size))):
            for r in ranks:
                with torch.no_grad():
                    target = which[1](inputs(step, r))
                ((which[0](inputs(step, r)) - target).square().mean() / len(ranks)).backward()
        optimizer.step()
        oracle.step()
        oracle.zero_grad()
        assert [s.bytes().gathered for s in sharded] == [0, 0]
    return dict(sharded[0].full_parameters()), {n: p.detach() for n, p in plain[0].named_parameters()}


def test_a_student_and_its_teacher() -> None:
    for found, expected in run_ranks(distill, 2):
        assert relative_error((found[n] for n in expected), expected.values()) < TOLERANCE

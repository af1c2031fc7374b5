"""Ways to run backward through a sharded module, and what may come between: each against plain torch, at every stage.

As in test_hooks, a scene is run on a plain model over the data of all ranks and on a sharded one over this rank's. Here
stages are compared with each other as well, bit by bit: all are told to reduce in every backward pass, so that the same
numbers are added in the same order.
"""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from drivetrain.comm import Mesh, init
from drivetrain.kernels import SharedMemoryGroup
from drivetrain.zero import INT8_WEIGHTS, ParameterAccess, Policy, ShardedOptimizer, gathered, resident, shard
from drivetrain_testkit import relative_error, run_ranks

WIDTH, BATCH = 8, 4
TOLERANCE = 1e-6


@dataclass
class Run:
    """One run of a scene. ``share`` is the part of each rank's loss in the gradient that this run computes."""

    model: nn.Module
    ranks: list[int]
    share: float
    results: list[torch.Tensor] = field(default_factory=list)  # compared besides the parameters

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None, **options: Any) -> None:
        given = torch.ones_like(loss) if gradient is None else gradient
        loss.backward(given * self.share, **options)

    def report(self, rank: int, *tensors: torch.Tensor) -> None:
        """Compare what rank 0 has seen."""
        if rank == 0:
            self.results.extend(tensor.detach().clone() for tensor in tensors)

    def gathered(self, *, private: bool = False) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def step(self) -> None: ...

    def parameters(self) -> dict[str, torch.Tensor]: ...


class PlainRun(Run):
    def __init__(self, model: nn.Module, world_size: int) -> None:
        super().__init__(model, list(range(world_size)), 1 / world_size)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


class ShardedRun(Run):
    def __init__(self, model: nn.Module, rank: int, mesh: Mesh, policy: Policy) -> None:
        super().__init__(model, [rank], 1.0)
        self.sharded = shard(model, mesh, policy)
        self.optimizer = ShardedOptimizer(self.sharded, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))

    def gathered(self, *, private: bool = False) -> contextlib.AbstractContextManager[None]:
        return resident(self.sharded) if private else gathered(self.sharded, self.model)

    def step(self) -> None:
        result = self.optimizer.step()
        assert result.stepped, result.reason
        held = self.sharded.bytes()
        assert (held.gathered, held.gradients) == (0, 0), held

    def parameters(self) -> dict[str, torch.Tensor]:
        return dict(self.sharded.full_parameters())


def inputs(step: int, rank: int, salt: int = 0) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1 + step + 100 * rank + 10_000 * salt))


def per_rank(run: Run, steps: int = 2) -> Iterator[tuple[int, int]]:
    """(step, rank) over the ranks whose data this run sees, with the optimizer's step after each round."""
    for step in range(steps):
        for rank in run.ranks:
            yield step, rank
        run.step()


# Models ---------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * torch.tanh(self.linear(self.norm(x)))


def call(block: nn.Module, x: torch.Tensor, recompute: str) -> torch.Tensor:
    return block(x) if recompute == "none" else checkpoint(block, x, use_reentrant=recompute == "reentrant")


class Tower(nn.Module):
    def __init__(self, recompute: str = "none", *, out: int = WIDTH) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(WIDTH, out)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = call(block, x, self.recompute)
        return self.leave(x)


class Adversaries(nn.Module):
    """A generator and a discriminator in one model."""

    def __init__(self, recompute: str = "none") -> None:
        super().__init__()
        self.generator = Tower(recompute)
        self.discriminator = Tower(recompute, out=1)

    def forward(self, noise: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.generator(noise)
        return {"made": made, "of made": self.discriminator(made), "of real": self.discriminator(real)}


class TwoHeads(nn.Module):
    def __init__(self, recompute: str = "none") -> None:
        super().__init__()
        self.trunk = Tower(recompute)
        self.short = nn.Linear(WIDTH, 3)
        self.long = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = far = self.trunk(x)
        for block in self.long:
            far = block(far)
        return self.short(hidden), far


class Opaque:
    """Holds a tensor where nobody looks for one."""

    __slots__ = ("_hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden


class OpaqueBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, value: Opaque) -> Opaque:
        return Opaque(torch.tanh(value._hidden @ self.weight))


class OpaqueTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(OpaqueBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> Opaque:
        value = Opaque(self.enter(x))
        for block in self.blocks:
            value = block(value)
        return value


class Normalised(nn.Module):
    """Weights that are computed from parameters before each call, the old way and the new one."""

    def __init__(self, recompute: str = "none") -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ways = (
                parametrizations.weight_norm,
                parametrizations.spectral_norm,
                parametrizations.orthogonal,
                nn.utils.weight_norm,
                nn.utils.spectral_norm,
            )
            self.blocks = nn.ModuleList(nn.Sequential(way(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for way in ways)
            self.enter = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
            self.leave = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = call(block, x, self.recompute)
        return self.leave(x)


class Compiled(Tower):
    """Blocks compiled before the model is sharded, both ways that torch has."""

    def __init__(self, recompute: str = "none") -> None:
        super().__init__(recompute)
        self.blocks[0] = torch.compile(self.blocks[0], backend="eager")
        self.blocks[1].compile(backend="eager")


# Scenes ---------------------------------------------------------------------------------------------------------------


def several_passes_in_any_order(run: Run) -> None:
    orders = [(0, 1, 2), (2, 0, 1)]
    for step, rank in per_rank(run):
        losses = [(run.model(inputs(step, rank, salt)) - salt).square().mean() for salt in range(3)]
        for index in orders[step]:
            run.backward(losses[index])


def a_part_of_the_outputs(run: Run) -> None:
    for step, rank in per_rank(run, 3):
        short, far = run.model(inputs(step, rank))
        if step != 1:
            run.backward(far.abs().mean(), retain_graph=step == 2)
        if step != 0:
            run.backward(short.square().mean())


def adversaries_take_turns(run: Run) -> None:
    model = run.model
    for step in range(2):
        for rank in run.ranks:
            with torch.no_grad():
                made = model.generator(inputs(step, rank))
            run.backward(model.discriminator(made).mean() - model.discriminator(inputs(step, rank, 1)).mean())
        run.step()
        model.discriminator.requires_grad_(False)
        for rank in run.ranks:
            run.backward(-model.discriminator(model.generator(inputs(step, rank))).sigmoid().mean())
        run.step()
        model.discriminator.requires_grad_(True)


def losses_of_parts_of_one_graph(run: Run) -> None:
    for step, rank in per_rank(run):
        out = run.model(inputs(step, rank), inputs(step, rank, 1))
        run.backward(out["of made"].mean() - out["of real"].mean(), retain_graph=True)
        run.backward(out["made"].abs().mean(), retain_graph=True)
        run.backward(-out["of made"].square().mean())


def backward_into_chosen_parameters(run: Run) -> None:
    model = run.model
    for step, rank in per_rank(run):
        out = model(inputs(step, rank), inputs(step, rank, 1))
        chosen = list(model.discriminator.parameters())
        run.backward(out["of made"].mean() - out["of real"].mean(), retain_graph=True, inputs=chosen)
        run.backward(-out["of made"].square().mean(), inputs=list(model.generator.parameters()))


def a_penalty_on_slopes(run: Run) -> None:
    model = run.model
    for step, rank in per_rank(run):
        made = model.generator(inputs(step, rank)).detach()
        between = (0.3 * made + 0.7 * inputs(step, rank, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(model.discriminator(between).sum(), between, create_graph=True)
        with run.gathered():
            pass
        run.backward((slope.norm(dim=1) - 1).square().mean())
        run.backward(model.discriminator(made).mean())
        run.backward(-model.discriminator(model.generator(inputs(step, rank, 2))).mean())


def a_penalty_on_parameter_gradients(run: Run) -> None:
    for step, rank in per_rank(run):
        weights = list(run.model.parameters())
        loss = run.model(inputs(step, rank)).square().mean()
        found = torch.autograd.grad(loss, weights, create_graph=True)
        run.backward(loss + sum(gradient.square().sum() for gradient in found))


def derivatives_of_the_outputs(run: Run) -> None:
    """They are as of the plain module, and accumulate nothing."""
    for step, rank in per_rank(run):
        x = inputs(step, rank).requires_grad_()
        out = run.model(x)
        directions = torch.eye(WIDTH)[:, None, :].expand(WIDTH, BATCH, WIDTH)
        (jacobian,) = torch.autograd.grad(out, x, directions, is_grads_batched=True, retain_graph=True)
        _, product = torch.autograd.functional.vhp(
            lambda v: run.model(v).square().sum(), inputs(step, rank), inputs(step, rank, 1)
        )
        run.report(rank, jacobian, product)
        run.backward(out.square().mean())


def hooks_of_the_users_own(run: Run) -> None:
    model = run.model
    handles = [p.register_hook(lambda gradient: gradient * 0.5) for p in model.blocks[0].parameters()]
    handles += [block.register_full_backward_hook(lambda _, given, __: (given[0] * 1.5,)) for block in model.blocks]
    for step, rank in per_rank(run):
        run.backward(model(inputs(step, rank)).square().mean())
    for handle in handles:
        handle.remove()


def hidden_outputs(run: Run) -> None:
    """What is done between forward and backward of calls that give no sign of their backward."""
    for step, rank in per_rank(run):
        first, second = (run.model(inputs(step, rank, salt))._hidden.square().mean() for salt in range(2))
        with torch.no_grad():
            run.report(rank, run.model(inputs(step, 0, 3))._hidden)
        run.backward(second, retain_graph=True)
        with run.gathered():
            pass
        run.backward(first + second)


def evaluation_in_inference_mode(run: Run) -> None:
    with torch.inference_mode():
        run.model(inputs(0, 0, 4))
    for step, rank in per_rank(run):
        loss = run.model(inputs(step, rank)).square().mean()
        with torch.inference_mode(), run.gathered():
            seen = run.model(inputs(step, 0, 3))
        run.report(rank, seen)
        run.backward(loss)


def passes_of_one_rank_alone(run: Run) -> None:
    """Inside of a context, in an order of its own, which must not become what others expect."""
    model = run.model
    for step, rank in per_rank(run, 3):
        loss = model(inputs(step, rank)).square().mean()
        with run.gathered(private=True), torch.no_grad():
            if rank == 1:
                model(inputs(step, 0))
                for index in (2, 0, 1, 0):
                    model.blocks[index](inputs(step, 0))
        run.backward(loss)
        with torch.no_grad():
            for index in (2, 1, 0, 2):
                run.report(rank, model.blocks[index](inputs(step, 1)))
        with run.gathered(private=True), torch.no_grad():
            for _ in range(rank + 1):
                seen = model(inputs(step, 0))
            run.report(rank, seen)


def with_evaluation(run: Run) -> None:
    """Buffers are each rank's own: the plain run keeps those of rank 0, as if each rank began with them."""
    for step in range(2):
        for rank in reversed(run.ranks):
            before = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
            run.backward(run.model(inputs(step, rank)).square().mean())
            for name, buffer in run.model.named_buffers():
                if rank and len(run.ranks) > 1:
                    buffer.copy_(before[name])
        run.step()
        run.model.eval()
        with torch.no_grad():
            seen = run.model(inputs(step, 0, 3))
        run.results.append(seen)
        run.model.train()


# The table of scenes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    play: Callable[[Run], None]
    model: Callable[[], nn.Module] = Tower
    exact: bool = True  # stages agree bit by bit


RECOMPUTES = ("none", "non-reentrant", "reentrant")


def scenes_of(play: Callable[[Run], None], model: Callable[..., nn.Module], *recomputes: str) -> dict[str, Scene]:
    """One scene for each way to recompute.

    Where a graph that is recomputed the reentrant way runs backward twice, gradients come twice in one pass, and when
    their buckets are sent decides the order in which they are added.
    """
    name = f"{play.__name__.replace('_', ' ')}, {model.__name__}"
    return {f"{name}, {how}": Scene(play, partial(model, how), exact=how != "reentrant") for how in recomputes}


SCENES: dict[str, Scene] = {
    **scenes_of(several_passes_in_any_order, Tower, *RECOMPUTES),
    **scenes_of(a_part_of_the_outputs, TwoHeads, *RECOMPUTES),
    **scenes_of(adversaries_take_turns, Adversaries, "none", "reentrant"),
    **scenes_of(losses_of_parts_of_one_graph, Adversaries, *RECOMPUTES),
    **scenes_of(backward_into_chosen_parameters, Adversaries, "non-reentrant"),
    **scenes_of(a_penalty_on_slopes, Adversaries, *RECOMPUTES[:2]),
    **scenes_of(a_penalty_on_parameter_gradients, Tower, *RECOMPUTES[:2]),
    **scenes_of(derivatives_of_the_outputs, Tower, "non-reentrant"),
    **scenes_of(hooks_of_the_users_own, Tower, "none"),
    **scenes_of(evaluation_in_inference_mode, Tower, "none"),
    **scenes_of(passes_of_one_rank_alone, Tower, "none"),
    **scenes_of(with_evaluation, Normalised, *RECOMPUTES[:2]),
    **scenes_of(with_evaluation, Compiled, *RECOMPUTES[1:]),
    "hidden outputs": Scene(hidden_outputs, OpaqueTower),
}


def build(scene: Scene) -> nn.Module:
    torch._dynamo.reset()  # each model is compiled anew, or torch gives up compiling after the first few
    torch.manual_seed(5)
    return scene.model()


def difference(run: Run, expected: dict[str, torch.Tensor], oracle: Run) -> str:
    found = run.parameters()
    assert found.keys() == expected.keys()
    wrong = {name: relative_error(found[name], expected[name]) for name in expected}
    wrong |= {
        f"result {i}": relative_error(*pair) for i, pair in enumerate(zip(run.results, oracle.results, strict=False))
    }
    return "".join(f"{name} is off by {error:.2e}\n" for name, error in wrong.items() if not error < TOLERANCE)


def play_at_all_stages(scene: Scene, rank: int, world_size: int, mesh: Mesh) -> dict[int, str]:
    """What is wrong, by stage."""
    oracle = PlainRun(build(scene), world_size)
    scene.play(oracle)
    expected, problems, first = oracle.parameters(), {}, None
    for stage in range(4):
        policy = Policy(stage=stage, persistence_numel=0, bucket_numel=90, reduce_every_micro_batch=True)
        run = ShardedRun(build(scene), rank, mesh, policy)
        try:
            scene.play(run)
        except Exception:
            problems[stage] = traceback.format_exc()
            continue
        problems[stage] = difference(run, expected, oracle)
        found = run.parameters()
        first = first or found
        if scene.exact and not all(torch.equal(found[name], first[name]) for name in first):
            problems[stage] += "bits differ from those of stage 0"
    return problems


def play_all(rank: int, world_size: int, names: list[str]) -> dict[str, dict[int, str]]:
    mesh = Mesh.create(init(), shared_memory=SharedMemoryGroup)
    return {name: play_at_all_stages(SCENES[name], rank, world_size, mesh) for name in names}


@pytest.fixture(scope="module")
def problems(request: pytest.FixtureRequest) -> list[dict[str, dict[int, str]]]:
    chosen = {item.callspec.params["name"] for item in request.session.items if "problems" in item.fixturenames}
    return run_ranks(play_all, 2, [name for name in SCENES if name in chosen], timeout=110)


@pytest.mark.parametrize("name", SCENES)
def test_equals_plain_torch_and_stages_agree(problems: list[dict[str, dict[int, str]]], name: str) -> None:
    for rank, found in enumerate(problems):
        for stage, text in found[name].items():
            assert not text, f"rank {rank}, stage {stage}\n{text}"


# What is refused, and what is kept ------------------------------------------------------------------------------------


def make(rank: int, mesh: Mesh, policy: Policy) -> ShardedRun:
    torch.manual_seed(5)
    return ShardedRun(Tower(), rank, mesh, policy)


def transforms(rank: int, mesh: Mesh) -> None:
    torch.manual_seed(5)
    plain, x = Tower(), inputs(0, 0)
    expected = torch.func.jacrev(plain)(x)
    for stage in range(4):
        run = make(rank, mesh, Policy(stage=stage, persistence_numel=0))
        if stage == 3:
            for transform in (torch.func.jacrev, torch.func.jacfwd):
                with pytest.raises(
                    RuntimeError, match=r"a transform of torch.func .* runs through 'root', whose param"
                ):
                    transform(run.model)(x)
        assert torch.equal(torch.func.vmap(run.model)(x), torch.vmap(plain)(x))
        with run.gathered():
            torch.testing.assert_close(torch.func.jacrev(run.model)(x), expected)
        with pytest.raises(RuntimeError, match=r"'enter\.weight' was replaced by another object"):
            torch.func.functional_call(run.model, {"enter.weight": torch.zeros(WIDTH, WIDTH)}, (x,))


def changes_in_place(rank: int, mesh: Mesh) -> None:
    for stage in range(4):
        for dtype in (None, torch.bfloat16):
            run = make(rank, mesh, Policy(stage=stage, persistence_numel=0, param_dtype=dtype))
            model, x = run.model, inputs(0, rank).to(dtype or torch.float32)
            before = run.parameters()
            with torch.no_grad():
                if stage == 3:
                    model.apply(lambda part: part.bias.fill_(2.0) if isinstance(part, nn.Linear) else None)
                    with pytest.raises(RuntimeError, match=r"'enter\.bias' was changed in place, one of 5, and the ch"):
                        model(x)
                else:
                    model.enter.bias.fill_(2.0)
            run.optimizer.param_groups[0]["lr"] = 0.0
            model(x).square().mean().backward()
            run.step()
            after = run.parameters()
            changed = {name for name in before if not torch.equal(before[name], after[name])}
            assert changed == (set() if stage == 3 else {"enter.bias"}), (stage, dtype, changed)
            master = ParameterAccess(run.sharded).master.full(model.enter.bias)
            assert torch.equal(master.to(after["enter.bias"].dtype), after["enter.bias"]), (stage, dtype)


def whole_to_read_only(rank: int, mesh: Mesh) -> None:
    for stage in (0, 3):
        run = make(rank, mesh, Policy(stage=stage, persistence_numel=0))
        model, x = run.model, inputs(0, rank)
        loss = model(x).square().mean()
        with resident(run.sharded):
            assert stage == 0 or run.sharded.bytes().gathered == 4 * sum(b.numel for b in run.sharded.buckets)
        with pytest.raises(RuntimeError, match=r"'leave\.bias' was changed where the module is whole to be read only"):
            with resident(run.sharded), torch.no_grad():
                model.leave.bias.add_(1)
        loss.backward()
        with pytest.raises(RuntimeError, match=r"`gathered` or `resident` context.*; leave the context first"):
            with resident(run.sharded):
                run.optimizer.step()
        run.step()


def changes_to_what_was_not_named(rank: int, mesh: Mesh) -> None:
    run = make(rank, mesh, Policy(stage=3, persistence_numel=0))
    block = run.model.blocks[1]
    with run.gathered(), torch.no_grad():
        block.gain.mul_(2)
    with gathered(run.sharded, block.gain), torch.no_grad():
        block.gain.mul_(2)
        block.linear.bias.mul_(2)
    with pytest.raises(RuntimeError, match=r"'blocks\.1\.linear\.bias' was changed in place, one of 1, and the ch"):
        run.model(inputs(0, rank))
    assert run.parameters()["blocks.1.gain"].tolist() == [4.0] * WIDTH


def exactly_what_is_stored(rank: int, mesh: Mesh) -> None:
    """Also of what is whole already, as it was gathered for the forward pass: quantised."""
    run = make(rank, mesh, Policy(stage=3, persistence_numel=0, gather_rule=INT8_WEIGHTS))
    torch.manual_seed(5)
    stored = Tower().leave.weight.detach()
    loss = run.model(inputs(0, rank)).square().mean()
    assert not torch.equal(run.model.leave.weight, stored)
    with gathered(run.sharded, run.model.leave.weight):
        assert torch.equal(run.model.leave.weight, stored)
    loss.backward()
    assert torch.equal(run.parameters()["leave.weight"], stored)


def kept_until_a_step(rank: int, mesh: Mesh) -> None:
    """What graphs may yet read that no hook watches, as of a module that is not trained and has no step."""
    run = make(rank, mesh, Policy(stage=3, persistence_numel=0))
    x = inputs(0, rank).requires_grad_()
    torch.autograd.grad(run.model(x).sum(), x, create_graph=True)
    assert run.sharded.bytes().gathered > 0
    run.sharded.release()
    assert run.sharded.bytes().gathered == 0


def the_last_block_is_reduced_in_time(rank: int, mesh: Mesh) -> None:
    """Its output is the model's, so that backward enters both at once."""
    run = ShardedRun(TwoHeads(), rank, mesh, Policy(stage=3, persistence_numel=0))
    for step in range(2):
        run.model(inputs(step, rank))[1].square().mean().backward()
        assert not any(run.sharded.reducer.unsent())
        run.step()


def walk_through(rank: int, world_size: int) -> None:
    mesh = Mesh.create(init(), shared_memory=SharedMemoryGroup)
    for door in (
        transforms,
        changes_in_place,
        whole_to_read_only,
        changes_to_what_was_not_named,
        exactly_what_is_stored,
        kept_until_a_step,
        the_last_block_is_reduced_in_time,
    ):
        door(rank, mesh)


def test_what_is_refused_is_refused_in_words_and_the_rest_is_kept() -> None:
    run_ranks(walk_through, 2)

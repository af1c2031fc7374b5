"""Backward, accumulation and generation as users write them, with one engine or several, against plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from drivetrain.engine import Engine, StepRecord, initialize
from drivetrain_testkit import relative_error, run_ranks

WIDTH, BATCH, RANKS = 8, 4, 2
TOLERANCE = 1e-6


class Net(nn.Module):
    def __init__(self, seed: int = 3, recompute: str = "none") -> None:
        super().__init__()
        self.recompute = recompute
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            plainly = self.recompute == "none" or not x.requires_grad
            x = x + (block(x) if plainly else checkpoint(block, x, use_reentrant=self.recompute == "reentrant"))
        return self.last(x)


def config(stage: int, *, lr: float = 0.1, reduce_scatter: bool = True, **changes: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_scatter": reduce_scatter}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "SGD", "params": {"lr": lr, "momentum": 0.5}},
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        **changes,
    }


def batch(step: int, rank: int, salt: int = 0) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1 + step + 100 * rank + 10_000 * salt))


def whole(engine: Engine) -> torch.Tensor:
    return torch.cat([p.float().flatten() for _, p in sorted(engine.sharded.full_parameters())])


def joined(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


# Gradients that are given ---------------------------------------------------------------------------------------------


def gradient_of(step: int, rank: int, micro: int) -> torch.Tensor:
    return batch(step, rank, 10 + micro) / 8


def by_the_engine(engine: Engine, out: torch.Tensor, gradient: torch.Tensor, share: int) -> None:
    assert engine.backward(out, gradient=gradient) is None


def by_lists(engine: Engine, out: torch.Tensor, gradient: torch.Tensor, share: int) -> None:
    halves, given = out.chunk(2), gradient.chunk(2)
    engine.backward([*halves, halves[0].sum() * 0], gradient=[*given, None])


def by_the_tensor(engine: Engine, out: torch.Tensor, gradient: torch.Tensor, share: int) -> None:
    engine.scale(out).backward(gradient.to(out.dtype) / share)


def by_a_loss(engine: Engine, out: torch.Tensor, gradient: torch.Tensor, share: int) -> None:
    """Two losses of one graph; the sum of their gradients is the one that is given."""
    kept = engine.backward((out.float() * gradient * 2).sum(), retain_graph=True)
    assert kept.requires_grad
    engine.backward(-(out.float() * gradient).sum())


WAYS: dict[str, Callable[[Engine, torch.Tensor, torch.Tensor, int], None]] = {
    way.__name__: way for way in (by_the_engine, by_lists, by_the_tensor, by_a_loss)
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 2.0**8}},
    "fp16, other scale": {"fp16": {"enabled": True, "loss_scale": 2.0}},
}


def give_gradients(rank: int, world_size: int) -> dict[tuple[str, str, int, int], torch.Tensor]:
    found, mesh = {}, None
    for stage in range(4):
        for kind, section in PRECISIONS.items():
            for share in (1, 2):
                for name, way in WAYS.items():
                    if kind != "fp32" and (share == 1 or way is by_lists):
                        continue
                    engine = initialize(Net(), config(stage, gradient_accumulation_steps=share, **section), mesh=mesh)
                    mesh = engine.mesh
                    for micro in range(2 * share):
                        way(engine, engine(batch(0, rank, micro)), gradient_of(0, rank, micro), share)
                        assert engine.step().stepped == ((micro + 1) % share == 0)
                    found[name, kind, share, stage] = whole(engine)
    return found


def plain_gradients(share: int) -> torch.Tensor:
    model = Net()
    optimizer = sgd(model)
    for micro in range(2 * share):
        for rank in range(RANKS):
            model(batch(0, rank, micro)).backward(gradient_of(0, rank, micro) / share / RANKS)
        if (micro + 1) % share == 0:
            optimizer.step()
            optimizer.zero_grad()
    return joined(model)


def test_outputs_with_gradients_as_plain_torch() -> None:
    for found in run_ranks(give_gradients, RANKS, timeout=110):
        for share in (1, 2):
            expected = plain_gradients(share)
            for name, way in WAYS.items():
                for stage in range(4):
                    exact = found[name, "fp32", share, stage]
                    assert relative_error(exact, expected) < TOLERANCE, (name, share, stage)
                    for kind in ("fp16", "fp16, other scale"):
                        half = found.get((name, kind, share, stage), exact)
                        assert relative_error(half, expected) < 2e-3, (name, kind, share, stage)
                    # Stages add in the same order where nothing accumulates; else those that reduce alike do. Of two
                    # passes, stage 0 reduces the sum, and the others add what is reduced.
                    first = min(stage, 1) if way is by_a_loss else 0
                    like = first if share == 1 else stage - stage % 2
                    once = share == 1 or way is not by_a_loss
                    assert not once or torch.equal(exact, found[name, "fp32", share, like]), (name, share, stage)


def refused_gradients(rank: int, world_size: int) -> None:
    engine = initialize(Net(), config(3))
    out, x = engine(batch(0, rank)), torch.ones(BATCH, WIDTH)
    for outputs, gradient, error, text in (
        (
            out,
            x[:1],
            ValueError,
            rf"rank {rank}: engine.backward: output 0 has the shape \(4, 8\), and its gradient \(1",
        ),
        ([out, out], [x], ValueError, "got 2 outputs and 1 gradients; give one for each"),
        ([out], [None], ValueError, r"output 0 has the shape \(4, 8\) and no gradient; only a scalar does without"),
        ([out, x], [x, x], ValueError, "output 1 does not depend on trained parameters; leave it out"),
        ([out, 3.0], [x, x], TypeError, "takes tensors and their gradients; output 1 is of type float"),
    ):
        with pytest.raises(error, match=text):
            engine.backward(outputs, gradient=gradient)
    with pytest.raises(TypeError, match=r"got a list \(add losses up; outputs need gradient=\)"):
        engine.backward([out.sum(), out.mean()])
    engine.backward(out, gradient=x)
    assert engine.step().stepped


def test_gradients_that_do_not_fit_are_refused() -> None:
    run_ranks(refused_gradients, RANKS)


# Several engines ------------------------------------------------------------------------------------------------------


class Plain:
    """What an engine is to the loop below, in plain torch over the data of all ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = sgd(model)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / RANKS).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def frozen(seed: int) -> nn.Module:
    return Net(seed).requires_grad_(False)


def train_three(actor: Any, critic: Any, reference: Any, ranks: list[int]) -> None:
    """Steps of several engines, their losses and passes mixed."""
    for step in range(2):
        for rank in ranks:  # one loss of all of them, and one pass through both that are trained
            x = batch(step, rank)
            loss = (actor(x) - reference(x)).square().mean() + (critic(x) - 1).square().mean()
            actor.backward(loss + (actor(x.flip(0)) * critic(x)).mean())
        actor.step()
        critic.step()
        for rank in ranks:  # through the critic to the actor
            actor.backward(-critic(actor(batch(step, rank, 1))).mean())
        critic.zero_grad()
        actor.step()
        for rank in ranks:  # forward and backward of one within those of the other, and through what is frozen
            x = batch(step, rank, 2)
            made = actor(x)
            judged = critic(made.detach())
            actor.backward(reference(made).square().mean())
            critic.backward((judged - x.mean()).square().mean())
        critic.step()
        actor.step()


SETS = (
    ((3, 1, 3), "none"),
    ((0, 3, 2), "none"),
    ((2, 3, 0), "non-reentrant"),
    ((1, 2, 3), "none"),
    ((3, 0, 3), "non-reentrant"),
    ((3, 2, 3), "reentrant"),  # gradients of blocks that are called twice come twice in a pass: added in another order
)


def several_engines(rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    mesh = None
    for stages, recompute in SETS:
        actor = initialize(Net(1, recompute), config(stages[0]), mesh=mesh)
        critic = initialize(Net(2, recompute), config(stages[1]), mesh=mesh)
        no_optimizer = {key: value for key, value in config(stages[2]).items() if key != "optimizer"}
        reference = initialize(frozen(4), no_optimizer, mesh=mesh)
        train_three(actor, critic, reference, [rank])
        assert all(engine.sharded.bytes().gathered == 0 for engine in (actor, critic))
        assert torch.equal(whole(reference), joined(frozen(4)))
        found.append((whole(actor), whole(critic)))
        mesh = actor.mesh if mesh is None else None  # shared by every second set of engines
    return found


def test_several_engines_in_one_loss_and_interleaved() -> None:
    actor, critic = Plain(Net(1)), Plain(Net(2))
    train_three(actor, critic, frozen(4), list(range(RANKS)))
    for found in run_ranks(several_engines, RANKS):
        for pair, (stages, recompute) in zip(found, SETS, strict=True):
            assert relative_error(pair[0], joined(actor.model)) < TOLERANCE, stages
            assert relative_error(pair[1], joined(critic.model)) < TOLERANCE, stages
            same = all(torch.equal(one, first) for one, first in zip(pair, found[0], strict=True))
            assert same or recompute == "reentrant", stages


def scales(rank: int, world_size: int) -> None:
    """A loss over engines with different loss scales, and with none: each gets its own gradients."""
    plain = Net(2)
    for each in range(world_size):
        ((plain(batch(0, each)) - 1).square().mean() / world_size).backward()
    norm = float(nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
    for stage in (0, 3):
        norms = []
        for powers in ((10, 4), (2, 6)):
            sections = [{"fp16": {"enabled": True, "loss_scale": 2.0**power}} for power in powers]
            actor, second = (initialize(Net(1), config(stage, **section)) for section in sections)
            critic = initialize(Net(2), config(3 - stage))
            x = batch(0, rank)

            def loss_of(*engines: Engine, x: torch.Tensor = x) -> torch.Tensor:
                return sum((engine(x).float() - 1).square().mean() for engine in engines)

            actor.backward(loss_of(actor, second, critic))
            norms.append([engine.step().grad_norm for engine in (actor, second, critic)])
            # A part that is called directly, and a critic that reads what the actor says.
            loss = (critic.module.last(critic.module.first(x)) - 1).square().mean()
            second.scale(loss + second(x).float().mean() + critic(actor(x).float()).mean()).backward()
            norms[-1] += [engine.step().grad_norm for engine in (actor, second, critic)]
            with pytest.raises(
                RuntimeError, match=r"with fp16 the loss must carry the loss scale.*engine\.scale\(loss\)"
            ):
                critic.backward(loss_of(actor, critic))
            with pytest.raises(RuntimeError, match="this loss carries a loss scale already"):
                actor.backward(second.scale(loss_of(actor)))
            both = loss_of(actor, second)
            parts = [actor.scale(both), second.scale(both * 2)]
            with pytest.raises(RuntimeError, match=r"brings gradients with the loss scales .* to the same parameters"):
                torch.autograd.backward(parts)
            # Gradients that are only looked at need no scale, and evaluation between scaling and backward is no matter.
            y = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(actor(y).float().sum(), y, create_graph=True)
            scaled = actor.scale(loss_of(actor) + slope.square().mean())
            with torch.no_grad():
                actor(x)
            scaled.backward()
            assert actor.step().stepped
        assert norms[0] == pytest.approx(norms[1], rel=2e-3)
        assert norms[0][0] == pytest.approx(norms[0][1], rel=2e-3)
        assert norms[0][2] == pytest.approx(norm, rel=1e-6)


def test_one_loss_over_engines_with_different_loss_scales() -> None:
    run_ranks(scales, RANKS)


# Accumulation ---------------------------------------------------------------------------------------------------------


def accumulated(engine: Engine, count: int) -> list[StepRecord]:
    records = []
    for micro in range(count):
        engine.backward(engine(batch(0, 0, micro)).square().mean(), scale_wrt_gas=False)
        records.append(engine.step())
    return records


def test_a_boundary_that_is_set_by_hand() -> None:
    engine = initialize(Net(), config(2, gradient_accumulation_steps=3))
    model, done = Net(), 0
    optimizer = sgd(model)
    for boundary, count, updates in ((False, 2, 0), (True, 1, 1), (None, 2, 0), (True, 2, 2), (None, 3, 1)):
        engine.set_gradient_accumulation_boundary(boundary)
        records = accumulated(engine, count)
        assert sum(record.stepped for record in records) == updates, (boundary, records)
        for micro, record in enumerate(records):
            model(batch(0, 0, micro)).square().mean().backward()
            if record.stepped:
                optimizer.step()
                optimizer.zero_grad()
        done += count
        assert engine.counters.micro_steps == done
    assert relative_error(whole(engine), joined(model)) < TOLERANCE
    engine.set_gradient_accumulation_boundary(False)
    assert not engine.is_gradient_accumulation_boundary()
    assert accumulated(engine, 1)[0].reason == "accumulating: the boundary is set to False"
    with pytest.raises(RuntimeError, match=r"rank 0: train_batch counts its micro-batches itself; call set_gradient_"):
        engine.train_batch(iter([]))
    engine.zero_grad()
    engine.set_gradient_accumulation_boundary(None)
    assert [record.stepped for record in accumulated(engine, 3)] == [False, False, True]
    unmanaged = initialize(Net(), config(2, managed_gradient_accumulation=False))
    assert unmanaged.is_gradient_accumulation_boundary()
    with pytest.raises(RuntimeError, match="there is no boundary to set where managed_gradient_accumulation is false"):
        unmanaged.set_gradient_accumulation_boundary(False)


def test_a_resumed_run_counts_micro_batches_from_the_update(tmp_path: Path) -> None:
    engine = initialize(Net(), config(1, gradient_accumulation_steps=2))
    accumulated(engine, 2)
    engine.save(tmp_path)
    resumed = initialize(Net(), config(1, gradient_accumulation_steps=4))
    resumed.load(tmp_path)
    assert [record.stepped for record in accumulated(resumed, 4)] == [False, False, False, True]


COMBINATIONS: dict[str, tuple[dict[str, Any], float, tuple[int, ...]]] = {
    "mean": ({}, 1 / RANKS, (0, 1, 2, 3)),
    "prescale": ({"prescale_gradients": True, "reduce_scatter": False}, 1 / RANKS, (0, 1, 2, 3)),
    "predivide": ({"gradient_predivide_factor": 3.0, "reduce_scatter": False}, 1 / RANKS, (0, 1, 2, 3)),
    "sum": ({"gradient_allreduce_op": "sum"}, 1.0, (0, 1, 2)),
    "unmanaged": ({"managed_gradient_accumulation": False}, 1 / RANKS, (0, 1, 2, 3)),
}


def combine(rank: int, world_size: int) -> dict[tuple[str, int, bool], torch.Tensor]:
    """Three micro-batches: `engine.backward`, plain backward, and one with two losses; with and without `no_sync`."""
    found, mesh = {}, None
    for name, (changes, _, stages) in COMBINATIONS.items():
        for stage in stages:
            for held in (False, True):
                settings = config(stage, lr=0.02, gradient_accumulation_steps=3, **changes)
                engine = initialize(Net(), settings, mesh=mesh)
                mesh = engine.mesh
                for step in range(2):
                    for micro in range(3):
                        with engine.no_sync() if held and micro < 2 else torch.enable_grad():
                            loss = engine(batch(step, rank, micro)).square().mean()
                            if micro == 1:
                                (loss / 3).backward()
                            elif micro == 0:
                                engine.backward(loss)
                            else:
                                engine.backward(loss * 0.25, retain_graph=True)
                                engine.backward(loss * 0.75)
                        if engine.config.managed_gradient_accumulation or micro == 2:
                            record = engine.step()
                    assert record.stepped
                found[name, stage, held] = whole(engine)
    return found


def plain_sum(share: float) -> torch.Tensor:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    for step in range(2):
        for micro in range(3):
            for rank in range(RANKS):
                (model(batch(step, rank, micro)).square().mean() * share / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return joined(model)


def test_micro_batches_add_up_however_ranks_combine() -> None:
    for found in run_ranks(combine, RANKS):
        for (name, stage, held), parameters in found.items():
            assert relative_error(parameters, plain_sum(COMBINATIONS[name][1])) < TOLERANCE, (name, stage, held)
            if name != "unmanaged" or stage > 1:  # there `no_sync` says when to reduce
                assert torch.equal(parameters, found[name, stage, not held]), (name, stage)


def lengths(step: int, rank: int, micro: int) -> int:
    """How many of a batch count; none in one of them."""
    return (rank + 2 * micro + step) % (BATCH + 1)


def weigh(rank: int, world_size: int) -> dict[tuple[str, int], tuple[torch.Tensor, list[float]]]:
    found, mesh = {}, None
    kinds = {
        "mean": {},
        "sum": {"gradient_allreduce_op": "sum"},
        "fp16": {"fp16": {"enabled": True, "loss_scale": 16.0}},
    }
    for kind, changes in kinds.items():
        for stage in range(3 if kind == "sum" else 4):
            settings = config(stage, gradient_accumulation_steps=3, **{"gradient_clipping": 0.5, **changes})
            engine = initialize(Net(), settings, mesh=mesh)
            mesh, norms = engine.mesh, []
            for step in range(2):
                for micro in range(3):
                    count = lengths(step, rank, micro)
                    out = engine(batch(step, rank, micro)).float()[:count]
                    if micro == 1:
                        engine.backward(out, gradient=2 * out.detach(), weight=torch.tensor(count))
                    else:
                        engine.backward(out.square().sum(), weight=count)
                    record = engine.step()
                norms.append(record.grad_norm)
            found[kind, stage] = whole(engine), norms
    refuse_weights(engine, rank, mesh)
    return found


def refuse_weights(engine: Engine, rank: int, mesh: Any) -> None:
    def loss() -> torch.Tensor:
        return engine(batch(0, rank)).float().square().sum()

    engine.backward(loss(), weight=3)
    with pytest.raises(RuntimeError, match=rf"rank {rank}: some losses of this step came with weight=, others without"):
        engine.backward(loss())
    engine.zero_grad()
    engine.backward(loss())
    with pytest.raises(RuntimeError, match="came with weight=, others without; give it for all, or for none"):
        engine.backward(loss(), weight=3)
    engine.zero_grad()
    other = initialize(Net(), config(0), mesh=mesh)
    with pytest.raises(RuntimeError, match="a loss with weight= depends on other engines that train"):
        engine.backward(loss() + other(batch(0, rank)).sum(), weight=3)
    handle = engine.module.first.register_forward_hook(lambda _, __, out: out.register_hook(lambda _: 1 / 0) and None)
    failing = loss()
    handle.remove()
    engine.backward(loss(), weight=3)
    with pytest.raises(ZeroDivisionError):
        engine.backward(failing, weight=5)
    engine.backward(loss())  # the gradients of the step went with the pass that failed, and their weights
    engine.zero_grad()
    for _ in range(3):
        engine.backward(loss(), weight=0)
        if not engine.closes_step:
            engine.step()
    with pytest.raises(RuntimeError, match="sum up to 0 over all ranks, so there is no mean to take"):
        engine.step()


def plain_weighed() -> tuple[torch.Tensor, list[float]]:
    model = Net()
    optimizer, norms = sgd(model), []
    for step in range(2):
        parts = [(rank, micro) for rank in range(RANKS) for micro in range(3)]
        kept = [model(batch(step, *part))[: lengths(step, *part)] for part in parts]
        (sum(out.square().sum() for out in kept) / sum(map(len, kept))).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return joined(model), norms


def test_a_mean_over_all_items_of_uneven_micro_batches() -> None:
    expected, norms = plain_weighed()
    for found in run_ranks(weigh, RANKS):
        for (kind, stage), (parameters, seen) in found.items():
            tolerance = 2e-3 if kind == "fp16" else TOLERANCE
            assert relative_error(parameters, expected) < tolerance, (kind, stage)
            assert seen == pytest.approx(norms, rel=max(tolerance, 1e-5)), (kind, stage)


# Looking in, and generating -------------------------------------------------------------------------------------------


class Speaker(nn.Module):
    """A language model for greedy decoding: tokens in, logits and loss out; a part that stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)
        self.dropout = nn.Dropout(0.5).eval()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).cumsum(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.dropout(x))

    def generate(self, tokens: torch.Tensor, length: int) -> torch.Tensor:
        for _ in range(length):
            tokens = torch.cat((tokens, self(tokens)[:, -1:].argmax(-1)), 1)
        return tokens

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def prompt(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (2, 4), generator=torch.Generator().manual_seed(step + 10 * rank))


def look_and_speak(rank: int, world_size: int) -> list[torch.Tensor]:
    found = []
    for stage in range(4):
        engine = initialize(Speaker(), config(stage))
        plain = Speaker()
        optimizer = sgd(plain)
        model = engine.module
        for step in range(3):
            for each in range(world_size):
                (plain.loss(prompt(step, each)) / world_size).backward()
            loss = model.loss(prompt(step, rank))
            with engine.generation():  # between forward and backward, and as long as each rank likes
                assert not model.training
                assert torch.equal(
                    model.generate(prompt(step, rank), 3 + 4 * rank), plain.generate(prompt(step, rank), 3 + 4 * rank)
                )
            assert model.training
            assert model.blocks[0].training
            assert not model.dropout.training
            engine.backward(loss)
            weight, gradient = model.blocks[1][0].weight, plain.blocks[1][0].weight.grad
            torch.testing.assert_close(engine.access.gradient.full(weight), gradient, rtol=1e-5, atol=1e-8)
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
            with engine.gathered([weight, model.head.bias], modifier_rank=1), torch.no_grad():
                torch.testing.assert_close(weight, plain.blocks[1][0].weight, rtol=1e-6, atol=1e-7)
                if rank == 1:
                    model.head.bias.fill_(float(step))
            plain.head.bias.data.fill_(float(step))
            assert torch.equal(engine.access.master.full(model.head.bias), plain.head.bias)
            momentum = optimizer.state[plain.blocks[1][0].weight]["momentum_buffer"]
            torch.testing.assert_close(
                engine.access.state("momentum_buffer").full(weight), momentum, rtol=1e-5, atol=1e-8
            )
        found.append(whole(engine))
        assert relative_error(found[-1], joined(plain)) < TOLERANCE
    return found


def test_engine_shortcuts_and_generation_at_the_pace_of_each_rank() -> None:
    for found in run_ranks(look_and_speak, RANKS):
        assert all(torch.equal(one, found[0]) for one in found)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(shape)
    model.gradient_checkpointing_enable()
    return model.train()


def generate_in_training(rank: int, world_size: int) -> None:
    engine, plain = initialize(llama(), config(3)), llama()
    optimizer = sgd(plain)
    prompts = [
        torch.randint(3, 61, (2, 5), generator=torch.Generator().manual_seed(each)) for each in range(world_size)
    ]
    for _ in range(2):
        for each in prompts:
            (plain(input_ids=each, labels=each).loss / world_size).backward()
        engine.backward(engine(input_ids=prompts[rank], labels=prompts[rank]).loss)
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        expected = copy.deepcopy(plain).eval()

        def compare(length: int, expected: Any = expected, **options: Any) -> None:
            arguments = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
            found = engine.module.generate(prompts[rank], **arguments, **options)
            assert torch.equal(found, expected.generate(prompts[rank], **arguments)), (length, options)

        with engine.generation():
            compare(3 + 4 * rank)
        engine.eval()
        compare(3)  # ranks that generate the same number of tokens need no context
        compare(3 + 2 * rank, synced_gpus=True)  # nor do those that go on with the others
        engine.train()
        assert engine.sharded.bytes().gathered == 0


def test_transformers_generates_the_same_tokens_during_training() -> None:
    pytest.importorskip("transformers")
    run_ranks(generate_in_training, RANKS, timeout=110)

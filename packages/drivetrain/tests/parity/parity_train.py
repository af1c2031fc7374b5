"""The two sides of the matrix: the engine on this rank, and one process of plain torch that plays all ranks.

The plain side holds a replica of the model for each rank, in the precision that the cell computes in, and fp32 master
weights. Each replica sees its rank's data; gradients are averaged, rounded where the documentation says that Drivetrain
rounds them, unscaled, clipped, and given to an optimizer over the masters. It uses nothing of ``drivetrain.zero`` and
``drivetrain.engine``.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from parity_models import Batch, Model, batch, build, set_seed
from parity_recipe import DISK, Groups, Recipe

from drivetrain.comm import Mesh
from drivetrain.engine import Engine, initialize
from drivetrain.zero import Init, ParameterAccess, gathered


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one optimizer step did."""

    stepped: bool
    norm: float
    clip: float
    lr: float
    scale: float


@dataclass(kw_only=True)
class Trained:
    """What is left of training, as one rank sees it."""

    start: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # in the highest precision
    shown: dict[str, torch.Tensor] = field(default_factory=dict)  # as the model computes with them
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


def seed(step: int, micro: int, rank: int, salt: int) -> None:
    """So that dropout draws the same numbers on both sides."""
    set_seed(1 + step + 10 * micro + 100 * rank + 1000 * salt)


# Plain torch ----------------------------------------------------------------------------------------------------------


class PlainSide:
    """See the module's docstring. ``results`` holds what each rank is to find."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.ranks = range(recipe.ranks)
        first = recipe.prepare(build(recipe.shape))
        self.master = {name: p.detach().clone() for name, p in first.named_parameters()}
        self.models = [recipe.prepare(build(recipe.shape)) for _ in self.ranks]
        self.replicas = [dict(model.named_parameters()) for model in self.models]
        self.local: list[dict[str, torch.Tensor]] = [{} for _ in self.ranks]
        self.reduced: dict[str, torch.Tensor] = {}
        self.scale, self.good, self.applied = recipe.precision.scale, 0, 0
        self.linear = parameters_of_linear_layers(first)
        for replica, local in zip(self.replicas, self.local, strict=True):
            for name, parameter in replica.items():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(recipe.precision.dtype)
                if not parameter.requires_grad or recipe.precision.rounds_masters:
                    self.master[name] = parameter.detach().to(self._master_dtype(parameter))
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._collector(name, local))
        self.results = [Trained(start={n: m.clone() for n, m in self.master.items()}) for _ in self.ranks]
        self.optimizer = recipe.plain.optimizer(self._groups(first))
        self.base = [(group, group["lr"]) for group in self.optimizer.param_groups]

    def _master_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        """Trained weights are updated in fp32, whatever they are rounded to afterwards, except by torch itself."""
        plain = self.recipe.plain.rounds_as_torch or not parameter.requires_grad
        return parameter.dtype if plain else torch.float32

    def _groups(self, model: Model) -> Groups:
        groups = self.recipe.groups(model)
        return [{**group, "params": [self.master[name] for name in group["labels"]]} for group in groups]

    def _collector(self, name: str, local: dict[str, torch.Tensor]) -> Any:
        """Adds each gradient, as it is made, in the dtype that is kept. At stage 0 what is reduced goes on there."""

        def collect(parameter: torch.Tensor) -> None:
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            parameter.grad = None
            kept = gradient.to(self.recipe.plain.kept or gradient.dtype)
            if name not in local and self.recipe.stage == 0 and name in self.reduced:
                local[name] = self._as_share(self.reduced[name]).clone()
            local[name] = local[name] + kept if name in local else kept

        return collect

    def _as_share(self, reduced: torch.Tensor) -> torch.Tensor:
        """What each rank contributes so that the next reduction gives ``reduced`` again."""
        return reduced if self.recipe.plain.reduce_op == "mean" else reduced / len(self.ranks)

    @contextlib.contextmanager
    def editing(self) -> Iterator[None]:
        yield
        for name, parameter in self.replicas[0].items():
            changed = parameter.detach() != self.master[name].to(parameter.dtype)
            self.master[name][changed] = parameter.detach()[changed].to(self.master[name].dtype)

    # a step -----------------------------------------------------------------------------------------------------------

    def loss(self, rank: int, data: Batch) -> torch.Tensor:
        autocast = self.recipe.precision.autocast
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None, cache_enabled=False):
            return self.models[rank](*data)

    def step(self, index: int) -> None:
        loop = self.recipe.loop
        self.recipe.before_step(self, index)
        for micro in range(loop.micro):
            passes = []
            for salt in range(1 + loop.second_loss):
                losses = []
                for rank in self.ranks:
                    seed(index, micro, rank, salt)
                    losses.append(self.loss(rank, batch(index, micro, rank, salt=salt, uneven=loop.uneven)))
                passes.append(losses)
            for rank in self.ranks:
                self.results[rank].losses += [float(losses[rank].detach()) for losses in passes]
            if loop.evaluates:
                self.evaluate(index)
            for losses in reversed(passes):
                for loss in losses:
                    (loss / loop.micro * self.scale).backward()
                self.end_pass(closes=self.recipe.closes_each_pass or micro == loop.micro - 1)
        self.update()
        if loop.evaluates:
            self.evaluate(index)

    @torch.no_grad()
    def evaluate(self, index: int) -> None:
        found = []
        for rank, model in enumerate(self.models):
            model.eval()
            found.append(float(self.loss(rank, batch(index, 7, rank))))
            model.train()
        for result in self.results:
            result.losses.append(sum(found) / len(found))

    @torch.no_grad()
    def end_pass(self, *, closes: bool) -> None:
        """Stages 2 and 3 reduce what every pass brings, the others what has accumulated when the step closes."""
        if self.recipe.stage < 2 and not closes:
            return
        for name in self.master:
            held = [local.pop(name, None) for local in self.local]
            like = next((gradient for gradient in held if gradient is not None), None)
            if like is None:
                continue
            done = self.reduced.get(name)
            reopened = self.recipe.stage == 0 and done is not None
            absent = self._as_share(done) if reopened else torch.zeros_like(like)
            total = self._reduce(name, [absent if gradient is None else gradient for gradient in held])
            self.reduced[name] = total if reopened or done is None else done + total

    def _reduce(self, name: str, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Added in rank order and rounded once."""
        precision, kept = self.recipe.precision, gradients[0].dtype
        wire = self.recipe.plain.wire or precision.dtype
        if precision.autocast is not None and name in self.linear:
            wire = precision.autocast
        total = gradients[0].to(wire).float()
        for gradient in gradients[1:]:
            total = total + gradient.to(wire).float()
        if self.recipe.plain.reduce_op == "mean":
            total = total / len(gradients)
        return total.to(wire).to(kept)

    @torch.no_grad()
    def update(self) -> None:
        plain, applied = self.recipe.plain, self.applied
        total = sum(float(gradient.double().square().sum()) for gradient in self.reduced.values())
        norm, scale = math.sqrt(total) / self.scale, self.scale
        stepped = math.isfinite(norm)
        clip = min(1.0, plain.max_norm / (norm + 1e-6)) if plain.max_norm and stepped else 1.0
        for group, base in self.base:
            group["lr"] = base * _at(applied, plain.rates)
            if plain.fixed_rates is not None:
                group["lr"] = _at(applied, plain.fixed_rates)
            if plain.momenta is not None:
                group["momentum"] = _at(applied, plain.momenta)
        if stepped:
            for name, master in self.master.items():
                gradient = self.reduced.get(name)
                master.grad = None if gradient is None else gradient.to(master.dtype) * (clip / scale)
            self.optimizer.step()
            self._round()
            for replica in self.replicas:
                for name, parameter in replica.items():
                    parameter.copy_(self.master[name])
        self.reduced.clear()
        self.applied += stepped
        self._move_scale(stepped=stepped)
        record = Step(stepped=stepped, norm=norm, clip=clip, lr=self.base[0][0]["lr"], scale=scale)
        for result in self.results:
            result.steps.append(record)

    def _round(self) -> None:
        """To what the optimizer keeps."""
        precision = self.recipe.precision
        for group in self.optimizer.param_groups:
            for master in group["params"]:
                if precision.rounds_masters:
                    master.copy_(master.to(precision.dtype))
                for value in self.optimizer.state[master].values():
                    if precision.rounds_moments and isinstance(value, torch.Tensor) and value.shape == master.shape:
                        value.copy_(value.to(precision.dtype))

    def _move_scale(self, *, stepped: bool) -> None:
        if not self.recipe.precision.dynamic:
            return
        self.good = self.good + 1 if stepped else 0
        if not stepped:
            self.scale /= 2
        elif self.good % 2 == 0:
            self.scale *= 2

    def _take_buffers_of_the_first(self) -> None:
        """Ranks have their own; a checkpoint has those of the first."""
        for model in self.models:
            for own, first in zip(model.buffers(), self.models[0].buffers(), strict=True):
                own.copy_(first)

    def train(self) -> list[Trained]:
        for index in range(self.recipe.loop.steps):
            self.step(index)
            if index == 0 and self.recipe.loop.resumes:
                self._take_buffers_of_the_first()
        for rank, result in enumerate(self.results):
            result.parameters = self.master
            result.shown = {name: p.detach() for name, p in self.replicas[rank].items()}
            result.buffers = {name: b.clone() for name, b in self.models[rank].named_buffers()}
        return self.results


def parameters_of_linear_layers(model: torch.nn.Module) -> set[str]:
    """Names of parameters that linear layers own, and no others."""
    owners: dict[int, set[type]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(type(module))
    return {name for name, p in model.named_parameters() if owners[id(p)] == {torch.nn.Linear}}


def _at(step: int, values: tuple[float, ...]) -> float:
    return values[min(step, len(values) - 1)]


# The engine -----------------------------------------------------------------------------------------------------------


class EngineSide:
    """The engine, driven by the loop of the cell.

    Args:
        recipe: of the cell.
        mesh: the ranks.
        folder: an empty one, the same on all ranks, for checkpoints.
    """

    def __init__(self, recipe: Recipe, mesh: Mesh, folder: Path) -> None:
        self.recipe = recipe
        self.mesh = mesh
        self.folder = folder
        self.rank = mesh.world.rank
        self.result = Trained()
        self.engine = self._make()
        self.result.start = self._masters()

    def _make(self) -> Engine:
        """Each rank draws values of its own: those of the first must become everybody's."""
        recipe = self.recipe
        with Init(self.mesh, enabled=recipe.loop.under_init):
            model = recipe.prepare(build(recipe.shape, 11 if recipe.loop.under_init else 11 + self.rank))
        self.models = [model]
        config = json.loads(json.dumps(recipe.config).replace(DISK, f"{self.folder}-disk"))
        return initialize(model, config, mesh=self.mesh, **recipe.given(model))

    def _masters(self) -> dict[str, torch.Tensor]:
        named = dict(self.engine.module.named_parameters())
        wholes = ParameterAccess(self.engine.sharded).master.full_many(list(named.values()))
        return {name: whole for name, whole in zip(named, wholes, strict=True) if whole is not None}

    @contextlib.contextmanager
    def editing(self) -> Iterator[None]:
        with gathered(self.engine.sharded, self.engine.module):
            yield

    # a step -----------------------------------------------------------------------------------------------------------

    def step(self, index: int) -> None:
        loop = self.recipe.loop
        self.recipe.before_step(self, index)
        if loop.style == "train_batch":
            self._one_call(index)
        else:
            for micro in range(loop.micro):
                last = micro == loop.micro - 1
                with self.engine.no_sync() if loop.style == "no_sync" and not last else contextlib.nullcontext():
                    self._micro_batch(index, micro)
                if loop.style in ("managed", "plain"):
                    record = self.engine.step()
                    assert last or (not record.stepped and record.grad_norm is None), record
            if loop.style in ("unmanaged", "no_sync"):
                record = self.engine.step()
            self._note(record)
        held = self.engine.sharded.bytes()
        assert (held.gathered, held.gradients) == (0, 0), f"after the step: {held}"
        if loop.evaluates:
            self.evaluate(index)

    def _one_call(self, index: int) -> None:
        loop, salts = self.recipe.loop, []

        def batches() -> Iterator[Batch]:
            for micro in range(loop.micro):
                seed(index, micro, self.rank, 0)
                yield batch(index, micro, self.rank, uneven=loop.uneven)

        hook = self.engine.module.register_forward_hook(lambda module, args, out: salts.append(float(out.detach())))
        mean = float(self.engine.train_batch(batches()))
        hook.remove()
        self.result.losses += salts
        assert math.isclose(mean, self._over_ranks(sum(salts) / len(salts)), rel_tol=1e-5), "the loss of train_batch"
        self._note(self.engine.last_step)

    def _over_ranks(self, value: float) -> float:
        return float(self.engine._mean(torch.tensor(value)))

    def _micro_batch(self, index: int, micro: int) -> None:
        loop, engine = self.recipe.loop, self.engine
        losses = []
        for salt in range(1 + loop.second_loss):
            seed(index, micro, self.rank, salt)
            losses.append(engine(*batch(index, micro, self.rank, salt=salt, uneven=loop.uneven)))
        self.result.losses += [float(loss.detach()) for loss in losses]
        if loop.evaluates:
            self.evaluate(index)
        for loss in reversed(losses):
            if loop.style == "plain":
                engine.scale(loss / loop.micro).backward()
            else:
                engine.backward(loss)

    def evaluate(self, index: int) -> None:
        self.result.losses.append(float(self.engine.eval_batch(batch(index, 7, self.rank))))

    def _note(self, record: Any) -> None:
        self.result.steps.append(
            Step(
                stepped=record.stepped,
                norm=record.grad_norm,
                clip=record.clip_coefficient,
                lr=record.lr,
                scale=record.loss_scale,
            )
        )

    def _resume(self) -> None:
        self.engine.save(self.folder)
        self.engine.close()
        self.engine = self._make()
        self.engine.load(self.folder)

    def train(self) -> Trained:
        for index in range(self.recipe.loop.steps):
            self.step(index)
            if index == 0 and self.recipe.loop.resumes:
                self._resume()
        self.result.parameters = self._masters()
        self.result.shown = dict(self.engine.sharded.full_parameters())
        self.result.buffers = {name: b.clone() for name, b in self.engine.module.named_buffers()}
        self.engine.close()
        return self.result


# The comparison -------------------------------------------------------------------------------------------------------


def differences(found: Trained, expected: Trained, recipe: Recipe) -> list[str]:
    """What is wrong, in words. Lengths of updates are compared, where errors show most, parameter by parameter."""
    wrong = []
    bound = recipe.tolerance
    if found.parameters.keys() != expected.parameters.keys():
        return [f"parameters {sorted(found.parameters)}, expected {sorted(expected.parameters)}"]
    wrong += _unequal("start of", found.start, expected.start)
    wrong += _far_off(found, expected, recipe)
    dtype = recipe.precision.dtype
    rounded = {name: value.to(dtype) for name, value in found.parameters.items()}
    wrong += _unequal("what is shown of", found.shown, rounded)
    for name, buffer in expected.buffers.items():
        if not torch.allclose(found.buffers[name].double(), buffer.double(), rtol=bound, atol=bound):
            wrong.append(f"buffer {name} is {found.buffers[name].tolist()}, expected {buffer.tolist()}")
    wrong += _other_numbers("losses", found.losses, expected.losses, max(bound, 1e-6))
    wrong += _other_steps(found.steps, expected.steps, bound)
    return wrong


def _unequal(what: str, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    return [
        f"{what} {name} differs" for name, value in expected.items() if not torch.equal(found[name].to(value), value)
    ]


def _far_off(found: Trained, expected: Trained, recipe: Recipe) -> list[str]:
    """Parameters whose update is off by too much of its length, or of a tenth of the length that is usual for its size.

    Quantisation has errors of the size of the largest element in a block, so there only the whole is compared.
    """
    right = {name: _moved(expected, name) for name in expected.parameters}
    wrong = {name: _moved(found, name) - value for name, value in right.items()}
    if any(feature.tolerance for feature in recipe.features):
        right, wrong = ({"all parameters": torch.cat([v.flatten() for v in d.values()])} for d in (right, wrong))
    count = sum(value.numel() for value in right.values())
    usual = math.sqrt(sum(float(value.square().sum()) for value in right.values()) / count)
    texts = []
    for name, value in right.items():
        error, length = float(wrong[name].norm()), float(value.norm())
        allowed = recipe.tolerance * max(length, 0.1 * usual * math.sqrt(value.numel())) if length else 0.0
        if not error <= allowed:
            share = error / length if length else math.inf
            texts.append(f"update of {name} is off by {share:.1e} of its length {length:.1e}")
    return texts


def _moved(trained: Trained, name: str) -> torch.Tensor:
    return trained.parameters[name].double() - trained.start[name].double()


def _other_numbers(what: str, found: Iterable[float], expected: Iterable[float], bound: float) -> list[str]:
    left, right = list(found), list(expected)
    if len(left) == len(right) and all(_near(a, b, bound) for a, b in zip(left, right, strict=True)):
        return []
    return [f"{what} are {left}, expected {right}"]


def _near(a: float, b: float, bound: float) -> bool:
    return a == b or abs(a - b) <= bound * max(1.0, abs(b)) or (math.isnan(a) and math.isnan(b))


def _other_steps(found: list[Step], expected: list[Step], bound: float) -> list[str]:
    wrong = []
    if [(s.stepped, s.scale) for s in found] != [(s.stepped, s.scale) for s in expected]:
        wrong.append(
            f"steps and scales are {[(s.stepped, s.scale) for s in found]}, "
            f"expected {[(s.stepped, s.scale) for s in expected]}"
        )
        return wrong
    for field_name, near in (("norm", max(bound, 1e-5)), ("clip", max(bound, 1e-5)), ("lr", 1e-6)):
        pairs = [(getattr(a, field_name), getattr(b, field_name)) for a, b in zip(found, expected, strict=True)]
        if not all(a == b or b != b or abs(a - b) <= near * abs(b) for a, b in pairs if math.isfinite(b)):
            wrong.append(f"{field_name} is {[a for a, _ in pairs]}, expected {[b for _, b in pairs]}")
    return wrong

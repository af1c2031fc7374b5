"""What a cell of the parity matrix is made of: a stage, a precision, and features that change a recipe.

A recipe has two halves that say the same thing twice: ``config`` and ``given`` for the engine, ``plain`` for the loop
in plain torch that it is compared with. A feature states both, so the oracle never reads the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from parity_models import Model, Shape

Groups = list[dict[str, Any]]
"""Parameter groups: ``params`` (tensors), ``labels`` (their names), and settings."""

STAGES = (0, 1, 2, 3)
DISK = "<disk>"
"""In a configuration: a folder for the cell."""


class Side(Protocol):
    """One of the two sides that are compared, as hooks of a feature see it."""

    models: list[Model]  # the engine has one, the plain side one for each rank

    def editing(self) -> AbstractContextManager[None]:
        """Parameters of all ``models`` may be read and, the same everywhere, changed in place."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """How the training loop is written.

    Attributes:
        style: ``managed`` calls forward, backward and step per micro-batch; ``plain`` calls ``loss.backward()``;
            ``unmanaged`` steps once after all backward passes, ``no_sync`` likewise, with all passes but the last in
            that context; ``train_batch`` makes one call.
        micro: micro-batches in a step.
        steps: optimizer steps.
        second_loss: another forward pass before the first one's backward pass, and a backward pass for each.
        evaluates: between forward and backward, and after each step.
        resumes: from a checkpoint, in a new engine, after the first step.
        uneven: odd ranks have a sample more.
        under_init: the model is built under ``drivetrain.zero.Init``.
    """

    style: Literal["managed", "plain", "unmanaged", "no_sync", "train_batch"] = "managed"
    micro: int = 1
    steps: int = 3
    second_loss: bool = False
    evaluates: bool = False
    resumes: bool = False
    uneven: bool = False
    under_init: bool = False


def sgd(groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Plain:
    """What the loop in plain torch does.

    Attributes:
        optimizer: makes one over master weights.
        max_norm: of the gradient; 0 does not clip.
        rates: multiplies the learning rate of each group in the steps that are taken, the last one from there on.
        fixed_rates: the learning rate of all groups instead.
        momenta: the momentum of those steps, if it moves.
        reduce_op: over ranks.
        kept: dtype that gradients add up in; None for the one of the parameter.
        rounds_as_torch: over 16-bit weights the optimizer computes in 16 bits, as those of torch do.
        wire: dtype that gradients of ranks are rounded to before and after they are added; None for the one of the
            parameter.
    """

    optimizer: Callable[[Groups], torch.optim.Optimizer] = sgd
    max_norm: float = 0.0
    rates: tuple[float, ...] = (1.0,)
    fixed_rates: tuple[float, ...] | None = None
    momenta: tuple[float, ...] | None = None
    reduce_op: Literal["mean", "sum"] = "mean"
    rounds_as_torch: bool = False
    kept: torch.dtype | None = None
    wire: torch.dtype | None = None


def nothing(side: Side, step: int) -> None:
    """The hook of a feature that has none."""


def one_group(model: Model) -> Groups:
    """All trained parameters together."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [{"params": [p for _, p in named], "labels": [name for name, _ in named]}]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A combination that is refused at start-up.

    Attributes:
        reason: why it makes no sense, in words.
        text: a regular expression that the error matches.
        stages, precisions: where; all of them by default.
        beside: other features that must be there.
    """

    reason: str
    text: str
    stages: tuple[int, ...] = STAGES
    precisions: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def applies(self, cell: Cell) -> bool:
        here = not self.precisions or cell.precision in self.precisions
        return here and cell.stage in self.stages and set(self.beside) <= set(cell.features)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A number format.

    Attributes:
        name: in the names of cells.
        config: what the engine is told.
        dtype: that parameters and gradients have.
        autocast: the dtype of autocast that the plain side runs forward in. Gradients of what only linear layers own
            travel in it.
        scale: the first loss scale; ``dynamic`` ones halve at each overflow and double after two good steps.
        rounds_masters, rounds_moments: the optimizer's weights and moments are kept in ``dtype``.
        tolerance: for the length of the difference of two updates, as a share of the update.
        in_product: whether the full product has it with each pair of features, or with single ones only.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    scale: float = 1.0
    dynamic: bool = False
    rounds_masters: bool = False
    rounds_moments: bool = False
    tolerance: float
    in_product: bool = True

    @property
    def half(self) -> bool:
        """Something computes in 16 bits."""
        return self.dtype.itemsize < 4 or self.autocast is not None


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Something that training has or does. One entry in the table of features is all that it takes to add one.

    Attributes:
        config: laid over the engine's configuration, section by section.
        given: makes arguments of ``initialize`` from the parameter groups.
        plain, shape, loop: fields of `Plain`, `Shape` and `Loop` that it changes.
        groups: the parameter groups, of the engine's model and of the plain one.
        prepare: called with each model when it is built.
        before_step: called with each side before each optimizer step's first forward pass.
        ranks: how many it needs; None for any number.
        hosts: the ranks are spread over two of them.
        kinds: what it is a choice of; features with a kind in common exclude each other.
        tolerance: how far the update may be off, because the feature is not exact. Then the update of all parameters
            together is compared, and not that of each.
        half: the same, where something computes in 16 bits.
        amplifies: by how much it makes errors of others grow (an optimizer that takes signs turns a small error of a
            small gradient into a large one of the update).
        refused: where it is refused.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    given: Callable[[Groups], Mapping[str, Any]] | None = None
    plain: Mapping[str, Any] = field(default_factory=dict)
    shape: Mapping[str, Any] = field(default_factory=dict)
    loop: Mapping[str, Any] = field(default_factory=dict)
    groups: Callable[[Model], Groups] | None = None
    prepare: Callable[[Model], None] | None = None
    before_step: Callable[[Side, int], None] | None = None
    ranks: int | None = None
    hosts: bool = False
    kinds: tuple[str, ...] = ()
    tolerance: float = 0.0
    half: float = 0.0
    amplifies: float = 1.0
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One combination: names only, so that it travels to ranks."""

    stage: int
    precision: str
    features: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join((f"stage {self.stage}", self.precision, *self.features))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A cell, spelled out."""

    stage: int
    precision: Precision
    features: tuple[Feature, ...]
    config: Mapping[str, Any]
    plain: Plain
    shape: Shape
    loop: Loop
    groups: Callable[[Model], Groups]
    grouped: bool  # the engine is given the groups
    ranks: int
    replicas: int
    tolerance: float

    def prepare(self, model: Model) -> Model:
        for feature in self.features:
            if feature.prepare is not None:
                feature.prepare(model)
        return model

    def given(self, model: Model) -> dict[str, Any]:
        """The arguments of ``initialize`` besides model and configuration."""
        found: dict[str, Any] = {}
        groups = [{k: v for k, v in group.items() if k != "labels"} for group in self.groups(model)]
        if self.grouped:
            found["model_parameters"] = groups
        for feature in self.features:
            if feature.given is not None:
                found.update(feature.given(groups))
        return found

    def before_step(self, side: Side, step: int) -> None:
        for feature in self.features:
            if feature.before_step is not None:
                feature.before_step(side, step)

    @property
    def closes_each_pass(self) -> bool:
        """Each backward pass may be the last before a step: nobody counts micro-batches."""
        return self.loop.style == "unmanaged"


BASE: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
    "gradient_clipping": 0.0,
    "zero_optimization": {"stage3_param_persistence_threshold": 0},
}
RANKS = 2


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``, section by section. A section named ``optimizer`` or ``scheduler`` replaces."""
    result = dict(below)
    for key, value in above.items():
        whole = key in ("optimizer", "scheduler") or not isinstance(value, Mapping) or key not in below
        result[key] = value if whole else merged(below[key], value)
    return result


def spell_out(cell: Cell, precisions: Mapping[str, Precision], table: Mapping[str, Feature]) -> Recipe:
    """The recipe of a cell."""
    precision = precisions[cell.precision]
    features = tuple(table[name] for name in cell.features)
    config = merged(merged(BASE, precision.config), {"zero_optimization": {"stage": cell.stage}})
    plain, shape, loop = Plain(), Shape(), Loop()
    for feature in features:
        config = merged(config, feature.config)
        plain = replace(plain, **feature.plain)
        shape = replace(shape, **feature.shape)
        loop = replace(loop, **feature.loop)
    config = merged(config, {"gradient_accumulation_steps": loop.micro})
    if loop.style in ("unmanaged", "no_sync"):
        config = merged(config, {"managed_gradient_accumulation": False})
    return Recipe(
        stage=cell.stage,
        precision=precision,
        features=features,
        config=config,
        plain=plain,
        shape=shape,
        loop=loop,
        groups=next((f.groups for f in features if f.groups), one_group),
        grouped=any(f.groups for f in features),
        ranks=crew_of(features).ranks,
        replicas=replicas(config, crew_of(features).ranks),
        tolerance=tolerance(precision, features),
    )


@dataclass(frozen=True, order=True)
class Crew:
    """The ranks that cells run on."""

    ranks: int
    hosts: int = 1

    def __str__(self) -> str:
        return f"{self.ranks} ranks on {self.hosts} hosts"


def crew_of(features: Iterable[Feature]) -> Crew:
    """What these features need."""
    chosen = list(features)
    ranks = next((f.ranks for f in chosen if f.ranks is not None), RANKS)
    return Crew(ranks, 2 if any(f.hosts for f in chosen) else 1)


def replicas(config: Mapping[str, Any], ranks: int) -> int:
    size = config["zero_optimization"].get("mics_shard_size", ranks)
    return ranks // size


def tolerance(precision: Precision, features: Collection[Feature]) -> float:
    """The largest that is stated, times all amplifications."""
    bound, factor = precision.tolerance, 1.0
    half = precision.half or any(feature.plain.get("wire") is torch.bfloat16 for feature in features)
    for feature in features:
        bound = max(bound, feature.tolerance, feature.half if half else 0.0)
        factor *= feature.amplifies
    return bound * factor

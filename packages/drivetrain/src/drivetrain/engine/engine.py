"""The engine: one model in training. It keeps the count of steps and delegates everything else.

A step, managed (the default): for each of ``gradient_accumulation_steps`` micro-batches call forward, `backward` and
`step`; `step` acts on the last one. `train_batch` does all of that. Whatever the mode, gradients add up from one
optimizer step to the next over every backward pass, and plain ``loss.backward()`` works in place of
``engine.backward(loss)``, which besides divides the loss by the number of micro-batches and multiplies it by the loss
scale.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from drivetrain.comm import Ledger, Mesh, all_reduce
from drivetrain.engine.accumulation import Accumulation, Items
from drivetrain.engine.assemble import Given, MakeOptimizer, MakeScheduler, Parts, assemble
from drivetrain.engine.checkpoint import Exported, ExportOptions, LoadedCheckpoint, SaveOptions
from drivetrain.engine.config import Config
from drivetrain.engine.data import Collate, RepeatingLoader
from drivetrain.engine.garbage import GarbageCollection
from drivetrain.engine.nested import evaluating, listed, loss_of, map_tensors, to_device
from drivetrain.engine.optimizers import Parameters
from drivetrain.engine.persist import Persistence
from drivetrain.engine.phases import Phases
from drivetrain.engine.record import Counters, StepRecord
from drivetrain.engine.seeds import Gradients, Outputs, seeds
from drivetrain.engine.snapshot import LoadParts
from drivetrain.zero import (
    CompiledModule,
    CompileOptions,
    CompileReport,
    ParameterAccess,
    ShardedOptimizer,
    StateKind,
    Synchronous,
    TensorSource,
    adopt,
    compile_sharded,
    gathered,
    resident,
)


def initialize(
    model: nn.Module,
    config: Config | Mapping[str, Any] | str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    lr_scheduler: LRScheduler | MakeScheduler | None = None,
    model_parameters: Parameters | None = None,
    training_data: Dataset[Any] | None = None,
    collate_fn: Collate | None = None,
    weights: TensorSource | None = None,
    mesh: Mesh | None = None,
) -> Engine:
    """Make an engine that trains ``model`` as ``config`` says. Collective: every rank calls it.

    Args:
        model: any module. Its parameters are sharded in place, and start from rank 0's values on every rank.
        config: a dict, the path of a JSON file, base64 text, or what `drivetrain.engine.config.load` returned.
        optimizer: takes the place of the configured one: an optimizer over the model's parameters, or a function
            that makes one from them.
        lr_scheduler: takes the place of the configured one: a scheduler of the optimizer, or a function that makes one
            from it.
        model_parameters: what the optimizer trains: parameters, or parameter groups. All that require gradients by
            default.
        training_data: a data set; the engine's ``train_loader`` splits it over the ranks.
        collate_fn: makes a micro-batch from a list of samples.
        weights: where parameters and persistent buffers are read from by name, each rank its own slices, straight into
            shards: `SafetensorsSource`, for one. The model may then be on the meta device, and larger than any rank.
        mesh: the ranks; by default all of them, along the axis ``shard``.

    Raises:
        ConfigError: the configuration, with every problem in it.
        TypeError, ValueError: model, optimizer, data or mesh do not go with it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            "initialize takes a torch.nn.Module and then a configuration; the first one given is of type "
            f"{type(model).__name__}"
        )
    given = Given(
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        parameters=model_parameters,
        training_data=training_data,
        collate_fn=collate_fn,
        weights=weights,
    )
    return Engine(assemble(model, config, given, mesh))


def _backend(name: str) -> Literal["eager", "inductor"]:
    if name not in ("eager", "inductor"):
        raise ValueError(f'the backend of engine.compile must be "inductor" or "eager", got {name!r}')
    return "eager" if name == "eager" else "inductor"


class Engine:
    """A model in training. Made by `drivetrain.engine.initialize`.

    Attributes:
        module: the model; its parameters are sharded.
        optimizer: the sharded optimizer, or None.
        schedule: the learning-rate schedule, or None.
        train_loader: the training data in micro-batches, or None.
        config, mesh, batch, precision: as resolved.
        access: reads and writes master weights, gradients and optimizer state of single parameters, split or not, as
            in ``engine.access.gradient.full(p)``; see `drivetrain.zero.ParameterAccess`.
        last_step: what the last `train_batch` did.
        counters: steps and samples so far.
    """

    def __init__(self, parts: Parts) -> None:
        self.config = parts.config
        self.mesh = parts.mesh
        self.batch = parts.batch
        self.precision = parts.precision
        self.sharded = parts.sharded
        self.module: nn.Module = parts.sharded.module
        self.optimizer = parts.optimizer
        self.schedule = parts.schedule
        self.train_loader = parts.loader
        self.observer = parts.observer
        self.timers = parts.observer.timers
        self.access = ParameterAccess(parts.sharded, parts.optimizer)
        self.counters = Counters()
        own = parts.config.drivetrain
        self._garbage = GarbageCollection(
            managed=own.garbage_collection == "managed", interval=own.garbage_collection_interval
        )
        self._accumulation = Accumulation(parts.batch.accumulation, managed=parts.config.managed_gradient_accumulation)
        self._items = Items(parts.sharded.ranks.everyone)
        self._held = False  # inside no_sync
        self._persistence = Persistence(parts)
        self._phases = Phases(parts.sharded, parts.optimizer, parts.mesh.device, parts.mesh.world.rank)
        self._batches: Iterator[Any] | None = None
        self.last_step: StepRecord | None = None
        self.sharded.hooks.backward.check = self._check_scaled
        self._compiled: CompiledModule | None = None
        if self.config.compile.deepcompile:
            self.compile()

    # querying ---------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def rank(self) -> int:
        return self.mesh.world.rank

    @property
    def world_size(self) -> int:
        return self.mesh.world.size

    @property
    def ledger(self) -> Ledger:
        """Counts of all collectives of this engine."""
        return self.mesh.ledger

    @property
    def global_steps(self) -> int:
        """Optimizer steps attempted so far."""
        return self.counters.global_steps

    @property
    def loss_scale(self) -> float:
        return self.optimizer.scaler.scale if self.optimizer else 1.0

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group, for the coming step."""
        return [float(group["lr"]) for group in self._need_optimizer().param_groups]

    @property
    def closes_step(self) -> bool:
        """Whether the current micro-batch is the last one before an update."""
        return self._accumulation.closes

    def _need_optimizer(self) -> ShardedOptimizer:
        if self.optimizer is None:
            raise RuntimeError(
                'this engine has no optimizer: add an "optimizer" section to the configuration or pass optimizer= to '
                "initialize"
            )
        return self.optimizer

    def train(self, mode: bool = True) -> Engine:
        """Set the module's training mode."""
        if not mode:
            self._garbage.boundary()
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the module's evaluation mode."""
        return self.train(False)

    # training ---------------------------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.forward(*inputs, **kwargs)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, under autocast where the configuration says so.

        Raises:
            RuntimeError: whatever the module raises; where dtypes do not go together, with those of the inputs. Or it
                is called under a ``torch.autocast`` that contradicts the configuration.
        """
        self.sharded.closes_step = self.closes_step and not self._held
        inputs, kwargs = self.precision.cast(inputs), self.precision.cast(kwargs)
        with self._garbage.held(), self.timers.measure("forward"), self.precision.forward_context(self.rank):
            try:
                return self.module(*inputs, **kwargs)
            except RuntimeError as error:
                text = self._dtype_text(error, (inputs, kwargs))
                if text is None:
                    raise
                raise RuntimeError(text) from error

    def _dtype_text(self, error: RuntimeError, inputs: object) -> str | None:
        """An error about dtypes, with what came in and what the parameters compute in; None if it is about others."""
        if type(error) is not RuntimeError or "type" not in str(error):
            return None
        ours = {bucket.dtype for bucket in self.sharded.buckets}
        found: set[torch.dtype] = set()
        map_tensors(inputs, lambda tensor: found.add(tensor.dtype))
        strange = {dtype for dtype in found - ours if dtype.is_floating_point}
        if not strange:
            return None
        cast = ', or set "drivetrain": {"auto_cast": true}' if self.precision.compute is not None else ""
        return (
            f"rank {self.rank}: {error}. Parameters compute in {listed(ours)}, and inputs came in {listed(strange)}: "
            f"convert them before they reach the engine{cast}"
        )

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss (or outputs) by the loss scale, for ``engine.scale(loss).backward()``.

        The loss may depend on several engines: one of them scales it, and the backward pass tells the others.

        Raises:
            RuntimeError: it is scaled already.
        """
        return self.sharded.scaled(loss, self.loss_scale) if self._scales else loss

    @property
    def _scales(self) -> bool:
        """Losses must carry a loss scale."""
        return self.optimizer is not None and self.optimizer.scaler.active

    @overload
    def backward(
        self,
        loss: torch.Tensor,
        *,
        gradient: None = None,
        weight: float | torch.Tensor | None = None,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> torch.Tensor: ...

    @overload
    def backward(
        self,
        loss: Outputs,
        *,
        gradient: Gradients,
        weight: float | torch.Tensor | None = None,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> None: ...

    def backward(
        self,
        loss: Outputs,
        *,
        gradient: Gradients | None = None,
        weight: float | torch.Tensor | None = None,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> torch.Tensor | None:
        """Add the gradients of ``loss`` to what has accumulated.

        It may be called several times in a step, for parts of a loss or for several losses, in any order. The loss may
        depend on other engines too: their gradients accumulate in the same pass, each with its own loss scale.

        Args:
            loss: a scalar with a graph. With ``gradient`` any output, or a list of outputs.
            gradient: the gradient of ``loss``, in its shape, where something else than a loss says what it is. A list
                for a list; None in it stands for 1, beside a scalar.
            weight: how many items, such as tokens, ``loss`` is the sum over. The step then uses the gradient of the
                mean over the items of all micro-batches and ranks, however they are spread; up to the step, gradients
                are those of the sum. For all losses of a step or for none.
            retain_graph: keep the graph for another backward pass.
            scale_wrt_gas: divide the loss by ``gradient_accumulation_steps`` first, so that the gradients of a step
                are a mean over micro-batches. The same for a gradient that is given.

        Returns:
            The loss so divided; None with ``gradient``.

        Raises:
            TypeError, ValueError: ``loss`` is no such tensor, or the gradients do not go with the outputs.
            RuntimeError: other losses of this step had a weight and this one has none, or the other way round; or it
                has one and depends on other engines that train.
        """
        share = self.batch.accumulation if scale_wrt_gas and weight is None else 1
        self._items.require(weight)
        if gradient is not None:
            self._backward_from(loss, gradient, weight, share, retain_graph=retain_graph)
            return None
        if not isinstance(loss, torch.Tensor):
            several = isinstance(loss, (tuple, list))
            hint = "add losses up; outputs need gradient=" if several else "loss.item() and float(loss) have no graph"
            raise TypeError(
                f"rank {self.rank}: engine.backward takes the loss tensor, got a {type(loss).__name__} ({hint})"
            )
        if loss.numel() != 1 or not loss.requires_grad:
            hint = "" if loss.numel() == 1 else "; outputs that are no loss need gradient="
            raise ValueError(
                f"rank {self.rank}: engine.backward takes a scalar loss that depends on trained parameters, got a "
                f"tensor of shape {tuple(loss.shape)} with requires_grad={loss.requires_grad}{hint}"
            )
        if share > 1:
            loss = loss / share
        with self._pass_over([loss], weight):
            self.scale(loss).backward(retain_graph=retain_graph)
        if weight is None:
            self.observer.loss(loss)
        else:
            self._items.saw(loss)
        return loss

    @contextmanager
    def _pass_over(self, outputs: Sequence[torch.Tensor], weight: float | torch.Tensor | None) -> Iterator[None]:
        """What goes with every backward pass that the engine is asked for."""
        if weight is not None and self.sharded.others_behind(outputs):
            raise RuntimeError(
                f"rank {self.rank}: a loss with weight= depends on other engines that train, whose steps do not know "
                "of the weight; divide the loss by the number of all items yourself, or detach what they made"
            )
        self.sharded.check_backward()  # before the graph is touched, so that it can be walked later
        self.sharded.closes_step = self.closes_step and not self._held
        try:
            with self._garbage.held(), self.timers.measure("backward"):
                yield
        except Exception:
            if not self.sharded.holds_gradients:  # those of the step went with the pass that failed
                self._items.restart()
            raise
        self._items.add(weight)

    def _backward_from(
        self,
        outputs: Outputs,
        gradient: Gradients,
        weight: float | torch.Tensor | None,
        share: int,
        *,
        retain_graph: bool,
    ) -> None:
        scale = self.loss_scale
        try:
            tensors, gradients = seeds(outputs, gradient, share=share, scale=scale)
        except (TypeError, ValueError) as error:
            raise type(error)(f"rank {self.rank}: {error}") from None
        with self._pass_over(tensors, weight), self.sharded.announced(tensors, scale):
            torch.autograd.backward(tensors, gradients, retain_graph=retain_graph)

    def _check_scaled(self, carried: float | None) -> None:
        if self._scales and carried is None:
            raise RuntimeError(
                f"rank {self.rank}: with fp16 the loss must carry the loss scale, or gradients underflow: call "
                "engine.backward(loss), or engine.scale(loss).backward()"
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last one before an update; the same as ``closes_step``."""
        return self.closes_step

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say by hand whether the current micro-batch, and those after it, close an optimizer step.

        `step` then acts if and only if they do, however many there were. The loss is still divided by
        ``gradient_accumulation_steps`` (see ``scale_wrt_gas``). None goes back to counting, from the last update on.

        Raises:
            RuntimeError: ``managed_gradient_accumulation`` is false, where every `step` is an update.
        """
        if not self._accumulation.managed:
            raise RuntimeError(
                f"rank {self.rank}: there is no boundary to set where managed_gradient_accumulation is false: every "
                "engine.step() is an update. Call it where one is due, or set the key to true"
            )
        self._accumulation.boundary = is_boundary

    def zero_grad(self) -> None:
        """Forget the gradients accumulated so far; every rank does so. The step begins anew."""
        self.sharded.zero_grad()
        self._restart()

    def _restart(self) -> None:
        """The next micro-batch is the first one of a step."""
        self._accumulation.restart()
        self._items.restart()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context do not reduce gradients at stages 0 and 1; see `ShardedModule.no_sync`."""
        held, self._held = self._held, True
        try:
            with self.sharded.no_sync():
                yield
        finally:
            self._held = held

    def step(self) -> StepRecord:
        """Close a micro-batch, and update the parameters if it was the last one of its step. Collective.

        Raises:
            RuntimeError: there is no optimizer, this is inside `no_sync`, no rank has a gradient, or states are away.
            NonFiniteGradientError: steps were skipped too often in a row.
        """
        optimizer = self._need_optimizer()
        if self._held:
            raise RuntimeError(
                f"rank {self.rank}: engine.step() inside no_sync() would update from gradients that were not reduced; "
                "call it after the block"
            )
        self.sharded.moved.require("engine.step()")
        counters = self.counters
        index = counters.applied_steps
        if not self.closes_step:
            self._count_micro_batch()
            return StepRecord(
                step=index,
                stepped=False,
                reason=self._accumulation.count(),
                grad_norm=None,
                clip_coefficient=1.0,
                lr=self.learning_rates[0],
                loss_scale=self.loss_scale,
            )
        if self.schedule is not None:
            self.schedule.apply(index)
        lr = self.learning_rates[0]
        with self._garbage.held(), self.timers.measure("step"):
            result = optimizer.step(divisor=self._divisor())
        self._count_micro_batch()
        self._restart()
        counters.global_steps += 1
        counters.skipped_steps += not result.stepped
        if self.schedule is not None:
            self.schedule.apply(counters.applied_steps)
        record = StepRecord(
            step=index,
            stepped=result.stepped,
            reason=result.reason,
            grad_norm=result.grad_norm,
            clip_coefficient=result.clip_coefficient,
            lr=lr,
            loss_scale=result.loss_scale,
        )
        self.observer.stepped(self.counters, record)
        self._garbage.stepped()
        return record

    def _divisor(self) -> float:
        """What the gradients of this step are to be divided by: the items that the loss is a mean over, if counted."""
        items = self._items.everywhere()
        if items is None:
            return 1.0
        if self._items.mean_loss is not None:
            self.observer.loss(self._items.mean_loss)
        averaged = self.sharded.policy.reduce_op == "mean"
        return items / (self.sharded.ranks.everyone.size if averaged else 1)

    def _count_micro_batch(self) -> None:
        self.counters.micro_steps += 1
        self.counters.global_samples += self.batch.micro * self.sharded.ranks.everyone.size

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One whole optimizer step: all its micro-batches, then the update. Collective.

        Args:
            data_iter: gives micro-batches; None goes on through ``train_loader``, epoch after epoch. A mapping becomes
                keyword arguments of the module, a tuple or list its positional ones, anything else its only one.
                The module returns the loss, or something whose ``loss`` or first item it is.

        Returns:
            The mean loss over micro-batches and ranks. What the update did is in ``last_step``.

        Raises:
            StopIteration: ``data_iter`` is at its end, and so is the last step.
            RuntimeError: it ended in the middle of a step; there is no training data; the boundary is set by hand.
            TypeError, ValueError: it is no iterator; the module returned no loss.
        """
        if self._accumulation.boundary is not None:
            raise RuntimeError(
                f"rank {self.rank}: train_batch counts its micro-batches itself; call "
                "set_gradient_accumulation_boundary(None) first, or write the loop out"
            )
        batches = data_iter if data_iter is not None else self._training_batches()
        if not isinstance(batches, Iterator):
            raise TypeError(
                f"rank {self.rank}: train_batch takes an iterator over micro-batches, found something of type "
                f"{type(batches).__name__}; make an iterator with iter(...) and pass the same one every time"
            )
        losses: list[torch.Tensor] = []
        with self._garbage.held():
            for done in range(self.batch.accumulation):
                loss = loss_of(self.call_with(self._next(batches, done)))
                losses.append(loss.detach().float())
                self.backward(loss)
                self.last_step = self.step()
            return self._mean(torch.stack(losses).mean())

    def _next(self, batches: Iterator[Any], done: int) -> Any:
        try:
            return next(batches)
        except StopIteration as end:
            if done == 0:
                raise
            raise RuntimeError(
                f"rank {self.rank}: data_iter ended after {done} of the {self.batch.accumulation} micro-batches of a "
                "step; give it as many as gradient_accumulation_steps says, or let it repeat"
            ) from end

    def call_with(self, batch: Any) -> Any:
        """Run the module on a batch, moved to the device."""
        moved = to_device(batch, self.device)
        if isinstance(moved, Mapping):
            return self.forward(**moved)
        if isinstance(moved, (tuple, list)):
            return self.forward(*moved)
        return self.forward(moved)

    @torch.no_grad()
    def eval_batch(self, batch: Any) -> torch.Tensor:
        """The loss of one batch in evaluation mode, averaged over ranks. Collective."""
        self._garbage.boundary()
        with self._garbage.held(), evaluating(self.module):
            return self._mean(loss_of(self.call_with(batch)).float())

    @contextmanager
    def generation(self) -> Iterator[None]:
        """The whole module on every rank, in evaluation mode and without gradients: for generating. Collective.

        Forward passes inside need nothing from other ranks, so that each rank may make as many as its own sequences
        take, at every stage. All ranks enter, and go on together after it. It may stand anywhere: between steps, or
        between forward and backward. While it lasts each rank holds all parameters in the dtype that they compute in.

            with engine.generation():
                tokens = engine.module.generate(prompt, max_new_tokens=200)

        Raises:
            RuntimeError: at the end, a parameter was changed in place; see `gathered` for that.
        """
        with resident(self.sharded), torch.no_grad(), evaluating(self.module):
            yield

    def gathered(
        self,
        parameters: nn.Parameter | nn.Module | Iterable[nn.Parameter],
        *,
        modifier_rank: int | None = None,
    ) -> AbstractContextManager[None]:
        """Keep ``parameters`` whole within the context, to look at or to change them. Collective.

        Works at every stage. What is written to them in place is kept: that of ``modifier_rank``, or without it what
        all ranks have written alike. See `drivetrain.zero.gathered`.
        """
        return gathered(self.sharded, parameters, modifier_rank=modifier_rank)

    def adopt(self, settings: Mapping[str, Any] | None = None) -> list[str]:
        """Take over and train parameters that were added to the module, or put in the place of others. Collective.

        For adapters, heads and resized embeddings of a module that is being trained already. Between steps, when all
        ranks have changed it alike; the next forward pass would refuse them otherwise. They start from rank 0's values,
        and are sharded, saved and exported as if they had been there from the start.

        Args:
            settings: the new parameters form a group of the optimizer with these settings. None: they join its first
                group. Those that took the place of others, under their names, are in the group of these.

        Returns:
            The names of the new parameters.

        Raises:
            ValueError: ranks have different modules, or a new parameter has no values; or a group that a scheduler of
                torch does not know.
            RuntimeError: between backward and step, inside `gathered`, or with compile.deepcompile.
        """
        if self.optimizer is None:
            return list(adopt(self.sharded).joined)
        if settings is not None and self.schedule is not None:
            self.schedule.require_new_groups()
        return list(self.optimizer.adopt(settings).joined)

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Optimize more parameters of the module: ``params``, with settings of their own. All ranks do the same.

        A schedule that the configuration names moves the group's learning rate as those of the others, from where it
        starts.

        Raises:
            ValueError: a parameter is not the module's, or in a group already; or a scheduler of torch is in charge.
            RuntimeError: there is no optimizer.
        """
        if self.schedule is not None:
            self.schedule.require_new_groups()
        self._need_optimizer().add_param_group(group)

    def _mean(self, value: torch.Tensor) -> torch.Tensor:
        total = value.reshape(1).clone()
        all_reduce(total, self.sharded.ranks.everyone, op="mean", purpose="mean of the loss").wait()
        return total[0]

    def _training_batches(self) -> Iterator[Any]:
        if self._batches is None:
            if self.train_loader is None:
                raise RuntimeError("this engine has no training data: pass training_data= to initialize, or data_iter")
            self._batches = iter(RepeatingLoader(self.train_loader))
        return self._batches

    # compiling --------------------------------------------------------------------------------------------------------

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the module at its next forward pass, with its communication in the graphs. Collective.

        `initialize` does it where the configuration asks for it; call it before the first forward pass for another
        backend. `compile_report` tells what became of it.

        Args:
            backend: ``inductor``, or ``eager`` to run the graphs operation by operation.
            compile_kwargs: arguments of torch.compile; only ``dynamic`` can be chosen.

        Raises:
            RuntimeError: ``compile.deepcompile`` is off, or the module has been compiled and called already.
            ValueError: there is no such backend, or another argument.
        """
        section = self.config.compile
        if not section.deepcompile:
            raise RuntimeError(
                'engine.compile() needs "compile": {"deepcompile": true} in the configuration. Without it, call '
                "torch.compile on blocks of the model before initialize"
            )
        chosen = dict(compile_kwargs or {})
        dynamic = chosen.pop("dynamic", None)
        if chosen:
            raise ValueError(
                f"engine.compile takes only 'dynamic' of the arguments of torch.compile, got {', '.join(chosen)}: the "
                "whole forward pass becomes one graph, and inductor is given its pieces"
            )
        if self._compiled is not None and self._compiled.called:
            raise RuntimeError(
                "the module has been compiled and called already; call engine.compile before the first forward pass"
            )
        options = CompileOptions(
            backend=_backend(backend),
            dynamic=dynamic,
            synchronous=Synchronous(
                before_gather=section.sync_before_allgather,
                after_gather=section.sync_after_allgather,
                before_reduction=section.sync_before_reduce,
                after_reduction=section.sync_after_reduce,
            ),
            tell=section.debug_log,
        )
        if self._compiled is not None:
            self._compiled.remove()
        self._compiled = compile_sharded(self.sharded, options)

    @property
    def compile_report(self) -> CompileReport | None:
        """What became of compiling so far; None where it was not asked for."""
        return None if self._compiled is None else self._compiled.report

    # state ------------------------------------------------------------------------------------------------------------

    def save(
        self,
        directory: str | Path,
        tag: str | None = None,
        *,
        client_state: object = None,
        options: SaveOptions | None = None,
    ) -> Path:
        """Save everything needed to go on, loadable at any stage and world size. Collective.

        Args:
            directory: the run's folder of checkpoints.
            tag: the checkpoint's name; None means ``global_step<n>``.
            client_state: what you want back at load: tensors and plain values.
            options: see `SaveOptions`.

        Raises:
            RuntimeError: in the middle of an accumulation, or between backward and step; gradients would be lost.
            CheckpointError: it could not be written; what was there before is untouched.
        """
        if self._accumulation.within_step:
            raise RuntimeError(
                f"rank {self.rank}: save in the middle of an accumulation (micro-batch {self._accumulation.done} of "
                f"{self.batch.accumulation}) would lose its gradients; save after the step that updates"
            )
        if self.sharded.holds_gradients:
            raise RuntimeError(
                f"rank {self.rank}: save between backward and step would lose the gradients; save after engine.step(), "
                "or drop them first with engine.zero_grad()"
            )
        self._garbage.boundary()
        with self._garbage.held():
            return self._persistence.save(directory, tag, self.counters, client_state, options)

    def load(
        self,
        directory: str | Path,
        tag: str | None = None,
        *,
        parts: LoadParts | None = None,
        strict: bool = True,
    ) -> LoadedCheckpoint:
        """Load a checkpoint that was saved at any stage and world size. Collective.

        Args:
            directory: as given to `save`.
            tag: which checkpoint; None takes the latest.
            parts: what to load besides the module; all of it by default.
            strict: raise if anything asked for is missing or has another shape, or if the checkpoint holds weights
                that the module has no place for.

        Returns:
            The report of what was filled, missing and unexpected, with the client state.

        Raises:
            CheckpointNotFoundError: nothing is there.
            CheckpointError: it is damaged, or does not fit; ``strict`` decides what does not fit. Unless a file was
                found damaged on the way, nothing has changed.
        """
        parts = parts or LoadParts()
        loaded = self._persistence.load(directory, tag, parts, strict=strict)
        if parts.data:
            self._batches = None
        self._restart()
        if parts.schedule:
            self.counters = Counters(**loaded.metadata["counters"])
            if self.schedule is not None:
                self.schedule.apply(self.counters.applied_steps)
            self.observer.sinks.rewind(self.counters.global_steps)
        return loaded

    def export(
        self, directory: str | Path, *, options: ExportOptions | None = None, trainable_only: bool = False
    ) -> Exported:
        """Write the whole weights as safetensors that ``transformers`` loads. Collective; rank 0 writes.

        Weights are written in the dtype that the model computes in unless ``options.dtype`` says otherwise. A module
        with a ``config`` of its own (as models of transformers have) gets its ``config.json``.

        Args:
            directory: where to.
            options: see `ExportOptions`.
            trainable_only: only parameters that require gradients, such as adapters; no buffers.
        """
        return self._persistence.export(directory, options, trainable_only=trainable_only)

    def offload_states(
        self,
        include: Collection[StateKind | str] | None = None,
        device: torch.device | str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states from the device to host memory, to make room for another phase. No communication.

        Until `reload_states` the engine refuses in words what needs them: forward and backward passes, steps, saving,
        loading and access. Their memory on the device is free. Works at every stage, also between backward passes. On
        an engine whose states are in host memory already this does nothing, and says so once.

        Args:
            include: kinds of states (`drivetrain.zero.StateKind`, or their names): optim_states, hp_params (master
                weights), lp_params (parameters as they compute), lp_grads (reduced gradients), contiguous_grad_buffer
                (gradients that accumulate). All by default. Where parameters are their own masters, they are lp_params.
            device: must be the CPU.
            pin_memory: use pinned host memory.
            non_blocking: return before the copies are made; they are in order with what follows on the device.

        Raises:
            ValueError: there is no such kind, or device.
            RuntimeError: inside a `gathered` context or a backward pass, or the host has no room.
        """
        self._phases.offload(include, device, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back all that `offload_states` has moved, to the last bit."""
        self._phases.reload(non_blocking=non_blocking)

    def close(self) -> None:
        """Close the files that metrics go to, and give back what states were offloaded to. It cannot train further."""
        self.observer.sinks.close()
        for store in self.sharded.stores.all():
            store.close()

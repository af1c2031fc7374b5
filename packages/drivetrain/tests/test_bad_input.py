"""What people do wrong with an engine, each with the whole text that they get to read.

Wrong configurations are in test_config_wrong.py. Here it is what reaches the engine besides: models, optimizers, data,
losses, checkpoints, ranks. In an expected text "..." stands for anything, "{folder}" for the case's own folder,
"{rank}" for the rank that is told. Cases of one process are tests of their own; those of two ranks share one pair.
"""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from drivetrain.comm import Mesh, init, shutdown
from drivetrain.engine import MODULE_ONLY, CheckpointError, CheckpointNotFoundError, ConfigError, Engine, initialize
from drivetrain.zero import NonFiniteGradientError
from drivetrain_testkit import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    """Returns its loss if it is given targets, else its predictions in what `wrap` makes of them."""

    def __init__(self, *, blocks: int = 2, out: int = 1, wrap: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, out)
        self.wrap = wrap

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.wrap(self.head(x)) if y is None else (self.head(x) - y).square().mean()


X, Y = torch.linspace(-1, 1, 16).view(2, 8), torch.ones(2, 1)
SAMPLES = TensorDataset(torch.linspace(-1, 1, 48).view(6, 8), torch.ones(6, 1))
NO_OPTIMIZER: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}
CONFIG: dict[str, Any] = {**NO_OPTIMIZER, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}


def engine_of(model: nn.Module | None = None, *, given: dict[str, Any] | None = None, **config: Any) -> Engine:
    return initialize(Net() if model is None else model, {**CONFIG, **config}, **(given or {}))


def stepped(engine: Engine) -> Engine:
    engine.backward(engine(X, Y))
    engine.step()
    return engine


def saved(folder: Path, engine: Engine | None = None) -> Path:
    """A run with one checkpoint, global_step1."""
    stepped(engine or engine_of()).save(folder / "run")
    return folder / "run"


def in_groups(model: Net, *names: str) -> dict[str, Any]:
    """Parameter groups of these parts of a model, in this order."""
    return {"model_parameters": [{"params": list(model.get_submodule(name).parameters())} for name in names]}


class Mistake(NamedTuple):
    do: Callable[..., object]
    error: type[Exception]
    text: str

    @property
    def name(self) -> str:
        return self.do.__name__


ALONE: list[Mistake] = []
"""One process: a function of the case's folder."""
TOGETHER: list[Mistake] = []
"""Two ranks: a function of the rank and of the case's folder, which both ranks share."""


def mistake(
    error: type[Exception], text: str, *, of: list[Mistake] = ALONE
) -> Callable[[Callable[..., object]], Callable[..., object]]:
    def register(do: Callable[..., object]) -> Callable[..., object]:
        of.append(Mistake(do, error, text))
        return do

    return register


def assert_fits(found: str, expected: str, folder: Path, rank: int = 0) -> None:
    expected = expected.replace("{folder}", str(folder)).replace("{rank}", str(rank))
    pattern = ".*".join(re.escape(part) for part in expected.split("..."))
    assert re.fullmatch(pattern, found, re.DOTALL), f"\nfound:    {found}\nexpected: {expected}"


# Models ---------------------------------------------------------------------------------------------------------------


@mistake(TypeError, "initialize takes a torch.nn.Module and then a configuration; the first one given is of type dict")
def configuration_before_model(folder: Path) -> None:
    initialize(CONFIG, Net())  # type: ignore[arg-type]


@mistake(ValueError, "ReLU has no parameters to shard")
def a_model_without_parameters(folder: Path) -> None:
    engine_of(nn.ReLU())


@mistake(
    ValueError,
    "6 parameters and buffers are on the meta device and have no data: 'blocks.0.inner.weight', 'blocks.0.inner.bias', "
    "'blocks.1.inner.weight', 'blocks.1.inner.bias', 'head.weight', 'head.bias'. Pass values= (a source to read them "
    "from) or initialize= (a function that is called with each module that has some), or give them values before "
    "sharding",
)
def a_model_on_the_meta_device(folder: Path) -> None:
    with torch.device("meta"):
        model = Net()
    engine_of(model)


@mistake(
    ValueError,
    "no parameter of Net requires gradients, so there is nothing to optimize; unfreeze some before initialize, or "
    "leave the optimizer out",
)
def a_frozen_model_with_an_optimizer(folder: Path) -> None:
    engine_of(Net().requires_grad_(False))


@mistake(ValueError, "Net, or a part of it, has been sharded before; build a new model for each engine")
def one_model_in_two_engines(folder: Path) -> None:
    model = Net()
    engine_of(model)
    engine_of(model)


@mistake(ValueError, "Sequential, or a part of it, has been sharded before; build a new model for each engine")
def a_part_of_a_model_in_another_engine(folder: Path) -> None:
    model = Net()
    engine_of(model)
    engine_of(nn.Sequential(model.blocks[0], nn.Linear(8, 1)))


@mistake(
    ValueError,
    "the model is wrapped in DistributedDataParallel, which would reduce gradients a second time; hand over the module "
    "inside it (its attribute .module)",
)
def a_model_wrapped_for_ddp(folder: Path) -> None:
    init()
    engine_of(nn.parallel.DistributedDataParallel(Net()))


@mistake(
    RuntimeError,
    "rank 0: parameter 'head.weight' was frozen when the model was sharded and has requires_grad=True now, and it is "
    "kept as int8 blocks only (zero_quantized_nontrainable_weights, Policy.frozen_rule), which cannot be trained. "
    "Unfreeze it before drivetrain shards the model, or switch that off",
)
def unfreezing_what_is_kept_in_int8(folder: Path) -> None:
    model = Net()
    model.head.weight.requires_grad_(False)
    zero = {"stage": 3, "zero_quantized_nontrainable_weights": True, "stage3_param_persistence_threshold": 0}
    engine = engine_of(model, zero_optimization=zero)
    model.head.weight.requires_grad_(True)
    engine(X, Y)


CHANGED = (
    " after the model was sharded, and no step would update it. Do what replaces parameters (module.to, .half, .cuda, "
    "tying, an assignment to .data) before drivetrain shards the model; change values in place, under torch.no_grad. A "
    "new parameter in the place of an old one is taken over by engine.adopt() (drivetrain.zero.adopt)."
)


@mistake(
    RuntimeError,
    "rank 0: parameter 'blocks.0.inner.weight' was given other memory (now torch.float16 of shape (8, 8))" + CHANGED,
)
def another_dtype_after_sharding(folder: Path) -> None:
    engine = engine_of()
    engine.module.half()
    engine(X.half(), Y.half())


@mistake(
    RuntimeError, "rank 0: parameter 'head.weight' was given other memory (now torch.float32 of shape (1, 8))" + CHANGED
)
def an_assignment_to_data_after_sharding(folder: Path) -> None:
    model = Net()
    engine = engine_of(model)
    model.head.weight.data = torch.zeros(1, 8)
    engine(X, Y)


@mistake(
    RuntimeError,
    "rank 0: parameter 'blocks.1.inner.weight' was replaced by another object (now torch.float32 of shape (8, 8))"
    + CHANGED,
)
def tying_after_sharding(folder: Path) -> None:
    model = Net()
    engine = engine_of(model)
    model.blocks[1].inner.weight = model.blocks[0].inner.weight
    engine(X, Y)


@mistake(
    RuntimeError,
    "rank 0: parameter 'blocks.0.inner.weight' was replaced by another object (now torch.float32 of shape (8, 8))"
    + CHANGED,
)
def loading_weights_by_assignment(folder: Path) -> None:
    engine = engine_of()
    engine.module.load_state_dict(Net().state_dict(), assign=True)
    engine(X, Y)


COPIED = (
    "a module that drivetrain has sharded cannot be pickled or copied: its parameters are parts of buckets. Save it "
    "with engine.save or engine.export; copy or pickle the model before it is sharded."
)


@mistake(TypeError, COPIED)
def torch_save_of_the_module(folder: Path) -> None:
    torch.save(engine_of().module, io.BytesIO())


@mistake(TypeError, COPIED)
def a_deep_copy_of_the_module(folder: Path) -> None:
    copy.deepcopy(engine_of().module)


# Optimizers and schedules ---------------------------------------------------------------------------------------------


@mistake(ValueError, "6 of the 6 parameters in SGD do not belong to the sharded Net")
def an_optimizer_of_another_model(folder: Path) -> None:
    engine_of(given={"optimizer": torch.optim.SGD(Net().parameters(), lr=0.1)})


@mistake(TypeError, "the function given as optimizer= returned something of type NoneType, not a torch.optim.Optimizer")
def a_function_that_makes_no_optimizer(folder: Path) -> None:
    engine_of(given={"optimizer": lambda parameters: None})


@mistake(
    ValueError,
    "LBFGS evaluates the model several times within a step (it needs a closure), which sharded training does not do; "
    "use an optimizer that takes one gradient per step",
)
def an_optimizer_that_needs_a_closure(folder: Path) -> None:
    engine_of(given={"optimizer": torch.optim.LBFGS})


class Rotating(torch.optim.Optimizer):
    """Stands for any optimizer that looks at whole matrices."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Rotates nothing."""


@mistake(
    ValueError,
    "Rotating is not known to update each element on its own, and ZeRO stage 1 gives an optimizer slices of "
    "parameters. Use stage 0, or set `elementwise = True` on its class if an element's update depends on nothing but "
    "that element's own values.",
)
def an_optimizer_that_cannot_be_sharded(folder: Path) -> None:
    engine_of(given={"optimizer": Rotating}, zero_optimization={"stage": 1})


@mistake(ValueError, "SparseAdam takes sparse gradients, and an optimizer is given dense ones here; use AdamW")
def an_optimizer_of_sparse_gradients(folder: Path) -> None:
    engine_of(given={"optimizer": lambda parameters: torch.optim.SparseAdam(list(parameters))})


@mistake(
    ConfigError,
    "1 problem in the configuration\n  optimizer.params.wieght_decay = 0.1\n      unknown key\n      to fix it: did "
    "you "
    'mean "weight_decay"?',
)
def an_argument_that_the_optimizer_does_not_have(folder: Path) -> None:
    engine_of(optimizer={"type": "AdamW", "params": {"lr": 0.1, "wieght_decay": 0.1}})


@mistake(
    ConfigError,
    '1 problem in the configuration\n  optimizer.type = "Adan"\n      there is no optimizer of this name, here or in '
    'torch.optim\n      to fix it: did you mean "Adam"?',
)
def an_optimizer_nobody_knows(folder: Path) -> None:
    engine_of(optimizer={"type": "Adan", "params": {"lr": 0.1}})


@mistake(
    ConfigError,
    '1 problem in the configuration\n  scheduler.type = "WarmupCosine"\n      there is no scheduler of this name, '
    'here or in torch.optim.lr_scheduler\n      to fix it: did you mean "WarmupCosineLR"?',
)
def a_scheduler_nobody_knows(folder: Path) -> None:
    engine_of(scheduler={"type": "WarmupCosine", "params": {"total_num_steps": 10}})


@mistake(
    ValueError,
    'there is a learning-rate schedule but no optimizer for it: add an "optimizer" section to the configuration, or '
    "pass "
    "optimizer= to initialize",
)
def a_scheduler_without_an_optimizer(folder: Path) -> None:
    initialize(Net(), {**NO_OPTIMIZER, "scheduler": {"type": "WarmupLR", "params": {}}})


# Configuration files and the environment ------------------------------------------------------------------------------


@mistake(
    ConfigError,
    '1 problem in the configuration\n  the configuration = "{folder}/ds.json"\n      there is no such file, and the '
    "text is "
    "not URL-safe base64 of a configuration either\n      to fix it: check the path; relative paths start at the "
    "current folder, which is ...",
)
def a_configuration_that_is_not_there(folder: Path) -> None:
    initialize(Net(), folder / "ds.json")


@mistake(
    ConfigError,
    "1 problem in the configuration {folder}/ds.json\n  {folder}/ds.json:2: the configuration\n      syntax error in "
    "column 9: a colon should follow the key 'fp16'\n...",
)
def a_configuration_that_is_not_json(folder: Path) -> None:
    (folder / "ds.json").write_text('{"train_batch_size": 2,\n "fp16" {"enabled": true}}')
    initialize(Net(), folder / "ds.json")


@mistake(
    ConfigError,
    "1 problem in the configuration {folder}/ds.json\n  {folder}/ds.json:2: train_batch_size = 4\n      the key is "
    "there twice: first on line 1, again on line 2\n      to fix it: remove one of them",
)
def a_configuration_with_a_key_twice(folder: Path) -> None:
    (folder / "ds.json").write_text('{"train_batch_size": 2,\n "train_batch_size": 4}')
    initialize(Net(), folder / "ds.json")


@mistake(
    ConfigError,
    "1 problem in the configuration\n  train_batch_size\n      the batch size can't be found: neither "
    "train_batch_size nor train_micro_batch_size_per_gpu has a value\n      to fix it: give "
    "train_micro_batch_size_per_gpu (samples that fit on "
    'one rank), train_batch_size, or both; for "auto" give them as hints',
)
def no_batch_size(folder: Path) -> None:
    initialize(Net(), {})


def with_environment(do: Callable[[], object], **variables: str) -> None:
    shutdown()  # a process group that runs would be taken as it is
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        do()


@mistake(
    ValueError,
    "RANK=0 is set but WORLD_SIZE is not. Start the script with torchrun or `drivetrain run`, or unset RANK to run "
    "alone in one process.",
)
def half_of_the_environment(folder: Path) -> None:
    with_environment(engine_of, RANK="0")


@mistake(
    ValueError,
    "rank 1 of 2: MASTER_ADDR is not set, so the ranks cannot find each other. Start the script with torchrun or "
    "`drivetrain run`, or set MASTER_ADDR ...",
)
def an_environment_without_an_address(folder: Path) -> None:
    with_environment(engine_of, RANK="1", WORLD_SIZE="2")


@mistake(
    ValueError,
    "pipeline 1 x data 1 x shard 2 x sequence 1 x tensor 1 x expert 1 = 2, but the world has 1 ranks; the product must "
    "be that number",
)
def a_mesh_of_more_ranks_than_there_are(folder: Path) -> None:
    engine_of(given={"mesh": Mesh.create(init(), shard=2)})


# Inputs and losses ----------------------------------------------------------------------------------------------------


@mistake(
    RuntimeError,
    "rank 0: mat1 and mat2 must have the same dtype, but got Float and BFloat16. Parameters compute in torch.bfloat16, "
    'and inputs came in torch.float32: convert them before they reach the engine, or set "drivetrain": {"auto_cast": '
    "true}",
)
def inputs_of_another_precision(folder: Path) -> None:
    engine_of(bf16={"enabled": True})(X, Y)


@mistake(
    RuntimeError,
    "rank 0: mat1 and mat2 must have the same dtype, but got Float and Half. Parameters compute in torch.float16, and "
    'inputs came in torch.float32: convert them before they reach the engine, or set "drivetrain": {"auto_cast": true}',
)
def inputs_that_are_not_cast_to_fp16(folder: Path) -> None:
    engine_of(fp16={"enabled": True})(X, Y)


@mistake(RuntimeError, "mat1 and mat2 shapes cannot be multiplied (2x7 and 8x8)")
def inputs_of_another_shape(folder: Path) -> None:
    engine_of()(X[:, :7], Y)


@mistake(
    ValueError,
    "rank 0: engine.backward takes a scalar loss that depends on trained parameters, got a tensor of shape (2, 1) with "
    "requires_grad=True; outputs that are no loss need gradient=",
)
def backward_of_predictions(folder: Path) -> None:
    engine = engine_of()
    engine.backward(engine(X))


@mistake(
    ValueError,
    "rank 0: engine.backward takes a scalar loss that depends on trained parameters, got a tensor of shape () with "
    "requires_grad=False",
)
def backward_of_a_loss_without_a_graph(folder: Path) -> None:
    engine = engine_of()
    with torch.no_grad():
        loss = engine(X, Y)
    engine.backward(loss)


@mistake(
    TypeError,
    "rank 0: engine.backward takes the loss tensor, got a float (loss.item() and float(loss) have no graph)",
)
def backward_of_a_number(folder: Path) -> None:
    engine = engine_of()
    engine.backward(engine(X, Y).item())


@mistake(RuntimeError, "Trying to backward through the graph a second time...Specify retain_graph=True...")
def backward_twice(folder: Path) -> None:
    engine = engine_of()
    loss = engine(X, Y)
    engine.backward(loss)
    engine.backward(loss)


@mistake(
    RuntimeError,
    "rank 0: with fp16 the loss must carry the loss scale, or gradients underflow: call engine.backward(loss), or "
    "engine.scale(loss).backward()",
)
def plain_backward_in_fp16(folder: Path) -> None:
    engine = engine_of(fp16={"enabled": True, "auto_cast": True})
    engine(X, Y).backward()


# Steps ----------------------------------------------------------------------------------------------------------------


@mistake(
    RuntimeError,
    'this engine has no optimizer: add an "optimizer" section to the configuration or pass optimizer= to initialize',
)
def a_step_without_an_optimizer(folder: Path) -> None:
    stepped(initialize(Net(), NO_OPTIMIZER))


NO_GRADIENT = (
    "rank 0: step() without a gradient: no rank has run backward since the last step, or an exception stopped it, "
    "which drops the gradients of the step"
)


@mistake(RuntimeError, NO_GRADIENT)
def a_step_without_backward(folder: Path) -> None:
    engine = engine_of()
    engine(X, Y)
    engine.step()


@mistake(RuntimeError, NO_GRADIENT)
def two_steps_for_one_backward(folder: Path) -> None:
    stepped(engine_of()).step()


@mistake(RuntimeError, NO_GRADIENT)
def a_step_after_a_backward_that_failed(folder: Path) -> None:
    engine = engine_of()
    with pytest.raises(RuntimeError, match="second time"):
        backward_twice_of(engine)
    engine.step()


def backward_twice_of(engine: Engine) -> None:
    loss = engine(X, Y)
    engine.backward(loss)
    engine.backward(loss)


@mistake(
    RuntimeError,
    "rank 0: engine.step() inside no_sync() would update from gradients that were not reduced; call it after the block",
)
def a_step_inside_no_sync(folder: Path) -> None:
    engine = engine_of()
    with engine.no_sync():
        stepped(engine)


@mistake(
    RuntimeError,
    "2 parameters got no gradient on any rank in this step, the first is 'spare.weight'; use them in the loss, freeze "
    "them, or set zero_optimization.ignore_unused_parameters to true",
)
def parameters_without_use(folder: Path) -> None:
    model = Net()
    model.add_module("spare", nn.Linear(3, 3))
    stepped(engine_of(model, zero_optimization={"stage": 2, "ignore_unused_parameters": False}))


@mistake(
    NonFiniteGradientError,
    "rank 0: gradients were not finite in 20 steps in a row at loss scale 1; the first parameter concerned is "
    "'head.weight'. Lower the learning rate, check the inputs of the last batches for NaN, or clip gradients.",
)
def losses_that_are_not_numbers(folder: Path) -> None:
    engine = engine_of()
    for _ in range(20):
        engine.backward(engine(X * float("nan"), Y))
        engine.step()


# train_batch and data -------------------------------------------------------------------------------------------------


@mistake(RuntimeError, "this engine has no training data: pass training_data= to initialize, or data_iter")
def train_batch_without_data(folder: Path) -> None:
    engine_of().train_batch()


@mistake(
    TypeError,
    "rank 0: train_batch takes an iterator over micro-batches, found something of type list; make an iterator with "
    "iter(...) and pass the same one every time",
)
def train_batch_of_a_list(folder: Path) -> None:
    engine_of().train_batch([(X, Y)])  # type: ignore[arg-type]


@mistake(
    RuntimeError,
    "rank 0: data_iter ended after 2 of the 3 micro-batches of a step; give it as many as gradient_accumulation_steps "
    "says, or let it repeat",
)
def an_iterator_that_ends_within_a_step(folder: Path) -> None:
    engine_of(gradient_accumulation_steps=3).train_batch(iter([(X, Y)] * 2))


@mistake(StopIteration, "")
def an_iterator_that_ends_between_steps(folder: Path) -> None:
    engine_of().train_batch(iter([]))


@mistake(
    ValueError,
    "the module returned a tensor of shape (2, 1) where its loss was expected, a scalar: compute the loss in the "
    "module's forward, or call engine(...), engine.backward(loss) and engine.step() yourself",
)
def a_module_that_returns_predictions(folder: Path) -> None:
    engine_of().train_batch(iter([X]))


NO_LOSS = "; return the loss, or something whose 'loss' or first item it is"


@mistake(
    TypeError,
    "no loss tensor was found in what the module returned, a mapping with the keys hidden, logits" + NO_LOSS,
)
def a_module_that_returns_a_dict_without_loss(folder: Path) -> None:
    engine_of(Net(wrap=lambda x: {"logits": x, "hidden": x})).train_batch(iter([X]))


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


@mistake(
    TypeError, "no loss tensor was found in what the module returned, the dataclass Output with logits in it" + NO_LOSS
)
def a_module_that_returns_a_dataclass_without_loss(folder: Path) -> None:
    engine_of(Net(wrap=Output)).train_batch(iter([X]))


@mistake(TypeError, "no loss tensor was found in what the module returned, something of type NoneType" + NO_LOSS)
def a_module_that_returns_nothing(folder: Path) -> None:
    engine_of(Net(wrap=lambda x: None)).eval_batch(X)


@mistake(TypeError, "Net.forward() got an unexpected keyword argument 'inputs'")
def batches_with_other_names_than_the_module(folder: Path) -> None:
    engine_of().train_batch(iter([{"inputs": X, "y": Y}]))


@mistake(
    ValueError,
    "the data set has 1 samples, fewer than the 2 of one micro-batch over all ranks (micro_batch_size 2 x 1 "
    "data-parallel ranks, drop_last True); use a smaller micro-batch, or drop_last=False, or more data",
)
def less_data_than_a_batch(folder: Path) -> None:
    engine_of(given={"training_data": TensorDataset(X[:1], Y[:1])}, dataloader_drop_last=True)


@mistake(TypeError, "a generator has neither a length nor is it an IterableDataset; give it __len__")
def data_that_is_no_data_set(folder: Path) -> None:
    engine_of(given={"training_data": ((X[0], Y[0]) for _ in range(4))})


class Once(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A stream that can be read only once, as around a file or a generator."""

    def __init__(self, samples: int) -> None:
        self.left = iter([(X[0], Y[0])] * samples)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self.left


@mistake(
    ValueError,
    "the data set gave fewer samples than one micro-batch over all ranks (2) in epoch 1; a stream must start anew each "
    "time that it is iterated over",
)
def a_stream_that_is_exhausted(folder: Path) -> None:
    engine = engine_of(given={"training_data": Once(4)})
    for _ in range(3):
        engine.train_batch()


# Saving ---------------------------------------------------------------------------------------------------------------


@mistake(
    RuntimeError,
    "rank 0: save in the middle of an accumulation (micro-batch 1 of 2) would lose its gradients; save after the step "
    "that updates",
)
def saving_within_an_accumulation(folder: Path) -> None:
    stepped(engine_of(gradient_accumulation_steps=2)).save(folder)


@mistake(
    RuntimeError,
    "rank 0: save between backward and step would lose the gradients; save after engine.step(), or drop them first "
    "with engine.zero_grad()",
)
def saving_between_backward_and_step(folder: Path) -> None:
    engine = engine_of()
    engine.backward(engine(X, Y))
    engine.save(folder)


TAG = (
    " can't be the tag of a checkpoint: a tag is the name of a folder, without '/' or '\\', not starting with '.', at "
    "most 200 bytes long and not 'latest'"
)


@mistake(CheckpointError, "'step/100'" + TAG)
def a_tag_with_a_slash(folder: Path) -> None:
    engine_of().save(folder, "step/100")


@mistake(CheckpointError, "''" + TAG)
def an_empty_tag(folder: Path) -> None:
    engine_of().save(folder, "")


@mistake(CheckpointError, "the tag of a checkpoint is text, found the int 100; use str(tag)")
def a_number_as_tag(folder: Path) -> None:
    engine_of().save(folder, 100)  # type: ignore[arg-type]


@mistake(
    CheckpointError,
    "client_state['where'] is a pathlib.PosixPath, which can't be loaded again without running code from the file "
    "(...); hand over numbers, strings, tensors, and lists, tuples and dicts of them (a state_dict, say)",
)
def client_state_of_objects(folder: Path) -> None:
    engine_of().save(folder, client_state={"best": 0.5, "where": folder})


@mistake(CheckpointError, "checkpoint directory {folder}/run is a file; give the folder of the run's checkpoints")
def saving_into_a_file(folder: Path) -> None:
    (folder / "run").touch()
    engine_of().save(folder / "run")


# Loading --------------------------------------------------------------------------------------------------------------


@mistake(CheckpointNotFoundError, "checkpoint directory {folder}/run does not exist")
def loading_from_nowhere(folder: Path) -> None:
    engine_of().load(folder / "run")


@mistake(CheckpointNotFoundError, "{folder} has no file 'latest' that says what to load; no checkpoints are there")
def loading_from_an_empty_folder(folder: Path) -> None:
    engine_of().load(folder)


@mistake(
    CheckpointNotFoundError,
    "checkpoint 'global_step2' is not in {folder}/run (asked for it); checkpoints that are there: global_step1",
)
def loading_a_tag_that_is_not_there(folder: Path) -> None:
    engine_of().load(saved(folder), "global_step2")


@mistake(
    CheckpointNotFoundError,
    "{folder}/run/global_step1 is itself a checkpoint; give the folder that it lies in, {folder}/run, and "
    "'global_step1' as the tag",
)
def loading_from_the_folder_of_the_tag(folder: Path) -> None:
    engine_of().load(saved(folder) / "global_step1")


@mistake(
    CheckpointNotFoundError,
    "{folder}/global_step9 is not a complete checkpoint: it has no manifest.json, which is written last (it holds "
    "mp_rank_00_model_states.pt: files of DeepSpeed, which this version does not read); no checkpoints are there",
)
def loading_from_deepspeed(folder: Path) -> None:
    (folder / "latest").write_text("global_step9")
    (folder / "global_step9").mkdir()
    (folder / "global_step9" / "mp_rank_00_model_states.pt").touch()
    engine_of().load(folder)


@mistake(
    CheckpointError,
    "checkpoint {folder}/run/global_step1: file rank-00000.safetensors is truncated (found ... bytes, expected ...)",
)
def loading_a_truncated_file(folder: Path) -> None:
    file = saved(folder) / "global_step1" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    engine_of().load(folder / "run")


@mistake(
    CheckpointError,
    "checkpoint {folder}/run/global_step1: file manifest.json can't be used: its checksum is wrong, it was cut or "
    "changed",
)
def loading_a_manifest_that_was_edited(folder: Path) -> None:
    file = saved(folder) / "global_step1" / "manifest.json"
    file.write_text(file.read_text().replace('"global_steps": 1', '"global_steps": 9'))
    engine_of().load(folder / "run")


@mistake(
    CheckpointError,
    "checkpoint {folder}/run/global_step1 doesn't fit, nothing was loaded: 2 tensors are not in it: "
    "model/blocks.2.inner.bias, model/blocks.2.inner.weight; 2 tensors have another shape: model/head.bias (saved as "
    "[1], wanted as [3]), model/head.weight (saved as [1, 8], wanted as [3, 8]). With strict=False the rest is loaded",
)
def loading_into_a_larger_model(folder: Path) -> None:
    engine_of(Net(blocks=3, out=3)).load(saved(folder))


@mistake(
    CheckpointError,
    "checkpoint {folder}/run/global_step1 doesn't fit, nothing was loaded: 2 of its tensors were not asked for: "
    "model/blocks.1.inner.bias, model/blocks.1.inner.weight. With strict=False the rest is loaded",
)
def loading_into_a_model_of_fewer_layers(folder: Path) -> None:
    engine_of(Net(blocks=1)).load(saved(folder), parts=MODULE_ONLY)


@mistake(
    CheckpointError,
    "{folder}/run/global_step1 holds the state of AdamW, and this engine runs SGD; use the same optimizer, or load "
    "with LoadParts(optimizer=False)",
)
def loading_into_another_optimizer(folder: Path) -> None:
    engine_of(optimizer={"type": "SGD", "params": {"lr": 0.1}}).load(saved(folder))


@mistake(
    CheckpointError,
    "{folder}/run/global_step0 holds no optimizer state; load it with LoadParts(optimizer=False) or MODULE_ONLY",
)
def loading_an_optimizer_that_was_not_there(folder: Path) -> None:
    initialize(Net(), NO_OPTIMIZER).save(folder / "run")
    engine_of().load(folder / "run")


GROUPS = "; build the optimizer with the same groups in the same order, or load with LoadParts(optimizer=False)"


@mistake(
    CheckpointError,
    "{folder}/run/global_step1 was saved with 1 parameter groups, and this optimizer has 2" + GROUPS,
)
def loading_into_other_groups(folder: Path) -> None:
    model = Net()
    engine_of(model, given=in_groups(model, "blocks", "head")).load(saved(folder))


@mistake(
    CheckpointError,
    "in {folder}/run/global_step1 parameter 'head.weight' is in group 1 of the optimizer, here it is in group 0, and "
    "settings such as weight decay go by group" + GROUPS,
)
def loading_into_groups_in_another_order(folder: Path) -> None:
    first, second = Net(), Net()
    directory = saved(folder, engine_of(first, given=in_groups(first, "blocks", "head")))
    engine_of(second, given=in_groups(second, "head", "blocks")).load(directory)


@mistake(
    CheckpointError,
    "{folder}/run/global_step1 does not fit this run: the checkpoint holds the state of the schedule 'WarmupLR', and "
    "this run has 'OneCycle'; use the same scheduler, or load without the schedule (see LoadParts)",
)
def loading_into_another_schedule(folder: Path) -> None:
    directory = saved(folder, engine_of(scheduler={"type": "WarmupLR", "params": {}}))
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01}}
    engine_of(scheduler=cycle).load(directory)


@mistake(
    CheckpointError,
    "{folder}/run/global_step1 does not fit this run: the data position was saved with samples 6 and this loader has "
    "5: the order of the samples would be another one. Load without the data position to begin a new epoch (see "
    "LoadParts)",
)
def loading_with_other_data(folder: Path) -> None:
    directory = saved(folder, engine_of(given={"training_data": SAMPLES}))
    fewer: Dataset[Any] = TensorDataset(*SAMPLES[:5])
    engine_of(given={"training_data": fewer}).load(directory)


@pytest.mark.parametrize("case", ALONE, ids=lambda case: case.name)
def test_what_is_said(case: Mistake, tmp_path: Path) -> None:
    with pytest.raises(case.error) as caught:
        case.do(tmp_path)
    assert type(caught.value) is case.error
    assert_fits(str(caught.value), case.text, tmp_path)


def test_the_tables_are_large_and_have_no_case_twice() -> None:
    assert len(ALONE) + len(TOGETHER) >= 60
    assert len({case.name for case in [*ALONE, *TOGETHER]}) == len(ALONE) + len(TOGETHER)


# Two ranks ------------------------------------------------------------------------------------------------------------


STAGE_3 = {"stage": 3, "stage3_param_persistence_threshold": 10}
STATE_DICT = (
    "rank {rank}: state_dict() would hold placeholders: at stage 3 parameters such as 'blocks.0.inner.weight' are not "
    "whole on a rank between their uses. Save with engine.save, write whole weights with engine.export, or read them "
    "one by one from ShardedModule.full_parameters()."
)


@mistake(RuntimeError, STATE_DICT, of=TOGETHER)
def the_state_dict_at_stage_3(rank: int, folder: Path) -> None:
    engine_of(zero_optimization=STAGE_3).module.state_dict()


@mistake(RuntimeError, STATE_DICT, of=TOGETHER)
def the_state_dict_of_a_part_at_stage_3(rank: int, folder: Path) -> None:
    stepped(engine_of(zero_optimization=STAGE_3)).module.get_submodule("blocks.0").state_dict()


@mistake(RuntimeError, STATE_DICT, of=TOGETHER)
def torch_save_of_the_state_dict_at_stage_3(rank: int, folder: Path) -> None:
    torch.save(engine_of(zero_optimization=STAGE_3).module.state_dict(), io.BytesIO())


@mistake(
    RuntimeError,
    "rank {rank}: load_state_dict() would write into placeholders: at stage 3 parameters such as "
    "'blocks.0.inner.weight' are not whole on a rank between their uses. Load the weights before drivetrain shards "
    "the model, or load a checkpoint with engine.load.",
    of=TOGETHER,
)
def loading_a_state_dict_at_stage_3(rank: int, folder: Path) -> None:
    engine_of(zero_optimization=STAGE_3).module.load_state_dict(Net().state_dict())


@mistake(TypeError, COPIED, of=TOGETHER)
def an_average_by_deep_copy_at_stage_3(rank: int, folder: Path) -> None:
    copy.deepcopy(engine_of(zero_optimization=STAGE_3).module)


@mistake(
    RuntimeError,
    "rank {rank}: parameter 'blocks.0.inner.weight' was given other memory (now torch.float16 of shape (8, 8))"
    + CHANGED,
    of=TOGETHER,
)
def another_dtype_at_stage_3(rank: int, folder: Path) -> None:
    engine = engine_of(zero_optimization=STAGE_3)
    engine.module.half()
    engine(X.half(), Y.half())


@mistake(
    ValueError,
    "rank 1 has another model than rank 0: 'blocks.2.inner.weight' is not there on rank 0 and torch.float32 of shape "
    "[8, 8], requires_grad=True on the other. All ranks must build the same one",
    of=TOGETHER,
)
def models_of_different_depth(rank: int, folder: Path) -> None:
    engine_of(Net(blocks=2 + rank))


@mistake(
    ValueError,
    "rank 1 has another model than rank 0: 'head.bias' is torch.float32 of shape [1], requires_grad=True on rank 0 and "
    "torch.float32 of shape [1], requires_grad=False on the other. All ranks must build the same one",
    of=TOGETHER,
)
def a_parameter_frozen_on_one_rank(rank: int, folder: Path) -> None:
    model = Net()
    model.head.bias.requires_grad_(rank == 0)
    engine_of(model)


@mistake(
    ConfigError,
    "1 problem in the configuration\n  train_batch_size = 7\n      train_batch_size 7 can't be divided by 2 "
    "data-parallel ranks without a remainder, so there is no train_micro_batch_size_per_gpu\n      to fix it: set "
    "train_batch_size to 6 or 8",
    of=TOGETHER,
)
def a_batch_that_the_ranks_cannot_share(rank: int, folder: Path) -> None:
    initialize(Net(), {"train_batch_size": 7})


@mistake(
    ConfigError,
    "1 problem in the configuration\n  train_batch_size = 8\n      the batch sizes don't fit together: "
    "train_micro_batch_size_per_gpu 4 * gradient_accumulation_steps 2 * 2 data-parallel ranks = 16, not 8\n      to "
    "fix it: set train_batch_size to 16, or set gradient_accumulation_steps to 1, or set "
    "train_micro_batch_size_per_gpu to 2, or run on 1 data-parallel rank, or drop train_batch_size and let it follow "
    "from the other two",
    of=TOGETHER,
)
def batch_sizes_of_one_rank(rank: int, folder: Path) -> None:
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    initialize(Net(), sizes)


@mistake(
    ValueError,
    "pipeline 1 x data 1 x shard 3 x sequence 1 x tensor 1 x expert 1 = 3, but the world has 2 ranks; the product must "
    "be that number",
    of=TOGETHER,
)
def a_mesh_of_another_size(rank: int, folder: Path) -> None:
    engine_of(given={"mesh": Mesh.create(init(), shard=3)})


@mistake(
    ValueError, "this version trains over the axes 'data' and 'shard'; the mesh also has {'tensor': 2}", of=TOGETHER
)
def a_mesh_with_an_axis_that_is_not_used(rank: int, folder: Path) -> None:
    engine_of(given={"mesh": Mesh.create(init(), tensor=2)})


@mistake(
    ValueError,
    "the data set has 3 samples, fewer than the 4 of one micro-batch over all ranks (micro_batch_size 2 x 2 "
    "data-parallel ranks, drop_last True); use a smaller micro-batch, or drop_last=False, or more data",
    of=TOGETHER,
)
def enough_data_for_one_rank_only(rank: int, folder: Path) -> None:
    engine_of(given={"training_data": TensorDataset(*SAMPLES[:3])}, dataloader_drop_last=True)


@mistake(RuntimeError, NO_GRADIENT.replace("rank 0", "rank {rank}"), of=TOGETHER)
def no_rank_has_a_gradient(rank: int, folder: Path) -> None:
    engine_of(zero_optimization=STAGE_3).step()


@mistake(
    NonFiniteGradientError,
    "rank {rank}: gradients were not finite in 20 steps in a row at loss scale 1; the first parameter concerned is "
    "'blocks.1.inner.weight'. Lower the learning rate, check the inputs of the last batches for NaN, or clip "
    "gradients.",
    of=TOGETHER,
)
def bad_numbers_on_one_rank(rank: int, folder: Path) -> None:
    model = Net()
    engine = engine_of(model, zero_optimization={"stage": 2})
    if rank == 1:
        model.blocks[1].inner.weight.register_hook(lambda gradient: gradient * float("nan"))
    for _ in range(20):
        stepped(engine)


@mistake(CheckpointNotFoundError, "rank 1: checkpoint directory {folder}/elsewhere does not exist", of=TOGETHER)
def a_folder_that_one_rank_does_not_see(rank: int, folder: Path) -> None:
    saved(folder)
    engine_of().load(folder / ("run" if rank == 0 else "elsewhere"))


@mistake(
    CheckpointError,
    "ranks pass different tags to save(): rank 0 passes 'step0', rank 1 passes 'step1'; all must pass the same one",
    of=TOGETHER,
)
def a_tag_of_each_rank_for_itself(rank: int, folder: Path) -> None:
    engine_of(checkpoint={"tag_validation": "Fail"}).save(folder, f"step{rank}")


@mistake(
    CheckpointError,
    "rank 0: checkpoint {folder}/run/global_step1: file rank-00001.safetensors is missing",
    of=TOGETHER,
)
def a_file_that_is_lost(rank: int, folder: Path) -> None:
    directory = saved(folder, engine_of(zero_optimization=STAGE_3))
    if rank == 1:
        (directory / "global_step1" / "rank-00001.safetensors").unlink()
    engine_of(zero_optimization=STAGE_3).load(directory)


def all_together(rank: int, world_size: int, folder: str) -> dict[str, tuple[str, str]]:
    """For each case: the type and the text of the exception on this rank."""
    outcome = {}
    for case in TOGETHER:
        own = Path(folder) / case.name
        own.mkdir(exist_ok=True)
        try:
            case.do(rank, own)
            outcome[case.name] = ("nothing", "")
        except Exception as error:
            outcome[case.name] = (type(error).__name__, str(error))
    shutdown()
    return outcome


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, tuple[str, str]]]]:
    folder = tmp_path_factory.mktemp("together")
    return folder, run_ranks(all_together, 2, str(folder), timeout=100)


@pytest.mark.parametrize("case", TOGETHER, ids=lambda case: case.name)
def test_what_two_ranks_are_told(case: Mistake, outcomes: tuple[Path, list[dict[str, tuple[str, str]]]]) -> None:
    folder, ranks = outcomes
    for rank, outcome in enumerate(ranks):
        kind, text = outcome[case.name]
        assert kind == case.error.__name__, text
        assert_fits(text, case.text, folder / case.name, rank)


# What was refused has changed nothing; what is near to a mistake works ------------------------------------------------


def state_of(engine: Engine) -> dict[str, Any]:
    """Everything that a load or a step would change, to be compared."""
    assert engine.optimizer is not None
    slices = {**engine.sharded.model_slices(), **engine.optimizer.state_slices("load")}
    return {
        "tensors": {name: part.data.tolist() for name, part in slices.items()},
        "counters": vars(engine.counters).copy(),
        "groups": json.dumps(engine.optimizer.hyperparameters()),
        "data": engine.train_loader.state_dict() if engine.train_loader else None,
    }


@pytest.mark.parametrize(
    "other",
    [
        lambda: engine_of(Net(out=2)),
        lambda: engine_of(Net(blocks=3)),
        lambda: engine_of(Net(blocks=1)),
        lambda: engine_of(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}),
        lambda: engine_of(scheduler={"type": "WarmupLR", "params": {}}, given={"training_data": SAMPLES}),
    ],
    ids=["other shapes", "more layers", "fewer layers", "another optimizer", "another schedule"],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(other: Callable[[], Engine], tmp_path: Path) -> None:
    cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01}}
    directory = saved(tmp_path, engine_of(scheduler=cycle))
    engine = other()
    engine.backward(engine(X, Y))
    engine.step()
    before = state_of(engine)
    with pytest.raises(CheckpointError):
        engine.load(directory)
    assert state_of(engine) == before


def test_a_refused_step_changes_nothing_and_training_goes_on() -> None:
    engine, undisturbed = engine_of(), engine_of()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="without a gradient"):
            engine.step()
        with pytest.raises(RuntimeError, match="second time"):
            backward_twice_of(engine)
        stepped(engine)
        stepped(undisturbed)
    assert state_of(engine) == state_of(undisturbed)


def test_after_a_failed_backward_a_checkpoint_can_still_be_saved(tmp_path: Path) -> None:
    engine = stepped(engine_of())
    with pytest.raises(RuntimeError, match="second time"):
        backward_twice_of(engine)
    engine.save(tmp_path)
    fresh = engine_of()
    assert fresh.load(tmp_path).report.tag == "global_step1"
    assert state_of(fresh) == state_of(engine)


def test_with_strict_false_what_fits_is_loaded_and_the_rest_is_listed(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    engine = engine_of(Net(blocks=1, out=3))
    report = engine.load(directory, strict=False, parts=MODULE_ONLY).report
    assert report.filled == ("model/blocks.0.inner.bias", "model/blocks.0.inner.weight")
    assert [str(entry) for entry in report.reshaped] == [
        "model/head.bias (saved as [1], wanted as [3])",
        "model/head.weight (saved as [1, 8], wanted as [3, 8])",
    ]
    assert report.unexpected == ("model/blocks.1.inner.bias", "model/blocks.1.inner.weight")


def test_with_strict_false_the_moments_of_a_changed_parameter_start_anew(tmp_path: Path) -> None:
    engine = engine_of(Net(out=3))
    report = engine.load(saved(tmp_path), strict=False).report
    assert {str(entry).partition(" ")[0] for entry in report.reshaped} == {"model/head.bias", "model/head.weight"}
    assert {name.rpartition("/")[0] for name in report.unexpected} == {"optimizer/head.bias", "optimizer/head.weight"}
    stepped(engine)
    assert engine.optimizer is not None
    steps = {name: part.data.item() for name, part in engine.optimizer.state_slices("save").items() if "step" in name}
    assert steps == {
        **{f"blocks.{n}.inner.{kind}/step": 2.0 for n in (0, 1) for kind in ("weight", "bias")},
        **{f"head.{kind}/step": 1.0 for kind in ("weight", "bias")},
    }


def doors_of_a_module(rank: int, world_size: int) -> None:
    ones = {name: torch.ones_like(value) for name, value in Net().state_dict().items()}
    for stage in range(3):
        for bf16 in (False, True):
            engine = engine_of(zero_optimization={"stage": stage}, bf16={"enabled": bf16})
            x, y = (X.bfloat16(), Y.bfloat16()) if bf16 else (X, Y)
            engine.backward(engine(x, y))
            engine.step()
            engine.module.load_state_dict(ones)
            assert all(torch.equal(value.float(), ones[name]) for name, value in engine.module.state_dict().items())
            engine.backward(engine(x, y))
            engine.step()
            for name, value in engine.module.state_dict().items():  # a step of AdamW is about the learning rate
                assert (value.float() - 1).abs().max() < 0.02, (stage, bf16, name)
    engine = engine_of(zero_optimization=STAGE_3)
    head = engine.module.get_submodule("head")
    head.load_state_dict({"weight": ones["head.weight"], "bias": ones["head.bias"]})
    stepped(engine)
    assert all((value - 1).abs().max() < 0.02 for value in head.state_dict().values())
    assert torch.isfinite(head.state_dict()["weight"]).all()
    shutdown()


def test_where_parameters_are_whole_state_dicts_are_given_and_taken() -> None:
    """Also in bf16, where what is loaded must reach the master weights, or the next step would undo it."""
    run_ranks(doors_of_a_module, 2)

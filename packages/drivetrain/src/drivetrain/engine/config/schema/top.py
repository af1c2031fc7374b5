"""The configuration as a whole: the top-level keys and what follows from them.

`Config` is plain data. It is made by the loader (`drivetrain.engine.config.load`), which alone checks the rules between
keys and refuses what this version does not have; a `Config` built by hand is only checked for types. Other modules turn
its sections into the frozen dataclasses of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr

from drivetrain.engine.config.batch import BatchSizes, resolve
from drivetrain.engine.config.problems import Notice
from drivetrain.engine.config.schema.compress import CompressionTraining, WeightQuantization
from drivetrain.engine.config.schema.data import CurriculumLearning, DataEfficiency, ProgressiveLayerDrop
from drivetrain.engine.config.schema.keys import (
    NO_EFFECT,
    PLANNED,
    Above0,
    Auto,
    Count,
    Dtype,
    Flag,
    Key,
    NonNegative,
    Positive,
    Section,
    Text,
    in_any_case,
    lowered,
)
from drivetrain.engine.config.schema.observe import (
    Autotuning,
    Comet,
    CommsLogger,
    CsvMonitor,
    FlopsProfiler,
    TensorBoard,
    Timers,
    Wandb,
)
from drivetrain.engine.config.schema.optimizer import Optimizer
from drivetrain.engine.config.schema.parallel import Compile, ExpertParallel, HybridEngine, Pipeline, TensorParallel
from drivetrain.engine.config.schema.persist import (
    ActivationCheckpointing,
    Checkpoint,
    Eigenvalue,
    Elasticity,
    Nebula,
    QuantizeTraining,
)
from drivetrain.engine.config.schema.precision import Amp, Bf16, DataTypes, Fp16, SparseAttention, TorchAutocast
from drivetrain.engine.config.schema.scheduler import Scheduler
from drivetrain.engine.config.schema.zero import Aio, ZeroOptimization

AllReduceOp = Annotated[Literal["mean", "sum"], BeforeValidator(lowered), in_any_case("mean", "sum")]
_LEVELS = ("debug", "info", "warning", "error", "critical")
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(lowered), in_any_case(*_LEVELS)
]


def _never(value: object) -> object:
    """Infinity as null: a period that never comes."""
    return None if isinstance(value, float) and value == math.inf else value


Period = Annotated[Positive | None, BeforeValidator(_never)]


class Drivetrain(Section):
    """Settings that upstream does not have. Upstream ignores top-level names that it does not know, so a file with
    this section stays valid for both."""

    seed: Annotated[Count, Key("Seed of the data order and of dropout. Each rank derives its own from it.")] = 1234
    garbage_collection: Annotated[
        Literal["python", "managed"],
        Key(
            "When Python searches for cyclic garbage. python leaves it to the interpreter; managed never does within "
            "forward, backward, step and the like, but searches young objects after steps and all objects before a "
            "save or an evaluation, where all ranks are at the same point."
        ),
    ] = "python"
    garbage_collection_interval: Annotated[
        Positive, Key("Optimizer steps between two searches of young objects, if managed.")
    ] = 1
    auto_cast: Annotated[
        Flag,
        Key(
            "Cast floating-point inputs of the model to the format that `fp16` or `bf16` choose. Targets too: leave it "
            "false where they need more digits, and cast in the model."
        ),
    ] = False
    collective_timeout: Annotated[
        Above0 | None,
        Key(
            "Seconds without progress after which a collective is an error that tells what every rank does; null is "
            "torch's default (1800 on CPUs, 600 with NCCL). The environment variable DRIVETRAIN_COLLECTIVE_TIMEOUT "
            "comes before it."
        ),
    ] = None
    check_collectives: Annotated[
        Flag,
        Key(
            "Let ranks compare each collective before they wait for it, to find where they part; slow. The environment "
            "variable DRIVETRAIN_CHECK_COLLECTIVES (1 or 0) comes before it."
        ),
    ] = False


_INFERENCE_KEYS = (
    "replace_with_kernel_inject", "kernel_inject", "enable_cuda_graph", "use_triton", "triton_autotune",
    "triangular_masking", "set_empty_params", "save_mp_checkpoint_path", "checkpoint_config", "ckpt_config",
    "return_tuple", "training_mp_size", "injection_policy", "injection_dict", "injection_policy_tuple",
    "max_out_tokens", "max_tokens", "min_out_tokens", "min_tokens", "transposed_mode", "replace_method", "mp_size",
    "moe", "quant",
)  # fmt: skip


_LR_PLACE = 'the learning rate is the optimizer\'s: write "optimizer": {"type": "AdamW", "params": {"lr": ...}}'


class Config(Section):
    """A training configuration. Attribute names are the JSON keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), populate_by_name=True)
    mistaken: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            _INFERENCE_KEYS,
            "the key belongs to an inference configuration, which a training configuration does not hold",
        ),
        "zero": 'the section is named "zero_optimization"',
        "micro_batch_size": 'write "train_micro_batch_size_per_gpu"',
        "seed": 'write "drivetrain": {"seed": ...}',
        "python_gc_policy": 'no version of upstream reads such a key; write "drivetrain": {"garbage_collection": '
        '"managed"}',
        "batch_size": 'write "train_batch_size" (over all ranks) or "train_micro_batch_size_per_gpu" (on one)',
        "lr": _LR_PLACE,
        "learning_rate": _LR_PLACE,
        "max_grad_norm": 'the key is spelled "gradient_clipping"',
        "fp32_allreduce": 'write "communication_data_type": "fp32"',
        "grad_clip": 'the key is spelled "gradient_clipping"',
    }

    json_schema_reference: Annotated[
        Text | None, Field(alias="$schema"), Key("Address of the JSON Schema, for editors.", listed=False)
    ] = None

    # ------------------------------------------------------------------------------------------------------- batch
    train_batch_size: Annotated[
        Positive | None,
        Key(
            "Samples per optimizer step, over all ranks.",
            auto=Auto.NULL,
            auto_text="found from the other two and the ranks",
        ),
    ] = None
    train_micro_batch_size_per_gpu: Annotated[
        Positive | None,
        Key("Samples per rank and forward pass.", auto=Auto.NULL, auto_text="found from the other two and the ranks"),
    ] = None
    gradient_accumulation_steps: Annotated[
        Positive | None,
        Key("Forward passes per optimizer step.", auto=Auto.NULL, auto_text="found from the other two and the ranks"),
    ] = None
    managed_gradient_accumulation: Annotated[
        Flag,
        Key(
            "`step()` counts forward passes and acts on the last; false makes each `step()` an update.",
            differs="False works with any stage and `overlap_comm`; upstream allows overlap at stage 2 only.",
        ),
    ] = True

    # --------------------------------------------------------------------------------------------------- gradients
    gradient_clipping: Annotated[NonNegative, Key("Largest global norm of the gradient; 0 does not clip.")] = 1.0
    gradient_predivide_factor: Annotated[
        Above0, Key("Divide gradients by this before they are summed, and by ranks over this afterwards.")
    ] = 1.0
    prescale_gradients: Annotated[
        Flag, Key("Divide gradients by the number of ranks before they are summed, not afterwards.")
    ] = False
    gradient_allreduce_op: Annotated[
        AllReduceOp, Key("How gradients of ranks combine, in any case. sum is not for stage 3.")
    ] = "mean"
    communication_data_type: Annotated[
        Dtype | None, Key("Format in which gradients are reduced; null is the model's.")
    ] = None
    seq_parallel_communication_data_type: Annotated[
        Dtype,
        Key(
            "The same under sequence parallelism.",
            NO_EFFECT,
            differs="There is no sequence parallelism in this version.",
        ),
    ] = "fp32"
    sparse_gradients: Annotated[
        Flag,
        Key(
            "Keep and reduce gradients of embeddings as the rows that a batch touches.",
            differs="Works at every stage, where upstream has stage 0; a pass in which the rows would be more bytes "
            "than the whole reduces the whole. An embedding that is also another layer's weight is left out.",
        ),
    ] = False
    disable_allgather: Annotated[Flag, Key("Nothing.", NO_EFFECT, differs="Not read upstream either.")] = False
    allgather_size: Annotated[
        Positive,
        Key(
            '`allgather_bucket_size` for the old form `"zero_optimization": true`.',
            NO_EFFECT,
            differs="Read only beside that form, which also upstream deprecates.",
        ),
    ] = 500_000_000

    # --------------------------------------------------------------------------------------------------- the model
    optimizer: Annotated[Optimizer | None, Key("Which optimizer updates the parameters.")] = None
    scheduler: Annotated[Scheduler | None, Key("How the learning rate changes.")] = None
    fp16: Annotated[Fp16, Key("Training in float16.")] = Field(default_factory=Fp16)
    bf16: Annotated[Bf16, Key("Training in bfloat16.", aliases=("bfloat16",))] = Field(default_factory=Bf16)
    amp: Annotated[
        Amp,
        Key(
            "NVIDIA Apex.",
            PLANNED,
            feature="mixed precision by NVIDIA Apex",
            instead="use the bf16, the fp16 or the torch_autocast section",
        ),
    ] = Field(default_factory=Amp)
    torch_autocast: Annotated[TorchAutocast, Key("torch.autocast.")] = Field(default_factory=TorchAutocast)
    data_types: Annotated[DataTypes, Key("Other number formats.")] = Field(default_factory=DataTypes)
    zero_optimization: Annotated[ZeroOptimization, Key("What is partitioned over ranks.")] = Field(
        default_factory=ZeroOptimization
    )
    zero_allow_untested_optimizer: Annotated[
        Flag,
        Key(
            "Permit an optimizer that upstream has not tried with ZeRO.",
            NO_EFFECT,
            differs="Any torch optimizer that works element by element is accepted.",
        ),
    ] = False
    zero_force_ds_cpu_optimizer: Annotated[
        Flag,
        Key(
            "With optimizer offload, insist on the CPU optimizer.",
            NO_EFFECT,
            differs="Every optimizer of this family runs where its states are, on the host in C++.",
        ),
    ] = True
    activation_checkpointing: Annotated[
        ActivationCheckpointing,
        Key(
            "How recomputation stores what it keeps.",
            PLANNED,
            feature="choosing how recomputation stores activations",
            instead="use torch.utils.checkpoint in the model",
        ),
    ] = Field(default_factory=ActivationCheckpointing)
    sparse_attention: Annotated[
        SparseAttention | None,
        Key(
            "Block-sparse attention.",
            NO_EFFECT,
            differs="Upstream parses the section and never applies it; no model here asks for it.",
        ),
    ] = None

    # --------------------------------------------------------------------------------------------------------- data
    dataloader_drop_last: Annotated[Flag, Key("Leave out a last batch that is not full.")] = False
    data_efficiency: Annotated[
        DataEfficiency, Key("Curriculum, dynamic batches, token dropping.", PLANNED, feature="data efficiency")
    ] = Field(default_factory=DataEfficiency)
    curriculum_learning: Annotated[
        CurriculumLearning, Key("Curriculum over sequence length.", PLANNED, feature="curriculum learning")
    ] = Field(default_factory=CurriculumLearning)
    progressive_layer_drop: Annotated[
        ProgressiveLayerDrop, Key("Skip layers at random.", PLANNED, feature="progressive layer drop")
    ] = Field(default_factory=ProgressiveLayerDrop)

    # ---------------------------------------------------------------------------------------------------- observing
    steps_per_print: Annotated[
        Period, Key("Optimizer steps between two lines of progress; null or Infinity is never.")
    ] = None
    dump_state: Annotated[Flag, Key("Log the engine's settings once it is built.")] = False
    log_level: Annotated[LogLevel | None, Key("Level of the logger `drivetrain`; null leaves it as it is.")] = None
    wall_clock_breakdown: Annotated[Flag, Key("Log the time of forward, backward and step.")] = False
    memory_breakdown: Annotated[
        Flag,
        Key(
            "Log memory in each phase.",
            PLANNED,
            feature="logging memory in each phase",
            instead="read peak memory from the metrics",
        ),
    ] = False
    vocabulary_size: Annotated[
        Positive | None, Key("Size of the vocabulary: a notice when it is no multiple of 8, which matrix units favour.")
    ] = None
    timers: Annotated[Timers, Key("Timers.")] = Field(default_factory=Timers)
    comms_logger: Annotated[CommsLogger, Key("Counts and times of collectives.")] = Field(default_factory=CommsLogger)
    csv_monitor: Annotated[CsvMonitor, Key("Metrics as CSV files.")] = Field(default_factory=CsvMonitor)
    tensorboard: Annotated[
        TensorBoard, Key("Metrics for TensorBoard.", PLANNED, feature="TensorBoard output", instead='use "csv_monitor"')
    ] = Field(default_factory=TensorBoard)
    wandb: Annotated[
        Wandb,
        Key("Metrics for Weights & Biases.", PLANNED, feature="Weights & Biases output", instead='use "csv_monitor"'),
    ] = Field(default_factory=Wandb)
    comet: Annotated[Comet, Key("Metrics for Comet.", PLANNED, feature="Comet output", instead='use "csv_monitor"')] = (
        Field(default_factory=Comet)
    )
    flops_profiler: Annotated[FlopsProfiler, Key("Operations by module.", PLANNED, feature="the FLOPS profiler")] = (
        Field(default_factory=FlopsProfiler)
    )
    autotuning: Annotated[Autotuning, Key("Search for the fastest configuration.", PLANNED, feature="autotuning")] = (
        Field(default_factory=Autotuning)
    )

    # --------------------------------------------------------------------------------------------------- state, disk
    checkpoint: Annotated[Checkpoint, Key("Saving and loading.")] = Field(default_factory=Checkpoint)
    nebula: Annotated[Nebula, Key("torch_nebula.", PLANNED, feature="checkpoints by torch_nebula")] = Field(
        default_factory=Nebula
    )
    datastates_ckpt: Annotated[
        Any, Key("Options of an external package.", PLANNED, feature="checkpoints by DataStates", inert=(False, {}))
    ] = None
    elasticity: Annotated[Elasticity, Key("A batch size for many world sizes.", PLANNED, feature="elasticity")] = Field(
        default_factory=Elasticity
    )
    aio: Annotated[
        Aio,
        Key(
            "File access for NVMe offload.",
        ),
    ] = Field(default_factory=Aio)

    # ------------------------------------------------------------------------------------------------- parallelism
    sequence_parallel_size: Annotated[
        Positive, Key("Ranks that share a sequence.", PLANNED, feature="sequence parallelism")
    ] = 1
    data_parallel_size: Annotated[
        Positive | None,
        Key(
            "Ranks that see different samples.",
            NO_EFFECT,
            differs="Found from the ranks; upstream reads it only beside `sequence_parallel_size`.",
        ),
    ] = None
    use_data_before_expert_parallelism: Annotated[
        Flag, Key("Order of ranks for experts.", PLANNED, feature="expert parallelism")
    ] = False
    tensor_parallel: Annotated[
        TensorParallel, Key("Split layers over ranks.", PLANNED, feature="tensor parallelism")
    ] = Field(default_factory=TensorParallel)
    expert_parallel: Annotated[
        ExpertParallel, Key("Spread experts over ranks.", PLANNED, feature="expert parallelism")
    ] = Field(default_factory=ExpertParallel)
    pipeline: Annotated[Pipeline, Key("Pipeline parallelism.", PLANNED, feature="pipeline parallelism")] = Field(
        default_factory=Pipeline
    )
    hybrid_engine: Annotated[
        HybridEngine, Key("Generation between steps.", PLANNED, feature="generation between steps (hybrid engine)")
    ] = Field(default_factory=HybridEngine)
    compile: Annotated[Compile, Key("Communication placed in compiled graphs.")] = Field(default_factory=Compile)
    graph_harvesting: Annotated[Flag, Key("Capture CUDA graphs.", PLANNED, feature="CUDA graphs in the optimizer")] = (
        False
    )

    # ------------------------------------------------------------------------------------------------ smaller weights
    weight_quantization: Annotated[
        WeightQuantization, Key("Quantised weights.", PLANNED, feature="quantised weights")
    ] = Field(default_factory=WeightQuantization)
    compression_training: Annotated[
        CompressionTraining, Key("Quantisation, pruning, distillation.", PLANNED, feature="compression while training")
    ] = Field(default_factory=CompressionTraining)
    quantize_training: Annotated[
        QuantizeTraining,
        Key(
            "Older quantised training.",
            NO_EFFECT,
            differs="Upstream only reads `eigenvalue` from it, and then refuses it.",
        ),
    ] = Field(default_factory=QuantizeTraining)
    eigenvalue: Annotated[
        Eigenvalue, Key("Curvature.", NO_EFFECT, differs="Upstream does not read it at the top level.")
    ] = Field(default_factory=Eigenvalue)

    # ---------------------------------------------------------------------------------------------------------- ours
    drivetrain: Annotated[Drivetrain, Key("Settings that upstream does not have.")] = Field(default_factory=Drivetrain)

    _notices: tuple[Notice, ...] = PrivateAttr(default=())

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What the loader accepted and a person should know: deprecated keys, keys without effect, resolved "auto"."""
        return self._notices

    @property
    def model_dtype(self) -> Literal["fp16", "bf16", "fp32"]:
        """Format in which the model computes."""
        if self.fp16.enabled:
            return "fp16"
        return "bf16" if self.bf16.enabled else "fp32"

    @property
    def communication_dtype(self) -> Literal["fp16", "bf16", "fp32"]:
        """Format in which gradients are reduced, with null resolved."""
        return self.communication_data_type or self.model_dtype

    @property
    def accumulation_dtype(self) -> Literal["fp16", "bf16", "fp32"]:
        """Format in which gradients add up, with null resolved."""
        return self.data_types.grad_accum_dtype or self.model_dtype

    @property
    def updates_in_place(self) -> bool:
        """Whether the optimizer updates the model's 16-bit parameters, with no fp32 master weights beside them."""
        if self.fp16.enabled:
            return self.fp16.fp16_master_weights_and_grads
        return self.bf16.enabled and self.bf16.bf16_master_weights_and_grads

    @property
    def moments_dtype(self) -> Literal["fp16", "bf16", "fp32"] | None:
        """Format of the optimizer's moments; None where no key says so, and the optimizer's own way is fp32."""
        if self.bf16.enabled and self.bf16.bf16_optimizer_states:
            return "bf16"
        if not self.updates_in_place:
            return None
        return "fp32" if self.fp32_optimizer_states is not False else self.model_dtype

    @property
    def fp32_optimizer_states(self) -> bool | None:
        """The argument of the optimizer, where the file gives it."""
        given = None if self.optimizer is None else self.optimizer.params.get("fp32_optimizer_states")
        return given if isinstance(given, bool) else None

    def resolve_batch(self, data_parallel_size: int) -> BatchSizes:
        """The three batch sizes for a number of data-parallel ranks.

        Raises:
            ConfigError: the sizes don't fit together, or too few are given; the message proposes values that fit.
        """
        return resolve(
            data_parallel_size,
            train=self.train_batch_size,
            micro=self.train_micro_batch_size_per_gpu,
            accumulation=self.gradient_accumulation_steps,
        )

    def to_dict(self, *, only_given: bool = False) -> dict[str, Any]:
        """The configuration as JSON values, which `load` reads back to an equal configuration.

        Args:
            only_given: leave out keys that were not in the source.
        """
        values = self.model_dump(mode="json", by_alias=True, exclude_unset=only_given)
        if self.json_schema_reference is None:
            values.pop("$schema", None)
        return values

"""Sections about state on disk and over time: `checkpoint`, `nebula`, `elasticity`, `activation_checkpointing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from drivetrain.engine.config.schema.keys import (
    NO_EFFECT,
    PLANNED,
    Count,
    Flag,
    Integer,
    Key,
    NonNegative,
    Number,
    Positive,
    Section,
    Text,
    in_any_case,
    lowered,
)


def _capitalised(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


TagValidation = Annotated[
    Literal["Warn", "Ignore", "Fail"], BeforeValidator(_capitalised), in_any_case("Warn", "Ignore", "Fail")
]
WriterType = Annotated[
    Literal["fast", "python", "mock"], BeforeValidator(lowered), in_any_case("fast", "python", "mock")
]


class Writer(Section):
    """How bytes of a checkpoint get to the disk."""

    type: Annotated[WriterType, Key("Which writer.")] = "fast"
    io_buffer_size: Annotated[Positive, Key("Bytes of the buffer.")] = 67_108_864
    io_buffer_double: Annotated[Flag, Key("Two buffers in turn.")] = True
    show_statistics: Annotated[Flag, Key("Log the speed.")] = False
    data_parallel: Annotated[Literal["replica", "socket", "machine"] | None, Key("Which ranks share the writing.")] = (
        None
    )
    decoupled: Annotated[Flag, Key("Write in another process.")] = False
    io_multiplier: Annotated[Positive, Key("Writers for each rank.")] = 1

    def asking(self) -> tuple[str, ...]:
        return ("",)


class ParallelWrite(Section):
    """Who writes what."""

    pipeline_stage: Annotated[Flag, Key("All ranks of a pipeline stage write.")] = False


class Checkpoint(Section):
    """Saving and loading."""

    tag_validation: Annotated[
        TagValidation, Key("What happens when ranks save under different tags, in any case: Warn, Ignore or Fail.")
    ] = "Warn"
    load_universal: Annotated[
        Flag,
        Key(
            "Load upstream's universal format.",
            PLANNED,
            feature="loading upstream's universal checkpoints",
            instead="keep it false: every checkpoint saved here loads at any world size and any stage",
        ),
    ] = False
    use_node_local_storage: Annotated[
        Flag, Key("Each node writes to its own disk.", PLANNED, feature="checkpoints on node-local disks")
    ] = False
    parallel_write: Annotated[
        ParallelWrite, Key("Who writes what.", PLANNED, feature="choosing who writes a checkpoint")
    ] = Field(default_factory=ParallelWrite)
    checkpoint_serialization: Annotated[
        Flag,
        Key(
            "Use PyTorch's zip format.",
            NO_EFFECT,
            differs="Checkpoints are safe tensor files, written by torch.distributed.checkpoint.",
        ),
    ] = True
    writer: Annotated[
        Writer | None, Key("How bytes get to the disk.", PLANNED, feature="choosing how checkpoints are written")
    ] = None


class Nebula(Section):
    """Asynchronous checkpoints by the torch_nebula package."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Save through torch_nebula.")] = False
    persistent_storage_path: Annotated[Text | None, Key("Folder that lasts.")] = None
    persistent_time_interval: Annotated[Positive, Key("Seconds between lasting copies.")] = 100
    num_of_version_in_retention: Annotated[Positive, Key("Copies that are kept.")] = 2
    enable_nebula_load: Annotated[Flag, Key("Load through torch_nebula.")] = True
    nebula_load_path: Annotated[Text | None, Key("Folder to load from.")] = None


class Elasticity(Section):
    """A batch size that many world sizes can serve."""

    shorthand: ClassVar[str] = "enabled"
    mistaken: ClassVar[Mapping[str, str]] = {
        "prefer_large_batch": 'upstream documents this spelling and ignores it; the key is "prefer_larger_batch"',
    }

    enabled: Annotated[Flag, Key("Choose the batch sizes.")] = False
    max_train_batch_size: Annotated[Positive, Key("Largest batch.")] = 2000
    micro_batch_sizes: Annotated[tuple[Positive, ...], Key("Micro-batch sizes to choose from.")] = (2, 4, 6)
    min_gpus: Annotated[Positive, Key("Fewest ranks.")] = 1
    max_gpus: Annotated[Positive, Key("Most ranks.")] = 10_000
    min_time: Annotated[Count, Key("Minutes between changes of the world size.")] = 0
    prefer_larger_batch: Annotated[Flag, Key("Prefer the larger of two batches.")] = True
    ignore_non_elastic_batch_info: Annotated[Flag, Key("Override batch keys that are given too.")] = False
    version: Annotated[Number, Key("Version of the algorithm: 0.1 or 0.2.")] = 0.2
    num_gpus_per_node: Annotated[Positive, Key("Ranks on a node.")] = 1
    model_parallel_size: Annotated[Positive, Key("Ranks of model parallelism.")] = 1


class ActivationCheckpointing(Section):
    """How recomputation stores what it keeps."""

    partition_activations: Annotated[Flag, Key("Split kept activations over model-parallel ranks.")] = False
    number_checkpoints: Annotated[Positive | None, Key("Checkpoints in the model.")] = None
    contiguous_memory_optimization: Annotated[Flag, Key("Keep them in one buffer.")] = False
    synchronize_checkpoint_boundary: Annotated[Flag, Key("Wait for the device at each checkpoint.")] = False
    profile: Annotated[Flag, Key("Time each checkpoint.")] = False
    cpu_checkpointing: Annotated[Flag, Key("Keep them in host memory.")] = False


class Eigenvalue(Section):
    """Curvature, once used to schedule quantisation."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Compute eigenvalues.")] = False
    verbose: Annotated[Flag, Key("Log them.")] = False
    max_iter: Annotated[Positive, Key("Most iterations.")] = 100
    tol: Annotated[NonNegative, Key("Relative change at which iteration ends.")] = 0.01
    stability: Annotated[Number, Key("Added where a norm divides.")] = 1e-6
    gas_boundary_resolution: Annotated[Positive, Key("Steps between computations.")] = 1
    layer_name: Annotated[Text, Key("Name of the list of layers.")] = "bert.encoder.layer"
    layer_num: Annotated[Integer, Key("Layers; 0 is all.")] = 0


class QuantizeTraining(Section):
    """The older section of quantised training, of which only `eigenvalue` was left."""

    eigenvalue: Annotated[Eigenvalue, Key("Curvature.")] = Field(default_factory=Eigenvalue)

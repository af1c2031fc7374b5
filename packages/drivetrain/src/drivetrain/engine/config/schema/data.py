"""Sections about what the model sees and when: `data_efficiency`, `curriculum_learning`, `progressive_layer_drop`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from drivetrain.engine.config.schema.keys import (
    Count,
    Flag,
    Integer,
    Key,
    NonNegative,
    Number,
    Positive,
    Section,
    Text,
)

Difficulties = dict[str, Any]


class CurriculumMetric(Section):
    """One measure of difficulty."""

    index_to_sample_path: Annotated[Text | None, Key("File: value to samples.")] = None
    index_to_metric_path: Annotated[Text | None, Key("File: sample to value.")] = None
    difficulty_type: Annotated[Literal["value", "percentile"], Key("What difficulty counts.")] = "value"
    clustering_type: Annotated[Literal["schedule_based", "single_cluster"], Key("How samples are grouped.")] = (
        "single_cluster"
    )
    min_difficulty: Annotated[Number | None, Key("Difficulty at the start.")] = None
    max_difficulty: Annotated[Number | None, Key("Difficulty at the end.")] = None
    schedule_type: Annotated[Text | None, Key("fixed_linear, fixed_root, fixed_discrete or custom.")] = None
    schedule_config: Annotated[Difficulties, Key("Arguments of the schedule.")] = Field(default_factory=dict)


class SamplingCurriculum(Section):
    """Curriculum over samples."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Choose samples by difficulty.")] = False
    data_cluster_path: Annotated[Text | None, Key("Folder of the groups of samples.")] = None
    curriculum_metrics: Annotated[dict[str, CurriculumMetric], Key("Measures of difficulty, by name.")] = Field(
        default_factory=dict
    )


class DynamicBatching(Section):
    """Batches of a number of tokens instead of samples."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Batch by tokens.")] = False
    lr_scaling_method: Annotated[Literal["linear", "sqrt", "none"], Key("How the learning rate follows the batch.")] = (
        "linear"
    )
    min_batch_size: Annotated[Positive, Key("Fewest samples.")] = 1
    max_batch_size: Annotated[Positive | None, Key("Most samples.")] = None
    sequence_picking_order: Annotated[Literal["dataloader", "random", "seqlen"], Key("Order of samples.")] = (
        "dataloader"
    )
    max_tokens: Annotated[Positive | None, Key("Tokens of a batch.")] = None
    metrics_path: Annotated[Text | None, Key("File of sequence lengths.")] = None
    verbose: Annotated[Flag, Key("Log each batch.")] = False


class DataSampling(Section):
    """Which samples, in which order."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Use the sampler.")] = False
    num_epochs: Annotated[Positive, Key("Passes over the data.")] = 1000
    num_workers: Annotated[Count, Key("Loader processes.")] = 0
    pin_memory: Annotated[Flag, Key("Load into page-locked memory.")] = False
    curriculum_learning: Annotated[SamplingCurriculum, Key("Curriculum over samples.")] = Field(
        default_factory=SamplingCurriculum
    )
    dynamic_batching: Annotated[DynamicBatching, Key("Batches of tokens.")] = Field(default_factory=DynamicBatching)


class LtdSchedule(Section):
    """How the number of kept tokens grows."""

    min_value: Annotated[Count | None, Key("Tokens kept at the start.")] = None
    max_value: Annotated[Count | None, Key("Tokens kept at the end.")] = None
    schedule_type: Annotated[Literal["fixed_linear"], Key("Shape of the growth.")] = "fixed_linear"
    schedule_config: Annotated[Difficulties, Key("require_steps and seq_per_step.")] = Field(default_factory=dict)


class LayerTokenLr(Section):
    """A learning rate that follows the tokens consumed."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Follow the tokens.")] = False
    total_layer_tokens: Annotated[Count | None, Key("Tokens in all.")] = None
    warmup_layer_tokens: Annotated[Count | None, Key("Tokens of warm-up.")] = None


class RandomLtd(Section):
    """Random layerwise token dropping (Yao et al., 2022)."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Drop tokens in middle layers.")] = False
    total_layer_num: Annotated[Positive | None, Key("Layers of the model.")] = None
    random_ltd_layer_num: Annotated[Positive | None, Key("Layers that drop.")] = None
    random_ltd_layer_id: Annotated[tuple[Count, ...], Key("Which layers drop.")] = ()
    model_mask_name: Annotated[Text | None, Key("Name of the attention mask.")] = None
    model_type: Annotated[Literal["decoder", "encoder"], Key("Kind of model.")] = "decoder"
    micro_batch_size: Annotated[Positive | None, Key("Filled in by the engine.")] = None
    global_batch_size: Annotated[Positive | None, Key("Filled in by the engine.")] = None
    hidden_state_order: Annotated[Literal["batch_seq_dim", "seq_batch_dim"], Key("Order of the axes.")] = (
        "batch_seq_dim"
    )
    random_ltd_schedule: Annotated[LtdSchedule, Key("How the kept tokens grow.")] = Field(default_factory=LtdSchedule)
    layer_token_lr_schedule: Annotated[LayerTokenLr, Key("Learning rate by tokens.")] = Field(
        default_factory=LayerTokenLr
    )


class DataRouting(Section):
    """Which tokens go through which layers."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Route.")] = False
    random_ltd: Annotated[RandomLtd, Key("Random layerwise token dropping.")] = Field(default_factory=RandomLtd)


class DataEfficiency(Section):
    """Curriculum, dynamic batches and token dropping."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Use the section.")] = False
    seed: Annotated[Integer, Key("Seed of the sampler.")] = 1234
    data_sampling: Annotated[DataSampling, Key("Which samples, in which order.")] = Field(default_factory=DataSampling)
    data_routing: Annotated[DataRouting, Key("Which tokens go where.")] = Field(default_factory=DataRouting)


class CurriculumLearning(Section):
    """The older curriculum, over sequence length."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Grow the difficulty.")] = False
    curriculum_type: Annotated[Text, Key("What grows; seqlen cuts sequences.")] = "seqlen"
    min_difficulty: Annotated[Number | None, Key("Difficulty at the start.")] = None
    max_difficulty: Annotated[Number | None, Key("Difficulty at the end.")] = None
    schedule_type: Annotated[Text | None, Key("fixed_linear, fixed_root, fixed_discrete or custom.")] = None
    schedule_config: Annotated[Difficulties, Key("Arguments of the schedule.")] = Field(default_factory=dict)


class ProgressiveLayerDrop(Section):
    """Skip layers at random, more as training goes on (Zhang and He, 2020)."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Skip layers.")] = False
    theta: Annotated[NonNegative, Key("Share of layers kept in the end.")] = 1.0
    gamma: Annotated[NonNegative, Key("Speed of the change, per step.")] = 0.001

"""Sections about watching a run: monitors, `comms_logger`, `timers`, `flops_profiler`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from drivetrain.engine.config.schema.keys import (
    PLANNED,
    Flag,
    Integer,
    Key,
    NonNegative,
    Positive,
    Section,
    Text,
    Texts,
)


class CsvMonitor(Section):
    """Metrics as CSV files."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Write metrics to CSV files.")] = False
    output_path: Annotated[Text, Key('Folder; "" is the current one.')] = ""
    job_name: Annotated[Text, Key("Folder of this run inside `output_path`.")] = "DeepSpeedJobName"


class TensorBoard(Section):
    """Metrics for TensorBoard."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Write event files.")] = False
    output_path: Annotated[Text, Key('Folder; "" is upstream\'s default.')] = ""
    job_name: Annotated[Text, Key("Folder of this run inside `output_path`.")] = "DeepSpeedJobName"


class Wandb(Section):
    """Metrics for Weights & Biases."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Send metrics.")] = False
    group: Annotated[Text | None, Key("Group of the run.")] = None
    team: Annotated[Text | None, Key("Team that owns the project.")] = None
    project: Annotated[Text, Key("Project.")] = "deepspeed"


class Comet(Section):
    """Metrics for Comet."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Send metrics.")] = False
    samples_log_interval: Annotated[Positive, Key("Samples between two reports.")] = 100
    project: Annotated[Text | None, Key("Project.")] = None
    workspace: Annotated[Text | None, Key("Workspace.")] = None
    api_key: Annotated[Text | None, Key("Key of the account.", secret=True)] = None
    experiment_name: Annotated[Text | None, Key("Name of the run.")] = None
    experiment_key: Annotated[Text | None, Key("Identifier of the run.")] = None
    online: Annotated[Flag | None, Key("Send at once, or write a file to send later.")] = None
    mode: Annotated[Text | None, Key("create, get or get_or_create.")] = None


class CommsLogger(Section):
    """Counts and times of collectives."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[
        Flag,
        Key(
            "Log the table of collectives.",
            differs="The counts are always kept; this only prints them. Off costs nothing.",
        ),
    ] = False
    prof_all: Annotated[Flag, Key("All collectives; false takes those in `prof_ops`.")] = True
    prof_ops: Annotated[Texts, Key("Names of collectives to report.")] = ()
    verbose: Annotated[
        Flag,
        Key(
            "Log each call as it happens.",
            PLANNED,
            feature="logging each collective as it happens",
            instead="read the table of totals",
        ),
    ] = False
    debug: Annotated[
        Flag,
        Key(
            "Log the caller of each collective.",
            PLANNED,
            feature="logging the caller of each collective",
            instead="read the table of totals",
        ),
    ] = False


class Throughput(Section):
    """The timer behind samples per second."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Measure samples per second.")] = True
    synchronized: Annotated[Flag, Key("Wait for the device before reading the clock.")] = True


class Timers(Section):
    """Timers."""

    throughput: Annotated[Throughput, Key("The timer behind samples per second.")] = Field(default_factory=Throughput)


class FlopsProfiler(Section):
    """Floating-point operations, time and parameters by module."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Profile one step.")] = False
    recompute_fwd_factor: Annotated[NonNegative, Key("Forward passes that recomputation adds.")] = 0.0
    profile_step: Annotated[Positive, Key("Step that is profiled.")] = 1
    module_depth: Annotated[Integer, Key("Depth of the table; -1 is all.")] = -1
    top_modules: Annotated[Positive, Key("Modules listed at each depth.")] = 1
    detailed: Annotated[Flag, Key("Print the table of modules.")] = True
    output_file: Annotated[Text | None, Key("File of the report; null prints it.")] = None


class Autotuning(Section):
    """Search for the fastest configuration."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Search.")] = False
    fast: Annotated[Flag, Key("Search only stage and micro-batch.")] = True
    results_dir: Annotated[Text, Key("Folder of the results.")] = "autotuning_results"
    exps_dir: Annotated[Text, Key("Folder of the experiments.")] = "autotuning_exps"
    overwrite: Annotated[Flag, Key("Run experiments again that have results.")] = True
    start_profile_step: Annotated[Positive, Key("First step that is timed.")] = 3
    end_profile_step: Annotated[Positive, Key("Last step that is timed.")] = 5
    metric: Annotated[Text, Key("latency, throughput or flops.")] = "throughput"
    metric_path: Annotated[Text | None, Key("File of the metric.")] = None
    tuner_type: Annotated[Literal["gridsearch", "random", "model_based"], Key("How the space is searched.")] = (
        "gridsearch"
    )
    tuner_early_stopping: Annotated[Positive, Key("Experiments without gain before the search ends.")] = 5
    tuner_num_trials: Annotated[Positive, Key("Most experiments.")] = 50
    arg_mappings: Annotated[dict[str, str] | None, Key("Keys of the configuration to options of the script.")] = None
    model_info: Annotated[dict[str, object] | None, Key("Sizes of the model.")] = None
    model_info_path: Annotated[Text | None, Key("File of the model's sizes.")] = None
    mp_size: Annotated[Positive, Key("Ranks of model parallelism.")] = 1
    max_train_batch_size: Annotated[Positive | None, Key("Largest batch.")] = None
    min_train_batch_size: Annotated[Positive, Key("Smallest batch.")] = 1
    max_train_micro_batch_size_per_gpu: Annotated[Positive, Key("Largest micro-batch.")] = 1024
    min_train_micro_batch_size_per_gpu: Annotated[Positive, Key("Smallest micro-batch.")] = 1
    num_tuning_micro_batch_sizes: Annotated[Positive, Key("Micro-batch sizes that are tried.")] = 3

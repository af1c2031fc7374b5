"""The section `zero_optimization`: what is partitioned, how it is communicated, where it lives."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from drivetrain.engine.config.schema.keys import (
    NO_EFFECT,
    PLANNED,
    Auto,
    Count,
    Flag,
    Fraction,
    Integer,
    Key,
    Number,
    Positive,
    Renamed,
    Section,
    Texts,
    in_any_case,
    lowered,
    wrong,
)

_MOE_BLOCKS = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


def _stage(value: object) -> object:
    """A whole number as an int, so that 3.0 and 3 are one stage and true is none."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value not in (0, 1, 2, 3):
        hint = f"write {value} without quotes" if isinstance(value, str) and value in ("0", "1", "2", "3") else ""
        raise wrong("expected a stage: 0, 1, 2 or 3", hint)
    return value


def _whole_or_auto(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise wrong('expected "auto" or a whole number of at least 1')


Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_stage)]
Device = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(lowered), in_any_case("none", "cpu", "nvme")]
AutoOrInt = Annotated[int | Literal["auto"], BeforeValidator(_whole_or_auto)]


_FOLDERS = "A list names one folder on each of several disks, among which the data are divided."
_FOLDER = Key("Folder on the NVMe disk, or a list of folders.", differs=_FOLDERS)
_PINNED = Key("Use page-locked host memory, where there is a GPU to send it to.")


class _Offload(Section):
    shorthand: ClassVar[str] = "device"

    device: Annotated[Device, Key("none keeps it on the device of the rank; cpu or nvme moves it out.")] = "none"

    def asking(self) -> tuple[str, ...]:
        return ("device",) if self.device != "none" else ()


class OffloadParam(_Offload):
    """Where the parameters' shards live at stage 3."""

    nvme_path: Annotated[Texts | None, _FOLDER] = None
    buffer_count: Annotated[Positive, Key("Buffers between host memory and disk.")] = 5
    buffer_size: Annotated[
        Positive,
        Key(
            "Most elements that a buffer holds.",
            differs="Without this key they are as large as the largest shard; with it, a larger shard is an error.",
        ),
    ] = 100_000_000
    max_in_cpu: Annotated[Count, Key("Parameter elements kept in host memory when the device is nvme.")] = 1_000_000_000
    pin_memory: Annotated[Flag, _PINNED] = True


class OffloadOptimizer(_Offload):
    """Where master weights, the optimizer's state and reduced gradients live."""

    nvme_path: Annotated[Texts | None, _FOLDER] = None
    buffer_count: Annotated[Positive, Key("Buffers between host memory and disk.")] = 4
    pin_memory: Annotated[Flag, _PINNED] = True
    pipeline_read: Annotated[
        Flag, Key("Read the next tile while this one is updated.", differs="Upstream's default is false.")
    ] = True
    pipeline_write: Annotated[
        Flag, Key("Write the last tile while this one is updated.", differs="Upstream's default is false.")
    ] = True
    fast_init: Annotated[
        Flag,
        Key(
            "Set up the state on the disk in fewer, larger writes.",
            NO_EFFECT,
            differs="A tile is written once when it is made, in one piece.",
        ),
    ] = False
    ratio: Annotated[
        Fraction,
        Key(
            "Share of the state that is moved out (Twin-Flow).",
            differs="By elements, at stages 1 to 3 and with any optimizer; upstream counts tiles, at stage 3.",
        ),
    ] = 1.0
    super_offload: Annotated[
        Flag,
        Key(
            "Update states that are moved out while backward goes on, and take back what turns out wrong.",
            differs="Exact to the bit, at stages 1 to 3, on both devices and with any optimizer; it goes on beside "
            "clipping. While backward runs, states are kept twice.",
        ),
    ] = False
    cpuadam_cores_perc: Annotated[
        Fraction,
        Key(
            "Share of the host's cores for the update.",
            NO_EFFECT,
            differs="It belongs to SuperOffload, whose updates run in the process of the rank here.",
        ),
    ] = 0.8


class ZenFlow(Section):
    """Offload whose important gradients are applied at once on the device, the rest later on the host."""

    topk_ratio: Annotated[Fraction, Key("Share of columns that count as important.")] = 0.1
    select_strategy: Annotated[Literal["auto", "step", "epoch"], Key("When the important columns are chosen.")] = "auto"
    select_interval: Annotated[AutoOrInt, Key("Steps or epochs between choices.")] = "auto"
    update_interval: Annotated[AutoOrInt, Key("Steps between updates on the host.")] = "auto"
    overlap_step: Annotated[Flag, Key("Run the update on the host beside the next steps.")] = False
    offload: Annotated[Flag, Key("Also move the selected state to the host.")] = False
    auto_ratio: Annotated[Fraction, Key("Share of gradient norm that an automatic interval keeps.")] = 0.99
    full_warm_up_rounds: Annotated[Count, Key("Rounds at the start in which all columns are updated.")] = 0
    pt_reserved_cores_perc: Annotated[Fraction, Key("Share of cores left to PyTorch.")] = 0.5
    steps_per_epoch: Annotated[Count | None, Key("Steps in an epoch; filled in by the engine.")] = None

    def asking(self) -> tuple[str, ...]:
        return ("",)


class LoCo(Section):
    """Error feedback for quantised gradients."""

    err_beta: Annotated[Number, Key("Share of the old error that is kept.")]
    reset_T: Annotated[Positive, Key("Steps after which the error is forgotten.")]

    def asking(self) -> tuple[str, ...]:
        return ("",)


class LeafModule(Section):
    """Modules that are gathered as a whole at stage 3."""

    classes: Annotated[Texts, Key("Dotted class names.")] = _MOE_BLOCKS
    names: Annotated[Texts, Key("Names in the module tree.")] = ()
    name_suffixes: Annotated[Texts, Key("Endings of names in the module tree.")] = ()


def _cpu_if_true(value: object) -> object:
    return {"device": "cpu"} if value is True else (None if value in (False, None) else value)


_INTERNAL = "A detail of upstream's implementation that has no counterpart here."


class ZeroOptimization(Section):
    """Partition the optimizer's state (stage 1), gradients (2) and parameters (3) over the data-parallel ranks."""

    shorthand: ClassVar[str] = "stage"
    renamed: ClassVar[Mapping[str, Renamed]] = {
        "cpu_offload": Renamed(
            to="offload_optimizer", convert=_cpu_if_true, note='write "offload_optimizer": {"device": "cpu"}'
        ),
        "cpu_offload_param": Renamed(
            to="offload_param", convert=_cpu_if_true, note='write "offload_param": {"device": "cpu"}'
        ),
        "cpu_offload_use_pin_memory": Renamed(to="", note='write "pin_memory" inside the offload section'),
        "stage3_gather_fp16_weights_on_model_save": Renamed(
            to="gather_16bit_weights_on_model_save", note='write "stage3_gather_16bit_weights_on_model_save"'
        ),
    }
    mistaken: ClassVar[Mapping[str, str]] = {
        "grad_hooks": "upstream documents the key, and no version of it reads it; remove it",
        "stage3": 'write the stage as "stage": 3',
    }

    stage: Annotated[
        Stage,
        Key(
            "0 partitions nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too.",
            auto=Auto.NEEDED,
            auto_text="the stage",
            differs='"auto" asks for a value; upstream takes stage 0 without a word.',
        ),
    ] = 0
    contiguous_gradients: Annotated[
        Flag,
        Key(
            "Copy gradients into one buffer as they are made.",
            NO_EFFECT,
            differs="Gradients always go through one buffer.",
        ),
    ] = True
    reduce_scatter: Annotated[
        Flag,
        Key(
            "Reduce each gradient only to the rank that owns it, not to all ranks.",
            NO_EFFECT,
            differs="From stage 1 on each gradient goes to its owner, and at stage 0 to all ranks. "
            "False lifts the rule against scaling before the sum.",
        ),
    ] = True
    reduce_bucket_size: Annotated[
        Positive, Key("Elements that are reduced in one collective.", differs="0 is refused.")
    ] = 500_000_000
    use_multi_rank_bucket_allreduce: Annotated[
        Flag, Key("Join the buckets of several ranks into one all-reduce.", NO_EFFECT, differs=_INTERNAL)
    ] = True
    allgather_partitions: Annotated[
        Flag,
        Key(
            "All-gather updated parameters instead of broadcasting them.",
            NO_EFFECT,
            differs="Always all-gather; upstream does not read it.",
        ),
    ] = True
    allgather_bucket_size: Annotated[
        Positive, Key("Elements of parameters that are gathered in one collective. Even.", differs="0 is refused.")
    ] = 500_000_000
    overlap_comm: Annotated[
        Flag | None,
        Key(
            "Reduce gradients while backward goes on; null is true.", differs="Upstream's null is false below stage 3."
        ),
    ] = None
    load_from_fp32_weights: Annotated[
        Flag,
        Key(
            "Restore master weights from the checkpoint's fp32 copy.",
            PLANNED,
            feature="restoring master weights from 16-bit weights",
            instead="keep it true",
            differs="True works.",
        ),
    ] = True
    elastic_checkpoint: Annotated[
        Flag,
        Key(
            "Save state in a layout for other world sizes.",
            NO_EFFECT,
            differs="Every checkpoint loads at any world size and any stage.",
        ),
    ] = False
    offload_param: Annotated[
        OffloadParam | None,
        Key(
            "Keep the shards of parameters off the device; stage 3 only.",
            differs="On a CPU, device cpu changes nothing.",
        ),
    ] = None
    offload_optimizer: Annotated[
        OffloadOptimizer | None,
        Key(
            "Keep the optimizer's state off the device; stages 1 to 3.",
            differs="On a CPU, device cpu changes nothing. Device nvme is for all of these stages.",
        ),
    ] = None
    zenflow: Annotated[ZenFlow | None, Key("Offload without stalls.", PLANNED, feature="ZenFlow")] = None
    sub_group_size: Annotated[
        Positive,
        Key(
            "Elements of a rank's shard that are brought in from elsewhere, and updated, at a time.",
            differs="For states that are offloaded; a single parameter is never divided.",
        ),
    ] = 1_000_000_000
    prefetch_bucket_size: Annotated[
        Count | None,
        Key(
            "Most elements of parameters gathered ahead of use at stage 3; null gathers one unit ahead.",
            aliases=("stage3_prefetch_bucket_size",),
            differs="Upstream's default is 5e7.",
        ),
    ] = None
    param_persistence_threshold: Annotated[
        Count,
        Key("Parameters with fewer elements stay whole at stage 3.", aliases=("stage3_param_persistence_threshold",)),
    ] = 100_000
    model_persistence_threshold: Annotated[
        Count,
        Key("Most elements that stay whole in all at stage 3.", aliases=("stage3_model_persistence_threshold",)),
    ] = sys.maxsize
    max_live_parameters: Annotated[
        Count | None,
        Key(
            "Most elements kept gathered for reuse at stage 3; null does not limit them.",
            aliases=("stage3_max_live_parameters",),
            differs="Upstream's default is 1e9.",
        ),
    ] = None
    max_reuse_distance: Annotated[
        Count,
        Key(
            "Keep a parameter gathered when at most this many elements are used before it is used again; 0 never does.",
            aliases=("stage3_max_reuse_distance",),
            differs="The default takes the least memory; upstream's is 1e9.",
        ),
    ] = 0
    gather_16bit_weights_on_model_save: Annotated[
        Flag,
        Key(
            "Allow whole 16-bit weights to be saved at stage 3.",
            NO_EFFECT,
            aliases=("stage3_gather_16bit_weights_on_model_save",),
            differs="Always allowed: `Engine.export` writes whole weights at any stage.",
        ),
    ] = False
    module_granularity_threshold: Annotated[
        Count,
        Key(
            "Modules with fewer elements per descendant are gathered as one.",
            aliases=("stage3_module_granularity_threshold",),
        ),
    ] = 0
    use_all_reduce_for_fetch_params: Annotated[
        Flag,
        Key(
            "Gather parameters by all-reduce.",
            PLANNED,
            aliases=("stage3_use_all_reduce_for_fetch_params",),
            feature="gathering parameters by all-reduce",
        ),
    ] = False
    allgather_sequential: Annotated[
        Flag,
        Key(
            "Gather parameters one at a time.",
            PLANNED,
            aliases=("stage3_allgather_sequential",),
            feature="gathering parameters one at a time",
            instead='bound the memory with "stage3_max_live_parameters" and "stage3_prefetch_bucket_size": 0',
        ),
    ] = False
    ignore_unused_parameters: Annotated[
        Flag, Key("Take a parameter without gradient as it is; false makes it an error.")
    ] = True
    legacy_stage1: Annotated[
        Flag,
        Key(
            "The first implementation of stage 1.",
            PLANNED,
            feature="the first implementation of stage 1 (nor has upstream)",
            instead='use "stage": 1',
        ),
    ] = False
    round_robin_gradients: Annotated[
        Flag,
        Key(
            "Spread gradients over ranks in turn.",
            NO_EFFECT,
            differs="Shards are of equal size whatever the order; the key balances upstream's copies to the host.",
        ),
    ] = False
    zero_hpz_partition_size: Annotated[
        Positive,
        Key(
            "Ranks over which a second copy of the parameters is split (ZeRO++ hpZ), at stage 3.",
            differs="Backward and further micro-batches both gather from the second copy.",
        ),
    ] = 1
    zero_quantized_weights: Annotated[Flag, Key("All-gather int8 weights (ZeRO++ qwZ), at stage 3.")] = False
    zero_quantized_nontrainable_weights: Annotated[
        Flag,
        Key(
            "Hold and gather frozen weights in int8, at stage 3.",
            differs="Concerns parameters of two dimensions or more that `param_persistence_threshold` does not keep "
            "whole. Checkpoints and exports hold the values that the int8 weights stand for.",
        ),
    ] = False
    zero_quantized_gradients: Annotated[
        Flag,
        Key(
            "Reduce int4 gradients (ZeRO++ qgZ), from stage 1 on.",
            differs="Within a node gradients travel as int8, and are int4 between nodes only; upstream wants stage 3.",
        ),
    ] = False
    zeropp_loco_param: Annotated[
        LoCo | None,
        Key(
            "Error feedback for quantised gradients (LoCo).",
            differs="`reset_T` counts optimizer steps; upstream counts calls, so its interval depends on the model.",
        ),
    ] = None
    mics_shard_size: Annotated[
        Integer,
        Key(
            "Ranks that share one copy of the model (MiCS), with replicas of it on the others; -1 or 0 is all.",
            differs="Works at every stage, and a checkpoint loads at any other size.",
        ),
    ] = -1
    mics_hierarchical_params_gather: Annotated[
        Flag, Key("Gather in two steps, between and within nodes (MiCS), at stage 3.")
    ] = False
    memory_efficient_linear: Annotated[
        Flag,
        Key(
            "Use a linear layer that does not save its gathered weight.",
            NO_EFFECT,
            differs=_INTERNAL + " No gathered weight, nor its copy under autocast, outlives its use.",
        ),
    ] = True
    pipeline_loading_checkpoint: Annotated[
        Flag, Key("Ranks of a node load one after another.", PLANNED, feature="loading rank after rank")
    ] = False
    override_module_apply: Annotated[
        Flag, Key("Gather parameters inside `nn.Module.apply`.", NO_EFFECT, differs=_INTERNAL)
    ] = True
    log_trace_cache_warnings: Annotated[
        Flag, Key("Warn when modules run in another order than recorded.", NO_EFFECT, differs=_INTERNAL)
    ] = False
    enable_sanity_checks: Annotated[
        Flag, Key("Check internal state while training.", PLANNED, feature="checks of internal state while training")
    ] = False
    save_muon_momentum_buffer_in_memory: Annotated[
        Flag, Key("Keep Muon's momentum in host memory beside NVMe.", PLANNED, feature="Muon with NVMe offload")
    ] = False
    leaf_module: Annotated[
        LeafModule,
        Key(
            "Modules that are gathered as a whole.",
            differs="Repeated blocks, and modules that pick among experts, are leaves without being named. A class or "
            "name that matches nothing is an error.",
        ),
    ] = Field(default_factory=LeafModule)


class Aio(Section):
    """Asynchronous file access for NVMe offload."""

    block_size: Annotated[Positive, Key("Bytes of one request.")] = 1_048_576
    queue_depth: Annotated[Positive, Key("Requests in flight.")] = 8
    intra_op_parallelism: Annotated[Positive, Key("Threads that share one read or write.")] = 1
    single_submit: Annotated[
        Flag, Key("Submit requests one by one.", NO_EFFECT, differs="The queue submits what there is.")
    ] = False
    overlap_events: Annotated[
        Flag, Key("Submit and collect at the same time.", NO_EFFECT, differs="The queue always does.")
    ] = True
    use_gds: Annotated[Flag, Key("Move data from disk to GPU directly.", PLANNED, feature="GPUDirect storage")] = False
    thread_count: Annotated[
        Positive | None,
        Key("Threads.", NO_EFFECT, differs="Nothing reads it upstream either; see intra_op_parallelism."),
    ] = None

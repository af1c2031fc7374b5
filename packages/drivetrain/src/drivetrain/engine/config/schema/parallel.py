"""Sections about splitting or compiling the model: `tensor_parallel`, `expert_parallel`, `pipeline`, `hybrid_engine`,
`compile`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from drivetrain.engine.config.schema.keys import (
    NO_EFFECT,
    PLANNED,
    Count,
    Dtype,
    Flag,
    Key,
    Number,
    Positive,
    Section,
    Text,
    Texts,
    wrong,
)


def _number_or_auto(value: object) -> object:
    if value == "auto" or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise wrong('expected "auto" or a number')


AutoOrInt = Annotated[int | Literal["auto"], BeforeValidator(_number_or_auto)]
AutoOrNumber = Annotated[float | Literal["auto"], BeforeValidator(_number_or_auto)]
_GIVEN_IN_CODE = "A Python object that upstream fills in; a file can only leave it null."


class LayerSpec(Section):
    """How layers of some names are split."""

    patterns: Annotated[Texts, Key("Regular expressions on names.")] = ()
    partition_type: Annotated[Literal["column", "row", "skip"], Key("Split by output, by input, or not.")] = "column"
    shape: Annotated[tuple[object, ...] | None, Key("Shape in which the weight is seen before it is split.")] = None
    partition_dim: Annotated[Count | None, Key("Dimension that is split.")] = None
    model_types: Annotated[Texts | None, Key("Model types that this holds for.")] = None
    gather_output: Annotated[Flag, Key("Gather the output.")] = False
    grad_allreduce: Annotated[Flag, Key("All-reduce the gradient.")] = False


class PartitionConfig(Section):
    """How layers are split."""

    use_default_specs: Annotated[Flag, Key("Use built-in rules too.")] = True
    layer_specs: Annotated[tuple[LayerSpec, ...], Key("Rules; the first that fits wins.")] = ()
    embedding_partition_dim: Annotated[Literal[0, 1], Key("Dimension of embeddings that is split.")] = 1
    lm_head_patterns: Annotated[Texts, Key("Names of the output layer.")] = ("lm_head", "embed_out")
    strict_mode: Annotated[Flag, Key("Refuse layers without a rule.")] = False
    tp_size: Annotated[Positive | None, Key("Ranks of tensor parallelism.")] = None


class TpSize(Section):
    """Size of the tensor-parallel group."""

    tp_size: Annotated[Positive, Key("Ranks of tensor parallelism.")] = 1
    tp_grain_size: Annotated[Positive, Key("Multiple that splits keep to.")] = 1
    mpu: Annotated[None, Key("Model-parallel unit.", NO_EFFECT, differs=_GIVEN_IN_CODE)] = None
    tp_group: Annotated[None, Key("Process group.", NO_EFFECT, differs=_GIVEN_IN_CODE)] = None


class TensorParallel(Section):
    """Split layers over ranks (AutoTP)."""

    shorthand: ClassVar[str] = "autotp_size"

    dtype: Annotated[Dtype, Key("Format of the weights.")] = "fp16"
    autotp_size: Annotated[Count, Key("Ranks of tensor parallelism; 0 is off.")] = 0
    tp_overlap_comm: Annotated[Flag, Key("Overlap communication with compute.")] = False
    tensor_parallel: Annotated[TpSize, Key("Size of the group.", aliases=("tp",))] = Field(default_factory=TpSize)
    injection_policy_tuple: Annotated[Texts | None, Key("Names of layers whose output is reduced.")] = None
    partition_config: Annotated[PartitionConfig | None, Key("How layers are split.")] = None
    preset_model: Annotated[
        Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None, Key("Built-in rules.")
    ] = None
    keep_module_on_host: Annotated[Flag, Key("Load shards in host memory.")] = False
    replace_with_kernel_inject: Annotated[Flag, Key("Put in fused layers.", aliases=("kernel_inject",))] = False

    def asking(self) -> tuple[str, ...]:
        if self.autotp_size > 1:
            return ("autotp_size",)
        return ("tensor_parallel.tp_size",) if self.tensor_parallel.tp_size > 1 else ()


class ExpertParallel(Section):
    """Spread the experts of a model over ranks (AutoEP)."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Spread experts.")] = False
    autoep_size: Annotated[Positive, Key("Ranks of expert parallelism.")] = 1
    expert_tensor_parallel_size: Annotated[Literal[1], Key("Ranks that split an expert.")] = 1
    validate_folding_routing: Annotated[Flag, Key("Check routing when combined with tensor parallelism.")] = False
    preset_model: Annotated[
        Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3"] | None, Key("Built-in rules.")
    ] = None
    moe_layer_pattern: Annotated[Text | None, Key("Names of MoE layers.")] = None
    expert_pattern: Annotated[Text | None, Key("Names of experts.")] = None
    router_pattern: Annotated[Text | None, Key("Names of routers.")] = None
    use_grouped_mm: Annotated[Flag, Key("One grouped matrix product for all experts.")] = True
    disable_triton_grouped_mm: Annotated[Flag, Key("Not in Triton.")] = False
    route_norm: Annotated[Flag | None, Key("Normalise the weights of the chosen experts.")] = None
    route_scale: Annotated[Number, Key("Factor on the weights.")] = 1.0
    score_apply: Annotated[Literal["auto", "pre", "post"], Key("Weights before or after the experts.")] = "auto"
    combine_impl: Annotated[Literal["auto", "weighted_sum", "legacy_bmm"], Key("How outputs are added up.")] = "auto"
    num_expert_groups: Annotated[Positive | None, Key("Groups of experts.")] = None
    num_limited_groups: Annotated[Positive | None, Key("Groups that a token may use.")] = None
    score_func: Annotated[Literal["auto", "softmax", "sigmoid"], Key("Scores of experts.")] = "auto"
    top_k: Annotated[AutoOrInt, Key("Experts of a token.")] = "auto"
    load_balance_coeff: Annotated[None, Key("Weight of a balance loss; only null.")] = None
    routed_scaling_factor: Annotated[AutoOrNumber, Key("Factor on the output.")] = "auto"
    expert_w1: Annotated[Text | None, Key("Name of the gate weight.")] = None
    expert_w2: Annotated[Text | None, Key("Name of the down weight.")] = None
    expert_w3: Annotated[Text | None, Key("Name of the up weight; null means fused with the gate.")] = None
    num_experts_attr: Annotated[Text | None, Key("Attribute with the number of experts.")] = None
    top_k_attr: Annotated[Text | None, Key("Attribute with the experts of a token.")] = None
    has_shared_experts: Annotated[Flag | None, Key("There are shared experts.")] = None
    shared_experts_pattern: Annotated[Text | None, Key("Names of shared experts.")] = None
    shared_experts_gate_pattern: Annotated[Text | None, Key("Names of their gates.")] = None


_FROM_CODE = "Not read upstream either: it comes from the arguments of PipelineModule."


class Pipeline(Section):
    """Pipeline parallelism."""

    stages: Annotated[AutoOrInt, Key("Stages.", NO_EFFECT, differs=_FROM_CODE)] = "auto"
    partition: Annotated[Text, Key("How layers are divided.", NO_EFFECT, differs=_FROM_CODE)] = "best"
    seed_layers: Annotated[Flag, Key("A seed for each layer.", NO_EFFECT, differs=_FROM_CODE)] = False
    activation_checkpoint_interval: Annotated[Count, Key("Layers between recomputation points; 0 is none.")] = 0
    pipe_partitioned: Annotated[Flag, Key("Split activations between stages over model-parallel ranks.")] = True
    grad_partitioned: Annotated[Flag, Key("The same for gradients.")] = True
    use_reentrant: Annotated[Flag, Key("Use reentrant recomputation.")] = True


class HybridEngine(Section):
    """Training and generation with one set of weights."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Generate between steps.")] = False
    max_out_tokens: Annotated[Positive, Key("Longest sequence.")] = 512
    inference_tp_size: Annotated[Positive, Key("Ranks of tensor parallelism in generation.")] = 1
    release_inference_cache: Annotated[Flag, Key("Free the cache after generation.")] = False
    pin_parameters: Annotated[Flag, Key("Keep gathered parameters.")] = True
    tp_gather_partition_size: Annotated[Positive, Key("Ranks that gather together.")] = 8
    enable_cuda_graph: Annotated[Flag, Key("Capture CUDA graphs.")] = False


_UNMOVED = "Nothing of a compiled pass is moved to the host in this version."


class Compile(Section):
    """Communication placed in compiled graphs (DeepCompile)."""

    shorthand: ClassVar[str] = "deepcompile"

    deepcompile: Annotated[
        Flag,
        Key(
            "Capture forward and backward as graphs, and plan gathers and reductions in them.",
            differs=(
                "In force from `initialize` on, with inductor; `engine.compile` chooses another backend. What cannot "
                "be compiled goes on with hooks, and `engine.compile_report` says why."
            ),
        ),
    ] = False
    free_activation: Annotated[
        Flag, Key("Free activations early.", NO_EFFECT, differs="Graphs always free a value after its last use.")
    ] = False
    free_activation_threshold: Annotated[
        Count,
        Key(
            "Bytes of the smallest activation that is freed.",
            NO_EFFECT,
            differs="Graphs always free a value after its last use.",
        ),
    ] = 10_485_760
    offload_activation: Annotated[
        Flag,
        Key(
            "Move activations to the host.",
            PLANNED,
            feature="moving activations of compiled passes to the host",
            instead="recompute them: torch.utils.checkpoint works in compiled passes",
        ),
    ] = False
    offload_activation_pin_memory: Annotated[Flag, Key("Into page-locked memory.", NO_EFFECT, differs=_UNMOVED)] = True
    offload_opt_states: Annotated[
        Flag,
        Key(
            "Move optimizer state to the host where memory is short.",
            PLANNED,
            feature="moving optimizer state to the host during compiled passes",
            instead="split it over more ranks",
        ),
    ] = False
    double_buffer: Annotated[
        Flag, Key("Two buffers in turn.", NO_EFFECT, differs="It belongs to an extension in C++ of upstream's.")
    ] = True
    symmetric_memory: Annotated[
        Flag, Key("Gather through symmetric memory.", PLANNED, feature="gathers through symmetric memory")
    ] = False
    debug_log: Annotated[Flag, Key("Log each plan, at the level `info`.")] = False
    offload_parameters: Annotated[
        Flag,
        Key(
            "Move parameters to the host.",
            PLANNED,
            feature="moving parameters to the host during compiled passes",
            instead="split them over more ranks",
        ),
    ] = False
    sync_before_reduce: Annotated[Flag, Key("Wait for the device before each gradient is reduced.")] = False
    sync_after_reduce: Annotated[Flag, Key("Wait for reductions after each gradient.")] = False
    sync_before_allgather: Annotated[Flag, Key("Wait for the device before each gather.")] = False
    sync_after_allgather: Annotated[Flag, Key("Wait for each gather where it starts.")] = False
    keep_int_input_tensors: Annotated[
        Flag,
        Key(
            "Keep integer inputs to run graphs again.", NO_EFFECT, differs="Real passes are measured, none is repeated."
        ),
    ] = True
    keep_all_input_tensors: Annotated[
        Flag, Key("Keep all inputs for that.", NO_EFFECT, differs="Real passes are measured, none is repeated.")
    ] = False
    passes: Annotated[
        tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None,
        Key(
            "Which passes; null is those of the stage. z1 is for stages 1 and 2, z3 for stage 3; others are refused.",
        ),
    ] = None

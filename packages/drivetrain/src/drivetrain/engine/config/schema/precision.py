"""Sections about number formats: `fp16`, `bf16`, `amp`, `torch_autocast`, `data_types`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field

from drivetrain.engine.config.schema.keys import (
    NO_EFFECT,
    PLANNED,
    Count,
    Dtype,
    Flag,
    Key,
    NonNegative,
    Positive,
    Section,
    Text,
    Texts,
    whole,
)

Power = Annotated[int, Field(ge=0, le=127), BeforeValidator(whole)]
"""An exponent of 2 within the range of float32."""

_AUTO_ENABLED = "false, unless a hint says otherwise"
_KEEP_MASTERS = "keep it false: masters and gradients stay in fp32"


class Fp16(Section):
    """Training in float16, with loss scaling."""

    shorthand: ClassVar[str] = "enabled"
    mistaken: ClassVar[Mapping[str, str]] = {
        "fp16_master_weights_and_gradients": 'the key is spelled "fp16_master_weights_and_grads"',
    }

    enabled: Annotated[Flag, Key("Compute in float16. Not together with bf16.", auto_text=_AUTO_ENABLED)] = False
    auto_cast: Annotated[Flag, Key("Cast floating-point inputs of the model to float16.")] = False
    loss_scale: Annotated[NonNegative, Key("Constant loss scale; 0 finds it by itself (dynamic).")] = 0.0
    initial_scale_power: Annotated[Power, Key("A dynamic scale starts at 2 to this power.")] = 16
    loss_scale_window: Annotated[Count, Key("Steps without overflow after which a dynamic scale doubles.")] = 1000
    hysteresis: Annotated[
        Positive, Key("Overflows to sit out before a dynamic scale halves: 1 halves at once, 2 lets one pass.")
    ] = 2
    consecutive_hysteresis: Annotated[
        Flag, Key("Start counting `hysteresis` anew after each good step, not only when the scale grows.")
    ] = False
    min_loss_scale: Annotated[NonNegative, Key("A dynamic scale never falls below this.")] = 1.0
    fp16_master_weights_and_grads: Annotated[
        Flag,
        Key(
            "Keep master weights and gradients in float16.",
            PLANNED,
            feature="keeping master weights and gradients in fp16",
            instead=_KEEP_MASTERS,
        ),
    ] = False


class Bf16(Section):
    """Training in bfloat16, with fp32 master weights."""

    shorthand: ClassVar[str] = "enabled"
    mistaken: ClassVar[Mapping[str, str]] = {
        "check_overflow": 'the key is spelled "check_grad_overflow"',
        "auto_cast": "only fp16 casts inputs; pass the inputs in bfloat16, or as integers",
        "loss_scale": "bfloat16 has the range of float32 and needs no loss scale; remove the key",
    }

    enabled: Annotated[Flag, Key("Compute in bfloat16. Not together with fp16.", auto_text=_AUTO_ENABLED)] = False
    immediate_grad_update: Annotated[
        Flag,
        Key(
            "Add each gradient to the fp32 accumulator as soon as it is made.",
            NO_EFFECT,
            differs="Gradients are always accumulated as they are made, in `data_types.grad_accum_dtype`.",
        ),
    ] = False
    check_grad_overflow: Annotated[Flag, Key("Skip a step whose gradients are not finite.")] = True
    bf16_master_weights_and_grads: Annotated[
        Flag,
        Key(
            "Keep master weights and gradients in bfloat16.",
            PLANNED,
            feature="keeping master weights and gradients in bf16",
            instead=_KEEP_MASTERS,
        ),
    ] = False
    bf16_optimizer_states: Annotated[
        Flag,
        Key(
            "Keep the optimizer's moments in bfloat16.",
            PLANNED,
            feature="keeping the optimizer's moments in bf16",
            instead="keep it false",
        ),
    ] = False


class Amp(Section):
    """Mixed precision by NVIDIA Apex. Its options are Apex's own, so any name is taken here."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())
    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Hand the model to Apex.")] = False
    opt_level: Annotated[Text, Key("Apex's level, O0 to O3.")] = "O1"


class TorchAutocast(Section):
    """Mixed precision by torch.autocast."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Run the forward pass under torch.autocast.")] = False
    dtype: Annotated[Dtype | None, Key("What autocast computes in; null is the device's default.")] = None
    lower_precision_safe_modules: Annotated[
        Texts | None,
        Key("Dotted class names whose parameters are communicated in `dtype`; null is Linear and Conv1d to Conv3d."),
    ] = None


class DataTypes(Section):
    """Number formats apart from the compute format."""

    grad_accum_dtype: Annotated[
        Dtype | None, Key("Format in which gradients add up over micro-batches; null is the model's.")
    ] = None
    param_dtype: Annotated[
        Dtype | None, Key("Format of the parameters. It must be the one that fp16 and bf16 choose.")
    ] = None
    buffer_dtype: Annotated[
        Dtype | None, Key("Cast the model's floating-point buffers to this; null leaves them as they are.")
    ] = None


class SparseAttention(Section):
    """Block-sparse attention patterns, for a model that asks for them."""

    mode: Annotated[Text, Key("fixed, dense, variable, bigbird or bslongformer.")] = "fixed"
    block: Annotated[Positive, Key("Side of a block, in tokens.")] = 16
    different_layout_per_head: Annotated[Flag, Key("One pattern for each head.")] = False
    num_local_blocks: Annotated[Count, Key("Blocks in a local window.")] = 4
    num_global_blocks: Annotated[Count, Key("Blocks of a window that all others see.")] = 1
    attention: Annotated[Text, Key("bidirectional or unidirectional.")] = "bidirectional"
    horizontal_global_attention: Annotated[Flag, Key("Global blocks also see all others.")] = False
    num_different_global_patterns: Annotated[Count, Key("How many ways of choosing global blocks.")] = 1
    num_random_blocks: Annotated[Count, Key("Random blocks in each row.")] = 0
    local_window_blocks: Annotated[tuple[Count, ...], Key("Sizes of the first local windows, in blocks.")] = (4,)
    global_block_indices: Annotated[tuple[Count, ...], Key("Which blocks are global, or where ranges start.")] = (0,)
    global_block_end_indices: Annotated[tuple[Count, ...] | None, Key("Where ranges of global blocks end.")] = None
    num_sliding_window_blocks: Annotated[Count, Key("Blocks in the sliding window.")] = 3

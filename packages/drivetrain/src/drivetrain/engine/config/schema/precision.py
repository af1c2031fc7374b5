"""Sections about number formats: `fp16`, `bf16`, `amp`, `torch_autocast`, `data_types`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field

from drivetrain.engine.config.schema.keys import (
    NO_EFFECT,
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


class Fp16(Section):
    """Training in float16, with loss scaling."""

    shorthand: ClassVar[str] = "enabled"
    mistaken: ClassVar[Mapping[str, str]] = {
        "fp16_master_weights_and_gradients": 'the key is spelled "fp16_master_weights_and_grads"',
    }

    enabled: Annotated[Flag, Key("Compute in float16. Not together with bf16.", auto_text=_AUTO_ENABLED)] = False
    auto_cast: Annotated[
        Flag, Key("Cast floating-point inputs of the model to float16. `drivetrain.auto_cast` does it for bf16 too.")
    ] = False
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
            "Update the float16 parameters themselves, from float16 gradients: no fp32 master weights. Moments are "
            "fp32.",
            differs="Works at any stage and on any device; upstream needs stages 1 to 3 and its CPU Adam.",
        ),
    ] = False


class Bf16(Section):
    """Training in bfloat16."""

    shorthand: ClassVar[str] = "enabled"
    mistaken: ClassVar[Mapping[str, str]] = {
        "check_overflow": 'the key is spelled "check_grad_overflow"',
        "auto_cast": 'upstream has it for fp16 only; write "drivetrain": {"auto_cast": true}, which goes for both',
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
            "Update the bfloat16 parameters themselves, from bfloat16 gradients: no fp32 master weights.",
            differs="Works at any stage and on any device; upstream needs stages 1 to 3, and its CPU Adam unless "
            "`bf16_optimizer_states` is set too.",
        ),
    ] = False
    bf16_optimizer_states: Annotated[
        Flag,
        Key(
            "Keep the optimizer's moments in bfloat16.",
            differs="Goes with fp32 master weights too; upstream needs `bf16_master_weights_and_grads`.",
        ),
    ] = False


class Amp(Section):
    """Mixed precision by NVIDIA Apex. Its options are Apex's own, so any name is taken here."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())
    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Hand the model to Apex.")] = False
    opt_level: Annotated[Text, Key("Apex's level, O0 to O3.")] = "O1"


class TorchAutocast(Section):
    """Mixed precision by torch.autocast, over parameters that stay as they are. In fp16 the loss carries a scale, by
    the keys of the `fp16` section."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[
        Flag, Key("Run the engine's forward pass under torch.autocast. Not together with fp16 or bf16.")
    ] = False
    dtype: Annotated[
        Dtype | None, Key("What autocast computes in: fp16 or bf16; null is torch's default for the device.")
    ] = None
    lower_precision_safe_modules: Annotated[
        Texts | None,
        Key(
            "Dotted names of classes whose own parameters travel in `dtype` when gradients are reduced, and at stage 3 "
            "gathered; all others in fp32, or in `communication_data_type`. null is Linear and Conv1d to Conv3d.",
            differs="A parameter that a module of another class owns too travels as it is.",
        ),
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

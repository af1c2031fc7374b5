"""What keys demand of each other.

Each rule looks at one configuration and yields what is wrong. A rule names the keys that it reads, so that it is left
out when one of those already has a problem of its own: a person is told about the cause, not about what follows from
it.

Limits of upstream that come from its implementation and are not shared: LAMB needs no dynamic loss scale; accumulation
under the caller's own count goes with any stage; 16-bit master weights and moments need no stage, no offload and not
each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from drivetrain.engine.config.schema.top import Config


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A broken rule."""

    path: str
    """Dotted field names of the key to blame."""
    message: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A demand that several keys make together."""

    reads: tuple[str, ...]
    check: Callable[[Config], Iterator[Conflict]]


def _one_format(config: Config) -> Iterator[Conflict]:
    if config.fp16.enabled and config.bf16.enabled:
        yield Conflict(
            path="bf16.enabled",
            message="fp16 and bf16 are both enabled, and a model computes in one format",
            hint="set one of them to false; bf16 has the wider range and needs no loss scale",
        )


def _autocast_alone(config: Config) -> Iterator[Conflict]:
    other = config.model_dtype
    if config.torch_autocast.enabled and other != "fp32":
        yield Conflict(
            path="torch_autocast.enabled",
            message=f"torch_autocast computes over fp32 parameters, and the {other} section makes them {other}",
            hint=f"set one of the two to false; {other} takes less memory, torch_autocast keeps sensitive operations "
            "in fp32",
        )


def _autocast_dtype(config: Config) -> Iterator[Conflict]:
    if config.torch_autocast.enabled and config.torch_autocast.dtype == "fp32":
        yield Conflict(
            path="torch_autocast.dtype",
            message="autocast computes in 16 bits, bf16 or fp16",
            hint="choose one of them, or switch torch_autocast off for training in fp32",
        )


def _fp16_masters(config: Config) -> Iterator[Conflict]:
    if not (config.fp16.enabled and config.fp16.fp16_master_weights_and_grads):
        return
    if config.data_types.grad_accum_dtype not in (None, "fp16"):
        yield Conflict(
            path="data_types.grad_accum_dtype",
            message="fp16_master_weights_and_grads keeps gradients in fp16, not in "
            f"{config.data_types.grad_accum_dtype}",
            hint="remove the key, or set fp16_master_weights_and_grads to false",
        )
    if config.fp32_optimizer_states is False:
        yield Conflict(
            path="optimizer.params.fp32_optimizer_states",
            message="with fp16_master_weights_and_grads the moments would be fp16, which rounds squared gradients to 0",
            hint="remove the key, or use bf16",
        )


def _moments(config: Config) -> Iterator[Conflict]:
    if config.bf16.enabled and config.bf16.bf16_optimizer_states and config.fp32_optimizer_states:
        yield Conflict(
            path="optimizer.params.fp32_optimizer_states",
            message="bf16_optimizer_states keeps the moments in bf16, not in fp32",
            hint="remove one of the two keys",
        )


def _dynamic_scale(config: Config) -> Iterator[Conflict]:
    autocast = config.torch_autocast.enabled and config.torch_autocast.dtype == "fp16"
    if not (config.fp16.enabled or autocast) or config.fp16.loss_scale != 0:
        return
    if config.fp16.loss_scale_window == 0:
        yield Conflict(
            path="fp16.loss_scale_window",
            message="a dynamic loss scale (loss_scale 0) needs a window above 0, or it never grows back",
            hint="use 1000, or set a constant loss_scale",
        )
    if config.fp16.min_loss_scale == 0:
        yield Conflict(
            path="fp16.min_loss_scale",
            message="a dynamic loss scale (loss_scale 0) needs a smallest value above 0, or it can reach 0",
            hint="use 1, or set a constant loss_scale",
        )


def _sum_at_stage_3(config: Config) -> Iterator[Conflict]:
    if config.gradient_allreduce_op == "sum" and config.zero_optimization.stage == 3:
        yield Conflict(
            path="gradient_allreduce_op",
            message='stage 3 averages gradients; "sum" is for stages 0 to 2',
            hint='use "mean" (and multiply the learning rate if the sum was meant), or a lower stage',
        )


def _scaling_with_reduce_scatter(config: Config) -> Iterator[Conflict]:
    zero = config.zero_optimization
    if zero.stage < 2 or not zero.reduce_scatter or config.gradient_allreduce_op != "mean":
        return
    if config.gradient_predivide_factor != 1.0:
        yield Conflict(
            path="gradient_predivide_factor",
            message=f"with reduce_scatter at stage {zero.stage} gradients are averaged in one go, not divided before",
            hint='leave it 1, set "reduce_scatter" to false, or use "communication_data_type": "fp32" against overflow',
        )
    if config.prescale_gradients:
        yield Conflict(
            path="prescale_gradients",
            message=f"with reduce_scatter at stage {zero.stage} gradients are averaged in one go, not scaled before",
            hint='leave it false, or set "reduce_scatter" to false',
        )


def _frozen_below_stage_3(config: Config) -> Iterator[Conflict]:
    zero = config.zero_optimization
    if zero.zero_quantized_nontrainable_weights and zero.stage < 3:
        yield Conflict(
            path="zero_optimization.zero_quantized_nontrainable_weights",
            message=f"stage {zero.stage} keeps parameters whole, and only shards of them are held quantised",
            hint='use "stage": 3, or remove the key',
        )


def _offload_fits(config: Config) -> Iterator[Conflict]:
    zero = config.zero_optimization
    sections = {"offload_param": zero.offload_param, "offload_optimizer": zero.offload_optimizer}
    for name, section in sections.items():
        if section is None or section.device == "none":
            continue
        least = 3 if name == "offload_param" else 1
        if zero.stage < least:
            what = "shards of parameters are" if name == "offload_param" else "a shard of the states is"
            yield Conflict(
                path=f"zero_optimization.{name}.device",
                message=f"{what} what moves out, and ZeRO stage {zero.stage} has none",
                hint=f'use "stage": {least}' + ("" if least == 3 else " or above"),
            )
        if section.device == "nvme" and not section.nvme_path:
            yield Conflict(
                path=f"zero_optimization.{name}.nvme_path",
                message='device "nvme" needs a folder on the disk, and there is none',
                hint='write "nvme_path": "/path/on/the/disk"',
            )
        if section.device == "nvme" and section.buffer_count < 2:
            yield Conflict(
                path=f"zero_optimization.{name}.buffer_count",
                message="states and gradients are in a buffer each while they are used, and there is one buffer",
                hint="use at least 2; from 4 on, reads and writes overlap with the update",
            )


def _super_offload_of_nothing(config: Config) -> Iterator[Conflict]:
    section = config.zero_optimization.offload_optimizer
    if section is not None and section.super_offload and section.device == "none":
        yield Conflict(
            path="zero_optimization.offload_optimizer.super_offload",
            message="only states that are moved out are updated early, and device none keeps them all",
            hint='write "device": "cpu" or "nvme", or remove the key',
        )


def _even_bucket(config: Config) -> Iterator[Conflict]:
    size = config.zero_optimization.allgather_bucket_size
    if size % 2:
        yield Conflict(
            path="zero_optimization.allgather_bucket_size",
            message="the number of elements must be even, since shards are aligned to 2",
            hint=f"use {size + 1}",
        )


def _param_dtype(config: Config) -> Iterator[Conflict]:
    asked = config.data_types.param_dtype
    if asked is None or asked == config.model_dtype:
        return
    sections = {"fp16": '"fp16": {"enabled": true}', "bf16": '"bf16": {"enabled": true}', "fp32": "neither"}
    yield Conflict(
        path="data_types.param_dtype",
        message=f"the parameters are {config.model_dtype}, as the fp16 and bf16 sections say, not {asked}",
        hint=f"remove the key, or write {sections[asked]}"
        if asked != "fp32"
        else "remove the key, or switch the fp16 and bf16 sections off",
    )


def _bias_correction(config: Config) -> Iterator[Conflict]:
    optimizer = config.optimizer
    if optimizer is None or optimizer.type not in ("Adam", "AdamW"):
        return
    if optimizer.params.get("bias_correction") is False:
        yield Conflict(
            path="optimizer.params.bias_correction",
            message="this version's Adam always corrects the moments for their start at zero",
            hint='remove the key, or use "Lamb", which can do without',
        )


def _passes_of_the_stage(config: Config) -> Iterator[Conflict]:
    """DeepCompile's passes by name: those that belong to the stage, which run anyway, and no others."""
    stage = config.zero_optimization.stage
    fitting = {0: None, 1: "z1", 2: "z1", 3: "z3"}[stage]
    for name in config.compile.passes or () if config.compile.deepcompile else ():
        if name in ("autosp", "autotp"):
            yield Conflict(
                path="compile.passes",
                message=f'this version of Drivetrain does not support the pass "{name}" yet',
                hint="remove it from the list",
            )
        elif name != fitting:
            yield Conflict(
                path="compile.passes",
                message=f'the pass "{name}" does not belong to ZeRO stage {stage}',
                hint="leave the key out: the passes of the stage are the default",
            )


RULES = (
    Rule(reads=("fp16.enabled", "bf16.enabled"), check=_one_format),
    Rule(reads=("torch_autocast.enabled", "fp16.enabled", "bf16.enabled"), check=_autocast_alone),
    Rule(reads=("torch_autocast.enabled", "torch_autocast.dtype"), check=_autocast_dtype),
    Rule(
        reads=(
            "fp16.enabled",
            "fp16.fp16_master_weights_and_grads",
            "data_types.grad_accum_dtype",
            "optimizer.params.fp32_optimizer_states",
        ),
        check=_fp16_masters,
    ),
    Rule(
        reads=("bf16.enabled", "bf16.bf16_optimizer_states", "optimizer.params.fp32_optimizer_states"), check=_moments
    ),
    Rule(
        reads=(
            "fp16.enabled",
            "fp16.loss_scale",
            "fp16.loss_scale_window",
            "fp16.min_loss_scale",
            "torch_autocast.enabled",
            "torch_autocast.dtype",
        ),
        check=_dynamic_scale,
    ),
    Rule(reads=("gradient_allreduce_op", "zero_optimization.stage"), check=_sum_at_stage_3),
    Rule(
        reads=(
            "gradient_allreduce_op",
            "gradient_predivide_factor",
            "prescale_gradients",
            "zero_optimization.reduce_scatter",
            "zero_optimization.stage",
        ),
        check=_scaling_with_reduce_scatter,
    ),
    Rule(
        reads=("zero_optimization.zero_quantized_nontrainable_weights", "zero_optimization.stage"),
        check=_frozen_below_stage_3,
    ),
    Rule(
        reads=(
            "zero_optimization.stage",
            *(
                f"zero_optimization.{section}.{key}"
                for section in ("offload_param", "offload_optimizer")
                for key in ("device", "nvme_path", "buffer_count")
            ),
        ),
        check=_offload_fits,
    ),
    Rule(
        reads=("zero_optimization.offload_optimizer.super_offload", "zero_optimization.offload_optimizer.device"),
        check=_super_offload_of_nothing,
    ),
    Rule(reads=("zero_optimization.allgather_bucket_size",), check=_even_bucket),
    Rule(reads=("data_types.param_dtype", "fp16.enabled", "bf16.enabled"), check=_param_dtype),
    Rule(reads=("optimizer.type", "optimizer.params.bias_correction"), check=_bias_correction),
    Rule(
        reads=("compile.deepcompile", "compile.passes", "zero_optimization.stage"),
        check=_passes_of_the_stage,
    ),
)
"""All rules. Read-only."""


def advice(config: Config) -> Iterator[tuple[str, str]]:
    """What is allowed and looks like a mistake: dotted path and sentence."""
    size = config.vocabulary_size
    if size is not None and size % 8:
        yield (
            "vocabulary_size",
            f"{size} is no multiple of 8, which matrix units favour; {-(-size // 8) * 8} is the next",
        )
    if config.prescale_gradients and config.gradient_predivide_factor != 1.0:
        yield "gradient_predivide_factor", "has no effect beside prescale_gradients, which divides by all ranks at once"
    zero = config.zero_optimization
    given = sorted(_STAGE_3_KEYS.intersection(zero.changed()))
    if zero.stage < 3 and given:
        yield "zero_optimization", f"this is stage {zero.stage}, and only stage 3 uses {', '.join(given)}"
    yield from _format_advice(config)
    if config.scheduler is not None and config.scheduler.native is not None:
        yield from _schedule_advice(config.scheduler.arguments())


_STAGE_3_KEYS = frozenset(
    {
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
    }
)


def _format_advice(config: Config) -> Iterator[tuple[str, str]]:
    scaled = config.fp16.enabled or config.torch_autocast.enabled  # whose format may be decided by the device
    for path, dtype in (
        ("communication_data_type", config.communication_data_type),
        ("data_types.grad_accum_dtype", config.data_types.grad_accum_dtype),
    ):
        if dtype == "fp16" and not scaled:
            yield path, "gradients without a loss scale in fp16: those below 6e-8 become 0; bf16 has the range for them"
    if config.drivetrain.auto_cast and config.model_dtype == "fp32":
        yield "drivetrain.auto_cast", "has no effect, since neither fp16 nor bf16 is enabled"
    if config.fp32_optimizer_states is False and not config.updates_in_place:
        yield "optimizer.params.fp32_optimizer_states", "has no effect, since the master weights are fp32"
    decay = _slowest_decay(config)
    if config.moments_dtype == "bf16" and decay > _BF16_DECAY:
        yield (
            "bf16.bf16_optimizer_states" if config.bf16.bf16_optimizer_states else "optimizer.params",
            f"a second moment in bf16 hardly falls at a decay rate of {decay:g}, since a step down is less than half "
            'of the distance between two numbers; use "betas": [0.9, 0.95], or moments in fp32',
        )


_BF16_DECAY = 1 - 2.0**-8
"""Half of the distance between two numbers of bf16 is 2**-9 to 2**-8 of them: above this rate some round to
themselves, above 1 - 2**-9 all do."""


def _slowest_decay(config: Config) -> float:
    """The decay rate of the second moment, where the optimizer has one that is known here."""
    if config.optimizer is None or config.optimizer.native is None:
        return 0.0
    return float(config.optimizer.arguments().get("betas", (0.0,))[-1])


def _schedule_advice(arguments: dict[str, object]) -> Iterator[tuple[str, str]]:
    total, warmup = arguments.get("total_num_steps"), arguments.get("warmup_num_steps")
    if isinstance(total, int) and isinstance(warmup, int) and total <= warmup:
        yield (
            "scheduler.params.warmup_num_steps",
            f"the warm-up takes {warmup} of {total} steps, so the learning rate never decays",
        )
    low, high = arguments.get("cycle_min_lr"), arguments.get("cycle_max_lr")
    if isinstance(low, float) and isinstance(high, float) and low > high:
        yield (
            "scheduler.params.cycle_min_lr",
            f"{low:g} is above cycle_max_lr {high:g}, so the cycle falls before it rises",
        )

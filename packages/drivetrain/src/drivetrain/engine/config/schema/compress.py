"""Sections about smaller weights: `weight_quantization` and `compression_training`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from drivetrain.engine.config.schema.keys import (
    Count,
    Flag,
    Fraction,
    Key,
    Positive,
    Section,
    Text,
    Texts,
)


class QuantSpec(Section):
    """How a weight is quantised."""

    num_bits: Annotated[Literal[4, 8] | None, Key("Bits of an element.")] = None
    group_size: Annotated[Positive | None, Key("Elements that share a scale.")] = None
    group_dim: Annotated[Count | None, Key("Dimension along which groups lie.")] = None
    symmetric: Annotated[Flag, Key("No zero point.")] = False


class WeightQuantization(Section):
    """Quantised weights for inference at stage 3."""

    enabled: Annotated[Flag, Key("On by default upstream, and without effect alone.")] = True
    num_bits: Annotated[Positive, Key("Bits of an element.")] = 8
    q_type: Annotated[Text, Key("symmetric or asymmetric.")] = "symmetric"
    q_groups: Annotated[Positive, Key("Groups in a weight.")] = 1
    quantized_initialization: Annotated[QuantSpec, Key("Quantise while the model is built.")] = Field(
        default_factory=QuantSpec
    )
    post_init_quant: Annotated[dict[str, QuantSpec], Key("Quantise afterwards, by part of the name.")] = Field(
        default_factory=dict
    )

    def asking(self) -> tuple[str, ...]:
        asked = ["quantized_initialization"] if any(self.quantized_initialization.changed()) else []
        return (*asked, *(("post_init_quant",) if self.post_init_quant else ()))


class Group(Section):
    """Modules that are compressed in one way."""

    params: Annotated[dict[str, Any], Key("Parameters of the technique for this group.")] = Field(default_factory=dict)
    modules: Annotated[Texts, Key("Parts of module names.")] = ("*",)
    related_modules: Annotated[list[Any] | None, Key("Modules that must follow.")] = None


class MixedQuantize(Section):
    """From fp16 to quantised weights by degrees."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Mix.")] = False
    quantize_change_ratio: Annotated[Fraction, Key("Change for each step.")] = 0.001


class _Shared(Section):
    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Use the technique.")] = False


class WeightShared(_Shared):
    """For all groups."""

    quantizer_kernel: Annotated[Flag, Key("Use the CUDA kernel.")] = False
    schedule_offset: Annotated[Count, Key("First step.")] = 0
    quantize_groups: Annotated[Positive, Key("Groups in a weight.")] = 1
    quantize_verbose: Annotated[Flag, Key("Log changes.")] = False
    quantization_type: Annotated[Literal["symmetric", "asymmetric"], Key("With or without a zero point.")] = "symmetric"
    quantize_weight_in_forward: Annotated[Flag, Key("In forward; else in the optimizer's step.")] = False
    rounding: Annotated[Literal["nearest", "stochastic"], Key("Rounding.")] = "nearest"
    fp16_mixed_quantize: Annotated[MixedQuantize, Key("By degrees.")] = Field(default_factory=MixedQuantize)


class ActivationShared(_Shared):
    """For all groups."""

    quantization_type: Annotated[Literal["symmetric", "asymmetric"], Key("With or without a zero point.")] = "symmetric"
    range_calibration: Annotated[Literal["dynamic", "static"], Key("Where the range comes from.")] = "dynamic"
    schedule_offset: Annotated[Count, Key("First step.")] = 1000


class SparseShared(_Shared):
    """For all groups."""

    method: Annotated[Literal["l1", "topk", "snip_momentum"], Key("How weights are chosen.")] = "l1"
    schedule_offset: Annotated[Count, Key("First step.")] = 1000
    block_pattern: Annotated[Text, Key("Shape of a block.")] = "4x1"
    dense_ratio: Annotated[Fraction, Key("Share that is kept.")] = 0.1
    schedule_offset_stride: Annotated[Positive, Key("Steps between changes.")] = 1
    excluded_modules: Annotated[Texts, Key("Modules that are left alone.")] = ()
    schedule_offset_end: Annotated[Count | None, Key("Last step; null is the first.")] = None


class RowShared(_Shared):
    """For all groups."""

    method: Annotated[Literal["l1", "topk"], Key("How rows are chosen.")] = "l1"
    schedule_offset: Annotated[Count, Key("First step.")] = 1000


class HeadShared(_Shared):
    """For all groups."""

    method: Annotated[Literal["topk"], Key("How heads are chosen.")] = "topk"
    num_heads: Annotated[Positive | None, Key("Heads of a layer.")] = None
    schedule_offset: Annotated[Count, Key("First step.")] = 1000


class _Technique(Section):
    different_groups: Annotated[dict[str, Group], Key("Groups of modules, by name.")] = Field(default_factory=dict)


class WeightTechnique(_Technique):
    """Quantised weights."""

    shared_parameters: Annotated[WeightShared, Key("For all groups.")] = Field(default_factory=WeightShared)


class ActivationTechnique(_Technique):
    """Quantised activations."""

    shared_parameters: Annotated[ActivationShared, Key("For all groups.")] = Field(default_factory=ActivationShared)


class SparseTechnique(_Technique):
    """Pruned weights."""

    shared_parameters: Annotated[SparseShared, Key("For all groups.")] = Field(default_factory=SparseShared)


class RowTechnique(_Technique):
    """Pruned rows or channels."""

    shared_parameters: Annotated[RowShared, Key("For all groups.")] = Field(default_factory=RowShared)


class HeadTechnique(_Technique):
    """Pruned attention heads."""

    shared_parameters: Annotated[HeadShared, Key("For all groups.")] = Field(default_factory=HeadShared)


class LayerReduction(Section):
    """A student with fewer layers."""

    shorthand: ClassVar[str] = "enabled"

    enabled: Annotated[Flag, Key("Reduce.")] = False
    keep_number_layer: Annotated[Positive | None, Key("Layers that are kept.")] = None
    module_name_prefix: Annotated[Text | None, Key("Name of the list of layers.")] = None
    teacher_layer: Annotated[tuple[Count, ...], Key("Layers of the teacher to start from.")] = ()
    other_module_name: Annotated[Texts, Key("Other modules to copy.")] = ()


class CompressionTraining(Section):
    """Quantisation, pruning and distillation while training."""

    weight_quantization: Annotated[WeightTechnique, Key("Quantised weights.")] = Field(default_factory=WeightTechnique)
    activation_quantization: Annotated[ActivationTechnique, Key("Quantised activations.")] = Field(
        default_factory=ActivationTechnique
    )
    sparse_pruning: Annotated[SparseTechnique, Key("Pruned weights.")] = Field(default_factory=SparseTechnique)
    row_pruning: Annotated[RowTechnique, Key("Pruned rows.")] = Field(default_factory=RowTechnique)
    head_pruning: Annotated[HeadTechnique, Key("Pruned heads.")] = Field(default_factory=HeadTechnique)
    channel_pruning: Annotated[RowTechnique, Key("Pruned channels.")] = Field(default_factory=RowTechnique)
    layer_reduction: Annotated[LayerReduction, Key("Fewer layers.")] = Field(default_factory=LayerReduction)

    def asking(self) -> tuple[str, ...]:
        asked = []
        for name in type(self).model_fields:
            part = getattr(self, name)
            if isinstance(part, LayerReduction):
                asked += ["layer_reduction.enabled"] if part.enabled else []
            elif part.shared_parameters.enabled:
                asked.append(f"{name}.shared_parameters.enabled")
        return tuple(asked)

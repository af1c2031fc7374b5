"""The section `optimizer`, and what the parameters of each optimizer are.

A type is either one of ours (any case; parameters as in the models below) or the exact name of a class in torch.optim
(parameters are those of its constructor). `native_optimizer` tells which; the loader checks the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from drivetrain.engine.config.schema.keys import (
    NO_EFFECT,
    PLANNED,
    Above0,
    Auto,
    Flag,
    Key,
    Momentum,
    NonNegative,
    Number,
    Positive,
    Section,
    Status,
    Text,
    key_of,
)

Betas = tuple[Momentum, Momentum]
_NEED_LR = "the learning rate"


class LearningRate(Section):
    """What all optimizers of ours take."""

    mistaken: ClassVar[Mapping[str, str]] = {
        "max_grad_norm": 'clipping is not the optimizer\'s here: set "gradient_clipping" at the top level',
        "learning_rate": 'the key is spelled "lr"',
    }

    lr: Annotated[NonNegative, Key("Learning rate.", auto=Auto.NEEDED, auto_text=_NEED_LR)] = 1e-3
    weight_decay: Annotated[NonNegative, Key("Weight decay per unit of learning rate.")] = 0.0


class AdamParams(LearningRate):
    """Adam and AdamW (Kingma and Ba, 2015; Loshchilov and Hutter, 2019)."""

    betas: Annotated[Betas, Key("Decay rates of the first and second moment.")] = (0.9, 0.999)
    eps: Annotated[NonNegative, Key("Added to the root of the second moment.")] = 1e-8
    bias_correction: Annotated[
        Flag, Key("Correct the moments for their start at zero.", differs="Only true: this Adam always corrects them.")
    ] = True
    amsgrad: Annotated[
        Flag, Key("Divide by the largest second moment so far.", differs="Works; upstream's fused Adam refuses it.")
    ] = False
    torch_adam: Annotated[
        Flag,
        Key(
            "Use torch's own implementation.",
            NO_EFFECT,
            differs="Adam is torch's own, in its fused form, unless moments or master weights are 16-bit.",
        ),
    ] = False
    adam_w_mode: Annotated[
        Flag, Key("Decoupled weight decay. AdamW always decouples, and so does Adam unless this is false.")
    ] = True
    fp32_optimizer_states: Annotated[
        Flag,
        Key(
            "Keep the moments in fp32; false: in the format of the master weights.",
            differs="Works on any device; upstream reads it where the optimizer runs on the CPU.",
        ),
    ] = True


class AdagradParams(LearningRate):
    """Adagrad (Duchi et al., 2011)."""

    lr: Annotated[NonNegative, Key("Learning rate.", auto=Auto.NEEDED, auto_text=_NEED_LR)] = 1e-2
    eps: Annotated[NonNegative, Key("Added to the root of the sum of squares.")] = 1e-10
    fp32_optimizer_states: Annotated[
        Flag,
        Key(
            "Keep the sum in fp32; false: in the format of the master weights.",
            differs="Works on any device; upstream reads it where the optimizer runs on the CPU.",
        ),
    ] = True


class LambParams(LearningRate):
    """LAMB (You et al., 2020).

    Upstream asserts fp16 with a dynamic loss scale for LAMB. That is a limit of its implementation, not of the
    algorithm, and is not shared: LAMB trains in any format here.
    """

    betas: Annotated[Betas, Key("Decay rates of the first and second moment.")] = (0.9, 0.999)
    eps: Annotated[NonNegative, Key("Added to the root of the second moment.")] = 1e-8
    eps_inside_sqrt: Annotated[Flag, Key("Add `eps` under the root instead.")] = False
    bias_correction: Annotated[Flag, Key("Correct the moments for their start at zero.")] = True
    max_coeff: Annotated[Above0, Key("Largest trust ratio.")] = 10.0
    min_coeff: Annotated[NonNegative, Key("Smallest trust ratio.")] = 0.01
    amsgrad: Annotated[
        Flag,
        Key("Divide by the largest second moment so far.", PLANNED, feature="AMSGrad in LAMB", instead="keep it false"),
    ] = False


class LionParams(LearningRate):
    """Lion (Chen et al., 2023)."""

    betas: Annotated[Betas, Key("Weights of the update and of the moment.")] = (0.9, 0.999)
    fp32_optimizer_states: Annotated[
        Flag,
        Key(
            "Keep the moment in fp32; false: in the format of the master weights.",
            differs="Works on any device; upstream reads it where the optimizer runs on the CPU.",
        ),
    ] = True


class _OneBit(LearningRate):
    betas: Annotated[Betas, Key("Decay rates of the first and second moment.")] = (0.9, 0.999)
    eps: Annotated[NonNegative, Key("Added to the root of the second moment.")] = 1e-8
    eps_inside_sqrt: Annotated[Flag, Key("Add `eps` under the root instead.")] = False
    bias_correction: Annotated[Flag, Key("Correct the moments for their start at zero.")] = True
    amsgrad: Annotated[Flag, Key("Divide by the largest second moment so far.")] = False
    cuda_aware: Annotated[Flag, Key("MPI reads device memory itself.")] = False
    comm_backend_name: Annotated[Text, Key("nccl, mpi, hccl or compressed.")] = "nccl"


class OneBitAdamParams(_OneBit):
    """1-bit Adam (Tang et al., 2021)."""

    freeze_step: Annotated[Positive, Key("Steps before compression starts.")] = 100_000


class OneBitLambParams(OneBitAdamParams):
    """1-bit LAMB (Li et al., 2022)."""

    max_coeff: Annotated[Above0, Key("Largest trust ratio.")] = 10.0
    min_coeff: Annotated[NonNegative, Key("Smallest trust ratio.")] = 0.01
    coeff_beta: Annotated[Momentum, Key("Decay rate of the average trust ratio.")] = 0.9
    factor_max: Annotated[Above0, Key("Largest correction of the trust ratio.")] = 4.0
    factor_min: Annotated[Above0, Key("Smallest correction of the trust ratio.")] = 0.5
    factor_threshold: Annotated[Above0, Key("Largest relative change of the correction in a step.")] = 0.1


class ZeroOneAdamParams(_OneBit):
    """0/1 Adam (Lu et al., 2022)."""

    var_freeze_step: Annotated[Positive, Key("Steps before the second moment is frozen.")] = 100_000
    var_update_scaler: Annotated[Positive, Key("Steps before the interval of second-moment updates doubles.")] = 16
    local_step_scaler: Annotated[Positive, Key("Steps before the interval of local steps doubles.")] = 32_678
    local_step_clipper: Annotated[Positive, Key("Longest interval of local steps.")] = 16


class MuonParams(LearningRate):
    """Muon for matrices with AdamW for the rest (Jordan et al., 2024).

    Matrices are the trained parameters of two dimensions or more that are no tables: no weights of an embedding, and
    none with `embed` or `lm_head` in the name. A parameter group may say otherwise with `use_muon`.
    """

    momentum: Annotated[Momentum, Key("Decay rate of the momentum of matrices.")] = 0.95
    muon_lr: Annotated[NonNegative | None, Key("Learning rate of matrices; null is `lr`.")] = None
    adam_lr: Annotated[NonNegative | None, Key("Learning rate of the rest; null is `lr`.")] = None
    ns_method: Annotated[Literal["gram", "standard"], Key("Form of the Newton-Schulz iteration.")] = "gram"
    betas: Annotated[Betas, Key("Decay rates of Adam's moments.")] = (0.9, 0.999)
    eps: Annotated[NonNegative, Key("Added to the root of Adam's second moment.")] = 1e-8


class ForeignParams(Section):
    """Passed through to the package that has the optimizer."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    lr: Annotated[Number, Key("Learning rate.", auto=Auto.NEEDED, auto_text=_NEED_LR)] = 1e-3


@dataclass(frozen=True, kw_only=True)
class NativeOptimizer:
    """An optimizer whose parameters are described here."""

    name: str
    params: type[Section]
    status: Status = Status.WORKS
    feature: str = ""
    instead: str = ""


def _planned(name: str, params: type[Section], feature: str, instead: str) -> NativeOptimizer:
    return NativeOptimizer(name=name, params=params, status=PLANNED, feature=feature, instead=instead)


NATIVE_OPTIMIZERS: Mapping[str, NativeOptimizer] = MappingProxyType(
    {
        entry.name.lower(): entry
        for entry in (
            NativeOptimizer(name="Adam", params=AdamParams),
            NativeOptimizer(name="AdamW", params=AdamParams),
            NativeOptimizer(name="Adagrad", params=AdagradParams),
            NativeOptimizer(name="Lamb", params=LambParams),
            NativeOptimizer(name="Lion", params=LionParams),
            NativeOptimizer(name="Muon", params=MuonParams),
            _planned("OneBitAdam", OneBitAdamParams, "1-bit Adam", 'use "AdamW"'),
            _planned("OneBitLamb", OneBitLambParams, "1-bit LAMB", 'use "Lamb"'),
            _planned("ZeroOneAdam", ZeroOneAdamParams, "0/1 Adam", 'use "AdamW"'),
            _planned("MuAdam", ForeignParams, "MuAdam of the mup package", 'use "AdamW"'),
            _planned("MuAdamW", ForeignParams, "MuAdamW of the mup package", 'use "AdamW"'),
            _planned("MuSGD", ForeignParams, "MuSGD of the mup package", 'use "SGD"'),
        )
    }
)
"""Lower-case type to optimizer. Read-only."""


class Optimizer(Section):
    """Which optimizer updates the parameters. One given to `initialize` takes its place."""

    shorthand: ClassVar[str] = "type"

    type: Annotated[
        Text,
        Key(
            "Adam, AdamW, Adagrad, Lamb or Lion in any case, or the exact name of a class in torch.optim.",
            auto=Auto.NEEDED,
            auto_text="the name of an optimizer",
        ),
    ]
    params: Annotated[
        dict[str, Any],
        Key('Arguments of the optimizer. "auto" for any but `lr` leaves it to the optimizer\'s default.'),
    ] = Field(default_factory=dict)
    legacy_fusion: Annotated[Flag, Key("Choose an older fused code path.", NO_EFFECT, differs="There is one path.")] = (
        False
    )

    @property
    def native(self) -> NativeOptimizer | None:
        """The description of the type, or None when it is torch's."""
        return NATIVE_OPTIMIZERS.get(self.type.lower())

    def arguments(self) -> dict[str, Any]:
        """The parameters that work in this version, with defaults filled in; for a type of torch only those given."""
        if self.native is None:
            return dict(self.params)
        filled = self.native.params.model_validate(self.params).model_dump()
        keys = {name: key_of(info) for name, info in self.native.params.model_fields.items()}
        return {name: value for name, value in filled.items() if name not in keys or keys[name].status is Status.WORKS}

    @property
    def lr(self) -> float | None:
        """The learning rate, or None when torch's default holds."""
        value = self.arguments().get("lr")
        return None if value is None else float(value)

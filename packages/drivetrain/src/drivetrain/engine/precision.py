"""Number formats: from the sections of a configuration to dtypes, and the context that a forward pass runs in.

The problem: what a parameter, a gradient, a message, a master weight and a moment are kept in follows from five
sections and from the device, and each part of the engine needs another of the answers. The idea: they are worked out
once, here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from drivetrain.engine.config import Config
from drivetrain.engine.nested import cast_floats
from drivetrain.zero import AUTOCAST_CLASSES, LossScalePolicy, LossScaler, WireRule

DTYPES = MappingProxyType({"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32})


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The number formats of a run.

    Attributes:
        compute: what parameters are cast to; None leaves them as they are.
        master: what 16-bit parameters are updated in; None is fp32.
        moments: what the optimizer's moments are kept in; None leaves it to the optimizer.
        autocast: what autocast computes in; None where the configuration asks for none.
        device_type: of the device that computes.
        casts_inputs: floating-point inputs become ``compute``.
    """

    compute: torch.dtype | None
    master: torch.dtype | None
    moments: torch.dtype | None
    autocast: torch.dtype | None
    device_type: str
    casts_inputs: bool

    @classmethod
    def of(cls, config: Config, device: torch.device) -> Precision:
        """What ``config`` says, for ``device``."""
        compute = DTYPES[config.model_dtype] if config.model_dtype != "fp32" else None
        return cls(
            compute=compute,
            master=compute if config.updates_in_place else None,
            moments=DTYPES[config.moments_dtype] if config.moments_dtype else None,
            autocast=_autocast_dtype(config, device) if config.torch_autocast.enabled else None,
            device_type=device.type,
            casts_inputs=compute is not None
            and (config.drivetrain.auto_cast or (config.fp16.enabled and config.fp16.auto_cast)),
        )

    def wire_rule(self, config: Config) -> WireRule | None:
        """What travels in fewer bits under autocast."""
        if self.autocast is None:
            return None
        named = config.torch_autocast.lower_precision_safe_modules
        return WireRule(dtype=self.autocast, classes=AUTOCAST_CLASSES if named is None else named)

    def loss_scaler(self, config: Config) -> LossScaler:
        """The loss scale of the ``fp16`` section, where something computes in fp16; else one that never scales."""
        fp16 = config.fp16
        if torch.float16 not in (self.compute, self.autocast):
            return LossScaler()
        if fp16.loss_scale:
            return LossScaler(LossScalePolicy(initial=fp16.loss_scale, dynamic=False))
        return LossScaler(
            LossScalePolicy(
                initial=2.0**fp16.initial_scale_power,
                window=fp16.loss_scale_window,
                hysteresis=fp16.hysteresis,
                consecutive_hysteresis=fp16.consecutive_hysteresis,
                minimum=fp16.min_loss_scale,
            )
        )

    def cast(self, value: Any) -> Any:
        """Inputs of the module, as they should reach it."""
        return cast_floats(value, self.compute) if self.casts_inputs and self.compute is not None else value

    def forward_context(self, rank: int) -> AbstractContextManager[None]:
        """What the module's forward runs in; ``rank`` is for messages.

        Autocast keeps no rounded copies of weights from one use to the next: with its cache a gathered parameter would
        outlive its release, and gradients of several uses would add up in 16 bits.

        Raises:
            RuntimeError: the caller's own autocast contradicts the configuration.
        """
        if torch.is_autocast_enabled(self.device_type):
            self._check_outer(torch.get_autocast_dtype(self.device_type), rank)
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast, cache_enabled=False)

    def _check_outer(self, outer: torch.dtype, rank: int) -> None:
        ours = self.autocast or self.compute
        if ours is not None and outer != ours:
            section = "torch_autocast" if self.autocast else "bf16" if ours == torch.bfloat16 else "fp16"
            raise RuntimeError(
                f"rank {rank}: the engine is called under torch.autocast in {outer}, and the {section} section of the "
                f"configuration computes in {ours}; make them the same, or leave the torch.autocast around the engine "
                "out"
            )
        if ours is None and outer == torch.float16 and torch.is_grad_enabled():
            raise RuntimeError(
                f"rank {rank}: the engine is called under torch.autocast in torch.float16, and nothing scales the "
                'loss, so gradients underflow; let the engine do both: "torch_autocast": {"enabled": true, "dtype": '
                '"fp16"}'
            )


def _autocast_dtype(config: Config, device: torch.device) -> torch.dtype:
    asked = config.torch_autocast.dtype
    return torch.get_autocast_dtype(device.type) if asked is None else DTYPES[asked]

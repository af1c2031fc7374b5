"""The optimizers for parameters that must lie in host memory.

Problem: with the optimizer offloaded to the host, a parameter left on a GPU by mistake would still be stepped, there.
Idea: the optimizers of `fused_optim` and `optim` serve any device; these are the same ones, each of which refuses
parameters that lie elsewhere when they are given. In host memory a step is one native pass (LAMB: two), or plain torch
without the native core.
"""

from __future__ import annotations

from typing import Any

from .fused_optim import FusedAdagrad, FusedAdam
from .optim import Lamb, Lion, PreciseStateOptimizer

__all__ = ["CpuAdagrad", "CpuAdam", "CpuLamb", "CpuLion"]


class _InHostMemory(PreciseStateOptimizer):
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for index, param in enumerate(self.param_groups[-1]["params"]):
            if param.device.type != "cpu":
                raise ValueError(
                    f"{type(self).__name__} steps parameters in host memory; parameter {index} of a group, of shape "
                    f"{tuple(param.shape)}, lies on {param.device}. Move it to the CPU, or use another optimizer"
                )


class CpuAdam(_InHostMemory, FusedAdam):
    """`FusedAdam` that insists on host memory. See there for formulas and arguments."""


class CpuAdagrad(_InHostMemory, FusedAdagrad):
    """`FusedAdagrad` that insists on host memory. See there for formulas and arguments."""


class CpuLion(_InHostMemory, Lion):
    """`Lion` that insists on host memory. See there for formulas and arguments."""


class CpuLamb(_InHostMemory, Lamb):
    """`Lamb` that insists on host memory. See there for formulas, arguments and sharding."""

"""Hot arithmetic: optimizers and ops, each with a plain-torch reference.

Optimizers (`Lion`, `Lamb`) are ordinary `torch.optim.Optimizer`s that are also correct on shards of parameters.
`reference` holds every op in plain torch, `rules` the hyperparameters, and `available()` says which implementation
serves which op on which device, and why.
"""

from __future__ import annotations

from .dispatch import KernelStatus, available, resolve
from .optim import Lamb, Lion
from .rules import AdagradRule, AdamRule, LambRule, LionRule, SgdRule

__all__ = [
    "AdagradRule",
    "AdamRule",
    "KernelStatus",
    "Lamb",
    "LambRule",
    "Lion",
    "LionRule",
    "SgdRule",
    "available",
    "resolve",
]

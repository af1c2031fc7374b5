"""Classes of modules, given as classes or by name."""

from __future__ import annotations

import sys
from typing import TypeAlias

from torch import nn

ModuleClass: TypeAlias = type[nn.Module] | str
"""A class, its bare name, or a dotted name under which it can be imported (``torch.nn.Linear``)."""


def is_class(own: type[nn.Module], wanted: ModuleClass) -> bool:
    """Whether ``own`` is the class ``wanted``; a class that is derived from it is not."""
    if isinstance(wanted, type):
        return own is wanted
    return wanted in (own.__name__, f"{own.__module__}.{own.__qualname__}") or own is _find(wanted)


def is_known(wanted: ModuleClass) -> bool:
    """Whether there is such a class, as far as a bare name can be told."""
    return isinstance(wanted, type) or isinstance(_find(wanted), type)


def class_name(wanted: ModuleClass) -> str:
    """For messages."""
    return wanted.__name__ if isinstance(wanted, type) else wanted


def _find(dotted: str) -> object:
    """What a dotted name means. Nothing is imported for it: the class of a module that exists has been."""
    home, _, name = dotted.rpartition(".")
    return getattr(sys.modules.get(home), name, None)

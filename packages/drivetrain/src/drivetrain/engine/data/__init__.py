"""Training data: shuffled each epoch, split over the data-parallel ranks, resumable at another number of them."""

from __future__ import annotations

from .feeds import Collate, LoaderConfig
from .loader import RepeatingLoader, StaleIteratorError, TrainLoader

__all__ = ["Collate", "LoaderConfig", "RepeatingLoader", "StaleIteratorError", "TrainLoader"]

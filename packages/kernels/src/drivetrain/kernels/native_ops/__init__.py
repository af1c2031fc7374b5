"""Ops on host memory through the native core (C++). `dispatch` chooses them for CPU tensors."""

from __future__ import annotations

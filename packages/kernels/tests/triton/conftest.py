"""Triton kernels on a GPU where there is one, else in Triton's interpreter, which must be chosen before Triton is
imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def _bfloat16_as_on_gpus() -> Iterator[None]:
    """Triton's interpreter keeps bfloat16 as bit patterns: it cuts them off where GPUs round to nearest even, and its
    dot and its casts from integers take the patterns for numbers. Put that right, through torch's own bfloat16."""
    if torch.cuda.is_available():
        yield
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = torch.from_numpy(handle.data.view("int16").copy())
        return TensorHandle(bits.view(torch.bfloat16).float().numpy(), tl.float32)

    def rounding_cast(self: Any, source: Any, target: Any) -> Any:
        source = widened(source)
        if target.scalar != tl.bfloat16:
            return cast(self, source, target)
        bits = torch.from_numpy(source.data.copy()).to(torch.bfloat16).view(torch.int16)
        return TensorHandle(bits.numpy().view("uint16"), tl.bfloat16)

    def widened_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = rounding_cast, widened_dot
    yield
    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast, dot

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.comm.reduction import check_op, fold


def rank_order_fold(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """The definition, element by element, in plain torch."""
    narrow = parts[0].dtype in (torch.float16, torch.bfloat16)
    wide = [p.float() if narrow else p for p in parts]
    total = wide[0]
    for part in wide[1:]:
        total = {"max": torch.maximum, "min": torch.minimum}.get(op, torch.add)(total, part)
    if op == "mean":
        total = total / len(parts)
    return total.to(parts[0].dtype)


@given(
    count=st.integers(2, 5),
    length=st.sampled_from([0, 1, 7, 28671, 28672, 28673, 70000]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    op=st.sampled_from(["sum", "mean", "max", "min"]),
    alias=st.one_of(st.none(), st.integers(0, 4)),
    seed=st.integers(0, 1000),
)
def test_equals_the_definition_to_the_bit(
    count: int, length: int, dtype: torch.dtype, op: str, alias: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(length, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]
    expected = rank_order_fold(parts, op)
    out = torch.empty(length, dtype=dtype) if alias is None else parts[alias % count]
    fold(out, parts, op)  # type: ignore[arg-type]
    assert torch.equal(out, expected)


def test_a_mean_of_fp16_does_not_overflow_on_the_way() -> None:
    parts = [torch.full((3,), 60000.0, dtype=torch.float16) for _ in range(2)]
    out = torch.empty(3, dtype=torch.float16)
    fold(out, parts, "mean")
    assert out.tolist() == [60000.0] * 3


def test_narrow_sums_are_rounded_once() -> None:
    # In bf16, 256 + 1 rounds back to 256 at every step; in fp32 the ones add up.
    parts = [torch.tensor([256.0], dtype=torch.bfloat16), *[torch.ones(1, dtype=torch.bfloat16)] * 4]
    out = torch.empty(1, dtype=torch.bfloat16)
    fold(out, parts, "sum")
    assert out.item() == 260.0


def test_order_is_by_rank_not_by_size() -> None:
    parts = [torch.tensor([x]) for x in (1e8, 1.0, -1e8)]
    out = torch.empty(1)
    fold(out, parts, "sum")
    assert out.item() == 0.0
    fold(out, [parts[0], parts[2], parts[1]], "sum")
    assert out.item() == 1.0


@pytest.mark.parametrize(
    ("op", "dtype", "error", "text"),
    [
        ("mean", torch.int64, TypeError, "op 'mean' needs a floating-point tensor, got torch.int64"),
        ("sum", torch.bool, TypeError, "op 'sum' is not defined for torch.bool. Use 'max' for any"),
        ("max", torch.complex64, TypeError, "op 'max' is not defined for torch.complex64"),
        ("avg", torch.float32, ValueError, "op 'avg' is not known here; it must be one of sum, mean, max, min"),
    ],
)
def test_refusals(op: str, dtype: torch.dtype, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_op(op, dtype, ("sum", "mean", "max", "min"))

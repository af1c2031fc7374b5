from __future__ import annotations

import pytest
import torch

from drivetrain_testkit import relative_error


def test_relative_error() -> None:
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.ones(2, 2), torch.zeros(4)) == 2.0
    pairs = [torch.tensor([1.0]), torch.tensor([[2.0, 2.0]])]
    assert relative_error(pairs, [t.clone() for t in pairs]) == 0.0
    assert relative_error([], []) == 0.0
    with pytest.raises(ValueError, match="compares 2 elements with 3"):
        relative_error(torch.ones(2), torch.ones(3))

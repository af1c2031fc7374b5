"""The table of implementations is whole and readable."""

from __future__ import annotations

import pytest

from drivetrain.kernels import available, resolve


def test_every_op_has_an_entry_for_every_device_and_a_reason_when_slow() -> None:
    table = available()
    assert len({(status.op, status.device) for status in table}) == len(table)
    ops = {status.op for status in table}
    assert {"adam_step", "lion_step", "lamb_moments", "sum_of_squares"} <= ops
    for device in ("cpu", "cuda"):
        assert {status.op for status in table if status.device == device} == ops
    for status in table:
        assert status.implementation
        assert status.reason or status.implementation != "torch"
        assert callable(resolve(status.op, status.device))


def test_an_unknown_op_is_named_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"no op named 'warp'.*adam_step"):
        resolve("warp", "cpu")

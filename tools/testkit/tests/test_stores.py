"""The store that tests use is a store as any other, and spoils what was released."""

from __future__ import annotations

import pytest
import torch

from drivetrain_testkit.stores import STORE_CASES, MemoryStore


@pytest.mark.parametrize("case", STORE_CASES)
def test_it_conforms(case: str) -> None:
    STORE_CASES[case](MemoryStore)


def test_what_was_released_is_spoiled_and_operations_are_noted() -> None:
    store = MemoryStore()
    floats, integers = store.create("a", [torch.empty(3), torch.empty(2, dtype=torch.int32)])
    assert floats.isnan().all()
    floats.fill_(1)
    integers.fill_(2)
    store.release("a", changed=True)
    assert floats.isnan().all()
    assert integers.eq(-1).all()
    again, _ = store.fetch("a")
    assert again.eq(1).all()
    again.fill_(5)
    store.release("a", changed=False)
    assert store.fetch("a")[0].eq(1).all()
    assert store.operations == [
        *(("create", "a"), ("release", "a", True), ("fetch", "a"), ("release", "a", False), ("fetch", "a")),
    ]

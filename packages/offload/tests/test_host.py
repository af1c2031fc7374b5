"""Records in host memory."""

from __future__ import annotations

import pytest
import torch

from drivetrain.offload import ArenaFullError, HostStore
from drivetrain_testkit.stores import STORE_CASES, put


@pytest.mark.parametrize("capacity", [None, 4 << 20])
@pytest.mark.parametrize("case", STORE_CASES)
def test_it_conforms(case: str, capacity: int | None) -> None:
    STORE_CASES[case](lambda: HostStore(capacity=capacity, pin_memory=True))


def test_the_tensors_themselves_are_handed_out() -> None:
    store = HostStore()
    places = [tensor.data_ptr() for tensor in store.create("a", [torch.empty(1000), torch.empty(3)])]
    assert places[0] % 4096 == 0
    assert places[1] % 64 == 0
    store.release("a", changed=True)
    assert [tensor.data_ptr() for tensor in store.fetch("a")] == places


def test_what_does_not_fit_is_refused_with_what_is_wanted_and_free() -> None:
    store = HostStore(capacity=8 * 4096)
    wanted = put(store, "a", [torch.empty(5000)], 1)
    with pytest.raises(ArenaFullError, match=r"record 'b' takes 16384 bytes of host memory; 12288 of 32768") as told:
        store.create("b", [torch.empty(4000)])
    assert (told.value.wanted, told.value.free) == (16384, 12288)
    assert torch.equal(store.fetch("a")[0].view(torch.uint8), wanted[0].view(torch.uint8))
    store.release("a", changed=False)
    store.drop("a")
    for _ in range(50):  # nothing leaks
        store.create("b", [torch.empty(8000)])
        store.release("b", changed=True)
    assert store.memory_bytes == 8 * 4096
    store.close()
    assert store.memory_bytes == 0

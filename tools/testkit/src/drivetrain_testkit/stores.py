"""Stores of records: what each must do, and one that finds those who use it wrongly.

`STORE_CASES` are the conformance suite of `ShardStore` (drivetrain.zero), for parametrised tests:

    @pytest.mark.parametrize("case", STORE_CASES)
    def test_conforms(case, tmp_path): STORE_CASES[case](lambda: NvmeStore(tmp_path))

Each case makes its own store or several, one after another, and closes them. At most `AT_ONCE` records are in use.

`MemoryStore` is a store for the tests of those who use one. It hands out copies, and fills them with 0xFF bytes (NaN in
every floating-point format, -1 in every signed one) once they are released: stale views are seen in the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

__all__ = ["AT_ONCE", "STORE_CASES", "MakeStore", "MemoryStore", "Store"]

AT_ONCE: Final = 2

DTYPES: Final = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
)


class Store(Protocol):
    """The shape of a `ShardStore`."""

    @property
    def device(self) -> torch.device: ...
    @property
    def bytes(self) -> int: ...
    @property
    def in_memory(self) -> bool: ...
    def create(self, key: str, like: Sequence[Tensor]) -> list[Tensor]: ...
    def expect(self, keys: Sequence[str]) -> None: ...
    def fetch(self, key: str) -> list[Tensor]: ...
    def release(self, key: str, *, changed: bool) -> None: ...
    def branch(self, key: str, new_key: str) -> list[Tensor]: ...
    def rename(self, key: str, new_key: str) -> None: ...
    def drop(self, key: str) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


MakeStore: TypeAlias = Callable[[], Store]


# --------------------------------------------------------------------------------------------------------- MemoryStore


class MemoryStore:
    """Records in a dict. `operations` is what was called: `("fetch", key)`, `("release", key, changed)` and so on."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._kept: dict[str, list[Tensor] | None] = {}  # None: made, not filled yet
        self._out: dict[str, list[Tensor]] = {}
        self._closed = False
        self.operations: list[tuple[Any, ...]] = []

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def in_memory(self) -> bool:
        return False

    @property
    def bytes(self) -> int:
        records = (kept if kept is not None else self._out[key] for key, kept in self._kept.items())
        return sum(tensor.nbytes for record in records for tensor in record)

    def create(self, key: str, like: Sequence[Tensor]) -> list[Tensor]:
        self._note("create", key)
        if key in self._out:
            raise RuntimeError(f"create: record {key!r} is in use; release it first")
        self._kept[key] = None
        with torch.inference_mode(False):
            self._out[key] = [torch.empty(each.numel(), dtype=each.dtype, device=self._device) for each in like]
        _spoil(self._out[key])
        return list(self._out[key])

    def expect(self, keys: Sequence[str]) -> None:
        self._note("expect", *keys)
        for key in keys:
            self._check("expect", key)

    def fetch(self, key: str) -> list[Tensor]:
        self._note("fetch", key)
        self._check("fetch", key)
        if key in self._out:
            raise RuntimeError(f"fetch: record {key!r} is in use; release it first")
        kept = self._kept[key]
        assert kept is not None
        with torch.inference_mode(False):
            self._out[key] = [tensor.clone() for tensor in kept]
        return list(self._out[key])

    def release(self, key: str, *, changed: bool) -> None:
        self._note("release", key, changed)
        self._check("release", key)
        if key not in self._out:
            raise RuntimeError(f"release: record {key!r} is not in use; fetch it first, and release it once")
        if not changed and self._kept[key] is None:
            raise RuntimeError(f"release: record {key!r} is new and has not been filled; release it with changed=True")
        out = self._out.pop(key)
        if changed:
            with torch.inference_mode(False):
                self._kept[key] = [tensor.detach().clone() for tensor in out]
        _spoil(out)

    def branch(self, key: str, new_key: str) -> list[Tensor]:
        self._note("branch", key, new_key)
        self._check("branch", key)
        if key not in self._out:
            raise RuntimeError(f"branch: record {key!r} is not in use; fetch it first")
        if new_key in self._out:
            raise RuntimeError(f"branch: record {new_key!r} is in use; release it first")
        kept = self._kept[key]
        if kept is None:
            raise RuntimeError(f"branch: record {key!r} is new and has not been filled")
        _spoil(self._out.pop(key))
        with torch.inference_mode(False):
            self._kept[new_key], self._out[new_key] = [each.clone() for each in kept], [each.clone() for each in kept]
        return list(self._out[new_key])

    def rename(self, key: str, new_key: str) -> None:
        self._note("rename", key, new_key)
        self._check("rename", key)
        for each in (key, new_key):
            if each in self._out:
                raise RuntimeError(f"rename: record {each!r} is in use; release it first")
        self._kept[new_key] = self._kept.pop(key)

    def drop(self, key: str) -> None:
        self._note("drop", key)
        self._check("drop", key)
        del self._kept[key]
        _spoil(self._out.pop(key, []))

    def flush(self) -> None:
        self._note("flush")

    def close(self) -> None:
        if not self._closed:
            self._note("close")
        self._closed = True
        for out in self._out.values():
            _spoil(out)
        self._kept.clear()
        self._out.clear()

    def _note(self, *operation: Any) -> None:
        if self._closed:
            raise ValueError("MemoryStore is closed; its records are gone")
        self.operations.append(operation)

    def _check(self, doing: str, key: str) -> None:
        if key not in self._kept:
            raise KeyError(f"{doing}: no record {key!r}")


def _spoil(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.detach().view(torch.uint8).fill_(255)


# --------------------------------------------------------------------------------------------------------------- cases


def values(like: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Tensors of these lengths and dtypes of any bits, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for tensor in like:
        size = tensor.numel() * tensor.dtype.itemsize
        top = 2 if tensor.dtype is torch.bool else 256
        made.append(torch.randint(0, top, (size,), generator=generator, dtype=torch.uint8).view(tensor.dtype))
    return made


def same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether these are the same tensors, bit by bit."""
    return len(found) == len(wanted) and all(
        each.dtype is other.dtype
        and each.shape == other.shape
        and torch.equal(each.cpu().view(torch.uint8), other.view(torch.uint8))
        for each, other in zip(found, wanted, strict=True)
    )


def fill(tensors: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Give tensors the values of a seed; returns those."""
    wanted = values(tensors, seed)
    for tensor, value in zip(tensors, wanted, strict=True):
        tensor.view(torch.uint8).copy_(value.view(torch.uint8))
    return wanted


def like(*shapes: tuple[int, torch.dtype]) -> list[Tensor]:
    """Tensors of these lengths and dtypes, without memory."""
    return [torch.empty(numel, dtype=dtype, device="meta") for numel, dtype in shapes]


def put(store: Store, key: str, tensors: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Make and fill a record."""
    wanted = fill(store.create(key, tensors), seed)
    store.release(key, changed=True)
    return wanted


def check(store: Store, key: str, wanted: Sequence[Tensor]) -> None:
    """Fetch a record, find what is wanted, release it."""
    assert same(store.fetch(key), wanted), f"record {key!r} has other values than it was left with"
    store.release(key, changed=False)


@contextmanager
def opened(make: MakeStore) -> Iterator[Store]:
    store = make()
    try:
        yield store
    finally:
        store.close()


def round_trip(make: MakeStore) -> None:
    """Every dtype, of 0, 1 and an odd number of elements, alone and together."""
    with opened(make) as store:
        wanted = {}
        for index, dtype in enumerate(DTYPES):
            shapes = like((0, dtype), (1, dtype), (1237, dtype))
            for tensor, each in zip(store.create(str(dtype), shapes), shapes, strict=True):
                assert tensor.device == store.device
                assert tensor.dtype is dtype
                assert tensor.shape == each.shape
                assert not tensor.requires_grad
            store.release(str(dtype), changed=True)
            wanted[str(dtype)] = put(store, str(dtype), shapes, index)
        wanted["mixed"] = put(store, "mixed", like(*((3 + index, dtype) for index, dtype in enumerate(DTYPES))), 99)
        wanted["nothing"] = put(store, "nothing", [], 0)
        wanted["empty"] = put(store, "empty", like((0, torch.float32)), 0)
        assert store.bytes == sum(tensor.nbytes for record in wanted.values() for tensor in record)
        for key, record in wanted.items():
            check(store, key, record)


def shapes_of_real_tensors(make: MakeStore) -> None:
    """Only length and dtype of what is named count; and the tensors are nobody else's."""
    with opened(make) as store:
        source = torch.ones(3, 5).t()
        (made,) = store.create("a", [source.requires_grad_()])
        assert made.shape == (15,)
        made.fill_(7)
        store.release("a", changed=True)
        assert source.eq(1).all()
        check(store, "a", [torch.full((15,), 7.0)])


def replacement(make: MakeStore) -> None:
    """A record that is made again has the new lengths and values, larger or smaller."""
    with opened(make) as store:
        other = put(store, "other", like((700, torch.int64)), 5)
        for seed, numel in enumerate((10, 5000, 3, 20_000, 4999)):
            wanted = put(store, "a", like((numel, torch.float32), (numel, torch.bfloat16)), seed)
            assert store.bytes == 6 * numel + 5600
            check(store, "a", wanted)
            check(store, "other", other)
        store.drop("a")
        assert store.bytes == 5600
        check(store, "other", other)


def changes_are_kept(make: MakeStore) -> None:
    """What is released as changed is what is fetched, at once and later."""
    with opened(make) as store:
        for index in range(5):
            put(store, f"r{index}", like((4000, torch.float32)), index)
        for turn in range(4):
            wanted = {}
            for index in range(5):
                key = f"r{index}"
                wanted[key] = fill(store.fetch(key), 100 * turn + index)
                store.release(key, changed=True)
                check(store, key, wanted[key])
            for key, record in wanted.items():
                check(store, key, record)


def branches(make: MakeStore) -> None:
    """A branch has the values of its origin, which stays; it comes in place of it, or goes, at any time."""
    with opened(make) as store:
        shapes = like((4000, torch.float32), (7, torch.int64))
        origins = {f"r{index}": put(store, f"r{index}", shapes, index) for index in range(5)}
        room = store.bytes // 5
        for turn in range(3):
            made: Any = {}
            for key, wanted in origins.items():
                store.expect([key, "r0"])
                store.fetch(key)
                given = store.branch(key, f"{key} anew")
                assert same(given, wanted)
                made[key] = fill(given, 50 * turn + len(made))
                store.release(f"{key} anew", changed=True)
            assert store.bytes == 10 * room
            for key, wanted in origins.items():
                check(store, key, wanted)
            for index, (key, wanted) in enumerate(made.items()):
                if (index + turn) % 2:
                    store.expect([key])
                    store.rename(f"{key} anew", key)
                    origins[key] = wanted
                else:
                    store.drop(f"{key} anew")
                check(store, key, origins[key])
            assert store.bytes == 5 * room
        store.fetch("r0")
        store.branch("r0", "unchanged")
        store.release("unchanged", changed=True)
        store.rename("unchanged", "elsewhere")
        store.rename("elsewhere", "r1")  # whose record goes
        check(store, "r1", origins["r0"])
        store.fetch("r2")
        store.branch("r2", "r3")
        store.release("r3", changed=True)
        check(store, "r3", origins["r2"])
        assert store.bytes == 5 * room


def tensors_stay(make: MakeStore) -> None:
    """While a record is in use its tensors keep their memory, whatever else is done."""
    with opened(make) as store:
        for index in range(6):
            put(store, f"r{index}", like((5000, torch.float32)), index)
        held = store.fetch("r0")
        places = [tensor.data_ptr() for tensor in held]
        store.expect([f"r{index}" for index in range(1, 6)])
        for index in range(1, 6):
            fill(store.fetch(f"r{index}"), 50 + index)
            store.release(f"r{index}", changed=True)
        put(store, "large", like((30_000, torch.float32)), 3)
        store.drop("r3")
        store.flush()
        assert [tensor.data_ptr() for tensor in held] == places
        assert same(held, values(held, 0))
        wanted = fill(held, 77)
        store.release("r0", changed=True)
        check(store, "r0", wanted)


def expectations(make: MakeStore) -> None:
    """Any expectation is only a hint: right, reversed, repeated, wrong, of what is dropped, or empty."""
    with opened(make) as store:
        keys = [f"r{index}" for index in range(8)]
        wanted = {key: put(store, key, like((3000 + index, torch.float32)), index) for index, key in enumerate(keys)}
        orders = [keys, keys[::-1], keys[:3] * 4, keys[4:], [], [keys[0], keys[0]], keys + keys[::-1]]
        for turn, order in enumerate(orders):
            store.expect(order)
            for index, key in enumerate(keys):
                found = store.fetch(key)
                assert same(found, wanted[key])
                changed = (turn + index) % 2 == 0
                if changed:
                    wanted[key] = fill(found, 10 * turn + index)
                store.release(key, changed=changed)
        store.expect(keys)
        for key in keys[:4]:
            store.drop(key)
        for key in keys[4:]:
            check(store, key, wanted[key])
        wanted["r0"] = put(store, "r0", like((9, torch.int16)), 4)
        store.expect(["r7", "r0"])
        check(store, "r0", wanted["r0"])


def inference_mode(make: MakeStore) -> None:
    """What is made or fetched in inference mode can be written outside of it, and the other way round."""
    with opened(make) as store:
        with torch.inference_mode():
            for index in range(5):
                put(store, f"r{index}", like((5000, torch.float32)), index)
            store.expect(["r0", "r1"])
        for index in range(5):
            (found,) = store.fetch(f"r{index}")
            assert not found.is_inference()
            wanted = fill([found], 10 + index)
            store.release(f"r{index}", changed=True)
            with torch.inference_mode():
                check(store, f"r{index}", wanted)
                wanted = fill(store.fetch(f"r{index}"), 20 + index)
                store.release(f"r{index}", changed=True)
            check(store, f"r{index}", wanted)


def wrong_use(make: MakeStore) -> None:
    """What is wrong is refused in words, and changes nothing."""
    with opened(make) as store:
        store.create("a", like((9, torch.float32)))
        with pytest.raises(RuntimeError, match="'a' is new and has not been filled"):
            store.release("a", changed=False)
        with pytest.raises(RuntimeError, match="fetch: record 'a' is in use"):
            store.fetch("a")
        with pytest.raises(RuntimeError, match="create: record 'a' is in use"):
            store.create("a", [])
        with pytest.raises(RuntimeError, match="branch: record 'a' is new and has not been filled"):
            store.branch("a", "b")
        with pytest.raises(RuntimeError, match="rename: record 'a' is in use"):
            store.rename("a", "b")
        store.release("a", changed=True)
        with pytest.raises(RuntimeError, match="branch: record 'a' is not in use"):
            store.branch("a", "b")
        put(store, "c", like((9, torch.float32)), 1)
        store.fetch("a")
        with pytest.raises(RuntimeError, match="rename: record 'a' is in use"):
            store.rename("c", "a")
        store.fetch("c")
        with pytest.raises(RuntimeError, match="branch: record 'c' is in use"):
            store.branch("a", "c")
        store.drop("c")
        store.release("a", changed=False)
        wanted = put(store, "a", like((9, torch.float32)), 1)
        with pytest.raises(RuntimeError, match="'a' is not in use"):
            store.release("a", changed=True)
        strangers: tuple[Callable[[], object], ...] = (
            lambda: store.fetch("b"),
            lambda: store.release("b", changed=True),
            lambda: store.drop("b"),
            lambda: store.branch("b", "c"),
            lambda: store.rename("b", "c"),
            lambda: store.expect(["a", "b"]),
        )
        for unknown in strangers:
            with pytest.raises(KeyError, match="no record 'b'"):
                unknown()
        check(store, "a", wanted)
        store.fetch("a")
        store.drop("a")  # also in use
        with pytest.raises(KeyError, match="no record 'a'"):
            store.fetch("a")
        assert store.bytes == 0


def end(make: MakeStore) -> None:
    """`flush` any time; `close` with records in use, expected and just released, twice; nothing after it."""
    with opened(make) as store:
        store.flush()
        for index in range(4):
            put(store, f"r{index}", like((9000, torch.float32)), index)
        store.flush()
        store.flush()
        check(store, "r0", values(like((9000, torch.float32)), 0))
        store.expect(["r1", "r2"])
        fill(store.fetch("r3"), 3)
        store.release("r3", changed=True)
        store.fetch("r0")
        store.close()
        store.close()
        for after in (
            lambda: store.create("a", []),
            lambda: store.fetch("r0"),
            lambda: store.release("r0", changed=True),
            lambda: store.expect([]),
            lambda: store.drop("r0"),
            lambda: store.branch("r0", "r1"),
            lambda: store.rename("r1", "r2"),
            store.flush,
        ):
            with pytest.raises(ValueError, match="is closed"):
                after()


KEYS: Final = tuple("abcdefg")
OPERATIONS: Final = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.sampled_from(KEYS), st.integers(0, 3000)),
        st.tuples(st.just("fetch"), st.sampled_from(KEYS)),
        st.tuples(st.just("fetch"), st.sampled_from(KEYS)),
        st.tuples(st.just("release"), st.integers(0, AT_ONCE - 1), st.booleans()),
        st.tuples(st.just("release"), st.integers(0, AT_ONCE - 1), st.booleans()),
        st.tuples(st.just("expect"), st.lists(st.sampled_from(KEYS), max_size=9)),
        st.tuples(st.just("branch"), st.sampled_from(KEYS), st.sampled_from(KEYS)),
        st.tuples(st.just("rename"), st.sampled_from(KEYS), st.sampled_from(KEYS)),
        st.tuples(st.just("drop"), st.sampled_from(KEYS)),
        st.tuples(st.just("flush")),
    ),
    max_size=60,
)


class _Model:
    """A store beside what it should hold."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.kept: dict[str, list[Tensor]] = {}
        self.out: dict[str, tuple[list[Tensor], list[Tensor]]] = {}  # what it gave, and what that should be
        self.new: set[str] = set()
        self.seed = 0

    def create(self, key: str, numel: int) -> None:
        if key in self.out or len(self.out) == AT_ONCE:
            return
        self.seed += 1
        given = self.store.create(key, like((numel, torch.float32), (numel % 7, torch.int8)))
        self.out[key] = (given, fill(given, self.seed))
        self.kept[key] = []
        self.new.add(key)

    def fetch(self, key: str) -> None:
        if key not in self.kept or key in self.out or len(self.out) == AT_ONCE:
            return
        given = self.store.fetch(key)
        assert same(given, self.kept[key])
        self.out[key] = (given, self.kept[key])

    def release(self, place: int, changed: bool) -> None:
        if place >= len(self.out):
            return
        key = list(self.out)[place]
        given, wanted = self.out.pop(key)
        assert same(given, wanted)  # nobody has touched it meanwhile
        if changed:
            self.seed += 1
            wanted = fill(given, self.seed)
        self.kept[key] = wanted
        self.store.release(key, changed=changed or key in self.new)
        self.new.discard(key)

    def branch(self, key: str, new_key: str) -> None:
        """Of a record that is fetched first if it is not in use."""
        if key in self.out or key not in self.kept or new_key in self.out or key == new_key:
            return
        if len(self.out) == AT_ONCE:
            return
        self.store.fetch(key)
        given = self.store.branch(key, new_key)
        self.seed += 1
        assert same(given, self.kept[key])
        self.out[new_key] = (given, fill(given, self.seed))
        self.kept[new_key] = []
        self.new.add(new_key)

    def rename(self, key: str, new_key: str) -> None:
        if key in self.kept and key not in self.out and new_key not in self.out:
            self.store.rename(key, new_key)
            self.kept[new_key] = self.kept.pop(key)

    def expect(self, keys: list[str]) -> None:
        self.store.expect([key for key in keys if key in self.kept])

    def drop(self, key: str) -> None:
        if key in self.kept:
            self.store.drop(key)
            del self.kept[key]
            self.out.pop(key, None)
            self.new.discard(key)

    def flush(self) -> None:
        self.store.flush()

    def finish(self) -> None:
        while self.out:
            self.release(0, True)
        assert self.store.bytes == sum(tensor.nbytes for record in self.kept.values() for tensor in record)
        for key, wanted in self.kept.items():
            check(self.store, key, wanted)


def random_operations(make: MakeStore) -> None:
    """Any sequence of operations, beside a dict."""

    @settings(max_examples=100, deadline=None)
    @given(OPERATIONS)
    def run(operations: list[tuple[Any, ...]]) -> None:
        with opened(make) as store:
            model = _Model(store)
            for name, *arguments in operations:
                getattr(model, name)(*arguments)
            model.finish()

    run()


STORE_CASES: Final[Mapping[str, Callable[[MakeStore], None]]] = {
    case.__name__: case
    for case in (
        round_trip,
        shapes_of_real_tensors,
        replacement,
        changes_are_kept,
        branches,
        tensors_stay,
        expectations,
        inference_mode,
        wrong_use,
        end,
        random_operations,
    )
}

"""Drives that are full, files that are cut short or can't be read, transfers that are short: told in words, with what
is lost; and what is not lost is still there."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.kernels import AsyncFileOptions, instruction_sets
from drivetrain.offload import NvmeStore
from drivetrain.offload.striped import StripedFile, preallocate
from drivetrain_testkit.stores import check, fill, put, same, values

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native core is not built")


def like(numel: int) -> list[torch.Tensor]:
    return [torch.empty(numel, device="meta")]


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process can be written beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


# --------------------------------------------------------------------------------------------------------- full drives


def test_a_full_drive_is_told_when_the_record_is_made(small_drive: Path) -> None:
    store = NvmeStore(small_drive, rank=1, buffer_count=2)
    made = {f"r{seed}": put(store, f"r{seed}", like(50_000), seed) for seed in range(5)}
    with pytest.raises(OSError, match="No space left") as told:
        store.create("r5", like(50_000))
    assert told.value.errno == errno.ENOSPC
    assert told.value.filename == str(small_drive / "drivetrain-offload-states-00001" / "data")
    text = str(told.value)
    assert "rank 1: record 'r5' takes 200704 bytes, for which there is no room" in text
    assert "200704 more bytes wanted" in text
    assert "free" in text
    with pytest.raises(KeyError):
        store.fetch("r5")
    for key, wanted in made.items():
        check(store, key, wanted)
    store.drop("r0")  # its room serves
    check(store, "r1", put(store, "r1", like(50_000), 9))
    put(store, "r5", like(50_000), 5)
    check(store, "r5", values(like(50_000), 5))
    store.close()
    assert not list(small_drive.iterdir())


def test_of_two_drives_one_is_full_and_the_other_stays_as_it_was(small_drive: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.mkdir()
    store = NvmeStore([large, small_drive], options=AsyncFileOptions(block_size=4096))
    wanted = put(store, "a", like(100_000), 1)
    before = store.file_bytes
    with pytest.raises(OSError, match=r"record 'b' takes 4001792 bytes, for which there is no room: No space left"):
        store.create("b", like(1_000_000))
    assert store.file_bytes == before
    assert os.path.getsize(large / "drivetrain-offload-states-00000" / "data") == 1 << 20
    check(store, "a", wanted)
    store.close()


def test_a_limit_of_the_file_size_is_told_when_the_record_is_made(tmp_path: Path) -> None:
    store = NvmeStore(tmp_path)
    wanted = put(store, "a", like(1000), 1)
    with file_limit(1 << 20), pytest.raises(OSError, match=r"record 'b' takes 4001792 bytes.*File too large") as told:
        store.create("b", like(1_000_000))
    assert told.value.errno == errno.EFBIG
    check(store, "a", wanted)
    put(store, "b", like(1_000_000), 2)
    store.close()


def test_a_write_behind_that_fails_is_told_next_and_its_record_is_lost(tmp_path: Path) -> None:
    store = NvmeStore(tmp_path, buffer_count=3)
    wanted = {key: put(store, key, like(100_000), seed) for seed, key in enumerate("abc")}
    store.flush()
    fill(store.fetch("b"), 7)
    with file_limit(450_000):
        with contextlib.suppress(OSError):  # it may have ended at once, and is told then
            store.release("b", changed=True)
            store.flush()
            pytest.fail("flush must raise the failure")
    for _ in range(2):
        with pytest.raises(
            OSError, match=r"record 'b' is lost, because it could not be written: write of .*File too large"
        ) as told:
            store.fetch("b")
        assert told.value.errno == errno.EFBIG
        assert told.value.filename == str(tmp_path / "drivetrain-offload-states-00000" / "data")
    assert store.bytes == 800_000
    store.expect(["a", "b", "c"])
    for key in "ac":
        check(store, key, wanted[key])
    store.flush()
    check(store, "b", put(store, "b", like(100_000), 8))  # made again, it is whole
    store.close()


@pytest.mark.parametrize("call", ["create", "fetch", "release", "flush", "close"])
def test_any_call_tells_once(
    tmp_path: Path, call: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NvmeStore(tmp_path, buffer_count=4)
    for seed, key in enumerate("abc"):
        put(store, key, like(100_000), seed)
    store.flush()
    store.fetch("a")
    with file_limit(450_000), monkeypatch.context() as patch:
        patch.setattr(store, "_tell", lambda: None)  # a write may have failed when `release` returns
        for key in "bc":
            record = store._records[key]
            fill(store.fetch(key), 7)
            store.release(key, changed=True)
            while not all(ticket.done() for ticket in record.tickets):
                time.sleep(0.001)
    calls = {
        "create": lambda: store.create("d", like(5)),
        "fetch": lambda: store.fetch("a"),
        "release": lambda: store.release("a", changed=False),
        "flush": store.flush,
        "close": store.close,
    }
    with pytest.raises(OSError, match="record 'b' is lost"):
        calls[call]()
    assert "lost as well: 'c'" in caplog.text
    if call == "close":
        assert not list(tmp_path.iterdir())
        return
    if call == "release":
        check(store, "a", values(like(100_000), 0))
    elif call == "create":
        assert "d" not in store._records
    store.flush()
    store.close()


def test_without_write_behind_release_itself_raises(tmp_path: Path) -> None:
    store = NvmeStore(tmp_path, pipeline_write=False)
    put(store, "a", like(100_000), 1)
    store.fetch("a")
    with file_limit(4096), pytest.raises(OSError, match="record 'a' is lost"):
        store.release("a", changed=True)
    store.drop("a")
    assert store.bytes == 0
    store.close()


def test_a_drive_that_gives_no_space_in_advance_and_runs_full(
    small_drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drivetrain.offload.striped.preallocate", lambda path, start, end: os.truncate(path, end))
    store = NvmeStore(small_drive, buffer_count=3)
    lost: list[OSError] = []
    for seed in range(9):
        try:
            put(store, f"r{seed}", like(50_000), seed)
        except OSError as error:
            lost.append(error)
    assert {error.errno for error in lost} == {errno.ENOSPC}
    assert all("is lost, because it could not be written" in str(error) for error in lost)
    whole = 0
    for seed in range(9):
        with contextlib.suppress(OSError, KeyError):
            check(store, f"r{seed}", values(like(50_000), seed))  # what is given is never torn
            whole += 1
    assert 4 <= whole <= 5
    with contextlib.suppress(OSError):
        store.close()
    assert not list(small_drive.iterdir())


def test_space_is_given_in_advance_or_the_file_is_as_before(small_drive: Path) -> None:
    path = small_drive / "file"
    path.write_bytes(b"x" * 5000)
    preallocate(path, 0, 100_000)
    assert path.read_bytes() == b"x" * 5000 + bytes(95_000)
    with pytest.raises(
        OSError, match=r"No space left.*: 9900000 more bytes wanted for a file of 100000; .* has \d+ free"
    ):
        preallocate(path, 100_000, 10_000_000)
    assert path.stat().st_size == 100_000
    preallocate(path, 100_000, 100_000)


# ------------------------------------------------------------------------------------------------------- damaged files


def test_a_file_that_was_cut_short_is_told_at_fetch(tmp_path: Path) -> None:
    store = NvmeStore(tmp_path, rank=5, buffer_count=1)
    wanted = {key: put(store, key, like(10_000), seed) for seed, key in enumerate("abc")}
    store.flush()
    data = tmp_path / "drivetrain-offload-states-00005" / "data"
    os.truncate(data, 50_000)
    store.expect(["b"])  # says nothing
    for _ in range(2):
        with pytest.raises(OSError, match=r"record 'b' could not be read: it was cut off: .* has 50000: '.*/data'"):
            store.fetch("b")
    with pytest.raises(OSError, match="it was cut off"):  # which would make it long again
        put(store, "d", like(10_000), 9)
    with pytest.raises(OSError, match="record 'a' could not be read: it was cut off"):
        check(store, "a", wanted["a"])
    store.close()


def test_a_file_that_was_replaced_is_not_read(tmp_path: Path) -> None:
    store = NvmeStore(tmp_path, rank=5, buffer_count=1)
    put(store, "a", like(10_000), 1)
    put(store, "b", like(10_000), 2)
    store.flush()
    data = tmp_path / "drivetrain-offload-states-00005" / "data"
    data.with_name("copy").write_bytes(data.read_bytes())
    data.with_name("copy").replace(data)
    with pytest.raises(OSError, match="record 'a' could not be read: another file was put in its place"):
        store.fetch("a")
    data.unlink()
    with pytest.raises(FileNotFoundError):
        store.fetch("a")
    store.close()


class Doomed:
    """A transfer that fails, having moved half of its bytes at most."""

    def __init__(self, what: str, tickets: list[Any]) -> None:
        self._what = what
        self._tickets = tickets

    def done(self) -> bool:
        return all(ticket.done() for ticket in self._tickets)

    def wait(self) -> None:
        for ticket in self._tickets:
            ticket.wait()
        raise OSError(errno.EIO, f"{self._what} failed", "somewhere")


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "change", "look", "expect", "drop"]),
        st.sampled_from("abcde"),
        st.sampled_from([False, False, False, True]),
    ),
    max_size=40,
)


@given(STEPS, st.booleans())
def test_no_failure_is_silent_and_no_record_torn(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, bool]], pipeline: bool
) -> None:
    """Whatever transfers fail: a fetch gives the values of the last release, or an error; what is lost stays lost."""
    store = NvmeStore(tmp_path_factory.mktemp("torn"), buffer_count=2, pipeline_read=pipeline, pipeline_write=pipeline)
    file = store._file
    read, write = file.read, file.write
    fails = False

    def doomed_read(memory: torch.Tensor, at: int) -> list[Any]:
        return [Doomed("read", read(memory[:4096], at))] if fails else read(memory, at)

    def doomed_write(memory: torch.Tensor, at: int) -> list[Any]:
        return [Doomed("write", write(memory[:4096], at))] if fails else write(memory, at)

    file.read, file.write = doomed_read, doomed_write  # type: ignore[method-assign]
    kept: dict[str, list[torch.Tensor]] = {}
    lost: set[str] = set()
    told: list[tuple[int, str]] = []
    for seed, (name, key, planned) in enumerate(steps):
        fails = planned
        if name == "expect":
            store.expect(list(kept))
            continue
        if name == "drop":
            if key in kept:
                store.drop(key)
                kept.pop(key)
                lost.discard(key)
            continue
        if name != "put" and key not in kept:
            continue
        try:
            tensors = store.create(key, like(3000)) if name == "put" else store.fetch(key)
        except OSError as error:
            told.append((seed, str(error)))
            continue
        assert name == "put" or key not in lost
        if name != "put":
            assert same(tensors, kept[key])
        lost.discard(key)
        if name != "look":
            kept[key] = fill(tensors, seed)
            if fails:
                lost.add(key)
        with contextlib.suppress(OSError):
            store.release(key, changed=name != "look")
    fails = False
    with contextlib.suppress(OSError):
        store.flush()
    while any(not ticket.done() for record in store._records.values() for ticket in record.tickets):
        time.sleep(0.001)  # reads ahead that fail, of which nobody hears
    for key, wanted in kept.items():
        if key in lost:
            with pytest.raises(OSError, match="is lost"):
                store.fetch(key)
        else:
            check(store, key, wanted)
    store.close()
    texts = ("is lost, because it could not be written: write failed", "could not be read: read failed")
    assert all(any(text in error for text in texts) for _, error in told)
    assert all(any(planned for _, _, planned in steps[: seed + 1]) for seed, _ in told)


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static int ours(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path);
    return length > 5 && memcmp(path + length - 5, "/data", 5) == 0;
}

static size_t shorter(size_t bytes) {
    static __thread unsigned state = 12345;
    state = state * 1103515245u + 12345u;
    unsigned dice = state >> 16;
    if (dice % 3 == 0 || bytes < 2) return bytes;
    size_t least = dice % 3 == 1 ? 4096 : 1;            /* whole pages, or anything */
    size_t cut = 1 + dice % (bytes - 1);
    return cut < least ? cut : cut / least * least;
}

static int asked(const char* what) {
    const char* trigger = getenv("FAULTS");
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", trigger, what);
    return access(path, F_OK) == 0;
}

#define TRANSFER(name, type, kind, offset_type)                                       \
    ssize_t name(int fd, type memory, size_t bytes, offset_type offset) {             \
        static ssize_t (*next)(int, type, size_t, offset_type);                       \
        if (next == NULL) next = (ssize_t(*)(int, type, size_t, offset_type))dlsym(RTLD_NEXT, #name); \
        if (ours(fd)) {                                                               \
            if (asked(kind "_fails")) { errno = EIO; return -1; }                     \
            if (asked("short")) bytes = shorter(bytes);                               \
        }                                                                             \
        return next(fd, memory, bytes, offset);                                       \
    }

TRANSFER(pread, void*, "read", off_t)
TRANSFER(pwrite, const void*, "write", off_t)
TRANSFER(pread64, void*, "read", off64_t)
TRANSFER(pwrite64, const void*, "write", off64_t)
"""

UNDER_FAULTS = """
import os, sys
from pathlib import Path
import torch
from drivetrain.kernels import AsyncFileOptions
from drivetrain.offload import NvmeStore
from drivetrain_testkit.stores import STORE_CASES, check, fill, put, values

faults, place = Path(os.environ["FAULTS"]), Path(sys.argv[1])
options = AsyncFileOptions(block_size=65536, queue_depth=2, engine="threads")
def like(numel): return [torch.empty(numel, device="meta")]

(faults / "short").touch()
for case in ("round_trip", "replacement", "changes_are_kept", "expectations"):
    STORE_CASES[case](lambda: NvmeStore(place, buffer_count=2, options=options))
store = NvmeStore(place, buffer_count=2, options=options)
for seed, key in enumerate("abcd"):
    put(store, key, like(150_001), seed)
for seed, key in enumerate("abcd"):
    check(store, key, values(like(150_001), seed))
print("short transfers are completed")

(faults / "read_fails").touch()
store.expect(["a", "b"])
try:
    store.fetch("a")
except OSError as error:
    print(error)
(faults / "read_fails").unlink()
check(store, "a", values(like(150_001), 0))

(faults / "write_fails").touch()
fill(store.fetch("a"), 9)
try:
    store.release("a", changed=True)
    store.flush()
except OSError as error:
    print(error)
(faults / "write_fails").unlink()
try:
    store.fetch("a")
except OSError as error:
    print(error)
check(store, "b", values(like(150_001), 1))
store.close()
"""


def test_short_transfers_and_a_failing_drive(tmp_path: Path) -> None:
    """A library before the system's cuts transfers short, and fails them."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs Linux and a C compiler")
    source, library, faults, place = (tmp_path / name for name in ("shim.c", "shim.so", "faults", "place"))
    source.write_text(SHIM)
    faults.mkdir()
    place.mkdir()
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-c", UNDER_FAULTS, place],
        env={**os.environ, "LD_PRELOAD": str(library), "FAULTS": str(faults)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    short, read, write, lost = done.stdout.splitlines()
    assert short == "short transfers are completed"
    assert "rank 0: record 'a' could not be read: read of 602112 bytes at offset 0" in read
    assert "failed at offset 0: Input/output error" in read
    for text in (write, lost):
        assert "record 'a' is lost, because it could not be written: write of 602112 bytes" in text
        assert "Input/output error" in text


def test_striping_reads_what_was_written_at_any_offset(tmp_path: Path) -> None:
    paths = [tmp_path / f"file{index}" for index in range(3)]
    data = values([torch.empty(200_000, dtype=torch.uint8)], 1)[0]
    file = StripedFile(paths, chunk=4096, options=AsyncFileOptions(), buffers=None)
    with contextlib.closing(file):
        file.grow(100_000)
        file.grow(200_000)
        assert [path.stat().st_size for path in paths] == [17 * 4096, 16 * 4096, 16 * 4096]
        for start, end in ((0, 5), (5, 9000), (9000, 9000), (9000, 200_000)):
            for ticket in file.write(data[start:end], start):
                ticket.wait()
        for start, end in ((0, 200_000), (4095, 4097), (8192, 8192 + 4096), (123, 77_777)):
            back = torch.zeros(end - start, dtype=torch.uint8)
            for ticket in file.read(back, start):
                ticket.wait()
            assert torch.equal(back, data[start:end])
    assert paths[1].read_bytes()[:4096] == bytes(data[4096:8192].tolist())

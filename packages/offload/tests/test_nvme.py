"""Records in files: what any store does, with all settings; buffers, read-ahead and space; whose files they are."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.kernels import AsyncFileOptions, instruction_sets
from drivetrain.offload import NvmeStore
from drivetrain_testkit.stores import STORE_CASES, check, fill, put, values

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native core is not built")

SMALL = AsyncFileOptions(block_size=8192, queue_depth=4)
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "two buffers": {"buffer_count": 2},
    "three buffers of a size": {"buffer_count": 3, "buffer_bytes": 1 << 18},
    "no pipeline": {"buffer_count": 2, "pipeline_read": False, "pipeline_write": False},
    "threads": {"options": AsyncFileOptions(block_size=4096, queue_depth=3, engine="threads"), "buffer_count": 3},
    "page cache": {"options": AsyncFileOptions(block_size=4096, direct=False), "buffer_count": 3},
    "some in memory": {"buffer_count": 3, "max_in_cpu": 50_000},
    "all in memory": {"max_in_cpu": 1 << 30, "pin_memory": True},
    "three drives": {"options": SMALL, "buffer_count": 3},
}


def folders(place: Path, count: int) -> list[Path]:
    made = [place / f"drive{index}" for index in range(count)]
    for folder in made:
        folder.mkdir()
    return made


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", STORE_CASES)
def test_it_conforms(case: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.offload.nvme._LEAST_CHUNK", 4096)  # records of tests span several chunks
    drives = folders(tmp_path, 3 if setting == "three drives" else 1)
    STORE_CASES[case](lambda: NvmeStore(drives, **SETTINGS[setting]))
    assert all(not list(drive.iterdir()) for drive in drives)  # nothing is left


def like(numel: int) -> list[torch.Tensor]:
    return [torch.empty(numel, device="meta")]


# ------------------------------------------------------------------------------------------------------------- buffers


def test_buffers_in_use_by_callers_are_named(tmp_path: Path) -> None:
    store = NvmeStore(tmp_path, rank=3, buffer_count=2)
    for key in "abc":
        put(store, key, like(100), 1)
    store.fetch("a")
    store.fetch("b")
    for wrong in (lambda: store.fetch("c"), lambda: store.create("d", like(9))):
        with pytest.raises(
            RuntimeError,
            match="rank 3: all 2 buffers are in use, by 'a', 'b'; release one, or set buffer_count to at least 3",
        ):
            wrong()
    store.release("a", changed=False)
    check(store, "c", values(like(100), 1))
    store.close()


def test_a_record_larger_than_a_buffer_is_refused_with_both_sizes(tmp_path: Path) -> None:
    store = NvmeStore(tmp_path, buffer_bytes=10_000, max_in_cpu=8192)
    store.create("fits in memory", like(2000))
    with pytest.raises(
        ValueError, match="record 'a' takes 16384 bytes, a buffer has 12288; set buffer_bytes to at least 16384"
    ):
        store.create("a", like(4000))
    with pytest.raises(KeyError):
        store.fetch("a")
    put(store, "b", like(3000), 1)
    store.close()


def test_many_records_through_few_buffers_in_memory_of_few(tmp_path: Path) -> None:
    store = NvmeStore(tmp_path, buffer_count=3, buffer_bytes=1 << 16)
    keys = [f"r{index}" for index in range(40)]
    for seed, key in enumerate(keys):
        put(store, key, like(16384), seed)
    for turn in range(1, 4):
        store.expect(keys)
        for seed, key in enumerate(keys):
            tensors = store.fetch(key)
            assert torch.equal(
                tensors[0].view(torch.uint8), values(like(16384), 1000 * (turn - 1) + seed)[0].view(torch.uint8)
            )
            fill(tensors, 1000 * turn + seed)
            store.release(key, changed=True)
    assert store.memory_bytes == 3 << 16
    assert store.file_bytes == 40 << 16
    store.close()


class Watched:
    """Counts the transfers of a store."""

    def __init__(self, store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[int] = []
        self.writes: list[int] = []
        file = store._file
        read, write = file.read, file.write
        monkeypatch.setattr(file, "read", lambda memory, at: self.reads.append(at) or read(memory, at))  # type: ignore[func-returns-value]
        monkeypatch.setattr(file, "write", lambda memory, at: self.writes.append(at) or write(memory, at))  # type: ignore[func-returns-value]


def test_what_is_expected_is_read_ahead_in_order_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = NvmeStore(tmp_path, buffer_count=3)
    keys = list("abcdef")
    for seed, key in enumerate(keys):
        put(store, key, like(1024), seed)
    store.flush()
    watched = Watched(store, monkeypatch)
    store.expect(keys)
    # What the buffers still held was expected later than these.
    assert watched.reads == [0, 4096, 8192]
    for index, key in enumerate(keys):
        check(store, key, values(like(1024), index))
        assert watched.reads == [4096 * each for each in range(min(6, index + 4))]
    assert watched.writes == []
    store.close()


class Held:
    """A transfer that ends when it is waited for, and not before."""

    def __init__(self, what: str, tickets: list[Any], log: list[str]) -> None:
        self._what = what
        self._tickets = tickets
        self._log = log
        self._ended = False

    def done(self) -> bool:
        return self._ended

    def wait(self) -> None:
        for ticket in self._tickets:
            ticket.wait()
        self._ended = True
        self._log.append(self._what)


def test_nobody_waits_for_what_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of the next, use of this and writes of the last overlap; the oldest write is waited for, if any."""
    store = NvmeStore(tmp_path, buffer_count=3)
    keys = "abcdef"
    for seed, key in enumerate(keys):
        put(store, key, like(1024), seed)
    store.flush()
    log: list[str] = []
    file = store._file
    read, write = file.read, file.write
    monkeypatch.setattr(file, "read", lambda data, at: [Held(f"read {keys[at // 4096]}", read(data, at), log)])
    monkeypatch.setattr(file, "write", lambda data, at: [Held(f"write {keys[at // 4096]}", write(data, at), log)])

    def step(key: str) -> list[str]:
        log.clear()
        tensors = store.fetch(key)
        fill(tensors, 7)
        store.release(key, changed=True)
        return list(log)

    store.expect(keys)
    assert step("a") == ["read a"]
    assert step("b") == ["read b"]
    assert step("c") == ["read c"]
    assert step("d") == ["write a", "read d"]  # all three are being written
    assert step("e") == ["write b", "read e"]
    assert step("c") == ["write c"]  # it must not change while it is written; then it is there
    log.clear()
    store.flush()
    assert log == ["write d", "write e", "write c"]
    store.close()


def test_without_read_ahead_nothing_is_read_before_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NvmeStore(tmp_path, buffer_count=2, pipeline_read=False)
    for seed, key in enumerate("abc"):
        put(store, key, like(1024), seed)
    watched = Watched(store, monkeypatch)
    store.expect(["a"])
    assert watched.reads == []
    check(store, "a", values(like(1024), 0))
    assert watched.reads == [0]
    store.close()


def test_what_is_in_memory_is_neither_written_nor_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = NvmeStore(tmp_path, max_in_cpu=2 * 4096, buffer_count=1)
    watched = Watched(store, monkeypatch)
    for seed, key in enumerate("abc"):
        put(store, key, like(1024), seed)
    assert watched.writes == [0]
    held = [store.fetch(key) for key in "abc"]  # resident ones take no buffer
    assert len(held) == 3
    for key in "abc":
        store.release(key, changed=False)
    store.drop("a")
    put(store, "d", like(1024), 7)  # takes the room of "a"
    assert watched.writes == [0]
    assert watched.reads == []
    assert store.file_bytes == 4096
    store.close()


def test_space_in_the_file_is_used_again(tmp_path: Path) -> None:
    store = NvmeStore(tmp_path)
    for turn in range(30):
        for index in range(4):
            put(store, f"r{index}", like(1024 * (1 + (turn + index) % 3)), index)
    assert store.file_bytes <= 12 * 3 * 4096
    blocks = os.stat(tmp_path / "drivetrain-offload-states-00000" / "data").st_blocks * 512
    assert blocks >= store.file_bytes  # given by the file system, not just promised
    store.close()


# --------------------------------------------------------------------------------------------------------------- files


def test_wrong_settings_are_refused_in_words(tmp_path: Path) -> None:
    for wrong, match in (
        ({"buffer_count": 0}, "buffer_count: expected"),
        ({"buffer_bytes": 0}, "buffer_bytes: expected"),
        ({"max_in_cpu": -1}, "max_in_cpu: expected"),
        ({"name": "../up"}, "name: expected"),
    ):
        with pytest.raises(ValueError, match=match):
            NvmeStore(tmp_path, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="folders: expected"):
        NvmeStore([])
    with pytest.raises(NotADirectoryError, match="none is not a folder; make it, on the drive"):
        NvmeStore([tmp_path, tmp_path / "none"])
    assert not list(tmp_path.iterdir())


def test_the_manifest_says_what_is_where(tmp_path: Path) -> None:
    store = NvmeStore(tmp_path, rank=2)
    folder = tmp_path / "drivetrain-offload-states-00002"
    assert json.loads((folder / "manifest.json").read_text())["pid"] == os.getpid()
    put(store, "a", [torch.empty(3), torch.empty(2, dtype=torch.bfloat16)], 1)
    store.flush()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == 1
    assert manifest["files"] == [str(folder / "data")]
    assert manifest["records"] == {
        "a": {
            "offset": 0,
            "bytes": 4096,
            "tensors": [
                {"start": 0, "numel": 3, "dtype": "float32"},
                {"start": 64, "numel": 2, "dtype": "bfloat16"},
            ],
        }
    }
    raw = (folder / "data").read_bytes()
    assert raw[:12] == bytes(values([torch.empty(3)], 1)[0].view(torch.uint8).tolist())
    store.close()
    assert not folder.exists()


def test_ranks_share_a_folder_and_one_rank_has_it_once(tmp_path: Path) -> None:
    with_zero, with_one = NvmeStore(tmp_path, rank=0), NvmeStore(tmp_path, rank=1)
    put(with_zero, "a", like(9), 1)
    with pytest.raises(
        RuntimeError, match=rf"rank 1: .*drivetrain-offload-states-00001 belongs to process {os.getpid()} on"
    ):
        NvmeStore(tmp_path, rank=1)
    named = NvmeStore(tmp_path, rank=1, name="parameters")
    check(with_zero, "a", values(like(9), 1))
    named.close()
    with_one.close()
    NvmeStore(tmp_path, rank=1).close()
    with_zero.close()
    assert not list(tmp_path.iterdir())


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "drivetrain-offload-states-00000"
    folder.mkdir()
    (folder / "notes").write_text("mine")
    NvmeStore(tmp_path).close()
    assert [path.name for path in folder.iterdir()] == ["notes"]


def test_a_store_that_is_dropped_removes_its_files(tmp_path: Path) -> None:
    store = NvmeStore(tmp_path)
    put(store, "a", like(1_000_000), 1)
    store.expect(["a"])
    del store
    gc.collect()
    assert not list(tmp_path.iterdir())


def run_script(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=100
    )


USE = """
import os, signal, sys, torch
from drivetrain.offload import NvmeStore
store = NvmeStore(sys.argv[1], rank=1)
for key in "abcdef":
    store.create(key, [torch.empty(1_000_000)])[0].fill_(1)
    store.release(key, changed=True)
"""


def test_an_exit_without_close_removes_the_files(tmp_path: Path) -> None:
    for end in ("", "raise SystemExit(0)"):
        done = run_script(USE + end, tmp_path)
        assert done.returncode == 0
        assert done.stderr == ""
        assert not list(tmp_path.iterdir())


def test_a_forked_child_leaves_the_files_to_its_parent(tmp_path: Path) -> None:
    code = USE + "pid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitpid(pid, 0)\n"
    code += "assert float(store.fetch('a')[0].sum()) == 1e6\nprint('whole')"
    done = run_script(code, tmp_path)
    assert done.stdout == "whole\n", done.stderr
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drives = folders(tmp_path, 2)
    code = USE.replace("sys.argv[1]", "sys.argv[1:]") + "os.kill(os.getpid(), signal.SIGKILL)"  # with writes under way
    done = run_script(code, *drives)
    assert done.returncode == -signal.SIGKILL
    left = [drive / "drivetrain-offload-states-00001" / "data" for drive in drives]
    assert all(path.stat().st_size >= 8_000_000 for path in left)
    old = json.loads((left[0].parent / "manifest.json").read_text())
    with caplog.at_level(logging.INFO, logger="drivetrain.offload"):
        store = NvmeStore(drives, rank=1)
    assert f"that process {old['pid']} (run {old['run']}) left behind" in caplog.text
    assert all(path.stat().st_size == 0 for path in left)
    put(store, "a", like(9), 1)
    check(store, "a", values(like(9), 1))
    store.close()
    assert all(not list(drive.iterdir()) for drive in drives)

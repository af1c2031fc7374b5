"""A folder of one rank's own, below the one that the user named.

Problem: a process that is killed leaves its files, which fill the drive; and two that use the same files destroy each
other's states, unnoticed.
Idea: the folder holds a lock that the system lets go when its process ends, however that ends. Who gets the lock may
remove what lies there; who doesn't names the process that has it.
Invariants: files of a living process are never touched; nothing but the names below is removed; manifests are replaced
as a whole, so that one is always complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["Claim"]

FORMAT: Final = 1
_LOCK: Final = "lock"
_MANIFEST: Final = "manifest.json"
_NEW_MANIFEST: Final = "manifest.json.new"
_DATA: Final = "data"
_TRIES: Final = 100
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")

_log = logging.getLogger("drivetrain.offload")


class Claim:
    """The folder `drivetrain-offload-<name>-<rank>` in `parent`, which is this object's until `release`.

    RuntimeError, with the process, where a living one has it; NotADirectoryError where `parent` is none.
    """

    def __init__(self, parent: Path, name: str, rank: int, run: str) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"name: expected letters, digits, '_', '-' and '.'; found {name!r}")
        if not parent.is_dir():
            raise NotADirectoryError(
                f"rank {rank}: {parent} is not a folder; make it, on the drive that is to hold the states"
            )
        self.folder = parent / f"drivetrain-offload-{name}-{rank:05d}"
        self._rank = rank
        self._run = run
        self._owner = os.getpid()
        self._lock = self._acquire()
        try:
            self._clean()
            self.write_manifest({})
        except BaseException:
            self.release()
            raise

    @property
    def data(self) -> Path:
        """The file for the records."""
        return self.folder / _DATA

    def _acquire(self) -> int:
        for _ in range(_TRIES):  # the one who lets go of the folder removes it, perhaps just now
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir()
            try:
                lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.stat(self.folder / _LOCK).st_ino == os.fstat(lock).st_ino:
                    return lock
            except BlockingIOError:
                os.close(lock)
                raise RuntimeError(
                    f"rank {self._rank}: {self.folder} belongs to {self._holder()}, which is alive, or a child of it "
                    "is; wait for its end, or give another folder or name"
                ) from None
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)
        raise RuntimeError(f"rank {self._rank}: {self.folder} comes and goes; does another process use this name?")

    def _holder(self) -> str:
        found = self.read_manifest()
        if not found:
            return "a process that has just begun to use it"
        return f"process {found.get('pid')} on {found.get('host')} (run {found.get('run')})"

    def _clean(self) -> None:
        old = self.read_manifest()
        left = [name for name in (_DATA, _MANIFEST, _NEW_MANIFEST) if (self.folder / name).exists()]
        if not left:
            return
        size = sum((self.folder / name).stat().st_size for name in left)
        _log.info(
            "rank %d: removed %d bytes from %s that process %s (run %s) left behind when it died",
            *(self._rank, size, self.folder, old.get("pid", "?"), old.get("run", "?")),
        )
        for name in left:
            (self.folder / name).unlink()

    def read_manifest(self) -> dict[str, Any]:
        """What the manifest says; empty where there is none that can be read."""
        try:
            found = json.loads((self.folder / _MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write_manifest(self, about: Mapping[str, object]) -> None:
        """Replace the manifest by one that says this, and whose it is."""
        text = json.dumps(
            {
                "format": FORMAT,
                "run": self._run,
                "rank": self._rank,
                "host": socket.gethostname(),
                "pid": self._owner,
                **about,
            }
        )
        new = self.folder / _NEW_MANIFEST
        new.write_text(text + "\n", encoding="utf-8")
        os.replace(new, self.folder / _MANIFEST)

    def release(self) -> None:
        """Remove the files and let go of the folder. Does nothing in a forked child."""
        if os.getpid() != self._owner or self._lock < 0:
            return
        lock, self._lock = self._lock, -1
        for name in (_DATA, _MANIFEST, _NEW_MANIFEST, _LOCK):
            with contextlib.suppress(OSError):
                (self.folder / name).unlink()
        with contextlib.suppress(OSError):  # somebody keeps files of their own in it
            self.folder.rmdir()
        fcntl.flock(lock, fcntl.LOCK_UN)  # a forked child may have it open still
        os.close(lock)

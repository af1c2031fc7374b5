"""Carries what ranks write to the console and into log files.

A rank whose stream goes straight to the console inherits it and is no business of this module. Every other stream is a
named pipe that one thread reads: whole lines reach the console, each behind the rank's prefix, so that two ranks never
write into each other's line; the bytes as they are reach the log file.

The relay keeps a writing end of each pipe open itself. So reading never sees an end of file, neither before a rank has
started nor when a grandchild keeps the pipe open after it; the relay ends when it is told to, after what is still in
the pipes has been read.
"""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 16

Console = Callable[[bytes], None]
"""Where whole lines go: takes bytes, writes all of them."""


def console(descriptor: int) -> Console:
    """A `Console` on a file descriptor (1 or 2). A reader that has gone away (`| head`) is not an error."""

    def write(data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError:
            return

    return write


@dataclass(kw_only=True)
class LineBuffer:
    """Cuts bytes into whole lines behind a prefix; an empty prefix lets every byte through at once.

    A progress bar redraws its line with carriage returns and would grow without end, so of a line only the text after
    its last carriage return is kept.
    """

    prefix: bytes = b""
    pending: bytes = b""

    def feed(self, data: bytes) -> bytes:
        """What can be shown after `data` arrived."""
        if not self.prefix:
            return data
        *lines, rest = (self.pending + data).split(b"\n")
        shown = [self._line(line) for line in lines]
        kept = rest.rsplit(b"\r", 1)[-1] if b"\r" in rest[:-1] else rest
        if len(kept) > _LONGEST_LINE:
            shown.append(self._line(kept))
            kept = b""
        self.pending = kept
        return b"".join(shown)

    def flush(self) -> bytes:
        """The unfinished last line, ended."""
        rest, self.pending = self.pending, b""
        return self._line(rest) if rest else b""

    def _line(self, line: bytes) -> bytes:
        return self.prefix + line.rstrip(b"\r").rsplit(b"\r", 1)[-1] + b"\n"


@dataclass(kw_only=True)
class _Stream:
    descriptor: int  # read and write: see the module's docstring
    show: Console | None
    log: BinaryIO | None
    lines: LineBuffer = field(default_factory=LineBuffer)

    def pump(self) -> bool:
        """Move one chunk; False when nothing is there."""
        try:
            data = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            return False
        if self.log is not None:
            self.log.write(data)
            self.log.flush()
        if self.show is not None and (shown := self.lines.feed(data)):
            self.show(shown)
        return True

    def close(self) -> None:
        while self.pump():
            pass
        if self.show is not None and (rest := self.lines.flush()):
            self.show(rest)
        if self.log is not None:
            self.log.close()
        os.close(self.descriptor)


class Relay:
    """A set of named pipes and the thread that empties them. Use as a context manager; `open` before or after entry."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._streams: dict[str, _Stream] = {}
        self._thread = threading.Thread(target=self._run, name="drivetrain-relay", daemon=True)

    def open(self, name: str, *, show: Console | None = None, prefix: str = "", log: Path | None = None) -> str:
        """The path of a pipe for `name`, made on the first call; what is written to it goes to `show` and `log`."""
        path = self._directory / name
        if name not in self._streams:
            os.mkfifo(path)
            stream = _Stream(
                descriptor=os.open(path, os.O_RDWR | os.O_NONBLOCK),
                show=show,
                log=None if log is None else log.open("ab"),
                lines=LineBuffer(prefix=prefix.encode()),
            )
            self._streams[name] = stream
            self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)
        return str(path)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        os.write(self._wake_write, b"x")
        self._thread.join()
        for stream in self._streams.values():
            stream.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                key.data.pump()

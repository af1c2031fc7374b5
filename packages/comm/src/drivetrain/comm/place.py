"""Where a thread is in the program: the innermost line that is neither torch's, Python's nor drivetrain's own."""

from __future__ import annotations

import linecache
import os
import sys
from types import FrameType
from typing import Final

import torch

_LINE: Final = 100  # characters shown of a line


def place_of(thread: int) -> str:
    """``train.py:31 in main: loss = model(batch)`` for a running thread, by its identifier; empty if it has ended."""
    frame = innermost(sys._current_frames().get(thread))
    if frame is None:
        return ""
    name, number = frame.f_code.co_filename, frame.f_lineno
    line = linecache.getline(name, number).strip()[:_LINE]
    return f"{_shortened(name)}:{number} in {frame.f_code.co_name}" + (f": {line}" if line else "")


def innermost(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the program's own code; the innermost of all where there is none."""
    libraries = _libraries()
    found = frame
    while found is not None and not _own(found.f_code.co_filename, libraries):
        found = found.f_back
    return found or frame


def _own(name: str, libraries: tuple[str, ...]) -> bool:
    return (
        not name.startswith("<")
        and ("site-packages" in name or not name.startswith(libraries[0]))
        and not name.startswith(libraries[1:])
    )


def _libraries() -> tuple[str, ...]:
    """Folders of code that is not looked for; the first is Python's, in which installed packages lie too."""
    ours = sys.modules["drivetrain"].__path__  # a namespace over several folders
    folders = [os.path.dirname(os.__file__), os.path.dirname(torch.__file__), *ours]
    return tuple(folder + os.sep for folder in folders)


def _shortened(name: str) -> str:
    try:
        return name.removeprefix(os.getcwd() + os.sep)
    except OSError:  # the folder is gone
        return name

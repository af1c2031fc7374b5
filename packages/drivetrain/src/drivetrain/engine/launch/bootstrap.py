"""Runs one rank's script as `__main__` and leaves a record of how it failed.

The launcher starts `python -u bootstrap.py {script|module} TARGET ARGS...`. Seen from the target, nothing differs from
`python TARGET ARGS...`: `__name__`, `__file__`, `sys.argv` and `sys.path[0]` are the same. An exception that leaves the
target is written to the file named by TORCHELASTIC_ERROR_FILE, in the form that torch's elastic agent reads, with what
the launcher needs to tell a cause from its consequences: a precise time and the whole chain of causes. The rank itself
then ends quietly with status 1: of all ranks that fail, the launcher shows the one traceback that matters.

This file is run by path and must stay free of imports other than the standard library's: it must not slow down, or
change, the interpreter that the target gets.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib.machinery
import io
import json
import os
import pkgutil
import runpy
import signal
import sys
import time
import traceback
import types
from types import TracebackType

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    """Run the target named in `sys.argv`; return the exit status of a failure that was recorded."""
    kind, target = sys.argv[1], sys.argv[2]
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    _end_with_the_launcher()
    if error_file:
        # Kept open for the life of the process: the handler writes to the descriptor when a fatal signal arrives.
        faulthandler.enable(file=open(error_file + ".fault", "w"))  # noqa: SIM115
    try:
        _run(kind, target, sys.argv[3:])
    except SystemExit as error:
        if error_file and error.code not in (None, 0):
            _record(error, error_file)
        raise
    except BaseException as error:
        if not error_file:
            raise
        _record(error, error_file)
        _call_hook(error)
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run(kind: str, target: str, args: list[str]) -> None:
    sys.argv = [target, *args]
    first = os.path.dirname(os.path.realpath(target)) if kind == "script" else os.getcwd()
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = first
    if kind == "script":
        if os.path.isdir(target) and sys.path[0] == first:
            del sys.path[0]  # runpy puts a folder with a __main__.py there itself
        path = os.path.abspath(target)
        if pkgutil.get_importer(path) is None and not path.endswith(".pyc"):
            _run_file(path)
        else:
            runpy.run_path(path, run_name="__main__")  # a folder, an archive, or compiled code
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


def _run_file(path: str) -> None:
    """Run a source file. `runpy` would write the path into `sys.argv[0]`, and take `__main__` away at the script's end,
    when its threads may still unpickle by that name."""
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        # `dont_inherit`: the __future__ imports of this file are not the script's.
        code = compile(file.read(), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _end_with_the_launcher() -> None:
    """Have the kernel send SIGTERM to this rank should the launcher be killed (Linux), so that none is left behind."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # a C library without prctl: no safety net, no harm
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _call_hook(error: BaseException) -> None:
    """Run a `sys.excepthook` that somebody set for what it does (an experiment tracker notes the crash), not for what
    it writes: the launcher shows the traceback, once."""
    if sys.excepthook is not sys.__excepthook__:
        with contextlib.redirect_stderr(io.StringIO()):
            sys.excepthook(type(error), error, _of_the_target(error.__traceback__))


def _of_the_target(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy at its top."""
    while frames is not None:
        name = frames.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in os.path.basename(name):
            return frames
        frames = frames.tb_next
    return None


def _chain(error: BaseException | None) -> list[str]:
    """`Type: message` of an exception and of those that caused it, outermost first."""
    chain: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        chain.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain


def _record(error: BaseException, error_file: str) -> None:
    now = time.time()
    text = "".join(traceback.format_exception(type(error), error, _of_the_target(error.__traceback__)))
    code = error.code if isinstance(error, SystemExit) else None
    record = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": text, "timestamp": str(int(now))},
        },
        "drivetrain": {
            "type": type(error).__name__,
            "message": str(error),
            "chain": _chain(error),
            "time": now,
            "exit": None if code is None else str(code),
        },
    }
    try:
        # Renamed into place: whoever finds the file finds all of it.
        with open(error_file + ".part", "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(error_file + ".part", error_file)
    except OSError as problem:
        sys.stderr.write(f"{text}\n(the launcher could not be told: {problem})\n")


if __name__ == "__main__":
    sys.exit(main())

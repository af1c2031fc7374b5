"""What is said about a configuration: problems, notices and the one exception.

A person who starts a run wants to hear everything that is wrong with a file at once, each thing in the same four parts:
where (key path, and file:line when there is a file), what was found, what is wrong with it, and what to do. Problems
are plain records, so that the command line, the exception and an editor can each show them in their own way.

Invariants: a `Problem` always has a path and a message; `str(ConfigError)` mentions every problem; no secret is shown
(the caller renders `found`, and masks keys marked secret).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

LONGEST_FOUND = 72
"""Characters of a value that an error message shows before it is cut."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with a configuration."""

    path: str
    """Dotted key path as the person wrote it, such as `zero_optimization.stage3_prefetch_bucket_size`; "" is the
    whole file."""
    found: str
    """The value that was found, as JSON text, cut when long; "" when the key is absent or the value says nothing."""
    message: str
    """What is wrong, as a sentence."""
    hint: str = ""
    """What to do about it, as a sentence; "" when the message says it."""
    line: int | None = None
    """Line of the key in the file, from 1; None when there is no file."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """One thing that a person should know about a configuration that is accepted."""

    kind: Literal["auto", "deprecated", "no effect", "advice"]
    path: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """A configuration that can't be used, with all its problems.

    Attributes:
        problems: every problem found, in the order of the file.
        source: the file's path as given, or None for a dict or base64 text.
    """

    def __init__(self, problems: Sequence[Problem], source: str | None = None) -> None:
        super().__init__(problems, source)
        self.problems = tuple(problems)
        self.source = source

    def __str__(self) -> str:
        count = len(self.problems)
        title = f"{count} problem{'' if count == 1 else 's'} in the configuration"
        if self.source is not None:
            title += f" {self.source}"
        return "\n".join([title, *(indented(describe(problem, self.source)) for problem in self.problems)])


def describe(problem: Problem, source: str | None) -> str:
    """The problem as two or three lines of text, the first of them the place."""
    place = problem.path or "the configuration"
    if problem.line is not None:
        place = f"{source or 'line'}:{problem.line}: {place}"
    if problem.found:
        place += f" = {problem.found}"
    lines = [place, f"    {problem.message}"]
    if problem.hint:
        lines.append(f"    to fix it: {problem.hint}")
    return "\n".join(lines)


def indented(text: str) -> str:
    return "\n".join("  " + line for line in text.split("\n"))


def show(value: object) -> str:
    """A value as short JSON text for messages. Never raises, whatever the value is."""
    text: str
    if isinstance(value, float) and not math.isfinite(value):
        text = "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    elif isinstance(value, float) and value.is_integer() and 1e6 <= abs(value) < 1e16:
        text = f"{value:.10g}"
    else:
        try:
            text = json.dumps(value, ensure_ascii=False, default=repr)
        except (TypeError, ValueError, RecursionError):
            text = f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST_FOUND else text[: LONGEST_FOUND - 3] + "..."


def kind_of(value: object) -> str:
    """What a JSON value is, in words: the way messages name what was found."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, list | tuple):
        return "a list"
    return f"a Python {type(value).__name__}"

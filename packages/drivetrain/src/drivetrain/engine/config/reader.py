"""Read a configuration document and remember where each key stood.

The problem: people write configurations by hand, with comments and a comma left over at the end, and want to be told
the line when something is wrong. Python's json module takes neither, and forgets positions and duplicates.

The idea: one small recursive-descent reader for JSON plus what people really write. It accepts

- comments: `#` and `//` to the end of the line, `/* ... */` anywhere;
- a comma after the last element, and no comma at all where a line break separates elements;
- keys without quotes, and strings in single quotes;
- `Infinity`, `-Infinity` and `NaN`, which Python's own json module writes (no key accepts NaN).

It is not full HJSON: text without quotes is refused, since there the rest of a line (comma, comment and all) becomes
the value. The other two forms of a configuration end here too: a mapping, which has no lines, and URL-safe base64 of
a document.

Invariants: a duplicate key is always reported, with both lines, and the first one counts; the position table has one
entry for each key and list element; nesting is limited, so that a hostile file can't exhaust the stack.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from drivetrain.engine.config.problems import ConfigError, Problem, show

DEEPEST = 64
"""Levels of nesting that the reader follows; the deepest known key is at level 8."""

KeyPath = tuple[str | int, ...]
"""Where a value stands: keys of sections and indices of lists, from the root."""

_BASE64 = re.compile(r"[A-Za-z0-9_\-+/\s]+={0,2}\s*")
_SPACE = re.compile(r"[ \t\r\n\ufeff]+")
_NUMBER = re.compile(r"[+-]?(?:Infinity|NaN|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])")
_BARE_KEY = re.compile(r"[A-Za-z_$][\w$\-]*")
_DOUBLE = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_SINGLE = re.compile(r"'(?:[^'\\\n]|\\.)*'")
_WORDS: Mapping[str, bool | None] = MappingProxyType({"true": True, "false": False, "null": None})
_PYTHON_WORDS: Mapping[str, str] = MappingProxyType({"True": "true", "False": "false", "None": "null"})


@dataclass(frozen=True, kw_only=True)
class Document:
    """A configuration as written, before anything is known of its keys."""

    values: Mapping[Any, object]
    """The root section. Values are JSON values when read from text, anything when given as a mapping."""
    source: str | None = None
    """Path of the file; None for a mapping or base64."""
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    """Line (from 1) of each key and list element."""
    spans: Mapping[KeyPath, tuple[int, int]] = field(default_factory=dict)
    """Where the text of the root, (), and of each key's value begins and ends."""
    problems: tuple[Problem, ...] = ()
    """Duplicate keys. A syntax error is not here: it raises, since nothing after it can be trusted."""


_LONGEST_PATH = 4096


def read(source: Mapping[str, object] | str | os.PathLike[str]) -> Document:
    """Read a mapping, a file, or URL-safe base64 of a document.

    Text that names an existing file is read as that file; other text is tried as base64.

    Raises:
        ConfigError: no such file, not a file, not UTF-8 text, not a document, or a root that is not a section.
    """
    if isinstance(source, Mapping):
        return Document(values=source)
    if not isinstance(source, str | os.PathLike):
        raise _refusal(
            "a configuration is a mapping, the path of a JSON file, or URL-safe base64 text of one, "
            f"not a {type(source).__name__}",
            found=show(source),
        )
    name = os.fspath(source)
    if _exists(name):
        return parse(_text_of(Path(name)), source=name)
    if isinstance(source, str):
        if source.lstrip().startswith("{"):
            raise _refusal(
                "this is the text of a configuration, not the path of a file",
                found=show(source),
                hint="write it to a file, or pass the mapping that json.loads makes of it",
            )
        text = _decoded(source)
        if text is not None:
            return parse(text, source=None)
    raise _refusal(
        "there is no such file, and the text is not URL-safe base64 of a configuration either",
        found=json.dumps(name) if len(name) <= _LONGEST_PATH else show(name),  # a path is of use only whole
        hint=f"check the path; relative paths start at the current folder, which is {os.getcwd()}",
    )


def parse(text: str, *, source: str | None = None) -> Document:
    """Read the text of a configuration.

    Raises:
        ConfigError: a syntax error, with line, column and the line itself; or a root that is not a section.
    """
    parser = _Parser(text, source)
    values = parser.document()
    return Document(
        values=values, source=source, lines=parser.lines, spans=parser.spans, problems=tuple(parser.problems)
    )


def dotted(path: KeyPath) -> str:
    """`("a", "b", 0, "c")` as `a.b[0].c`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text


def _refusal(message: str, *, found: str = "", hint: str = "", source: str | None = None) -> ConfigError:
    return ConfigError([Problem(path="", found=found, message=message, hint=hint)], source)


def _exists(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # too long for a file name, or with a null byte: base64 or nonsense
        return False


def _text_of(path: Path) -> str:
    if not path.is_file():
        raise _refusal("this is a folder, not a file", hint="name the configuration file in it", source=str(path))
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refusal(
            f"the file is not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x})",
            hint="save it as UTF-8",
            source=str(path),
        ) from error
    except OSError as error:
        raise _refusal(f"the file can't be read: {error.strerror}", source=str(path)) from error


def _decoded(text: str) -> str | None:
    """The document that base64 text holds, or None when the text is not base64 of a document."""
    if not _BASE64.fullmatch(text):
        return None
    compact = "".join(text.split()).rstrip("=").replace("+", "-").replace("/", "_")
    try:
        decoded = base64.urlsafe_b64decode(compact + "=" * (-len(compact) % 4)).decode("utf-8-sig")
    except (binascii.Error, ValueError):
        return None
    return decoded if decoded.lstrip()[:1] in ("{", "#", "/") else None


class _Parser:
    """One pass over one text. `lines`, `spans` and `problems` fill as it goes."""

    def __init__(self, text: str, source: str | None) -> None:
        self.text = text
        self.source = source
        self.at = 0
        self.starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self.lines: dict[KeyPath, int] = {}
        self.spans: dict[KeyPath, tuple[int, int]] = {}
        self.problems: list[Problem] = []

    def document(self) -> dict[object, object]:
        self._skip()
        if self.at == len(self.text):
            raise self._error("the file is empty", hint="the least is a pair of braces: {}")
        if self.text[self.at] != "{":
            raise self._error("a configuration starts with an opening brace {")
        start = self.at
        values = self._section((), 0)
        self.spans[()] = (start, self.at)
        self._skip()
        if self.at < len(self.text):
            raise self._error("there is text after the closing brace of the configuration")
        return values

    def _value(self, path: KeyPath, depth: int) -> object:
        text, at = self.text, self.at
        if at == len(text):
            raise self._error(f"the file ends where the value of {dotted(path)} should stand")
        if depth > DEEPEST:
            raise self._error(f"nested deeper than {DEEPEST} levels")
        character = text[at]
        if character == "{":
            return self._section(path, depth + 1)
        if character == "[":
            return self._list(path, depth + 1)
        if character in "\"'":
            return self._string()
        match = _NUMBER.match(text, at)
        if match is not None:
            self.at = match.end()
            return self._number(match.group(), at)
        match = _BARE_KEY.match(text, at)
        if match is not None:
            word = match.group()
            if word in _WORDS:
                self.at = match.end()
                return _WORDS[word]
            if word in _PYTHON_WORDS:
                raise self._error(f"{word} is Python; JSON writes {_PYTHON_WORDS[word]}")
            raise self._error(f"text needs quotes: the value of {dotted(path)} starts with {word!r}")
        raise self._error(f"a value should stand here, for {dotted(path)}")

    def _section(self, path: KeyPath, depth: int) -> dict[object, object]:
        start = self.at
        self.at += 1
        values: dict[object, object] = {}
        while True:
            self._skip()
            if self._closes("}", start, path):
                return values
            line = self._line(self.at)
            key = self._key()
            here = (*path, key)
            self._skip()
            if self.text[self.at : self.at + 1] not in (":", "="):
                raise self._error(f"a colon should follow the key {key!r}")
            if self.text[self.at] == "=":
                raise self._error(f"write a colon, not an equals sign, after the key {key!r}")
            self.at += 1
            self._skip()
            if key in values:
                self._duplicate(here, line, depth)
            else:
                self.lines[here] = line
                start_of_value = self.at
                values[key] = self._value(here, depth)
                self.spans[here] = (start_of_value, self.at)
            self._separator("}", start, path)

    def _duplicate(self, path: KeyPath, line: int, depth: int) -> None:
        value = self._value((*path, "(again)"), depth)
        first = self.lines[path]
        self.problems.append(
            Problem(
                path=dotted(path),
                found=show(value),
                message=f"the key is there twice: first on line {first}, again on line {line}",
                hint="remove one of them",
                line=line,
            )
        )

    def _list(self, path: KeyPath, depth: int) -> list[object]:
        start = self.at
        self.at += 1
        values: list[object] = []
        while True:
            self._skip()
            if self._closes("]", start, path):
                return values
            here = (*path, len(values))
            self.lines[here] = self._line(self.at)
            values.append(self._value(here, depth))
            self._separator("]", start, path)

    def _closes(self, bracket: str, start: int, path: KeyPath) -> bool:
        if self.at == len(self.text):
            what = dotted(path) or "the configuration"
            raise self._error(
                f"the file ends inside {what}, which opens on line {self._line(start)} and is never closed"
            )
        if self.text[self.at] == bracket:
            self.at += 1
            return True
        return False

    def _separator(self, bracket: str, start: int, path: KeyPath) -> None:
        before = self.at
        self._skip()
        if self.text[self.at : self.at + 1] == ",":
            self.at += 1
            return
        if self.at == len(self.text) or self.text[self.at] == bracket or "\n" in self.text[before : self.at]:
            return
        what = dotted(path) or "the configuration"
        raise self._error(f"a comma or {bracket} should stand here, in {what} (opens on line {self._line(start)})")

    def _key(self) -> str:
        if self.text[self.at] in "\"'":
            return self._string()
        match = _BARE_KEY.match(self.text, self.at)
        if match is None:
            raise self._error(f"a key in quotes should stand here, not {self.text[self.at]!r}")
        self.at = match.end()
        return match.group()

    def _string(self) -> str:
        start = self.at
        single = self.text[start] == "'"
        match = (_SINGLE if single else _DOUBLE).match(self.text, start)
        if match is None:
            raise self._error("this text has no closing quote on its line")
        literal = match.group()
        if single:
            body = re.sub(r"\\.|\"", lambda m: {"\\'": "'", '"': '\\"'}.get(m.group(), m.group()), literal[1:-1])
            literal = f'"{body}"'
        try:
            value = json.loads(literal, strict=False)
        except json.JSONDecodeError as error:
            raise self._error(
                f"a backslash in text is followed by something that is no escape ({error.msg.lower()})",
                hint="write a backslash twice: \\\\",
            ) from error
        self.at = match.end()
        assert isinstance(value, str)
        return value

    def _number(self, literal: str, start: int) -> int | float:
        plain = literal.lstrip("+")
        try:
            return int(plain) if plain.lstrip("-").isdigit() else float(plain.replace("Infinity", "inf"))
        except ValueError as error:  # more digits than Python converts
            self.at = start
            raise self._error("this number has too many digits") from error

    def _skip(self) -> None:
        """Move over white space and comments."""
        text = self.text
        while True:
            match = _SPACE.match(text, self.at)
            if match is not None:
                self.at = match.end()
            if text.startswith(("#", "//"), self.at):
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            elif text.startswith("/*", self.at):
                end = text.find("*/", self.at + 2)
                if end < 0:
                    raise self._error("this comment is never closed with */")
                self.at = end + 2
            elif match is None:
                return

    def _line(self, at: int) -> int:
        return bisect_right(self.starts, at)

    def _error(self, message: str, *, hint: str = "") -> ConfigError:
        line = self._line(self.at)
        start = self.text.rfind("\n", 0, self.at) + 1
        column = self.at - start + 1
        content = self.text[start:].split("\n", 1)[0].rstrip()
        where = f"syntax error in column {column}: {message}"
        if content.strip():
            where += f"\n        {content}\n        {' ' * (column - 1)}^"
        return ConfigError([Problem(path="", found="", message=where, hint=hint, line=line)], self.source)

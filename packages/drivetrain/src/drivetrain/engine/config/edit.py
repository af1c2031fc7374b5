"""Put a section into the text of a configuration and leave the rest as the person wrote it.

The problem: a program that has found out good settings should be able to store them, but reading a file and writing it
back would lose comments, spellings of numbers and the layout. The idea: the reader knows where in the text each value
stands, so that only the one section is replaced, or put after the last key. Invariant: what is read from the new text
is what was read from the old, but for the keys that were given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from drivetrain.engine.config.problems import ConfigError
from drivetrain.engine.config.reader import parse

_FIRST_INDENT = re.compile(r"\{[^\n{}]*\n(?:[ \t]*(?:(?:#|//)[^\n]*)?\n)*([ \t]+)")


def with_section(text: str, name: str, values: Mapping[str, object], *, source: str | None = None) -> str:
    """`text` with `values` in its section `name`, over what is there; other keys of the section stay.

    Raises:
        ConfigError: the text is not a configuration that can be read, or has a key twice.
    """
    document = parse(text, source=source)
    if document.problems:
        raise ConfigError(document.problems, source)
    there = document.values.get(name)
    section: dict[Any, object] = {**(there if isinstance(there, Mapping) else {}), **values}
    indent = _FIRST_INDENT.match(text, document.spans[()][0])
    body = json.dumps(section, indent=indent.group(1) if indent else None)
    if indent:
        body = body.replace("\n", "\n" + indent.group(1))
    if (name,) in document.spans:
        start, end = document.spans[name,]
        edited = text[:start] + body + text[end:]
    else:
        before = "\n" + indent.group(1) if indent else " " if document.values else ""
        entry = f"{before}{json.dumps(name)}: {body}"
        ends = [end for path, (_, end) in document.spans.items() if len(path) == 1]
        at = max(ends, default=document.spans[()][0] + 1)
        edited = text[:at] + ("," if ends else "") + entry + text[at:]
    assert repr(parse(edited).values) == repr({**document.values, name: section})  # as text: NaN is not itself
    return edited

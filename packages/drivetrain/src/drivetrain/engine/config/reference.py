"""The schema for machines and for people: JSON Schema for editors, and the reference page of the documentation.

Both are rendered from the `Key` records, so that they say what the loader does. JSON Schema (draft 2020-12) can't say
everything that the loader checks: rules between keys, and whether a planned key asks for its feature. `x-status` and
`x-differs` carry what has no keyword.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from drivetrain.engine.config.schema.keys import (
    PLANNED,
    WORKS,
    Auto,
    Section,
    Status,
    child_of,
    default_of,
    key_of,
    written_name,
)
from drivetrain.engine.config.schema.optimizer import NATIVE_OPTIMIZERS, Optimizer
from drivetrain.engine.config.schema.scheduler import NATIVE_SCHEDULERS, Scheduler
from drivetrain.engine.config.schema.top import Config
from drivetrain.engine.config.schema.tree import Entry, choices, effective, takes_auto, walk, walk_arguments
from drivetrain.engine.config.schema.zero import ZeroOptimization

DIALECT = "https://json-schema.org/draft/2020-12/schema"
Schema = dict[str, Any]

# ---------------------------------------------------------------------------------------------------------- JSON Schema


def json_schema() -> Schema:
    """The configuration as JSON Schema, draft 2020-12."""
    definitions: dict[str, Schema] = {}
    root = _object(Config, WORKS, definitions)
    root["properties"]["$schema"] = {
        "type": "string",
        "description": key_of(Config.model_fields["json_schema_reference"]).meaning,
    }
    return {
        "$schema": DIALECT,
        "title": "Drivetrain configuration",
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def _object(section: type[Section], around: Status, definitions: dict[str, Schema]) -> Schema:
    """A section as a schema. Sections inside it are added to `definitions`."""
    plain = section.model_json_schema(by_alias=True)["properties"]
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for name, info in section.model_fields.items():
        key, written = key_of(info), written_name(name, info)
        status = effective(key.status, around)
        schema = _described(_content(info, plain[written], status, definitions), info, status)
        if section is Config and name == "zero_optimization":
            schema["anyOf"].append(
                {"type": "boolean", "deprecated": True, "description": "true is stage 1, false stage 0"}
            )
        properties[written] = schema
        for alias in key.aliases:
            properties[alias] = {**schema, "description": f"Another name of `{written}`. {schema['description']}"}
        if info.is_required() and not key.aliases:
            required.append(written)
    for old, renamed in section.renamed.items():
        properties[old] = {"deprecated": True, "description": f"Deprecated; {renamed.note}."}
    result: Schema = {"type": "object", "description": _first_line(section), "properties": properties}
    if section.model_config.get("extra") != "allow":
        result["additionalProperties"] = False
    if required:
        result["required"] = required
    if section is Optimizer:
        entries = NATIVE_OPTIMIZERS.values()
        result["allOf"] = [_by_type(entry.name, entry.params, entry.status, definitions) for entry in entries]
    if section is Scheduler:
        result["allOf"] = [_by_type(e.name, e.params, WORKS, definitions) for e in NATIVE_SCHEDULERS.values()]
    return result


def _content(info: FieldInfo, plain: Schema, status: Status, definitions: dict[str, Schema]) -> Schema:
    """What stands at a key, as a schema with `anyOf`."""
    child = child_of(info.annotation)
    if child is None:
        bare = {name: part for name, part in plain.items() if name not in ("title", "default", "description")}
        parts = [_without_titles(part) for part in bare.pop("anyOf", [bare])]
        if not takes_auto(info) and plain.get("type") != "string" and parts != [{}]:
            parts.append({"const": "auto"})
        return {"anyOf": parts}
    reference = _reference(child.section, status, definitions)
    if child.shape == "list":
        return {"anyOf": [{"type": "array", "items": reference}]}
    if child.shape == "named":
        return {"anyOf": [{"type": "object", "additionalProperties": reference}]}
    return {"anyOf": [reference, {"type": "null"}]}


def _described(schema: Schema, info: FieldInfo, status: Status) -> Schema:
    key = key_of(info)
    schema["description"] = key.meaning
    schema["x-status"] = status.value
    if key.differs:
        schema["x-differs"] = key.differs
    default = default_of(info)
    if not info.is_required() and not isinstance(default, Section):
        schema["default"] = list(default) if isinstance(default, tuple) else default
    return schema


def _reference(section: type[Section], status: Status, definitions: dict[str, Schema]) -> Schema:
    if section.__name__ not in definitions:
        definitions[section.__name__] = {}  # taken, while the section is made
        definitions[section.__name__] = _object(section, status, definitions)
    return {"$ref": f"#/$defs/{section.__name__}"}


def _by_type(name: str, params: type[Section], status: Status, definitions: dict[str, Schema]) -> Schema:
    """Which arguments go with one type, in any case."""
    pattern = "".join(f"[{letter.upper()}{letter.lower()}]" if letter.isalpha() else letter for letter in name)
    reference = _reference(params, status, definitions)
    return {
        "if": {"properties": {"type": {"type": "string", "pattern": f"^{pattern}$"}}, "required": ["type"]},
        "then": {"properties": {"params": {"anyOf": [reference, {"type": "null"}]}}},
    }


def _without_titles(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        return {name: _without_titles(part) for name, part in schema.items() if name != "title"}
    return [_without_titles(part) for part in schema] if isinstance(schema, list) else schema


def _first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " ")


# ------------------------------------------------------------------------------------------------------------- Markdown

_INTRODUCTION = """\
# Configuration

One JSON file (or a dict, or URL-safe base64 text of a file) says how a model is trained. The keys are those of
DeepSpeed's configuration, so a file can serve both. Comments (`#`, `//`, `/* */`), a trailing comma and keys without
quotes are fine; a key that is there twice is not.

`drivetrain check FILE` validates a file and shows what it comes to. `drivetrain schema` prints JSON Schema: save it
and put `"$schema": "the/file.json"` at the top of a configuration, and an editor completes and checks keys.

Nothing is silently ignored. A name that no key has is an error at every level, with the nearest known name. Every key
has a status:

| status | meaning |
|---|---|
| works | It does what it says. |
| planned | Known, not in this version. At its default or in a section that is off, it passes; else an error says so. |
| no effect | Accepted, and changes nothing here. A notice says why. |

## The value `"auto"`

A value `"auto"` is resolved when the file is loaded. A hint wins: `load(file, hints={"optimizer.params.lr": 3e-4})`.
Without one, `"auto"` is

"""

_BATCH = """
## Batch sizes

`train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel ranks`

| given | found |
|---|---|
| all three | checked |
| train, micro | accumulation = train / (micro * ranks) |
| train, accumulation | micro = train / (accumulation * ranks) |
| micro, accumulation | train = micro * accumulation * ranks |
| train | accumulation = 1, micro = train / ranks |
| micro | accumulation = 1, train = micro * ranks |
| accumulation, or none | an error |

A division with a remainder is an error that names the numbers and the values that fit.
"""


def reference_markdown() -> str:
    """The reference of the configuration as a Markdown page: every key with type, default, status and meaning."""
    parts = [_INTRODUCTION, *_auto_rules(), _BATCH, "\n## Top level\n\n", *_table(_top(walk())), *_deprecated()]
    entries = list(walk())
    for entry in entries:
        child = child_of(entry.info.annotation)
        if child is None:
            continue
        inside = entry.path if child.shape == "one" else (*entry.path, "*")
        own = [e for e in entries if e.path[:-1] == inside]
        level = "##" if len(entry.path) == 1 else "###"
        parts.append(f"\n{level} `{'.'.join(inside)}`\n\n{_first_line(child.section)}\n\n")
        if entry.status is not WORKS:
            parts.append(f"Status: {entry.status.value}. {entry.key.differs}".rstrip() + "\n\n")
        parts.extend(_table(own))
        if child.section is Optimizer:
            for optimizer in NATIVE_OPTIMIZERS.values():
                parts.extend(_arguments(optimizer.name, optimizer.params, optimizer.status, "optimizer"))
        if child.section is Scheduler:
            for scheduler in NATIVE_SCHEDULERS.values():
                parts.extend(_arguments(scheduler.name, scheduler.params, WORKS, "scheduler"))
    return "".join(parts)


def _top(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if len(entry.path) == 1 and entry.key.listed]


def _arguments(name: str, params: type[Section], status: Status, section: str) -> Iterator[str]:
    yield f"\n### `{section}` of type {name}\n\n{_first_line(params)}\n\n"
    if status is not WORKS:
        yield f"Status: {status.value}.\n\n"
    yield from _table(list(walk(params, (), status)))


def _table(entries: list[Entry]) -> Iterator[str]:
    if not entries:
        return
    yield "| key | type | default | status | meaning |\n|---|---|---|---|---|\n"
    for entry in entries:
        names = ", ".join(f"`{name}`" for name in (entry.path[-1], *entry.key.aliases))
        meaning = entry.key.meaning
        if entry.key.differs:
            meaning += f" *Differs:* {entry.key.differs}"
        cells = (names, type_text(entry.info), _default_text(entry.info), entry.status.value, meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |\n"


def _auto_rules() -> Iterator[str]:
    yield "| key | becomes |\n|---|---|\n"
    seen = set()
    for entry in (*walk(), *walk_arguments()):
        key = entry.key
        if entry.dotted in seen or not key.auto_text or entry.status is PLANNED:
            continue
        seen.add(entry.dotted)
        text = f"an error, unless a hint gives {key.auto_text}" if key.auto is Auto.NEEDED else key.auto_text
        yield f"| `{entry.dotted}` | {text} |\n"
    yield "| any other argument of the optimizer | the optimizer's own default |\n"
    yield "| a required argument of a schedule from torch | an error, unless a hint gives it |\n"
    yield "| any other key | its default |\n"


def _deprecated() -> Iterator[str]:
    yield "\n## Deprecated spellings\n\nAccepted and converted, with one notice.\n\n| key | instead |\n|---|---|\n"
    yield "| `zero_optimization`: true or false | write a section with `stage` 1 or 0 |\n"
    for old, renamed in ZeroOptimization.renamed.items():
        yield f"| `zero_optimization.{old}` | {renamed.note} |\n"


def type_text(info: FieldInfo) -> str:
    """The type of a key in words: `integer ≥ 1 or null`."""
    child = child_of(info.annotation)
    if child is not None:
        text = {"one": "section", "list": "list of sections", "named": "sections by name"}[child.shape]
        return f"{text} or null" if child.nullable else text
    options = choices(info.annotation)
    schema = _plain(info)
    parts = schema.get("anyOf", [schema])
    if options:
        text = " / ".join(f"`{json.dumps(option)}`" for option in options)
        others = [part for part in parts if "enum" not in part and "const" not in part and part.get("type") != "string"]
        return " or ".join(
            [text, *(_part_text(part) for part in others if part.get("type") not in ("array", "boolean"))]
        )
    return " or ".join(dict.fromkeys(_part_text(part) for part in parts))


def _plain(info: FieldInfo) -> Schema:
    """The schema that pydantic makes of one field."""
    return TypeAdapter(info.rebuild_annotation()).json_schema()


def _part_text(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind == "array":
        items = part.get("items") or (part.get("prefixItems") or [{}])[0]
        size = f" of {part['maxItems']}" if "maxItems" in part else ""
        inner = _part_text(items) if items else "any"
        return f"list{size} of {inner}" if not size else f"list{size}: {inner}"
    text = {"object": "section", None: "any"}.get(kind, str(kind))
    for name, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")):
        if name in part:
            text += f" {sign} {part[name]:g}"
    return text


def _default_text(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    default = default_of(info)
    if isinstance(default, Section):
        return ""
    if default == sys.maxsize:
        return "no limit"
    if isinstance(default, int | float) and not isinstance(default, bool) and default >= 1e5:
        return f"`{default:,}`".replace(",", "_")
    text = json.dumps(default, default=list)
    return f"`{text}`" if len(text) < 60 else "three MoE blocks of transformers"

"""From a document as written to field names and values, with everything that depends on how it was written settled.

Here aliases and deprecated spellings become field names, `"auto"` becomes a value, and names that nobody knows are
reported. What comes out is checked by the models afterwards. Since problems are told in the words of the file,
`Trail` remembers for each field the key that the person wrote, the value found there and its line.

What `"auto"` becomes, in this order: the hint for the key, if there is one; what the key's record says (`Key.auto`):
its default, no value (another part finds it: the batch sizes from each other and the ranks, `warmup_max_lr` from the
optimizer), or a problem that says which value is needed. For an argument of an optimizer other than `lr`: the
optimizer's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic.fields import FieldInfo

from drivetrain.engine.config.problems import Notice, Problem, kind_of, show
from drivetrain.engine.config.reader import Document, KeyPath, dotted
from drivetrain.engine.config.schema.keys import (
    Auto,
    Section,
    child_of,
    default_of,
    key_of,
    names_of,
)
from drivetrain.engine.config.schema.optimizer import NATIVE_OPTIMIZERS, Optimizer
from drivetrain.engine.config.schema.scheduler import NATIVE_SCHEDULERS, Scheduler
from drivetrain.engine.config.schema.top import Config
from drivetrain.engine.config.schema.tree import locate, takes_auto
from drivetrain.engine.config.suggest import for_unknown, nearest

AUTO = "auto"


@dataclass
class Trail:
    """How each field was written, and what was said about it."""

    document: Document
    problems: list[Problem] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    failed: set[KeyPath] = field(default_factory=set)
    """Fields that have a problem of their own."""
    written: dict[KeyPath, KeyPath] = field(default_factory=dict)
    """Field path to the path of the key in the document."""
    found: dict[KeyPath, object] = field(default_factory=dict)
    """Field path to the value, after `"auto"`."""

    converted: dict[KeyPath, object] = field(default_factory=dict)
    """Fields that were written under a deprecated spelling, with the value before it was converted."""

    def source(self, path: KeyPath) -> KeyPath:
        """The field itself, or the one around it that a deprecated spelling was converted to."""
        return next((path[:n] for n in range(1, len(path)) if path[:n] in self.converted), path)

    def key(self, path: KeyPath) -> KeyPath:
        """The key in the document for a field path, also for fields that have no key of their own."""
        path = self.source(path)
        for length in range(len(path), 0, -1):
            if path[:length] in self.written:
                return self.written[path[:length]] + path[length:]
        return path

    def line(self, given: KeyPath) -> int | None:
        """Line of a key, or of the nearest thing around it that has one."""
        for length in range(len(given), 0, -1):
            if given[:length] in self.document.lines:
                return self.document.lines[given[:length]]
        return None

    def show(self, path: KeyPath) -> str:
        """The value at a field path as text, masked when secret; "" when there is none."""
        path = self.source(path)
        if path in self.converted:
            return show(self.converted[path])
        if path not in self.found:
            return ""
        info = locate(path)
        if info is not None and key_of(info).secret:
            return "(secret)"
        return show(self.found[path])

    def problem(self, path: KeyPath, message: str, hint: str = "", *, found: str | None = None) -> None:
        """Report a field, which from here on counts as failed."""
        given = self.key(path)
        text = self.show(path) if found is None else found
        self.problems.append(Problem(path=dotted(given), found=text, message=message, hint=hint, line=self.line(given)))
        self.failed.add(path)

    def spoiled(self, path: KeyPath) -> bool:
        """Whether the field, something around it or something inside it has failed."""
        return any(path[: len(other)] == other or other[: len(path)] == path for other in self.failed)


def normalise(trail: Trail, hints: Mapping[str, Any]) -> dict[str, object]:
    """The document's values by field name. Problems and notices go to the trail."""
    normaliser = _Normaliser(trail, _hints(trail, hints))
    return normaliser.section(_boolean_zero(trail), Config, (), ())


def _hints(trail: Trail, hints: Mapping[str, Any]) -> dict[KeyPath, object]:
    """Hints by field path. One for a key that does not exist is a problem, not a value that is never used."""
    known: dict[KeyPath, object] = {}
    for name, value in hints.items():
        path: list[str] = []
        section: type[Section] | None = Config
        for part in name.split("."):
            names = names_of(section) if section is not None else {}
            if section is not None and part not in names:
                near = nearest(part, names, 0.6)
                hint = f'did you mean "{".".join([*path, near])}"?' if near else "hints are named by key path"
                message = "a hint is given for a key that does not exist"
                trail.problems.append(Problem(path=name, found=show(value), message=message, hint=hint))
                break
            path.append(names.get(part, part))
            info = section.model_fields[path[-1]] if section is not None else None
            child = child_of(info.annotation) if info is not None else None
            section = child.section if child is not None and child.shape == "one" else None
        else:
            known[tuple(path)] = value
    return known


def _boolean_zero(trail: Trail) -> Mapping[object, object]:
    """The root with `"zero_optimization": true` written out."""
    values = dict(trail.document.values)
    if not isinstance(values.get("zero_optimization"), bool):
        return values
    stage = 1 if values["zero_optimization"] else 0
    section: dict[str, object] = {"stage": stage}
    if "allgather_size" in values:
        section["allgather_bucket_size"] = values.pop("allgather_size")
        trail.written["zero_optimization", "allgather_bucket_size"] = ("allgather_size",)
    values["zero_optimization"] = section
    message = f'true or false in place of the section is deprecated; write {{"stage": {stage}}}'
    line = trail.line(("zero_optimization",))
    trail.notices.append(Notice(kind="deprecated", path="zero_optimization", message=message, line=line))
    return values


class _Normaliser:
    def __init__(self, trail: Trail, hints: Mapping[KeyPath, object]) -> None:
        self.trail = trail
        self.hints = hints

    def section(
        self, values: Mapping[object, object], section: type[Section], given: KeyPath, path: KeyPath
    ) -> dict[str, object]:
        """The values of a section by field name. `given` is its path as written, `path` in field names."""
        names = names_of(section)
        out: dict[str, object] = {}
        spelled: dict[str, str] = {}
        for written, value in values.items():
            if not isinstance(written, str):
                self._report((*given, str(written)), value, f"a key is text, not {kind_of(written)}")
                continue
            here = (*given, written)
            name = names.get(written)
            if written in section.renamed:
                renamed = section.renamed[written]
                self._notice("deprecated", here, f"deprecated; {renamed.note}")
                if not renamed.to:
                    continue
                name = renamed.to
                original, value = value, value if value == AUTO else renamed.convert(value)
                self.trail.converted[(*path, name)] = original
            elif name is None and section.model_config.get("extra") == "allow":
                out[written] = value
                continue
            elif name is None:
                self._report(here, value, "unknown key", for_unknown(written, section, given))
                continue
            if name in spelled:
                message = f'"{spelled[name]}" and "{written}" say the same thing'
                self._report(here, value, message, "keep one of them")
                continue
            spelled[name] = written
            self.trail.written.setdefault((*path, name), here)
            self.trail.found[(*path, name)] = value
            keep, value = self._value(section.model_fields[name], value, here, (*path, name))
            if keep:
                out[name] = value
        if section in (Optimizer, Scheduler):
            self._arguments(out, section, (*given, spelled.get("params", "params")), (*path, "params"))
        return out

    def _value(self, info: FieldInfo, value: object, given: KeyPath, path: KeyPath) -> tuple[bool, object]:
        """Whether the key stays, and its value."""
        if value == AUTO and not takes_auto(info):
            keep, value = self._auto(info, path)
            if not keep:
                return False, None
        child = child_of(info.annotation)
        if child is None or (value is None and child.nullable):
            return True, value
        if child.shape == "one":
            if value is None:  # null in place of a section says nothing
                return False, None
            if not isinstance(value, Mapping):
                self.trail.problem(
                    path,
                    f"expected a section {{...}}, found {kind_of(value)}",
                    self._braces(child.section, given, value),
                )
                return False, None
            return True, self.section(value, child.section, given, path)
        if child.shape == "named" and isinstance(value, Mapping):
            return True, {key: self._element(part, child.section, given, path, key) for key, part in value.items()}
        if child.shape == "list" and isinstance(value, list | tuple):
            return True, [self._element(part, child.section, given, path, at) for at, part in enumerate(value)]
        return True, value

    def _element(self, value: object, section: type[Section], given: KeyPath, path: KeyPath, name: Any) -> object:
        if isinstance(value, Mapping):
            return self.section(value, section, (*given, name), (*path, name))
        return value

    def _braces(self, section: type[Section], given: KeyPath, value: object) -> str:
        if section.shorthand and not isinstance(value, list | tuple):
            return f'write "{given[-1]}": {{"{section.shorthand}": {show(value)}}}'
        return ""

    def _auto(self, info: FieldInfo, path: KeyPath) -> tuple[bool, object]:
        """Whether the key stays, and its value in place of "auto"."""
        key, given = key_of(info), self.trail.key(path)
        if path in self.hints:
            value = self.hints[path]
            self.trail.found[path] = value
            self._notice("auto", given, f'"auto" is {show(value)}, from a hint')
            return True, value
        if key.auto is Auto.NEEDED:
            self._needed(path, key.auto_text)
            return False, None
        if key.auto is Auto.NULL:
            self._notice("auto", given, f'"auto" is {key.auto_text}')
            return True, None
        default = default_of(info)
        text = key.auto_text or ("the default" if isinstance(default, Section) else show(default))
        self._notice("auto", given, f'"auto" is {text}')
        return False, None

    def _needed(self, path: KeyPath, what: str) -> None:
        name = dotted(path)
        self.trail.problem(
            path,
            f'"auto" can\'t be resolved here: nothing in the file says {what}',
            f'write the value in place of "auto", or give it to the loader: hints={{"{name}": ...}}',
        )

    def _arguments(self, out: dict[str, object], section: type[Section], given: KeyPath, path: KeyPath) -> None:
        """Normalise the arguments of an optimizer or a schedule, whose names depend on the type."""
        values = out.get("params")
        if values is None:
            out.pop("params", None)
            return
        if not isinstance(values, Mapping):
            return
        kind = out.get("type")
        described = (
            (NATIVE_OPTIMIZERS.get(kind.lower()) if section is Optimizer else NATIVE_SCHEDULERS.get(kind.lower()))
            if isinstance(kind, str)
            else None
        )
        if described is not None:
            out["params"] = self.section(values, described.params, given, path)
            return
        arguments: dict[str, object] = {}
        for name, value in values.items():
            if not isinstance(name, str):
                self._report((*given, str(name)), value, f"a key is text, not {kind_of(name)}")
                continue
            here = (*path, name)
            self.trail.written[here] = (*given, name)
            self.trail.found[here] = value
            if value != AUTO:
                arguments[name] = value
            elif here in self.hints:
                arguments[name] = self.trail.found[here] = self.hints[here]
                self._notice("auto", (*given, name), f'"auto" is {show(self.hints[here])}, from a hint')
            elif section is Optimizer and name != "lr":
                self._notice("auto", (*given, name), '"auto" is the optimizer\'s own default')
            else:
                self._needed(here, "the learning rate" if name == "lr" else f"the schedule's {name}")
        out["params"] = arguments

    def _report(self, given: KeyPath, value: object, message: str, hint: str = "") -> None:
        trail = self.trail
        found = show(value)
        trail.problems.append(
            Problem(path=dotted(given), found=found, message=message, hint=hint, line=trail.line(given))
        )

    def _notice(self, kind: Any, given: KeyPath, message: str) -> None:
        line = self.trail.line(given)
        self.trail.notices.append(Notice(kind=kind, path=dotted(given), message=message, line=line))

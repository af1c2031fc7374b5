"""Walk the tree of known keys, and the values of one configuration along it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from drivetrain.engine.config.schema.keys import (
    NO_EFFECT,
    PLANNED,
    WORKS,
    Key,
    Section,
    Status,
    child_of,
    default_of,
    key_of,
    written_name,
)
from drivetrain.engine.config.schema.optimizer import NATIVE_OPTIMIZERS
from drivetrain.engine.config.schema.scheduler import NATIVE_SCHEDULERS
from drivetrain.engine.config.schema.top import Config

ANY_NAME = "*"
"""Stands in a path for a name that the person chooses, or for any element of a list."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One known key."""

    path: tuple[str, ...]
    """Names from the root; `*` for a free name or a list element."""
    info: FieldInfo
    key: Key
    status: Status
    """The key's own status, or that of the section around it where that says more."""

    @property
    def dotted(self) -> str:
        return ".".join(self.path)


def effective(own: Status, around: Status) -> Status:
    """A section without effect has no key with one, and a planned section none that works."""
    if NO_EFFECT in (own, around):
        return NO_EFFECT
    return PLANNED if PLANNED in (own, around) else WORKS


def walk(section: type[Section] = Config, path: tuple[str, ...] = (), around: Status = WORKS) -> Iterator[Entry]:
    """Every key of the section and of those inside it, each section before its keys.

    Parameters of optimizers and schedules are not here, since they depend on the type; see `walk_arguments`.
    """
    for name, info in section.model_fields.items():
        key = key_of(info)
        status = effective(key.status, around)
        here = (*path, written_name(name, info))
        yield Entry(path=here, info=info, key=key, status=status)
        child = child_of(info.annotation)
        if child is not None:
            inside = here if child.shape == "one" else (*here, ANY_NAME)
            yield from walk(child.section, inside, status)


def walk_arguments() -> Iterator[Entry]:
    """Every parameter of the optimizers and schedules that are described here."""
    for optimizer in NATIVE_OPTIMIZERS.values():
        yield from walk(optimizer.params, ("optimizer", "params"), optimizer.status)
    for scheduler in NATIVE_SCHEDULERS.values():
        yield from walk(scheduler.params, ("scheduler", "params"))


def locate(path: tuple[str | int, ...], section: type[Section] = Config) -> FieldInfo | None:
    """The field at a path of field names (indices and free names included), or None."""
    info: FieldInfo | None = None
    current: type[Section] | None = section
    rest = list(path)
    while rest:
        name = rest.pop(0)
        if current is None or not isinstance(name, str):
            return info
        info = current.model_fields.get(name)
        if info is None:
            return None
        child = child_of(info.annotation)
        current = child.section if child is not None else None
        if child is not None and child.shape != "one" and rest:
            rest.pop(0)
    return info


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A key of one configuration whose value asks for something: see `requests` and `ineffective`."""

    path: tuple[str, ...]
    """Field names from the root."""
    key: Key
    """The key, or the section, whose record says what is asked for."""
    section: tuple[str, ...] | None
    """Path of that section when the key is inside a planned one."""


def requests(config: Section, path: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Keys whose values ask for what is planned."""
    for name, key, value, given in _values(config):
        here = (*path, name)
        if isinstance(value, Section) and key.status is PLANNED:
            for asked in value.asking() if given else ():
                inner = tuple(asked.split(".")) if asked else ()
                yield Finding(path=here + inner, key=key, section=here)
        elif isinstance(value, Section) and key.status is WORKS:
            yield from requests(value, here)
        elif key.status is PLANNED and given and not _inert(type(config).model_fields[name], value):
            yield Finding(path=here, key=key, section=None)


def ineffective(config: Section, path: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Keys with a value other than the default that changes nothing."""
    for name, key, value, given in _values(config):
        here = (*path, name)
        if key.status is NO_EFFECT:
            changed = (
                any(value.changed())
                if isinstance(value, Section)
                else not _inert(type(config).model_fields[name], value)
            )
            if given and changed:
                yield Finding(path=here, key=key, section=None)
        elif isinstance(value, Section):
            yield from ineffective(value, here)


def _values(config: Section) -> Iterator[tuple[str, Key, Any, bool]]:
    for name, info in type(config).model_fields.items():
        yield name, key_of(info), getattr(config, name), name in config.model_fields_set


def _inert(info: FieldInfo, value: object) -> bool:
    return value == default_of(info) or value in key_of(info).inert


def choices(annotation: object) -> tuple[Any, ...]:
    """The values that a field of this annotation is limited to; () when it is not."""
    origin = get_origin(annotation)
    if origin is Literal:
        return get_args(annotation)
    if origin is Annotated:
        return choices(get_args(annotation)[0])
    if origin in (Union, types.UnionType, tuple):
        return tuple(choice for part in get_args(annotation) for choice in choices(part))
    return ()


def takes_auto(info: FieldInfo) -> bool:
    """Whether "auto" is one of the field's own values."""
    return "auto" in choices(info.annotation)

"""Load a configuration: the one door through which a file becomes a `Config`.

The steps, each of which adds to one list of problems:

    read       text to values and lines; duplicates                        reader.py
    normalise  aliases, deprecated spellings, "auto"; unknown names        normalise.py
    check      types and ranges by the models; arguments of optimizers     here
    refuse     what asks for features that this version lacks              here, by the keys' status
    rules      what keys demand of each other                              rules.py

Invariants: nothing is silently ignored (a key works, is refused, or is mentioned in a notice); all problems are told
together; a key with a problem takes its default for the later steps, and rules that read it stay out, so that one
mistake is told once.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from drivetrain.engine.config.normalise import Trail, normalise
from drivetrain.engine.config.problems import ConfigError, Notice, Problem, kind_of, show
from drivetrain.engine.config.reader import KeyPath, dotted, read
from drivetrain.engine.config.rules import RULES, advice
from drivetrain.engine.config.schema.keys import PLANNED, Section, default_of, key_of
from drivetrain.engine.config.schema.optimizer import NATIVE_OPTIMIZERS
from drivetrain.engine.config.schema.scheduler import NATIVE_SCHEDULERS
from drivetrain.engine.config.schema.top import Config
from drivetrain.engine.config.schema.tree import Finding, choices, ineffective, locate, requests
from drivetrain.engine.config.suggest import NEAR, nearest

if TYPE_CHECKING:
    from drivetrain.engine.config.classes import Complaint

_LOG = logging.getLogger("drivetrain.config")
_SectionT = TypeVar("_SectionT", bound=Section)


@dataclass(frozen=True, kw_only=True)
class Examination:
    """All that there is to say about a configuration."""

    config: Config
    """What the configuration says. With problems, the keys concerned are at their defaults."""
    problems: tuple[Problem, ...]
    notices: tuple[Notice, ...]
    source: str | None
    """Path of the file; None for a mapping or base64."""
    lines: Mapping[str, int]
    """Line of each key in the text, by dotted key; empty for a mapping."""


def load(source: Mapping[str, Any] | str | os.PathLike[str], *, hints: Mapping[str, Any] | None = None) -> Config:
    """Load a configuration, or say everything that is wrong with it.

    Notices are kept on the configuration (`Config.notices`) and logged, on rank 0 only.

    Args:
        source: a mapping, the path of a JSON file (comments and trailing commas are fine), or URL-safe base64 text of
        one. hints: values for keys that are `"auto"`, by key path: `{"optimizer.params.lr": 3e-4}`. A hint for a key
        that has a
            value of its own is not used.

    Raises:
        ConfigError: the configuration can't be used. It has every problem, with path, line and what to do.
    """
    examination = examine(source, hints=hints)
    if examination.problems:
        raise ConfigError(examination.problems, examination.source)
    if os.environ.get("RANK", "0") == "0":
        for notice in examination.notices:
            _LOG.log(logging.WARNING if notice.kind in ("deprecated", "advice") else logging.INFO, "%s", notice)
    return examination.config


def examine(
    source: Mapping[str, Any] | str | os.PathLike[str], *, hints: Mapping[str, Any] | None = None
) -> Examination:
    """Load a configuration and return what is wrong with it instead of raising.

    Raises:
        ConfigError: there is nothing to examine: no such file, or a syntax error.
    """
    document = read(source)
    trail = Trail(document=document, problems=list(document.problems))
    data = normalise(trail, hints or {})
    _check_arguments(trail, data)
    config = _validated(Config, data, (), trail) or Config()
    _refuse(trail, config)
    _apply_rules(trail, config)
    config._notices = tuple(sorted(trail.notices, key=lambda notice: notice.line or 0))
    problems = sorted(trail.problems, key=lambda problem: problem.line or 0)
    return Examination(
        config=config,
        problems=tuple(problems),
        notices=config.notices,
        source=document.source,
        lines={dotted(path): line for path, line in document.lines.items()},
    )


# ----------------------------------------------------------------------------------------------------- types and ranges


def _validated(section: type[_SectionT], data: dict[str, Any], path: KeyPath, trail: Trail) -> _SectionT | None:
    """The model of `data`, without the keys that don't fit; those are reported and taken out of `data`.

    None when a key that the section can't be without is among them.
    """
    while True:
        try:
            return section.model_validate(data)
        except ValidationError as error:
            details = error.errors(include_url=False)
            holders = [_report_detail(detail, data, section, path, trail) for detail in details]
            if not any(holders):
                return None
            for holder, name in filter(None, holders):
                holder.pop(name, None)  # gone already when two errors are inside one value


def _report_detail(
    detail: ErrorDetails, data: dict[str, Any], section: type[Section], prefix: KeyPath, trail: Trail
) -> tuple[dict[Any, Any], str | int] | None:
    """Report one error of a model. Returns where the value can be taken out of the data, if it is there."""
    location = detail["loc"]
    container: Any = data
    holder: tuple[dict[Any, Any], str | int] | None = None
    depth = 0
    for part in location:
        if isinstance(container, dict) and part in container:
            holder = (container, part)
        elif not (isinstance(container, list | tuple) and isinstance(part, int) and part < len(container)):
            break
        container = container[part]
        depth += 1
    absent = detail["type"] == "missing" and not isinstance(location[-1], int)
    here = location if absent else location[:depth]
    path = (*prefix, *here)
    if not trail.spoiled(path):
        message, hint = _explained(detail, locate(here, section))
        trail.problem(path, message, hint, found="" if absent else trail.show(path) or show(container))
    return holder


def _explained(detail: ErrorDetails, info: FieldInfo | None) -> tuple[str, str]:
    """An error of a model as a message and a hint."""
    context = detail.get("ctx", {})
    kind = detail["type"]
    if kind == "expected":
        hint = str(context["hint"])
        if detail["input"] is None and info is not None and not info.is_required():
            hint = f"leave the key out for the default, {show(default_of(info))}"
        return str(context["expected"]), hint
    if kind == "missing" and isinstance(detail["loc"][-1], int):
        return f"expected a list of {detail['loc'][-1] + 1} values or more", ""
    if kind == "missing":
        name = detail["loc"][-1]
        return "the key is required here, and not given", f'add "{name}": {_meaning(info)}'
    if kind == "too_long":
        return f"expected a list of {context['max_length']} values", ""
    bounds = {
        "greater_than": ("gt", "must be above"),
        "greater_than_equal": ("ge", "must be at least"),
        "less_than": ("lt", "must be below"),
        "less_than_equal": ("le", "must be at most"),
    }
    if kind in bounds:
        name, words = bounds[kind]
        return f"{words} {context[name]:g}", ""
    options = choices(info.annotation) if info is not None else ()
    if kind == "literal_error" and options:
        value = detail["input"]
        near = nearest(value, [o for o in options if isinstance(o, str)], NEAR) if isinstance(value, str) else None
        return f"expected one of {', '.join(show(o) for o in options)}", f'did you mean "{near}"?' if near else ""
    if kind in ("tuple_type", "list_type"):
        return f"expected a list [...], found {kind_of(detail['input'])}", ""
    if kind == "dict_type":
        return f"expected a section {{...}}, found {kind_of(detail['input'])}", ""
    if kind == "none_required":
        return "only null can stand here", ""
    return re.sub(r"^Input should be", "expected", detail["msg"]), ""


def _meaning(info: FieldInfo | None) -> str:
    return key_of(info).meaning.rstrip(".") if info is not None else "..."


# ------------------------------------------------------------------------------------- arguments of optimizer, schedule


def _check_arguments(trail: Trail, data: dict[str, Any]) -> None:
    """Check `optimizer` and `scheduler` by their type, and leave only arguments that fit."""
    for section in ("optimizer", "scheduler"):
        values = data.get(section)
        if not isinstance(values, dict):
            continue
        kind, arguments = values.get("type"), values.get("params", {})
        if not isinstance(kind, str) or not isinstance(arguments, dict):
            continue
        optimizer = NATIVE_OPTIMIZERS.get(kind.lower()) if section == "optimizer" else None
        described = optimizer if section == "optimizer" else NATIVE_SCHEDULERS.get(kind.lower())
        if optimizer is not None and optimizer.status is PLANNED:
            trail.problem(("optimizer", "type"), _lacking(optimizer.feature), optimizer.instead)
        if described is not None:
            values["type"] = described.name
            model = _validated(described.params, arguments, (section, "params"), trail)
            if model is None:
                data.pop(section)
                continue
            for finding in requests(model, (section, "params")):
                _refuse_one(trail, finding)
            for finding in ineffective(model, (section, "params")):
                _mention(trail, finding)
            values["params"] = model.model_dump(exclude_unset=True)
        else:
            _check_torch(trail, section, kind, values)


def _check_torch(trail: Trail, section: str, kind: str, values: dict[str, Any]) -> None:
    """Check a type that is not described here against torch."""
    # torch takes seconds to import, and most configurations name nothing of it.
    classes = import_module("drivetrain.engine.config.classes")
    given = values.get("params", {})
    arguments = {name: value for name, value in given.items() if not trail.spoiled((section, "params", name))}
    names: list[str]
    if section == "optimizer":
        check, home = classes.check_optimizer, "torch.optim"
        unfit = classes.UNFIT_OPTIMIZERS
        names = [entry.name for entry in NATIVE_OPTIMIZERS.values() if entry.status is not PLANNED]
        names += classes.optimizer_names()
    else:
        check, home = classes.check_scheduler, "torch.optim.lr_scheduler"
        unfit = classes.UNFIT_SCHEDULERS
        names = [entry.name for entry in NATIVE_SCHEDULERS.values()]
        names += classes.scheduler_names()
    complaints: list[Complaint]
    try:
        complaints = check(kind, arguments)
    except KeyError:
        near = nearest(kind, names, NEAR)
        hint = f'did you mean "{near}"?' if near else "use one of " + ", ".join(sorted(set(names)))
        trail.problem((section, "type"), f"there is no {section} of this name, here or in {home}", hint)
        return
    for complaint in complaints:
        path: KeyPath = (section, "params", complaint.argument) if complaint.argument else (section, "params")
        if kind in unfit:
            path = (section, "type")
        if complaint.missing and trail.spoiled(path):
            continue  # "auto" that could not be resolved has been reported
        trail.problem(path, complaint.message, complaint.hint)


# ----------------------------------------------------------------------------------------------------- status and rules


def _lacking(feature: str) -> str:
    return f"this version of Drivetrain does not support {feature} yet"


def _refuse(trail: Trail, config: Config) -> None:
    for finding in requests(config):
        _refuse_one(trail, finding)
    for finding in ineffective(config):
        _mention(trail, finding)


def _mention(trail: Trail, finding: Finding) -> None:
    given = trail.key(finding.path)
    message = "has no effect: " + finding.key.differs
    trail.notices.append(Notice(kind="no effect", path=dotted(given), message=message, line=trail.line(given)))


def _refuse_one(trail: Trail, finding: Finding) -> None:
    if trail.spoiled(finding.path):
        return
    key = finding.key
    source = trail.source(finding.path)
    if finding.section is None:
        way = key.instead or "remove the key"
    elif source in trail.converted:
        way = f'remove "{trail.written[source][-1]}"' + (f"; meanwhile, {key.instead}" if key.instead else "")
    else:
        way = f'remove "{finding.section[-1]}"'
        if finding.path[-1] in _OFF:
            way += f', or set "{finding.path[-1]}" to {_OFF[finding.path[-1]]}'
        way += f"; meanwhile, {key.instead}" if key.instead else ""
    trail.problem(finding.path, _lacking(key.feature or key.meaning.rstrip(".")), way)


_OFF: Mapping[str, str] = MappingProxyType({"enabled": "false", "device": '"none"'})
"""How a planned section is switched off, by the key that switches it."""


def _apply_rules(trail: Trail, config: Config) -> None:
    for rule in RULES:
        if any(trail.spoiled(tuple(name.split("."))) for name in rule.reads):
            continue
        for conflict in rule.check(config):
            trail.problem(tuple(conflict.path.split(".")), conflict.message, conflict.hint)
    if trail.problems:
        return
    for path, sentence in advice(config):
        given = trail.key(tuple(path.split(".")))
        trail.notices.append(Notice(kind="advice", path=dotted(given), message=sentence, line=trail.line(given)))

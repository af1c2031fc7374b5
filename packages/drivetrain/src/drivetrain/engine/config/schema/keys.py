"""What a key of the configuration is: its record (`Key`), its section (`Section`) and the value types.

The problem: the same facts about a key are wanted in five places: validation, "did you mean", the refusal of what isn't
built yet, JSON Schema for editors, and the reference page. Kept in five places they drift apart.

The idea: a key is declared once, as a field of a `Section`, with a `Key` record in its annotation:

    stage: Annotated[Literal[0, 1, 2, 3], Key("What ZeRO partitions ...")] = 0

and everything else is derived from that line. A key's status says what this version does with it:

- works: it does what it says;
- planned: known, but not built in this version. It passes at its default, or inside a section that is switched off;
  a value that asks for the feature is a problem;
- no effect: accepted and changes nothing here. A value other than the default gets a notice that says why.

Invariants: every field of every section has a `Key`; no name means two keys of one section; all models are frozen and
refuse names they don't know.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from drivetrain.engine.config.problems import kind_of

# ---------------------------------------------------------------------------------------------------------- the record


class Status(str, Enum):
    """What this version does with a key."""

    WORKS = "works"
    PLANNED = "planned"
    NO_EFFECT = "no effect"


class Auto(str, Enum):
    """What `"auto"` means for a key when no hint gives a value."""

    DEFAULT = "the default"
    NULL = "null"
    """No value, even where the default is one: what uses the key finds it elsewhere (`Key.auto_text` says where)."""
    NEEDED = "needs a hint"


@dataclass(frozen=True)
class Key:
    """The facts about one key."""

    meaning: str
    """What it does, with units."""
    status: Status = Status.WORKS
    _: KW_ONLY
    aliases: tuple[str, ...] = ()
    """Other names of the same key."""
    differs: str = ""
    """How it differs from upstream; for "no effect" the reason why. Full sentences."""
    feature: str = ""
    """Planned: what a value other than the default asks for, as a noun phrase. "" takes the section's."""
    instead: str = ""
    """Planned: what to do meanwhile, as an imperative without its full stop."""
    inert: tuple[object, ...] = ()
    """Values besides the default that ask for nothing."""
    auto: Auto = Auto.DEFAULT
    auto_text: str = ""
    """What `"auto"` becomes, or which value is needed, in words."""
    secret: bool = False
    """Never shown: API keys."""
    listed: bool = True
    """On the reference page. False for `$schema`."""


WORKS, PLANNED, NO_EFFECT = Status.WORKS, Status.PLANNED, Status.NO_EFFECT


@dataclass(frozen=True, kw_only=True)
class Renamed:
    """A deprecated spelling: where its value goes, and how it is converted on the way."""

    to: str
    """Name of the key in the same section that takes its place; "" when nothing does."""
    convert: Callable[[object], object] = lambda value: value
    note: str
    """What to write instead, as a sentence without its full stop."""


class Section(BaseModel):
    """A section of the configuration: a frozen model that refuses names it doesn't know."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    renamed: ClassVar[Mapping[str, Renamed]] = {}
    """Deprecated spellings of keys of this section."""
    mistaken: ClassVar[Mapping[str, str]] = {}
    """Names that people write here and that no version reads, with a sentence about each."""
    shorthand: ClassVar[str] = ""
    """Name of the key that a bare value in place of the section is likely to mean: `"fp16": true` means `enabled`."""

    def asking(self) -> tuple[str, ...]:
        """For a planned section: dotted paths, from here, of the keys that ask for its feature.

        A section with `enabled` asks when that is true; any other asks with each key that is not at its default.
        """
        if "enabled" in type(self).model_fields:
            return ("enabled",) if dict(self).get("enabled") is True else ()
        return tuple(self.changed())

    def changed(self) -> Iterator[str]:
        """Dotted paths, from here, of the keys that were given a value other than the default."""
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in self.model_fields_set or value == default_of(info) or value in key_of(info).inert:
                continue
            if isinstance(value, Section):
                yield from (f"{name}.{inner}" for inner in value.changed())
            else:
                yield name


# ------------------------------------------------------------------------------------------------------ reading fields


def key_of(info: FieldInfo) -> Key:
    """The `Key` record of a field."""
    for entry in info.metadata:
        if isinstance(entry, Key):
            return entry
    raise TypeError(f"the field of type {info.annotation} has no Key record")


def default_of(info: FieldInfo) -> Any:
    return info.get_default(call_default_factory=True) if not info.is_required() else None


@dataclass(frozen=True, kw_only=True)
class Child:
    """What a field holds when it holds sections."""

    section: type[Section]
    shape: Literal["one", "list", "named"]
    """`one` section, a `list` of them, or a mapping from names that the person chooses (`named`)."""
    nullable: bool


def child_of(annotation: object) -> Child | None:
    """The sections that a field of this annotation holds, or None when it holds a plain value."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return child_of(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        for part in get_args(annotation):
            child = child_of(part)
            if child is not None:
                return Child(section=child.section, shape=child.shape, nullable=True)
        return None
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Child(section=annotation, shape="one", nullable=False)
    if origin is tuple:
        child = child_of(get_args(annotation)[0])
        return Child(section=child.section, shape="list", nullable=False) if child is not None else None
    if origin is dict:
        child = child_of(get_args(annotation)[1])
        return Child(section=child.section, shape="named", nullable=False) if child is not None else None
    return None


def names_of(section: type[Section]) -> dict[str, str]:
    """Every name by which a key of the section may be written, with the name of its field."""
    names: dict[str, str] = {}
    for name, info in section.model_fields.items():
        for spelling in (written_name(name, info), *key_of(info).aliases):
            names[spelling] = name
    return names


def written_name(name: str, info: FieldInfo) -> str:
    """The key's name in JSON, which differs from the field's only where Python can't spell it (`$schema`)."""
    return info.alias or name


# ----------------------------------------------------------------------------------------------------------- the types


def wrong(expected: str, hint: str = "") -> PydanticCustomError:
    """A validation error that says what was expected, and what to do."""
    return PydanticCustomError("expected", "{expected}", {"expected": expected, "hint": hint})


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    hint = ""
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        hint = f"write {value.strip().lower()} without quotes"
    elif value in (0, 1) and not isinstance(value, str):
        hint = f"write {'true' if value == 1 else 'false'}"
    raise wrong(f"expected true or false, found {kind_of(value)}", hint)


def _unquoted(value: object) -> str:
    """The hint for a number in quotes."""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return ""
        return f"write {value.strip()} without quotes"
    return ""


def whole(value: object) -> int:
    """The validator of whole numbers: 5e8 is one, true and "5" are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(f"expected a whole number, found {kind_of(value)}", _unquoted(value))
    if isinstance(value, int):
        return value
    if not math.isfinite(value):
        raise wrong("expected a finite whole number")
    if not value.is_integer():
        raise wrong(
            "expected a whole number, found one with a fraction", f"write {math.floor(value)} or {math.ceil(value)}"
        )
    return int(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(f"expected a number, found {kind_of(value)}", _unquoted(value))
    if not math.isfinite(value):
        raise wrong("expected a finite number")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise wrong(f"expected text in quotes, found {kind_of(value)}")
    return value


def in_any_case(*options: str) -> WithJsonSchema:
    """JSON Schema of choices that don't care about case: the spellings that people use."""
    return WithJsonSchema(
        {"enum": sorted({form for o in options for form in (o, o.lower(), o.upper(), o.capitalize())})}
    )


def lowered(value: object) -> object:
    """Text in lower case, anything else as it is: for choices that don't care about case."""
    return value.lower() if isinstance(value, str) else value


_DTYPES: Mapping[str, str] = types.MappingProxyType(
    {
        **dict.fromkeys(("fp16", "half", "float16"), "fp16"),
        **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
        **dict.fromkeys(("fp32", "float", "float32"), "fp32"),
    }
)


def _dtype(value: object) -> object:
    if isinstance(value, str):
        name = value.lower().removeprefix("torch.")
        if name in _DTYPES:
            return _DTYPES[name]
        if name == "none":
            raise wrong('"none" is not a dtype', "write null without quotes, or leave the key out")
    raise wrong('expected "fp16", "bf16" or "fp32"' + ("" if isinstance(value, str) else f", found {kind_of(value)}"))


Flag = Annotated[bool, BeforeValidator(_flag)]
Integer = Annotated[int, BeforeValidator(whole)]
Number = Annotated[float, BeforeValidator(_number)]
Text = Annotated[str, BeforeValidator(_text)]
Dtype = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(_dtype), WithJsonSchema({"enum": [*_DTYPES]})]
"""fp16, half or float16; bf16 or bfloat16; fp32, float or float32. Held as the first of each."""

# Bounds stand before the validator, so that they reach the JSON Schema.
Count = Annotated[int, Field(ge=0), BeforeValidator(whole)]
Positive = Annotated[int, Field(ge=1), BeforeValidator(whole)]
NonNegative = Annotated[float, Field(ge=0), BeforeValidator(_number)]
Above0 = Annotated[float, Field(gt=0), BeforeValidator(_number)]
Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(_number)]
Momentum = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_number)]
Texts = Annotated[
    tuple[Text, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}),
]
"""A list of text; a bare text is a list of one."""

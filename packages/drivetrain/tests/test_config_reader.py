"""The tolerant reader: what it takes, what it refuses and in which words, and where things stood."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.engine.config import ConfigError, load
from drivetrain.engine.config.reader import DEEPEST, dotted, parse, read

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
documents = st.dictionaries(st.text(), json_values, max_size=5)


@given(documents, st.sampled_from([None, 0, 2]))
def test_json_is_read_as_json_reads_it(document: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(document, indent=indent)
    assert parse(text).values == document
    assert parse(json.dumps(document, ensure_ascii=False, indent=indent)).values == document


@given(documents)
def test_comments_and_commas_change_nothing(document: dict[str, Any]) -> None:
    lines = json.dumps(document, indent=2).split("\n")
    noisy = "\n".join(f"/* { {} } */ {line} // it's {index}" for index, line in enumerate(lines))
    assert parse("# head\n" + noisy + "\n/* tail */").values == document


@given(documents)
def test_every_key_has_its_line(document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=1)
    found = parse(text)
    for path, line in found.lines.items():
        if isinstance(path[-1], str):
            assert text.split("\n")[line - 1].lstrip().startswith(json.dumps(path[-1]) + ":")


def test_what_people_write() -> None:
    text = """\
    # a comment
    {
      train_batch_size: 8   // no comma, no quotes
      'optimizer': {type: 'AdamW', "params": {"lr": 3e-4, "betas": [0.9, 0.95,],},},
      /* a
         longer one */ "steps_per_print": Infinity,
      "a": +.5, "b": -1., "c": 1e3, "d": 12, "e": 'it\\'s "so"', "f": [],
    }
    """
    assert parse(text).values == {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
        "steps_per_print": float("inf"),
        "a": 0.5,
        "b": -1.0,
        "c": 1000.0,
        "d": 12,
        "e": 'it\'s "so"',
        "f": [],
    }
    assert isinstance(parse('{"d": 12}').values["d"], int)


SYNTAX = [
    ("", 1, "column 1: the file is empty"),
    ("// nothing", 1, "column 11: the file is empty"),
    ("[1]", 1, "column 1: a configuration starts with an opening brace {"),
    ('{"a": 1} x', 1, "column 10: there is text after the closing brace of the configuration"),
    ('{"a": 1', 1, "column 8: the file ends inside the configuration, which opens on line 1 and is never closed"),
    ('{\n"a": {"b": 1', 2, "column 13: the file ends inside a, which opens on line 2 and is never closed"),
    ('{"a": ', 1, "column 7: the file ends where the value of a should stand"),
    ('{"a" 1}', 1, "column 6: a colon should follow the key 'a'"),
    ('{"a" = 1}', 1, "column 6: write a colon, not an equals sign, after the key 'a'"),
    ('{"a": 1 "b": 2}', 1, "column 9: a comma or } should stand here, in the configuration (opens on line 1)"),
    ('{"a": [1 2]}', 1, "column 10: a comma or ] should stand here, in a (opens on line 1)"),
    ('{"a": True}', 1, "column 7: True is Python; JSON writes true"),
    ('{"a": None}', 1, "column 7: None is Python; JSON writes null"),
    ('{"a": AdamW}', 1, "column 7: text needs quotes: the value of a starts with 'AdamW'"),
    ('{"a": "b}\n', 1, "column 7: this text has no closing quote on its line"),
    ('{"a": "C:\\data"}', 1, "column 7: a backslash in text is followed by something that is no escape"),
    ('{"a": /* b}', 1, "column 7: this comment is never closed with */"),
    ('{"a": ,}', 1, "column 7: a value should stand here, for a"),
    ("{,}", 1, "column 2: a key in quotes should stand here, not ','"),
    ('{"a": 12abc}', 1, "column 7: a value should stand here, for a"),
    ('{"a": ' + "9" * 5000 + "}", 1, "column 7: this number has too many digits"),
    ('{"a": ' + "[" * 100 + "]" * 100 + "}", 1, f"nested deeper than {DEEPEST} levels"),
]


@pytest.mark.parametrize(("text", "line", "message"), SYNTAX, ids=[case[2][:60] for case in SYNTAX])
def test_syntax_errors(text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, source="run.json")
    (problem,) = caught.value.problems
    assert message in problem.message
    assert problem.line == line
    assert str(caught.value).startswith(f"1 problem in the configuration run.json\n  run.json:{line}: ")


def test_a_syntax_error_shows_the_line_and_points_at_the_place() -> None:
    with pytest.raises(ConfigError) as caught:
        parse('{\n  "fp16": {"enabled": True},\n}', source="run.json")
    assert str(caught.value) == (
        "1 problem in the configuration run.json\n"
        "  run.json:2: the configuration\n"
        "      syntax error in column 23: True is Python; JSON writes true\n"
        '            "fp16": {"enabled": True},\n'
        "                                ^"
    )


def test_duplicates_at_every_level_are_reported_and_the_first_counts() -> None:
    document = parse('{"a": 1,\n"b": {"c": 1, "c": {"d": [2]}},\n"a": 3}')
    assert document.values == {"a": 1, "b": {"c": 1}}
    assert [(p.path, p.found, p.line, p.message) for p in document.problems] == [
        ("b.c", '{"d": [2]}', 2, "the key is there twice: first on line 2, again on line 2"),
        ("a", "3", 3, "the key is there twice: first on line 1, again on line 3"),
    ]


def test_a_path_as_text() -> None:
    assert dotted(("a", "b", 0, "c")) == "a.b[0].c"
    assert dotted(()) == ""


# ---------------------------------------------------------------------------------------------------- forms of a source


def test_all_forms_come_to_the_same(tmp_path: Path) -> None:
    values: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    text = "// ÿ?>\n" + json.dumps(values)
    path = tmp_path / "run.json"
    path.write_text("\ufeff" + text, encoding="utf-8")
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    assert "_" in encoded or "-" in encoded
    expected = load(values).to_dict()
    for source in (path, str(path), encoded, encoded.rstrip("="), encoded + "\n"):
        assert load(source).to_dict() == expected


def test_duplicates_in_base64_are_reported_too() -> None:
    encoded = base64.urlsafe_b64encode(b'{"train_batch_size": 1, "train_batch_size": 2}').decode()
    with pytest.raises(ConfigError, match="the key is there twice"):
        load(encoded)


def test_sources_that_are_none(tmp_path: Path) -> None:
    binary = tmp_path / "model.pt"
    binary.write_bytes(b'{"a": "\xff"}')
    cases: list[tuple[Any, str]] = [
        (tmp_path / "nope.json", "there is no such file"),
        ("nope.json", "there is no such file"),
        ("x" * 5000, "there is no such file"),
        ("a\0b", "there is no such file"),
        (tmp_path, "this is a folder, not a file"),
        (binary, "the file is not UTF-8 text (byte 7 is 0xff)"),
        ('{"train_batch_size": 1}', "this is the text of a configuration, not the path of a file"),
        (12, "a configuration is a mapping, the path of a JSON file, or URL-safe base64 text of one, not a int"),
        (None, "not a NoneType"),
    ]
    for source, message in cases:
        with pytest.raises(ConfigError) as caught:
            read(source)
        assert message in str(caught.value)

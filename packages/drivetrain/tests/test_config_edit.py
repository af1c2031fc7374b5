"""A section goes into the text of a configuration, and all the rest stays as it was written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.engine.config import ConfigError
from drivetrain.engine.config.edit import with_section
from drivetrain.engine.config.reader import parse

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
documents = st.dictionaries(st.text() | st.just("aio"), json_values, max_size=4)


@given(documents, st.sampled_from([None, 0, 2, "\t"]), st.dictionaries(st.text(), st.integers(), max_size=3))
def test_all_else_is_kept(document: dict[str, Any], indent: int | str | None, values: dict[str, int]) -> None:
    edited = with_section(json.dumps(document, indent=indent), "aio", values)
    there = document.get("aio")
    expected = {**(there if isinstance(there, dict) else {}), **values}
    assert parse(edited).values == {**document, "aio": expected}
    assert json.loads(edited) == {**document, "aio": expected}  # what was JSON stays JSON
    assert list(json.loads(edited))[: len(document)] == list(document)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{}", '{"aio": {"x": 1}}'),
        ('{"a": 1e-05}', '{"a": 1e-05, "aio": {"x": 1}}'),
        (
            '{\r\n  # rates\n  "a": 3e-4, // small\n}\n',
            '{\r\n  # rates\n  "a": 3e-4,\n  "aio": {\n    "x": 1\n  }, // small\n}\n',
        ),
        (
            "{\n    aio: {y: 2}  # fast\n    a: 1\n}",
            '{\n    aio: {\n        "y": 2,\n        "x": 1\n    }  # fast\n    a: 1\n}',
        ),
        ('{"aio": "auto", "a": {"aio": 5}}', '{"aio": {"x": 1}, "a": {"aio": 5}}'),
        ("{\n  // none yet\n}", '{\n  "aio": {\n    "x": 1\n  }\n  // none yet\n}'),
        ('{"a": NaN}', '{"a": NaN, "aio": {"x": 1}}'),
    ],
)
def test_layout_and_comments_stay(before: str, after: str) -> None:
    assert with_section(before, "aio", {"x": 1}) == after


def test_what_can_not_be_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="the key is there twice"):
        with_section('{"a": 1, "a": 2}', "aio", {}, source="f.json")
    with pytest.raises(ConfigError, match=r"f\.json"):
        with_section('{"a" 1}', "aio", {}, source="f.json")

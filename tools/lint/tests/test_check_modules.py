from __future__ import annotations

import ast
from pathlib import Path

import pytest
from check_modules import check_modules, mutable_names
from wheels import Wheel


def names(source: str) -> list[str]:
    return [name for name, _ in mutable_names(ast.parse(source))]


@pytest.mark.parametrize(
    "source",
    [
        "x = []",
        "x = {}",
        "x = {'a': 1}",
        "x: dict[str, int] = {'a': 1}",
        "x = dict(a=1)",
        "x = [i for i in range(3)]",
        "x = collections.defaultdict(list)",
        "x = threading.local()",
        "x: Mapping[str, int] = {}",
        "x: Final[dict[str, int]] = {'a': 1}",
        "x: Final = ['a']",
        "if True:\n    x = {1}",
        "try:\n    x = []\nexcept ImportError:\n    pass",
        "try:\n    pass\nexcept ImportError:\n    x = []",
    ],
)
def test_flagged(source: str) -> None:
    assert names(source) == ["x"]


@pytest.mark.parametrize(
    "source",
    [
        "x = ()",
        "x = (1, 2)",
        "x = frozenset({'a'})",
        "x = MappingProxyType({'a': 1})",
        "x: Mapping[str, int] = {'a': 1}",
        "x: Final[Sequence[int]] = [1]",
        "x: collections.abc.Mapping[str, int] = {'a': 1}",
        "__all__ = ['a']",
        "logger = logging.getLogger('drivetrain')",
        "def f():\n    x = []",
        "class A:\n    x = []",  # ruff's RUF012
        "x: list[int]",
        "[1]",
    ],
)
def test_let_through(source: str) -> None:
    assert names(source) == []


def test_a_reason_on_the_line_lets_it_stand(tmp_path: Path) -> None:
    wheel = Wheel(
        folder=tmp_path,
        distribution="drivetrain-comm",
        name="comm",
        required=frozenset(),
        optional=frozenset(),
        exports=None,
    )
    wheel.root.mkdir(parents=True)
    source = "a = {}  # state: torch has one default group per process\nb = {}  # state:\nc = {}\n"
    (wheel.root / "setup.py").write_text(source, encoding="utf-8")
    assert [(violation.line, violation.text.split()[0]) for violation in check_modules([wheel])] == [
        (2, "`b`"),
        (3, "`c`"),
    ]

from __future__ import annotations

import ast

import pytest
from check_modules import mutable_names


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

"""What the checks need to know of the wheels in packages/, read from their files without importing anything."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True, order=True)
class Violation:
    """One broken rule, printed as `path:line: text`."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One folder of packages/.

    `name` is what is imported below the namespace (`comm` for `drivetrain.comm`), `distribution` what pip installs.
    `required` holds the normalised distribution names of the dependencies, `optional` those of every extra.
    `exports` is the `__all__` of the package root, None when there is none.
    """

    folder: Path
    distribution: str
    name: str
    required: frozenset[str]
    optional: frozenset[str]
    exports: frozenset[str] | None

    @property
    def root(self) -> Path:
        return self.folder / "src" / "drivetrain" / self.name

    @property
    def sources(self) -> list[Path]:
        return sorted(self.root.rglob("*.py"))


def normalised(name: str) -> str:
    """A distribution's name as the packaging standard compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement_name(line: str) -> str:
    """The normalised distribution name at the start of a requirement such as `torch>=2.9; extra == "x"`."""
    found = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", line)
    if found is None:
        raise ValueError(f"not a requirement: {line!r}")
    return normalised(found.group(1))


def exports_of(root_module: Path) -> frozenset[str] | None:
    """The names in a module's `__all__`, or None when it has none that is written out."""
    if not root_module.exists():
        return None
    for node in ast.parse(root_module.read_text(encoding="utf-8")).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, (ast.Assign, ast.AnnAssign))
            if isinstance(node.value, (ast.List, ast.Tuple)):
                return frozenset(str(item.value) for item in node.value.elts if isinstance(item, ast.Constant))
    return None


def read_wheel(folder: Path) -> Wheel:
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    namespace = folder / "src" / "drivetrain"
    below = sorted(path.name for path in namespace.iterdir() if path.is_dir() and path.name != "__pycache__")
    if len(below) != 1:
        raise ValueError(f"{namespace}: expected one import package, found {below}")
    extras = project.get("optional-dependencies", {})
    return Wheel(
        folder=folder,
        distribution=normalised(project["name"]),
        name=below[0],
        required=frozenset(requirement_name(line) for line in project.get("dependencies", [])),
        optional=frozenset(requirement_name(line) for lines in extras.values() for line in lines),
        exports=exports_of(namespace / below[0] / "__init__.py"),
    )


def read_wheels(repository: Path) -> list[Wheel]:
    return [read_wheel(file.parent) for file in sorted(repository.glob("packages/*/pyproject.toml"))]

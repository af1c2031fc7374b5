"""Rules about files rather than code: what every wheel must hold, and what must not be written anywhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from wheels import Violation, Wheel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Where packages come from is a setting of the machine (pip's configuration), never of the repository.
REGISTRY_HOST = re.compile(
    r"\b(?:pypi\.org|pythonhosted\.org|download\.pytorch\.org|anaconda\.org|npmjs\.(?:org|com))\b"
)
# Absolute folders that exist on one machine only.
MACHINE_PATH = re.compile(r"(?<![\w./:}\])*-])/(?:root|work|home|Users|opt|mnt|tmp)/[\w.]")
NOT_TEXT = frozenset({".png", ".jpg", ".svg", ".gif", ".ico", ".safetensors", ".bin", ".pt", ".gz", ".npz"})


def tracked_files(repository: Path) -> list[Path]:
    """Files under version control, and new ones that are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout
    return [repository / name for name in listing.split("\0") if name and (repository / name).is_file()]


def forbidden_text(text: str) -> Iterator[tuple[int, str]]:
    """Line numbers and faults of one file's text."""
    for number, line in enumerate(text.splitlines(), start=1):
        host = REGISTRY_HOST.search(line)
        if host:
            yield number, f"names the registry host {host.group()}: leave that to pip's configuration"
        path = MACHINE_PATH.search(line)
        if path:
            yield number, f"names a folder of one machine ({path.group()}...): use a relative path or an argument"


def check_text(repository: Path) -> Iterator[Violation]:
    for path in tracked_files(repository):
        if path.suffix not in NOT_TEXT:
            for line, text in forbidden_text(path.read_text(encoding="utf-8", errors="replace")):
                yield Violation(path=path, line=line, text=text)


def check_wheel_folder(wheel: Wheel, licence: str) -> Iterator[Violation]:
    for name in ("README.md", "CHANGELOG.md", "LICENSE"):
        if not (wheel.folder / name).is_file():
            yield Violation(path=wheel.folder / name, line=1, text="every wheel has one")
    own = wheel.folder / "LICENSE"
    if own.is_file() and own.read_text(encoding="utf-8") != licence:
        yield Violation(path=own, line=1, text="differs from the LICENSE of the repository")
    if not (wheel.root / "py.typed").is_file():
        yield Violation(path=wheel.root / "py.typed", line=1, text="every wheel ships its types")
    namespace = wheel.folder / "src" / "drivetrain" / "__init__.py"
    if namespace.exists():
        yield Violation(
            path=namespace, line=1, text="`drivetrain` is a namespace of several wheels: its root has no file"
        )
    for path in sorted((wheel.folder / "tests").rglob("__init__.py")):
        yield Violation(path=path, line=1, text="tests are no package: pytest imports them by path")


def check_settings(repository: Path, wheels: list[Wheel]) -> Iterator[Violation]:
    """Every wheel is known to mypy and to the import contract."""
    path = repository / "pyproject.toml"
    tool = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]
    for wheel in wheels:
        if f"drivetrain.{wheel.name}" not in tool["importlinter"]["root_packages"]:
            yield Violation(path=path, line=1, text=f"importlinter.root_packages lacks drivetrain.{wheel.name}")
        if f"$MYPY_CONFIG_FILE_DIR/packages/{wheel.folder.name}/src" not in tool["mypy"]["mypy_path"]:
            yield Violation(path=path, line=1, text=f"mypy.mypy_path lacks packages/{wheel.folder.name}/src")


def check_tree(repository: Path, wheels: list[Wheel]) -> Iterator[Violation]:
    licence = (repository / "LICENSE").read_text(encoding="utf-8")
    for wheel in wheels:
        yield from check_wheel_folder(wheel, licence)
    yield from check_settings(repository, wheels)
    yield from check_text(repository)

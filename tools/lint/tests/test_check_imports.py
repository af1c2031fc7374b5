from __future__ import annotations

from pathlib import Path

import pytest
from check_imports import check_imports
from wheels import Wheel, exports_of, read_wheels, requirement_name


def make_wheel(packages: Path, name: str, dependencies: list[str], files: dict[str, str], extras: str = "") -> Path:
    """A wheel on disk, with `files` relative to its import package."""
    folder = packages / name
    root = folder / "src" / "drivetrain" / name
    root.mkdir(parents=True)
    lines = ", ".join(f'"{line}"' for line in dependencies)
    project = f'[project]\nname = "drivetrain-{name}"\nversion = "0.1.0"\ndependencies = [{lines}]\n{extras}'
    (folder / "pyproject.toml").write_text(project, encoding="utf-8")
    for file, text in {"__init__.py": "", **files}.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(text, encoding="utf-8")
    return folder


def faults_of(repository: Path) -> list[str]:
    return [violation.text for violation in check_imports(read_wheels(repository))]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    (tmp_path / "packages").mkdir()
    exported = 'from drivetrain.comm.mesh import Mesh\n__all__ = ["Mesh"]\n'
    make_wheel(tmp_path / "packages", "comm", ["torch>=2.9"], {"__init__.py": exported, "mesh.py": "class Mesh: ..."})
    return tmp_path / "packages"


def zero_with(
    packages: Path, source: str, dependencies: tuple[str, ...] = ("torch>=2.9", "drivetrain-comm>=0.1")
) -> list[str]:
    make_wheel(packages, "zero", list(dependencies), {"api.py": source})
    return faults_of(packages.parent)


@pytest.mark.parametrize(
    "source",
    [
        "from drivetrain.comm import Mesh",
        "import drivetrain.comm",
        "import os, torch.nn.functional",
        "from drivetrain.zero.layout import Layout",
        "from .layout import Layout",
        "import numpy",
    ],
)
def test_allowed(packages: Path, source: str) -> None:
    dependencies = ("torch>=2.9", "drivetrain-comm>=0.1,<0.2", "NumPy>=1.26")
    assert zero_with(packages, source, dependencies) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("from drivetrain.comm.mesh import Mesh", "reaches into `drivetrain.comm.mesh`"),
        ("import drivetrain.comm.mesh", "reaches into `drivetrain.comm.mesh`"),
        ("def f():\n    from drivetrain.comm.mesh import Mesh", "reaches into `drivetrain.comm.mesh`"),
        ("from drivetrain.comm import mesh", "takes mesh from drivetrain.comm, whose __all__ does not offer it"),
        ("from drivetrain.comm import Mesh, _cache", "takes _cache from drivetrain.comm"),
        ("from drivetrain.comm import *", "star import of `drivetrain.comm`"),
        ("from drivetrain import offload", "there is no wheel drivetrain.offload"),
        ("import drivetrain", "`drivetrain` is a namespace"),
        ("import numpy", "imports `numpy`, which zero/pyproject.toml declares neither"),
        ("import yaml", "imports `yaml`"),
    ],
)
def test_refused(packages: Path, source: str, fault: str) -> None:
    (found,) = zero_with(packages, source)
    assert fault in found


def test_sibling_must_be_declared(packages: Path) -> None:
    (found,) = zero_with(packages, "from drivetrain.comm import Mesh", dependencies=("torch",))
    assert found == "imports drivetrain-comm, which zero/pyproject.toml does not declare"


def test_extras_count_as_declared_and_import_names_are_translated(packages: Path) -> None:
    extras = '[project.optional-dependencies]\nplot = ["matplotlib>=3.8", "PyYAML"]\n'
    make_wheel(packages, "plan", [], {"draw.py": "import matplotlib.pyplot\nimport yaml"}, extras)
    assert faults_of(packages.parent) == []


def test_line_numbers_are_of_the_import(packages: Path) -> None:
    make_wheel(packages, "zero", [], {"api.py": "x = 1\n\n\nimport torch\n"})
    (violation,) = check_imports(read_wheels(packages.parent))
    assert (violation.path.name, violation.line) == ("api.py", 4)


def test_a_wheel_with_two_packages_is_refused(packages: Path) -> None:
    folder = make_wheel(packages, "moe", [], {})
    (folder / "src" / "drivetrain" / "extra").mkdir()
    with pytest.raises(ValueError, match=r"expected one import package, found \['extra', 'moe'\]"):
        read_wheels(packages.parent)


@pytest.mark.parametrize(
    ("line", "name"),
    [("torch>=2.9", "torch"), ("Drivetrain_Comm >=0.1,<0.2", "drivetrain-comm"), ("x.y[z]==1; a", "x-y")],
)
def test_requirement_names(line: str, name: str) -> None:
    assert requirement_name(line) == name


def test_exports(tmp_path: Path) -> None:
    module = tmp_path / "m.py"
    assert exports_of(module) is None
    module.write_text("x = 1", encoding="utf-8")
    assert exports_of(module) is None
    module.write_text('__all__: list[str] = ["a", "b"]', encoding="utf-8")
    assert exports_of(module) == {"a", "b"}


def test_the_wheels_of_this_repository_are_found() -> None:
    found: list[Wheel] = read_wheels(Path(__file__).parents[3])
    assert {"drivetrain-comm", "drivetrain-zero", "drivetrain"} <= {wheel.distribution for wheel in found}

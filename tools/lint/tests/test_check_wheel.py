from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from check_wheel import archive_faults, first_example

GOOD = (
    "drivetrain/comm/__init__.py",
    "drivetrain/comm/py.typed",
    "drivetrain_comm-0.1.0.dist-info/METADATA",
    "drivetrain_comm-0.1.0.dist-info/licenses/LICENSE",
)


def faults(
    folder: Path, names: tuple[str, ...], tag: str = "py3-none-any", distribution: str = "drivetrain-comm"
) -> list[str]:
    archive = folder / f"{distribution.replace('-', '_')}-0.1.0-{tag}.whl"
    with zipfile.ZipFile(archive, "w") as wheel:
        for name in names:
            wheel.writestr(name, "")
    return archive_faults(distribution, archive)


def test_a_good_wheel(tmp_path: Path) -> None:
    assert faults(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ((*GOOD, "drivetrain/__init__.py"), "ships drivetrain/__init__.py"),
        ((*GOOD, "drivetrain/zero/py.typed"), "expected exactly one package"),
        ((*GOOD, "tests/test_mesh.py"), "ships tests/test_mesh.py outside drivetrain/"),
        ((*GOOD, "drivetrain/comm/x.pyc"), "compiled bytecode"),
        ((GOOD[0], *GOOD[2:]), "ships no drivetrain/comm/py.typed"),
        (GOOD[:3], "ships no LICENSE"),
    ],
)
def test_faults(tmp_path: Path, names: tuple[str, ...], fault: str) -> None:
    assert any(fault in found for found in faults(tmp_path, names))


def test_only_kernels_may_be_native(tmp_path: Path) -> None:
    tag = "cp311-cp311-linux_x86_64"
    assert faults(tmp_path, GOOD, tag) == ["is not py3-none-any"]
    assert faults(tmp_path, GOOD, tag, "drivetrain-kernels") == []


def test_first_example() -> None:
    readme = "# t\n```sh\nls\n```\ntext\n```python\na = 1\n\nb = 2\n```\n```python\nc = 3\n```\n"
    assert first_example(readme) == "a = 1\n\nb = 2\n"
    assert first_example("# nothing") is None

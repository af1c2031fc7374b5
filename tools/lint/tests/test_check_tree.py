from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from check_tree import check_text, check_wheel_folder, forbidden_text, tracked_files
from wheels import Wheel

SLASH = "/"  # so that this file passes the rule it tests


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("pip install --index-url https://py" + "pi.org/simple", "registry host"),
        ("extra = 'https://down" + "load.pytorch.org/whl/cpu'", "registry host"),
        (f"cache = '{SLASH}root/.cache'", "folder of one machine"),
        (f"see {SLASH}home/me/runs", "folder of one machine"),
        (f"tmp = Path('{SLASH}tmp/x')", "folder of one machine"),
    ],
)
def test_forbidden(line: str, fault: str) -> None:
    ((number, text),) = forbidden_text(f"fine\n{line}\n")
    assert number == 2
    assert fault in text


@pytest.mark.parametrize(
    "line",
    [
        "examples/work/notes",
        "https://host.org/home/x",
        "a /b/root",
        "root/x",
        "runs/tmp/x",
        f"{SLASH}usr/lib",
        f"{SLASH}dev/null",
    ],
)
def test_allowed(line: str) -> None:
    assert list(forbidden_text(line)) == []


def test_only_files_of_the_repository_are_read(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    bad = f"{SLASH}root/x"
    (tmp_path / ".gitignore").write_text("ignored.txt\n", encoding="utf-8")
    (tmp_path / "ignored.txt").write_text(bad, encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(bad.encode())
    (tmp_path / "new.txt").write_text(bad, encoding="utf-8")
    assert {path.name for path in tracked_files(tmp_path)} == {".gitignore", "picture.png", "new.txt"}
    assert [violation.path.name for violation in check_text(tmp_path)] == ["new.txt"]


def test_wheel_folder(tmp_path: Path) -> None:
    wheel = Wheel(
        folder=tmp_path,
        distribution="drivetrain-comm",
        name="comm",
        required=frozenset(),
        optional=frozenset(),
        exports=None,
    )
    wheel.root.mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    missing = [violation.path.name for violation in check_wheel_folder(wheel, "terms")]
    assert missing == ["README.md", "CHANGELOG.md", "LICENSE", "py.typed"]

    for name in ("README.md", "CHANGELOG.md"):
        (tmp_path / name).touch()
    (tmp_path / "LICENSE").write_text("terms", encoding="utf-8")
    (wheel.root / "py.typed").touch()
    assert list(check_wheel_folder(wheel, "terms")) == []

    (tmp_path / "LICENSE").write_text("other terms", encoding="utf-8")
    (tmp_path / "src" / "drivetrain" / "__init__.py").touch()
    (tmp_path / "tests" / "__init__.py").touch()
    texts = " ".join(violation.text for violation in check_wheel_folder(wheel, "terms"))
    assert "differs from the LICENSE" in texts
    assert "its root has no file" in texts
    assert "tests are no package" in texts

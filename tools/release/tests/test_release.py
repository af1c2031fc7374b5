from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from release import (
    ReleaseError,
    bump,
    bumped,
    changelog_entry,
    faults,
    planned_changes,
    range_for,
    read_packages,
    with_range,
    with_version,
)

versions = st.builds(lambda *parts: Version(".".join(map(str, parts))), *[st.integers(0, 40)] * 3)


def git(repository: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=repository, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """comm 0.1.0, and zero 0.1.0 that depends on it, in a git repository with one commit."""
    for name, dependencies in (("comm", '"torch>=2.9"'), ("zero", '"torch>=2.9",\n    "drivetrain-comm>=0.1,<0.2"')):
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        project = (
            f'[project]\nname = "drivetrain-{name}"\nversion = "0.1.0"\ndependencies = [\n    {dependencies},\n]\n'
        )
        (folder / "pyproject.toml").write_text(project, encoding="utf-8")
        (folder / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0\n\n- First release.\n", encoding="utf-8")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.email", "a@example.org")
    git(tmp_path, "config", "user.name", "A")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "start")
    return tmp_path


def add_entry(repository: Path, name: str, version: str) -> None:
    path = repository / "packages" / name / "CHANGELOG.md"
    text = path.read_text(encoding="utf-8").replace("## 0.1.0", f"## {version}\n\n- New things.\n\n## 0.1.0")
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("part", "expected"), [("major", "1.0.0"), ("minor", "0.4.0"), ("patch", "0.3.8")], ids=lambda value: value
)
def test_bumped(part: str, expected: str) -> None:
    assert bumped(Version("0.3.7"), part) == Version(expected)


@given(versions, st.sampled_from(["major", "minor", "patch"]))
def test_a_bump_always_rises(version: Version, part: str) -> None:
    assert bumped(version, part) > version


@given(versions)
def test_a_range_holds_its_version_and_patches_and_no_breaking_bump(version: Version) -> None:
    allowed = SpecifierSet(range_for(version))
    assert version in allowed
    assert bumped(version, "patch") in allowed
    assert bumped(version, "major") not in allowed
    assert (bumped(version, "minor") in allowed) == (version.major > 0)


def test_changelog_entries() -> None:
    text = "# Changelog\n\n## 0.2.0 (2026-01-02)\n\n- b\n- c\n\n## 0.1.0\n\n## 0.0.10\n- a\n"
    assert changelog_entry(text, Version("0.2.0")) == "- b\n- c"
    assert changelog_entry(text, Version("0.1.0")) == ""
    assert changelog_entry(text, Version("0.0.1")) == ""
    assert changelog_entry(text, Version("0.0.10")) == "- a"


def test_texts_keep_everything_else() -> None:
    text = '[project]\nversion = "0.1.0"\ndependencies = ["drivetrain-comm>=0.1,<0.2; x", "drivetrain-comms>=1"]\n'
    assert with_version(text, Version("0.2.0")) == text.replace('"0.1.0"', '"0.2.0"')
    assert with_range(text, "drivetrain-comm", ">=0.2,<0.3") == text.replace(">=0.1,<0.2", ">=0.2,<0.3")
    with pytest.raises(ReleaseError, match="found 0"):
        with_version("[project]\n", Version("0.2.0"))


def test_a_sound_repository_has_no_faults(repository: Path) -> None:
    assert faults(read_packages(repository)) == []


@pytest.mark.parametrize(
    ("stated", "fault"),
    [
        ("==0.1.0", "pins a sibling; say >=0.1,<0.2"),
        (">=0.1", "has no upper bound; say >=0.1,<0.2"),
        (">=0.2,<0.3", "excludes 0.1.0"),
    ],
)
def test_faulty_ranges(repository: Path, stated: str, fault: str) -> None:
    path = repository / "packages" / "zero" / "pyproject.toml"
    path.write_text(path.read_text(encoding="utf-8").replace(">=0.1,<0.2", stated), encoding="utf-8")
    assert fault in " ".join(faults(read_packages(repository)))


def test_a_missing_entry_is_a_fault_and_stops_a_bump(repository: Path) -> None:
    (repository / "packages" / "comm" / "CHANGELOG.md").write_text("# Changelog\n", encoding="utf-8")
    packages = read_packages(repository)
    assert "no entry for 0.1.0" in faults(packages)[0]
    with pytest.raises(ReleaseError, match=r"has no entry for 0\.2\.0: write `## 0\.2\.0`"):
        planned_changes(packages, "comm", "minor")


def test_unknown_package(repository: Path) -> None:
    with pytest.raises(ReleaseError, match="no package 'com'; packages are: comm, zero"):
        planned_changes(read_packages(repository), "com", "minor")


def test_a_breaking_bump_moves_the_users_range_in_the_same_commit(repository: Path) -> None:
    add_entry(repository, "comm", "0.2.0")
    assert bump(repository, "comm", "minor", dry_run=False) == "drivetrain-comm-v0.2.0"
    packages = read_packages(repository)
    assert packages["comm"].version == Version("0.2.0")
    assert str(packages["zero"].requirements[1].specifier) == "<0.3,>=0.2"
    assert faults(packages) == []
    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "log", "-1", "--format=%s", "drivetrain-comm-v0.2.0") == "Release drivetrain-comm 0.2.0"
    changed = git(repository, "show", "--name-only", "--format=", "HEAD").splitlines()
    assert changed == ["packages/comm/CHANGELOG.md", "packages/comm/pyproject.toml", "packages/zero/pyproject.toml"]


def test_a_patch_leaves_the_users_alone(repository: Path) -> None:
    add_entry(repository, "comm", "0.1.1")
    _, changes = planned_changes(read_packages(repository), "comm", "patch")
    assert [path.parent.name for path in changes] == ["comm"]


def test_a_dry_run_writes_nothing(repository: Path) -> None:
    add_entry(repository, "comm", "0.2.0")
    before = git(repository, "status", "--porcelain"), git(repository, "rev-parse", "HEAD")
    assert bump(repository, "comm", "minor", dry_run=True) == "drivetrain-comm-v0.2.0"
    assert (git(repository, "status", "--porcelain"), git(repository, "rev-parse", "HEAD")) == before
    assert git(repository, "tag") == ""


def test_other_changes_are_not_swept_into_the_release(repository: Path) -> None:
    add_entry(repository, "comm", "0.1.1")
    (repository / "notes.txt").write_text("mine", encoding="utf-8")
    bump(repository, "comm", "patch", dry_run=False)
    assert git(repository, "status", "--porcelain") == "?? notes.txt"


def test_refuses_uncommitted_edits_and_existing_tags(repository: Path) -> None:
    add_entry(repository, "comm", "0.1.1")
    path = repository / "packages" / "comm" / "pyproject.toml"
    original = path.read_text(encoding="utf-8")
    path.write_text(original + "# mine\n", encoding="utf-8")
    with pytest.raises(ReleaseError, match="uncommitted edits"):
        bump(repository, "comm", "patch", dry_run=False)
    path.write_text(original, encoding="utf-8")
    git(repository, "tag", "drivetrain-comm-v0.1.1")
    with pytest.raises(ReleaseError, match=r"the tag drivetrain-comm-v0\.1\.1 exists already"):
        bump(repository, "comm", "patch", dry_run=False)

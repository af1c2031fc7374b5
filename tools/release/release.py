"""Versions of the wheels: check that they agree, and bump one.

Versions are static in each `packages/<name>/pyproject.toml`. A wheel depends on its siblings by a range: `>=0.3,<0.4`
while the version starts with 0 (where a minor may break), `>=1.3,<2` after. A bump that leaves the range of a user
rewrites that range in the same commit, since both must hold at once.

    release.py check
    release.py bump NAME major|minor|patch [--dry-run]

`bump` wants the changelog's entry for the new version to be there already, changes the files, commits exactly those,
and writes the tag `<distribution>-v<version>`. It pushes nothing.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PARTS = ("major", "minor", "patch")


class ReleaseError(Exception):
    """Why a release is not made, in words for the person who asked for it."""


@dataclass(frozen=True, kw_only=True)
class Package:
    """One wheel as its pyproject.toml describes it."""

    folder: Path
    distribution: str
    version: Version
    requirements: tuple[Requirement, ...]

    @property
    def file(self) -> Path:
        return self.folder / "pyproject.toml"

    @property
    def changelog(self) -> Path:
        return self.folder / "CHANGELOG.md"


def read_packages(repository: Path) -> dict[str, Package]:
    """The packages by folder name."""
    packages = {}
    for file in sorted(repository.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        packages[file.parent.name] = Package(
            folder=file.parent,
            distribution=project["name"],
            version=Version(project["version"]),
            requirements=tuple(Requirement(line) for line in project.get("dependencies", [])),
        )
    return packages


def bumped(version: Version, part: str) -> Version:
    """The next version; lower parts start again at 0."""
    major, minor, patch = (*version.release, 0, 0)[:3]
    if part == "major":
        return Version(f"{major + 1}.0.0")
    if part == "minor":
        return Version(f"{major}.{minor + 1}.0")
    return Version(f"{major}.{minor}.{patch + 1}")


def range_for(version: Version) -> str:
    """The range that a sibling states for a dependency of this version."""
    if version.major == 0:
        return f">=0.{version.minor},<0.{version.minor + 1}"
    return f">={version.major}.{version.minor},<{version.major + 1}"


def changelog_entry(text: str, version: Version) -> str:
    """The text below the heading `## <version>` (a date may follow it); empty when there is none."""
    heading = re.compile(
        rf"^## +v?{re.escape(str(version))}(?![\w.])[^\n]*\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE
    )
    found = heading.search(text)
    return found.group(1).strip() if found else ""


def with_version(text: str, version: Version) -> str:
    """A pyproject.toml with its project's version replaced and every other byte kept."""
    changed, count = re.subn(r'(?m)^version = "[^"]*"$', f'version = "{version}"', text)
    if count != 1:
        raise ReleaseError(f'expected one line `version = "..."` in pyproject.toml, found {count}')
    return changed


def with_range(text: str, distribution: str, specifier: str) -> str:
    """A pyproject.toml with the range of one dependency replaced wherever it is stated."""
    return re.sub(rf'"{re.escape(distribution)}[<>=!~][^";]*', f'"{distribution}{specifier}', text)


def faults(packages: dict[str, Package]) -> list[str]:
    """Where versions, ranges and changelogs do not agree."""
    found = []
    by_distribution = {package.distribution: package for package in packages.values()}
    for package in packages.values():
        if not changelog_entry(package.changelog.read_text(encoding="utf-8"), package.version):
            found.append(f"{package.changelog}: no entry for {package.version}")
        for requirement in package.requirements:
            sibling = by_distribution.get(requirement.name)
            if sibling is None:
                continue
            if any(bound.operator in ("==", "===") for bound in requirement.specifier):
                found.append(f"{package.file}: {requirement} pins a sibling; say {range_for(sibling.version)}")
            if not any(bound.operator.startswith("<") for bound in requirement.specifier):
                found.append(f"{package.file}: {requirement} has no upper bound; say {range_for(sibling.version)}")
            if sibling.version not in requirement.specifier:
                found.append(
                    f"{package.file}: {requirement} excludes {sibling.version}, the version in this repository"
                )
    return found


def planned_changes(packages: dict[str, Package], name: str, part: str) -> tuple[Version, dict[Path, str]]:
    """The new version of `name` and the new text of every file that the release changes."""
    if name not in packages:
        raise ReleaseError(f"no package {name!r}; packages are: {', '.join(packages)}")
    package = packages[name]
    version = bumped(package.version, part)
    if not changelog_entry(package.changelog.read_text(encoding="utf-8"), version):
        raise ReleaseError(f"{package.changelog} has no entry for {version}: write `## {version}` with what changed")
    changes = {package.file: with_version(package.file.read_text(encoding="utf-8"), version)}
    for user in packages.values():
        stated = [requirement for requirement in user.requirements if requirement.name == package.distribution]
        if any(version not in requirement.specifier for requirement in stated):
            text = user.file.read_text(encoding="utf-8")
            changes[user.file] = with_range(text, package.distribution, range_for(version))
    return version, changes


def git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def bump(repository: Path, name: str, part: str, *, dry_run: bool) -> str:
    """Makes the release commit and its tag; returns the tag. With `dry_run` nothing is written."""
    packages = read_packages(repository)
    version, changes = planned_changes(packages, name, part)
    package = packages[name]
    tag = f"{package.distribution}-v{version}"
    if git(repository, "tag", "--list", tag).strip():
        raise ReleaseError(f"the tag {tag} exists already")
    touched = [*map(str, changes), str(package.changelog)]
    if dry_run:
        return tag
    edited = git(repository, "status", "--porcelain", "--", *map(str, changes)).strip()
    if edited:
        raise ReleaseError(f"files that the release changes hold uncommitted edits:\n{edited}")
    for path, text in changes.items():
        path.write_text(text, encoding="utf-8")
    git(repository, "add", "--", *touched)
    git(repository, "commit", "--quiet", "--message", f"Release {package.distribution} {version}", "--", *touched)
    git(repository, "tag", "--annotate", tag, "--message", f"{package.distribution} {version}")
    return tag


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="release", description="Check the versions of the wheels, or bump one.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="do versions, ranges and changelogs agree?")
    bumping = commands.add_parser("bump", help="new version, commit and tag")
    bumping.add_argument("name", help="folder below packages/")
    bumping.add_argument("part", choices=PARTS)
    bumping.add_argument("--dry-run", action="store_true", help="say what would be tagged, write nothing")
    options = parser.parse_args(arguments)
    repository = Path(__file__).resolve().parents[2]
    if options.command == "check":
        found = faults(read_packages(repository))
        print("\n".join(found) if found else "versions, ranges and changelogs agree")
        return 1 if found else 0
    try:
        tag = bump(repository, options.name, options.part, dry_run=options.dry_run)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"would tag {tag}" if options.dry_run else f"committed and tagged {tag}; push both when you are ready")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

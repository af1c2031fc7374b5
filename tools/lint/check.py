"""Runs the checks that no off-the-shelf linter has. Exit status 1 when a rule is broken."""

from __future__ import annotations

from pathlib import Path

from check_imports import check_imports
from check_modules import check_modules
from check_tree import check_tree
from wheels import Violation, read_wheels


def violations(repository: Path) -> list[Violation]:
    wheels = read_wheels(repository)
    return sorted([*check_imports(wheels), *check_modules(wheels), *check_tree(repository, wheels)])


def main() -> int:
    repository = Path(__file__).resolve().parents[2]
    found = violations(repository)
    for violation in found:
        print(f"{violation.path.relative_to(repository)}:{violation.line}: {violation.text}")
    print(f"{len(found)} broken rules" if found else "imports, modules and tree: all rules hold")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())

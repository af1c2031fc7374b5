"""Who imports whom, in more detail than a layers contract can say.

- A wheel imports only those siblings that its own dependencies name.
- It imports them from their package root, and only what their `__all__` offers.
- Every third-party import is a declared dependency, required or of an extra.
- No star imports.

Read from the syntax tree: nothing is imported, so the check needs none of the dependencies.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from wheels import Violation, Wheel, normalised

# Import names that are not those of the distribution to declare. pydantic-core is pydantic's own, at an exact version.
DISTRIBUTION_OF = (("yaml", "pyyaml"), ("PIL", "pillow"), ("sklearn", "scikit-learn"), ("pydantic_core", "pydantic"))


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module and the names taken from it (none for `import module`)."""

    module: str
    names: tuple[str, ...]
    line: int


def imports_of(tree: ast.AST) -> Iterator[Import]:
    """Every absolute import, wherever it stands. `from drivetrain import comm` counts as `import drivetrain.comm`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module=alias.name, names=(), line=node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names = tuple(alias.name for alias in node.names)
            if node.module == "drivetrain":
                for name in names:
                    yield Import(module=f"drivetrain.{name}", names=(), line=node.lineno)
            else:
                yield Import(module=node.module, names=names, line=node.lineno)


def sibling_fault(wheel: Wheel, sibling: Wheel | None, found: Import) -> str | None:
    """What is wrong with importing `found` from another wheel, or None."""
    parts = found.module.split(".")
    if len(parts) < 2:
        return "`drivetrain` is a namespace and has nothing of its own to import"
    if sibling is None:
        return f"`{found.module}`: there is no wheel drivetrain.{parts[1]} in packages/"
    if sibling.distribution not in wheel.required | wheel.optional:
        return f"imports {sibling.distribution}, which {wheel.folder.name}/pyproject.toml does not declare"
    if len(parts) > 2:
        return (
            f"reaches into `{found.module}`: import from the package root, `from drivetrain.{sibling.name} import ...`"
        )
    private = [name for name in found.names if sibling.exports is not None and name not in sibling.exports]
    if private:
        return f"takes {', '.join(private)} from drivetrain.{sibling.name}, whose __all__ does not offer it"
    return None


def third_party_fault(wheel: Wheel, found: Import) -> str | None:
    top = found.module.split(".")[0]
    if top in sys.stdlib_module_names or top == "__future__":
        return None
    distribution = normalised(dict(DISTRIBUTION_OF).get(top, top))
    if distribution in wheel.required | wheel.optional:
        return None
    return f"imports `{top}`, which {wheel.folder.name}/pyproject.toml declares neither as dependency nor in an extra"


def check_imports(wheels: list[Wheel]) -> Iterator[Violation]:
    by_name = {wheel.name: wheel for wheel in wheels}
    for wheel in wheels:
        for path in wheel.sources:
            for found in imports_of(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
                parts = found.module.split(".")
                fault: str | None
                if parts[0] != "drivetrain":
                    fault = third_party_fault(wheel, found)
                elif len(parts) > 1 and parts[1] == wheel.name:
                    fault = None
                else:
                    fault = sibling_fault(wheel, by_name.get(parts[1]) if len(parts) > 1 else None, found)
                if "*" in found.names:
                    fault = f"star import of `{found.module}`: name what you take"
                if fault is not None:
                    yield Violation(path=path, line=found.line, text=fault)

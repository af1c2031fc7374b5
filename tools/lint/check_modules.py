"""No state at module level: two engines in one process must not meet in a variable.

Flagged is a module-level name that is bound to a container that can change: a list, dict or set, written out or made by
a call. A table that is only read says so in its type (`Mapping[...]`, `Sequence[...]`, `Set[...]`, also inside
`Final[...]`), and mypy then refuses writes to it; a tuple, a frozenset or a MappingProxyType needs no annotation. An
empty container is state whatever its type says. (`global` statements are ruff's PLW0602 to 0604.)

What belongs to the process by its nature, such as torch's default process group, may be state: the line then ends with
`# state: ` and the reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from wheels import Violation, Wheel

READ_ONLY = frozenset({"Mapping", "Sequence", "Collection", "Iterable", "Set", "AbstractSet"})
MAKERS = frozenset(
    {
        *("list", "dict", "set", "bytearray", "deque", "defaultdict", "OrderedDict", "Counter", "ChainMap"),
        *("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "local", "SimpleNamespace"),
    }
)


REASON = re.compile(r"#\s*state:\s*\S")


def is_mutable(value: ast.expr) -> bool:
    if isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)):
        return True
    if isinstance(value, ast.Call):
        function = value.func
        name = (
            function.attr
            if isinstance(function, ast.Attribute)
            else function.id
            if isinstance(function, ast.Name)
            else ""
        )
        return name in MAKERS
    return False


def is_empty(value: ast.expr) -> bool:
    match value:
        case ast.List(elts=[]) | ast.Set(elts=[]) | ast.Dict(keys=[]):
            return True
        case ast.Call(args=[], keywords=[]):
            return True
    return False


def reads_only(annotation: ast.expr | None) -> bool:
    """Whether the outermost type is one that mypy refuses to write through."""
    node = annotation
    while isinstance(node, ast.Subscript):
        name = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        if name not in ("Final", "ClassVar"):
            return name in READ_ONLY
        node = node.slice
    return False


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run at import, inside `if` and `try` too, but not inside functions and classes."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from top_level(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from top_level(handler.body)


def mutable_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in top_level(tree.body):
        if isinstance(node, ast.Assign):
            names, value, annotation = node.targets, node.value, None
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            names, value, annotation = [node.target], node.value, node.annotation
        else:
            continue
        if not is_mutable(value) or (reads_only(annotation) and not is_empty(value)):
            continue
        for name in names:
            if isinstance(name, ast.Name) and name.id != "__all__":
                yield name.id, node.lineno


def check_modules(wheels: list[Wheel]) -> Iterator[Violation]:
    for wheel in wheels:
        for path in wheel.sources:
            source = path.read_text(encoding="utf-8")
            lines = source.splitlines()
            for name, line in mutable_names(ast.parse(source, filename=str(path))):
                if REASON.search(lines[line - 1]):
                    continue
                text = f"`{name}` is mutable state of the module: pass it as an argument, or give it a read-only type"
                yield Violation(path=path, line=line, text=text)

"""The build of the native core, on a core of two lines: what is compiled again, and what is said when it can't be."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("ninja")
pytest.importorskip("pybind11")


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`build_native` over sources of its own: a core, its header, and two programs of tests."""
    spec = importlib.util.spec_from_file_location("build_native", Path(__file__).parents[1] / "build_native.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "build_native", module)
    spec.loader.exec_module(module)
    root = tmp_path / "a folder"  # with a space, as users have them
    monkeypatch.setattr(module, "ROOT", root)
    monkeypatch.setattr(module, "SOURCES", root / "csrc")
    for folder in ("core", "tests"):
        (root / "csrc" / folder).mkdir(parents=True)
    (root / "csrc" / "core" / "answer.h").write_text("int answer();\nconstexpr int kAnswer = 42;\n")
    (root / "csrc" / "core" / "answer.cpp").write_text('#include "answer.h"\nint answer() { return kAnswer; }\n')
    for name in ("first", "second"):
        (root / "csrc" / "tests" / f"{name}.cpp").write_text(
            '#include <cstdio>\n#include "core/answer.h"\n'
            'int main() { std::printf("found %d\\n", answer()); return answer() == 42 ? 0 : 3; }\n'
        )
    return module


def _has_compiler(builder: ModuleType) -> bool:
    try:
        builder.find_compiler()
    except builder.BuildError:
        return False
    return True


def test_what_a_header_changes_is_compiled_again_and_failures_are_shown(builder: ModuleType) -> None:
    if not _has_compiler(builder):
        pytest.skip("there is no C++ compiler here")
    assert builder.check("none") == ["first", "second"]
    built = builder.ROOT / "build" / "check-none" / "first"
    before = built.stat().st_mtime_ns
    assert builder.check("none") == ["first", "second"]
    assert built.stat().st_mtime_ns == before
    header = builder.SOURCES / "core" / "answer.h"
    header.write_text(header.read_text().replace("kAnswer = 42", "kAnswer = 41"))
    with pytest.raises(builder.BuildError, match=r"exit status 3\):\n.*first.*\nfound 41"):
        builder.check("none")
    header.write_text("int answer(;\n")
    with pytest.raises(builder.BuildError, match=r"(?s)exit status 1\):.*answer\.h:1.*error"):
        builder.check("none")


def test_a_missing_compiler_is_said_in_words(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -pipe")
    with pytest.raises(builder.BuildError, match=r"CXX names, 'no-such-compiler', was not found; correct CXX or unset"):
        builder.find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(builder.BuildError, match=r"none was found \(looked for c\+\+, g\+\+ and clang\+\+\)"):
        builder.find_compiler()

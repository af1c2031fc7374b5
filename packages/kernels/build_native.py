"""Compile the native core with the system's C++ compiler.

    python build_native.py                  in place, for development: src/drivetrain/kernels/_native.<tag>.so
    python build_native.py --check thread   the C++ tests under a sanitizer (address, undefined, thread, or none)

A wheel's build hook (hatch_build.py) calls `build` too. Needs a C++17 compiler (`CXX`, else c++, g++ or clang++) and
pybind11; torch is not needed and not looked at. Each instruction set is its own translation unit with its own flags;
nothing is tuned to the machine that builds. Objects are kept under build/ and compiled again only when a source or the
command changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "csrc"
EXTENSION = "_native" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so")

# Contraction stays off: the source says which multiplications and additions are fused, so that all instruction sets
# give the same bits.
COMMON = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
# Flags of the translation units whose instruction set is above the architecture's baseline; they apply on x86-64 only.
FLAGS_BY_SOURCE = {
    "kernels_avx2.cpp": AVX2,
    "kernels_avx512.cpp": AVX512,
    "kernels_avx512_bf16.cpp": [*AVX512, "-mavx512bf16"],
    "matmul_avx2.cpp": AVX2,
    "matmul_avx512.cpp": AVX512,
    "matmul_avx512_vnni.cpp": [*AVX512, "-mavx512vnni"],
    "matmul_amx.cpp": [*AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
}


class BuildError(RuntimeError):
    """The extension could not be built; the message says what to do."""


def find_compiler() -> list[str]:
    """The C++ compiler as the start of a command line."""
    if platform.system() == "Windows":
        raise BuildError(
            "building drivetrain-kernels from source on Windows is not supported; "
            "install its wheel from the package index"
        )
    named = os.environ.get("CXX", "").split()
    if named:
        if shutil.which(named[0]) is None:
            raise BuildError(f"the C++ compiler that CXX names, {named[0]!r}, was not found; correct CXX or unset it")
        return named
    for candidate in ("c++", "g++", "clang++"):
        if shutil.which(candidate) is not None:
            return [candidate]
    raise BuildError(
        "building drivetrain-kernels from source needs a C++17 compiler and none was found "
        "(looked for c++, g++ and clang++). Install one (Debian and Ubuntu: apt install g++), name one in CXX, or "
        "install the wheel from the package index, which needs no compiler"
    )


def _run(command: list[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode != 0:
        raise BuildError(
            f"a command failed (exit status {done.returncode}):\n{' '.join(command)}\n{done.stdout}{done.stderr}"
        )
    if done.stderr:
        sys.stderr.write(done.stderr)


def _supports(compiler: list[str], flags: list[str], scratch: Path) -> bool:
    probe = scratch / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    command = [*compiler, *flags, "-c", str(probe), "-o", str(scratch / "probe.o")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _flags(source: Path, compiler: list[str], scratch: Path) -> list[str]:
    flags = FLAGS_BY_SOURCE.get(source.name, [])
    if not flags or platform.machine().lower() not in ("x86_64", "amd64"):
        return []
    # A compiler too old for an instruction set builds that translation unit empty, and the core does without it.
    return flags if _supports(compiler, flags, scratch) else []


def _stale(output: Path, command: list[str], newest: float) -> bool:
    stamp = output.with_suffix(output.suffix + ".command")
    wanted = hashlib.sha256("\0".join(command).encode()).hexdigest()
    if output.exists() and output.stat().st_mtime >= newest and stamp.exists() and stamp.read_text() == wanted:
        return False
    stamp.write_text(wanted)
    return True


def build(output: Path, *, scratch: Path | None = None, extra: tuple[str, ...] = ()) -> Path:
    """Build the extension into the folder `output` and return its path.

    `extra` flags go to compiler and linker (sanitizers).
    """
    compiler = find_compiler()
    scratch = scratch or ROOT / "build" / (sysconfig.get_platform() + "-" + (sys.implementation.cache_tag or "python"))
    scratch.mkdir(parents=True, exist_ok=True)
    newest = max(path.stat().st_mtime for path in SOURCES.rglob("*") if path.is_file())
    includes = [f"-I{SOURCES}", f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    sources = [*sorted(SOURCES.glob("core/*.cpp")), SOURCES / "bindings.cpp"]

    def compile_one(source: Path) -> Path:
        target = scratch / (source.stem + ".o")
        own = scratch / source.stem
        own.mkdir(exist_ok=True)
        command = [
            *compiler,
            *COMMON,
            *_flags(source, compiler, own),
            *extra,
            *includes,
            "-c",
            str(source),
            "-o",
            str(target),
        ]
        if _stale(target, command, newest):
            _run(command)
        return target

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compile_one, sources))
    output.mkdir(parents=True, exist_ok=True)
    extension = output / EXTENSION
    undefined = ["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []
    _run([*compiler, "-shared", "-pthread", *extra, *undefined, *map(str, objects), "-o", str(extension)])
    return extension


def check(sanitizer: str) -> None:
    """Compile the C++ tests of the core with a sanitizer ("none" for without) and run them."""
    compiler = find_compiler()
    scratch = ROOT / "build" / f"check-{sanitizer}"
    scratch.mkdir(parents=True, exist_ok=True)
    flags = [] if sanitizer == "none" else [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    sources = [*sorted(SOURCES.glob("core/*.cpp")), SOURCES / "tests" / "core_test.cpp"]

    def compile_one(source: Path) -> Path:
        target = scratch / (source.stem + ".o")
        own = scratch / source.stem
        own.mkdir(exist_ok=True)
        options = [*COMMON, "-O1", "-g", *_flags(source, compiler, own), *flags, f"-I{SOURCES}"]
        _run([*compiler, *options, "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compile_one, sources))
    program = scratch / "run_tests"
    _run([*compiler, "-pthread", *flags, *map(str, objects), "-o", str(program)])
    _run([str(program)], scratch)  # its scratch files belong there


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the native core of drivetrain-kernels.")
    default = ROOT / "src" / "drivetrain" / "kernels"
    parser.add_argument("--output", type=Path, default=default, help="folder for the extension (default: %(default)s)")
    sanitizers = ("none", "address", "undefined", "thread")
    parser.add_argument("--check", choices=sanitizers, help="run the C++ tests under this sanitizer instead")
    options = parser.parse_args()
    try:
        if options.check is not None:
            check(options.check)
            sys.stdout.write(f"the C++ tests pass (sanitizer: {options.check})\n")
        else:
            sys.stdout.write(f"{build(options.output)}\n")
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

"""Compile the native core with the system's C++ compiler.

    python build_native.py                  in place, for development: src/drivetrain/kernels/_native.<tag>.so
    python build_native.py --check thread   the C++ tests under a sanitizer (address, undefined, thread, or none)

A wheel's build hook (hatch_build.py) calls `build` too. Needs a C++17 compiler (`CXX`, else c++, g++ or clang++),
pybind11 and ninja; torch is not needed and not looked at. Each instruction set is its own translation unit with its own
flags; nothing is tuned to the machine that builds. What is here is the list of commands; ninja runs those whose
sources, headers or flags changed, and keeps its objects under build/.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import ninja
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
    "matmul_avx512_bf16.cpp": [*AVX512, "-mavx512vnni", "-mavx512bf16"],
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


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode != 0:
        raise BuildError(
            f"a command failed (exit status {done.returncode}):\n{shlex.join(command)}\n{done.stdout}{done.stderr}"
        )
    sys.stderr.write(done.stdout + done.stderr)


def _supports(compiler: list[str], flags: list[str]) -> bool:
    command = [*compiler, *flags, "-x", "c++", "-c", "-", "-o", os.devnull]
    return subprocess.run(command, input=b"int main() {}", capture_output=True, check=False).returncode == 0


def _compile(scratch: Path, programs: Mapping[Path, Sequence[Path]], flags: Sequence[str], link: Sequence[str]) -> None:
    """Bring `programs` (and what each consists of) up to date; objects are kept in `scratch`."""
    compiler = find_compiler()
    scratch.mkdir(parents=True, exist_ok=True)
    # A compiler too old for an instruction set builds that translation unit empty, and the core does without it.
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    own = {name: more for name, more in FLAGS_BY_SOURCE.items() if x86 and _supports(compiler, more)}
    objects = {source: f"{source.parent.name}-{source.stem}.o" for all_of in programs.values() for source in all_of}

    def command(*words: str) -> str:
        return ninja.escape(shlex.join(words))

    with (scratch / "build.ninja").open("w", encoding="utf-8") as file:
        rules = ninja.Writer(file)
        rules.rule(
            "compile",
            f"{command(*compiler, *flags)} $own -MMD -MF $out.d -c $in -o $out",
            depfile="$out.d",
            deps="gcc",
        )
        rules.rule("link", f"{command(*compiler, *link)} $in -o $out")
        for source, target in objects.items():
            more = command(*own.get(source.name, []))
            rules.build(target, "compile", str(source), variables={"own": more})
        for program, all_of in programs.items():
            rules.build(str(program), "link", [objects[source] for source in all_of])
    _run([sys.executable, "-m", "ninja", "--quiet"], scratch)


def _core() -> list[Path]:
    return sorted(SOURCES.glob("core/*.cpp"))


def build(output: Path, *, scratch: Path | None = None) -> Path:
    """Build the extension into the folder `output` and return its path."""
    output.mkdir(parents=True, exist_ok=True)
    extension = output.resolve() / EXTENSION
    includes = [f"-I{SOURCES}", f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    undefined = ["-undefined", "dynamic_lookup"] if platform.system() == "Darwin" else []
    _compile(
        scratch or ROOT / "build" / f"{sysconfig.get_platform()}-{sys.implementation.cache_tag or 'python'}",
        {extension: [*_core(), SOURCES / "bindings.cpp"]},
        flags=[*COMMON, *includes],
        link=["-shared", "-pthread", *undefined],
    )
    return extension


def check(sanitizer: str) -> list[str]:
    """Compile every file of the core's C++ tests with a sanitizer ("none" for without) as a program of its own, run
    them, and return their names."""
    scratch = ROOT / "build" / f"check-{sanitizer}"
    flags = [] if sanitizer == "none" else [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    programs = {scratch / test.stem: [*_core(), test] for test in sorted(SOURCES.glob("tests/*.cpp"))}
    _compile(scratch, programs, flags=[*COMMON, "-O1", "-g", *flags, f"-I{SOURCES}"], link=["-pthread", *flags])
    for program in programs:
        _run([str(program)], scratch)  # its scratch files belong there
    return [program.name for program in programs]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the native core of drivetrain-kernels.")
    default = ROOT / "src" / "drivetrain" / "kernels"
    parser.add_argument("--output", type=Path, default=default, help="folder for the extension (default: %(default)s)")
    sanitizers = ("none", "address", "undefined", "thread")
    parser.add_argument("--check", choices=sanitizers, help="run the C++ tests under this sanitizer instead")
    options = parser.parse_args()
    try:
        if options.check is not None:
            passed = ", ".join(check(options.check))
            sys.stdout.write(f"the C++ tests pass (sanitizer: {options.check}): {passed}\n")
        else:
            sys.stdout.write(f"{build(options.output)}\n")
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

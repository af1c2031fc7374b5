"""Every task of the repository, for people and for CI alike.

Packages are found by glob: a folder `packages/<name>/` with a pyproject.toml is a wheel, and nothing here names one.
What a session installs comes from the dependency groups in pyproject.toml. Where no GPU is present, torch is the one
pinned in `ci/constraints-cpu.txt`; where there is one, pip's own choice.

    nox                                    tests and lint
    nox -s demo [-- --device cuda]         train a language model with ZeRO, resume it, let it write
    nox -s tests [-- comm zero --device cpu -k mesh]
    nox -s thorough [-- zero]              the tests of large tables of which `tests` takes a part
    nox -s lowest [-- comm]                tests with every dependency at its lower bound
    nox -s sanitizers [-- thread]          the C++ tests under address, undefined and thread sanitizers
    nox -s lint | types | docs
    nox -s build [-- comm]                 sdist -> wheel -> clean venv -> import -> README example
    nox -s torches [-- 2.9.1 2.13.0]       one wheel of what has native code passes its tests under several torches
    nox -s bench -- zero [...]
    nox -s release -- comm minor [--dry-run]
"""

from __future__ import annotations

import os
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nox
from nox.command import CommandFailed
from nox.project import dependency_groups, load_toml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent
PACKAGES = {file.parent.name: file.parent for file in sorted(ROOT.glob("packages/*/pyproject.toml"))}
TOOLS = [file.parent for file in sorted(ROOT.glob("tools/*/pyproject.toml"))]  # unpublished: for the tests only
PROJECT = load_toml(ROOT / "pyproject.toml")
NATIVE = {name: folder for name, folder in PACKAGES.items() if (folder / "build_native.py").exists()}
DEVICES = ("cpu", "cuda")
SANITIZERS = ("address", "undefined", "thread")
EVERY_CHANGE = ("not cuda and not thorough", "not thorough")  # the tests where there is no GPU, and where there is

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["tests", "lint"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True


# ------------------------------------------------------------------------------------------------------------- helpers


def gpu_present() -> bool:
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def constraints() -> list[str]:
    return [] if gpu_present() else ["-c", str(ROOT / "ci" / "constraints-cpu.txt")]


def pinned_torch() -> str:
    lines = (ROOT / "ci" / "constraints-cpu.txt").read_text(encoding="utf-8").splitlines()
    return next(line.partition("==")[2].strip() for line in lines if line.startswith("torch=="))


def group(name: str) -> list[str]:
    return list(dependency_groups(PROJECT, name))


def build_requirements(names: Sequence[str]) -> list[str]:
    wanted = {
        requirement
        for name in names
        for requirement in load_toml(PACKAGES[name] / "pyproject.toml")["build-system"]["requires"]
    }
    return sorted(wanted | {"editables>=0.5"})


def siblings(name: str) -> set[str]:
    """The packages of this repository that `name` depends on, directly or through others."""
    folder_of = {load_toml(path / "pyproject.toml")["project"]["name"]: folder for folder, path in PACKAGES.items()}
    found: set[str] = set()
    todo = [name]
    while todo:
        for line in load_toml(PACKAGES[todo.pop()] / "pyproject.toml")["project"].get("dependencies", []):
            folder = folder_of.get(Requirement(line).name)
            if folder is not None and folder not in found:
                found.add(folder)
                todo.append(folder)
    return found


def install(
    session: nox.Session,
    names: Sequence[str],
    *extra: str,
    tools: Sequence[Path] = (),
    constrain: Sequence[str] | None = None,
) -> None:
    """Installs packages editable, with `extra` requirements, in one resolution.

    The build backends go in first and isolation is off, so that a backend is installed once and not once per package.
    """
    pins = constraints() if constrain is None else list(constrain)
    session.install("--quiet", *pins, *build_requirements(names), *extra)
    editable = [part for path in [*(PACKAGES[name] for name in names), *tools] for part in ("--editable", str(path))]
    session.install("--quiet", "--no-build-isolation", *pins, *editable)


def with_siblings(names: Sequence[str]) -> list[str]:
    return sorted({*names, *(sibling for name in names for sibling in siblings(name))})


def leading_names(session: nox.Session) -> tuple[list[str], list[str]]:
    """Splits posargs into leading package names (all packages when none is given) and the rest."""
    rest = list(session.posargs)
    names: list[str] = []
    while rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        if name not in PACKAGES:
            session.error(f"no package {name!r}; packages are: {', '.join(PACKAGES)}")
        names.append(name)
    return names, rest


def take_option(session: nox.Session, arguments: list[str], option: str, choices: Sequence[str]) -> str | None:
    """Removes `option value` (or `option=value`) from `arguments` and returns the value."""
    for index, argument in enumerate(arguments):
        if argument == option or argument.startswith(option + "="):
            value = argument.partition("=")[2] or (arguments[index + 1] if index + 1 < len(arguments) else "")
            del arguments[index : index + (1 if "=" in argument else 2)]
            if value not in choices:
                session.error(f"{option} {value!r}: expected one of {', '.join(choices)}")
            return value
    return None


# --------------------------------------------------------------------------------------------------------------- tests


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one pytest run counted, read from its JUnit report."""

    name: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    complete: bool

    @classmethod
    def read(cls, name: str, report: Path, complete: bool) -> Outcome:
        if not report.exists():
            return cls(name=name, passed=0, failed=0, skipped=0, seconds=0.0, complete=False)
        suite = next(ElementTree.parse(report).iter("testsuite"))
        total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        return cls(
            name=name,
            passed=total - failed - skipped,
            failed=failed,
            skipped=skipped,
            seconds=float(suite.get("time", 0.0)),
            complete=complete,
        )


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Folders that one pytest runs, by a Python of its own or the session's.

    `parallel`: how its tests are divided among one process per core, in words of pytest-xdist; None: one process has
    them all. Those of a package go file by file ("loadfile"), since they share what is made once for a file, unless its
    pyproject.toml says otherwise (`tool.drivetrain.parallel-tests`).
    """

    name: str
    folders: list[Path]
    python: str = "python"
    parallel: str | None = None


def run_pytest(session: nox.Session, suites: Sequence[Suite], marker: str, arguments: Sequence[str]) -> None:
    """Runs one pytest after another, all of them whatever fails, and closes with a table and a line of totals.

    ``marker``: which tests, in pytest's words; what it selects may be nothing in a suite if it asks for a kind of test.
    """
    reports = session.cache_dir / "reports"  # not create_tmp: it would make the tests' own temporary paths long
    reports.mkdir(exist_ok=True)
    outcomes: list[Outcome] = []
    for suite in suites:
        report = reports / f"{suite.name}.xml"
        report.unlink(missing_ok=True)
        # 5: nothing collected, which is an answer when someone selects tests and a fault otherwise.
        accepted = [0] if marker in EVERY_CHANGE and not arguments else [0, 5]
        options = ["-q", "--continue-on-collection-errors", f"--junitxml={report}"]
        if suite.parallel is not None:
            options += ["--numprocesses", "logical", "--dist", suite.parallel]
        pytest = [suite.python, "-m", "pytest", *options, *map(str, suite.folders), "-m", marker, *arguments]
        environment = {"OMP_NUM_THREADS": "1"} if suite.parallel is not None else {}
        try:
            done = session.run(*pytest, env=environment, success_codes=accepted, external=suite.python != "python")
            if done is None:
                return  # nox --install-only
            complete = True
        except CommandFailed:
            complete = False
        outcomes.append(Outcome.read(suite.name, report, complete))
    print()
    for outcome in outcomes:
        verdict = "ok" if outcome.complete and not outcome.failed else "FAILED"
        print(
            f"  {outcome.name:<14} {outcome.passed:>5} passed {outcome.failed:>4} failed {outcome.skipped:>4} skipped"
            f" {outcome.seconds:>7.1f} s  {verdict}"
        )
    total = [sum(getattr(outcome, field) for outcome in outcomes) for field in ("passed", "failed", "skipped")]
    print("\ntests: {} passed, {} failed, {} skipped\n".format(*total), flush=True)
    broken = [outcome.name for outcome in outcomes if not outcome.complete or outcome.failed]
    if broken:
        session.error(f"failed: {', '.join(broken)}")


def every_change() -> str:
    return EVERY_CHANGE[gpu_present()]


def tests_in_parallel(name: str) -> str:
    settings = load_toml(PACKAGES[name] / "pyproject.toml").get("tool", {}).get("drivetrain", {})
    return str(settings.get("parallel-tests", "loadfile"))


def package_suites(names: Sequence[str], python: str = "python", suffix: str = "") -> list[Suite]:
    return [
        Suite(
            name=name + suffix,
            folders=[PACKAGES[name] / "tests"],
            python=python,
            parallel=tests_in_parallel(name),
        )
        for name in names
        if any(PACKAGES[name].glob("tests/**/test_*.py"))
    ]


def other_suites() -> list[Suite]:
    found = []
    for area in ("tools", "examples", "benchmarks"):
        folders = sorted(path for path in ROOT.glob(f"{area}/*/tests") if any(path.glob("**/test_*.py")))
        if folders:
            found.append(Suite(name=area, folders=folders))
    return found


@nox.session
def tests(session: nox.Session) -> None:
    """Build and install every package and run its tests. `-- NAME... --device cpu|cuda PYTEST-ARGUMENTS`"""
    names, arguments = leading_names(session)
    device = take_option(session, arguments, "--device", DEVICES)
    marker = {"cpu": EVERY_CHANGE[0], "cuda": "cuda", None: every_change()}[device]
    wanted = names or list(PACKAGES)
    install(session, with_siblings(wanted) if names else wanted, *group("test"), *group("lint"), tools=TOOLS)
    suites = package_suites(wanted) + ([] if names else other_suites())
    if not suites:
        session.error("there are no tests here")
    run_pytest(session, suites, marker, arguments)


@nox.session
def thorough(session: nox.Session) -> None:
    """The tests of large tables of which `tests` takes a part; half an hour. `-- NAME... PYTEST-ARGUMENTS`"""
    names, arguments = leading_names(session)
    wanted = names or list(PACKAGES)
    install(session, with_siblings(wanted), *group("test"), *group("lint"), tools=TOOLS)
    marker = "thorough" if gpu_present() else "thorough and not cuda"
    run_pytest(session, package_suites(wanted), marker, arguments)


def lower_bounds(names: Sequence[str]) -> dict[str, str]:
    """The oldest version of each dependency that all of these packages allow."""
    pins: dict[str, str] = {}
    for name in names:
        for line in load_toml(PACKAGES[name] / "pyproject.toml")["project"].get("dependencies", []):
            requirement = Requirement(line)
            bounds = [bound.version for bound in requirement.specifier if bound.operator in (">=", "~=")]
            if bounds and not requirement.name.startswith("drivetrain"):
                pins[requirement.name] = max([*bounds, pins.get(requirement.name, "0")], key=Version)
    return pins


@nox.session
def lowest(session: nox.Session) -> None:
    """The tests with every dependency of the packages at its lower bound. `-- NAME... PYTEST-ARGUMENTS`"""
    names, arguments = leading_names(session)
    wanted = with_siblings(names or list(PACKAGES))
    pins = lower_bounds(wanted)
    file = session.cache_dir / "lowest.txt"
    file.write_text("".join(f"{name}=={version}\n" for name, version in sorted(pins.items())), encoding="utf-8")
    install(session, wanted, *group("test"), tools=TOOLS, constrain=["-c", str(file)])
    run_pytest(session, package_suites(names or list(PACKAGES)), every_change(), arguments)


@nox.session
def sanitizers(session: nox.Session) -> None:
    """The C++ tests under sanitizers, all of them whatever fails. `-- address|undefined|thread...`"""
    for name in session.posargs:
        if name not in SANITIZERS:
            session.error(f"no sanitizer {name!r}; sanitizers are: {', '.join(SANITIZERS)}")
    session.install("--quiet", *build_requirements(list(NATIVE)))
    failed = []
    for package, folder in NATIVE.items():
        for name in session.posargs or SANITIZERS:
            try:
                session.run("python", str(folder / "build_native.py"), "--check", name)
            except CommandFailed:
                failed.append(f"{package} ({name})")
    if failed:
        session.error("failed: " + "; ".join(failed))


# ---------------------------------------------------------------------------------------------------------------- demo


@nox.session
def demo(session: nox.Session) -> None:
    """Train a language model with ZeRO, resume it, let it write. `-- --device cpu|cuda`"""
    install(session, with_siblings(["drivetrain"]), *group("demo"))
    session.run(
        "python",
        str(ROOT / "examples" / "demo" / "run.py"),
        *session.posargs,
        env={"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONUNBUFFERED": "1"},
    )


# ----------------------------------------------------------------------------------------------------- lint and typing


@nox.session
def lint(session: nox.Session) -> None:
    """Style, the contract of who imports whom, and the rules of the tree. Needs no torch."""
    session.install("--quiet", *group("lint"))
    sources = os.pathsep.join(str(path / "src") for path in PACKAGES.values())
    failed = []
    for command in (
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["lint-imports"],
        ["python", "tools/lint/check.py"],
        ["python", "tools/release/release.py", "check"],
    ):
        try:
            session.run(*command, env={"PYTHONPATH": sources})
        except CommandFailed:
            failed.append(" ".join(command))
    if failed:
        session.error("failed: " + "; ".join(failed))


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict over every package and the tools."""
    install(session, list(PACKAGES), *group("types"), *group("lint"), tools=TOOLS)
    session.run("mypy", *session.posargs)


# --------------------------------------------------------------------------------------------------------------- build


def distribution_of(name: str) -> str:
    return str(load_toml(PACKAGES[name] / "pyproject.toml")["project"]["name"])


def build_wheels(session: nox.Session, names: Sequence[str], place: Path) -> Path:
    """Wheels of packages and their siblings, each made from its sdist in an environment of its own."""
    session.install("--quiet", *group("build"))
    dist = place / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for name in with_siblings(names):
        # Without --sdist or --wheel, `build` makes the wheel out of the sdist: what is missing from it shows here.
        session.run("python", "-m", "build", "--outdir", str(dist), str(PACKAGES[name]), silent=True)
    return dist


def clean_venv(session: nox.Session, place: Path, name: str) -> tuple[str, Path]:
    """The Python of a new environment with nothing in it, and an empty folder to run it in."""
    clean, empty = place / f"venv-{name}", place / f"cwd-{name}"
    shutil.rmtree(clean, ignore_errors=True)
    shutil.rmtree(empty, ignore_errors=True)
    empty.mkdir()
    session.run("python", "-m", "venv", str(clean))
    return str(clean / ("Scripts" if sys.platform == "win32" else "bin") / "python"), empty


@nox.session
def build(session: nox.Session) -> None:
    """sdist -> wheel -> clean venv with only what the wheel declares -> import -> README example. `-- NAME...`"""
    names, _ = leading_names(session)
    names = names or list(PACKAGES)
    place = Path(session.create_tmp()).resolve()
    dist = build_wheels(session, names, place)
    for name in names:
        distribution = distribution_of(name)
        python, empty = clean_venv(session, place, name)
        checker = str(ROOT / "tools" / "lint" / "check_wheel.py")
        session.run("python", checker, "archive", distribution, str(dist))
        pip = [python, "-m", "pip", "install", "--quiet", *constraints(), "--find-links", str(dist), distribution]
        session.run(*pip, external=True, silent=True)
        with session.chdir(empty):
            session.run(python, "-I", checker, "installed", distribution, str(PACKAGES[name]), external=True)


@nox.session
def torches(session: nox.Session) -> None:
    """One wheel of each package with native code passes its tests under several torches. `-- VERSION...`

    Without versions: the oldest that the package allows, and the one that machines without a GPU are tested with. Some
    are builds with CUDA, of gigabytes.
    """
    place = Path(session.create_tmp()).resolve()
    dist = build_wheels(session, list(NATIVE), place)
    checker = str(ROOT / "tools" / "lint" / "check_wheel.py")
    suites = []
    for name, folder in NATIVE.items():
        for wanted in session.posargs or (f"{lower_bounds([name])['torch']}.*", pinned_torch()):
            python, empty = clean_venv(session, place, f"{name}-{wanted.replace('*', 'x')}")
            wheel = ["--find-links", str(dist), distribution_of(name)]
            pip = [python, "-m", "pip", "install", "--quiet", f"torch=={wanted}", *group("test"), *wheel]
            session.run(*pip, external=True, silent=True)
            with session.chdir(empty):
                session.run(python, "-I", checker, "installed", distribution_of(name), str(folder), external=True)
            suites += package_suites([name], python, f"-{wanted}")
    run_pytest(session, suites, every_change(), [])


# ---------------------------------------------------------------------------------------------- docs, benches, release


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into site/; `-- serve` shows it while you write."""
    install(session, list(PACKAGES), *group("docs"))
    if "serve" in session.posargs:
        session.run("mkdocs", "serve")
    else:
        session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def bench(session: nox.Session) -> None:
    """Measure one subject beside its peers. `-- SUBJECT ARGUMENTS`"""
    subjects = sorted(path.parent.name for path in ROOT.glob("benchmarks/*/run.py"))
    if not session.posargs or session.posargs[0] not in subjects:
        session.error(f"usage: nox -s bench -- SUBJECT ...; subjects are: {', '.join(subjects) or 'none yet'}")
    subject, *arguments = session.posargs
    install(session, list(PACKAGES), *group("bench"), tools=TOOLS)
    peers = ROOT / "benchmarks" / subject / "peers.txt"
    if peers.exists():
        # A peer that does not install is left out of the comparison; the benchmark says so. DeepSpeed's setup wants the
        # torch that is here already, and compiles nothing ahead of time when told so.
        session.install("--quiet", "setuptools", "wheel", "ninja")
        session.install(
            *("--quiet", "--no-build-isolation", *constraints(), "-r", str(peers)),
            env={"DS_BUILD_OPS": "0"},
            success_codes=[0, 1],
        )
    session.run("python", str(ROOT / "benchmarks" / subject / "run.py"), *arguments)


@nox.session
def release(session: nox.Session) -> None:
    """Bump a package's version, check its changelog, commit and tag. `-- NAME major|minor|patch [--dry-run]`"""
    session.install("--quiet", *group("release"))
    session.run("python", "tools/release/release.py", "bump", *session.posargs)

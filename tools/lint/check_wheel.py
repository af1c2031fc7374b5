"""Looks at a built wheel from outside.

    check_wheel.py archive DISTRIBUTION DIST_FOLDER       what the archive holds
    check_wheel.py installed DISTRIBUTION PACKAGE_FOLDER  run by the Python of a clean environment that holds only the
                                                          wheel and what it declares: import, then the README's example

Standard library only, since it runs where nothing else is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

PURE_EXCEPT = frozenset({"drivetrain-kernels"})  # the only wheel that may hold native code
EXAMPLE = re.compile(r"^```python[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def archive_faults(distribution: str, archive: Path) -> list[str]:
    """What is wrong with a wheel file, by its names alone."""
    with zipfile.ZipFile(archive) as wheel:
        names = wheel.namelist()
    faults = []
    roots = {
        name.split("/")[1] for name in names if name.startswith("drivetrain/") and "/" in name[len("drivetrain/") :]
    }
    if "drivetrain/__init__.py" in names:
        faults.append("ships drivetrain/__init__.py, which would hide the sibling wheels")
    if len(roots) != 1:
        faults.append(f"ships {sorted(roots)}: expected exactly one package below drivetrain/")
    faults += [f"ships no drivetrain/{root}/py.typed" for root in roots if f"drivetrain/{root}/py.typed" not in names]
    faults += [
        f"ships {name} outside drivetrain/"
        for name in names
        if not name.startswith("drivetrain/") and ".dist-info/" not in name
    ]
    if not any(name.endswith("/LICENSE") and ".dist-info/" in name for name in names):
        faults.append("ships no LICENSE")
    if distribution not in PURE_EXCEPT and not archive.name.endswith("-py3-none-any.whl"):
        faults.append("is not py3-none-any")
    if any(name.endswith((".pyc", ".pyo")) for name in names):
        faults.append("ships compiled bytecode")
    return faults


def first_example(readme: str) -> str | None:
    """The first Python block of a README."""
    found = EXAMPLE.search(readme)
    return found.group(1) if found else None


def installed_faults(package: Path) -> list[str]:
    """Imports the package of this environment and runs the example of its README in the working directory."""
    below = [
        path.name for path in (package / "src" / "drivetrain").iterdir() if path.is_dir() and path.name != "__pycache__"
    ]
    faults = []
    for name in below:
        module = importlib.import_module(f"drivetrain.{name}")
        if not Path(str(module.__file__)).resolve().is_relative_to(Path(sys.prefix).resolve()):
            faults.append(f"drivetrain.{name} was imported from {module.__file__}, not from this environment")
    namespace = importlib.util.find_spec("drivetrain")
    if namespace is not None and namespace.origin is not None:
        faults.append(f"drivetrain is not a namespace: it has {namespace.origin}")
    example = first_example((package / "README.md").read_text(encoding="utf-8"))
    if example is None:
        return [*faults, "README.md has no ```python example"]
    script = Path("example.py")
    script.write_text(example, encoding="utf-8")
    status = subprocess.run([sys.executable, "-I", str(script)], timeout=300, check=False).returncode
    if status:
        faults.append(f"the first example of README.md exits with status {status}")
    return faults


def main(arguments: list[str]) -> int:
    mode, distribution, folder = arguments
    if mode == "archive":
        found = sorted(Path(folder).glob(f"{distribution.replace('-', '_')}-[0-9]*.whl"))
        faults = [fault for archive in found for fault in archive_faults(distribution, archive)]
        if len(found) != 1:
            faults.append(f"expected one wheel, found {[archive.name for archive in found]}")
    else:
        faults = installed_faults(Path(folder))
    for fault in faults:
        print(f"{distribution}: {fault}", file=sys.stderr)
    if not faults:
        print(f"{distribution}: {mode}, fine")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

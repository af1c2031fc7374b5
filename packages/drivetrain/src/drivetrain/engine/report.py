"""What this machine offers and what Drivetrain would use: the data behind `drivetrain report`.

Invariant: collecting never raises and never waits for a device or a peer. Every probe is guarded by itself; where one
fails, its line says why, and the others stand. Nothing is compiled, no process group is made.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from drivetrain import kernels
from drivetrain.comm import SHARED_MEMORY_VARIABLE
from drivetrain.engine.launch.host import available_cores, cpu_quota

WHEELS = (
    "drivetrain",
    "drivetrain-comm",
    "drivetrain-kernels",
    "drivetrain-zero",
    "drivetrain-parallel",
    "drivetrain-offload",
    "drivetrain-moe",
    "drivetrain-compression",
    "drivetrain-inference",
    "drivetrain-compat",
)
LIBRARIES = ("numpy", "safetensors", "pydantic", "triton", "transformers", "matplotlib")

ISA_FLAGS = (
    "sse4_2",
    "avx",
    "f16c",
    "fma",
    "avx2",
    "avx512f",
    "avx512_bf16",
    "amx_bf16",
    "neon",
    "asimd",
    "sve",
    "bf16",
)
"""Instruction sets, by the names of /proc/cpuinfo, that decide which kernels a CPU can run."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One line: what was asked, the answer, and, where the answer is no or unknown, why."""

    name: str
    value: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A titled group of facts."""

    title: str
    facts: tuple[Fact, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """All sections, in the order in which they are shown."""

    sections: tuple[Section, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain dictionaries: title -> name -> {"value", "reason"}."""
        return {
            section.title: {fact.name: {"value": fact.value, "reason": fact.reason} for fact in section.facts}
            for section in self.sections
        }

    def section(self, title: str) -> Section:
        """The section with this title."""
        return next(section for section in self.sections if section.title == title)


def collect() -> Report:
    """Ask the machine. Never raises."""
    return Report(
        sections=(
            Section(title="versions", facts=_guarded_all("versions", _versions)),
            Section(title="devices", facts=_guarded_all("devices", _devices)),
            Section(title="backends", facts=_guarded_all("backends", _backends)),
            Section(title="kernels", facts=_guarded_all("kernels", _kernels)),
        )
    )


def guarded(name: str, probe: Callable[[], str]) -> Fact:
    """The answer of a probe as a fact; its failure as the reason of an unknown."""
    try:
        return Fact(name=name, value=probe())
    except Exception as error:  # whatever a driver or a file system comes up with: the report must stand
        return Fact(name=name, value="unknown", reason=_in_words(error))


def _guarded_all(name: str, probe: Callable[[], Iterable[Fact]]) -> tuple[Fact, ...]:
    facts: list[Fact] = []
    try:
        facts.extend(probe())
    except Exception as error:
        facts.append(Fact(name=name, value="unknown", reason=_in_words(error)))
    return tuple(facts)


def _in_words(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


# ------------------------------------------------------------------------------------------------------------ versions


def _versions() -> Iterable[Fact]:
    for wheel in WHEELS:
        fact = _wheel(wheel)
        if fact is not None:
            yield fact
    yield guarded("torch", lambda: str(torch.__version__))
    yield guarded(
        "python", lambda: f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})"
    )
    yield guarded("platform", platform.platform)
    for library in LIBRARIES:
        version = _installed(library)
        yield Fact(name=library, value=version or "no", reason="" if version else "not installed; optional")
    yield Fact(name="compiler", value="not needed", reason="nothing is compiled on this machine")


def _wheel(wheel: str) -> Fact | None:
    """A wheel's version; "from source" if only its code is on the path; `None` if it is not there at all."""
    version = _installed(wheel)
    if version is not None:
        return Fact(name=wheel, value=version)
    package = "drivetrain.engine" if wheel == "drivetrain" else wheel.replace("-", ".", 1).replace("-", "_")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        return None
    return Fact(name=wheel, value="from source", reason=str(Path(spec.origin).parent))


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# ------------------------------------------------------------------------------------------------------------- devices


def _devices() -> Iterable[Fact]:
    yield guarded("cpu", cpu_model)
    yield guarded("cores", _cores)
    yield guarded("instruction sets", _instruction_sets)
    yield guarded("memory", lambda: _memory("MemTotal", "MemAvailable"))
    yield guarded("shared memory", _shared_memory)
    yield from _gpus()


def cpu_model() -> str:
    """The CPU's name as its maker writes it."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string")
    fields = _cpuinfo()
    return fields.get("model name") or fields.get("Processor") or platform.processor() or platform.machine()


def _cpuinfo() -> dict[str, str]:
    """Fields of the first core in /proc/cpuinfo."""
    first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _sysctl(name: str) -> str:
    answer = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True)
    return answer.stdout.strip()


def _cores() -> str:
    quota = cpu_quota()
    limit = "" if quota is None else f", of which the container may use {quota:g}"
    return f"{available_cores()}{limit}"


def _instruction_sets() -> str:
    torch_uses = torch.backends.cpu.get_cpu_capability()
    if sys.platform != "linux":
        return f"torch uses {torch_uses}"
    fields = _cpuinfo()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    found = [flag for flag in ISA_FLAGS if flag in flags]
    return f"{' '.join(found) or 'none known'} (torch uses {torch_uses})"


def _memory(total: str, free: str) -> str:
    if sys.platform == "darwin":
        return _gib(int(_sysctl("hw.memsize")))
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    amounts = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) >= 2}
    return f"{_gib(amounts[total])}, {_gib(amounts[free])} available"


def _shared_memory() -> str:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return "no /dev/shm"
    size = _filesystem_size(folder)
    note = ""
    if size < 1 << 30:
        note = " (small: data loader workers and NCCL may run out; docker run --shm-size=8g)"
    return f"{_gib(size)}{note}"


def _filesystem_size(folder: Path) -> int:
    status = os.statvfs(folder)
    return int(status.f_frsize * status.f_blocks)


def _gpus() -> Iterable[Fact]:
    if not torch.cuda.is_available():
        yield Fact(name="gpu", value="none", reason=_why_no_gpu())
        return
    for index in range(torch.cuda.device_count()):
        yield guarded(f"gpu {index}", lambda index=index: _gpu(index))  # type: ignore[misc]
    yield guarded("cuda", lambda: f"{torch.version.cuda or torch.version.hip} (what torch was built for)")


def _why_no_gpu() -> str:
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call, unused-ignore]
        return "this torch is a build for the CPU"
    if torch.cuda.device_count() == 0:
        return "torch sees no CUDA device: no GPU, no driver, or CUDA_VISIBLE_DEVICES hides it"
    return "the driver does not fit this torch; see nvidia-smi"


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return (
        f"{properties.name}, {_gib(properties.total_memory)}, compute capability {properties.major}.{properties.minor}"
    )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


# ------------------------------------------------------------------------------------------------ backends and kernels


def _backends() -> Iterable[Fact]:
    if not dist.is_available():
        yield Fact(name="torch.distributed", value="no", reason="this torch was built without it")
        return
    checks: dict[str, tuple[Callable[[], bool], str]] = {
        "gloo": (dist.is_gloo_available, "this torch was built without gloo"),
        "nccl": (dist.is_nccl_available, "this torch was built without NCCL (builds for CUDA have it)"),
        "mpi": (dist.is_mpi_available, "this torch was built without MPI; it is not needed"),
    }
    for name, (check, why_not) in checks.items():
        there = guarded(name, lambda check=check: "yes" if check() else "no")  # type: ignore[misc]
        yield Fact(name=name, value=there.value, reason=why_not if there.value == "no" else there.reason)
    yield _shared_memory_collectives()


def _shared_memory_collectives() -> Fact:
    """Whether CPU ranks of this host exchange tensors through shared memory instead of gloo."""
    name = "shared memory"
    if os.environ.get(SHARED_MEMORY_VARIABLE) == "0":
        return Fact(name=name, value="no", reason=f"{SHARED_MEMORY_VARIABLE}=0 switches it off; gloo is used")
    asked = guarded(name, kernels.shared_memory_refusal)
    if asked.reason:
        return asked
    return Fact(name=name, value="no" if asked.value else "yes", reason=asked.value)


def _kernels() -> Iterable[Fact]:
    for status in kernels.available():
        yield Fact(name=f"{status.op} on {status.device}", value=status.implementation, reason=status.reason)

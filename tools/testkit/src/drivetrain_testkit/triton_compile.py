"""Compiles Triton kernels for the GPUs that people have, without one at hand: down to machine code.

Triton's interpreter accepts much that its compiler refuses; this is the other half of the proof. It runs in a process
of its own, because a process that interprets kernels cannot compile them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

import pytest

CAPABILITIES: Final = (90, 80)

SHARED_LIMIT: Final = 99 * 1024
"""Bytes of shared memory that a program can have on the smallest of the sm_8x parts."""

_COMPILE: Final = """
import importlib, json, pathlib, re, subprocess, sys, tempfile
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def stack(cubin):
    # Bytes of stack of a program, where registers are spilled to.
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = pathlib.Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return max(int(found) for found in re.findall(r"STACK:(\\d+)", usage))

for case in json.load(sys.stdin):
    kernel = getattr(importlib.import_module(case["module"]), case["kernel"])
    constants = case["constants"]
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else case["types"][name] for name in names}
    attributes = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in case["aligned"]}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": case["warps"], "num_stages": case["stages"]}
    built = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options=options)
    size = len(built.asm["cubin"])
    spilled = 0 if case["stack"] is None else stack(built.asm["cubin"])
    print(json.dumps({"case": case, "shared": built.metadata.shared, "bytes": size, "stack": spilled}))
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One specialisation of a kernel.

    Attributes:
        module: the name under ``drivetrain.kernels.triton_ops``.
        kernel: the name in the module.
        types: Triton's names ("*fp32", "*bf16", "i32", "fp32") of the arguments that are not compile-time constants.
        constants: values of those that are.
        aligned: arguments that are multiples of 16, as tensors and most strides are; without it loads are narrow and
            not pipelined, and need less shared memory than in use.
        warps, stages, capabilities: options of the compiler.
        stack: how many bytes of registers may be spilled; None for any number.
    """

    module: str
    kernel: str
    types: Mapping[str, str]
    constants: Mapping[str, object] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    warps: int = 4
    stages: int = 2
    capabilities: tuple[int, ...] = CAPABILITIES
    stack: int | None = None


@dataclass(frozen=True)
class Target:
    """What a test compiles for: one of `CAPABILITIES`, the first case of each kernel or ``all`` of them."""

    capability: int
    all: bool

    def __str__(self) -> str:
        return f"sm_{self.capability}{' all' if self.all else ''}"

    def cases(self, cases: Sequence[Case]) -> list[Case]:
        """Those of ``cases`` that are compiled."""
        fit = [case for case in cases if self.capability in case.capabilities]
        first = {(case.module, case.kernel): case for case in reversed(fit)}
        return fit if self.all else list(first.values())


def targets() -> list[object]:
    """Parameters of a test that calls `assert_compiles`: one on every change, the rest where tests are thorough."""
    usual, rest = Target(CAPABILITIES[0], False), [Target(one, True) for one in CAPABILITIES]
    return [
        pytest.param(usual, id=str(usual)),
        *(pytest.param(one, marks=pytest.mark.thorough, id=str(one)) for one in rest),
    ]


def assert_compiles(cases: Sequence[Case], target: Target) -> None:
    """Fail, with the compiler's words, unless every case compiles for a GPU and fits into its shared memory.

    Cases that are not for the target are left out.
    """
    wanted = target.cases(cases)
    work = [{**asdict(case), "module": f"drivetrain.kernels.triton_ops.{case.module}"} for case in wanted]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, str(target.capability)],
        input=json.dumps(work),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    built = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(built) == len(wanted)
    for one in built:
        assert one["bytes"] > 0
        assert one["shared"] <= SHARED_LIMIT, one
        assert one["stack"] <= (one["case"]["stack"] or 0), one

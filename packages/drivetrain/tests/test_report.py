"""What `drivetrain report` finds out, and that nothing that goes wrong on the way ends it."""

from __future__ import annotations

import io
import json
import platform
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from drivetrain import kernels
from drivetrain.engine import report
from drivetrain.engine.cli.report import merged, tables
from drivetrain.engine.cli.report import report as command
from drivetrain.engine.report import Fact, Report, Section, collect, guarded

TITLES = ("versions", "devices", "backends", "kernels")


def fail(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("the driver is upset\nand says more")


def facts(collected: Report, title: str) -> dict[str, Fact]:
    return {fact.name: fact for fact in collected.section(title).facts}


def run(*options: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(options))


@pytest.fixture(scope="module")
def collected() -> Report:
    return collect()


def test_versions(collected: Report) -> None:
    found = facts(collected, "versions")
    assert found["torch"].value == torch.__version__
    assert found["python"].value.startswith(platform.python_version())
    assert found["platform"].value == platform.platform()
    assert {"drivetrain", "drivetrain-comm", "drivetrain-kernels", "drivetrain-zero"} <= found.keys()
    for library in ("numpy", "safetensors", "pydantic"):
        assert found[library].value[0].isdigit()


def test_what_is_not_installed_is_said_to_be_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LIBRARIES", ("a-library-that-is-not-there",))
    assert facts(collect(), "versions")["a-library-that-is-not-there"] == Fact(
        name="a-library-that-is-not-there", value="no", reason="not installed; optional"
    )


def test_devices(collected: Report) -> None:
    found = facts(collected, "devices")
    assert found["cpu"].value not in ("", "unknown")
    assert int(found["cores"].value.split(",")[0]) >= 1
    assert "GiB" in found["memory"].value
    assert f"torch uses {torch.backends.cpu.get_cpu_capability()}" in found["instruction sets"].value
    if torch.cuda.is_available():
        assert torch.cuda.get_device_name(0) in found["gpu 0"].value
    else:
        assert found["gpu"].value == "none"
        assert found["gpu"].reason


def test_backends_and_kernels(collected: Report) -> None:
    backends = facts(collected, "backends")
    assert list(backends) == ["gloo", "nccl", "mpi", "shared memory"]
    for name, there in (
        ("gloo", torch.distributed.is_gloo_available()),
        ("nccl", torch.distributed.is_nccl_available()),
        ("shared memory", kernels.shared_memory_refusal() == ""),
    ):
        assert backends[name].value == ("yes" if there else "no")
        assert bool(backends[name].reason) is not there
    assert [(fact.name, fact.value) for fact in collected.section("kernels").facts] == [
        (f"{status.op} on {status.device}", status.implementation) for status in kernels.available()
    ]


def test_json_has_every_fact_and_nothing_else() -> None:
    result = run("--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert tuple(data) == TITLES
    assert data["versions"]["torch"] == {"value": str(torch.__version__), "reason": ""}
    for title in TITLES:
        assert data[title]
        for fact in data[title].values():
            assert set(fact) == {"value", "reason"}


def test_the_tables_show_every_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = run()
    assert result.exit_code == 0
    for text in (*TITLES, str(torch.__version__), "gloo"):
        assert text in result.stdout


def test_shared_memory_that_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_SHARED_MEMORY", "0")
    reason = "DRIVETRAIN_SHARED_MEMORY=0 switches it off; gloo is used"
    assert facts(collect(), "backends")["shared memory"] == Fact(name="shared memory", value="no", reason=reason)


PROBES = [
    ("platform.platform", "versions", "platform"),
    ("importlib.metadata.version", "versions", "versions"),
    ("drivetrain.engine.report.cpu_model", "devices", "cpu"),
    ("drivetrain.engine.report.available_cores", "devices", "cores"),
    ("torch.backends.cpu.get_cpu_capability", "devices", "instruction sets"),
    ("drivetrain.engine.report._filesystem_size", "devices", "shared memory"),
    ("torch.cuda.is_available", "devices", "devices"),
    ("torch.distributed.is_gloo_available", "backends", "gloo"),
    ("torch.distributed.is_available", "backends", "backends"),
    ("drivetrain.kernels.shared_memory_refusal", "backends", "shared memory"),
    ("drivetrain.kernels.available", "kernels", "kernels"),
]


@pytest.mark.parametrize(("probe", "title", "name"), PROBES)
def test_a_probe_that_fails_costs_one_line(
    probe: str, title: str, name: str, monkeypatch: pytest.MonkeyPatch, collected: Report
) -> None:
    if probe.endswith("_filesystem_size") and not Path("/dev/shm").is_dir():
        pytest.skip("this system has no /dev/shm")
    with monkeypatch.context() as patch:
        patch.setattr(probe, fail)
        result = collect()
    assert facts(result, title)[name] == Fact(name=name, value="unknown", reason="RuntimeError: the driver is upset")
    stable = [fact for other in TITLES if other != title for fact in result.section(other).facts]
    before = [fact for other in TITLES if other != title for fact in collected.section(other).facts]
    volatile = {"memory"}  # what is free changes from moment to moment
    assert [fact for fact in stable if fact.name not in volatile] == [
        fact for fact in before if fact.name not in volatile
    ]


def test_a_gpu_that_fails_does_not_hide_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu(index: int) -> str:
        if index == 0:
            raise RuntimeError("GPU is lost")
        return "a good GPU"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(report, "_gpu", gpu)
    found = facts(collect(), "devices")
    assert found["gpu 0"] == Fact(name="gpu 0", value="unknown", reason="RuntimeError: GPU is lost")
    assert found["gpu 1"].value == "a good GPU"


def test_the_command_ends_well_when_everything_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for probe, _, _ in PROBES:
            patch.setattr(probe, fail)
        result = run("--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert tuple(data) == TITLES
    assert data["kernels"] == {"kernels": {"value": "unknown", "reason": "RuntimeError: the driver is upset"}}


def test_an_error_without_a_text_is_named() -> None:
    def probe() -> str:
        raise KeyError

    assert guarded("x", probe) == Fact(name="x", value="unknown", reason="KeyError")


def test_facts_alike_share_a_line() -> None:
    same = [Fact(name=name, value="torch", reason="no kernel") for name in ("a", "b")]
    plain = [Fact(name=name, value="yes") for name in ("c", "d")]
    assert merged([*same, *plain]) == [Fact(name="a, b", value="torch", reason="no kernel"), *plain]


def test_brackets_in_a_reason_are_shown() -> None:
    fact = Fact(name="[red]x", value="no", reason="pip install 'package[extra]'")
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as capture:
        for table in tables(Report(sections=(Section(title="t", facts=(fact,)),))):
            console.print(table)
    assert "[red]x" in capture.get()
    assert "pip install 'package[extra]'" in capture.get()

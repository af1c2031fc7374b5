"""The command line: what it lists, what it loads, and `drivetrain checkpoint`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from drivetrain.engine.checkpoint import save
from drivetrain.engine.cli.main import COMMANDS, application, installed_version
from drivetrain.engine.cli.sizes import binary_bytes, human_bytes, parse_bytes
from drivetrain.zero import FlatSlice


@pytest.fixture(autouse=True)
def _wide_and_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def run(*arguments: object) -> Any:
    given = [str(argument) for argument in arguments]
    return CliRunner().invoke(application(given), given, prog_name="drivetrain")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


# ------------------------------------------------------------------------------------------------------------ commands


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_command(flag: str) -> None:
    result = run(flag)
    assert result.exit_code == 0
    assert set(COMMANDS) == {"run", "check", "schema", "checkpoint", "report", "io"}
    for name, entry in COMMANDS.items():
        assert any(name in line and entry.help in line for line in result.output.splitlines()), name


def test_no_command_shows_the_help() -> None:
    result = run()
    assert result.exit_code == 2
    assert COMMANDS["run"].help in result.output


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_a_help(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0, result.output
    assert f"Usage: drivetrain {name}" in result.output


def test_an_unknown_command_is_a_usage_error() -> None:
    result = run("trian")
    assert result.exit_code == 2
    assert "No such command 'trian'" in result.output


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"drivetrain {installed_version()}\n")


def test_the_command_line_is_there_without_torch() -> None:
    """So that `--help` answers at once."""
    done = python(
        "import sys\n"
        "import drivetrain.engine.cli as cli\n"
        "assert 'torch' not in sys.modules, 'after the import'\n"
        "try:\n"
        "    cli.main(['--help'])\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules), 'after --help'\n"
    )
    assert done.returncode == 0, done.stderr
    assert "checkpoint" in done.stdout


# ---------------------------------------------------------------------------------------------------------- checkpoint


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"embed.weight": torch.full((5, 3), value), "norm.weight": torch.full((3,), value)}


def write(directory: Path, tag: str, value: float, **more: Any) -> None:
    tensors = {
        f"model/{name}": FlatSlice(data=tensor.reshape(-1), offset=0, shape=tensor.shape)
        for name, tensor in weights(value).items()
    }
    save(directory, tag, tensors=tensors, aliases={"model/head.weight": "model/embed.weight"}, **more)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two checkpoints of 18 numbers each."""
    write(tmp_path / "run", "global_step2", 2.0)
    write(tmp_path / "run", "global_step10", 10.0, metadata={"flags": [True], "note": "[red]"})
    return tmp_path / "run"


def damage(checkpoint: Path) -> Path:
    """Flip a bit in the last of the tensors' bytes."""
    path = next(path for path in sorted(checkpoint.rglob("*")) if path.suffix not in (".json", "") and path.is_file())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return path


def test_list_shows_the_oldest_first_and_marks_the_latest(saved: Path) -> None:
    result = run("checkpoint", "list", saved)
    assert result.exit_code == 0
    header, first, second = (line.split() for line in result.output.splitlines())
    assert header == ["tag", "created", "ranks", "tensors", "size"]
    assert first[0] == "global_step2"
    assert "latest" not in first
    assert (second[0], second[-1]) == ("global_step10", "latest")


def test_list_as_json(saved: Path) -> None:
    first, second = json.loads(run("checkpoint", "list", saved, "--json").output)
    assert first["tag"] == "global_step2"
    assert first["path"] == str(saved / "global_step2")
    assert (first["latest"], second["latest"]) == (False, True)
    assert (first["world_size"], first["tensors"], first["fault"]) == (1, 2, None)
    assert first["bytes"] >= 18 * 4


def test_list_of_an_empty_folder_and_of_none(tmp_path: Path) -> None:
    result = run("checkpoint", "list", tmp_path)
    assert (result.exit_code, result.output) == (0, f"no checkpoints in {tmp_path}\n")
    result = run("checkpoint", "list", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert result.output == f"drivetrain checkpoint: checkpoint directory {tmp_path / 'nowhere'} does not exist\n"


def test_list_tells_of_a_checkpoint_that_can_not_be_loaded(saved: Path) -> None:
    (saved / "global_step2" / "manifest.json").write_text("{")
    result = run("checkpoint", "list", saved)
    assert result.exit_code == 1
    assert "manifest.json" in result.output
    assert [bool(entry["fault"]) for entry in json.loads(run("checkpoint", "list", saved, "--json").output)] == [
        True,
        False,
    ]


def test_verify_reads_the_latest_or_the_one_that_is_named(saved: Path) -> None:
    result = run("checkpoint", "verify", saved)
    assert result.exit_code == 0
    assert result.output.startswith("global_step10: all ")
    assert result.output.endswith("are as they were written\n")
    assert run("checkpoint", "verify", saved, "--tag", "global_step2").output.startswith("global_step2: all ")


def test_verify_finds_a_bit_that_flipped(saved: Path) -> None:
    path = damage(saved / "global_step10")
    result = run("checkpoint", "verify", saved)
    assert result.exit_code == 1
    fault, verdict = result.output.splitlines()
    assert path.name in fault
    assert verdict == "global_step10: 1 fault; do not load it"
    assert run("checkpoint", "verify", saved, "-t", "global_step2").exit_code == 0


def test_verify_tells_a_broken_checkpoint_from_none(saved: Path) -> None:
    (saved / "global_step10" / "manifest.json").write_text("{")
    broken = run("checkpoint", "verify", saved)
    assert broken.exit_code == 1
    assert "manifest.json" in broken.output
    missing = run("checkpoint", "verify", saved, "--tag", "global_step3")
    assert missing.exit_code == 2
    assert "checkpoint 'global_step3' is not in" in missing.output
    assert "global_step2" in missing.output  # what there is instead


def test_inspect_shows_all_of_it_with_brackets_kept(saved: Path) -> None:
    result = run("checkpoint", "inspect", saved)
    assert result.exit_code == 0
    lines = [line.split() for line in result.output.splitlines()]
    assert ["tag", "global_step10"] in lines
    assert ["path", str(saved / "global_step10")] in lines
    assert ["aliases", "model/head.weight", "->", "model/embed.weight"] in lines
    assert ["model/embed.weight", "5", "x", "3", "float32", "60", "B"] in lines
    assert ["model/norm.weight", "3", "float32", "12", "B"] in lines
    assert '{"flags": [true], "note": "[red]"}' in result.output


def test_inspect_as_json(saved: Path) -> None:
    data = json.loads(run("checkpoint", "inspect", saved, "--tag", "global_step10", "--json").output)
    assert data["tag"] == "global_step10"
    assert data["world_size"] == 1
    assert data["metadata"] == {"flags": [True], "note": "[red]"}
    assert data["aliases"] == {"model/head.weight": "model/embed.weight"}
    assert data["tensors"] == {
        "model/embed.weight": {"shape": [5, 3], "dtype": "float32"},
        "model/norm.weight": {"shape": [3], "dtype": "float32"},
    }


def test_export_writes_the_weights(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("checkpoint", "export", saved, out, "--tag", "global_step2", "--dtype", "bf16")
    assert (result.exit_code, result.output) == (0, f"2 tensors, 36 B, in 1 file: {out}\n")
    loaded = safetensors.torch.load_file(out / "model.safetensors")
    assert loaded.keys() == weights(2.0).keys()
    for name, tensor in weights(2.0).items():
        assert torch.equal(loaded[name], tensor.bfloat16()), name


def test_export_begins_a_new_file_beyond_the_size(saved: Path, tmp_path: Path) -> None:
    result = run("checkpoint", "export", saved, tmp_path / "out", "--max-shard-size", "0.06kB")
    assert result.exit_code == 0
    assert "in 2 files" in result.output
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--dtype", "int4"), "--dtype is 'int4', expected one of fp32, fp16, bf16"),
        (("--max-shard-size", "much"), "a size of 'much' is not understood"),
        (("--tag", "../etc"), "'../etc'"),
    ],
)
def test_export_refuses_in_words(saved: Path, tmp_path: Path, options: tuple[str, str], complaint: str) -> None:
    result = run("checkpoint", "export", saved, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert result.output.startswith("drivetrain checkpoint: ")
    assert complaint in result.output
    assert not (tmp_path / "out").exists()


def test_checkpoint_alone_shows_its_commands() -> None:
    result = run("checkpoint")
    assert result.exit_code == 2
    for name in ("list", "verify", "inspect", "export"):
        assert name in result.output


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 kB", 1500), ("2MiB", 2 << 20), (" 7 ", 7), ("1gib", 1 << 30)]
)
def test_sizes_that_are_understood(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "GB", "5 XB", "-1GB", "0.5", "1e9", "5GB more"])
def test_sizes_that_are_not(text: str) -> None:
    with pytest.raises(ValueError, match="is not understood"):
        parse_bytes(text)


def test_sizes_for_people() -> None:
    assert [human_bytes(size) for size in (0, 37, 999, 1000, 4_200_000, 999_960, 7.5e9, 2e12)] == [
        "0 B",
        "37 B",
        "999 B",
        "1.0 kB",
        "4.2 MB",
        "1.0 MB",
        "7.5 GB",
        "2.0 TB",
    ]
    assert [binary_bytes(size) for size in (4096, 1 << 20, 3 << 30, 1000)] == ["4 KiB", "1 MiB", "3 GiB", "1.0 kB"]

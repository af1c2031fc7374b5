"""`drivetrain run` as it is typed: real jobs, what their ranks see, and what the person sees when one fails.

Ranks that are killed are in `test_killed.py`. The launcher imports torch, which is slow: a job here answers several
questions, its ranks do not import torch, and what is refused before a job starts is asked for in this process.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from drivetrain.engine.cli.main import application
from drivetrain.engine.launch import (
    ErrorRecord,
    LaunchError,
    LaunchSpec,
    RankFailure,
    available_cores,
    bootstrap,
    default_nproc,
    describe,
    root_cause,
)
from drivetrain.engine.launch.failure import read_error
from drivetrain.engine.launch.host import cpu_quota, threads_per_rank
from drivetrain.engine.launch.plan import rank_environment
from drivetrain.engine.launch.relay import LineBuffer, Relay

PATIENCE = 60.0  # seconds in which a job must have ended: far more than one takes
NOTE = """
import json, os, sys
from pathlib import Path

def note(unused: int = 0):
    rank = os.environ["RANK"]
    main = sys.modules["__main__"]
    seen = {"argv": sys.argv, "path": sys.path[0], "environment": dict(os.environ)}
    seen |= {"name": main.note.__module__, "file": main.__file__, "annotation": repr(main.note.__annotations__)}
    Path("seen").mkdir(exist_ok=True)
    Path("seen", rank + ".json").write_text(json.dumps(seen))
"""


def job(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`drivetrain run` in `folder`."""
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "RANK")}
    return subprocess.run(
        [sys.executable, "-m", "drivetrain.engine.cli", "run", *arguments],
        cwd=folder,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""} | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def here(*arguments: str) -> Any:
    """The same in this process, for what starts no rank."""
    given = ["run", *arguments]
    return CliRunner().invoke(application(given), given, prog_name="drivetrain")


def script(folder: Path, body: str, name: str = "train.py") -> str:
    (folder / name).write_text(body)
    return name


def seen(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "seen" / f"{rank}.json").read_text())
    return found


# ----------------------------------------------------------------------------------------------------------- real jobs


def test_a_job_that_ends_well(tmp_path: Path) -> None:
    """Its ranks see torchrun's variables and the arguments untouched; rank 0 alone is heard, every rank is logged."""
    name = script(
        tmp_path,
        NOTE
        + "note()\nprint('out of', os.environ['RANK'])\nsys.stderr.write('error of ' + os.environ['RANK'] + '\\n')\n",
    )
    arguments = ["--help", "--nproc", "7", "a b", "$HOME", "${x}", "$", ""]
    done = job(tmp_path, "--nproc", "2", "--log-dir", "logs", name, *arguments, MARK="kept")
    assert (done.returncode, done.stdout) == (0, "out of 0\n")
    assert sorted(done.stderr.splitlines()) == ["[rank1] error of 1", "error of 0"]
    for rank in (0, 1):
        for stream, word in (("stdout", "out of"), ("stderr", "error of")):
            assert (tmp_path / "logs" / f"rank{rank}" / f"{stream}.log").read_text() == f"{word} {rank}\n"
        found = seen(tmp_path, rank)
        assert found["argv"] == [name, *arguments]
        assert found["path"] == str(tmp_path.resolve())
        assert found["name"] == "__main__"
        assert found["file"] == str(tmp_path / name)
        assert found["annotation"] == "{'unused': <class 'int'>}"  # no __future__ import of ours is in force
        environment = found["environment"]
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": str(max(1, available_cores() // 2)),
            "MARK": "kept",
        }
        assert {key: environment.get(key) for key in expected} == expected
        assert 1 <= int(environment["MASTER_PORT"]) <= 65535
    first, second = (seen(tmp_path, rank)["environment"] for rank in (0, 1))
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        assert first[name] == second[name]
    promised = rank_environment(LaunchSpec(target="x", nproc=2), 0, port=1, run_id="", environ={})
    assert promised.keys() <= first.keys()  # what --dry-run prints is what a rank gets


def test_an_exception_is_shown_once_with_its_rank(tmp_path: Path) -> None:
    body = "import os, time\n\ndef work():\n    raise ValueError('the [batch] is bad')\n\n"
    name = script(tmp_path, body + "if os.environ['RANK'] == '1':\n    work()\ntime.sleep(600)\n")
    done = job(tmp_path, "--nproc", "2", "--log-dir", "logs", name)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert done.stderr.startswith("drivetrain run: rank 1 failed:\nTraceback")
    assert done.stderr.count("ValueError: the [batch] is bad") == 1
    assert f'File "{(tmp_path / name).resolve()}", line 4, in work' in done.stderr
    for machinery in ("bootstrap", "runpy", "elastic", "ChildFailedError"):
        assert machinery not in done.stderr
    assert "(As a consequence: rank 0 was stopped)" in done.stderr
    assert "(The output of every rank is in logs.)" in done.stderr
    assert "ValueError: the [batch] is bad" in (tmp_path / "logs" / "rank1" / "stderr.log").read_text()


def test_a_module_whose_rank_leaves_with_a_status(tmp_path: Path) -> None:
    """Started as `python -m` would; the job's status is that of the rank. With --all-output every rank is heard."""
    package = tmp_path / "recipe"
    package.mkdir()
    script(package, "")
    (package / "__init__.py").touch()
    script(
        package,
        NOTE
        + "note()\nsys.stdout.write('hello\\n')\nif os.environ['RANK'] == '0':\n    sys.exit(3)\n",  # a line at once
        "fit.py",
    )
    done = job(tmp_path, "-n", "2", "--all-output", "-m", "recipe.fit", "--lr", "0.1", OMP_NUM_THREADS="5")
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()) == ["[rank1] hello", "hello"]
    assert done.stderr.startswith("drivetrain run: rank 0 failed:\n")
    assert "SystemExit: 3" in done.stderr
    found = seen(tmp_path, 1)
    assert found["argv"] == [str((package / "fit.py").resolve()), "--lr", "0.1"]
    assert found["path"] == str(tmp_path.resolve())
    assert found["environment"]["OMP_NUM_THREADS"] == "5"


def test_a_job_is_started_again_as_often_as_asked(tmp_path: Path) -> None:
    body = "import os\ncount = os.environ['TORCHELASTIC_RESTART_COUNT']\nprint('start', count, flush=True)\n"
    name = script(tmp_path, body + "if count == '0':\n    raise OSError('a bad moment')\n")
    done = job(tmp_path, "--max-restarts", "1", name)
    assert (done.returncode, done.stdout) == (0, "start 0\nstart 1\n")
    assert "OSError: a bad moment\nstarting all ranks again (1 of 1)\n" in done.stderr


def test_a_command_that_is_no_python(tmp_path: Path) -> None:
    done = job(tmp_path, "--no-python", "sh", "-c", 'echo "rank $RANK of $WORLD_SIZE"; exit 7')
    assert (done.returncode, done.stdout) == (7, "rank 0 of 1\n")
    assert "it ended with exit code 7 and left no Python exception behind" in done.stderr


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_missing_script_is_one_sentence(tmp_path: Path) -> None:
    script(tmp_path, "", "train.py")
    done = job(tmp_path, "tain.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "drivetrain run: the script tain.py does not exist. Did you mean train.py?\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--nproc", "0", "x.py"], "--nproc is 0, but it must be 1 or more: one rank is the smallest job."),
        (["--nnodes", "0", "x.py"], "--nnodes is 0, but it must be 1 or more: one node is the smallest job."),
        (["--max-restarts", "-1", "x.py"], "--max-restarts is -1, but it must be 0 or more: 0 means that"),
        (["--threads-per-rank", "0", "x.py"], "--threads-per-rank is 0, but it must be 1 or more"),
        (["--grace", "-1", "x.py"], "--grace is -1, but it must be 0 or more seconds."),
        (["--node-rank", "1", "x.py"], "--node-rank is 1, but with --nnodes 1 it must be between 0 and 0"),
        (["--master-port", "70000", "x.py"], "--master-port is 70000, but a port lies between 1 and 65535."),
        (["--nnodes", "2", "x.py"], "--nnodes is 2, but --master-addr is missing"),
        (["-m", "--no-python", "x"], "--module and --no-python contradict each other"),
        (["x.py"], "the script x.py does not exist. (Looked in "),
        (["-m", "no_such_package.sub"], "no module named 'no_such_package' is installed or lies in "),
        (["-m", "a/b.py"], "-m expects a module name such as package.module, not 'a/b.py'."),
        (["--no-python", "no-such-command"], "the command no-such-command is not an executable file"),
        (["--log-dir", "file", "train.py"], "--log-dir file is a file; name a folder."),
    ],
)
def test_what_can_not_be_started_is_refused_in_a_sentence(
    options: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "")
    (tmp_path / "file").touch()
    result = here(*options)
    assert result.exit_code == 2
    assert result.output.startswith(f"drivetrain run: {sentence}")
    assert result.output.count("\n") == 1


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert default_nproc() == 2
    result = here("--nproc", "3", script(tmp_path, ""))
    assert result.exit_code == 2
    assert "this machine has 2 GPUs and each rank takes its own. Use --nproc 2, or" in result.output


def test_a_port_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = here("--master-port", str(port), script(tmp_path, ""))
    assert result.exit_code == 2
    assert f"port {port} is in use by another program" in result.output
    assert "leave --master-port out and a free one is taken" in result.output


def test_a_script_is_needed() -> None:
    result = here()
    assert result.exit_code == 2
    assert "SCRIPT" in result.output


# ------------------------------------------------------------------------------------------------------------- dry run


def test_dry_run_prints_a_command_per_rank_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    name = script(tmp_path, "from pathlib import Path\nPath('started').touch()\n")
    result = here("--dry-run", "--nproc", "2", "--threads-per-rank", "3", name, "--text", "a 'b' $c")
    assert result.exit_code == 0
    head, advice, *commands = result.output.splitlines()
    assert head.startswith("# node 0 of 1: 2 ranks, of 2 in all.")
    assert advice.startswith("# To start them by hand")
    assert len(commands) == 2
    for rank, line in enumerate(commands):
        words = shlex.split(line)
        split = words.index(sys.executable)
        variables = dict(word.split("=", 1) for word in words[:split])
        assert (variables["RANK"], variables["WORLD_SIZE"], variables["OMP_NUM_THREADS"]) == (str(rank), "2", "3")
        assert words[split + 3 :] == ["script", name, "--text", "a 'b' $c"]
    assert not (tmp_path / "started").exists()


def test_dry_run_of_a_second_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    nodes = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "host0"]
    result = here("--dry-run", *nodes, "--nproc", "2", script(tmp_path, ""))
    assert result.exit_code == 0
    head, _, *commands = result.output.splitlines()
    assert head.startswith("# node 1 of 2: 2 ranks, of 4 in all.")
    for rank, line in zip((2, 3), commands, strict=True):
        expected = (
            f"RANK={rank} WORLD_SIZE=4 LOCAL_RANK={rank - 2} LOCAL_WORLD_SIZE=2 MASTER_ADDR=host0 MASTER_PORT=29500 "
        )
        assert line.startswith(expected)
        assert "GLOO_SOCKET_IFNAME" not in line  # the loopback interface reaches no other node


# ---------------------------------------------------------------------------------------------------- causes of failure


def failure(
    rank: int, at: float, text: str | None = None, *, code: int = 1, stopped: float | None = None
) -> RankFailure:
    error = None
    if text is not None:
        kind, _, message = text.partition(": ")
        error = ErrorRecord(type=kind, message=message, traceback=f"Traceback of {rank}\n", chain=(text,), time=at)
    return RankFailure(rank=rank, pid=1000 + rank, exit_code=code, alive_at=at, stopped_at=stopped, error=error)


LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:5"


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ([failure(0, 2.0, "ValueError: a"), failure(1, 1.0, "ValueError: b")], 1),
        ([failure(0, 1.0, LOST), failure(1, 2.0, code=-9)], 1),
        ([failure(0, 1.0, LOST), failure(1, 2.0, "ValueError: b")], 1),
        ([failure(0, 2.0, LOST), failure(1, 1.0, LOST)], 1),
        ([failure(0, 1.0, code=-15, stopped=1.0), failure(1, 2.0, code=5)], 1),
        ([failure(0, 3.0, "ValueError: while it ended", stopped=2.0), failure(1, 4.0, code=-9)], 1),
        ([failure(0, 1.0, "ValueError: a"), failure(1, 1.0, "ValueError: b")], 0),
    ],
)
def test_the_cause_is_told_from_its_consequences(failures: list[RankFailure], cause: int) -> None:
    assert root_cause(failures).rank == cause
    assert root_cause(failures[::-1]).rank == cause


def test_the_description_has_the_cause_in_full_and_the_others_in_a_line() -> None:
    others = [failure(rank, 2.0, code=-15, stopped=1.5) for rank in range(3, 9)]
    text = describe([failure(0, 1.2, LOST), failure(1, 1.0, "ValueError: b"), failure(2, 1.3, code=4), *others])
    assert text.splitlines() == [
        "rank 1 failed:",
        "Traceback of 1",
        "(As a consequence: rank 0 lost its connection; rank 2 ended with exit code 4; rank 3 was stopped; "
        "rank 4 was stopped; 4 more)",
    ]


def test_a_lost_peer_without_a_cause_is_explained() -> None:
    assert "did one leave before the others?" in describe([failure(0, 1.0, LOST)])
    assert "most likely shown on another node" in describe([failure(0, 1.0, LOST)], nnodes=2)


def test_the_status_of_a_signal_is_the_shell_s() -> None:
    assert failure(0, 1.0, code=-9).status == 137
    assert failure(0, 1.0, code=3).status == 3
    assert "was killed by SIGKILL (often the out-of-memory killer" in describe([failure(0, 1.0, code=-9)])


# ----------------------------------------------------------------------------------------------------------- bootstrap


def as_rank(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A rank alone, as the launcher starts it."""
    return subprocess.run(
        [sys.executable, "-u", bootstrap.__file__, *arguments],
        cwd=folder,
        env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_script_may_start_processes_that_know_its_classes(tmp_path: Path) -> None:
    body = """
import multiprocessing
class Batch: pass
def name(batch): return type(batch).__name__
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(name, (Batch(),)))
"""
    done = as_rank(tmp_path, "script", script(tmp_path, body))
    assert (done.returncode, done.stdout, done.stderr) == (0, "Batch\n", "")
    assert read_error(tmp_path / "error.json") is None


def test_a_folder_with_a_main_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    script(tmp_path / "recipe", "import sys, part\nprint(sys.argv[1:], part.__name__)\n", "__main__.py")
    script(tmp_path / "recipe", "", "part.py")
    done = as_rank(tmp_path, "script", "recipe", "a")
    assert (done.returncode, done.stdout) == (0, "['a'] part\n")


def test_an_error_record_begins_in_the_script_and_has_the_chain(tmp_path: Path) -> None:
    body = "try:\n    {}['lr']\nexcept KeyError as error:\n    raise ValueError('no rate') from error\n"
    done = as_rank(tmp_path, "script", script(tmp_path, body))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    record = read_error(tmp_path / "error.json")
    assert record is not None
    assert (record.type, record.message, record.exit) == ("ValueError", "no rate", None)
    assert record.chain == ("ValueError: no rate", "KeyError: 'lr'")
    assert "bootstrap" not in record.traceback
    assert record.traceback.endswith("ValueError: no rate\n")


def test_a_syntax_error_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    assert as_rank(tmp_path, "script", script(tmp_path, "x = (1\n")).returncode == 1
    record = read_error(tmp_path / "error.json")
    assert record is not None
    assert record.type == "SyntaxError"
    assert record.traceback.startswith(f'  File "{tmp_path / "train.py"}", line 1')


def test_an_exit_with_words_says_them(tmp_path: Path) -> None:
    done = as_rank(tmp_path, "script", script(tmp_path, "import sys\nsys.exit('no data')\n"))
    assert (done.returncode, done.stderr) == (1, "no data\n")
    record = read_error(tmp_path / "error.json")
    assert record is not None
    assert (record.type, record.exit) == ("SystemExit", "no data")


def test_an_error_file_that_is_none_is_no_error(tmp_path: Path) -> None:
    for content in ("", "[]", "{}", '{"message": {}}'):
        (tmp_path / "error.json").write_text(content)
        assert read_error(tmp_path / "error.json") is None
    (tmp_path / "error.json").write_text('{"message": "ValueError: plain"}')
    record = read_error(tmp_path / "error.json")
    assert record is not None
    assert (record.type, record.message) == ("ValueError", "plain")


# --------------------------------------------------------------------------------------------------------- small parts


def test_cores_respect_a_container_s_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert cpu_quota(tmp_path) == 0.5
    assert available_cores(tmp_path) == 1
    assert [threads_per_rank(nproc, 8) for nproc in (1, 3, 8, 20)] == [8, 2, 1, 1]


def test_a_spec_refuses_in_code_too() -> None:
    with pytest.raises(LaunchError, match="--nproc is 0"):
        LaunchSpec(target="x.py", nproc=0)
    spec = LaunchSpec(target="x.py", nproc=4, nnodes=3, node_rank=2, master_addr="host0")
    assert (spec.world_size, spec.rank_of(1)) == (12, 9)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_reach_the_console_whole_behind_the_rank(size: int) -> None:
    data = b"one\ntwo\r\n10%\r50%\r100%\nlast"
    buffer = LineBuffer(prefix=b"[rank1] ")
    shown = b"".join(buffer.feed(data[at : at + size]) for at in range(0, len(data), size))
    assert shown + buffer.flush() == b"[rank1] one\n[rank1] two\n[rank1] 100%\n[rank1] last\n"
    assert buffer.flush() == b""
    assert LineBuffer().feed(b"half a li") == b"half a li"


def test_the_relay_shows_what_is_written_last(tmp_path: Path) -> None:
    shown: list[bytes] = []
    collect: Callable[[bytes], None] = shown.append
    with Relay(tmp_path) as relay:
        path = relay.open("rank1.stdout", show=collect, prefix="> ", log=tmp_path / "log")
        assert relay.open("rank1.stdout") == path
        with open(path, "wb", buffering=0) as pipe:
            pipe.write(b"a\nb")
        deadline = time.monotonic() + PATIENCE
        while not shown and time.monotonic() < deadline:
            time.sleep(0.005)
        assert shown == [b"> a\n"]
    assert shown == [b"> a\n", b"> b\n"]
    assert (tmp_path / "log").read_bytes() == b"a\nb"

"""How a job is ended from outside, what it leaves behind (nothing), and jobs of several nodes.

The ranks here do not import torch. Several nodes are several launchers on this machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from drivetrain.engine.launch import LaunchError, LaunchSpec
from drivetrain.engine.launch.rendezvous import Roster, listen

PATIENCE = 60.0  # seconds in which anything must have happened: far more than it takes
NOTE_PID = "import os, signal, subprocess, sys, threading, time\nfrom pathlib import Path\nrank = os.environ['RANK']\n"
NOTE_PID += "def note(name, pid):\n    Path(name + '.part').write_text(str(pid)); os.rename(name + '.part', name)\n"


def start(folder: Path, *arguments: str, body: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(NOTE_PID + body)
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "RANK")}
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "drivetrain.engine.cli", "run", *arguments, "train.py"],
        cwd=folder,
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def disposed(signal_name: str, disposition: str) -> tuple[str, ...]:
    """A prefix of a command, which then starts with that signal ignored (SIG_IGN), as under nohup, or not (SIG_DFL)."""
    change = f"signal.signal(signal.{signal_name}, signal.{disposition})"
    return sys.executable, "-c", f"import os, signal, sys; {change}; os.execv(sys.argv[1], sys.argv[1:])"


@contextlib.contextmanager
def ended(launcher: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A launcher that does not outlive its test."""
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            launcher.terminate()
        launcher.communicate(timeout=PATIENCE)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def pid_in(file: Path) -> int:
    wait_for(file.exists, str(file))
    return int(file.read_text())


def runs(pid: int) -> bool:
    """Whether a process is there and is not merely waiting to be reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    if not Path("/proc/self/stat").exists():
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -------------------------------------------------------------------------------------------------------------- signals


def test_ctrl_c_ends_ranks_that_will_not_and_what_they_started(tmp_path: Path) -> None:
    """Rank 0 raises KeyboardInterrupt; rank 1 ignores all signals that can be ignored; both have children."""
    body = (
        "if rank == '1':\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "note('child' + rank, child.pid)\n"
        "note('rank' + rank, os.getpid())\n"
        "try:\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', rank, flush=True)\n"
        "    raise\n"
    )
    prefix = disposed("SIGINT", "SIG_DFL")  # shells start what runs in the background with it ignored
    with ended(start(tmp_path, "--nproc", "2", "--grace", "1", body=body, prefix=prefix)) as launcher:
        pids = [pid_in(tmp_path / name) for name in ("child0", "child1", "rank0", "rank1")]
        launcher.send_signal(signal.SIGINT)
        out, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 128 + signal.SIGINT
    assert out == "interrupted 0\n"
    assert err == "drivetrain run: stopped by SIGINT; all ranks have ended\n"
    assert not [pid for pid in pids if runs(pid)]


@pytest.mark.thorough
def test_a_rank_that_failed_but_does_not_end_is_ended_and_shown(tmp_path: Path) -> None:
    """Its main thread raised; another thread keeps the process. Its child goes too."""
    body = (
        "child = subprocess.Popen(['sleep', '600'])\n"
        "note('child' + rank, child.pid)\n"
        "if rank == '1':\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "    raise LookupError('no such batch')\n"
        "time.sleep(600)\n"
    )
    with ended(start(tmp_path, "--nproc", "2", "--grace", "0.5", body=body)) as launcher:
        _, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 1
    assert err.startswith("drivetrain run: rank 1 failed:\nTraceback")
    assert "LookupError: no such batch\n(As a consequence: rank 0 was stopped)\n" in err
    assert not [rank for rank in (0, 1) if runs(pid_in(tmp_path / f"child{rank}"))]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_ranks_end_when_the_launcher_is_killed(tmp_path: Path) -> None:
    with ended(start(tmp_path, body="note('rank', os.getpid())\ntime.sleep(600)\n")) as launcher:
        rank = pid_in(tmp_path / "rank")
        launcher.kill()
        wait_for(lambda: not runs(rank), "the rank to end")


@pytest.mark.thorough
def test_a_job_under_nohup_survives_its_terminal(tmp_path: Path) -> None:
    body = "note('rank', os.getpid())\nwhile not Path('go').exists():\n    time.sleep(0.02)\nprint('done')\n"
    with ended(start(tmp_path, body=body, prefix=disposed("SIGHUP", "SIG_IGN"))) as launcher:
        pid_in(tmp_path / "rank")
        launcher.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        out, err = launcher.communicate(timeout=PATIENCE)
    assert (launcher.returncode, out, err) == (0, "done\n", "")


# -------------------------------------------------------------------------------------------------------------- output


@pytest.mark.thorough
def test_a_progress_bar_of_another_rank_comes_as_its_last_state(tmp_path: Path) -> None:
    body = (
        "if rank == '1':\n"
        "    for step in range(1000):\n"
        "        sys.stderr.write(f'\\rstep {step}')\n"
        "    sys.stderr.write('\\nlast words')\n"
    )
    with ended(start(tmp_path, "--nproc", "2", body=body)) as launcher:
        out, err = launcher.communicate(timeout=PATIENCE)
    assert (launcher.returncode, out) == (0, "")
    assert err == "[rank1] step 999\n[rank1] last words\n"


# ------------------------------------------------------------------------------------------------------- several nodes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def test_two_nodes_are_one_job_and_a_failure_on_one_ends_both(tmp_path: Path) -> None:
    """Node 1 waits for node 0. Rank 2 fails once all four ranks run; node 0 hears of it as a lost connection."""
    port = str(free_port())
    body = (
        "note('rank' + rank, os.getpid())\n"
        "while not all(Path(f'rank{other}').exists() for other in range(int(os.environ['WORLD_SIZE']))):\n"
        "    time.sleep(0.02)\n"
        "names = ('LOCAL_RANK', 'GROUP_RANK', 'MASTER_PORT')\n"
        "sys.stdout.write(' '.join(os.environ[name] for name in names) + '\\n')\n"  # a line at once
        "sys.stdout.flush()\n"
        "if rank == '2':\n"
        "    raise ValueError('bad shard')\n"
        "while 'rank2' in os.listdir() and Path('/proc', Path('rank2').read_text()).exists():\n"
        "    time.sleep(0.02)\n"
        "if os.environ['GROUP_RANK'] == '0':\n"
        "    raise RuntimeError('Connection closed by peer')\n"
        "time.sleep(600)\n"
    )
    nodes = ["--nproc", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    with ended(start(tmp_path, *nodes, "--node-rank", "1", "--all-output", body=body)) as second:
        with ended(start(tmp_path, *nodes, "--node-rank", "0", "--all-output", body=body)) as first:
            _, err = second.communicate(timeout=PATIENCE)
            out0, err0 = first.communicate(timeout=PATIENCE)
    assert sorted(out0.splitlines()) == [f"0 0 {port}", f"[rank1] 1 0 {port}"]
    assert (first.returncode, second.returncode) == (1, 1)
    assert "rank 2 failed:\nTraceback" in err
    assert "ValueError: bad shard" in err
    assert "the cause is most likely shown on another node" in err0


def node(rank: int, *, port: int, nproc: int = 1, nnodes: int = 2) -> LaunchSpec:
    return LaunchSpec(target="x", nproc=nproc, nnodes=nnodes, node_rank=rank, master_addr="127.0.0.1", master_port=port)


@contextlib.contextmanager
def first_node(port: int, nnodes: int = 2, timeout: float = PATIENCE) -> Iterator[list[BaseException]]:
    """Node 0 joining in a thread; yields what it raised, complete after the block."""
    raised: list[BaseException] = []
    spec = node(0, port=port, nnodes=nnodes)
    roster = Roster(spec, "test", listener=listen(spec), timeout=timeout)

    def join() -> None:
        try:
            roster.next_rendezvous()
        except LaunchError as error:
            raised.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    try:
        yield raised
    finally:
        thread.join(PATIENCE)


def await_joined(port: int, rank: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    store.wait([f"roster/joined/{rank}"], timedelta(seconds=PATIENCE))


def test_a_node_of_another_shape_or_the_same_number_is_refused() -> None:
    port = free_port()
    with first_node(port, nnodes=3):
        await_joined(port, 0)  # the first to come says how many ranks a node has
        with pytest.raises(
            LaunchError, match="node 1 was started for 3 nodes of 4 ranks, but the job has 3 nodes of 1"
        ):
            Roster(node(1, port=port, nproc=4, nnodes=3), "test").next_rendezvous()
        with pytest.raises(LaunchError, match="two launchers joined as --node-rank 0"):
            Roster(node(0, port=port, nnodes=3), "test").next_rendezvous()
        others = [Roster(node(rank, port=port, nnodes=3), "test") for rank in (1, 2)]
        threads = [threading.Thread(target=roster.next_rendezvous) for roster in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)


def test_nodes_that_do_not_come_are_named() -> None:
    with first_node(free_port(), nnodes=3, timeout=0.1) as raised:
        pass
    assert "of 3 nodes, these did not join within 0.1 s: 1, 2." in str(raised[0])
    told: list[str] = []
    port = free_port()
    alone = Roster(node(1, port=port), "test", timeout=0.3, notice=told.append)
    with pytest.raises(LaunchError, match=rf"node 1 could not reach node 0 at 127.0.0.1:{port} within 0.3 s"):
        alone.next_rendezvous()
    assert told == [f"waiting for node 0 at 127.0.0.1:{port}"]

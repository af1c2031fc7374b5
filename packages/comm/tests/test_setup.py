from __future__ import annotations

import os
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drivetrain.comm import Mesh, World, all_gather_object, all_reduce, init, shutdown
from drivetrain_testkit import RankError, run_ranks

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not. Start the script with torchrun"),
        ({"RANK": "1"}, "RANK=1 is set but WORLD_SIZE is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not in 0..1 \\(WORLD_SIZE=2\\)"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK='zero' is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "rank 0 of 2: MASTER_ADDR is not set, so the ranks cannot find each other"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "rank 0 of 2: MASTER_PORT is not set"),
    ],
)
def test_an_incomplete_environment(env: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=text):
        init()
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("backend", "device", "error", "text"),
    [
        ("glue", None, ValueError, "backend 'glue' is not known to torch.distributed. Known: .*gloo"),
        ("gloo", "cuda", ValueError, "backend 'gloo' moves CPU tensors here, but the device is cuda:0"),
        ("nccl", "cpu", ValueError, "backend 'nccl' moves CUDA tensors, but .* Use backend='gloo' for the CPU"),
        ("mpi", "cpu", RuntimeError, "backend 'mpi' is not in this build of torch"),
    ],
)
def test_a_backend_that_does_not_fit(
    backend: str, device: str | None, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(error, match=text):
        init(backend=backend, device=device)
    assert not dist.is_initialized()


def alone(rank: int, world_size: int) -> None:
    for name in LAUNCHER:
        os.environ.pop(name, None)
    world = init(device="cpu")
    assert world == World(
        rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"), backend="gloo", timeout=None
    )
    assert init() is world
    if sys.platform.startswith("linux"):
        assert all(address == "0100007F" for address in listening_addresses())
    axis = Mesh.create(world).axis("shard")
    tensor = torch.ones(3)
    all_reduce(tensor, axis).wait()
    assert dist.get_world_size(axis.group) == 1
    shutdown()
    shutdown()
    assert not dist.is_initialized()
    again = init(timeout=timedelta(seconds=5))
    assert again.timeout == timedelta(seconds=5)
    shutdown()


def listening_addresses() -> list[str]:
    """The IPv4 addresses, as the kernel writes them, on which this process listens."""
    links = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink()]
    own = {m.group(1) for link in links if (m := re.fullmatch(r"socket:\[(\d+)\]", link))}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in own]


def among_others(rank: int, world_size: int) -> tuple[int, int, int, int, str, str]:
    world = init()
    result = (world.rank, world.size, world.local_rank, world.local_size, str(world.device), world.backend)
    with pytest.raises(ValueError, match=rf"rank {rank}: the running process group uses the backend 'gloo'.*'nccl'"):
        init(backend="nccl")
    with pytest.raises(ValueError, match=rf"rank {rank}: the running process group works on cpu.*meta"):
        init(device="meta")
    assert init(backend="gloo", device="cpu") is world
    shutdown()
    return result


def with_a_group_of_somebody_else(rank: int, world_size: int) -> list[int]:
    dist.init_process_group("gloo")
    world = init()
    gathered = all_gather_object(world.rank, Mesh.create(world).axis("shard"))
    shutdown()  # not ours to destroy
    assert dist.is_initialized()
    dist.destroy_process_group()
    return gathered


def nobody_comes(rank: int, world_size: int) -> None:
    os.environ["WORLD_SIZE"] = "2"
    init(timeout=timedelta(seconds=2))


def test_alone_in_one_process() -> None:
    run_ranks(alone, 1)


def test_among_others() -> None:
    assert run_ranks(among_others, 2) == [(r, 2, r, 2, "cpu", "gloo") for r in (0, 1)]


def test_with_a_group_of_somebody_else() -> None:
    assert run_ranks(with_a_group_of_somebody_else, 2) == [[0, 1]] * 2


def test_the_others_do_not_come() -> None:
    with pytest.raises(
        RankError, match=r"rank 0 of 2: the ranks did not all meet at 127.0.0.1:\d+. Check that 2 ranks"
    ):
        run_ranks(nobody_comes, 1)


def test_importing_is_light() -> None:
    """Nothing beyond torch and its distributed package is imported."""
    import subprocess

    code = (
        "import sys, torch.distributed.device_mesh; before = set(sys.modules); "
        "import drivetrain.comm; print(set(sys.modules) - before)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    names = {name for name in re.findall(r"'([\w.]+)'", out) if not name.startswith("drivetrain")}
    assert names <= {"json", "json.decoder", "json.encoder", "json.scanner", "_json", "socket", "_socket"}

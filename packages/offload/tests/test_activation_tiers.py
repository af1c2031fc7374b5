"""Budgets of memory, leaks, and what happens when a drive fails."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from drivetrain.kernels import instruction_sets
from drivetrain.offload import ActivationOptions, OffloadActivations
from drivetrain.offload.activation_tiers import Piece, SpillFiles

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native core is not built")

BYTES = 64 * 1024  # of one activation of `deep`
LAYERS = 24


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Deep(nn.Module):
    """Saves one activation per layer, of 64 KiB, and nothing else that is large."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(1.0 + layer / 100)) for layer in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale  # saves x
        return x


def deep(offload: OffloadActivations, *, backward: bool = True) -> Tensor:
    model = Deep()
    with offload:
        loss = model(torch.randn(128, 128).requires_grad_() * 1.0).sum()
    if backward:
        loss.backward()
    return loss


def options(place: Path, **more: Any) -> ActivationOptions:
    return ActivationOptions(**{"min_bytes": 4096, "nvme": (place,), **more})


def test_on_a_drive_little_stays_in_memory(tmp_path: Path) -> None:
    offload = OffloadActivations(options(tmp_path, host_capacity=0, in_flight=2 * BYTES, prefetch=3 * BYTES))
    loss = deep(offload, backward=False)
    offload.synchronize()
    gone = offload.statistics()
    assert gone.resident == 0
    assert gone.files == gone.to_files == LAYERS * BYTES
    assert gone.peak_resident <= 3 * BYTES  # on the way, and the one that is being saved
    loss.backward()
    back = offload.statistics()
    assert back.from_files == LAYERS * BYTES
    # read ahead, in use, and in the moment between two
    assert back.peak_resident <= 5 * BYTES
    assert back.peak_host <= 5 * BYTES
    assert (back.ready + back.late, back.surprises) == (LAYERS, 0)
    assert (back.resident, back.files) == (0, 0)
    assert back.peak_files == LAYERS * BYTES
    offload.close()


def test_without_read_ahead_everything_is_late(tmp_path: Path) -> None:
    offload = OffloadActivations(options(tmp_path, host_capacity=0, in_flight=BYTES, prefetch=0))
    loss = deep(offload, backward=False)
    offload.synchronize()
    loss.backward()
    found = offload.statistics()
    assert (found.ready, found.late) == (0, LAYERS)
    assert found.peak_resident <= 2 * BYTES


def test_the_latest_stay_in_memory(tmp_path: Path) -> None:
    """keep_bytes on the device, host_capacity in host memory, the rest in files."""
    offload = OffloadActivations(options(tmp_path, keep_bytes=4 * BYTES, host_capacity=6 * BYTES, force=True))
    loss = deep(offload, backward=False)
    offload.synchronize()
    found = offload.statistics()
    assert (found.resident, found.host, found.files) == (4 * BYTES, 6 * BYTES, (LAYERS - 10) * BYTES)
    loss.backward()
    found = offload.statistics()
    assert found.to_device == (LAYERS - 4) * BYTES
    assert found.from_files == (LAYERS - 10) * BYTES


@pytest.mark.parametrize("drives", [0, 1])
def test_budgets_of_host_memory_hold(tmp_path: Path, drives: int) -> None:
    chosen = options(
        tmp_path,
        force=True,
        host_capacity=5 * BYTES,
        in_flight=2 * BYTES,
        prefetch=3 * BYTES,
        nvme=(tmp_path,) * drives,
    )
    offload = OffloadActivations(chosen)
    for _ in range(3):
        deep(offload)
    offload.synchronize()
    found = offload.statistics()
    if drives:
        assert found.peak_host <= (5 + 2 + 3) * BYTES
        assert found.refused == 0
    else:
        assert found.peak_host == 5 * BYTES
        assert found.refused == 3 * (LAYERS - 5)
        assert found.to_files == 0
    offload.close()


def test_activations_larger_than_every_budget(tmp_path: Path) -> None:
    offload = OffloadActivations(options(tmp_path, host_capacity=1, in_flight=1, prefetch=1, force=True))
    loss = deep(offload, backward=False)
    offload.synchronize()
    loss.backward()
    found = offload.statistics()
    assert found.to_files == found.from_files == LAYERS * BYTES
    assert found.peak_host <= 3 * BYTES


def test_drives_serve_in_turn(tmp_path: Path) -> None:
    folders = [tmp_path / str(index) for index in range(3)]
    for folder in folders:
        folder.mkdir()
    files = SpillFiles(folders)
    pieces = [files.take(5000) for _ in range(6)]
    assert [(piece.file, piece.start) for piece in pieces] == [(0, 0), (1, 0), (2, 0), (0, 8192), (1, 8192), (2, 8192)]
    assert files.taken == 6 * 8192
    files.give_back(pieces[0])
    assert files.take(8192) == Piece(0, 0, 8192)
    data = [torch.full((5000,), index, dtype=torch.uint8) for index in range(1, 6)]
    for ticket in [files.write(piece, each) for piece, each in zip(pieces[1:], data, strict=True)]:
        ticket.wait()
    for piece, each in zip(pieces[1:], data, strict=True):
        found = torch.empty_like(each)
        files.read(piece, found).wait()
        assert torch.equal(found, each)
    files.close()


def test_files_have_no_name_and_their_space_is_given_back(tmp_path: Path) -> None:
    offload = OffloadActivations(options(tmp_path, host_capacity=0))
    loss = deep(offload, backward=False)
    assert list(tmp_path.iterdir()) == []
    assert len(open_files(tmp_path)) > 0
    offload.close()
    assert open_files(tmp_path) == []
    with pytest.raises(RuntimeError, match="closed before the graph's backward pass"):
        loss.backward()
    with pytest.raises(RuntimeError, match="is closed; make another one"):
        deep(offload)
    offload.close()
    # and without `close`
    dropped = OffloadActivations(options(tmp_path, host_capacity=0))
    deep(dropped)
    del dropped
    gc.collect()
    assert open_files(tmp_path) == []


def open_files(folder: Path) -> list[str]:
    """Descriptors of this process that lead to files in the folder."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith(str(folder)):
                found.append(f"/proc/self/fd/{number}")
        except OSError:
            pass  # the descriptor of the listing
    return found


# ---------------------------------------------------------------------------------------------------------------- leaks


def nothing_left(offload: OffloadActivations) -> None:
    gc.collect()
    offload.synchronize()
    found = offload.statistics()
    assert (found.resident, found.host, found.files) == (0, 0, 0)
    assert offload._store._mover.empty


@pytest.mark.parametrize("force", [False, True])
def test_a_graph_that_is_dropped_leaves_nothing(tmp_path: Path, force: bool) -> None:
    offload = OffloadActivations(options(tmp_path, host_capacity=4 * BYTES, in_flight=4 * BYTES, force=force))
    loss = deep(offload, backward=False)
    assert offload.statistics().files > 0
    del loss
    nothing_left(offload)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert ctx.saved_tensors[0].shape == gradient.shape
        raise ArithmeticError("in backward")


@pytest.mark.parametrize("force", [False, True])
def test_errors_in_forward_and_backward_leave_nothing(tmp_path: Path, force: bool) -> None:
    offload = OffloadActivations(options(tmp_path, host_capacity=4 * BYTES, in_flight=4 * BYTES, force=force))
    model = Deep()

    def forward(wrong: bool) -> Tensor:
        x = torch.randn(128, 128).requires_grad_()
        with offload:
            y = Failing.apply(model(x * 1.0))
            if wrong:
                raise ArithmeticError("in forward")
            return model(y).sum()

    with pytest.raises(ArithmeticError, match="in forward"):
        forward(True)
    nothing_left(offload)
    loss = forward(False)
    with pytest.raises(ArithmeticError, match="in backward"):
        loss.backward()
    del loss
    nothing_left(offload)
    # and it goes on
    deep(offload)
    nothing_left(offload)


def test_results_are_not_kept_alive_by_their_graph(tmp_path: Path) -> None:
    """A hook that holds a result holds its node, which holds the hook: only the collector would find that."""
    for more in ({"force": True}, {"force": True, "keep_bytes": 1 << 30}, {"min_bytes": 1 << 30}, {"host_capacity": 0}):
        offload = OffloadActivations(options(tmp_path, **more))
        gc.collect()
        gc.disable()
        try:
            x = torch.randn(128, 128, requires_grad=True)
            with offload:
                y = (x * 1.0).exp().sigmoid()
            storage = StorageWeakRef(y.untyped_storage())
            del y
            offload.synchronize()
            assert storage.expired()
            assert offload.statistics().resident == 0
        finally:
            gc.enable()


def test_an_address_that_serves_again_is_another_storage(tmp_path: Path) -> None:
    """Storages come and go at the same address, with the same version: what was saved of them are several tensors."""
    offload = OffloadActivations(options(tmp_path, force=True))
    scale = torch.ones((), requires_grad=True)
    total = torch.zeros(())
    with offload:
        for value in range(50):
            total = total + (torch.full((64, 64), float(value)) * scale).mean()
    assert offload.statistics().shared == 0
    total.backward()
    assert scale.grad is not None
    assert scale.grad.item() == sum(range(50))


# --------------------------------------------------------------------------------------------------------------- faults


def test_a_file_that_cannot_be_read_is_told_by_backward(tmp_path: Path) -> None:
    offload = OffloadActivations(options(tmp_path, host_capacity=0, prefetch=2 * BYTES))
    loss = deep(offload, backward=False)
    offload.synchronize()
    for descriptor in open_files(tmp_path):
        os.truncate(descriptor, 4 * BYTES)
    with pytest.raises(EOFError, match=rf"offloaded is lost.*read of {BYTES} bytes at offset \d+ of '{tmp_path}/act"):
        loss.backward()
    del loss
    nothing_left(offload)
    deep(offload)
    offload.close()


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={8 * BYTES}", "tmpfs", folder]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        yield folder
    finally:
        gc.collect()
        subprocess.run(["umount", folder], check=True)


def test_a_full_drive(small_drive: Path) -> None:
    offload = OffloadActivations(options(small_drive, host_capacity=0, in_flight=BYTES))
    with pytest.raises(OSError, match=r"offloaded is lost.*No space left") as caught:
        deep(offload)
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value.filename).startswith(str(small_drive))
    del caught
    try:
        nothing_left(offload)
    finally:
        offload.close()


LIMITED = """
    import resource, signal, sys
    import torch
    from drivetrain.offload import ActivationOptions, OffloadActivations

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    x = torch.randn(64, 1024).requires_grad_()
    offload = OffloadActivations(ActivationOptions(min_bytes=64, nvme=(sys.argv[1],), host_capacity=0))
    for late in (True, False):
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
        try:
            with offload:
                y = (x * 1.0).exp()
                if not late:
                    offload.synchronize()
                    y = y.exp()
            offload.synchronize()
            y.sum().backward()
        except OSError as error:
            print(error.errno, error)
        y = None
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    offload.synchronize()
    with offload:
        y = (x * 1.0).exp()
    y.sum().backward()
    offload.synchronize()
    print(torch.equal(x.grad, x.exp()), offload.statistics().files)
"""


def run(script: str, *arguments: Any) -> str:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    # Otherwise glibc takes to putting large tensors into its heap, from which it seldom gives anything back.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_write_that_fails_is_told_by_backward_or_the_next_save(tmp_path: Path) -> None:
    late, early, after = run(LIMITED, tmp_path).splitlines()
    for line in (late, early):
        assert line.startswith(f"{errno.EFBIG} ")
        assert "an activation that was offloaded is lost" in line
        assert "File too large" in line
        assert f"'{tmp_path}/activations-" in line
    assert after == "True 0"


MEASURED = """
    import sys
    import torch
    from torch import nn
    from drivetrain.offload import ActivationOptions, OffloadActivations

    torch.set_num_threads(1)

    def resident():
        with open("/proc/self/status") as status:
            return 1024 * int(next(line for line in status if line.startswith("VmHWM")).split()[1])

    scales = [torch.tensor(1.0 + layer / 100, requires_grad=True) for layer in range(40)]
    options = ActivationOptions(nvme=(sys.argv[1],), host_capacity=0, in_flight=16 << 20, prefetch=16 << 20)
    offload = OffloadActivations(options)
    with torch.no_grad():
        (torch.ones(8 << 20) * scales[0]).sum()
    x = torch.ones(2 << 20)
    before = resident()
    if sys.argv[2] == "offload":
        with offload:
            y = x
            for scale in scales:
                y = y * scale
            del x
    else:
        y = x
        for scale in scales:
            y = y * scale
    y.sum().backward()
    print(resident() - before, sum(scale.grad.double().item() for scale in scales))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured as Linux tells it")
def test_memory_of_the_process_falls(tmp_path: Path) -> None:
    """320 MiB of activations are saved."""
    plain, expected = run(MEASURED, tmp_path, "plain").split()
    offloaded, found = run(MEASURED, tmp_path, "offload").split()
    assert found == expected
    assert int(plain) > 200 << 20
    assert int(offloaded) < 100 << 20

"""`drivetrain io bench|tune` on tiny files, and how settings are chosen."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from drivetrain.engine.cli.main import application
from drivetrain.engine.config import load
from drivetrain.engine.file_speed import FileSetting, FileSpeed, TrialFile, best_of, file_system, grid, search
from drivetrain.kernels import instruction_sets

needs_core = pytest.mark.skipif(not instruction_sets(), reason="the native core is not built")


@pytest.fixture(autouse=True)
def _wide_and_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")


def run(*arguments: object) -> Any:
    given = [str(argument) for argument in arguments]
    return CliRunner().invoke(application(given), given, prog_name="drivetrain")


# ------------------------------------------------------------------------------------------------------------- bench


@needs_core
def test_bench_shows_rates_and_leaves_nothing_behind(tmp_path: Path) -> None:
    result = run("io", "bench", tmp_path, "--size", "1MiB", "--block-size", "64KiB", "--rounds", 2)
    assert result.exit_code == 0, result.output
    header, write, read, setting, *_ = (line.split() for line in result.output.splitlines())
    assert header == ["GB/s", "slowest", "fastest"]
    for name, line in (("write", write), ("read", read)):
        assert line[0] == name
        middle, slowest, fastest = map(float, line[1:])
        assert 0 <= slowest <= middle <= fastest
    assert " ".join(setting).startswith(f"{tmp_path}: blocks of 64 KiB, 32 in flight per thread, 1 thread, 1.0 MB by ")
    assert list(tmp_path.iterdir()) == []


@needs_core
def test_bench_as_json(tmp_path: Path) -> None:
    arguments = ("--size", "300kB", "--block-size", "4KiB", "--queue-depth", 2, "--parallelism", 3, "--json")
    found = json.loads(run("io", "bench", tmp_path, *arguments).output)
    assert found["aio"] | {"block_size": 4096, "queue_depth": 2, "intra_op_parallelism": 3} == found["aio"]
    assert (found["bytes"], found["engine"] in ("io_uring", "threads")) == (300_000, True)
    assert len(found["write_bytes_per_second"]) == len(found["read_bytes_per_second"]) == 3
    assert all(rate > 0 for rate in found["write_bytes_per_second"] + found["read_bytes_per_second"])


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--size", "2GB"), "has room for 1.0 GB; measuring takes 2.0 GB and leaves 0.1 GB alone"),
        (("--size", "999MB"), "has room for 1.0 GB"),
        (("--size", "much"), "a size of 'much' is not understood"),
        (("--size", "64KiB"), "less than one block of 1048576"),
        (("--block-size", "1000"), "block_size: expected a multiple of 4096"),
        (("--queue-depth", "5000"), "queue_depth: expected 1 to 4096"),
    ],
)
def test_bench_refuses_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, str], complaint: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(10**10, 9 * 10**9, 10**9))
    result = run("io", "bench", tmp_path, *options)
    assert result.exit_code == 2
    assert result.output.startswith("drivetrain io: ")
    assert complaint in result.output
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    result = run("io", "bench", tmp_path / "none")
    assert (result.exit_code, result.output) == (
        2,
        f"drivetrain io: {tmp_path / 'none'} is not a folder; name one on the drive to measure\n",
    )


@needs_core
def test_the_file_is_removed_when_measuring_is_broken_off(tmp_path: Path) -> None:
    def broken_off() -> None:
        setting = FileSetting(block_size=4096)
        with TrialFile(tmp_path, 100_000, [setting]) as file:
            assert [path.stat().st_size for path in tmp_path.iterdir()] == [100_000]
            assert file.measure(setting).read > 0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert list(tmp_path.iterdir()) == []


@needs_core
@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no RAM disk here")
def test_a_ram_disk_is_told_from_a_drive(tmp_path: Path) -> None:
    assert file_system(Path("/dev/shm"))[0] in ("tmpfs", "ramfs")
    result = run("io", "bench", "/dev/shm", "--size", "1MiB")
    assert "note: /dev/shm is on a RAM disk (tmpfs): the figures are those of memory." in result.output


@needs_core
def test_a_page_cache_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TrialFile(tmp_path, 100_000, [FileSetting(block_size=4096)]) as file:
        monkeypatch.setattr("drivetrain.engine.file_speed.file_system", lambda _: ("nfs", "host:/x"))
        file.direct = False
        (remark,) = [remark for remark in file.remarks() if "page cache" in remark]
        assert remark.startswith("The file system (nfs on host:/x) refuses to be used past the page cache (O_DIRECT)")


# -------------------------------------------------------------------------------------------------------------- tune


@needs_core
def test_tune_prints_a_section_that_the_configuration_takes(tmp_path: Path) -> None:
    result = run("io", "tune", tmp_path, "--size", "8MiB", "--seconds", 0.1, "--json")
    assert result.exit_code == 0, result.output
    section = json.loads(result.output)
    assert list(section["aio"]) == [
        "block_size",
        "queue_depth",
        "intra_op_parallelism",
        "single_submit",
        "overlap_events",
        "use_gds",
    ]
    config = load({"train_batch_size": 1, **section})
    assert config.aio.block_size * config.aio.queue_depth * config.aio.intra_op_parallelism <= 256 << 20
    assert list(tmp_path.iterdir()) == []


@needs_core
def test_tune_writes_into_a_configuration_and_keeps_the_rest(tmp_path: Path) -> None:
    folder, real = tmp_path / "drive", tmp_path / "real.json"
    folder.mkdir()
    head, tail = '{\n  # the run of tuesday\n  "train_batch_size": 8,\n  aio: {', '}, "gradient_clipping": 1e-1\n}\n'
    real.write_text(head + '"thread_count": 1' + tail)
    real.chmod(0o640)
    link = tmp_path / "config.json"
    link.symlink_to(real)
    result = run("io", "tune", folder, "--size", "8MiB", "--seconds", 0, "--config", link)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == f"written to {link}"
    after = real.read_text()
    assert after.startswith(head)
    assert after.endswith(tail)
    config = load(str(link))
    assert (config.train_batch_size, config.aio.thread_count) == (8, 1)
    assert f'"block_size": {config.aio.block_size}' in result.output
    assert "chosen" in result.output
    assert real.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "drive", "real.json"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b'{"a": 1, "a": 2}', "there twice"), (b"{'a' 1}", "colon"), (b"\xff\xfe", "not UTF-8"), (None, "No such file")],
)
def test_tune_refuses_what_it_can_not_edit_before_it_measures(
    tmp_path: Path, content: bytes | None, complaint: str
) -> None:
    config = tmp_path / "config.json"
    if content is not None:
        config.write_bytes(content)
    result = run("io", "tune", tmp_path, "--config", config, "--size", "900TB")
    assert result.exit_code == 2
    assert result.output.startswith("drivetrain io: ")
    assert complaint in result.output
    assert content is None or config.read_bytes() == content


def test_the_grid_is_bounded() -> None:
    for cores in (1, 2, 64):
        settings = grid(cores)
        assert len(set(settings)) == len(settings)
        assert all(setting.parallelism <= cores and setting.in_flight <= 256 << 20 for setting in settings)
        assert all(setting.options().queue_depth <= 4096 for setting in settings)
    assert max(setting.parallelism for setting in grid(64)) == 4


def _clocked(seconds_each: float, speed: Callable[[FileSetting, int], float]) -> Any:
    """A measurement that takes so long by a clock of its own, and gives `speed(setting, look)` for both ways."""

    class Clocked:
        now = 0.0
        looks: list[FileSetting]

        def __init__(self) -> None:
            self.looks = []

        def clock(self) -> float:
            return self.now

        def measure(self, setting: FileSetting) -> FileSpeed:
            self.now += seconds_each
            self.looks.append(setting)
            rate = speed(setting, self.looks.count(setting))
            return FileSpeed(setting=setting, write=rate, read=rate)

    return Clocked()


def test_search_looks_again_at_what_was_good() -> None:
    settings = [FileSetting(queue_depth=depth) for depth in range(1, 9)]
    best = settings[5]

    # Setting 6 is the fastest, but has a bad third look; another is lucky once.
    def speed(setting: FileSetting, look: int) -> float:
        if setting is best:
            return 10.0 if look != 3 else 1.0
        return 12.0 if setting is settings[0] and look == 1 else setting.queue_depth / 2

    clocked = _clocked(1.0, speed)
    ranking = search(clocked.measure, settings, 100.0, clocked.clock)
    assert [clocked.looks.count(setting) for setting in settings] == [3, 1, 1, 1, 1, 4, 2, 2]
    assert ranking[0].setting == best
    assert ranking[0].both == pytest.approx(10.0)
    assert len(ranking) == 8


def test_search_ends_when_the_time_is_up() -> None:
    settings = [FileSetting(queue_depth=depth) for depth in range(1, 9)]
    clocked = _clocked(1.0, lambda setting, _: float(setting.queue_depth))
    assert [speed.setting for speed in search(clocked.measure, settings, 2.5, clocked.clock)] == settings[2::-1]
    clocked = _clocked(1.0, lambda setting, _: 1.0)
    assert len(search(clocked.measure, settings, 0.0, clocked.clock)) == 1


def test_of_settings_as_good_the_cheapest_is_taken() -> None:
    def speed(both: float, **setting: int) -> FileSpeed:
        return FileSpeed(setting=FileSetting(**setting), write=both, read=both)

    fastest = speed(100, queue_depth=64, parallelism=2)
    deep, shallow = speed(99, queue_depth=32), speed(98, queue_depth=8)
    assert best_of([fastest, deep, shallow, speed(90, queue_depth=1)]) is shallow
    assert FileSpeed(setting=FileSetting(), write=1.0, read=3.0).both == pytest.approx(1.5)

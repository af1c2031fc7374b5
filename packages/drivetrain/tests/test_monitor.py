"""Metrics on disk, the progress of a run in text, timers, memory and pictures."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import math
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from drivetrain.engine.monitor import (
    CsvSink,
    EventCsvSink,
    JsonlSink,
    MemoryRow,
    ModelStates,
    PhaseTimers,
    PlotsUnavailableError,
    ProgressBar,
    Scalar,
    SinkGroup,
    ThroughputTimer,
    loss_curve,
    memory_picture,
    peak_memory_bytes,
    peak_resident_bytes,
    read_jsonl,
    reset_peak_memory,
    resident_bytes,
)
from drivetrain.engine.monitor.plots import smoothed
from drivetrain.engine.monitor.progress import human_bytes, human_count, human_time, peak_text

MIB = 1 << 20


class FakeClock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def table(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


# --------------------------------------------------------------------------------------------------------------- JSONL


def test_jsonl_appends_whole_lines_that_are_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"loss": 2.5, "skipped": False, "note": "a\nb"})
    assert path.read_text() == '{"step": 1, "loss": 2.5, "skipped": false, "note": "a\\nb"}\n'
    sink.close()
    sink.close()
    again = JsonlSink(path)
    again.write(2, {"loss": 2.0, "lr": None})
    again.close()
    assert read_jsonl(path) == [
        {"step": 1, "loss": 2.5, "skipped": False, "note": "a\nb"},
        {"step": 2, "loss": 2.0, "lr": None},
    ]


def test_jsonl_stays_json_where_a_loss_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    sink.close()
    assert json.loads(path.read_text()) == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    (record,) = read_jsonl(path)
    assert isinstance(record["a"], float)
    assert math.isnan(record["a"])
    assert (record["b"], record["c"]) == (math.inf, -math.inf)


def test_jsonl_rewinds_to_the_step_of_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for step in range(1, 6):
        sink.write(step, {"loss": float(step)})
    sink.write(3, {"valid_loss": 3.5})  # written late, but of a step that stays
    sink.rewind(3)
    sink.write(4, {"loss": 40.0})
    sink.close()
    assert [(record["step"], record.get("loss")) for record in read_jsonl(path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (3, None),
        (4, 40.0),
    ]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_jsonl_goes_on_after_a_cut_line_and_over_a_blank_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    assert [record["step"] for record in read_jsonl(path)] == [1, 2]
    sink = JsonlSink(path)
    sink.write(3, {"loss": 1.0})
    sink.rewind(2)
    sink.write(3, {"loss": 1.5})
    sink.close()
    assert read_jsonl(path) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 1.5}]


@pytest.mark.parametrize(("line", "complaint"), [("{oops}", ":2: not JSON"), ("[1]", ":2: expected an object")])
def test_read_jsonl_names_the_line_that_is_wrong(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    with pytest.raises(ValueError, match=complaint):
        read_jsonl(path)


def test_the_step_of_a_record_is_the_step(tmp_path: Path) -> None:
    values: Mapping[str, Scalar] = {"step": 99, "loss": 1.0}
    for sink in (JsonlSink(tmp_path / "a.jsonl"), CsvSink(tmp_path / "a.csv")):
        sink.write(7, values)
        sink.close()
    assert read_jsonl(tmp_path / "a.jsonl") == [{"step": 7, "loss": 1.0}]
    assert table(tmp_path / "a.csv") == [["step", "loss"], ["7", "1.0"]]


# ----------------------------------------------------------------------------------------------------------------- CSV


def test_csv_widens_for_a_metric_that_appears_later(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.csv"
    sink = CsvSink(path)
    assert table(path) == [["step"]]
    sink.write(1, {"loss": 0.1, "skipped": True})
    sink.write(2, {"loss": math.nan, "note": 'a, "b"\nc'})
    sink.write(3, {"skipped": False})
    assert table(path) == [
        ["step", "loss", "skipped", "note"],
        ["1", "0.1", "True", ""],
        ["2", "nan", "", 'a, "b"\nc'],
        ["3", "", "False", ""],
    ]
    sink.close()
    sink.close()
    assert [file.name for file in path.parent.iterdir()] == ["metrics.csv"]


def test_csv_goes_on_under_the_header_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("loss,step\n3.0,1\n\n2.0,2\n1.0")  # the last row was cut
    sink = CsvSink(path)
    sink.write(3, {"loss": 1.5})
    sink.write(4, {"lr": 0.25})
    sink.close()
    assert table(path) == [
        ["loss", "step", "lr"],
        ["3.0", "1", ""],
        ["2.0", "2", ""],
        ["1.5", "3", ""],
        ["", "4", "0.25"],
    ]


def test_csv_rewinds_to_the_step_of_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    first = CsvSink(path)
    for step in range(8, 13):
        first.write(step, {"loss": float(step)})
    first.close()
    resumed = CsvSink(path)
    resumed.rewind(10)
    resumed.write(11, {"loss": 0.5})
    resumed.close()
    assert table(path) == [["step", "loss"], ["8", "8.0"], ["9", "9.0"], ["10", "10.0"], ["11", "0.5"]]


def test_csv_begins_anew_where_even_the_header_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("ste")
    sink = CsvSink(path)
    sink.write(1, {"loss": 1.0})
    sink.close()
    assert table(path) == [["step", "loss"], ["1", "1.0"]]


def test_csv_refuses_a_table_that_is_not_its_own(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("name,age\nAda,36\n")
    with pytest.raises(ValueError, match="without a column 'step'; it holds name, age"):
        CsvSink(path)
    assert path.read_text() == "name,age\nAda,36\n"


@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), st.floats(allow_nan=False) | st.integers() | st.none())),
    st.integers(0, 10),
)
def test_both_tables_keep_exactly_what_was_written_up_to_the_resume(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, float | None]], resume: int
) -> None:
    folder = tmp_path_factory.mktemp("sinks")
    for sink in (JsonlSink(folder / "m.jsonl"), CsvSink(folder / "m.csv")):
        for step, record in enumerate(records):
            sink.write(step, record)
        sink.rewind(resume)
        sink.close()
    kept = list(enumerate(records))[: resume + 1]
    assert read_jsonl(folder / "m.jsonl") == [{"step": step, **record} for step, record in kept]
    header, *rows = table(folder / "m.csv")
    assert len(rows) == len(kept)
    for row, (step, record) in zip(rows, kept, strict=True):
        cells = dict(zip(header, row, strict=True))
        assert int(cells.pop("step")) == step
        numbers = {name: float(cell) for name, cell in cells.items() if cell}
        assert numbers == {name: float(value) for name, value in record.items() if value is not None}


# ------------------------------------------------------------------------------------------------- csv_monitor's layout


def test_event_csv_writes_a_file_per_metric_at_the_number_of_samples(tmp_path: Path) -> None:
    sink = EventCsvSink(tmp_path, "job")
    sink.write(1, {"samples": 32, "loss": 2.5, "lr": 1, "skipped": True, "note": "x", "tokens per s": 10.0})
    sink.write(2, {"loss": 2.0})
    sink.close()
    sink.close()
    folder = tmp_path / "job"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "Train_Samples_train_loss.csv": "step,train_loss\n32,2.5\n2,2.0\n",
        "Train_Samples_lr.csv": "step,lr\n32,1\n",
        "tokens_per_s.csv": "step,tokens per s\n32,10.0\n",
    }


def test_event_csv_goes_on_after_a_cut_line_and_does_not_rewind(tmp_path: Path) -> None:
    file = tmp_path / "job" / "Train_Samples_train_loss.csv"
    file.parent.mkdir()
    file.write_text("step,train_loss\n32,2.5\n64,2.")
    sink = EventCsvSink(tmp_path, "job")
    sink.rewind(0)
    sink.write(2, {"samples": 64, "loss": 2.25})
    sink.close()
    assert file.read_text() == "step,train_loss\n32,2.5\n64,2.25\n"


def test_event_csv_without_a_path_goes_to_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sink = EventCsvSink("", "job")
    assert str(sink) == str(tmp_path / "csv_monitor" / "job")
    assert (tmp_path / "csv_monitor" / "job").is_dir()


class FullDisk:
    """A sink that fails at its second record."""

    def __init__(self) -> None:
        self.calls = 0

    def write(self, step: int, values: Mapping[str, Scalar]) -> None:
        self.calls += 1
        if self.calls == 2:
            raise OSError("no space left")

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass

    def __str__(self) -> str:
        return "the full disk"


def test_a_sink_that_fails_is_named_once_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = FullDisk()
    group = SinkGroup([full, JsonlSink(tmp_path / "m.jsonl")])
    with caplog.at_level(logging.WARNING, logger="drivetrain.monitor"):
        for step in range(1, 5):
            group.write(step, {"loss": 1.0})
        group.rewind(3)
        group.close()
    assert full.calls == 2
    assert caplog.messages == ["metrics are no longer written to the full disk: OSError: no space left"]
    assert [record["step"] for record in read_jsonl(tmp_path / "m.jsonl")] == [1, 2, 3]


# ------------------------------------------------------------------------------------------------------------ progress


def progress_lines(total: int, seconds: Iterator[float], *, start: int = 0, period: float = 10.0) -> list[str]:
    """The plain lines of a run whose steps take these seconds."""
    clock, out = FakeClock(), io.StringIO()
    bar = ProgressBar(total, start=start, period=period, console=Console(file=out, width=20), clock=clock)
    with bar:
        for step in range(start + 1, total + 1):
            clock.now += next(seconds)
            bar.update(step, loss=1.0 / step)
    return out.getvalue().splitlines()


def test_a_file_gets_the_first_step_the_last_and_one_per_period() -> None:
    assert progress_lines(10, itertools.repeat(4.0)) == [
        "train 1/10 loss 1.0000 0:36 left",
        "train 4/10 loss 0.2500 0:24 left",
        "train 7/10 loss 0.1429 0:12 left",
        "train 10/10 loss 0.1000",
    ]
    assert len(progress_lines(10, itertools.repeat(4.0), period=0.0)) == 10
    assert len(progress_lines(1000, itertools.repeat(0.001))) == 2


def test_the_time_left_does_not_believe_the_first_step() -> None:
    first, second, third, _ = progress_lines(4, iter([60.0, 1.0, 11.0, 1.0]), period=0.0)
    assert first.endswith("3:00 left")
    assert second.endswith("0:02 left")  # the second step replaces the first
    assert third.endswith("0:02 left")  # a tenth of the third is blended in: 1 + 0.1 * (11 - 1)


def test_a_resumed_run_counts_only_its_own_steps() -> None:
    assert progress_lines(9, itertools.repeat(2.0), start=6) == [
        "train 7/9 loss 0.1429 0:04 left",
        "train 9/9 loss 0.1111",
    ]


def test_all_that_a_line_can_say_on_one_line_with_brackets_kept() -> None:
    out = io.StringIO()
    console = Console(file=out, width=20)
    with ProgressBar(5, title="[bold]fit", console=console, clock=FakeClock()) as bar:
        bar.update(5, loss=2.34567, lr=3e-4, tokens_per_second=12_345.0, peak_bytes=[412 * MIB, 1536 * MIB])
        bar.message("[red] saved a checkpoint under a name that is long")
        bar.update(5)
    assert out.getvalue().splitlines() == [
        "[bold]fit 5/5 loss 2.3457 lr 3.00e-04 12.3k tok/s peak 412 MiB 1.5 GiB",
        "[red] saved a checkpoint under a name that is long",
        "[bold]fit 5/5",
    ]


def test_other_ranks_show_nothing() -> None:
    out = io.StringIO()
    with ProgressBar(3, show=False, console=Console(file=out)) as bar:
        bar.update(1, loss=1.0)
        bar.message("hello")
    assert out.getvalue() == ""


def test_a_terminal_gets_a_live_bar_that_ends_with_the_run() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None, _environ={"TERM": "xterm"})
    with ProgressBar(3, console=console, clock=FakeClock()) as bar:
        bar.update(3, loss=0.5)
        bar.message("above the bar")
    text = out.getvalue()
    assert "3/3" in text
    assert "loss 0.5000" in text
    assert "above the bar" in text
    assert text.rstrip("\n").count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back


@pytest.mark.parametrize(("total", "start"), [(0, 0), (3, 4), (3, -1)])
def test_a_progress_bar_refuses_an_impossible_range(total: int, start: int) -> None:
    with pytest.raises(ValueError, match=f"total is {total} and start is {start}, expected"):
        ProgressBar(total, start=start)


def test_numbers_for_people() -> None:
    assert [human_bytes(size) for size in (0, 412 * MIB, 1023.4 * MIB, 1023.6 * MIB, 1536 * MIB)] == [
        "0 MiB",
        "412 MiB",
        "1023 MiB",
        "1.0 GiB",
        "1.5 GiB",
    ]
    numbers = (950, 999.7, 12_345, 999_960, 4.5e6, 7e9)
    assert [human_count(number) for number in numbers] == ["950", "1.0k", "12.3k", "1.0M", "4.5M", "7.0G"]
    assert [human_time(seconds) for seconds in (0, 42, 59.6, 725, 11_220)] == [
        "0:00",
        "0:42",
        "1:00",
        "12:05",
        "3:07:00",
    ]
    assert peak_text([]) == ""
    assert peak_text([MIB, 2 * MIB]) == "peak 1 MiB 2 MiB"
    assert peak_text([size * MIB for size in (5, 3, 9, 4, 4)]) == "peak 3 MiB..9 MiB"
    assert peak_text([7 * MIB] * 8) == "peak 7 MiB"


# -------------------------------------------------------------------------------------------------------------- timers


def test_throughput_leaves_the_first_step_out_and_smooths_the_others() -> None:
    clock = FakeClock()
    timer = ThroughputTimer(smoothing=0.5, clock=clock)
    assert timer.samples_per_second == 0.0
    for seconds, samples in ((50.0, 8), (2.0, 8), (4.0, 8)):
        timer.start()
        clock.now += seconds
        assert timer.stop(samples=samples, tokens=samples * 100) == seconds
        clock.now += 1000.0  # between steps nothing is measured
    assert timer.steps == 3
    assert timer.last_step_seconds == 4.0
    assert timer.samples_per_second == pytest.approx((4 + 8) / (1 + 4))
    assert timer.tokens_per_second == pytest.approx(100 * (4 + 8) / (1 + 4))
    assert timer.average_samples_per_second == pytest.approx(16 / 6)
    assert timer.average_tokens_per_second == pytest.approx(1600 / 6)


def test_throughput_with_smoothing_1_shows_the_last_step() -> None:
    clock = FakeClock()
    timer = ThroughputTimer(smoothing=1.0, skip=0, clock=clock)
    for seconds in (1.0, 4.0):
        timer.start()
        clock.now += seconds
        timer.stop(samples=8)
    assert timer.samples_per_second == 2.0
    assert timer.tokens_per_second == 0.0


def test_throughput_refuses_wrong_use() -> None:
    timer = ThroughputTimer()
    with pytest.raises(RuntimeError, match="without start"):
        timer.stop(samples=1)
    for smoothing in (0.0, 1.5):
        with pytest.raises(ValueError, match="expected a number above 0 and up to 1"):
            ThroughputTimer(smoothing=smoothing)


def test_phases_add_up_nest_and_survive_an_exception() -> None:
    clock = FakeClock()
    timers = PhaseTimers(clock=clock)

    def phase(name: str, seconds: float) -> None:
        with timers.measure(name):
            clock.now += seconds
            if name == "backward":
                with timers.measure("inner"):
                    clock.now += 0.5
                raise ValueError("the batch is bad")

    phase("forward", 1.0)
    phase("forward", 2.0)
    with pytest.raises(ValueError, match="bad"):
        phase("backward", 4.0)
    assert timers.take() == {"forward": 3.0, "inner": 0.5, "backward": 4.5}
    assert timers.take() == {}


def test_disabled_phases_do_not_look_at_the_clock() -> None:
    def clock() -> float:
        raise AssertionError("the clock was read")

    timers = PhaseTimers(enabled=False, clock=clock)
    with timers.measure("forward"):
        pass
    assert timers.take() == {}


# -------------------------------------------------------------------------------------------------------------- memory


def test_memory_grows_with_what_is_held() -> None:
    assert 0 < peak_memory_bytes() == pytest.approx(peak_memory_bytes("cpu"), abs=MIB)  # it may grow in between
    peak = peak_resident_bytes()
    held = b"x" * (256 * MIB)
    if sys.platform == "linux":
        assert resident_bytes() > 256 * MIB
        assert peak_resident_bytes() >= max(peak, 256 * MIB)
    high = peak_resident_bytes()
    del held
    assert (
        peak_resident_bytes() > high - 16 * MIB
    )  # a peak stays, as exactly as the kernel counts: per core, now and then
    if reset_peak_memory():
        assert peak_resident_bytes() < high - 128 * MIB


def test_memory_is_zero_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("drivetrain.engine.monitor.memory._STATUS", tmp_path / "nowhere")
    monkeypatch.setattr("drivetrain.engine.monitor.memory._CLEAR_REFS", tmp_path / "nowhere" / "clear_refs")
    assert resident_bytes() == 0
    assert peak_resident_bytes() > 0  # from getrusage
    assert reset_peak_memory() is False


# ------------------------------------------------------------------------------------------------------------ pictures


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_a_loss_curve_from_a_file_and_from_records(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sink = JsonlSink(tmp_path / "m.jsonl")
    for step in range(1, 30):
        sink.write(step, {"loss": math.nan if step == 4 else 3.0 / step})
        if step % 10 == 0:
            sink.write(step, {"valid_loss": 3.5 / step})
    sink.close()
    made = loss_curve(tmp_path / "m.jsonl", tmp_path / "new" / "loss.png", title="A run")
    assert made == tmp_path / "new" / "loss.png"
    width, height = png_size(made)
    assert (width, height) == (1040, 585)
    only_valid = loss_curve([{"step": 5, "eval": 1.0}], tmp_path / "valid.png", valid="eval")
    assert png_size(only_valid) == (1040, 585)


def test_a_loss_curve_without_a_finite_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finite 'loss' or 'valid_loss' in 2 records"):
        loss_curve([{"step": 1, "loss": math.nan}, {"step": 2, "lr": 1.0}], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def rows() -> list[MemoryRow]:
    return [
        MemoryRow(
            stage=stage,
            measured=ModelStates(parameters=4e6, gradients=4e6 / part, optimizer=1.2e7 / part),
            formula=ModelStates(parameters=4e6, gradients=4e6, optimizer=1.2e7),
        )
        for stage, part in ((0, 1), (1, 2))
    ]


def test_a_memory_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert rows()[0].measured.total == 2e7
    assert png_size(memory_picture(rows(), tmp_path / "memory.png")) == (1040, 624)
    with pytest.raises(ValueError, match="no rows to draw"):
        memory_picture([], tmp_path / "none.png")


def test_pictures_without_matplotlib_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotsUnavailableError, match="pip install matplotlib"):
        loss_curve([{"step": 1, "loss": 1.0}], tmp_path / "loss.png")
    with pytest.raises(PlotsUnavailableError, match="not installed"):
        memory_picture(rows(), tmp_path / "memory.png")
    assert list(tmp_path.iterdir()) == []


def test_smoothing_is_centred_and_keeps_the_ends() -> None:
    assert smoothed([]) == []
    assert smoothed([5.0, 1.0]) == [5.0, 1.0]  # too short to smooth
    line = [float(step) for step in range(200)]
    assert smoothed(line) == pytest.approx(line)  # a trend is not delayed
    alternating = [1.0, -1.0] * 100
    assert max(abs(value) for value in smoothed(alternating)[10:-10]) < 0.2

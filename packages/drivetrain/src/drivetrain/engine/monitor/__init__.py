"""Watching a run: metrics into files, a progress bar, memory and time, pictures.

Nothing here knows the engine or torch.distributed: what is shown or written is handed in, and the caller decides which
rank does so.
"""

from __future__ import annotations

from drivetrain.engine.monitor.memory import peak_memory_bytes, peak_resident_bytes, reset_peak_memory, resident_bytes
from drivetrain.engine.monitor.plots import MemoryRow, ModelStates, PlotsUnavailableError, loss_curve, memory_picture
from drivetrain.engine.monitor.progress import ProgressBar
from drivetrain.engine.monitor.sinks import (
    CsvSink,
    EventCsvSink,
    JsonlSink,
    Scalar,
    Sink,
    SinkGroup,
    read_jsonl,
)
from drivetrain.engine.monitor.timers import PhaseTimers, ThroughputTimer

__all__ = [
    "CsvSink",
    "EventCsvSink",
    "JsonlSink",
    "MemoryRow",
    "ModelStates",
    "PhaseTimers",
    "PlotsUnavailableError",
    "ProgressBar",
    "Scalar",
    "Sink",
    "SinkGroup",
    "ThroughputTimer",
    "loss_curve",
    "memory_picture",
    "peak_memory_bytes",
    "peak_resident_bytes",
    "read_jsonl",
    "reset_peak_memory",
    "resident_bytes",
]

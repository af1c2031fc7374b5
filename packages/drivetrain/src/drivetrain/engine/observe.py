"""What an engine tells about its steps: metrics to sinks, a line now and then to the log. Rank 0 speaks."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from drivetrain.comm import Ledger, LedgerEntry
from drivetrain.engine.config import CommsLogger, Config
from drivetrain.engine.monitor import PhaseTimers, Scalar, SinkGroup
from drivetrain.engine.record import Counters, StepRecord

log = logging.getLogger("drivetrain.engine")


class Observer:
    """Gathers what happens in a step and reports it when the step is done.

    Args:
        config: says what is reported, and how often.
        rank: this process; only rank 0 writes.
        sinks: where metrics go.
        timers: seconds by phase, filled by the engine.
        ledger: what collectives cost.
        device: waited for before the clock is read.
    """

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        sinks: SinkGroup,
        timers: PhaseTimers,
        ledger: Ledger,
        device: torch.device,
    ) -> None:
        self.sinks = sinks
        self.timers = timers
        self._config = config
        self._rank = rank
        self._ledger = ledger
        self._device = device
        self._losses: list[torch.Tensor] = []
        self._samples_and_time: tuple[int, float] | None = None

    def loss(self, loss: torch.Tensor) -> None:
        """A micro-batch's share of the step's loss."""
        self._losses.append(loss.detach())

    def stepped(self, counters: Counters, record: StepRecord) -> None:
        """A step is done, or was skipped."""
        losses, self._losses = self._losses, []
        every = self._config.steps_per_print
        prints = every is not None and counters.global_steps % every == 0
        phases = self.timers.take()
        if self._rank != 0:
            return
        if record.reason:
            log.info("step %d skipped: %s", counters.global_steps, record.reason)
        values: dict[str, Scalar] = {
            "lr": record.lr,
            "loss_scale": record.loss_scale,
            "samples": counters.global_samples,
        }
        if record.grad_norm is not None:
            values["grad_norm"] = record.grad_norm
        if losses and (prints or self._config.csv_monitor.enabled):
            values["loss"] = float(torch.stack(losses).sum())
        values.update({f"{phase}_seconds": seconds for phase, seconds in phases.items()})
        if prints and self._config.timers.throughput.enabled:
            values.update(self._throughput(counters.global_samples))
        self.sinks.write(counters.global_steps, values)
        if prints:
            text = ", ".join(f"{name} {value:.6g}" for name, value in values.items() if isinstance(value, (int, float)))
            log.info("step %d: %s", counters.global_steps, text)
            if self._config.comms_logger.enabled:
                log.info("collectives so far\n%s", traffic_table(reported(self._ledger, self._config.comms_logger)))

    def _throughput(self, samples: int) -> dict[str, Scalar]:
        """Samples per second since the last line."""
        if self._device.type == "cuda" and self._config.timers.throughput.synchronized:
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        before, self._samples_and_time = self._samples_and_time, (samples, now)
        return {} if before is None else {"samples_per_second": (samples - before[0]) / (now - before[1])}


def reported(ledger: Ledger, section: CommsLogger) -> list[LedgerEntry]:
    """The entries that a ``comms_logger`` section asks for."""
    return [entry for entry in ledger.entries() if section.prof_all or entry.op in section.prof_ops]


def traffic_table(entries: Sequence[LedgerEntry]) -> str:
    """Calls, bytes, time and bandwidths per operation and axis, as text."""
    head = f"{'operation':<16}{'axis':<12}{'calls':>8}{'MB':>12}{'seconds':>10}{'alg GB/s':>10}{'bus GB/s':>10}"
    rows = [
        f"{e.op:<16}{e.axis:<12}{e.calls:>8}{e.bytes / 1e6:>12.2f}{e.seconds:>10.3f}"
        f"{e.algorithm_bandwidth / 1e9:>10.2f}{e.bus_bandwidth / 1e9:>10.2f}"
        for e in entries
    ]
    return "\n".join([head, *rows])

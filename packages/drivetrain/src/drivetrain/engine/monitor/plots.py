"""Two pictures of a run: its loss, and its memory beside the theory.

matplotlib is an optional dependency, `pip install matplotlib`; it is imported when a picture is asked for.
Figures are drawn without pyplot, so that nothing of the caller's plotting state is touched and no display is needed.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.engine.monitor.sinks import Scalar, read_jsonl

_INK = "#333333"
_MUTED = "#9aa5b1"
_TRAIN = "#2a6fbb"
_VALID = "#d9662b"
_COMPONENTS = (("parameters", "#2a6fbb"), ("gradients", "#e0a030"), ("optimizer", "#4f9d69"))
_MIB = 1 << 20


class PlotsUnavailableError(ImportError):
    """matplotlib is not installed."""


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """Bytes of the model states on one rank. `optimizer` counts master weights and moments."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """The model states of a rank at one ZeRO stage, measured and by formula."""

    stage: int
    measured: ModelStates
    formula: ModelStates


def loss_curve(
    source: str | os.PathLike[str] | Sequence[Mapping[str, Scalar]],
    path: str | os.PathLike[str],
    *,
    title: str = "Loss",
    train: str = "loss",
    valid: str = "valid_loss",
    ylabel: str = "loss",
) -> Path:
    """Draw training and validation loss over steps into a PNG.

    Args:
        source: a file of `JsonlSink`, or records with "step" and the metrics named by `train` and `valid`.
        path: where to write.

    Returns `path`. Raises ValueError if no record has a finite loss, PlotsUnavailableError without matplotlib.
    """
    records = source if isinstance(source, Sequence) and not isinstance(source, str) else read_jsonl(source)
    train_steps, train_loss = _series(records, train)
    valid_steps, valid_loss = _series(records, valid)
    if not train_steps and not valid_steps:
        raise ValueError(f"there is no finite {train!r} or {valid!r} in {len(records)} records to draw")
    figure, axes = _canvas(8.0, 4.5)
    if train_steps:
        axes.plot(train_steps, train_loss, color=_TRAIN, alpha=0.25, linewidth=1.0)
        axes.plot(train_steps, smoothed(train_loss), color=_TRAIN, linewidth=2.0, label="training (smoothed)")
    if valid_steps:
        axes.plot(valid_steps, valid_loss, color=_VALID, marker="o", markersize=5, linewidth=1.5, label="validation")
        _label_ends(axes, valid_steps, valid_loss)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(ylabel)
    axes.set_title(title, loc="left", color=_INK, fontweight="bold")
    axes.legend(frameon=False)
    axes.margins(x=0.02, y=0.08)
    return _save(figure, path)


def memory_picture(
    rows: Sequence[MemoryRow], path: str | os.PathLike[str], *, title: str = "Model states per rank"
) -> Path:
    """Draw, for each stage, the measured bytes of a rank beside the published formula, into a PNG.

    Bars are stacked by parameters, gradients and optimizer states; the formula's are hatched. Over each measured bar
    stands its total and how far it is from the formula. Returns `path`. Raises ValueError without rows.
    """
    if not rows:
        raise ValueError("there are no rows to draw: give one MemoryRow per stage")
    figure, axes = _canvas(8.0, 4.8)
    top = max(max(row.measured.total, row.formula.total) for row in rows)
    width, gap = 0.36, 0.02
    for position, row in enumerate(rows):
        _stack(axes, position - (width + gap) / 2, row.measured, width=width, hatch="")
        _stack(axes, position + (width + gap) / 2, row.formula, width=width, hatch="////")
        _label_pair(axes, position, row, width=width, lift=0.015 * top / _MIB)
    axes.set_xticks(range(len(rows)), [f"stage {row.stage}" for row in rows])
    axes.set_ylabel("MiB on one rank")
    axes.set_ylim(0, 1.18 * top / _MIB)
    axes.set_title(title, loc="left", color=_INK, fontweight="bold")
    axes.legend(handles=_memory_legend(), frameon=False, ncols=5, loc="upper right", fontsize=9)
    axes.grid(False, axis="x")
    return _save(figure, path)


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean of each value with its neighbours, over a window of a twentieth of the curve that narrows at both ends.

    Centred, unlike a moving average over the past, so that a falling curve is not drawn above itself.
    """
    reach = len(values) // 40
    result = []
    for index in range(len(values)):
        side = min(reach, index, len(values) - 1 - index)
        window = values[index - side : index + side + 1]
        result.append(sum(window) / len(window))
    return result


def _series(records: Sequence[Mapping[str, Scalar]], name: str) -> tuple[list[int], list[float]]:
    """Steps and finite values of a metric."""
    points = [
        (int(step), float(value))
        for record in records
        if isinstance(step := record.get("step"), (int, float))
        and isinstance(value := record.get(name), (int, float))
        and math.isfinite(value)
    ]
    return [step for step, _ in points], [value for _, value in points]


def _canvas(width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes, in inches."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PlotsUnavailableError(
            "pictures need matplotlib, which is not installed: pip install matplotlib"
        ) from error
    figure = figures.Figure(figsize=(width, height), dpi=130, layout="constrained")
    axes = figure.subplots()
    axes.grid(True, axis="both", color="#e6e9ec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_MUTED)
    return figure, axes


def _save(figure: Any, path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, format="png", facecolor="white")
    return target


def _label_ends(axes: Any, steps: Sequence[int], values: Sequence[float]) -> None:
    for index in sorted({0, len(values) - 1}):
        axes.annotate(
            f"{values[index]:.2f}",
            (steps[index], values[index]),
            textcoords="offset points",
            xytext=(0, 8),
            ha="center",
            color=_VALID,
            fontsize=9,
        )


def _stack(axes: Any, at: float, states: ModelStates, *, width: float, hatch: str) -> None:
    bottom = 0.0
    for name, color in _COMPONENTS:
        height = getattr(states, name) / _MIB
        axes.bar(
            at,
            height,
            width,
            bottom=bottom,
            color=color,
            alpha=0.45 if hatch else 1.0,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.6,
        )
        bottom += height


def _memory_legend() -> list[Any]:
    patch = importlib.import_module("matplotlib.patches").Patch
    return [
        *(patch(facecolor=color, label=name) for name, color in _COMPONENTS),
        patch(facecolor=_MUTED, label="measured"),
        patch(facecolor="white", edgecolor=_MUTED, hatch="////", label="formula"),
    ]


def _label_pair(axes: Any, position: float, row: MemoryRow, *, width: float, lift: float) -> None:
    difference = (row.measured.total / row.formula.total - 1) * 100 if row.formula.total else math.nan
    note = "" if math.isnan(difference) else f"\n{difference:+.1f} %"
    for at, states, text in (
        (position - width / 2, row.measured, f"{row.measured.total / _MIB:.1f}{note}"),
        (position + width / 2, row.formula, f"{row.formula.total / _MIB:.1f}"),
    ):
        axes.text(at, states.total / _MIB + lift, text, ha="center", va="bottom", fontsize=9, color=_INK)

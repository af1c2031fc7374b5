"""What a load did, name by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import some

__all__ = ["LoadReport", "Reshaped"]


@dataclass(frozen=True, kw_only=True)
class Reshaped:
    """A tensor whose shape in the checkpoint is not the one that was asked for. It is not loaded."""

    name: str
    saved: tuple[int, ...]
    wanted: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} (saved as {list(self.saved)}, wanted as {list(self.wanted)})"


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The outcome of a load, the same on every rank.

    Attributes:
        path: the folder of the checkpoint.
        tag: its name.
        filled: tensors whose every local element now comes from the checkpoint.
        missing: tensors that were asked for and are not in the checkpoint; they keep their values.
        unexpected: tensors of the checkpoint that nobody asked for.
        reshaped: tensors that are there with another shape; they keep their values.
        notices: what else one should know, as sentences.
    """

    path: Path
    tag: str
    filled: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reshaped: tuple[Reshaped, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """True if everything that was asked for was filled."""
        return not self.missing and not self.reshaped

    def __str__(self) -> str:
        lines = [f"loaded {self.path} ({self.tag}): {len(self.filled)} tensors filled"]
        groups = {"missing": self.missing, "unexpected": self.unexpected, "reshaped": tuple(map(str, self.reshaped))}
        lines += [f"  {len(names)} {kind}: {some(names)}" for kind, names in groups.items() if names]
        return "\n".join([*lines, *(f"  note: {notice}" for notice in self.notices)])

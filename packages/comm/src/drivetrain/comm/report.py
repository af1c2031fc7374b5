"""What ranks tell each other about a hang, and how it reads. Pure: no processes, no clocks.

    all_gather on axis 'shard' failed on rank 0: nothing came from rank 1 for 60 s. It is number 17 of axis 'shard',
    all_gather of 4096 float32: gather of unit 'blocks.2' (first parameter 'blocks.2.up.weight'), in forward. Rank 1 has
    not issued it.
      rank 0: waits for it, since 60.0 s at train.py:31 in main: loss = model(batch)
      rank 1: is in no collective, since 61.2 s at train.py:44 in evaluate: time.sleep(3600); its last one on axis
        'shard' was number 16, all_gather of 4096 float32: gather of unit 'blocks.1' (...)

Ranks that do and did the same share a line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

SHOWN: Final = 12
"""Groups of ranks that a report lists."""

SAME_CALLS: Final = (
    "All ranks of an axis must issue the same collectives, on as many elements of the same dtype, in the same order: "
    "look for code that some ranks run and others don't, or not as often."
)
SILENT: Final = (
    "gave no answer: its process has ended or is stopped, or one long call keeps the interpreter to itself; look at "
    "its output"
)


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What one rank does, as it tells the others of an axis.

    Attributes:
        ask: the number of the question that this answers.
        issued: collectives issued on the axis.
        recent: labels of the last of them, by number.
        waits: the collective that it is blocked in, on whatever axis, in words.
        waits_here: its number, if it is one of this axis.
        seconds: for how long it waits, or has issued none.
        where: the innermost line of the program's own code.
        failed: why it has given the axis up, if it has.
        late: it did so as nothing came for too long.
    """

    ask: int
    issued: int
    recent: Mapping[int, str] = field(default_factory=dict)
    waits: str = ""
    waits_here: int | None = None
    seconds: float = 0.0
    where: str = ""
    failed: str | None = None
    late: bool = False

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "recent": list(self.recent.items())})

    @classmethod
    def from_json(cls, text: str | bytes) -> RankState:
        values = json.loads(text)
        return cls(**{**values, "recent": {int(number): label for number, label in values["recent"]}})


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2 and 4``, ``ranks 1 to 7``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > len(shown):
        return f"ranks {', '.join(shown)} and {len(ranks) - len(shown)} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def grouped(texts: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Texts by rank, as each text with the ranks that have it."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(rank)
    return list(groups.items())


def differing(labels: Mapping[int, str], mine: int) -> int | None:
    """A rank that issued another call than ``mine``, of those where the fewest agree; None where all do."""
    others = [ranks for text, ranks in grouped(labels) if text != labels[mine]]
    return min(others, key=len)[0] if others else None


def mismatch_text(title: str, number: int, labels: Mapping[int, str], *, during: str = "") -> str:
    """Ranks issued different collectives as number ``number`` of an axis: ``labels`` by rank in the world.

    ``during``: what this rank did it in.
    """
    here = f", here in {during}" if during else ""
    groups = sorted(grouped(dict(sorted(labels.items()))), key=lambda group: group[1])
    fewest, *more = sorted((ranks for _, ranks in groups), key=len)
    parted = bool(more) and len(fewest) < len(more[0])
    odd = f" {ranks_text(fewest).capitalize()} left the others." if parted else ""
    head = f"the ranks issued different collectives as number {number} of {title}{here}.{odd}"
    return "\n".join([head, *_listed([(f"issued {label}", ranks) for label, ranks in groups]), SAME_CALLS])


def hang_text(title: str, number: int, call: str, states: Mapping[int, RankState | None]) -> str:
    """Why number ``number`` of an axis, ``call`` in words, does not complete. ``None``: the rank gave no answer."""
    parted = _first_difference({rank: state.recent for rank, state in states.items() if state is not None})
    if parted is not None:
        text = mismatch_text(title, *parted)
        return f"{text[0].upper()}{text[1:]}"
    alike = grouped({rank: _doing(state, title, number, timed=False) for rank, state in states.items()})
    lines = [(_doing(states[ranks[0]], title, number, timed=True), ranks) for _, ranks in alike]
    return "\n".join([f"It is number {number} of {title}, {call}. {_verdict(number, states)}", *_listed(lines)])


def _first_difference(recent: Mapping[int, Mapping[int, str]]) -> tuple[int, dict[int, str]] | None:
    """The first number, of those remembered, as which ranks issued different collectives; and these by rank."""
    for number in sorted({number for calls in recent.values() for number in calls}):
        labels = {rank: calls[number] for rank, calls in recent.items() if number in calls}
        if len(set(labels.values())) > 1:
            return number, labels
    return None


def _verdict(number: int, states: Mapping[int, RankState | None]) -> str:
    known = {rank: state for rank, state in states.items() if state is not None and state.issued <= number}
    gone = [rank for rank, state in known.items() if state.failed is not None and not state.late]
    absent = [rank for rank in known if rank not in gone]
    silent = [rank for rank, state in states.items() if state is None]
    parts = []
    if absent:
        parts.append(f"{ranks_text(absent)} {'has' if len(absent) == 1 else 'have'} not issued it")
    if gone:
        parts.append(f"{ranks_text(gone)} gave up before it")
    if silent:
        parts.append(f"{ranks_text(silent)} gave no answer")
    text = "; ".join(parts) or "all ranks have issued it, and its data do not arrive"
    return f"{text[0].upper()}{text[1:]}."


def _doing(state: RankState | None, title: str, number: int, *, timed: bool) -> str:
    """What a rank does, as seen by ranks that wait for ``number``; ``timed``: and since when."""
    if state is None:
        return SILENT
    where = f" at {state.where}" if state.where else ""
    here = state.waits_here == number
    seconds = f"{state.seconds:.1f} s" if timed else ""
    waits = "it" if here else state.waits
    if state.failed is not None and state.late:
        text = f"gave up waiting for {waits}, after {seconds}{where}"
    elif state.failed is not None:
        text = f"has given up{where}: {state.failed}"
    else:
        text = f"{f'waits for {waits}' if waits else 'is in no collective'}, since {seconds}{where}"
    if here:
        return text
    if not state.recent:
        return f"{text}; it has issued none on {title}"
    last = max(state.recent)
    return f"{text}; its last one on {title} was number {last}, {state.recent[last]}"


def _listed(groups: Sequence[tuple[str, Sequence[int]]]) -> list[str]:
    lines = [f"  {ranks_text(ranks)}: {text}" for text, ranks in groups[:SHOWN]]
    return lines if len(groups) <= SHOWN else [*lines, f"  and {len(groups) - SHOWN} more groups of ranks"]

"""The training data of one rank: shuffled anew each epoch, resumable at any sample, at any number of ranks.

Problem: after a resume, often with another number of ranks or another micro-batch size, no sample may be repeated or
left out, although worker processes have already fetched what nobody has seen.
Idea: the state is (seed, epoch, position), where the position counts the samples that were handed out in this epoch
over all ranks. Everything else follows from it: the order (order.py), the cut (split.py).
Invariants: the state always names the next micro-batch to be handed out, so it may be saved at any moment between
two. All ranks get equally many micro-batches per epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from .feeds import Collate, Feed, LoaderConfig, MapFeed, StreamFeed
from .split import Split

__all__ = ["RepeatingLoader", "StaleIteratorError", "TrainLoader"]

_log = logging.getLogger("drivetrain.engine.data")

_VERSION = 1


class StaleIteratorError(RuntimeError):
    """An iterator was asked for more after its loader was moved, by `load_state_dict` or by a newer iterator."""


@dataclass(frozen=True, kw_only=True)
class _Cursor:
    epoch: int
    position: int


class TrainLoader:
    """Iterates over this rank's micro-batches.

    Iterating gives the rest of the current epoch, or the next epoch if the current one is finished;
    `RepeatingLoader` goes on for ever. One iterator is valid at a time, the newest.

    With a data set that has `__getitem__` and `__len__`, an epoch covers each sample exactly once over all ranks, up
    to the last micro-batch (see split.py for `drop_last`).

    A `sampler` yields the indices of a whole epoch, the same on all ranks, which are then cut over the ranks. It is
    run once per epoch with torch's global generator seeded by (seed, epoch), so `RandomSampler` and
    `WeightedRandomSampler` agree over ranks and resumes; one with a generator of its own must be made so that it
    does. A `DistributedSampler` is refused: it has cut the data already.

    An `IterableDataset` must give the same stream on all ranks; each rank keeps its part. Its position is a count of
    samples to be skipped by reading them, so a resume takes as long as reading them does.

    Random augmentation in worker processes is seeded by (seed, epoch, rank) and begins anew at a resume; without
    workers it draws from the generators of this process.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        config: LoaderConfig,
        *,
        collate_fn: Collate | None = None,
        sampler: Iterable[int] | None = None,
    ) -> None:
        """Raises ValueError for a data set that can't fill one micro-batch, TypeError for one that is neither kind."""
        if isinstance(sampler, DistributedSampler):
            raise TypeError(
                "a DistributedSampler gives each rank its part of the data, and so does this loader: pass the sampler"
                " of the whole data set, or none"
            )
        self._feed: Feed
        if isinstance(dataset, IterableDataset):
            if sampler is not None:
                raise TypeError("an IterableDataset has no indices that a sampler could choose; pass no sampler")
            self._feed = StreamFeed(dataset, config, collate_fn)
        else:
            self._feed = MapFeed(dataset, config, collate_fn, sampler)
        self.config = config
        self._seed = config.seed
        self._cursor = _Cursor(epoch=0, position=0)
        self._newest = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next micro-batch belongs to, from 0."""
        return self._cursor.epoch

    @property
    def position(self) -> int:
        """Samples of this epoch that were handed out already, over all ranks."""
        return self._cursor.position

    def __len__(self) -> int:
        """Micro-batches per rank in a whole epoch. Raises TypeError for a stream, whose length isn't known."""
        if self._feed.samples is None:
            raise TypeError("the length of an IterableDataset isn't known before its end")
        return Split(
            samples=self._feed.samples,
            micro_batch_size=self.config.micro_batch_size,
            ranks=self.config.ranks,
            drop_last=self.config.drop_last,
        ).batches()

    def __iter__(self) -> Iterator[Any]:
        self._newest += 1
        return self._run(self._newest)

    def state_dict(self) -> dict[str, int | bool | None]:
        """JSON, the same on every rank: enough to go on behind the last micro-batch that was handed out."""
        return {
            "version": _VERSION,
            "seed": self._seed,
            "epoch": self._cursor.epoch,
            "position": self._cursor.position,
            "samples": self._feed.samples,
            "shuffle": self.config.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken. The saved seed replaces the configured one, or the order would be
        another.

        Raises ValueError if the data set has another size than the one that the state belongs to, or is shuffled
        where it wasn't.
        """
        version = state.get("version")
        if version != _VERSION:
            raise ValueError(f"the data position has version {version!r}, this program reads {_VERSION}")
        for key, here in (("samples", self._feed.samples), ("shuffle", self.config.shuffle)):
            if state[key] != here:
                raise ValueError(
                    f"the data position was saved with {key} {state[key]} and this loader has {here}: the order of the"
                    " samples would be another one. Load without the data position to begin a new epoch"
                )
        if state["seed"] != self._seed:
            _log.info("going on with the data seed %s of the checkpoint instead of %s", state["seed"], self._seed)
        self._seed = int(state["seed"])
        self._cursor = _Cursor(epoch=int(state["epoch"]), position=int(state["position"]))
        self._newest += 1

    def _run(self, number: int) -> Iterator[Any]:
        self._check(number)
        begin = self._cursor
        batches = self._feed.open(begin.epoch, begin.position, self._seed)
        handed_out = False
        while (found := next(batches, None)) is not None:
            batch, after = found
            handed_out = True
            self._cursor = _next_epoch(begin) if after is None else _Cursor(epoch=begin.epoch, position=after)
            yield batch
            self._check(number)  # before anything more is fetched: workers that persist belong to the newest iterator
        if not handed_out and begin.position == 0:
            again = "; a stream must start anew each time that it is iterated over" if begin.epoch > 0 else ""
            raise ValueError(
                f"the data set gave fewer samples than one micro-batch over all ranks ({self.config.width})"
                f" in epoch {begin.epoch}{again}"
            )
        self._cursor = _next_epoch(begin)
        if not handed_out:  # nothing was left for a micro-batch of this size: the epoch is over
            yield from self._run(number)

    def _check(self, number: int) -> None:
        if number != self._newest:
            raise StaleIteratorError(
                "this iterator is no longer valid, the loader was moved: take a new one by iter(loader)"
            )


class RepeatingLoader:
    """Epoch after epoch of any loader, without an end.

    A loader with a `sampler` that has `set_epoch` (torch's DistributedSampler) is told each new epoch; a TrainLoader
    needs nothing, and when its state is loaded the repetition goes on from there.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._epoch = 0
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._iterator is not None:
            try:
                return next(self._iterator)
            except StopIteration:
                self._epoch += 1
                self._set_epoch()
            except StaleIteratorError:
                pass
        self._iterator = iter(self.loader)
        try:
            return next(self._iterator)
        except StopIteration as end:
            raise ValueError("the loader gives no micro-batch at all, so it can't be repeated") from end

    def _set_epoch(self) -> None:
        set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)


def _next_epoch(cursor: _Cursor) -> _Cursor:
    return _Cursor(epoch=cursor.epoch + 1, position=0)

"""Where micro-batches come from: data sets with an index, and data sets that are only a stream.

A feed opens an epoch at a position and hands out this rank's micro-batches, each with the position behind it.
Workers may fetch ahead; the position belongs to what was handed out. No feed draws from the global random generators
of this process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.dataloader import default_collate

from .order import Explicit, Order, Sequential, Shuffled, mixed_seed
from .split import Split, tail_share

__all__ = ["Collate", "Feed", "LoaderConfig", "MapFeed", "StreamFeed"]

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How data is loaded.

    Attributes:
        micro_batch_size: samples per micro-batch on one rank.
        rank: this process among the data-parallel ranks.
        ranks: how many data-parallel ranks there are.
        seed: of the shuffling; the same on all ranks.
        shuffle: visit the samples in another order in each epoch. Does not concern streams and samplers.
        drop_last: leave out samples that don't fill a micro-batch on every rank; see split.py.
        num_workers: processes per rank that load ahead; 0 loads in this process. A stream uses at most one.
        prefetch_factor: micro-batches that each worker loads ahead; None takes torch's default.
        persistent_workers: keep the workers between epochs. Does not concern streams.
        pin_memory: put micro-batches into page-locked memory, for faster copies to a GPU.
    """

    micro_batch_size: int
    rank: int = 0
    ranks: int = 1
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be at least 1, found {self.micro_batch_size}")
        if self.ranks < 1 or not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank must be one of the {self.ranks} data-parallel ranks (from 0), found {self.rank}")
        if self.num_workers < 0:
            raise ValueError(f"num_workers must be at least 0, found {self.num_workers}")
        if self.num_workers == 0 and (self.prefetch_factor is not None or self.persistent_workers):
            raise ValueError("prefetch_factor and persistent_workers need num_workers of at least 1, found 0")

    @property
    def width(self) -> int:
        """Samples of one micro-batch over all ranks."""
        return self.micro_batch_size * self.ranks


class Feed(Protocol):
    """A source of this rank's micro-batches."""

    @property
    def samples(self) -> int | None:
        """Samples per epoch; None where that isn't known before the end."""
        ...

    def open(self, epoch: int, position: int, seed: int) -> Iterator[tuple[Any, int | None]]:
        """(micro-batch, the position behind it) from `position` on; None instead of a position behind the last of
        the epoch.

        A feed that doesn't know its end gives a position behind the last micro-batch too.
        """
        ...


class MapFeed:
    """A data set with `__getitem__` and `__len__`, in shuffled or plain order or in that of a sampler."""

    def __init__(
        self, dataset: Dataset[Any], config: LoaderConfig, collate: Collate | None, sampler: Iterable[int] | None
    ) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError(
                f"a {type(dataset).__name__} has neither a length nor is it an IterableDataset; give it __len__"
            )
        if sampler is not None and not isinstance(sampler, Sized):
            raise TypeError(f"a {type(sampler).__name__} has no length; a sampler needs __len__")
        self._config = config
        self._sampler = sampler
        self.samples: int | None = len(dataset if sampler is None else sampler)
        self._check_enough(self.samples)
        self._batches = _OpenedBatches()
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._batches,
            collate_fn=collate,
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor,
            persistent_workers=config.persistent_workers,
            pin_memory=config.pin_memory,
            generator=self._generator,
        )

    def open(self, epoch: int, position: int, seed: int) -> Iterator[tuple[Any, int | None]]:
        order = self._order(epoch, seed)
        split = Split(
            samples=len(order),
            micro_batch_size=self._config.micro_batch_size,
            ranks=self._config.ranks,
            drop_last=self._config.drop_last,
        )
        self._batches.open(order, split, self._config.rank, position)
        self._generator.manual_seed(mixed_seed(seed, epoch, self._config.rank))
        left = split.batches(position)
        for number, (batch, (_, after)) in enumerate(zip(self._loader, split.walk(position), strict=True), start=1):
            yield batch, None if number == left else after

    def _order(self, epoch: int, seed: int) -> Order:
        if self._sampler is not None:
            return Explicit(indices=_drawn(self._sampler, epoch, seed))
        assert self.samples is not None
        if self._config.shuffle:
            return Shuffled(samples=self.samples, seed=seed, epoch=epoch)
        return Sequential(samples=self.samples)

    def _check_enough(self, samples: int) -> None:
        needed = self._config.width if self._config.drop_last else 1
        if samples < needed:
            raise ValueError(
                f"the data set has {samples} samples, fewer than the {needed} of one micro-batch over all ranks"
                f" (micro_batch_size {self._config.micro_batch_size} x {self._config.ranks} data-parallel ranks,"
                f" drop_last {self._config.drop_last}); use a smaller micro-batch, or drop_last=False, or more data"
            )


class StreamFeed:
    """A data set that can only be iterated over.

    Every rank reads the whole stream, which must be the same on all ranks, and keeps its own part. To resume at a
    position, the samples before it are read and dropped. If the data set has `set_epoch`, it is told the epoch
    before the stream is opened.
    """

    samples: int | None = None

    def __init__(self, dataset: IterableDataset[Any], config: LoaderConfig, collate: Collate | None) -> None:
        self._dataset = dataset
        self._config = config
        self._collate = default_collate if collate is None else collate

    def open(self, epoch: int, position: int, seed: int) -> Iterator[tuple[Any, int | None]]:
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
        config = self._config
        loader: DataLoader[Any] = DataLoader(
            _StreamShare(self._dataset, config, position),
            batch_size=None,
            collate_fn=self._collate,
            num_workers=min(config.num_workers, 1),
            prefetch_factor=config.prefetch_factor,
            pin_memory=config.pin_memory,
            generator=torch.Generator().manual_seed(mixed_seed(seed, epoch, config.rank)),
        )
        for batch in loader:
            position += config.width
            yield batch, position


class _OpenedBatches(Sampler[list[int]]):
    """The batch sampler of a MapFeed: runs in this process, ahead of what is handed out."""

    def __init__(self) -> None:
        self._opened: Callable[[], Iterator[list[int]]] = lambda: iter(())

    def open(self, order: Order, split: Split, rank: int, position: int) -> None:
        def lists() -> Iterator[list[int]]:
            for start, _ in split.walk(position):
                yield order.take(split.positions(start, rank))

        self._opened = lists

    def __iter__(self) -> Iterator[list[int]]:
        return self._opened()


class _StreamShare(IterableDataset[list[Any]]):
    """This rank's lists of samples of a stream."""

    def __init__(self, dataset: IterableDataset[Any], config: LoaderConfig, position: int) -> None:
        self._dataset = dataset
        self._config = config
        self._position = position

    def __iter__(self) -> Iterator[list[Any]]:
        config = self._config
        stream = itertools.islice(iter(self._dataset), self._position, None)
        while True:
            samples = list(itertools.islice(stream, config.width))
            if not samples or (len(samples) < config.width and config.drop_last):
                return
            size = tail_share(len(samples), config.ranks)
            first = config.rank * size
            yield [samples[number % len(samples)] for number in range(first, first + size)]


def _drawn(sampler: Iterable[int], epoch: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """An epoch's indices from a sampler, equal on all ranks and at every resume as long as it draws from torch's
    global generator.
    """
    set_epoch = getattr(sampler, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mixed_seed(seed, epoch))
        return np.fromiter(sampler, dtype=np.int64)

"""The three batch sizes and the number of ranks.

    train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel size

Given two of the three, the third follows; given only the first or the second, accumulation is 1. The problem with
that rule is what happens when the numbers don't fit: a quotient rounded down trains with another batch than the file
says, and "7 != 2 * 1 * 2" leaves the arithmetic to the reader. So nothing here is ever rounded, and each refusal
names the numbers and the values that would fit.

Invariant: `resolve` returns sizes whose product is exact, or raises.
"""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.engine.config.problems import ConfigError, Problem

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """Samples per optimizer step over all ranks, samples per rank and forward pass, and forward passes per optimizer
    step."""

    train: int
    micro: int
    accumulation: int


def resolve(data_parallel_size: int, *, train: int | None, micro: int | None, accumulation: int | None) -> BatchSizes:
    """Find the sizes that are None from the others.

    Args:
        data_parallel_size: ranks that see different samples, at least 1.
        train, micro, accumulation: the three numbers as configured, each at least 1 or None.

    Raises:
        ConfigError: too few numbers, or numbers that don't fit together.
        ValueError: a number below 1.
    """
    for name, value in (
        ("data_parallel_size", data_parallel_size),
        (TRAIN, train),
        (MICRO, micro),
        (STEPS, accumulation),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    ranks = data_parallel_size
    if train is not None and micro is not None and accumulation is not None:
        if train != micro * accumulation * ranks:
            raise _mismatch(ranks, train, micro, accumulation)
        return BatchSizes(train=train, micro=micro, accumulation=accumulation)
    if train is not None and micro is not None:
        return BatchSizes(
            train=train, micro=micro, accumulation=_divided(train, micro, ranks, given=MICRO, wanted=STEPS)
        )
    if train is not None and accumulation is not None:
        found = _divided(train, accumulation, ranks, given=STEPS, wanted=MICRO)
        return BatchSizes(train=train, micro=found, accumulation=accumulation)
    if micro is not None:
        accumulation = 1 if accumulation is None else accumulation
        return BatchSizes(train=micro * accumulation * ranks, micro=micro, accumulation=accumulation)
    if train is not None:
        return BatchSizes(train=train, micro=_divided(train, 1, ranks, given="", wanted=MICRO), accumulation=1)
    message = f"the batch size can't be found: neither {TRAIN} nor {MICRO} has a value"
    if accumulation is not None:
        message += f", and {STEPS} = {accumulation} alone does not say it"
    raise _error(
        TRAIN if accumulation is None else STEPS,
        "" if accumulation is None else str(accumulation),
        message,
        f'give {MICRO} (samples that fit on one rank), {TRAIN}, or both; for "auto" give them as hints',
    )


def _mismatch(ranks: int, train: int, micro: int, accumulation: int) -> ConfigError:
    product = micro * accumulation * ranks
    ways = [f"set {TRAIN} to {product}"]
    if train % (micro * ranks) == 0:
        ways.append(f"set {STEPS} to {train // (micro * ranks)}")
    if train % (accumulation * ranks) == 0:
        ways.append(f"set {MICRO} to {train // (accumulation * ranks)}")
    if train % (micro * accumulation) == 0:
        ways.append(f"run on {_ranks(train // (micro * accumulation))}")
    ways.append(f"drop {TRAIN} and let it follow from the other two")
    return _error(
        TRAIN,
        str(train),
        f"the batch sizes don't fit together: {MICRO} {micro} * {STEPS} {accumulation} * {_ranks(ranks)} = {product}, "
        f"not {train}",
        ", or ".join(ways),
    )


def _divided(train: int, other: int, ranks: int, *, given: str, wanted: str) -> int:
    """`train / (other * ranks)`, refused when it is not whole."""
    unit = other * ranks
    if train % unit == 0:
        return train // unit
    below, above = train // unit * unit, (train // unit + 1) * unit
    nearest = f"{below} or {above}" if below else f"{above}"
    ways = [f"set {TRAIN} to {nearest}"]
    if given and train % ranks == 0:
        share = train // ranks
        fits = max(n for n in range(1, min(other, share) + 1) if share % n == 0)
        ways.append(f"set {given} to {fits}")
    elif given:
        ways.append(f"drop {TRAIN} and give {wanted} instead")
    divisor = f"{given} {other} * {_ranks(ranks)} = {unit}" if given else _ranks(ranks)
    message = f"{TRAIN} {train} can't be divided by {divisor} without a remainder, so there is no {wanted}"
    raise _error(TRAIN, str(train), message, ", or ".join(ways))


def _ranks(count: int) -> str:
    return f"{count} data-parallel rank{'' if count == 1 else 's'}"


def _error(path: str, found: str, message: str, hint: str) -> ConfigError:
    return ConfigError([Problem(path=path, found=found, message=message, hint=hint)])

"""The user's own state in a checkpoint: any nest of containers, numbers, strings and tensors.

Problem: `torch.save` pickles anything, and what was pickled can run code when it is read. A value that can't be read
back safely should be found when it is saved, not days later.
Idea: what is saved is read back at once the way a load will (`weights_only=True`); a value that fails is named with
its place and type.
"""

from __future__ import annotations

import io

import torch

from .errors import CheckpointError

__all__ = ["CLIENT_STATE", "decode_client_state", "encode_client_state"]

CLIENT_STATE = "client_state.pt"


def encode_client_state(state: object) -> bytes:
    """Raises CheckpointError naming the first value that can't be loaded without running code from the file."""
    encoded, error = _encode(state)
    if error is None:
        return encoded
    place, value = _offender(state, "client_state", depth=0) or ("client_state", state)
    kind = type(value)
    raise CheckpointError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}, which can't be loaded again without running code from the"
        f" file ({error}); hand over numbers, strings, tensors, and lists, tuples and dicts of them (a state_dict, say)"
    )


def decode_client_state(raw: bytes, where: str) -> object:
    """Raises CheckpointError if `raw` is damaged or holds anything but containers, numbers, strings and tensors."""
    try:
        loaded: object = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{where} was refused, nothing in it was run: {_first_line(error)}") from error
    return loaded


def _encode(value: object) -> tuple[bytes, str | None]:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), map_location="cpu", weights_only=True)
    except Exception as error:  # pickling fails with many kinds of errors, also those of the object's own methods
        return b"", _first_line(error)
    return buffer.getvalue(), None


def _offender(value: object, place: str, depth: int) -> tuple[str, object] | None:
    """The innermost value that fails, and where it is."""
    if _encode(value)[1] is None or depth > 50:
        return None
    inner: list[tuple[str, object]] = []
    if isinstance(value, dict):
        inner = [(f"{place}[{key!r}]", entry) for key, entry in value.items()] + [
            (f"a key of {place}", key) for key in value
        ]
    elif isinstance(value, (list, tuple)):
        inner = [(f"{place}[{index}]", entry) for index, entry in enumerate(value)]
    for inner_place, entry in inner:
        found = _offender(entry, inner_place, depth + 1)
        if found is not None:
            return found
    return place, value


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]

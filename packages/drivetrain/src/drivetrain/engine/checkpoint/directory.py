"""The folder of a run's checkpoints: names, the `latest` file, and how a new checkpoint takes its place.

Problem: a crash at any moment, also while a checkpoint of the same name is replaced, must leave the last good one
loadable.
Idea: everything is written under a temporary name, and names change by rename only.

    <directory>/latest                       text: the tag of the newest checkpoint
    <directory>/<tag>/                       a complete checkpoint
    <directory>/.<tag>.partial-<nonce>/      one that is being written; a crash leaves it behind
    <directory>/.<tag>.replaced-<nonce>/     an older checkpoint of that tag, on its way out

    commit:  .tag.partial-n  is complete on stable storage
             tag             -> .tag.replaced-n        only if the tag exists
             .tag.partial-n  -> tag
             latest          := tag                    (new file, then rename)
             .tag.replaced-n is removed

Between the second and the third line there is no folder named `tag`. Whoever looks for the tag then takes
`.tag.replaced-n`, and the next save gives it its name back. The next save also removes what crashes left behind, so
one run at a time saves into a directory.
Invariant: if `latest` was ever written, the tag in it resolves to a complete checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from .errors import CheckpointError, CheckpointNotFoundError, some
from .files import replace_file, sync_directory
from .manifest import MANIFEST

__all__ = [
    "LATEST",
    "check_tag",
    "clean_leftovers",
    "commit",
    "existing_tags",
    "partial_path",
    "read_latest",
    "resolve",
]

LATEST = "latest"
_DEEPSPEED = ": files of DeepSpeed, which this version does not read"
_HIDDEN = re.compile(r"\.(?P<tag>.+)\.(?P<kind>partial|replaced)-[0-9a-f]+")


def check_tag(tag: str) -> None:
    """Raises CheckpointError unless `tag` can be the name of a folder and isn't one of the reserved names."""
    if not isinstance(tag, str):
        raise CheckpointError(f"the tag of a checkpoint is text, found the {type(tag).__name__} {tag!r}; use str(tag)")
    if (
        not tag
        or tag in {".", "..", LATEST}
        or tag.startswith(".")
        or len(tag.encode()) > 200
        or not re.fullmatch(r"[^/\\\0-\x1f]+", tag)
    ):
        raise CheckpointError(
            f"{tag!r} can't be the tag of a checkpoint: a tag is the name of a folder, without '/' or '\\', not"
            f" starting with '.', at most 200 bytes long and not {LATEST!r}"
        )


def partial_path(directory: Path, tag: str, nonce: str) -> Path:
    return directory / f".{tag}.partial-{nonce}"


def existing_tags(directory: Path) -> list[str]:
    """Tags of the complete checkpoints there, oldest step first where tags end in numbers (`step9` before `step10`)."""
    tags = {path.name for path in directory.iterdir() if not path.name.startswith(".") and (path / MANIFEST).is_file()}
    tags |= {tag for tag, kind, path in _hidden(directory) if kind == "replaced" and (path / MANIFEST).is_file()}
    return sorted(
        tags, key=lambda tag: [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", tag)]
    )


def read_latest(directory: Path) -> str | None:
    """The tag in `latest`; None if there is no such file."""
    try:
        return (directory / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{directory / LATEST} is not text; write the tag to load into it, or give a tag"
        ) from error


def resolve(directory: Path, tag: str | None) -> tuple[str, Path]:
    """The tag to load (that of `latest` if None is asked for) and the folder that holds it."""
    if not directory.exists():
        raise CheckpointNotFoundError(f"checkpoint directory {directory} does not exist")
    if not directory.is_dir():
        raise CheckpointNotFoundError(
            f"checkpoint directory {directory} is a file; expected the folder that was given to save()"
        )
    if (directory / MANIFEST).is_file():
        raise CheckpointNotFoundError(
            f"{directory} is itself a checkpoint; give the folder that it lies in, {directory.parent}, and"
            f" {directory.name!r} as the tag"
        )
    if tag is None:
        tag = read_latest(directory)
        if tag is None:
            raise CheckpointNotFoundError(
                f"{directory} has no file {LATEST!r} that says what to load; {_what_is_there(directory)}"
            )
        asked = f"{directory / LATEST} names"
    else:
        asked = "asked for"
    check_tag(tag)
    found = _find(directory, tag)
    if found is None:
        raise CheckpointNotFoundError(
            f"checkpoint {tag!r} is not in {directory} ({asked} it); {_what_is_there(directory)}"
        )
    return tag, found


def clean_leftovers(directory: Path) -> list[str]:
    """Removes what earlier crashes left, and gives a checkpoint that was caught between its two renames its name back.

    Returns the names of what was removed.
    """
    removed = []
    for tag, kind, path in list(_hidden(directory)):
        if kind == "replaced" and not (directory / tag).exists() and (path / MANIFEST).is_file():
            os.rename(path, directory / tag)
            sync_directory(directory)
        else:
            _remove(path)
            removed.append(path.name)
    for path in directory.glob(f".{LATEST}.*"):
        if path.is_file():
            path.unlink()
    return removed


def commit(directory: Path, tag: str, nonce: str, *, update_latest: bool, on_phase: Callable[[str], None]) -> Path:
    """Gives the complete `.tag.partial-nonce` its name. See the module's docstring for the order."""
    partial, final = partial_path(directory, tag, nonce), directory / tag
    replaced = directory / f".{tag}.replaced-{nonce}"
    sync_directory(partial)
    if final.exists():
        os.rename(final, replaced)
        on_phase("retired")
    os.rename(partial, final)
    sync_directory(directory)
    on_phase("renamed")
    if update_latest:
        replace_file(directory / LATEST, tag.encode(), suffix=nonce)
        on_phase("latest-written")
    if replaced.exists():
        _remove(replaced)
    return final


def _remove(folder: Path) -> None:
    """The manifest goes first, so that a folder that is half removed is never taken for a checkpoint."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _hidden(directory: Path) -> list[tuple[str, str, Path]]:
    found = ((_HIDDEN.fullmatch(path.name), path) for path in sorted(directory.iterdir()) if path.is_dir())
    return [(match["tag"], match["kind"], path) for match, path in found if match is not None]


def _find(directory: Path, tag: str) -> Path | None:
    final = directory / tag
    if (final / MANIFEST).is_file():
        return final
    for name, kind, path in _hidden(directory):
        if name == tag and kind == "replaced" and (path / MANIFEST).is_file():
            return path
    if final.is_dir():
        inside = sorted(path.name for path in final.iterdir())
        raise CheckpointNotFoundError(
            f"{final} is not a complete checkpoint: it has no {MANIFEST}, which is written last (it holds"
            f" {some(inside, 5) if inside else 'nothing'}"
            f"{_DEEPSPEED if any(name.endswith('_states.pt') for name in inside) else ''}); {_what_is_there(directory)}"
        )
    return None


def _what_is_there(directory: Path) -> str:
    tags = existing_tags(directory)
    return f"checkpoints that are there: {some(tags, 20)}" if tags else "no checkpoints are there"

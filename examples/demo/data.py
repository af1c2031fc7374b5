"""Text that every machine with Python has: the source of the standard library, as token ids.

Some files are held out whole, so that the validation loss is about code that the model never saw: those whose name has
a hash that divides by 15, about one in fifteen. Which ones follows from the names alone, so it is the same at each run.
Left out are tests, tables that a program wrote, and what others installed into the same folder.
"""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizer import Tokenizer, count_words, train
from torch.utils.data import Dataset

LEFT_OUT = frozenset(
    "test tests idle_test __pycache__ site-packages dist-packages encodings pydoc_data lib2to3".split()  # noqa: SIM905
)
HELD_OUT_ONE_IN = 15
VALIDATION_WINDOWS = 64
_TABLE_DIGITS = 0.08  # share of digits from which a file is taken for a table
_LEAST_CHARACTERS = 1_000_000

TRAIN, VALID, TOKENIZER, FACTS = "train.npy", "valid.npy", "tokenizer.json", "corpus.json"

Ids = npt.NDArray[np.uint16]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file of the standard library."""

    name: str
    """Path below the library's folder, with slashes."""
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file is for validation."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What `prepare` found and wrote."""

    train_files: int
    valid_files: int
    characters: int
    vocabulary: int
    train_tokens: int
    valid_tokens: int
    valid_bytes: int
    """Of the held-out files, to express a loss per token as bits per byte."""

    @property
    def bits_per_byte(self) -> float:
        """What a loss of 1 nat per token is in bits per byte, on the held-out files."""
        return self.valid_tokens / self.valid_bytes / float(np.log(2))


def read_sources(root: Path | None = None) -> list[Source]:
    """The files, sorted by name.

    Raises FileNotFoundError if there is hardly any source, as in a Python that came without it.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    sources = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if LEFT_OUT.isdisjoint(parts):
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if not _is_table(text):
                sources.append(Source(name="/".join(parts), text=text))
    found = sum(len(source.text) for source in sources)
    if found < _LEAST_CHARACTERS:
        raise FileNotFoundError(
            f"{root} holds {found:,} characters of Python source, at least {_LEAST_CHARACTERS:,} are needed; this "
            "Python seems to come without the source of its library: use one from python.org, pyenv or your system"
        )
    return sorted(sources, key=lambda source: source.name)


def prepare(folder: Path, vocabulary: int, sources: Sequence[Source]) -> Corpus:
    """Train a tokenizer on the training files and write everything that training needs into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[bool, list[str]] = {False: [], True: []}
    for source in sources:
        parts[source.held_out].append(source.text)
    tokenizer = train(count_words(parts[False]), vocabulary)
    ids = {held_out: _encode(tokenizer, texts) for held_out, texts in parts.items()}
    np.save(folder / TRAIN, ids[False])
    np.save(folder / VALID, ids[True])
    tokenizer.save(folder / TOKENIZER)
    corpus = Corpus(
        train_files=len(parts[False]),
        valid_files=len(parts[True]),
        characters=sum(len(source.text) for source in sources),
        vocabulary=tokenizer.size,
        train_tokens=len(ids[False]),
        valid_tokens=len(ids[True]),
        valid_bytes=sum(len(text.encode()) for text in parts[True]),
    )
    (folder / FACTS).write_text(json.dumps(asdict(corpus), indent=2) + "\n", encoding="utf-8")
    return corpus


def read_facts(folder: Path) -> Corpus:
    """What `prepare` returned."""
    return Corpus(**json.loads((folder / FACTS).read_text(encoding="utf-8")))


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Consecutive stretches of `length` tokens, each with the tokens that follow."""

    def __init__(self, file: Path, length: int) -> None:
        self.ids: Ids = np.load(file)
        self.length = length
        if len(self) < 1:
            raise ValueError(f"{file} has {len(self.ids)} tokens, too few for one window of {length} and its targets")

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * self.length
        ids = torch.from_numpy(self.ids[start : start + self.length + 1].astype(np.int64))
        return {"tokens": ids[:-1], "targets": ids[1:]}


def validation_batches(windows: Windows, *, micro: int, rank: int, ranks: int) -> list[dict[str, torch.Tensor]]:
    """This rank's batches out of a fixed selection of windows, spread over the held-out files.

    Over all ranks it is the same selection whatever their number, and all batches are of equal size, so the mean over
    batches and ranks is the mean over the selection.
    """
    wanted = min(VALIDATION_WINDOWS, len(windows)) // (micro * ranks) * micro * ranks
    if wanted == 0:
        raise ValueError(f"{len(windows)} held-out windows are too few for a batch of {micro} on {ranks} ranks")
    chosen = [index * len(windows) // wanted for index in range(wanted)][rank::ranks]
    batches = []
    for start in range(0, len(chosen), micro):
        items = [windows[index] for index in chosen[start : start + micro]]
        batches.append({key: torch.stack([item[key] for item in items]) for key in ("tokens", "targets")})
    return batches


def _is_table(text: str) -> bool:
    return len(re.findall(r"\d", text)) > _TABLE_DIGITS * len(text)


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Ids:
    ids: list[int] = []
    for text in texts:
        ids.append(tokenizer.end)
        ids += tokenizer.encode(text)
    return np.array(ids, dtype=np.uint16)

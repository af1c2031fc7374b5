"""A byte-pair tokenizer small enough to be trained on the spot.

Problem: on bytes, a short training mostly learns to spell; a ready-made vocabulary would have to be downloaded.
Idea: byte-pair encoding (Gage, 1994; Sennrich et al., 2016) over words, learned from the counts of words, so that the
length of the text hardly matters. A pair's count is kept up to date as merges change words, and a heap with stale
entries gives the most frequent pair.
Invariants: every text can be encoded, since all 256 bytes are tokens, and decoding gives it back; the same counts give
the same vocabulary on every machine (ties go to the smaller pair).

Ids: 0 to 255 are bytes, then come the merges in order, the last id is `END`, which separates files. `tokenizer_json` is
the same tokenizer in the format of the library `tokenizers`, which `transformers` reads.
"""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

Pair = tuple[int, int]

END = "<|endoftext|>"
WORD = r"\n+ *| ?[A-Za-z_]+| ?[0-9]{1,3}| ?[^ \nA-Za-z0-9_]+| +"
"""What merges stay within: a line break with the indentation behind it, a name, a number, marks, blanks."""

_WORD = re.compile(WORD)


@dataclass(frozen=True)
class Tokenizer:
    """Encodes text as token ids. `merges[i]` are the two tokens that token 256 + i is made of."""

    merges: tuple[Pair, ...]
    _ranks: dict[Pair, int] = field(init=False, repr=False, compare=False)
    _known: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ranks", {pair: rank for rank, pair in enumerate(self.merges)})
        object.__setattr__(self, "_known", {})

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return 256 + len(self.merges) + 1

    @property
    def end(self) -> int:
        """The id of `END`."""
        return self.size - 1

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""
        known = self._known
        ids: list[int] = []
        for word in _WORD.findall(text):
            tokens = known.get(word)
            if tokens is None:
                tokens = known[word] = self._encode_word(word)
            ids += tokens
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        table = self.token_bytes()
        return b"".join(table[index] for index in ids).decode("utf-8", errors="replace")

    def token_bytes(self) -> list[bytes]:
        """What each id stands for."""
        table = [bytes([byte]) for byte in range(256)]
        for left, right in self.merges:
            table.append(table[left] + table[right])
        return [*table, END.encode()]

    def _encode_word(self, word: str) -> tuple[int, ...]:
        tokens = list(word.encode())
        ranks = self._ranks
        while len(tokens) > 1:
            pairs = pairwise(tokens)
            rank, pair = min((ranks.get(pair, len(ranks)), pair) for pair in pairs)
            if rank == len(ranks):
                break
            tokens = _merged(tokens, pair, 256 + rank)
        return tuple(tokens)

    def save(self, path: Path) -> None:
        """Write the file `tokenizer.json`."""
        path.write_text(json.dumps(self.tokenizer_json(), ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read what `save` wrote."""
        model = json.loads(path.read_text(encoding="utf-8"))["model"]
        ids: dict[str, int] = model["vocab"]
        return cls(tuple((ids[left], ids[right]) for left, right in model["merges"]))

    def tokenizer_json(self) -> dict[str, Any]:
        """The tokenizer in the format of the library `tokenizers`."""
        signs = _signs_of_bytes()
        words = ["".join(signs[byte] for byte in token) for token in self.token_bytes()[:-1]]
        by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        split = {"type": "Split", "pattern": {"Regex": WORD}, "behavior": "Isolated", "invert": False}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": self.end, "content": END, **flags, "special": True}],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, by_bytes]},
            "post_processor": None,
            "decoder": by_bytes,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {word: index for index, word in enumerate(words)},
                "merges": [[words[left], words[right]] for left, right in self.merges],
            },
        }


def save_for_transformers(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files from which `transformers.AutoTokenizer` makes the tokenizer, beside a model."""
    tokenizer.save(folder / "tokenizer.json")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def count_words(texts: Iterable[str]) -> Counter[str]:
    """How often each word occurs."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(_WORD.findall(text))
    return counts


def train(words: Counter[str], size: int) -> Tokenizer:
    """Learn a tokenizer of `size` tokens (fewer, if the words run out) from `words`. Rare words are left out.

    Raises ValueError for a size that the bytes and `END` alone exceed.
    """
    if size < 257:
        raise ValueError(f"a vocabulary of {size} tokens is too small: 256 bytes and {END} are always there")
    frequent = sorted((word, count) for word, count in words.items() if count > 2 and len(word) > 1)
    spelled = [list(word.encode()) for word, _ in frequent]
    count_of = [count for _, count in frequent]
    counts: defaultdict[Pair, int] = defaultdict(int)
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, tokens in enumerate(spelled):
        for pair in pairwise(tokens):
            counts[pair] += count_of[index]
            places[pair].add(index)
    heap = [(-count, pair) for pair, count in counts.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    while heap and len(merges) < size - 257:
        negative, pair = heapq.heappop(heap)
        count = counts[pair]
        if count != -negative:  # the entry is out of date
            if count > 0:
                heapq.heappush(heap, (-count, pair))
            continue
        new = 256 + len(merges)
        merges.append(pair)
        changed: set[Pair] = set()
        for index in places.pop(pair):
            before = spelled[index]
            after = spelled[index] = _merged(before, pair, new)
            for old in pairwise(before):
                counts[old] -= count_of[index]
            for found in pairwise(after):
                counts[found] += count_of[index]
                places[found].add(index)
                if new in found:
                    changed.add(found)
        for found in changed:
            heapq.heappush(heap, (-counts[found], found))
    return Tokenizer(tuple(merges))


def _merged(tokens: Sequence[int], pair: Pair, new: int) -> list[int]:
    """`tokens` with each occurrence of `pair`, from the left, replaced by `new`."""
    left, right = pair
    out: list[int] = []
    index, last = 0, len(tokens) - 1
    while index <= last:
        if index < last and tokens[index] == left and tokens[index + 1] == right:
            out.append(new)
            index += 2
        else:
            out.append(tokens[index])
            index += 1
    return out


def _signs_of_bytes() -> list[str]:
    """The visible sign that byte-level tokenizers write for each byte: itself, or one from U+0100 on."""
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer import END, Tokenizer, count_words, save_for_transformers, train

TEXT = (
    "def add(first, second):\n    return first + second\n\n\ndef sub(first, second):\n    return first - second\n" * 3
)
TOKENIZER = train(count_words([TEXT]), 300)


def test_first_merges_are_the_most_frequent_pairs() -> None:
    words = Counter({"aab": 10, "ab": 5, "xy": 14, "rare": 1})
    learned = train(words, 260)
    a, b, x, y = (ord(letter) for letter in "abxy")
    # "ab" occurs 15 times, "xy" 14 times; then "a" + "ab" 10 times.
    assert learned.merges == ((a, b), (x, y), (a, 256))
    assert learned.size == 260
    assert learned.encode("aabxy") == [258, 257]


def test_merges_run_out_before_the_vocabulary_is_full() -> None:
    assert train(Counter({"ab": 5}), 1000).size == 256 + 1 + 1


def test_a_vocabulary_without_room_for_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="256 bytes"):
        train(Counter({"ab": 5}), 256)


def test_training_does_not_depend_on_the_order_of_words() -> None:
    words = count_words([TEXT])
    assert train(Counter(dict(reversed(words.items()))), 300).merges == TOKENIZER.merges


def test_text_gets_shorter_and_indentation_is_one_token() -> None:
    assert len(TOKENIZER.encode(TEXT)) < len(TEXT) / 3
    assert len(TOKENIZER.encode("\n    ")) == 1


@given(st.text())
def test_every_text_comes_back(text: str) -> None:
    encodable = text.encode("utf-8", errors="replace").decode("utf-8")
    assert TOKENIZER.decode(TOKENIZER.encode(encodable)) == encodable


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path / "tokenizer.json")
    assert Tokenizer.load(tmp_path / "tokenizer.json") == TOKENIZER


def test_transformers_reads_it_and_encodes_alike(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_for_transformers(TOKENIZER, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = TEXT + '# ä, ☃ and\ttabs   12345 "x"\r\n\n\n        self._name = None  \n'
    assert theirs(text)["input_ids"] == TOKENIZER.encode(text)
    assert theirs.decode(TOKENIZER.encode(text)) == text
    assert theirs.eos_token_id == TOKENIZER.end == len(theirs) - 1
    assert json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"][0]["content"] == END

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from data import TRAIN, VALID, Source, Windows, prepare, read_facts, read_sources, validation_batches

BODY = "def value(self):\n    return self.value\n\n" * 100


def sources(count: int = 60) -> list[Source]:
    return [Source(name=f"package/module{number}.py", text=f"# {number}\n{BODY}") for number in range(count)]


def test_the_standard_library_is_read_in_order_without_tests_and_tables() -> None:
    found = read_sources()
    names = [source.name for source in found]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not {"html/entities.py", "encodings/cp037.py"} & set(names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    held_out = [source for source in found if source.held_out]
    assert 0.02 < len(held_out) / len(found) < 0.15


def test_a_file_is_held_out_by_its_name_alone() -> None:
    assert [Source(name="a.py", text=text).held_out for text in ("", "x")] in ([True] * 2, [False] * 2)


def test_a_python_without_source_is_told(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("pass\n")
    with pytest.raises(FileNotFoundError, match="without the source"):
        read_sources(tmp_path)


def test_files_that_are_no_utf8_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("x = 'text'\n" * 100_000)
    (tmp_path / "latin.py").write_bytes(b"# \xe4\n" * 100)
    assert [source.name for source in read_sources(tmp_path)] == ["good.py"]


def test_prepared_files_hold_every_token_once(tmp_path: Path) -> None:
    facts = prepare(tmp_path, 300, sources())
    assert facts == read_facts(tmp_path)
    assert facts.train_files + facts.valid_files == 60
    assert facts.valid_files > 0
    train, valid = np.load(tmp_path / TRAIN), np.load(tmp_path / VALID)
    assert (len(train), len(valid)) == (facts.train_tokens, facts.valid_tokens)
    assert (valid == facts.vocabulary - 1).sum() == facts.valid_files  # each file begins with the mark of an end
    assert facts.bits_per_byte == pytest.approx(facts.valid_tokens / facts.valid_bytes / np.log(2))


def test_windows_follow_each_other_and_targets_are_one_ahead(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(25, dtype=np.uint16))
    windows = Windows(tmp_path / "ids.npy", 8)
    assert len(windows) == 3
    assert windows[1]["tokens"].tolist() == list(range(8, 16))
    assert windows[1]["targets"].tolist() == list(range(9, 17))
    with pytest.raises(ValueError, match="too few"):
        Windows(tmp_path / "ids.npy", 25)


def test_validation_is_the_same_selection_at_any_number_of_ranks(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(1000, dtype=np.uint16))
    windows = Windows(tmp_path / "ids.npy", 8)

    def selected(ranks: int) -> list[int]:
        batches = [
            batch for rank in range(ranks) for batch in validation_batches(windows, micro=4, rank=rank, ranks=ranks)
        ]
        assert {len(batch["tokens"]) for batch in batches} == {4}
        return sorted(torch.cat([batch["tokens"][:, 0] for batch in batches]).tolist())

    assert selected(1) == selected(2) == selected(4)
    assert len(selected(1)) == len(set(selected(1))) == 64
    with pytest.raises(ValueError, match="too few"):
        validation_batches(windows, micro=100, rank=0, ranks=2)

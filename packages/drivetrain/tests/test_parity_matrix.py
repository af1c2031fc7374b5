"""Training in every combination, against the same training in one process of plain torch.

What has gone wrong in sharded training went wrong where two things met: a stage and a number format, accumulation and
clipping, recomputation and a tied weight. So cells are generated: a stage, a precision, and features that change the
configuration, the model or the loop (`parity/parity_features.py` is the table). Both sides train three steps, and
losses, norms, learning rates, loss scales, parameters and buffers must agree on every rank. Combinations that make no
sense are cells too: they must be refused at start-up, in the words that the table has for them.

By default every pair of values meets in some cell. The full product of stages, precisions and pairs of features runs
with ``-m thorough``. One cell alone, say after a failure:

    python packages/drivetrain/tests/parity/parity_cell.py 3 bf16 "tied weights" clipping
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from parity_cover import pairs_of
from parity_features import FEATURES, PRECISIONS
from parity_ranks import MATRIX, run_all
from parity_recipe import STAGES, Cell, Crew, Feature, crew_of, spell_out


def most(features: Sequence[Feature]) -> int:
    """Features of a cell: more make fewer cells, in which it is harder to see what failed. Four ranks cost most."""
    return 8 if crew_of(features).ranks == 4 else 5


def by_crew(cells: Iterable[Cell]) -> dict[Crew, list[Cell]]:
    crews: dict[Crew, list[Cell]] = defaultdict(list)
    for cell in cells:
        crews[crew_of(FEATURES[name] for name in cell.features)].append(cell)
    return dict(sorted(crews.items()))


COVERING = by_crew(MATRIX.covering(most))


def most_only(crew: Crew) -> tuple[pytest.MarkDecorator, ...]:
    """On every change it is the cells of two ranks, and of two hosts."""
    return () if crew.ranks == 2 or crew.hosts > 1 else (pytest.mark.thorough,)


def assert_all_equal_plain_torch(cells: list[Cell], crew: Crew, folder: Path, seconds: float) -> None:
    wrong = run_all(cells, crew, folder, seconds)
    report = "\n\n".join(f"{name}\n{text}" for name, text in wrong.items())
    assert not wrong, f"{len(wrong)} of {len(cells)} cells differ from plain torch:\n\n{report}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("crew", [pytest.param(crew, marks=most_only(crew), id=str(crew)) for crew in COVERING])
def test_every_pair_equals_plain_torch(crew: Crew, tmp_path: Path) -> None:
    assert_all_equal_plain_torch(COVERING[crew], crew, tmp_path, 280)


FIRSTS = ("alone", *FEATURES)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("feature", FIRSTS)
def test_everything_equals_plain_torch(feature: str, precision: str, tmp_path: Path) -> None:
    """All cells of one precision whose first feature is this one, or that have none."""
    chosen = [
        cell for cell in MATRIX.product() if cell.precision == precision and (cell.features or ("alone",))[0] == feature
    ]
    for number, (crew, cells) in enumerate(by_crew(chosen).items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert_all_equal_plain_torch(cells, crew, folder, 1700)


# The matrix itself ----------------------------------------------------------------------------------------------------


def test_every_pair_of_values_is_trained_or_refused() -> None:
    cells = [cell for group in COVERING.values() for cell in group]
    met = {pair for cell in cells for pair in pairs_of(cell)}
    assert [sorted(map(str, pair)) for pair in MATRIX.pairs() if pair not in met] == []
    trained = {pair for cell in cells if not MATRIX.refusals(cell) for pair in pairs_of(cell)}
    for pair in MATRIX.pairs():
        if pair not in trained:  # then nothing that could be beside it would help
            around = [cell for cell in MATRIX.product() if pair in pairs_of(cell)]
            assert all(MATRIX.refusals(cell) for cell in around), sorted(map(str, pair))


def test_every_refusal_is_asked_for_and_says_why() -> None:
    asked = {id(refusal) for group in COVERING.values() for cell in group for refusal in MATRIX.refusals(cell)}
    for name, feature in FEATURES.items():
        for refusal in feature.refused:
            assert id(refusal) in asked, f"{name}: {refusal.reason}"
            assert refusal.reason
            assert refusal.text


def test_a_cell_is_what_its_features_say() -> None:
    recipe = spell_out(Cell(2, "bf16", ("accumulation", "clipping", "tied weights", "LAMB")), PRECISIONS, FEATURES)
    assert recipe.config["gradient_accumulation_steps"] == recipe.loop.micro == 3
    assert recipe.config["gradient_clipping"] == recipe.plain.max_norm == 0.3
    assert recipe.config["zero_optimization"] == {"stage": 2, "stage3_param_persistence_threshold": 0}
    assert recipe.config["optimizer"]["type"] == "Lamb"
    assert recipe.shape.tied
    assert recipe.tolerance == FEATURES["LAMB"].amplifies * PRECISIONS["bf16"].tolerance
    assert len({str(cell) for cell in MATRIX.product()}) == sum(1 for _ in MATRIX.product())
    assert STAGES == (0, 1, 2, 3)

"""Runs one cell of the parity matrix: ``python parity_cell.py STAGE PRECISION FEATURE...``"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from parity_features import FEATURES
from parity_ranks import run_all
from parity_recipe import Cell, crew_of

if __name__ == "__main__":
    stage, precision, *features = sys.argv[1:]
    crew = crew_of(FEATURES[name] for name in features)
    with tempfile.TemporaryDirectory() as folder:
        wrong = run_all([Cell(int(stage), precision, tuple(features))], crew, Path(folder), 60)
    print("\n".join(wrong.values()) or "equal to plain torch, or refused as it should be")
    raise SystemExit(bool(wrong))

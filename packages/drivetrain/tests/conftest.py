"""Lets tests, and the ranks that they start, import the helpers that lie in folders beside them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "parity"))

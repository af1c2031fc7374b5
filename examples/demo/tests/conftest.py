"""The demo's modules are scripts that import each other by name; tests find them the same way."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

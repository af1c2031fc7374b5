"""Every op in plain torch: the oracle of the tests and the fallback on any device. `dispatch` chooses."""

from __future__ import annotations

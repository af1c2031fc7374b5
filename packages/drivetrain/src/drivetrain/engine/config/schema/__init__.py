"""The schema: one frozen pydantic model for each section, with what each key means and whether this version has it.

Read `keys.py` first, then `top.py`. Nothing here reads files or resolves anything; the loader does
(`config/loading.py`).
"""

from __future__ import annotations

"""Pages that are made rather than written: the configuration reference out of the schema, CONTRIBUTING.md as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.engine.config import reference_markdown

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

REFERENCE = "<!-- the reference goes here -->"
CONTRIBUTING = "<!-- CONTRIBUTING.md goes here -->"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Called by mkdocs for every page before it is rendered."""
    if REFERENCE in markdown:
        markdown = markdown.replace(REFERENCE, reference_markdown())
    if CONTRIBUTING in markdown:
        root = Path(config.config_file_path).parent
        markdown = markdown.replace(CONTRIBUTING, (root / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    return markdown

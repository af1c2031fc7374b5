"""What a name that nobody knows was probably meant to be.

In this order: a sentence written for the name, since people get it wrong often; the same name elsewhere in the tree
(right key, wrong section); a name spelled nearly so at the same level; a name spelled nearly so elsewhere; the names
of the level.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from drivetrain.engine.config.schema.keys import WORKS, Section, names_of
from drivetrain.engine.config.schema.tree import ANY_NAME, walk, walk_arguments

NEAR = 0.6
"""Likeness (difflib ratio) that is enough among the few names of one level."""
NEAR_ELSEWHERE = 0.78
"""Likeness that is enough among all the names of the tree."""
FEW = 14
"""Names that are listed when nothing is near."""


def for_unknown(name: str, section: type[Section], given: tuple[str | int, ...]) -> str:
    """A hint for the unknown key `name` of a section that stands at the path `given`; "" when there is nothing to
    say."""
    if name in section.mistaken:
        return section.mistaken[name]
    level = sorted({*names_of(section), *section.renamed})
    elsewhere = _elsewhere()
    here = ".".join(part for part in given if isinstance(part, str))
    homes = sorted(home for home in elsewhere.get(name, ()) if home != here)
    if 0 < len(homes) <= 3:
        return "it belongs " + " or ".join(f'in "{home}"' if home else "at the top level" for home in homes)
    near = nearest(name, level, NEAR)
    if near is not None:
        return f'did you mean "{near}"?'
    near = nearest(name, elsewhere, NEAR_ELSEWHERE)
    if near is not None and len(elsewhere[near]) <= 3:
        places = " or ".join(
            f'"{home}.{near}"' if home else f'"{near}" at the top level' for home in sorted(elsewhere[near])
        )
        return f"did you mean {places}?"
    if len(level) <= FEW:
        return "the keys here are " + ", ".join(level) if level else "there are no keys here"
    return "`drivetrain schema` lists every key"


def nearest(name: str, names: Iterable[str], cutoff: float) -> str | None:
    """The one of `names` that is most like `name`, if any is like enough; case does not matter."""
    folded: dict[str, str] = {}
    for candidate in names:
        folded.setdefault(candidate.lower(), candidate)
    found = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=cutoff)
    return folded[found[0]] if found else None


def _elsewhere() -> dict[str, set[str]]:
    """Each name in the tree with the dotted paths of the sections that have it."""
    homes: dict[str, set[str]] = {}
    for source, working in ((walk(), False), (walk_arguments(), True)):
        for entry in source:
            if working and entry.status is not WORKS:
                continue
            home = ".".join(part for part in entry.path[:-1] if part != ANY_NAME)
            for name in (entry.path[-1], *entry.key.aliases):
                homes.setdefault(name, set()).add(home)
    return homes

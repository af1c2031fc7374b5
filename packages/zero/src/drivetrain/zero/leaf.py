"""Modules that are gathered as a whole, because what runs inside them is not the same everywhere.

The problem: at stage 3 a gather needs all ranks. Where data decide which child runs (the experts of a mixture, a
branch, an early exit), ranks would wait for each other at different gathers, for ever. The idea: a leaf is one unit,
and its gather is issued by its own forward call, which all ranks make; what then runs inside needs no communication.

Leaves are named by the user, or found: a container without a forward of its own that holds experts (called
``experts``, or of classes with ``expert`` in their name) makes a leaf of the module that picks among them. Blocks that
are units anyway need no rule; they are leaves by construction.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from drivetrain.zero.classes import ModuleClass, class_name, is_class

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True)
class LeafRule:
    """Which modules are leaves; any of the conditions suffices.

    Attributes:
        classes: classes, their bare names, or their dotted names (``package.module.Class``, ``torch.nn.Linear``).
        names: names in the module tree, as ``named_modules`` gives them.
        suffixes: endings of names, whole components: ``mlp`` matches ``layers.3.mlp`` and not ``layers.3.submlp``.
        find: look for modules that pick among experts.
        granularity_numel: a module with fewer parameters than this for each module within it, itself included, is a
            leaf: gathering its parts one by one would cost more calls than bytes. 0 for none.
    """

    classes: tuple[ModuleClass, ...] = ()
    names: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    find: bool = True
    granularity_numel: int = 0

    def matches(self, name: str, module: nn.Module) -> bool:
        """Whether ``module``, called ``name`` in the tree, is a leaf."""
        return self._named(name, module) or (self.find and _picks_experts(module)) or self._fine_grained(module)

    def _named(self, name: str, module: nn.Module) -> bool:
        return (
            any(is_class(type(module), wanted) for wanted in self.classes)
            or name in self.names
            or any(name == suffix or name.endswith("." + suffix) for suffix in self.suffixes)
        )

    def _fine_grained(self, module: nn.Module) -> bool:
        if not self.granularity_numel or next(module.children(), None) is None:
            return False
        numel = sum(parameter.numel() for parameter in module.parameters())
        return numel / sum(1 for _ in module.modules()) < self.granularity_numel

    def unmatched(self, module: nn.Module) -> list[str]:
        """The classes, names and suffixes that match nothing in ``module``'s tree, for a message."""
        tree = list(module.named_modules())
        rules = [
            *((f"class '{class_name(wanted)}'", LeafRule(classes=(wanted,))) for wanted in self.classes),
            *((f"name '{wanted}'", LeafRule(names=(wanted,))) for wanted in self.names),
            *((f"suffix '{wanted}'", LeafRule(suffixes=(wanted,))) for wanted in self.suffixes),
        ]
        return [text for text, rule in rules if not any(rule._named(name, part) for name, part in tree)]


FOUND = LeafRule()
"""Only the leaves that are found by what they hold."""


def _picks_experts(module: nn.Module) -> bool:
    return any(
        isinstance(child, _WITHOUT_FORWARD)
        and len(child) > 1
        and (name == "experts" or all("expert" in type(expert).__name__.lower() for expert in child.children()))
        for name, child in module.named_children()
    )

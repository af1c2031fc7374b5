"""Copies of gathered weights that torch.autocast makes, and that outlive the weights.

The problem: under autocast a product converts its weight first; autograd saves the converted copy for backward, and
autocast keeps it in a cache until its context ends. So at stage 3, where a weight is released right after its use, the
whole model would pile up in 16 bits from forward to backward, and without gradients until the context ends.

The idea: when a unit is released, the cache is emptied, and in the graph each saved copy is replaced by how to make it:
this parameter in that dtype. Backward makes it again, when the parameter is whole anyway.

        parameter ─ ToCopy ─ T ─┐
        input ──────────────── Addmm ─ output         Addmm's saved mat2 is the copy, transposed

Invariant: what is not recognised stays as it is, which costs memory and changes nothing. Recognised are operands of
products and convolutions whose way back in the graph leads over views of the whole and one conversion to a parameter of
the unit, and frozen weights of ``torch.nn.Linear``, which have no way back. The way is gone once more without data, and
must end in the strides that were saved: a conversion into another memory format is not recognised. Nor are parts of
weights (one expert's of many), weights that are packed together, and saved tensors that somebody else has hooks on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
from torch import nn
from torch.autograd.graph import Node

_OPERANDS: Final[Mapping[str, Mapping[int, str]]] = MappingProxyType(
    {
        "MmBackward0": {0: "self", 1: "mat2"},
        "AddmmBackward0": {1: "mat1", 2: "mat2"},
        "BmmBackward0": {0: "self", 1: "mat2"},
        "BaddbmmBackward0": {1: "batch1", 2: "batch2"},
        "MvBackward0": {0: "self", 1: "vec"},
        "AddmvBackward0": {1: "mat", 2: "vec"},
        "ConvolutionBackward0": {1: "weight"},
    }
)
"""By the name of a node, the operands that may be weights: number of the edge, name of what is saved."""

_RESHAPES: Final = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "ExpandBackward0"})
_VIEWS: Final = _RESHAPES | {"TBackward0", "TransposeBackward0", "PermuteBackward0", "UnsqueezeBackward0"}
_CONVERSION: Final = "ToCopyBackward0"
_WEIGHT_OF_LINEAR: Final = MappingProxyType({"MmBackward0": "mat2", "AddmmBackward0": "mat2"})


@dataclass(frozen=True)
class _Recipe:
    """How a saved copy is made again: ``weight`` in ``dtype``, seen in a certain way."""

    weight: nn.Parameter
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def make(self) -> torch.Tensor:
        if self.weight._version != self.version:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.weight.shape)} was changed in place between forward and backward. "
                "Under torch.autocast at ZeRO stage 3, backward makes the low-precision copy of a weight anew, and it "
                "would be that of other values; change parameters after the backward pass"
            )
        copy = self.weight.detach().to(self.dtype)
        return copy.as_strided(self.size, self.stride, self.offset)


def _way_back(node: Node | None) -> list[Node]:
    """Views and conversions from ``node`` on, and what they start from, which comes last."""
    way: list[Node] = []
    while node is not None:
        way.append(node)
        if node.name() not in _VIEWS and node.name() != _CONVERSION:
            break
        node = node.next_functions[0][0]
    return way


def _dimension(number: int, dims: int) -> int:
    """Graphs keep negative numbers as unsigned ones."""
    return (number - (1 << 64) if number >= 1 << 63 else number) % dims


def _permutation(node: Node, dims: int) -> list[int]:
    """The order of dimensions that a view puts them in."""
    order = list(range(dims))
    if node.name() == "PermuteBackward0":
        return [_dimension(number, dims) for number in node._saved_dims]  # type: ignore[attr-defined]
    if node.name() == "TransposeBackward0":
        a, b = (_dimension(number, dims) for number in (node._saved_dim0, node._saved_dim1))  # type: ignore[attr-defined]
        order[a], order[b] = b, a
    elif node.name() == "TBackward0":
        order.reverse()
    return order


def _size_before(node: Node, after: Sequence[int]) -> list[int]:
    """The size of what a view was taken of, given its own."""
    if node.name() in _RESHAPES:
        return list(node._saved_self_sym_sizes)  # type: ignore[attr-defined]
    if node.name() == "UnsqueezeBackward0":
        gone = _dimension(node._saved_dim, len(after))  # type: ignore[attr-defined]
        return [size for dim, size in enumerate(after) if dim != gone]
    order = _permutation(node, len(after))
    return [after[order.index(dim)] for dim in range(len(after))]


def _follows(saved: torch.Tensor, weight: torch.Tensor, way: Sequence[Node]) -> bool:
    """Whether ``saved`` is laid out as ``weight`` would be, seen and converted on ``way`` (its last step first)."""
    sizes = [list(saved.shape)]
    for node in way:
        sizes.append(_size_before(node, sizes[-1]))
    if sizes.pop() != list(weight.shape):
        return False
    seen = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    for node, size in zip(reversed(way), reversed(sizes), strict=True):
        name = node.name()
        if name == _CONVERSION:
            seen = seen.to(saved.dtype)
        elif name == "ExpandBackward0":
            seen = seen.expand(size)
        elif name in _RESHAPES:
            seen = seen.view(size)
        elif name == "UnsqueezeBackward0":
            seen = seen.unsqueeze(_dimension(node._saved_dim, len(size)))  # type: ignore[attr-defined]
        else:
            seen = seen.permute(_permutation(node, len(size)))
    room = weight.numel() * saved.element_size()
    return seen.stride() == saved.stride() and saved.untyped_storage().nbytes() == room


class CastCopies:
    """Replaces the saved copies of one unit's weights by recipes, call by call.

    Args:
        weights: the parameters that are released.
        device: where they are.
        bring: makes them whole, if they are not.
    """

    def __init__(self, weights: Iterable[nn.Parameter], device: torch.device, bring: Callable[[], None]) -> None:
        self._weights = frozenset(map(id, weights))
        self._device = device.type
        self._bring = bring
        self._began = 0  # nodes made since have this number or a higher one
        self._frozen: list[tuple[Node, nn.Parameter]] = []  # products of linear layers

    @property
    def active(self) -> bool:
        """Whether autocast is on."""
        return self._device != "meta" and torch.is_autocast_enabled(self._device)

    def begin(self) -> None:
        """A call of the unit begins."""
        self._began = torch._C._autograd._get_sequence_nr()
        self._frozen.clear()

    def see(self, module: nn.Module, output: object) -> None:
        """Within it ``module`` has returned ``output``. If it is a linear layer, this is where its product is found."""
        if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
            return
        weight = module.weight
        if not isinstance(weight, nn.Parameter) or weight.requires_grad or id(weight) not in self._weights:
            return
        if not isinstance(output, torch.Tensor):
            return
        way = _way_back(output.grad_fn)
        if way and way[-1].name() in _WEIGHT_OF_LINEAR:
            self._frozen.append((way[-1], weight))

    def end(self, outputs: Iterable[torch.Tensor]) -> None:
        """The call is over, its weights released: drop the copies. ``outputs`` are those that backward will reach."""
        torch.clear_autocast_cache()
        for node, weight in self._frozen:
            self._replace(node, _WEIGHT_OF_LINEAR[node.name()], weight, partial(_transposed, weight=weight))
        self._frozen.clear()
        seen: set[Node] = set()
        todo: list[Node | None] = [tensor.grad_fn for tensor in outputs]
        while todo:
            reached = todo.pop()
            if reached is None or reached in seen or reached._sequence_nr() < self._began:
                continue
            seen.add(reached)
            operands = _OPERANDS.get(reached.name(), {})
            for index, (edge, _) in enumerate(reached.next_functions):
                todo.append(edge)
                if index in operands:
                    self._replace_converted(reached, operands[index], _way_back(edge))

    def _replace_converted(self, node: Node, name: str, way: list[Node]) -> None:
        weight = getattr(way.pop(), "variable", None) if way else None
        if not isinstance(weight, nn.Parameter) or id(weight) not in self._weights:
            return
        if [step.name() for step in way].count(_CONVERSION) == 1:
            self._replace(node, name, weight, lambda saved: _follows(saved, weight, way))

    def _replace(self, node: Node, name: str, weight: nn.Parameter, is_copy: Callable[[torch.Tensor], bool]) -> None:
        """Replace the tensor that ``node`` has saved as ``name``, if it turns out to be a copy of ``weight``."""

        def pack(saved: torch.Tensor) -> torch.Tensor | _Recipe:
            if saved.dtype == weight.dtype or not is_copy(saved):
                return saved
            return _Recipe(
                weight, weight._version, saved.dtype, saved.shape, saved.stride(), int(saved.storage_offset())
            )

        def unpack(kept: torch.Tensor | _Recipe) -> torch.Tensor:
            if isinstance(kept, torch.Tensor):
                return kept
            with torch.no_grad():
                self._bring()
                return kept.make()

        try:
            getattr(node, f"_raw_saved_{name}").register_hooks(pack, unpack)
        except RuntimeError:
            return  # nothing is saved there, or somebody else has hooks on it


def _transposed(saved: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``saved`` can be a copy of ``weight`` [out, in] seen as [in, out]."""
    room = weight.numel() * saved.element_size()
    fits = tuple(saved.shape) == tuple(reversed(weight.shape)) and saved.stride() == (1, saved.shape[0])
    return fits and saved.untyped_storage().nbytes() == room

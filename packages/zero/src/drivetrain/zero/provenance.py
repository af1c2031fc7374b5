"""Which sharded modules a loss depends on, and the loss scale that a backward pass brings to each of them.

The problem: one loss may depend on several sharded modules (an actor and a critic, a generator and a discriminator),
each with a loss scale of its own, or with none. A backward pass brings one scale to all; a module whose optimizer
divides by another one would train on gradients that are wrong by a power of two, without a word. The idea: a call of a
sharded module leaves a mark on the autograd nodes of its outputs. Who scales a loss follows its graph to these marks
and, when the backward pass begins, tells every module that it found there what the gradients will carry. The walk is
short: at a mark it goes on from the inputs of the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

_KEY = "drivetrain.zero.provenance"


class Carrier(Protocol):
    """The backward passes through one sharded module.

    Attributes:
        trains: there are parameters that take gradients.
    """

    trains: bool

    def carry(self, scale: float) -> None:
        """The pass that runs now brings gradients that are ``scale`` times those of the loss."""


class _Call:
    """A call of a sharded module or, with no inputs, the use of one of its parameters."""

    def __init__(self, carrier: Carrier, inputs: Sequence[Node]) -> None:
        self.carrier = weakref.ref(carrier)  # a mark must not keep a model alive
        self.inputs = inputs


class _Scaled:
    """The mark of a loss that has been multiplied by a loss scale."""


def mark_call(inputs: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor], carrier: Carrier) -> None:
    """Remember on the nodes of ``outputs`` that a module made them of ``inputs``."""
    call = _Call(carrier, [tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None])
    for tensor in outputs:
        if tensor.grad_fn is not None:
            _mark(tensor.grad_fn, call)


def mark_parameter(accumulator: Node, carrier: Carrier) -> None:
    """Remember on the node that accumulates a parameter's gradient whose it is."""
    _mark(accumulator, _Call(carrier, ()))


def _mark(node: Node, mark: _Call | _Scaled) -> None:
    notes: Any = node.metadata  # a dict, which torch's annotations take for a method
    notes.setdefault(_KEY, []).append(mark)


def scaled(loss: torch.Tensor, scale: float, own: Carrier) -> torch.Tensor:
    """``loss * scale``, at least in fp32, whose backward pass tells ``own`` and all that it comes from of the scale.

    Raises:
        RuntimeError: there is a loss scale in ``loss`` already.
    """
    product = loss.to(torch.promote_types(loss.dtype, torch.float32)) * scale
    if product.grad_fn is not None:
        announce([product], scale, own)
        _mark(product.grad_fn, _Scaled())
    return product


def announce(outputs: Sequence[torch.Tensor], scale: float, own: Carrier) -> list[RemovableHandle]:
    """As `scaled`, for a backward pass that begins at ``outputs`` with gradients that carry the scale."""
    marks = list(_marks_behind(outputs))
    if any(isinstance(mark, _Scaled) for mark in marks):
        raise RuntimeError(
            "this loss carries a loss scale already, and would carry it twice: scale it once, by engine.backward(loss) "
            "or by engine.scale(loss).backward()"
        )
    carriers = {id(own): own, **_carriers(marks)}

    def tell(gradient: torch.Tensor) -> None:
        for carrier in carriers.values():
            carrier.carry(scale)

    return [tensor.register_hook(tell) for tensor in outputs if tensor.requires_grad]


def others_behind(outputs: Sequence[torch.Tensor], own: Carrier) -> bool:
    """Whether other sharded modules that train would get gradients of ``outputs``."""
    return any(carrier.trains and carrier is not own for carrier in _carriers(_marks_behind(outputs)).values())


def _carriers(marks: Iterable[_Call | _Scaled]) -> dict[int, Carrier]:
    alive = (mark.carrier() for mark in marks if isinstance(mark, _Call))
    return {id(carrier): carrier for carrier in alive if carrier is not None}


def _marks_behind(outputs: Iterable[torch.Tensor]) -> Iterator[_Call | _Scaled]:
    ahead: list[Node | None] = [tensor.grad_fn for tensor in outputs]
    seen: set[Node] = set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        notes: Any = node.metadata
        marks: Sequence[_Call | _Scaled] = notes.get(_KEY, ())
        yield from marks
        calls = [mark for mark in marks if isinstance(mark, _Call)]
        if calls:
            ahead += [entry for call in calls for entry in call.inputs]
        else:
            ahead += [entry for entry, _ in node.next_functions]

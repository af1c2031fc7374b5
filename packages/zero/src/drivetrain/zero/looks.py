"""Parameters that are away, and who looks at them.

The problem: hooks bring parameters in around the calls of the modules that own them. Another module's forward may read
one too (``self.other.weight``), and would find a placeholder: NaN. The idea: a parameter that is away has a class of
its own, in which every function of torch that has it among its arguments goes through here. One that reads elements,
while the root's forward runs, brings it in first. A parameter that is whole is an ordinary one, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

_READ_ATTRIBUTES = (
    *("data", "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_quantized"),
    *("is_sparse", "itemsize", "layout", "nbytes", "ndim", "requires_grad", "shape", "_version"),
)
_METHODS = (
    *("__hash__", "__len__", "detach", "dim", "element_size", "get_device", "is_complex", "is_contiguous"),
    *("is_floating_point", "ndimension", "nelement", "new_empty", "new_full", "new_ones", "new_zeros", "numel"),
    *("register_hook", "requires_grad_", "size", "storage_offset", "stride"),
)
_FUNCTIONS = (
    *("empty_like", "full_like", "is_complex", "is_floating_point", "numel", "ones_like", "rand_like", "randn_like"),
    *("zeros_like", "_has_compatible_shallow_copy_type"),
)
LOOKS: Final = frozenset(
    [
        *(getattr(torch.Tensor, name).__get__ for name in _READ_ATTRIBUTES),
        *(getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(getattr(torch, name) for name in _FUNCTIONS),
    ]
)
"""Functions that read no element of their arguments. One that is missing here costs a gather, and no more."""
_HARMLESS: Final = frozenset(
    [
        *(LOOKS - {torch.Tensor.detach, torch.Tensor.data.__get__}),  # type: ignore[attr-defined]
        torch.Tensor.data.__set__,  # type: ignore[attr-defined]
        *(torch.Tensor.data_ptr, torch.Tensor.untyped_storage, torch.Tensor.__repr__, torch.Tensor.__reduce_ex__),
    ]
)


def away(bring: Callable[[nn.Parameter], None]) -> type[nn.Parameter]:
    """The class of parameters that are away. ``bring``: called with one of which elements are about to be read."""

    class Away(nn.Parameter):
        """A parameter of which no element is on this rank."""

        @classmethod
        def __torch_function__(
            cls,
            function: Callable[..., Any],
            types: Sequence[type],
            args: Sequence[Any] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                if function not in _HARMLESS:
                    for value in (*args, *(kwargs or {}).values()):
                        for one in value if isinstance(value, (list, tuple)) else (value,):
                            if isinstance(one, Away):
                                bring(one)
                return function(*args, **(kwargs or {}))

    return Away

"""Memory that is elsewhere for a while: what has left the device, and who must not be let in meanwhile.

The problem: between phases of a job (training, then generation) its states should make room on the device and come back
as they were. Tensors are seen from many sides: parameters and optimizer state are views that programs hold, buckets are
read by collectives, graphs have saved views. The idea: what moves is the storage. Its bytes are copied away and it is
emptied, as released buckets are; coming back, it is filled again, and every view is right again. Tensors that programs
hold (parameters, what the optimizer works on and its state) show the copy meanwhile.

Invariant: nothing but the program's own tensors can be read while it is away. Reading an emptied storage ends the
process, so whoever would asks `MovedStates.require` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch


class StateKind(str, Enum):
    """Kinds of states that can be moved.

    Attributes:
        OPTIM_STATES: what the optimizer remembers, and errors of quantised gradients.
        HP_PARAMS: master weights, where they are not the parameters themselves.
        LP_PARAMS: the parameters in the dtype that they compute in; where there are no others, also the masters.
        LP_GRADS: reduced gradients.
        CONTIGUOUS_GRAD_BUFFER: gradients that are accumulating, and not reduced yet.
    """

    OPTIM_STATES = "optim_states"
    HP_PARAMS = "hp_params"
    LP_PARAMS = "lp_params"
    LP_GRADS = "lp_grads"
    CONTIGUOUS_GRAD_BUFFER = "contiguous_grad_buffer"


PARAMETERS = (StateKind.LP_PARAMS,)
WEIGHTS = (StateKind.LP_PARAMS, StateKind.HP_PARAMS)
OPTIMIZER_STATE = (StateKind.OPTIM_STATES,)
GRADIENTS = (StateKind.LP_GRADS, StateKind.CONTIGUOUS_GRAD_BUFFER)


@dataclass(frozen=True)
class _Parked:
    """One storage that is away.

    ``shown`` are tensors of the program that look at ``copy`` meanwhile, each with what it looks at else.
    """

    storage: torch.UntypedStorage
    copy: torch.Tensor  # [bytes] uint8
    shown: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def come_back(self, *, non_blocking: bool) -> None:
        self.storage.resize_(self.copy.numel())
        _bytes_of(self.storage).copy_(self.copy, non_blocking=non_blocking)
        for tensor, usual in self.shown:
            tensor.data = usual


class MovedStates:
    """What of one module's states is away. Made empty by `shard`.

    Args:
        rank: this process, for errors.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._parked: dict[StateKind, list[_Parked]] = {}
        self._where: torch.device | None = None

    @property
    def away(self) -> tuple[StateKind, ...]:
        """The kinds of which something is away."""
        return tuple(self._parked)

    @property
    def bytes(self) -> int:
        """How much is away."""
        return sum(one.copy.numel() for parked in self._parked.values() for one in parked)

    def require(self, doing: str, kinds: Iterable[StateKind] = tuple(StateKind)) -> None:
        """Refuse ``doing`` while something of ``kinds`` is away.

        Raises:
            RuntimeError: it is.
        """
        missing = [kind.value for kind in kinds if kind in self._parked] if self._parked else []
        if missing:
            raise RuntimeError(
                f"rank {self._rank}: {doing} needs {' and '.join(missing)}, which offload_states has moved to "
                f"{self._where}; call reload_states() first"
            )

    def move(
        self,
        kind: StateKind,
        tensors: Iterable[torch.Tensor],
        visible: Sequence[torch.Tensor],
        device: torch.device,
        *,
        pin_memory: bool = False,
        non_blocking: bool = False,
    ) -> None:
        """Move the storages of ``tensors`` to ``device``, with all that lies in them.

        Args:
            kind: what they are.
            visible: tensors that programs hold; those that look at such a storage look at the copy from now on.
            pin_memory: copy to pinned memory.
            non_blocking: do not wait for copies to be made.

        Raises:
            RuntimeError: there is no room for a copy, or others see the memory. What has been moved stays moved.
        """
        self._where = device
        copies = {one.copy.untyped_storage()._cdata for parked in self._parked.values() for one in parked}
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        leaving = [one for key, one in storages.items() if one.nbytes() and key not in copies]
        if not all(storage.resizable() for storage in leaving):
            raise RuntimeError(
                f"rank {self._rank}: {kind.value} cannot be moved: the memory of some was handed to others, as a numpy "
                "array or as shared memory, and has to stay"
            )
        for storage in leaving:
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device, pin_memory=pin_memory)
            copy.copy_(_bytes_of(storage), non_blocking=non_blocking)
            shown = []
            for tensor in visible:
                if tensor.untyped_storage()._cdata == storage._cdata:
                    shown.append((tensor, tensor.data))
                    tensor.data = _same_view(tensor, copy)
            self._parked.setdefault(kind, []).append(_Parked(storage, copy, tuple(shown)))
            storage.resize_(0)

    def come_back(self, *, non_blocking: bool = False) -> None:
        """Bring everything back to where it was."""
        while self._parked:
            _, parked = self._parked.popitem()
            for one in parked:
                one.come_back(non_blocking=non_blocking)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _same_view(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """``tensor`` over the bytes in ``copy``."""
    view = torch.empty(0, dtype=tensor.dtype, device=copy.device)
    return view.set_(copy.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

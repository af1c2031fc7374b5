"""What an optimizer step consists of: which micro-batch closes it, and how many items its loss is a mean over.

Micro-batches are counted from the last update, so that neither a boundary set by hand nor a resume with another number
of them leaves a step with too few.
"""

from __future__ import annotations

import torch

from drivetrain.comm import Axis, all_reduce


class Accumulation:
    """The place of the current micro-batch in its optimizer step.

    Args:
        per_step: micro-batches in a step.
        managed: they are counted; else every one closes a step.

    Attributes:
        done: micro-batches since the last update.
        boundary: what the program said about the current micro-batch and those after it; None leaves it to the count.
    """

    def __init__(self, per_step: int, *, managed: bool) -> None:
        self.per_step = per_step
        self.managed = managed
        self.done = 0
        self.boundary: bool | None = None

    @property
    def closes(self) -> bool:
        """Whether the current micro-batch is the last one before an update."""
        if not self.managed:
            return True
        return self.done + 1 >= self.per_step if self.boundary is None else self.boundary

    @property
    def within_step(self) -> bool:
        """Whether micro-batches have been counted that no update has used."""
        return self.managed and self.done > 0

    def count(self) -> str:
        """A micro-batch is over that does not close the step; why not, in words."""
        self.done += 1
        if self.boundary is not None:
            return "accumulating: the boundary is set to False"
        return f"accumulating: micro-batch {self.done} of {self.per_step}"

    def restart(self) -> None:
        """The next micro-batch is the first one of a step."""
        self.done = 0


class Items:
    """Counts what the losses of a step are sums over, such as tokens, where `Engine.backward` is told.

    Micro-batches and ranks have different numbers of them, and the mean of their means is not the mean over all items.
    So gradients of sums add up, and are divided by the number of all items once, by the step.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis  # everybody who trains
        self._count: torch.Tensor | None = None  # fp64, on this rank
        self._sum: torch.Tensor | None = None  # of losses, fp64, on this rank
        self._uncounted = False

    def require(self, weight: float | torch.Tensor | None) -> None:
        """Refuse, before its backward pass, a loss that does not go with those of the step so far.

        Raises:
            RuntimeError: there would be losses of both kinds in this step.
        """
        if self._count is not None if weight is None else self._uncounted:
            raise RuntimeError(
                f"rank {self._axis.world.rank}: some losses of this step came with weight=, others without; give it "
                "for all, or for none"
            )

    def add(self, weight: float | torch.Tensor | None) -> None:
        """A loss of the step, by the number of its items; None where it is a mean already."""
        if weight is None:
            self._uncounted = True
        else:
            count = torch.as_tensor(weight, dtype=torch.float64).to(self._axis.device)
            self._count = count if self._count is None else self._count + count

    def saw(self, loss: torch.Tensor) -> None:
        """The value of a loss whose items are counted."""
        value = loss.detach().double()
        self._sum = value if self._sum is None else self._sum + value

    @property
    def mean_loss(self) -> torch.Tensor | None:
        """The mean over the items of this rank, if they were counted."""
        return None if self._sum is None or self._count is None else self._sum / self._count

    def everywhere(self) -> float | None:
        """The number of items on all ranks; None if they were not counted. Collective where they were.

        Raises:
            RuntimeError: there are none.
        """
        if self._count is None:
            return None
        total = self._count.reshape(1).clone()
        all_reduce(total, self._axis).wait()
        if not total.item() > 0:
            raise RuntimeError(
                f"rank {self._axis.world.rank}: the weights of all losses of this step sum up to {total.item():g} over "
                "all ranks, so there is no mean to take; leave such a step out with engine.zero_grad()"
            )
        return total.item()

    def restart(self) -> None:
        """A new step begins."""
        self._count = self._sum = None
        self._uncounted = False

"""What a ZeRO stage is: a handful of choices, not a class of its own.

Stages differ in three questions only: is the optimizer's work split (1 and up), are gradients reduced as soon as they
are whole (2 and up) or once per step, and are parameters released after use (3). One core asks the `Policy`.
Stages after Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from drivetrain.kernels import QuantizationRule
from drivetrain.zero.leaf import FOUND, LeafRule
from drivetrain.zero.wire import WireRule

ReduceOp = Literal["mean", "sum"]
HALF_TYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback:
    """What quantisation lost is kept, in int8, and added to the next gradient (LoCo, arXiv:2407.04480).

    Attributes:
        beta: how much of the kept error stays: ``error = beta * error + (1 - beta) * lost``.
        reset_every: forget the error after this many optimizer steps; None never.
    """

    beta: float = 0.8
    reset_every: int | None = 1024

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta < 1.0:
            raise ValueError(f"error feedback: beta must lie in [0, 1), got {self.beta}")
        if self.reset_every is not None and self.reset_every < 1:
            raise ValueError(f"error feedback: reset_every must be at least 1, got {self.reset_every}")


@dataclass(frozen=True, kw_only=True)
class Formats:
    """The dtypes of one bucket.

    Attributes:
        compute: of the parameters.
        master: of what the optimizer updates; the parameters themselves where it equals ``compute``.
        wire: of gradients, and of parameters that are gathered, while they travel; None where the policy's other
            fields say it.
    """

    compute: torch.dtype
    master: torch.dtype
    wire: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a module is sharded and trained.

    Attributes:
        stage: 0 nothing is split, 1 optimizer state, 2 and gradients, 3 and parameters.
        param_dtype: dtype that floating-point parameters compute in; None keeps each parameter's own. Below fp32 the
            optimizer works on master weights.
        master_dtype: dtype of master weights. None is fp32; ``param_dtype`` has the optimizer update the 16-bit
            parameters themselves, so that an update smaller than half their spacing (2**-9 of the value in bf16,
            2**-12 in fp16) is lost.
        reduce_dtype: dtype on the wire for gradients; None means ``accumulate_dtype``.
        accumulate_dtype: dtype that gradients are summed in over micro-batches; None means the parameter's dtype.
        wire_rule: which fp32 parameters are gathered, and their gradients reduced, in 16 bits, whatever
            ``reduce_dtype`` says of the others: for a module that is called under ``torch.autocast``.
        reduce_op: ``mean`` or ``sum`` over ranks.
        predivide_factor: gradients are divided by this before they travel and by ``world / factor`` after it.
        reduce_every_micro_batch: reduce gradients in each backward pass (True) or only in the one that closes the
            step (False); None takes the stage's own way: True from stage 2 on.
        persistence_numel: at stage 3, parameters with fewer elements stay whole on every rank.
        persistence_total_numel: upper bound on the elements kept whole that way; None means no bound.
        bucket_numel: the most elements that one collective carries (one larger parameter still goes in one).
        prefetch_numel: at stage 3, gather ahead of need as long as the units in flight have at most this many
            elements; None gathers one unit ahead.
        max_reuse_numel: at stage 3, keep a unit's parameters between two uses if at most this many elements are
            gathered in between. 0 keeps a unit only if the very next use is its own; -1 always releases.
        max_live_numel: at stage 3, never keep more elements than this for reuse; None means no bound.
        leaf: which modules are gathered as a whole at stage 3, whatever runs inside them.
        gather_rule: at stage 3, how parameters are quantised to be gathered (qwZ of ZeRO++); None sends them as they
            are.
        frozen_rule: at stage 3, how frozen parameters are kept quantised, in shards and on the wire; None keeps them as
            they are. Concerns matrices (and what has more dimensions) that are released between uses.
        reduce_rule: from stage 1 on, how gradients are quantised to be reduced (qgZ); None sends them as they are.
        sparse_gradients: gradients of embeddings are kept and sent as the rows that were touched, in passes where that
            moves fewer bytes than the whole. Concerns the weights of ``nn.Embedding`` and ``nn.EmbeddingBag`` that no
            other module has; with ``sparse=True`` there the whole gradient never exists. Never quantised.
        error_feedback: what quantisation took from a gradient is added to the next one (LoCo).
        node_ranks: neighbours along the shard axis that are close to each other; None: all of them. Quantised
            reductions go within nodes first and between them after.
        secondary_ranks: at stage 3, a second copy of the parameters is split over this many ranks, which then gather
            from it until the next step (hpZ); 1 for none, else equal to ``node_ranks``.
        gather_in_two: gather between nodes first and within them after, so that every byte crosses once.
        root_apart: at stage 3, each parameter outside of all blocks has a bucket of its own. Hooks bring all of them in
            at once; compiled graphs each when it is read: an embedding at the beginning, a head at the end.
        overlap: reduce while backward still computes (True) or when it has ended (False).
    """

    stage: int = 0
    param_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None
    wire_rule: WireRule | None = None
    reduce_op: ReduceOp = "mean"
    predivide_factor: float = 1.0
    reduce_every_micro_batch: bool | None = None
    persistence_numel: int = 100_000
    persistence_total_numel: int | None = None
    bucket_numel: int = 500_000_000
    prefetch_numel: int | None = None
    max_reuse_numel: int = 0
    max_live_numel: int | None = None
    leaf: LeafRule = FOUND
    gather_rule: QuantizationRule | None = None
    frozen_rule: QuantizationRule | None = None
    reduce_rule: QuantizationRule | None = None
    sparse_gradients: bool = False
    error_feedback: ErrorFeedback | None = None
    node_ranks: int | None = None
    secondary_ranks: int = 1
    gather_in_two: bool = False
    root_apart: bool = False
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"ZeRO stage must be 0, 1, 2 or 3, got {self.stage!r}")
        if self.reduce_op not in ("mean", "sum"):
            raise ValueError(f"reduce_op must be 'mean' or 'sum', got {self.reduce_op!r}")
        if not self.predivide_factor > 0:
            raise ValueError(f"predivide_factor must be positive, got {self.predivide_factor}")
        if self.bucket_numel < 1:
            raise ValueError(f"bucket_numel must be at least 1, got {self.bucket_numel}")
        if self.persistence_numel < 0:
            raise ValueError(f"persistence_numel cannot be negative, got {self.persistence_numel}")
        self._check_compression()
        self._check_dtypes()

    def _check_dtypes(self) -> None:
        for name in ("param_dtype", "master_dtype", "reduce_dtype", "accumulate_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{name} must be a floating-point dtype, got {dtype}")
        if self.master_dtype not in (None, torch.float32, self.param_dtype):
            raise ValueError(
                f"master_dtype is {self.master_dtype} and param_dtype {self.param_dtype}; master weights are fp32, or "
                "the parameters themselves: make the two equal, or leave master_dtype out"
            )
        if self.master_dtype == torch.float16 and self.accumulate_dtype not in (None, torch.float16):
            raise ValueError(
                f"master_dtype is torch.float16, so the optimizer takes gradients in fp16, and accumulate_dtype is "
                f"{self.accumulate_dtype}: a sum that carries the loss scale may not fit fp16 afterwards. Leave one out"
            )

    def _check_compression(self) -> None:
        if self.stage < 3 and (self.gather_rule or self.secondary_ranks > 1 or self.gather_in_two):
            raise ValueError(
                f"gather_rule, secondary_ranks and gather_in_two change how parameters are gathered, and ZeRO stage "
                f"{self.stage} keeps them whole; use stage 3, or leave these out"
            )
        if self.stage < 3 and self.frozen_rule:
            raise ValueError(
                "frozen_rule quantises the shards of frozen parameters (zero_quantized_nontrainable_weights), and ZeRO "
                f"stage {self.stage} keeps parameters whole; use stage 3, or leave it out"
            )
        if self.stage < 1 and self.reduce_rule:
            raise ValueError("reduce_rule quantises gradients on the way to their owner; stage 0 has none: use stage 1")
        if self.error_feedback and not self.reduce_rule:
            raise ValueError("error_feedback makes up for quantised gradients; give a reduce_rule too")
        if self.node_ranks is not None and self.node_ranks < 1:
            raise ValueError(f"node_ranks must be at least 1, got {self.node_ranks}")
        if self.secondary_ranks != 1 and self.secondary_ranks != self.node_ranks:
            raise ValueError(
                f"secondary_ranks is {self.secondary_ranks} and node_ranks {self.node_ranks}; the second copy is split "
                "over the ranks of a node, so they must be equal"
            )

    @property
    def splits_optimizer(self) -> bool:
        """Each rank updates only its shard."""
        return self.stage >= 1

    @property
    def releases_parameters(self) -> bool:
        """Whole parameters exist only around their use."""
        return self.stage >= 3

    @property
    def reduces_every_micro_batch(self) -> bool:
        """Gradients are reduced in each backward pass, so that only shards accumulate."""
        if self.reduce_every_micro_batch is not None:
            return self.reduce_every_micro_batch
        return self.stage >= 2

    def formats(self, dtype: torch.dtype, *, lowered: bool = False) -> Formats:
        """The dtypes of parameters that come in ``dtype``; ``lowered``: they are among those of ``wire_rule``."""
        compute = self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype
        master = (self.master_dtype or torch.float32) if compute in HALF_TYPES else compute
        rule = self.wire_rule if lowered and compute == torch.float32 else None
        return Formats(compute=compute, master=master, wire=rule.dtype if rule else None)

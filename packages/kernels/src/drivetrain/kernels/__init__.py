"""Hot arithmetic: optimizers and ops, each with a plain-torch reference.

`quantize`, `reduce_quantized`, `pack_signs` and their kin make tensors small for the wire and for memory.

`AsyncFile` moves tensors to and from files.

`paged_decode`, `ragged_attention`, `evoformer_attention` and `block_sparse_attention` are the attentions that torch's
own does not cover.

Optimizers (`CpuAdam`, `CpuAdagrad`, `CpuLion`, `CpuLamb`, `Lion`, `Lamb`) are ordinary `torch.optim.Optimizer`s that
are also correct on shards of parameters; `rules` holds their hyperparameters. Every op has an implementation in plain
torch (`torch_ops`), most a faster one for host memory (`native_ops`, C++) or GPUs (`triton_ops`); `resolve` finds the
one that serves an op on a device, and `available()` says which one it is, and why.
"""

from __future__ import annotations

from .aio import AsyncFile, AsyncFileOptions, Ticket, aligned_empty
from .core import choose_instruction_set, get_num_threads, instruction_sets, set_num_threads
from .cpu_optim import CpuAdagrad, CpuAdam, CpuLamb, CpuLion
from .dispatch import KernelStatus, available, implementation, resolve
from .evoformer_attention import evoformer_attention
from .optim import Lamb, Lion
from .paged_attention import paged_decode, ragged_attention, write_cache
from .quantization import (
    PackedSigns,
    Quantized,
    dequantize,
    dequantize_reduce,
    pack_signs,
    quantize,
    reduce_quantized,
    unpack_signs,
)
from .quantize_rules import QuantizationRule, SignRule
from .rules import AdagradRule, AdamRule, LambRule, LionRule, SgdRule
from .sparse_attention import block_sparse_attention
from .sparse_layouts import (
    BigBirdLayout,
    BlockLists,
    BSLongformerLayout,
    DenseLayout,
    FixedLayout,
    LocalSlidingWindowLayout,
    SparseLayout,
    VariableLayout,
)

__all__ = [
    "AdagradRule",
    "AdamRule",
    "AsyncFile",
    "AsyncFileOptions",
    "BSLongformerLayout",
    "BigBirdLayout",
    "BlockLists",
    "CpuAdagrad",
    "CpuAdam",
    "CpuLamb",
    "CpuLion",
    "DenseLayout",
    "FixedLayout",
    "KernelStatus",
    "Lamb",
    "LambRule",
    "Lion",
    "LionRule",
    "LocalSlidingWindowLayout",
    "PackedSigns",
    "QuantizationRule",
    "Quantized",
    "SgdRule",
    "SignRule",
    "SparseLayout",
    "Ticket",
    "VariableLayout",
    "aligned_empty",
    "available",
    "block_sparse_attention",
    "choose_instruction_set",
    "dequantize",
    "dequantize_reduce",
    "evoformer_attention",
    "get_num_threads",
    "implementation",
    "instruction_sets",
    "pack_signs",
    "paged_decode",
    "quantize",
    "ragged_attention",
    "reduce_quantized",
    "resolve",
    "set_num_threads",
    "unpack_signs",
    "write_cache",
]

"""Hot arithmetic: optimizers and ops, each with a plain-torch reference.

`quantize`, `reduce_quantized`, `pack_signs` and their kin make tensors small for the wire and for memory.

`quantize_weight`, `quantized_linear` and `QuantizedLinear` multiply by weights of few bits, for inference.

`AsyncFile` moves tensors to and from files.

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
from .matmul import QuantizedLinear, QuantizedWeight, quantize_weight, quantized_linear
from .optim import Lamb, Lion
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

__all__ = [
    "AdagradRule",
    "AdamRule",
    "AsyncFile",
    "AsyncFileOptions",
    "CpuAdagrad",
    "CpuAdam",
    "CpuLamb",
    "CpuLion",
    "KernelStatus",
    "Lamb",
    "LambRule",
    "Lion",
    "LionRule",
    "PackedSigns",
    "QuantizationRule",
    "Quantized",
    "QuantizedLinear",
    "QuantizedWeight",
    "SgdRule",
    "SignRule",
    "Ticket",
    "aligned_empty",
    "available",
    "choose_instruction_set",
    "dequantize",
    "dequantize_reduce",
    "get_num_threads",
    "implementation",
    "instruction_sets",
    "pack_signs",
    "quantize",
    "quantize_weight",
    "quantized_linear",
    "reduce_quantized",
    "resolve",
    "set_num_threads",
    "unpack_signs",
]

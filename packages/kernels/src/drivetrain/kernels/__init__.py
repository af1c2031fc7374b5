"""Hot arithmetic: optimizers and ops, each with a plain-torch reference.

`quantize`, `reduce_quantized`, `pack_signs` and their kin make tensors small for the wire and for memory.

`rms_norm`, `rotary_embedding`, `swiglu`, `masked_softmax`, `linear_cross_entropy` and their kin are the ops of a
transformer layer, with gradients.

`AsyncFile` moves tensors to and from files.

Optimizers (`CpuAdam`, `CpuAdagrad`, `CpuLion`, `CpuLamb`, `Lion`, `Lamb`) are ordinary `torch.optim.Optimizer`s that
are also correct on shards of parameters; `rules` holds their hyperparameters. Every op has an implementation in plain
torch (`torch_ops`), most a faster one for host memory (`native_ops`, C++) or GPUs (`triton_ops`); `resolve` finds the
one that serves an op on a device, and `available()` says which one it is, and why.
"""

from __future__ import annotations

from .activation import bias_dropout_residual, bias_gelu, geglu, swiglu
from .aio import AsyncFile, AsyncFileOptions, Ticket, aligned_empty
from .core import choose_instruction_set, get_num_threads, instruction_sets, set_num_threads
from .cpu_optim import CpuAdagrad, CpuAdam, CpuLamb, CpuLion
from .cross_entropy import cross_entropy, linear_cross_entropy
from .dispatch import KernelStatus, available, implementation, resolve
from .norm import layer_norm, rms_norm
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
from .rotary import rotary_embedding
from .rules import AdagradRule, AdamRule, LambRule, LionRule, SgdRule
from .softmax import masked_softmax

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
    "SgdRule",
    "SignRule",
    "Ticket",
    "aligned_empty",
    "available",
    "bias_dropout_residual",
    "bias_gelu",
    "choose_instruction_set",
    "cross_entropy",
    "dequantize",
    "dequantize_reduce",
    "geglu",
    "get_num_threads",
    "implementation",
    "instruction_sets",
    "layer_norm",
    "linear_cross_entropy",
    "masked_softmax",
    "pack_signs",
    "quantize",
    "reduce_quantized",
    "resolve",
    "rms_norm",
    "rotary_embedding",
    "set_num_threads",
    "swiglu",
    "unpack_signs",
]

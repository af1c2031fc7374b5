"""Hot arithmetic: optimizers and ops, each with a plain-torch reference.

`quantize`, `reduce_quantized`, `pack_signs` and their kin make tensors small for the wire and for memory;
`quantize_weight`, `quantized_linear` and `QuantizedLinear` multiply by weights of few bits, for inference.

`rms_norm`, `rotary_embedding`, `swiglu`, `masked_softmax`, `linear_cross_entropy` and their kin are the ops of a
transformer layer, with gradients; `top_k_gating`, `permutation`, `permute_tokens`, `grouped_matmul` and
`unpermute_tokens` those of a mixture of experts; `paged_decode`, `ragged_attention`, `evoformer_attention` and
`block_sparse_attention` the attentions that torch's own does not cover.

`AsyncFile` moves tensors to and from files; `SharedMemoryGroup` moves and reduces them among processes of one host.

Optimizers (`FusedAdam`, `FusedAdagrad`, `FusedSgd`, `Lion` and `Lamb`; `CpuAdam`, `CpuAdagrad`, `CpuLion` and
`CpuLamb` insist on host memory) are ordinary `torch.optim.Optimizer`s that are also correct on shards of parameters;
`Muon` needs whole matrices. `rules` holds their hyperparameters.

Every op has an implementation in plain torch (`torch_ops`), most a faster one for host memory (`native_ops`, C++) or
GPUs (`triton_ops`); `resolve` finds the one that serves an op on a device, and `available()` says which one it is, and
why.
"""

from __future__ import annotations

from .activation import bias_dropout_residual, bias_gelu, geglu, swiglu
from .aio import AsyncFile, AsyncFileOptions, Ticket
from .core import choose_instruction_set, get_num_threads, instruction_sets, set_num_threads
from .cpu_optim import CpuAdagrad, CpuAdam, CpuLamb, CpuLion
from .cross_entropy import cross_entropy, linear_cross_entropy
from .dispatch import KernelStatus, available, implementation, resolve
from .evoformer_attention import evoformer_attention
from .fused_optim import FusedAdagrad, FusedAdam, FusedSgd
from .gating import top_k_gating
from .grouped_matmul import grouped_matmul
from .host_memory import BufferPool, aligned_empty, prefer_large_pages
from .matmul import QuantizedLinear, QuantizedWeight, quantize_weight, quantized_linear
from .muon import MatrixExchange, Muon, orthogonalize
from .norm import layer_norm, rms_norm
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
from .rotary import rotary_embedding
from .rules import AdagradRule, AdamRule, LambRule, LionRule, MuonRule, SgdRule
from .shared_memory import (
    SharedMemoryCall,
    SharedMemoryError,
    SharedMemoryFailure,
    SharedMemoryGroup,
    SharedMemoryWork,
    shared_memory_refusal,
)
from .softmax import masked_softmax
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
from .token_permutation import TokenPermutation, expert_histogram, permutation, permute_tokens, unpermute_tokens

__all__ = [
    "AdagradRule",
    "AdamRule",
    "AsyncFile",
    "AsyncFileOptions",
    "BSLongformerLayout",
    "BigBirdLayout",
    "BlockLists",
    "BufferPool",
    "CpuAdagrad",
    "CpuAdam",
    "CpuLamb",
    "CpuLion",
    "DenseLayout",
    "FixedLayout",
    "FusedAdagrad",
    "FusedAdam",
    "FusedSgd",
    "KernelStatus",
    "Lamb",
    "LambRule",
    "Lion",
    "LionRule",
    "LocalSlidingWindowLayout",
    "MatrixExchange",
    "Muon",
    "MuonRule",
    "PackedSigns",
    "QuantizationRule",
    "Quantized",
    "QuantizedLinear",
    "QuantizedWeight",
    "SgdRule",
    "SharedMemoryCall",
    "SharedMemoryError",
    "SharedMemoryFailure",
    "SharedMemoryGroup",
    "SharedMemoryWork",
    "SignRule",
    "SparseLayout",
    "Ticket",
    "TokenPermutation",
    "VariableLayout",
    "aligned_empty",
    "available",
    "bias_dropout_residual",
    "bias_gelu",
    "block_sparse_attention",
    "choose_instruction_set",
    "cross_entropy",
    "dequantize",
    "dequantize_reduce",
    "evoformer_attention",
    "expert_histogram",
    "geglu",
    "get_num_threads",
    "grouped_matmul",
    "implementation",
    "instruction_sets",
    "layer_norm",
    "linear_cross_entropy",
    "masked_softmax",
    "orthogonalize",
    "pack_signs",
    "paged_decode",
    "permutation",
    "permute_tokens",
    "prefer_large_pages",
    "quantize",
    "quantize_weight",
    "quantized_linear",
    "ragged_attention",
    "reduce_quantized",
    "resolve",
    "rms_norm",
    "rotary_embedding",
    "set_num_threads",
    "shared_memory_refusal",
    "swiglu",
    "top_k_gating",
    "unpack_signs",
    "unpermute_tokens",
    "write_cache",
]

"""Products with quantised weights by llama.cpp, through the C interface of its `ggml` in the wheel `xllamacpp`.

Weights are laid out as llama.cpp lays them out for its own models: each of its CPU buffer types is offered the weights,
the most special one first (tiles for matrix units, then interleaved rows, then plain), and the first one that takes
them has them. All products of a pass are nodes of one graph, as the layers of a model are.
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, Final

from torch import Tensor

TYPES: Final = {"f32": 0, "q4_0": 2, "q8_0": 8}  # of ggml.h
_OVERHEAD: Final = 4 << 20  # bytes for the descriptions of tensors and graphs


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


_LOG: Final = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_quiet = _LOG(lambda level, text, data: None)

_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "ggml_init": (c_void_p, (_InitParams,)),
    "ggml_new_tensor_2d": (c_void_p, (c_void_p, c_int, c_int64, c_int64)),
    "ggml_mul_mat": (c_void_p, (c_void_p, c_void_p, c_void_p)),
    "ggml_new_graph_custom": (c_void_p, (c_void_p, c_size_t, c_bool)),
    "ggml_build_forward_expand": (None, (c_void_p, c_void_p)),
    "ggml_row_size": (c_size_t, (c_int, c_int64)),
    "ggml_quantize_chunk": (c_size_t, (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)),
    "ggml_backend_cpu_init": (c_void_p, ()),
    "ggml_backend_cpu_set_n_threads": (None, (c_void_p, c_int)),
    "ggml_backend_cpu_reg": (c_void_p, ()),
    "ggml_backend_cpu_buffer_type": (c_void_p, ()),
    "ggml_backend_reg_get_proc_address": (c_void_p, (c_void_p, c_char_p)),
    "ggml_backend_reg_dev_get": (c_void_p, (c_void_p, c_size_t)),
    "ggml_backend_dev_supports_op": (c_bool, (c_void_p, c_void_p)),
    "ggml_backend_buft_name": (c_char_p, (c_void_p,)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, (c_void_p, c_void_p)),
    "ggml_backend_alloc_ctx_tensors": (c_void_p, (c_void_p, c_void_p)),
    "ggml_backend_buffer_free": (None, (c_void_p,)),
    "ggml_backend_tensor_set": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_tensor_get": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "ggml_backend_graph_compute": (c_int, (c_void_p, c_void_p)),
}


def find() -> ctypes.CDLL | None:
    """The library, if the wheel is installed."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("xllamacpp*.so"))), mode=ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
    library.ggml_log_set(_quiet, None)
    return library


def instruction_set(library: ctypes.CDLL) -> str:
    """What the wheel was built for, since that is not chosen at run time."""
    names = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_int8", "neon")
    return ", ".join(name for name in names if getattr(library, f"ggml_cpu_has_{name}")())


class Products:
    """``copies`` weights, all the same, times one batch of tokens.

    Args:
        library: what `find` returned.
        dense: float32 [out, in]; quantised to ``kind`` in blocks of 32 with a float16 scale each.
        x: float32 [tokens, in]
        kind: "q8_0" or "q4_0".

    Attributes:
        layout: the name of the buffer type that has the weights.
        bytes_each: of one weight, scales included.
    """

    def __init__(self, library: ctypes.CDLL, dense: Tensor, x: Tensor, kind: str, copies: int, threads: int) -> None:
        self._library = library
        rows, columns = dense.shape
        self._backend = library.ggml_backend_cpu_init()
        library.ggml_backend_cpu_set_n_threads(self._backend, threads)
        self.bytes_each = library.ggml_row_size(TYPES[kind], columns) * rows
        codes = ctypes.create_string_buffer(self.bytes_each)
        library.ggml_quantize_chunk(TYPES[kind], dense.data_ptr(), codes, 0, rows, columns, None)

        computed = self._context()
        self._input = library.ggml_new_tensor_2d(computed, TYPES["f32"], columns, len(x))
        self.layout, weights = self._placed(TYPES[kind], rows, columns, copies)
        self._outputs = [library.ggml_mul_mat(computed, weight, self._input) for weight in weights]
        self._graph = library.ggml_new_graph_custom(computed, 4 * copies + 16, False)
        for output in self._outputs:
            library.ggml_build_forward_expand(self._graph, output)
        library.ggml_backend_alloc_ctx_tensors(computed, self._backend)
        for weight in weights:
            library.ggml_backend_tensor_set(weight, codes, 0, self.bytes_each)
        library.ggml_backend_tensor_set(self._input, x.data_ptr(), 0, x.numel() * 4)

    def _context(self) -> int:
        """Room for the descriptions of tensors, whose numbers lie elsewhere."""
        return int(self._library.ggml_init(_InitParams(mem_size=_OVERHEAD, mem_buffer=None, no_alloc=True)))

    def _placed(self, kind: int, rows: int, columns: int, copies: int) -> tuple[str, list[int]]:
        """Weights in memory of the most special type with which the device can multiply, and its name."""
        library = self._library
        device = library.ggml_backend_reg_dev_get(library.ggml_backend_cpu_reg(), 0)
        for memory in [*self._special_types(device), library.ggml_backend_cpu_buffer_type()]:
            context = self._context()
            weights = [library.ggml_new_tensor_2d(context, kind, columns, rows) for _ in range(copies)]
            buffer = library.ggml_backend_alloc_ctx_tensors_from_buft(context, memory)
            product = library.ggml_mul_mat(self._context(), weights[0], self._input)
            if library.ggml_backend_dev_supports_op(device, product):
                return library.ggml_backend_buft_name(memory).decode(), weights
            library.ggml_backend_buffer_free(buffer)
        raise RuntimeError("llama.cpp multiplies no such weights")

    def _special_types(self, device: int) -> list[int]:
        library = self._library
        address = library.ggml_backend_reg_get_proc_address(
            library.ggml_backend_cpu_reg(), b"ggml_backend_dev_get_extra_bufts"
        )
        if not address:
            return []
        listed = ctypes.CFUNCTYPE(ctypes.POINTER(c_void_p), c_void_p)(address)(device)
        found: list[int] = []
        while listed[len(found)]:
            found.append(listed[len(found)])
        return found

    def run(self) -> None:
        """All products once."""
        self._library.ggml_backend_graph_compute(self._backend, self._graph)

    def result(self, like: Tensor) -> Tensor:
        """The first product, written into ``like``: float32 [tokens, out]."""
        self._library.ggml_backend_tensor_get(self._outputs[0], like.data_ptr(), 0, like.numel() * 4)
        return like

"""Products with quantised weights, for inference: `quantize_weight`, `quantized_linear` and a layer, `QuantizedLinear`.

Problem: with one token at a time a linear layer is as fast as its weight is read, so a weight of 8 or 4 bits is up to
2 or 4 times as fast as a bfloat16 one, if unpacking keeps up with memory.
Idea: a weight [out, in] is a `Quantized` of its rows one after another, in blocks that do not cross rows, which is what
every device reads. The host's inner loops want rows interleaved: a weight is brought into that order when it is first
used, and kept so beside the original (`prepare`), or else in cache, each time.
Invariants: a token's result depends on neither the number of threads nor `prepare`, nor on the other tokens (but for
bfloat16 activations on CPUs with AMX, whose last bits change where 8 tokens or more are multiplied at once). Arithmetic
is defined in `torch_ops.matmul`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from .dispatch import resolve
from .quantization import Quantized, quantize
from .quantize_rules import QuantizationRule, QuantizedFormat
from .torch_ops.matmul import Activations

__all__ = ["Activations", "QuantizedLinear", "QuantizedWeight", "quantize_weight", "quantized_linear"]

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_GROUP: Final = 16
_FORMATS: Final[tuple[QuantizedFormat, ...]] = ("int8", "int4", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2")


def _check_rule(owner: str, in_features: int, rule: QuantizationRule) -> None:
    if in_features % rule.block_size == 0:
        return
    if in_features % _GROUP:
        advice = f"rows must be a multiple of {_GROUP} long: leave this weight as it is, or pad it"
    else:
        sizes = [size for size in range(_GROUP, in_features + 1, _GROUP) if in_features % size == 0]
        near = min(sizes, key=lambda size: abs(size - rule.block_size))
        advice = f"use for example block_size={near}"
    raise ValueError(
        f"{owner}: blocks must not cross rows, but in_features={in_features} isn't a multiple of "
        f"block_size={rule.block_size}; {advice}"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeight:
    """A weight [out_features, in_features]: `quantized` holds its rows one after another, of a whole number of blocks.

    `prepare`: whether the host keeps a second copy of the codes in the order that its inner loops read. That takes the
    bytes once more and is faster where weights come from cache; results are the same. The tensors must not be written
    to after the first use of a weight that is prepared.
    """

    quantized: Quantized
    out_features: int
    in_features: int
    prepare: bool = True

    def __post_init__(self) -> None:
        if self.quantized.numel != self.out_features * self.in_features:
            raise ValueError(
                f"QuantizedWeight: {self.quantized.numel} elements can't be a weight of "
                f"{self.out_features} x {self.in_features}"
            )
        _check_rule("QuantizedWeight", self.in_features, self.quantized.rule)

    @cached_property
    def prepared(self) -> Any:
        """What the weight's device makes of it at first use, or None."""
        if not self.prepare:
            return None
        prepare = resolve("prepare_weight", self.quantized.values.device)
        return prepare(*self.quantized.stored, rule=self.quantized.rule, out_features=self.out_features)

    @cached_property
    def product(self) -> Callable[[Tensor, Tensor | None, Activations], Tensor]:
        """`product(x, bias, activations)` of checked operands, x [tokens, in_features]: what each token would else find
        out again."""
        prepared, (values, scales, zeros) = self.prepared, self.quantized.stored
        if callable(prepared):
            return cast("Callable[[Tensor, Tensor | None, Activations], Tensor]", prepared)
        multiply = resolve("quantized_matmul", values.device)
        rule, rows = self.quantized.rule, self.out_features

        def product(x: Tensor, bias: Tensor | None, activations: Activations) -> Tensor:
            y: Tensor = multiply(
                x, values, scales, zeros, rule=rule, out_features=rows, bias=bias, activations=activations
            )
            return y

        return product

    @cached_property
    def device(self) -> torch.device:
        """Where the weight lies."""
        return self.quantized.values.device

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: a copy prepares itself again."""
        return {name: self.__dict__[name] for name in ("quantized", "out_features", "in_features", "prepare")}


def quantize_weight(weight: Tensor, rule: QuantizationRule, *, prepare: bool = True) -> QuantizedWeight:
    """Quantise `weight` [out_features, in_features] (float32, bfloat16 or float16) to nearest.

    `rule.block_size` must divide in_features; `rule.block_size == in_features` gives one scale per row. `prepare`: see
    `QuantizedWeight`.
    """
    if weight.dim() != 2:
        raise ValueError(f"quantize_weight: expected a weight [out, in]; found the shape {tuple(weight.shape)}")
    _check_rule("quantize_weight", weight.shape[1], rule)
    quantized = quantize(weight.detach().contiguous(), rule)
    return QuantizedWeight(
        quantized=quantized, out_features=weight.shape[0], in_features=weight.shape[1], prepare=prepare
    )


def _check_operands(
    x: Tensor, shape: torch.Size, weight: QuantizedWeight, bias: Tensor | None, activations: str
) -> None:
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"quantized_linear: x has dtype {x.dtype}; expected float32, bfloat16 or float16: convert it first"
        )
    if not shape or shape[-1] != weight.in_features:
        raise ValueError(
            f"quantized_linear: x has the shape {tuple(shape)}; its last dimension must be the weight's "
            f"in_features={weight.in_features}"
        )
    device = weight.device
    if x.device != device:
        raise ValueError(f"quantized_linear: x lies on {x.device}, the weight on {device}; move one of them")
    if activations not in ("native", "int8"):
        raise ValueError(f"quantized_linear: activations: expected 'native' or 'int8'; found {activations!r}")
    if bias is not None and (
        bias.shape != (weight.out_features,)
        or bias.dtype not in _DTYPES
        or bias.device != device
        or not bias.is_contiguous()
    ):
        raise ValueError(
            f"quantized_linear: bias: expected a contiguous tensor of shape ({weight.out_features},) on {device}, "
            f"float32, bfloat16 or float16; found {tuple(bias.shape)}, {bias.dtype}, on {bias.device}"
        )
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        raise RuntimeError(
            "quantized_linear: quantised products have no gradient; call them under torch.no_grad() or "
            "torch.inference_mode(), or detach x and bias"
        )


def quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, *, activations: Activations = "native"
) -> Tensor:
    """`x @ W.T + bias`: x [..., in_features] in float32, bfloat16 or float16, the result [..., out_features] like x.

    `activations`: "native" multiplies x as it is, with float32 sums; "int8" rounds each block of a token (the weight's
    block size) to int8 with a scale of its own first, and sums integers, which is faster where the CPU multiplies bytes
    (see `drivetrain.kernels.instruction_sets`) and with many tokens. No gradient is defined.
    """
    shape = x.shape
    _check_operands(x, shape, weight, bias, activations)
    if len(shape) == 2 and x.is_contiguous():
        return weight.product(x, bias, activations)
    rows = x.reshape(shape[:-1].numel(), weight.in_features).contiguous()
    return weight.product(rows, bias, activations).view(*shape[:-1], weight.out_features)


class QuantizedLinear(nn.Module):
    """A linear layer with a quantised weight, for inference; `from_linear` makes one of an `nn.Linear`.

    Its state_dict holds plain tensors: `values`, `scales` and `zeros` of the weight (see `Quantized`), `bias`, and
    `rule` (format, block size, symmetric), which loading compares. `to(dtype)` leaves scales and zeros in float32.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None
    rule_numbers: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rule: QuantizationRule,
        *,
        bias: bool = True,
        activations: Activations = "native",
        prepare: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        """A layer whose weight is zero until a state_dict is loaded; `bias` is float32, `prepare` that of
        `QuantizedWeight`."""
        super().__init__()
        _check_rule("QuantizedLinear", in_features, rule)
        self.in_features, self.out_features = in_features, out_features
        self.rule, self.activations, self.prepare = rule, activations, prepare
        numel = out_features * in_features
        scales = torch.zeros(rule.blocks(numel), dtype=torch.float32, device=device)
        self.register_buffer("values", torch.zeros(rule.packed_bytes(numel), dtype=torch.uint8, device=device))
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", None if rule.symmetric else torch.zeros_like(scales))
        self.register_buffer("bias", torch.zeros(out_features, device=device) if bias else None)
        self.register_buffer("rule_numbers", _numbers(rule))
        self._weight: QuantizedWeight | None = None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        rule: QuantizationRule,
        *,
        activations: Activations = "native",
        prepare: bool = True,
    ) -> QuantizedLinear:
        """The same layer with its weight quantised; the bias is kept as it is."""
        weight = quantize_weight(linear.weight, rule, prepare=prepare)
        device = linear.weight.device
        layer = cls(
            linear.in_features,
            linear.out_features,
            rule,
            bias=linear.bias is not None,
            activations=activations,
            prepare=prepare,
            device="meta",
        )
        layer.values, layer.scales, layer.zeros = weight.quantized.stored
        layer.bias = None if linear.bias is None else linear.bias.detach().clone()
        layer.rule_numbers = layer.rule_numbers.to(device)
        return layer

    @property
    def weight(self) -> QuantizedWeight:
        """The weight, made of the buffers; prepared at its first use."""
        buffers, known = (
            self._buffers,
            self._weight,
        )  # straight to them: a layer's attributes are slow for small products
        values, scales, zeros = buffers["values"], buffers["scales"], buffers["zeros"]
        if known is not None and known.quantized.values is values and known.quantized.scales is scales:
            return known
        if values is None or scales is None:
            raise RuntimeError("QuantizedLinear: values and scales can't be None")
        numel = self.out_features * self.in_features
        quantized = Quantized(values=values, scales=scales, zeros=zeros, numel=numel, rule=self.rule)
        self._weight = QuantizedWeight(
            quantized=quantized, out_features=self.out_features, in_features=self.in_features, prepare=self.prepare
        )
        return self._weight

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] to [..., out_features], as `quantized_linear`."""
        return quantized_linear(x, self.weight, self._buffers["bias"], activations=self.activations)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        zeros = "" if self.rule.symmetric else ", asymmetric"
        return (
            f"{self.in_features}, {self.out_features}, {self.rule.format} in blocks of {self.rule.block_size}{zeros}, "
            f"bias={self.bias is not None}, activations={self.activations}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        scales, zeros = self.scales, self.zeros
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._weight = None
        if self.scales.dtype != torch.float32:  # a change of dtype is for what is computed with, not for these
            self.scales = scales.to(self.values.device)
            self.zeros = None if zeros is None else zeros.to(self.values.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        found = state_dict.get(prefix + "rule_numbers")
        if found is not None and found.tolist() != _numbers(self.rule).tolist():
            raise ValueError(
                f"{prefix}rule_numbers: the state_dict was made with (format, block size, symmetric) = {found.tolist()}"
                f", this layer with {_numbers(self.rule).tolist()}, formats counted in {_FORMATS}; make the layer with "
                "the rule of the state_dict"
            )
        self._weight = None
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        """Without the cached weight, which is made of the buffers again."""
        return {**self.__dict__, "_weight": None}


def _numbers(rule: QuantizationRule) -> Tensor:
    return torch.tensor([_FORMATS.index(rule.format), rule.block_size, int(rule.symmetric)], dtype=torch.int64)

"""Cross entropy against torch's, its chunked form against both, and the memory that the chunks need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.kernels import cross_entropy, linear_cross_entropy
from drivetrain.kernels.torch_ops.chunked_loss import LossRule, chunk_size, chunked_loss

OPTIONS = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.2},
    {"z_loss": 0.1, "reduction": "sum"},
    {"z_loss": 0.1, "label_smoothing": 0.2, "ignore_index": 3, "reduction": "none"},
]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")


def _random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _labels(*shape: int, vocabulary: int, ignore_index: int = -100) -> Tensor:
    labels = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(3))
    labels.view(-1)[::4] = ignore_index
    return labels


def _by_torch(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    z_loss, reduction = options.pop("z_loss", 0.0), options.pop("reduction", "mean")
    counted = labels != options.get("ignore_index", -100)
    losses: Tensor = functional.cross_entropy(logits.movedim(-1, 1), labels, reduction="none", **options)
    losses = losses + z_loss * torch.logsumexp(logits, dim=-1).square() * counted
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


@every_option
@pytest.mark.parametrize(("tokens", "vocabulary"), [((5,), 123), ((2, 7), 4), ((3, 1), 1)])
def test_equal_to_torch_in_float64(tokens: tuple[int, ...], vocabulary: int, options: Mapping[str, Any]) -> None:
    logits = _random(*tokens, vocabulary).requires_grad_()
    labels = _labels(*tokens, vocabulary=vocabulary, ignore_index=options.get("ignore_index", -100))
    found, expected = cross_entropy(logits, labels, **options), _by_torch(logits, labels, **options)
    torch.testing.assert_close(found, expected)
    outside = _random(*found.shape, seed=5)
    torch.testing.assert_close(
        torch.autograd.grad(found, logits, outside), torch.autograd.grad(expected, logits, outside)
    )


@every_option
@pytest.mark.parametrize("chunk_tokens", [1, 5, 100, None])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunks_equal_the_whole(chunk_tokens: int | None, with_bias: bool, options: Mapping[str, Any]) -> None:
    hidden, weight, bias = _random(2, 7, 6), _random(9, 6, seed=2), _random(9, seed=3) if with_bias else None
    leaves = [tensor.requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    labels = _labels(2, 7, vocabulary=9, ignore_index=options.get("ignore_index", -100))
    found = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=chunk_tokens, **options)
    expected = cross_entropy(functional.linear(hidden, weight, bias), labels, **options)
    torch.testing.assert_close(found, expected)
    outside = _random(*found.shape, seed=5)
    for _ in range(2):  # a second backward pass finds what the first did
        mine = torch.autograd.grad(found, leaves, outside, retain_graph=True)
        torch.testing.assert_close(mine, torch.autograd.grad(expected, leaves, outside, retain_graph=True))
    with torch.no_grad():
        again = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=chunk_tokens, **options)
    torch.testing.assert_close(again, expected.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    hidden, weight = _random(40, 16, dtype=dtype).requires_grad_(), _random(50, 16, seed=2, dtype=dtype)
    weight.requires_grad_()
    labels = _labels(40, vocabulary=50)
    exact = cross_entropy(hidden.double() @ weight.double().t(), labels)
    expected = torch.autograd.grad(exact, (hidden, weight))
    eps = torch.finfo(dtype).eps
    for chunk_tokens in (7, None):
        found = linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=4 * eps, atol=1e-6)
        # A loss scale as float16 has it: gradients of 1 / tokens would vanish without it.
        scaled = torch.autograd.grad(found * 1024, (hidden, weight))
        for one, other in zip(scaled, expected, strict=True):
            assert one.dtype == dtype
            largest = float(other.abs().max()) * 1024
            torch.testing.assert_close(one.double(), other.double() * 1024, rtol=8 * eps, atol=4 * eps * largest)


def test_a_factor_of_the_loss_is_not_rounded_to_the_dtype() -> None:
    hidden, weight = _random(64, 16, dtype=torch.bfloat16).requires_grad_(), _random(50, 16, dtype=torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, _labels(64, vocabulary=50), reduction="sum")
    (plain,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    factor = 1 + 3 * 2.0**-8  # halfway between two bfloat16 numbers
    (scaled,) = torch.autograd.grad(loss * factor, hidden)
    ratio = float((scaled.double() * plain.double()).sum() / plain.double().square().sum())
    assert abs(ratio - factor) < 2.0**-10


def test_what_lies_between_rows_of_logits_is_zero_and_stays_so() -> None:
    hidden, weight, labels = (
        _random(6, 4, dtype=torch.bfloat16),
        _random(5, 4, dtype=torch.bfloat16),
        torch.arange(6) % 5,
    )
    widths = []

    def step(logits: Tensor, labels: Tensor, rule: LossRule, *, gradient: bool, factors: Tensor | None) -> Tensor:
        widths.append(logits.stride(0))
        between = logits.as_strided((logits.shape[0], logits.stride(0) - 5), logits.stride(), 5)
        assert not between.any()
        logits.fill_(1.0)
        return torch.zeros(logits.shape[0])

    chunked_loss(
        hidden.requires_grad_(), weight, labels, None, rule=LossRule(), reduction="sum", chunk_tokens=4, step=step
    )
    assert widths == [64, 64]


def test_frozen_parts_get_no_gradient_and_the_others_do() -> None:
    hidden, weight, labels = _random(6, 4), _random(5, 4, seed=2), _labels(6, vocabulary=5)
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(hidden.requires_grad_(), weight, labels, reduction=reduction)
        (gradient,) = torch.autograd.grad(loss.sum(), hidden)
        expected = cross_entropy(hidden @ weight.t(), labels, reduction=reduction)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), hidden)[0])
        assert not linear_cross_entropy(hidden.detach(), weight, labels, reduction=reduction).requires_grad


def test_tokens_that_do_not_count() -> None:
    logits = _random(4, 5)
    logits[1] = torch.nan
    logits[2] = -torch.inf
    leaf = logits.requires_grad_()
    loss = cross_entropy(leaf, torch.tensor([1, -100, -100, 2]))
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert bool(gradient.isfinite().all())
    assert not gradient[1:3].any()
    nothing = torch.full((4,), -100)
    for found in (
        cross_entropy(leaf[:1], nothing[:1]),
        linear_cross_entropy(_random(4, 3).requires_grad_(), _random(5, 3), nothing),
    ):
        assert found.item() == 0.0
        found.backward()
    assert cross_entropy(leaf[:0], nothing[:0]).item() == 0.0
    assert float(linear_cross_entropy(_random(0, 3), _random(5, 3), nothing[:0])) == 0.0


def test_nan_and_infinity_are_seen() -> None:
    logits = _random(3, 5)
    logits[0, 4], logits[1, 2] = torch.nan, -torch.inf
    losses = cross_entropy(logits, torch.tensor([0, 2, 1]), reduction="none")
    assert losses[0].isnan()
    assert losses[1] == torch.inf
    assert losses[2].isfinite()


class _Memory(TorchDispatchMode):
    """The most bytes that tensors made inside held at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_memory_is_that_of_a_chunk_and_the_gradients(reduction: str) -> None:
    tokens, features, vocabulary, chunk = 512, 16, 1024, 32
    hidden, weight = _random(tokens, features, dtype=torch.float32), _random(vocabulary, features, dtype=torch.float32)
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    labels = _labels(tokens, vocabulary=vocabulary)
    with _Memory() as whole:
        cross_entropy(functional.linear(*leaves), labels, reduction=reduction).sum().backward()  # type: ignore[arg-type]
    with _Memory() as chunked:
        loss = linear_cross_entropy(*leaves, labels, chunk_tokens=chunk, reduction=reduction)  # type: ignore[arg-type]
        loss.sum().backward()
    all_logits, of_chunk = 4 * tokens * vocabulary, 4 * chunk * vocabulary
    gradients = 4 * features * (tokens + vocabulary)
    assert whole.peak > 2 * all_logits
    # Gradients as they are kept and as they are handed out, one chunk of logits, and some numbers per token.
    assert chunked.peak < 2 * gradients + 1.25 * of_chunk + 64 * tokens
    assert chunked.peak < all_logits / 4


def test_chunks_are_of_equal_size() -> None:
    assert chunk_size(100, 64, None) == 100
    assert chunk_size(2049, 64, None) == 1152
    assert chunk_size(16384, 4096, None) == 4096
    assert chunk_size(0, 64, None) == 1
    assert chunk_size(10, 64, 3) == 3
    for tokens in (1, 2048, 5000, 70001):
        assert 0 < chunk_size(tokens, 1024, None) <= 2048


def test_autocast_does_not_reach_inside() -> None:
    hidden, weight, labels = (
        _random(6, 4, dtype=torch.float32),
        _random(5, 4, dtype=torch.float32),
        _labels(6, vocabulary=5),
    )
    plain = linear_cross_entropy(hidden, weight, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear_cross_entropy(hidden, weight, labels), plain)


def test_wrong_input_is_refused_in_words() -> None:
    logits, labels = torch.zeros(3, 5), torch.tensor([0, 1, 4])
    with pytest.raises(IndexError, match=r"labels contains 5; expected 0 to 4, or ignore_index \(-100\)"):
        cross_entropy(logits, labels + 1)
    with pytest.raises(TypeError, match=r"labels has dtype torch\.float32"):
        cross_entropy(logits, labels.float())
    with pytest.raises(ValueError, match="one label for every token"):
        cross_entropy(logits, labels[:2])
    with pytest.raises(ValueError, match="not empty"):
        cross_entropy(logits[:, :0], labels)
    with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or 'none'; found 'max'"):
        cross_entropy(logits, labels, reduction="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"label_smoothing must lie in \[0, 1\)"):
        cross_entropy(logits, labels, label_smoothing=1.0)
    with pytest.raises(ValueError, match="z_loss must be a finite number"):
        cross_entropy(logits, labels, z_loss=-1.0)
    hidden, weight = torch.zeros(3, 4), torch.zeros(5, 4)
    with pytest.raises(ValueError, match=r"expected \[tokens\.\.\., features\] and \[vocabulary, features\]"):
        linear_cross_entropy(hidden, weight.t(), labels)
    with pytest.raises(TypeError, match=r"hidden is torch\.float32, weight torch\.float16"):
        linear_cross_entropy(hidden, weight.half(), labels)
    with pytest.raises(ValueError, match="bias has shape"):
        linear_cross_entropy(hidden, weight, labels, bias=torch.zeros(4))
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1"):
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=0)

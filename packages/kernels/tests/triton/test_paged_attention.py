"""Paged attention in Triton against the same in plain torch in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from drivetrain.kernels import implementation
from drivetrain.kernels.triton_ops import paged_attention as triton_paged

# Sums are in float32; weights and results are rounded to the dtype, whose last place is 2**-24, 2**-8 or 2**-11.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def make(
    device: str,
    queries: list[int],
    contexts: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Arguments of `ragged_attention`, in float64 and exact in `dtype`; NaN in every slot that no sequence uses."""
    generator = torch.Generator().manual_seed(sum(contexts) + head_dim)
    needed = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(needed) + 2, generator=generator)
    tables = torch.full((len(contexts), max(needed, default=0) + 1), -1, dtype=torch.int32)
    shape = (len(order), block_size, kv_heads, head_dim)
    caches = [torch.randn(shape, generator=generator).to(dtype).double() for _ in range(2)]
    unused = torch.ones(shape[0] * block_size, dtype=torch.bool)
    taken = 0
    for sequence, (blocks, context) in enumerate(zip(needed, contexts, strict=True)):
        tables[sequence, :blocks] = order[taken : taken + blocks]
        slots = tables[sequence, :blocks, None] * block_size + torch.arange(block_size)
        unused[slots.flatten()[:context]] = False
        taken += blocks
    for cache in caches:
        cache.view(-1, kv_heads, head_dim)[unused] = math.nan
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    q = torch.randn(sum(queries), heads, head_dim, generator=generator).to(dtype).double()
    arguments = {
        "q": q,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_tables": tables,
        "query_starts": starts,
        "context_lengths": torch.tensor(contexts, dtype=torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in arguments.items()}


def compare(op: str, arguments: dict[str, Tensor], dtype: torch.dtype, **options: Any) -> None:
    if op == "paged_decode":
        arguments = {name: tensor for name, tensor in arguments.items() if name != "query_starts"}
    options = {"scale": arguments["q"].shape[-1] ** -0.5} | options
    wanted = implementation(op, "torch")(**arguments, **options)
    low = {name: x.to(dtype) if x.is_floating_point() else x for name, x in arguments.items()}
    found = implementation(op, "triton")(**low, **options)
    assert found.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_decode(device: str, dtype: torch.dtype) -> None:
    compare("paged_decode", make(device, [1] * 4, [1, 0, 123, 64], dtype=dtype), dtype)


@pytest.mark.parametrize(
    "options", [{"window": 21}, {"softcap": 2.0}, {"scale": 0.5, "window": 1, "softcap": 20.0}], ids=str
)
def test_decode_options(device: str, options: dict[str, float]) -> None:
    compare("paged_decode", make(device, [1] * 2, [90, 5], block_size=5), torch.float32, **options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(3, 3, 80), (17, 1, 96), (7, 1, 17), (1, 1, 256), (70, 1, 16)]
)
def test_decode_shapes(device: str, heads: int, kv_heads: int, head_dim: int) -> None:
    arguments = make(device, [1] * 2, [70, 3], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    compare("paged_decode", arguments, torch.float32)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_ragged(device: str, dtype: torch.dtype) -> None:
    """Tiles that hold several positions, one, or none; contexts that begin before the queries; nothing to see."""
    arguments = make(device, [37, 1, 0, 5, 1, 3], [37, 90, 9, 70, 0, 2], dtype=dtype)
    compare("ragged_attention", arguments, dtype)


@pytest.mark.parametrize(
    "options", [{"window": 21}, {"softcap": 2.0}, {"causal": False}, {"window": 1, "softcap": 20.0}], ids=str
)
def test_ragged_options(device: str, options: dict[str, float]) -> None:
    compare("ragged_attention", make(device, [20, 2], [70, 2], heads=6), torch.float32, **options)


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("op", ["paged_decode", "ragged_attention"])
@pytest.mark.parametrize("window", [None, 70])
def test_split_contexts_are_joined(device: str, splits: int, op: str, window: int | None) -> None:
    """Among them splits that have nothing to do, and rows of no sequence, which are zero."""
    arguments = make(device, [1, 1, 1], [200, 3, 0])
    starts = arguments.pop("query_starts") if op == "ragged_attention" else None
    wanted = implementation("paged_decode", "torch")(
        **{name: x for name, x in arguments.items() if name != "query_starts"}, scale=0.25, window=window
    )
    names = ("q", "key_cache", "value_cache")
    q, *caches = (arguments[name].float() for name in names)
    if starts is not None:
        q = torch.cat([q, torch.full_like(q[:1], math.nan)])
        wanted = torch.cat([wanted, torch.zeros_like(wanted[:1])])
    queries = triton_paged._Queries(starts, 0.25, True, window, None)
    tables, contexts = arguments["block_tables"], arguments["context_lengths"]
    found = triton_paged._launch(q, (caches[0], caches[1]), tables, contexts, queries, splits)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


def test_few_sequences_are_split_over_the_gpu_and_many_are_not() -> None:
    assert triton_paged.choose_splits(programs=8, tokens=32768, processors=132) == 33
    assert triton_paged.choose_splits(programs=8, tokens=1000, processors=132) == 3
    assert triton_paged.choose_splits(programs=1, tokens=1 << 20, processors=132) == 64
    assert triton_paged.choose_splits(programs=200, tokens=32768, processors=132) == 1
    assert triton_paged.choose_splits(programs=0, tokens=0, processors=132) == 1


def test_visible_nan_is_seen_and_stays_in_its_sequence(device: str) -> None:
    arguments = make(device, [1, 1], [20, 18])
    del arguments["query_starts"]
    arguments["value_cache"][int(arguments["block_tables"][0, 1]), 2] = math.nan
    low = {name: x.float() if x.is_floating_point() else x for name, x in arguments.items()}
    found = implementation("paged_decode", "triton")(**low, scale=0.25)
    assert bool(found[0].isnan().all())
    assert bool(found[1].isfinite().all())


def test_empty_batches(device: str) -> None:
    for queries in ([], [0, 0]):
        arguments = make(device, queries, [0] * len(queries))
        compare("ragged_attention", arguments, torch.float32)
    compare("paged_decode", make(device, [], []), torch.float32)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 16), (3, 80)])
def test_write_cache(device: str, dtype: torch.dtype, kv_heads: int, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(5, kv_heads * 2, head_dim, generator=generator).to(device, dtype)
    caches = torch.randn(2, 4, 3, kv_heads, head_dim, generator=generator).to(device, dtype)
    slots = torch.tensor([11, -1, 0, 7, -1], dtype=torch.int32, device=device)
    key, value = both.chunk(2, dim=1)
    wanted, found = caches.clone(), caches.clone().transpose(0, 1).contiguous().transpose(0, 1)
    implementation("write_cache", "torch")(key, value, wanted[0], wanted[1], slots)
    implementation("write_cache", "triton")(key, value, found[0], found[1], slots)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, caches)
    implementation("write_cache", "triton")(key[:0], value[:0], found[0], found[1], slots[:0])
    assert torch.equal(found, wanted)

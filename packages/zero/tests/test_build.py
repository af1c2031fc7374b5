"""Models that no rank ever holds whole: built under Init, or on the meta device and filled while they are sharded.

What counts everywhere: the same bits as building and sharding the same model whole.
"""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as module_hooks
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.comm import Mesh, init
from drivetrain.zero import Init, ParameterAccess, Policy, ShardedModule, ShardedOptimizer, shard, whole
from drivetrain_testkit import run_ranks

SPLIT = Policy(stage=3, persistence_numel=0)
HALF = Policy(stage=3, persistence_numel=0, param_dtype=torch.bfloat16)


class Part(nn.Module):
    """A parameter that is there before the children, and a size that no number of ranks divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))
        self.inner = nn.Linear(width, width)
        nn.init.trunc_normal_(self.gain)
        self.register_buffer("frequencies", torch.arange(width) / width, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) * self.gain


class Net(nn.Module):
    """All that constructors do to modules that are built already."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(width) for _ in range(2)])
        self.copies = nn.ModuleList([copy.deepcopy(self.parts[0]) for _ in range(2)])
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.embed = nn.Embedding(11, width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight  # tied as an object
        self.first, self.second = nn.Linear(width, 3), nn.Linear(width, 3)
        self.second.weight.data = self.first.weight.data  # tied as memory, which sharding unties
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.foreign = nn.Parameter(torch.from_numpy(torch.arange(5.0).numpy().copy()))
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        self.halves = nn.ParameterList(torch.ones(10).split(5))
        self.apply(self.initialize)
        self.second.weight.data.mul_(3)
        self.parts[0].inner.weight.data[1:] = 0.25
        with torch.no_grad():
            self.first.bias.copy_(self.embed.weight.sum() * torch.arange(3))
            self.turned += self.turned.detach().mean()
        self.first.bias.data = self.first.bias.data * 2
        self.second.load_state_dict({"weight": torch.ones(3, width), "bias": torch.zeros(3)})
        self.frozen = nn.Linear(width, 2).requires_grad_(False)
        self.late = nn.Linear(2, 2, bias=False)
        self.late.register_parameter("bias", nn.Parameter(self.scalar.detach().repeat(2)))
        self.wide = nn.Linear(2, 3).double()
        self.row = self.embed.weight.detach()[2]  # looks at a parameter, and is none
        self.numbers = self.scalar.tolist(), self.foreign.detach().numpy().copy()
        self.lost = nn.Linear(3, 3)
        self.lost = nn.Linear(3, 5)

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()


class Library(nn.Module):
    """Constructors of torch's own that look at parameters in unusual ways."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_norm = parametrizations.weight_norm(nn.Linear(5, 6))
        self.spectral_norm = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(4, 4))
        self.recurrent = nn.LSTM(4, 5, 2)
        self.turned = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.skipped = nn.utils.skip_init(nn.Linear, 3, 4)
        for parameter in self.skipped.parameters():
            nn.init.ones_(parameter)
        nn.init.orthogonal_(self.recurrent.weight_hh_l0)
        self.attention = nn.MultiheadAttention(8, 2)
        flat = nn.utils.parameters_to_vector(self.attention.parameters())
        nn.utils.vector_to_parameters(flat * 2, self.attention.parameters())
        self.pickled = pickle.loads(pickle.dumps(self.attention))
        torch._foreach_mul_([p.data for p in self.skipped.parameters()], 2.0)
        self.sums = torch.func.vmap(lambda row: row.sum())(self.skipped.weight.detach())
        self.copied = [p.detach().clone() for p in self.skipped.parameters()]
        self.lazy = nn.LazyLinear(4)
        with torch.no_grad():
            self.out = self.lazy(torch.ones(2, 3))  # a forward pass, to learn the sizes


def function() -> nn.Module:
    """Modules that no class builds, in a list that is whole before it gets a parent."""
    layers = [nn.Linear(5, 5) for _ in range(3)]
    return nn.Sequential(*layers, nn.BatchNorm1d(5))


def same(sharded: ShardedModule, expected: nn.Module) -> None:
    """All that is kept has the bits of ``expected``, in the precision that it came in."""
    names, wanted = dict(sharded.module.named_parameters()), dict(expected.named_parameters())
    assert names.keys() == wanted.keys()
    kept = ParameterAccess(sharded).master.full_many([names[name] for name in wanted])
    for (name, value), found in zip(wanted.items(), kept, strict=True):
        assert found is not None
        assert torch.equal(found, value.detach().to(found.dtype)), name
    for name, buffer in expected.named_buffers():
        assert torch.equal(sharded.module.get_buffer(name), buffer), name


def start() -> Mesh:
    """All ranks; what the interpreter has loaded is kept out of the garbage collections that Init asks for."""
    gc.collect()
    gc.freeze()
    return Mesh.create(init())


def seeded(build: Callable[[], nn.Module], seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return build()


def _values(rank: int, world_size: int) -> None:
    mesh = start()
    expected, after = seeded(Net), torch.rand(1)
    for stage in range(4):
        with Init(mesh):
            model = seeded(Net)
        assert torch.equal(torch.rand(1), after)
        assert all(bool(p.isnan().all()) for p in model.parameters())
        assert torch.equal(model.row, expected.row)
        assert model.numbers[0] == expected.numbers[0]
        assert (model.numbers[1] == expected.numbers[1]).all()
        assert model.head.weight is model.embed.weight
        assert not model.frozen.weight.requires_grad
        same(shard(model, mesh, Policy(stage=stage, persistence_numel=8, bucket_numel=90)), expected)
    expected = seeded(Library)
    with Init(mesh):
        model = seeded(Library)
    assert torch.equal(model.out, expected.out)
    assert torch.equal(model.sums, expected.sums)
    assert all(torch.equal(a, b) for a, b in zip(model.copied, expected.copied, strict=True))
    same(shard(model, mesh, SPLIT), expected)
    # Where ranks draw different numbers, the first rank's count; also where they are replicas of each other.
    for grid in (mesh, Mesh.create(init(), data=world_size)):
        for build in (function, partial(nn.Linear, 3, 3)):
            with Init(grid):
                model = seeded(build, seed=3 + rank)
            same(shard(model, grid, SPLIT), seeded(build))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_parts_become_buckets_with_the_bits_of_the_whole(world_size: int) -> None:
    run_ranks(_values, world_size)


class Peak(TorchDispatchMode):
    """The most bytes of floating-point storages that are alive at one time. (Frames on the wire are bytes.)"""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not tensor.is_meta:
                seen = StorageWeakRef(tensor.untyped_storage())
                self._seen[seen.cdata] = seen
        self.bytes = max(self.bytes, self._alive())
        return result

    def _alive(self) -> int:
        total = 0
        for key, seen in list(self._seen.items()):
            storage = None if seen.expired() else torch.UntypedStorage._new_with_weak_ptr(seen.cdata)
            if storage is None:
                del self._seen[key]
            else:
                total += storage.nbytes()
        return total


class Stack(nn.Module):
    """Blocks of one layer, a list that is there before it gets a parent, perhaps copies; all is initialised again."""

    def __init__(self, *, copies: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(128, 128, bias=False)) for _ in range(4)])
        self.layers = nn.ModuleList([nn.Linear(128, 128, bias=False) for _ in range(4)])
        last = [copy.deepcopy(self.layers[0]) if copies else nn.Linear(128, 128, bias=False) for _ in range(4)]
        self.last = nn.ModuleList(last)
        for parameter in self.parameters():
            nn.init.normal_(parameter)


class Source:
    """Tensors of a dictionary; remembers how much of each was read."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.read_numel: dict[str, int] = {}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        self.read_numel[name] = self.read_numel.get(name, 0) + stop - start
        return self._tensors[name].reshape(-1)[start:stop]


class Halves(Source):
    """Has no memory of its own."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return torch.full((stop - start,), 0.5)


def _memory(rank: int, world_size: int) -> None:
    mesh = start()
    layer = 128 * 128 * 4
    with Peak() as plain:
        Stack()
    assert plain.bytes == 12 * layer  # so all of it would be seen
    with Init(mesh), Peak() as building:
        model = Stack()
    assert building.bytes <= 12 * layer // world_size + layer + 64
    with Init(mesh), Peak() as copying:
        Stack(copies=True)
    assert copying.bytes <= 12 * layer // world_size + 2 * layer + 64
    with Peak() as sharding:
        sharded = shard(model, mesh, SPLIT)
    assert sharded.bytes().gathered == 0
    # A part that becomes a shard, and the buffer of one unit, which is made to be emptied.
    assert sharding.bytes <= 12 * layer // world_size + 5 * layer
    source = Halves({name: torch.empty(128, 128, device="meta") for name, _ in model.named_parameters()})
    with torch.device("meta"):
        model = Stack()
    with Peak() as streaming:
        shard(model, mesh, SPLIT, values=source)
    assert streaming.bytes <= 12 * layer // world_size + 5 * layer


def test_no_rank_has_more_than_its_part_and_one_module() -> None:
    run_ranks(_memory, 3)


def _dtypes(rank: int, world_size: int) -> None:
    mesh = start()
    expected = seeded(Net)
    rounded = copy.deepcopy(expected)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16()
    for given, dtype, policy, values in (
        (None, None, HALF, expected),
        (HALF, None, HALF, expected),
        (HALF, torch.bfloat16, HALF, expected),
        (None, torch.bfloat16, HALF, rounded),
        (SPLIT, torch.bfloat16, SPLIT, rounded),
    ):
        with Init(mesh, given, dtype=dtype):
            model = seeded(Net)
        shown = {p.dtype for p in model.parameters()}
        assert shown == ({torch.float32, torch.float64} if dtype is None else {dtype})
        assert {b.dtype for b in model.buffers()} == {torch.float32}
        sharded = shard(model, mesh, policy)
        same(sharded, values)
        computes = policy.param_dtype or dtype
        assert {bucket.dtype for bucket in sharded.buckets} == {computes}
        assert all(b.master.dtype != computes for b in sharded.trained_buckets)
    with pytest.raises(ValueError, match="dtype must be a floating-point dtype, got"):
        Init(mesh, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"dtype is torch.float16 and policy.param_dtype torch.bfloat16; leave one"):
        Init(mesh, HALF, dtype=torch.float16)


def test_master_weights_start_from_what_was_drawn_unless_that_was_rounded() -> None:
    run_ranks(_dtypes, 2)


def unpatched() -> bool:
    hooks = (module_hooks._global_parameter_registration_hooks, module_hooks._global_module_registration_hooks)
    return not any(hooks) and torch._C._len_torch_function_stack() == 0 and Init.active() is None


def _contexts(rank: int, world_size: int) -> None:
    mesh = start()
    with Init(mesh, enabled=False):
        assert unpatched()
        assert not nn.Linear(2, 2).weight.isnan().any()
    # Contexts in contexts, entered again, and the work of another thread in between.
    context, elsewhere = Init(mesh, SPLIT), []
    with context:
        first = seeded(function)
        with Init(mesh), Init(mesh, SPLIT, enabled=True):
            second = seeded(Net)
        third = nn.Linear(2, 2)
        thread = threading.Thread(target=lambda: elsewhere.append(nn.Sequential(nn.Linear(2, 2))))
        thread.start()
        thread.join()
        with whole(second), torch.no_grad():
            if rank == 0:
                second.scalar.fill_(2.0)
        with pytest.raises(
            ValueError, match=r"rank \d: an Init inside of another one joins it, and they differ in the "
        ):
            with Init(mesh, HALF):
                pass
    assert not elsewhere[0][0].weight.isnan().any()
    with context:
        fourth = nn.ModuleList([third, nn.Linear(2, 2)])
    assert third.weight.isnan().all()
    assert fourth[1].weight.isnan().all()
    same(shard(first, mesh, SPLIT), seeded(function))
    assert second.scalar.isnan()
    expected = seeded(Net)
    expected.scalar.data.fill_(2.0)
    same(shard(second, mesh, SPLIT), expected)
    assert shard(fourth, mesh, SPLIT).bytes().gathered == 0
    # Looking at what a parameter is, and not at what it holds, gathers nothing.
    with context:
        fifth = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        before = mesh.ledger.total_bytes()
        for parameter in fifth.parameters():
            parameter.requires_grad_(parameter.dim() > 1 and parameter.numel() == 16)
            assert (parameter.dtype, parameter.device.type, parameter.is_contiguous()) == (torch.float32, "cpu", True)
            assert parameter.detach().shape == parameter.data.shape == torch.empty_like(parameter).shape
            assert fifth.state_dict().keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert mesh.ledger.total_bytes() == before
    # What is sharded already stays so, in a context too.
    with Init(mesh):
        first.append(nn.Dropout(0.0))
        outer = nn.Sequential(first[0], nn.Linear(5, 5))
    assert outer[1].weight.isnan().all()
    with torch.no_grad():
        assert torch.isfinite(first(torch.ones(2, 5))).all()
    # A model of parts built in different ways.
    with Init(mesh):
        one = seeded(partial(nn.Linear, 3, 5))
    with Init(mesh):
        two = seeded(partial(nn.Linear, 5, 3))
    mixed = nn.Sequential(one, seeded(partial(nn.Linear, 5, 5)), two)
    parts = [seeded(partial(nn.Linear, *shape)) for shape in ((3, 5), (5, 5), (5, 3))]
    same(shard(mixed, mesh, SPLIT), nn.Sequential(*parts))
    assert unpatched()


def test_contexts_nest_join_and_leave_nothing_behind() -> None:
    run_ranks(_contexts, 2)


def texts(*calls: Callable[[], object]) -> Iterator[str]:
    for call in calls:
        with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
            call()
        yield str(caught.value)


def fail_in(context: Init, made: list[nn.Module]) -> None:
    with context:
        made.append(function())
        raise KeyError("stop")


def _refusals(rank: int, world_size: int) -> None:
    mesh = start()
    made = []
    with pytest.raises(KeyError, match="stop"):
        fail_in(Init(mesh), made)
    assert unpatched()
    (broken,) = made
    with pytest.raises(RuntimeError, match="was built under Init and is not sharded yet: forward would read"):
        broken(torch.ones(2, 5))
    with Init(mesh, SPLIT):
        model = function()
        inside = list(texts(lambda: shard(model, mesh, SPLIT), lambda: model(torch.ones(2, 5)).sum().backward()))
    assert f"rank {rank}: shard() inside of Init; leave the context first" in inside[0]
    assert f"rank {rank}: a backward pass while modules are built under Init" in inside[1]
    name = f"rank {rank}: Sequential was built under Init and is not sharded yet"
    found = texts(
        lambda: model(torch.ones(2, 5)),
        model.state_dict,
        lambda: model.load_state_dict({}),
        lambda: copy.deepcopy(model),
        lambda: shard(model, mesh, HALF),
        lambda: shard(model, Mesh.create(init(), data=2), SPLIT),
        lambda: shard(nn.ParameterList(model.parameters()), mesh, SPLIT),
    )
    wanted = (
        f"{name}: forward would read parameters such as '0.weight', which are split over the ranks. Call shard(",
        f"{name}: state_dict() would hold placeholders for parameters such as '0.weight'",
        f"{name}: load_state_dict() would write into placeholders of parameters such as '0.weight'",
        "a module that was built under Init cannot be pickled or copied before it is sharded",
        f"rank {rank}: the module was built under Init for Policy(stage=3",
        f"rank {rank}: the module was built under Init on a mesh that splits over ranks [0, 1], and is to be sharded",
        "parameter '0' was split under Init, and no module is left that it was built in",
    )
    for text, beginning in zip(found, wanted, strict=True):
        assert text.startswith(beginning), text
    graph_of = []
    with whole(model):
        graph_of.append(model(torch.ones(2, 5)).sum())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph_of[0].backward()
    with pytest.raises(ValueError, match="Linear has parts of 0 Init contexts that are not sharded yet, and one is"):
        with whole(nn.Linear(1, 1)):
            pass
    sharded = shard(model, mesh, SPLIT)
    with torch.no_grad():
        assert torch.isfinite(model(torch.ones(2, 5))).all()
    with pytest.raises(ValueError, match="a sharded module is read and changed within gathered"):
        with whole(model):
            pass
    assert sharded.bytes().gathered == 0
    assert unpatched()


def test_what_would_read_placeholders_is_refused_in_words() -> None:
    run_ranks(_refusals, 2)


def _whole(rank: int, world_size: int) -> None:
    mesh = start()
    expected = seeded(Net)

    def edit(model: Any) -> None:
        with torch.no_grad():
            model.first.weight += model.second.weight
        table = nn.Embedding(13, 7)
        table.weight.data[:11] = model.embed.weight.data
        model.embed.weight.data = table.weight.data
        model.adapter = nn.Linear(3, 2)
        model.frozen = nn.Linear(7, 4)
        nn.init.zeros_(model.adapter.weight)
        model.parts[1].gain = nn.Parameter(model.parts[0].gain.detach().clone())

    for dtype in (None, torch.bfloat16):
        model, reference = None, copy.deepcopy(expected)
        with Init(mesh, HALF, dtype=dtype):
            model = seeded(Net)
        for net, context in ((reference, None), (model, whole(model))):
            torch.manual_seed(9)
            if context is None:
                edit(net)
            else:
                with context:
                    same_now = zip(net.parameters(), expected.parameters(), strict=True)
                    assert all(torch.equal(p, q) for p, q in same_now)
                    edit(net)
                    with whole(net), torch.no_grad():
                        net.scalar.fill_(rank + 1.0)
        assert model.embed.weight.shape == (13, 7)
        assert model.head.weight is model.embed.weight
        reference.scalar.data.fill_(1.0)
        with whole(model):
            assert torch.equal(model.adapter(torch.ones(3)), model.adapter.bias)
            assert model.scalar.item() == 1.0
        # What one rank does alone has to stay within the part; others come when all ranks ask for them.
        with whole(model.parts[1]):
            if rank == 0:
                nn.init.zeros_(model.parts[1].gain)
            assert model.scalar.item() == 1.0
            model.adapter.weight.data.fill_(2.0)
        reference.adapter.weight.data.fill_(2.0)
        reference.parts[1].gain.data.zero_()
        same(shard(model, mesh, HALF), reference)


def test_edits_between_building_and_sharding_are_kept() -> None:
    run_ranks(_whole, 2)


class Tied(nn.Module):
    """Parameters, a tied pair, buffers that are saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.parts = nn.ModuleList([Part(8) for _ in range(3)])
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.nothing = nn.Parameter(torch.empty(0))


EVERYTHING = ["embed", "parts.0.inner", "parts.0", "parts.1.inner", "parts.1", "parts.2.inner", "parts.2", "norm"]
"""Modules of `Tied` that are initialised, in this order, if nothing has values: the tied head is, by the embedding."""


def fill(module: nn.Module) -> None:
    """What a library's own initialisation does."""
    if isinstance(module, Part):
        nn.init.ones_(module.gain)
        module.frequencies.copy_(torch.arange(8) / 8)
    elif not isinstance(module, Tied):
        module.reset_parameters()


def _streams(rank: int, world_size: int) -> None:
    mesh = start()
    expected = seeded(Tied)
    with torch.no_grad():
        expected.norm.running_mean.fill_(0.5)
    tensors = {name: tensor.clone() for name, tensor in expected.state_dict().items() if name != "embed.weight"}
    for stage, dtype in ((0, None), (1, torch.bfloat16), (3, torch.bfloat16), (3, None)):
        with torch.device("meta"):
            model = Tied()
        before = list(model.parameters())
        optimizer = torch.optim.AdamW(model.parameters())
        source = Source(tensors)
        policy = Policy(stage=stage, persistence_numel=9, param_dtype=dtype)
        sharded = shard(model, mesh, policy, values=source, initialize=fill)
        assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
        assert model.head.weight is model.embed.weight
        same(sharded, expected)
        names = [name for name in tensors if name in dict(expected.named_parameters(remove_duplicate=False))]
        everybody = torch.tensor([source.read_numel.get(name, 0) for name in names])
        torch.distributed.all_reduce(everybody)
        assert everybody.tolist() == [tensors[name].numel() for name in names]
        ShardedOptimizer(sharded, optimizer)
    # What the source lacks is initialised, children first, with the numbers that one process draws; rank 0's count.
    some = {name: tensor for name, tensor in tensors.items() if not name.startswith("parts.1.")}
    for source, drawn in ((Source(some), ["parts.1.inner", "parts.1"]), (None, EVERYTHING)):
        with torch.device("meta"):
            model = Tied()
        torch.manual_seed(5 + rank)
        sharded = shard(model, mesh, HALF, values=source, initialize=fill)
        reference = copy.deepcopy(expected) if source else Tied()
        torch.manual_seed(5)
        with torch.no_grad():
            for name in drawn:
                fill(reference.get_submodule(name))
        same(sharded, reference)
    # What has values keeps them, whole or split, if the source may lack it.
    for context in (nullcontext(), Init(mesh)):
        with context:
            model = seeded(Tied)
        sharded = shard(model, mesh, SPLIT, values=Source({"parts.2.gain": torch.ones(8)}), initialize=fill)
        reference = seeded(Tied)
        reference.parts[2].gain.data.fill_(1)
        same(sharded, reference)


def test_values_stream_into_shards_and_what_is_absent_is_initialised() -> None:
    run_ranks(_streams, 2)


def _misfits(rank: int, world_size: int) -> None:
    mesh = start()
    with torch.device("meta"):
        model = Tied()
    tensors = dict(seeded(Tied).state_dict())
    bad = {**tensors, "parts.0.gain": torch.zeros(9), "more": torch.zeros(1), "norm.running_var": torch.zeros(())}
    del bad["parts.1.gain"], bad["norm.weight"]
    if rank == 1:
        bad["only.here"] = torch.zeros(1)
    problems = texts(
        lambda: shard(model, mesh, SPLIT),
        lambda: shard(model, mesh, SPLIT, values=Source(bad)),
        lambda: shard(nn.Linear(1, 1), mesh, SPLIT, values=Source({"weight": torch.zeros(1, 1)})),
        lambda: shard(model, mesh, SPLIT, values=Source(tensors)),
        lambda: shard(
            model, mesh, SPLIT, values=Source(tensors if rank else {**tensors, "x": torch.zeros(1)}), initialize=fill
        ),
        lambda: shard(model, mesh, SPLIT, values=Source(tensors), initialize=lambda module: None),
    )
    missing = "'parts.1.gain', 'norm.weight', 'parts.0.frequencies', 'parts.1.frequencies', 'parts.2.frequencies'"
    elsewhere = "rank 0 found: " if rank else ""
    wanted = (
        "19 parameters and buffers are on the meta device and have no data: 'nothing', 'embed.weight', ",
        f"{elsewhere}the tensors of Source are not those of Tied. 5 missing: {missing}; 1 unexpected: 'more'; 2 of "
        "another shape: 'parts.0.gain' ([9], not [8]), 'norm.running_var' ([], not [8]). Rename or leave out what",
        "the tensors of Source are not those of Linear. 1 missing: 'bias'. Rename",
        "the tensors of Source are not those of Tied. 3 missing: 'parts.0.frequencies', ",
        f"{elsewhere}the tensors of Source are not those of Tied. 1 unexpected: 'x'",
        "initialize= gave no values, or NaN, to 'parts.0.frequencies', 'parts.1.frequencies', 'parts.2.frequencies'",
    )
    for text, beginning in zip(problems, wanted, strict=True):
        assert text.startswith(beginning), text


def test_a_source_that_does_not_fit_is_told_in_one_error_on_all_ranks() -> None:
    run_ranks(_misfits, 2)


def _transformers(rank: int, world_size: int, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    mesh = start()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    tokens = torch.arange(12).view(2, 6) + rank

    def build(tied: bool) -> Any:
        config = LlamaConfig(vocab_size=30, num_key_value_heads=1, tie_word_embeddings=tied, **sizes)
        return AutoModelForCausalLM.from_config(config)

    def trained(model: Any, sharded: ShardedModule) -> dict[str, torch.Tensor]:
        optimizer = ShardedOptimizer(sharded, torch.optim.AdamW(model.parameters(), lr=0.1))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        return dict(sharded.full_parameters())

    def compare(model: Any, expected: Any, **options: Any) -> None:
        found = trained(model, shard(model, mesh, SPLIT, **options))
        wanted = trained(expected, shard(expected, mesh, SPLIT))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    for tied in (True, False):
        expected = seeded(partial(build, tied))
        after = torch.rand(1)
        if rank == 0:
            expected.save_pretrained(folder / str(tied))
        torch.distributed.barrier()
        with Init(mesh):
            built = seeded(partial(build, tied))
        assert torch.equal(torch.rand(1), after)
        compare(built, copy.deepcopy(expected))
        with Init(mesh, dtype=torch.bfloat16):
            loaded = AutoModelForCausalLM.from_pretrained(folder / str(tied))
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        with Init(mesh):
            loaded = AutoModelForCausalLM.from_pretrained(folder / str(tied))
        loaded.train()
        with whole(loaded.get_input_embeddings()):
            torch.manual_seed(4)
            loaded.resize_token_embeddings(33)
        resized = copy.deepcopy(expected)
        torch.manual_seed(4)
        resized.resize_token_embeddings(33)
        compare(loaded, resized)
        with torch.device("meta"):
            empty = build(tied)
        source = Source({name: p for name, p in expected.state_dict().items() if not tied or name != "lm_head.weight"})
        compare(empty, expected, values=source, initialize=empty._init_weights)


def test_models_of_transformers_are_built_loaded_resized_and_trained(tmp_path: Path) -> None:
    run_ranks(_transformers, 2, tmp_path, env={"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"})

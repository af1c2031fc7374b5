"""Gradients with activations that went away and came back are those without, to the last bit; what must stay, stays."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drivetrain.kernels import instruction_sets
from drivetrain.offload import ActivationOptions, OffloadActivations, activations
from drivetrain.offload.activation_tiers import CopyLink

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native core is not built")

# ------------------------------------------------------------------------------------------------------------- settings


class _Later:
    """A copy that is made when somebody has waited for it, or has looked a few times: as a stream would."""

    def __init__(self, copy_now: Callable[[], object], looks: int) -> None:
        self._copy: Callable[[], object] | None = copy_now
        self._looks = looks

    def done(self) -> bool:
        self._looks -= 1
        if self._looks < 0:
            self.wait()
        return self._copy is None

    def wait(self) -> None:
        if self._copy is not None:
            self._copy()
            self._copy = None

    order = wait


class LaterLink:
    """Stands for a GPU's streams: copies are made late, and memory holds rubbish until then."""

    same = False

    def __init__(self, device: torch.device) -> None:
        self._coming: dict[int, _Later] = {}
        self._count = 0

    def origin(self) -> None:
        return None

    def to_host(self, flat: Tensor, buffer: Tensor, origin: object) -> _Later:
        self._count += 1
        buffer.fill_(0xAA)
        return _Later(lambda: buffer.copy_(flat), self._count % 7)

    def to_device(self, buffer: Tensor) -> tuple[Tensor, _Later]:
        self._count += 1
        flat = torch.full_like(buffer, 0xAA)
        return flat, _Later(lambda: flat.copy_(buffer), self._count % 5)

    def lend(self, flat: Tensor) -> None:
        pass


SETTINGS: dict[str, dict[str, Any]] = {
    "host": {"force": True},
    "host, one by one": {"force": True, "prefetch": 0, "in_flight": 1},
    "streams": {"force": True, "later": True, "prefetch": 40_000, "in_flight": 30_000},
    "streams, then a drive": {
        "force": True,
        "later": True,
        "drives": 1,
        "host_capacity": 50_000,
        "in_flight": 30_000,
        "keep_bytes": 20_000,
    },
    "streams and two drives": {"force": True, "later": True, "drives": 2, "host_capacity": 0, "prefetch": 20_000},
    "drive": {"drives": 1, "host_capacity": 0},
    "memory, then a drive": {"drives": 1, "host_capacity": 20_000, "in_flight": 10_000, "prefetch": 30_000},
    "three drives, the last stay": {"drives": 3, "host_capacity": 0, "keep_bytes": 30_000, "prefetch": 0},
}


def make(place: Path, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **more: Any) -> OffloadActivations:
    chosen = {"min_bytes": 64, **setting}
    folders = [place / f"drive{index}" for index in range(chosen.pop("drives", 0))]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    monkeypatch.setattr(activations, "CopyLink", LaterLink if chosen.pop("later", False) else CopyLink)
    return OffloadActivations(ActivationOptions(nvme=tuple(folders), **chosen), **more)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are small: threads would spend their time on waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=SETTINGS, ids=list(SETTINGS))
def offload(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = make(tmp_path, SETTINGS[request.param], monkeypatch)
    yield made
    gone(made)
    made.close()


def gone(offload: OffloadActivations) -> None:
    """Nothing of any graph is left."""
    gc.collect()
    offload.synchronize()
    left = offload.statistics()
    assert (left.resident, left.host, left.files) == (0, 0, 0)
    assert offload._store._mover.empty


# ------------------------------------------------------------------------------------------------------------ gradients


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.body = nn.Linear(32, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(x.argmax(-1)))))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.second = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu_()
        y = self.second(hidden)
        y = y.clone()
        y[:, :2] *= 2
        return torch.sigmoid_(y.mul_(0.5))


class Views(nn.Module):
    """Parts of one tensor, transposed, broadcast and with gaps, each saved."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.scale = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:-1], 4, 3, 8).transpose(-3, -2).unbind(-3)
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        mixed = (scores @ v).flatten(-2) * self.scale
        row = mixed[:, :1].expand_as(mixed)
        return mixed * row * mixed[..., ::2].repeat_interleave(2, -1)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32)) for _ in range(4)
        )
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.body(self.body(x)).float()


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(16, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.1, batch_first=True)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "transformer": transformer,
    "tied": Tied,
    "in place": InPlace,
    "views": Views,
    "reentrant": lambda: Checkpointed(True),
    "not reentrant": lambda: Checkpointed(False),
    "autocast": Halved,
    "convolution": Convolved,
}


def gradients(model: nn.Module, context: Any, *, steps: int = 1) -> list[Tensor]:
    """Outputs, and gradients of parameters and input, of a few steps."""
    torch.manual_seed(3)
    found = []
    for _ in range(steps):
        x = torch.randn(6, 16, 32).requires_grad_()
        with context:
            y = model(x * 1.0)
            loss = y.square().mean()
        loss.backward()
        found += [y.detach()] + [each.grad.clone() for each in (x, *model.parameters()) if each.grad is not None]
    return found


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_to_the_last_bit(offload: OffloadActivations, name: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name]()
    expected = gradients(copy.deepcopy(model), nullcontext(), steps=3)
    same(gradients(model, offload, steps=3), expected)
    moved = offload.statistics()
    assert moved.to_host + moved.to_files > 0


@pytest.mark.parametrize("backward", ["inside", "outside"])
def test_a_graph_may_be_used_again(offload: OffloadActivations, backward: str) -> None:
    torch.manual_seed(1)
    model = transformer().eval()
    x = torch.randn(4, 8, 32, requires_grad=True)

    def twice(context: Any) -> list[Tensor]:
        with context:
            loss = model(x * 1.0).square().sum()
            if backward == "inside":
                first = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
        if backward == "outside":
            first = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
        return [*first, *torch.autograd.grad(loss, [x, *model.parameters()])]

    same(twice(offload), twice(nullcontext()))


def test_second_derivatives(offload: OffloadActivations) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Softplus())
    x = torch.randn(16, 32, requires_grad=True)

    def penalty(context: Any) -> list[Tensor]:
        with context:
            loss = model(x * 1.0).square().sum()
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            return list(torch.autograd.grad(slope.square().sum(), [x, *model.parameters()], allow_unused=True)[:-1])

    same(penalty(offload), penalty(nullcontext()))


def test_several_graphs_at_once(offload: OffloadActivations) -> None:
    """Micro-batches whose backward passes come in the order of their forward passes, and one that never does."""
    torch.manual_seed(1)
    model = mlp().eval()
    batches = [torch.randn(32, 32) for _ in range(4)]

    def run(context: Any) -> list[Tensor]:
        losses = []
        for batch in batches:
            with context:
                losses.append(model(batch * 1.0).square().sum())
        return [each for loss in losses[:-1] for each in torch.autograd.grad(loss, list(model.parameters()))]

    same(run(offload), run(nullcontext()))


def test_threads(offload: OffloadActivations) -> None:
    torch.manual_seed(1)
    models = [nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))) for _ in range(4)]
    expected = [gradients_of(model, nullcontext()) for model in models]
    found: list[list[Tensor]] = [[] for _ in models]

    def work(index: int) -> None:
        for _ in range(5):
            found[index] = gradients_of(models[index], offload)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        same(one, other)


def gradients_of(model: nn.Module, context: Any) -> list[Tensor]:
    x = torch.linspace(-1, 1, 32 * 64).view(64, 32)
    with context:
        loss = model(x * 1.0).square().sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))


# ----------------------------------------------------------------------------------------------- what autograd refuses


def test_changes_in_place_are_refused_as_autograd_refuses_them(offload: OffloadActivations) -> None:
    weight = torch.randn(32, 32, requires_grad=True)
    big = torch.randn(32, 32)
    small = torch.randn(1)

    def changed(what: str, context: Any) -> Tensor:
        with context:
            hidden = (big * 1.0) @ weight
            scale = small * 1.0
            result = hidden.exp() * scale
            loss = (result * hidden).sum()
        {"input": hidden, "view": hidden.t(), "result": result, "small": scale, "leaf": weight}[what].detach().mul_(2.0)
        return loss

    for what in ("input", "view", "result", "small"):
        for context in (nullcontext(), offload):
            loss = changed(what, context)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            del loss
    # What backward does not read may change.
    for context in (nullcontext(), offload):
        changed("leaf", context).backward()
    offload.synchronize()
    # A version that was saved after the change is its own.
    with offload:
        hidden = big * 1.0
        first = (hidden * weight).sum()
        hidden.add_(1.0)
        second = (hidden * weight).sum()
    (found,) = torch.autograd.grad(second, weight)
    assert torch.equal(found, big * 1.0 + 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(first, weight)


def test_a_second_backward_of_a_freed_graph(offload: OffloadActivations) -> None:
    x = torch.randn(32, 32, requires_grad=True)
    with offload:
        loss = (x * 1.0).exp().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# ---------------------------------------------------------------------------------------------- what goes, what stays


def counts(offload: OffloadActivations) -> tuple[int, int, int]:
    found = offload.statistics()
    return found.saved, found.shared, found.kept


def host(**more: Any) -> ActivationOptions:
    return ActivationOptions(**{"min_bytes": 64, "force": True, **more})


def test_parameters_leaves_and_what_shares_their_memory_stay() -> None:
    offload = OffloadActivations(host())
    linear = nn.Linear(32, 32)
    frozen = nn.Linear(32, 32).requires_grad_(False)
    x = torch.randn(8, 32, requires_grad=True)
    with offload:
        y = frozen(linear(x))  # x; linear's weight transposed; frozen's weight transposed, and nothing of its input
        assert counts(offload)[2] == counts(offload)[0] >= 3
        z = y * linear.weight.detach()[:8].contiguous()[:8]  # the same memory, as is known by now
    assert counts(offload)[2] == counts(offload)[0]
    z.sum().backward()
    assert offload.statistics().to_host == 0


def test_buffers_of_the_model_stay() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale: Tensor
            self.register_buffer("scale", torch.randn(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model = Scaled()
    x = torch.randn(32, 32, requires_grad=True)
    with OffloadActivations(host()) as offload:
        y = model(x)
    assert counts(offload) == (1, 0, 0)
    with OffloadActivations(host(), model=model) as offload:
        z = model(x)
    assert counts(offload) == (1, 0, 1)
    (y.sum() + z.sum()).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * model.scale)


def test_a_predicate_keeps_memory_that_comes_and_goes() -> None:
    """As ZeRO's gathered parameters do: their storage has no bytes between forward and backward."""
    whole = torch.randn(32, 32)
    values = whole.clone()
    asked = []

    def keeps(tensor: Tensor) -> bool:
        asked.append(tensor.shape)
        return tensor.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()

    offload = OffloadActivations(host(), keeps=keeps)
    x = torch.randn(32, 32, requires_grad=True)
    size = whole.untyped_storage().nbytes()
    with offload:
        loss = ((x * 1.0) @ whole.view(16, 64).view(32, 32)).exp().sum()
    assert len(asked) == 2
    assert counts(offload) == (2, 0, 1)
    whole.untyped_storage().resize_(0)
    whole.untyped_storage().resize_(size)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(whole):
        whole.copy_(values)
    loss.backward()
    other = x.detach().requires_grad_()
    (other @ values).exp().sum().backward()
    assert x.grad is not None
    assert other.grad is not None
    assert torch.equal(x.grad, other.grad)


def test_memory_of_a_parameter_that_is_away_between_its_uses() -> None:
    """Without a predicate: what is saved is the parameter, or a view of it."""
    values = torch.randn(32, 32)
    whole = values.clone()
    parameter = nn.Parameter(torch.zeros(()).expand(32, 32))
    offload = OffloadActivations(host())
    x = torch.randn(8, 32)
    parameter.data = whole
    with offload:
        loss = nn.functional.linear(nn.functional.linear(x, parameter), parameter).square().sum()
    parameter.data = torch.zeros(()).expand(32, 32)
    size = whole.untyped_storage().nbytes()
    whole.untyped_storage().resize_(0)
    whole.untyped_storage().resize_(size)
    with torch.autograd._unsafe_preserve_version_counter(whole):
        whole.copy_(values)
    parameter.data = whole
    loss.backward()
    plain = values.clone().requires_grad_()
    nn.functional.linear(nn.functional.linear(x, plain), plain).square().sum().backward()
    assert parameter.grad is not None
    assert plain.grad is not None
    assert torch.equal(parameter.grad, plain.grad)


def test_small_tensors_stay() -> None:
    x = torch.randn(100, requires_grad=True)
    for least, kept in ((400, 0), (401, 1)):
        with OffloadActivations(host(min_bytes=least)) as offload:
            (x * 1.0).exp()
        assert counts(offload) == (1, 0, kept)


def test_bytes_that_are_saved_several_times_go_once() -> None:
    offload = OffloadActivations(host())
    x = torch.randn(64, 64, requires_grad=True)
    with offload:
        y = x * 1.0
        z = (y * y).sum() + (y.t() @ y).sum() + y.view(32, 128)[:, :64].square().sum()
    # y twice, y and its transpose, a part of it
    assert counts(offload) == (5, 4, 0)
    assert offload.statistics().to_host == 64 * 64 * 4
    z.backward()
    assert offload.statistics().to_device == 64 * 64 * 4


def test_a_small_part_of_a_large_storage() -> None:
    offload = OffloadActivations(host())
    x = torch.randn(64, 64, requires_grad=True)
    with offload:
        y = x * 1.0
        rows = y[8:12].square().sum()  # goes without the rest
        assert offload.statistics().to_host == 4 * 64 * 4
        column = y[:, 3].square().sum()  # scattered over all of it: stays
        assert counts(offload) == (2, 0, 1)
    (rows + column).backward()
    expected = torch.zeros(64, 64)
    expected[8:12] += 2 * x.detach()[8:12]
    expected[:, 3] += 2 * x.detach()[:, 3]
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_tensors_that_are_more_than_bytes_stay() -> None:
    class Marked(Tensor):
        pass

    offload = OffloadActivations(host())
    weight = torch.randn(32, 8, requires_grad=True)
    sparse = torch.eye(32).to_sparse()
    marked = torch.randn(8, 8).as_subclass(Marked)
    nested = torch.nested.nested_tensor([torch.randn(4, 8), torch.randn(2, 8)], layout=torch.jagged)
    with offload:
        a = torch.sparse.mm(sparse, weight).sum()
        b = (marked @ weight[:8]).sum().as_subclass(Tensor)
        c = torch.vmap(lambda row: row.exp() * row)(weight).sum()
        d = (nested * weight[:1]).values().sum()
        e = (torch.randn(8, 8, dtype=torch.complex64).conj() * weight[:8]).abs().sum()
    (a + b + c + d + e).backward()
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()


def test_checkpointing_saves_inputs_only() -> None:
    for reentrant in (True, False):
        torch.manual_seed(1)
        model = Checkpointed(reentrant)
        offload = OffloadActivations(host())
        x = torch.randn(6, 16, 32, requires_grad=True)
        with offload:
            y = model(x * 1.0)
            assert offload.statistics().to_host == 4 * x.numel() * 4
            y.sum().backward()
        assert offload.statistics().to_host == 4 * x.numel() * 4
        offload.close()


def test_on_a_cpu_without_drives_nothing_is_done_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    offload = OffloadActivations(ActivationOptions(min_bytes=64))
    x = torch.randn(32, 32, requires_grad=True)
    for _ in range(2):
        with offload:
            loss = (x * 1.0).exp().exp().sum()
        loss.backward()
    assert counts(offload) == (4, 0, 4)
    assert [each.message for each in caplog.records] == [
        "activations on the CPU stay where they are: that is host memory already; name folders in `nvme` to free it"
    ]


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="min_bytes: expected at least 1 bytes; found 0"):
        ActivationOptions(min_bytes=0)
    with pytest.raises(ValueError, match="host_capacity: expected at least 0 bytes; found -1"):
        ActivationOptions(host_capacity=-1)
    with pytest.raises(TypeError, match="expected a tuple of folders"):
        ActivationOptions(nvme=str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(NotADirectoryError, match="none' is not a folder"):
        ActivationOptions(nvme=(tmp_path / "none",))


# ------------------------------------------------------------------------------------------------------- random graphs


def random_graph(seed: int, leaves: list[Tensor]) -> list[Tensor]:
    """A few losses over operations that save inputs, results, views and parts, some of them used again much later."""
    choose = random.Random(seed)
    pool = [leaf * 1.0 for leaf in leaves]
    for _ in range(25):
        one, other = choose.choice(pool), choose.choice(pool[-4:])
        made = choose.choice(
            [
                lambda a, b: torch.tanh(a) * b,
                lambda a, b: (a @ b.t()).softmax(-1),
                lambda a, b: a.t().sigmoid() + b[:1],
                lambda a, b: torch.cat([a[:8], b[8:]]).sin(),
                lambda a, b: a.reshape(8, 32).clone().relu_().view(16, 16) * b[:, 3:4],
                lambda a, b: torch.stack([a, b]).unbind(0)[1].exp().clamp(max=2.0) * a,
            ]
        )(one, other)
        pool.append(made / (1.0 + made.detach().abs().max()))
        if len(pool) > 6 and choose.random() < 0.3:
            pool.pop(choose.randrange(len(pool)))
    return [each.square().sum() for each in pool[-3:]]


@given(seed=st.integers(0, 10_000), setting=st.sampled_from(sorted(SETTINGS)), size=st.sampled_from([1, 600, 3000]))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, setting: str, size: int) -> None:
    torch.manual_seed(seed)
    leaves = [torch.randn(16, 16, requires_grad=True) for _ in range(3)]
    chosen = {**SETTINGS[setting], "prefetch": size, "in_flight": size, "keep_bytes": seed % 3 * size}
    choose = random.Random(seed)
    keeps_graph = choose.random() < 0.5
    order = choose.sample(range(3), 3)

    def run(context: Any) -> list[Tensor]:
        found: list[Tensor] = []
        for _ in range(2):
            with context:
                losses = random_graph(seed, leaves)
            for place, index in enumerate(order):
                last = place == len(order) - 1
                found += torch.autograd.grad(
                    losses[index],
                    leaves,
                    retain_graph=not last or keeps_graph,
                    allow_unused=True,
                    materialize_grads=True,
                )
        return found

    offload = make(tmp_path, chosen, monkeypatch)
    same(run(offload), run(nullcontext()))
    gone(offload)
    offload.close()

"""Build a model that is too large for one rank: `Init`.

    with Init(mesh):
        model = build_model()                              # no rank ever holds more than a part and one module
    sharded = shard(model, mesh, Policy(stage=3))          # the parts become buckets; still nobody holds the whole

The code that builds stays as it is: see `construction` for how. It may initialise modules again after they are built,
tie, resize, convert and copy them, load weights, even run forward; models of ``transformers`` (``from_config``,
``from_pretrained``), adapters and ``copy.deepcopy`` need nothing special. Building has to take the same course on all
ranks, since each parameter is split by a collective; random generators advance as they do in one process.

Outside of the context a parameter has its shape and dtype and reads as NaN until `shard` is called, and whatever would
read it (forward, ``state_dict``) is refused in words. To look at or change a module in between, enter `whole`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from drivetrain.comm import Mesh
from drivetrain.zero.construction import Claims, Construction, ModuleLog
from drivetrain.zero.guard import Guard
from drivetrain.zero.policy import Policy
from drivetrain.zero.ranks import Ranks
from drivetrain.zero.split import SplitParameter

_ACTIVE: Final[ContextVar[Init | None]] = ContextVar("drivetrain.zero.Init", default=None)
"""The context that this thread is in."""


class Init:
    """Modules that are built in this context are split over the ranks as they are built.

    With n ranks the peak memory of building is the model / n, in the precision that it is built in, and the parameters
    of the largest module. Modules that come into being without their parameters being registered one by one
    (unpickled ones) are split when they get a parent. Parameters on the meta device are left alone. Buffers stay whole.
    A context inside a context joins it. May be entered again.

    Args:
        mesh: the ranks; its shard axis splits, and along its data axis all have the same.
        policy: with which the modules will be sharded, if that is known here; `shard` refuses another one.
        dtype: floating-point parameters have this dtype once the context is left, as after ``module.to(dtype)``, while
            buffers keep theirs. They are built in what the code says. Where ``policy.param_dtype`` is the same, what is
            kept here keeps the precision that it was built in, so that master weights start from values that were never
            rounded, as they do without ``dtype``; else they start from the rounded ones.
        enabled: False does nothing at all.

    Raises:
        ValueError: ``dtype`` is not a floating-point dtype, or not ``policy.param_dtype``; or, on entering, the context
            around is for other ranks, another policy or dtype.
    """

    def __init__(
        self, mesh: Mesh, policy: Policy | None = None, *, dtype: torch.dtype | None = None, enabled: bool = True
    ) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point dtype, got {dtype}")
        computes_in = None if policy is None else policy.param_dtype
        if dtype is not None and computes_in not in (None, dtype):
            raise ValueError(
                f"dtype is {dtype} and policy.param_dtype {computes_in}; leave one out, or make them equal"
            )
        self._mesh = mesh
        self._policy = policy
        self._dtype = dtype
        self._rounds = dtype is not None and computes_in is None
        self._enabled = enabled
        self._log = ModuleLog()
        self._pieces = WeakIdKeyDictionary()  # by parameter: what this rank keeps of it
        self._doors: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
        self._entered: list[AbstractContextManager[None]] = []
        self._construction: Construction | None = None

    def __enter__(self) -> Init:
        outer = Init.active()
        context = self.reopened() if self._enabled and outer is None else nullcontext()
        if self._enabled and outer is not None:
            outer._require_same(self)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a module that was built under Init cannot be pickled or copied before it is sharded: its parameters are "
            "split over the ranks. Copy it inside of the context, or of `whole(module)`."
        )

    @staticmethod
    def active() -> Init | None:
        """The context that this thread is in."""
        return _ACTIVE.get()

    @staticmethod
    def of(module: nn.Module) -> list[Init]:
        """The contexts in which parts of ``module`` were built that are not sharded yet."""
        owners = (owner for part in module.modules() for owner in _keepers(part))
        return list({id(owner): owner for owner in owners if isinstance(owner, Init)}.values())

    @contextmanager
    def reopened(self) -> Iterator[None]:
        """Modules built here can be read and changed as if they were whole. Collective, on leaving too."""
        gc.collect()  # what is alive from here on is the same on all ranks
        ranks = Ranks.of(self._mesh, self._policy or Policy())
        construction = Construction(ranks, self._log, lambda module: any(_keepers(module)))
        for module in list(self._doors):
            self._close(module)
        for parameter, kept in list(self._pieces.items()):
            construction.resume(parameter, kept)
        self._pieces.clear()
        token = _ACTIVE.set(self)
        self._construction = construction
        orderly = False
        try:
            with construction:
                yield
            orderly = True
        finally:
            self._construction = None
            _ACTIVE.reset(token)
            self._keep(construction.finish(self._dtype) if orderly else construction.abandon(self._dtype))

    def pinned(self, module: nn.Module) -> AbstractContextManager[None]:
        """While this is open: keep the parameters of ``module`` whole. Collective."""
        assert self._construction is not None
        return self._construction.pinned(module.parameters())

    def require(self, mesh: Mesh, policy: Policy) -> None:
        """Refuse to have modules that were built here sharded in another way."""
        mine, theirs = self._mesh.axis("shard"), mesh.axis("shard")
        rank = mine.world.rank
        if mine.ranks != theirs.ranks:
            raise ValueError(
                f"rank {rank}: the module was built under Init on a mesh that splits over ranks {list(mine.ranks)}, "
                f"and is to be sharded over ranks {list(theirs.ranks)}; give both the same mesh"
            )
        if self._policy not in (None, policy):
            raise ValueError(
                f"rank {rank}: the module was built under Init for {self._policy}, and is to be sharded with {policy}; "
                "give both the same policy, or Init none"
            )

    def take(self, module: nn.Module) -> dict[int, SplitParameter]:
        """Hand over what is kept of the parameters of ``module``, by their ids, and forget them."""
        found = {id(p): self._pieces.pop(p) for p in module.parameters() if p in self._pieces}
        for part in module.modules():
            self._close(part)
            self._log.forget(part)
        return found

    def _keep(self, claims: Claims) -> None:
        for parameter, kept in claims:
            if self._rounds and kept.piece.dtype.is_floating_point:
                kept = SplitParameter(kept.piece.to(self._dtype), kept.shape)
            self._pieces[parameter] = kept
        for module in self._log:
            self._doors[module] = [
                module.register_forward_pre_hook(self._before_forward, prepend=True),
                module.register_state_dict_pre_hook(self._before_state_dict),
                module.register_load_state_dict_pre_hook(self._before_load_state_dict),
            ]

    def _close(self, module: nn.Module) -> None:
        for handle in self._doors.pop(module, ()):
            handle.remove()

    def _require_same(self, inner: Init) -> None:
        mine, theirs = self._mesh.axis("shard"), inner._mesh.axis("shard")
        differences = [
            f"{name} ({here} around, {there} inside)"
            for name, here, there in (
                ("the ranks", list(mine.ranks), list(theirs.ranks)),
                ("the policy", self._policy, inner._policy),
                ("the dtype", self._dtype, inner._dtype),
            )
            if there not in (None, here)
        ]
        if differences:
            raise ValueError(
                f"rank {mine.world.rank}: an Init inside of another one joins it, and they differ in "
                f"{' and '.join(differences)}; build the modules one after the other, or leave out what differs"
            )

    # the doors --------------------------------------------------------------------------------------------------------

    def _refuse(self, module: nn.Module, what: str, instead: str) -> None:
        name = next((name for name, parameter in module.named_parameters() if parameter in self._pieces), None)
        if name is not None:
            raise RuntimeError(
                f"rank {self._mesh.world.rank}: {type(module).__name__} was built under Init and is not sharded yet: "
                f"{what} parameters such as '{name}', which are split over the ranks. {instead}, or enter "
                "`whole(module)`."
            )

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._refuse(module, "forward would read", "Call shard(module, mesh, policy) first")

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._refuse(module, "state_dict() would hold placeholders for", "Shard it and read the sharded module")

    def _before_load_state_dict(self, module: nn.Module, *args: Any) -> None:
        self._refuse(module, "load_state_dict() would write into placeholders of", "Load inside of the context")


def _keepers(module: nn.Module) -> Iterator[Init | Guard]:
    """Who stands at the doors of this module and keeps its parameters."""
    for hook in module._state_dict_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Init | Guard):
            yield owner


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Read and change ``module``, which was built under `Init` and is not sharded yet. Collective.

        with whole(model.get_input_embeddings()):
            model.resize_token_embeddings(50_304)

    The parameters of ``module`` are whole from the beginning to the end of the context. Those of other modules that
    were built with it are gathered when code touches them, as during building; so name a part of the model where the
    whole would not fit. Edits are kept: in place, through ``.data``, or by assigning new parameters or modules. The
    first rank's are what counts: code that only one rank runs is fine if it stays within ``module``, all else runs on
    all ranks. Parameters have the precision here that Init keeps. Works inside of `Init` too.

    Raises:
        ValueError: the module has no part that was built under `Init` and is still to be sharded.
    """
    active = Init.active()
    if active is not None:
        with active.pinned(module):
            yield
        return
    builders = Init.of(module)
    if len(builders) != 1:
        raise ValueError(
            f"{type(module).__name__} has parts of {len(builders)} Init contexts that are not sharded yet, and one is "
            "needed; a sharded module is read and changed within gathered(sharded, parameters)"
        )
    with builders[0].reopened(), builders[0].pinned(module):
        yield

"""How the launchers of a job find each other, and the store that the ranks then use.

The launcher of node 0 holds a TCP store; the others connect to it; the ranks use the same store for
`torch.distributed` (torchrun's convention TORCHELASTIC_USE_AGENT_STORE). For one node the store listens on the loopback
interface only. The listening socket is opened here, not by the store, so that a port in use is reported in words and a
free port is taken without a gap between choosing and using it. All waiting is done in Python, so that Ctrl-C ends it.

The roster is fixed: nnodes launchers with the ranks 0..nnodes-1. Each must join once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined, unused-ignore]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from drivetrain.engine.launch.spec import DEFAULT_PORT, LaunchError, LaunchSpec

LOOPBACK = "127.0.0.1"
JOIN_TIMEOUT = 300.0
"""Seconds that launchers wait for each other: nodes of a cluster seldom start together."""

_POLL = 0.1
_STORE_TIMEOUT = timedelta(seconds=60)


def listen(spec: LaunchSpec) -> socket.socket:
    """The socket on which the launcher of node 0 serves the store: loopback for one node, all interfaces for several.

    Raises:
        LaunchError: the port is taken, or not ours to take.
    """
    single = spec.nnodes == 1
    port = spec.master_port or (0 if single else DEFAULT_PORT)
    # An address given for a single node is honoured: it is what the ranks will be told to connect to.
    host = (spec.master_addr or LOOPBACK) if single else ""
    try:
        if host or not socket.has_dualstack_ipv6():
            return socket.create_server((host, port))
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    except socket.gaierror as error:
        raise LaunchError(f"--master-addr {host} is not an address of this machine ({error.strerror}).") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            free = "leave --master-port out and a free one is taken" if single else "the same one on every node"
            raise LaunchError(
                f"port {port} is in use by another program (another training job?). "
                f"Choose another with --master-port; {free}."
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise LaunchError(f"--master-addr {host} is not an address of this machine.") from None
        if error.errno in (errno.EACCES, errno.EPERM):
            raise LaunchError(f"port {port} may not be opened by this user; choose one above 1023.") from None
        raise LaunchError(f"the store cannot listen on port {port}: {os.strerror(error.errno or 0)}.") from None


class Roster(RendezvousHandler):  # type: ignore[misc, unused-ignore]
    """The rendezvous of a job with a fixed set of nodes, for torch's elastic agent."""

    def __init__(
        self,
        spec: LaunchSpec,
        run_id: str,
        *,
        listener: socket.socket | None = None,
        timeout: float = JOIN_TIMEOUT,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`listener` is what `listen` gave (node 0 only; it is taken over); `notice` is told whom we wait for."""
        self._spec = spec
        self._run_id = run_id
        self._timeout = timeout
        self._notice = notice
        self._address = spec.master_addr or LOOPBACK
        self._listener = listener
        self._port = listener.getsockname()[1] if listener is not None else spec.master_port or DEFAULT_PORT
        self._store: Store | None = None

    def get_backend(self) -> str:
        """Name of this kind of rendezvous."""
        return "drivetrain-roster"

    @property
    def use_agent_store(self) -> bool:
        """The ranks use the launcher's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join, on the first call; after a restart of the ranks the roster is still the same."""
        if self._store is None:
            self._store = self._join()
        where = RendezvousStoreInfo(self._address, self._port)
        return RendezvousInfo(PrefixStore("launchers", self._store), self._spec.node_rank, self._spec.nnodes, where)

    @property
    def port(self) -> int:
        """The port of the store."""
        return self._port

    def is_closed(self) -> bool:
        """Never: the roster is fixed."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """No node can come in later."""
        return 0

    def get_run_id(self) -> str:
        """The job's name in logs and environment."""
        return self._run_id

    def shutdown(self) -> bool:
        """Let go of the store."""
        self._store = None
        return True

    def _join(self) -> Store:
        deadline = time.monotonic() + self._timeout
        store = self._serve() if self._listener is not None else self._connect(deadline)
        node, nnodes = self._spec.node_rank, self._spec.nnodes
        shape = f"{nnodes} nodes of {self._spec.nproc} ranks"
        agreed = store.compare_set("roster/shape", "", shape).decode()
        if agreed != shape:
            raise LaunchError(
                f"node {node} was started for {shape}, but the job has {agreed}. "
                "Give --nnodes and --nproc alike on every node."
            )
        if store.add(f"roster/joined/{node}", 1) > 1:
            raise LaunchError(f"two launchers joined as --node-rank {node}. Each node needs its own.")
        self._await_nodes(store, deadline)
        return store

    def _serve(self) -> Store:
        assert self._listener is not None
        # The store owns the descriptor from here on.
        return TCPStore(
            self._address,
            self._port,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )

    def _connect(self, deadline: float) -> Store:
        where = (self._address, self._port)
        problem: OSError | None = None
        told = False
        while time.monotonic() < deadline:
            try:
                socket.create_connection(where, timeout=max(_POLL, min(5.0, deadline - time.monotonic()))).close()
                return TCPStore(*where, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False)
            except (OSError, DistError) as error:
                problem = error if isinstance(error, OSError) else None
                if not told:
                    self._notice(f"waiting for node 0 at {where[0]}:{where[1]}")
                    told = True
                time.sleep(_POLL)
        raise LaunchError(
            f"node {self._spec.node_rank} could not reach node 0 at {where[0]}:{where[1]} within {self._timeout:g} s"
            f"{f' ({problem.strerror or problem})' if problem else ''}. "
            "Is the launcher of node 0 running, and the port open?"
        ) from problem

    def _await_nodes(self, store: Store, deadline: float) -> None:
        missing = set(range(self._spec.nnodes))
        next_notice = time.monotonic() + 2.0
        while missing := {node for node in missing if not store.check([f"roster/joined/{node}"])}:
            now = time.monotonic()
            names = ", ".join(str(node) for node in sorted(missing))
            if now > deadline:
                raise LaunchError(
                    f"of {self._spec.nnodes} nodes, these did not join within {self._timeout:g} s: {names}. "
                    f"Start drivetrain run there with the same --master-addr and --master-port ({self._port})."
                )
            if now > next_notice:
                self._notice(f"waiting for nodes {names}")
                next_notice = now + 30.0
            with contextlib.suppress(InterruptedError):
                time.sleep(_POLL)

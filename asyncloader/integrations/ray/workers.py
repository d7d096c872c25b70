"""`RayWorkers`: a loader's workers on the machines of a Ray cluster.

Data path: none; it starts the nodes of a service. Batches do not pass through Ray.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from typing import Any, Literal, Self

from asyncloader.errors import ServiceUnavailable
from asyncloader.integrations.ray.actors import Fleet, FleetOptions, FleetView, placed_at
from asyncloader.service.definition import PickledDefinition
from asyncloader.service.placement.engine import Credentials, EngineNode

_log = logging.getLogger("asyncloader")
_LOG_AFTER_S = 60.0
_START_S = 240.0
"""Seconds to wait for the actor's answer after that."""


class RayWorkers:
    """Workers on the machines of a Ray cluster, for `workers=` of any number of loaders.

    Each machine gets a node: a process beside Ray, with worker processes of its own, which an actor watches. Loaders
    connect to the nodes: batches do not pass through Ray. Datasets and functions must be such that cloudpickle packs.

    Copies that reach other processes of the job, as in the configuration of a `TorchTrainer`, use the same nodes. The
    nodes end when the last loader is closed or collected; if copies were made, once no process has a copy any more.
    `close` gives up this copy.

    Args:
        nodes: number of machines to use; with fewer it runs on these, and logs a warning. "auto": all machines with a
            free CPU. The machines of the loaders are taken first.
        cpus_per_node: worker processes of each node, for each of which it reserves a CPU with Ray; None: half of the
            CPUs that are free when the node starts, and at least one.
        resources: Ray's custom resources that each node reserves, which limits the nodes to machines that have them;
            None: none.
        max_nodes: was removed.

    Raises:
        ValueError: a number is below 1, or `max_nodes` is given.
    """

    def __init__(
        self,
        nodes: int | Literal["auto"] = "auto",
        *,
        cpus_per_node: int | None = None,
        resources: Mapping[str, float] | None = None,
        max_nodes: None = None,
    ) -> None:
        if max_nodes is not None:
            raise ValueError(f"RayWorkers(max_nodes={max_nodes!r}) was removed: give nodes= a number, or 'auto'")
        if nodes != "auto" and not (type(nodes) is int and nodes >= 1):
            raise ValueError(f"nodes should be 'auto' or a number, at least 1, but got nodes={nodes!r}")
        if cpus_per_node is not None and not (type(cpus_per_node) is int and cpus_per_node >= 1):
            raise ValueError(f"cpus_per_node should be at least 1, but got cpus_per_node={cpus_per_node!r}")
        self._options = FleetOptions(None if nodes == "auto" else nodes, cpus_per_node, dict(resources or {}))
        self._begin(None)

    def _begin(self, fleet: Any) -> None:
        self._lock = threading.Lock()
        self._gone: deque[None] = deque()  # an entry for each loader that has left and is not counted yet
        self._fleet: Any = fleet
        self._copied = fleet is not None  # whether other processes may have copies
        self._loaders = 0
        self._job = _job() if fleet is not None else None
        self._view: FleetView | None = None
        self._pending: Any = None  # the question to the fleet that has no answer yet
        self._machine = ""
        self._served: weakref.WeakSet[PickledDefinition] = weakref.WeakSet()
        self._watching: dict[object, Callable[[], None]] = {}

    def __repr__(self) -> str:
        return f"RayWorkers(nodes={'auto' if self._options.nodes is None else self._options.nodes})"

    def __reduce__(self) -> tuple[Any, ...]:
        with self._locked():
            # From here on a copy may exist that this process does not see: the last loader here must not end the nodes.
            self._copied = True
            return _restore, (self._options, self._ensure_fleet())

    # ------------------------------------------------------------------------------------------ as an `Engine`

    def serve(self, what: PickledDefinition) -> Credentials:
        """Have the nodes serve a definition; see `Engine`.

        Raises:
            RuntimeError: this process is not connected to a Ray cluster.
            ServiceUnavailable: the actor that keeps the nodes did not answer within five minutes.
        """
        with self._locked():
            fleet = self._ensure_fleet()
            self._loaders += 1
            self._machine = _ray().get_runtime_context().get_node_id()
        self._served.add(what)
        try:
            # Without the lock: it may wait minutes for the first node.
            view: FleetView = self._wait_for(fleet.serve.remote(what.name, what.data, self._machine))
        except BaseException:
            self.left()  # there will be no `EngineService` that does it
            raise
        wanted = self._options.nodes
        if wanted is not None and view.machines < wanted:
            text = "%r: %d of %d machines have a free CPU, and the resources asked for; it runs on these"
            _log.warning(text, self, view.machines, wanted)
        with self._locked():
            # `_take` may have received a newer view while this call waited.
            if self._view is None or self._view.life != view.life or self._view.number < view.number:
                self._view = view
            question = self._ask(fleet) if self._pending is None else None
        self._receive(question)
        return view.credentials

    def _wait_for(self, question: Any) -> FleetView:
        """Wait for the fleet's answer; the fleet may be starting.

        Raises:
            ServiceUnavailable: it did not answer in time.
        """
        try:
            if not _ray().wait([question], timeout=_LOG_AFTER_S)[0]:
                _log.warning("%r waits for the actor that keeps its nodes, which Ray has not started yet", self)
            view: FleetView = _ray().get(question, timeout=_START_S)
        except _ray().exceptions.GetTimeoutError:
            _ray().cancel(question)
            raise ServiceUnavailable(
                f"{self!r}: the actor that keeps its nodes has not answered for {_LOG_AFTER_S + _START_S:.0f} seconds. "
                "`ray list actors` says whether Ray could start it"
            ) from None
        return view

    def left(self) -> None:
        """Count a loader as gone; see `Engine`. The nodes end with the last loader, unless this was copied. Does not
        wait.
        """
        # Finalizers call this, so it takes no lock that the interrupted code may hold: see `_settle`.
        self._gone.append(None)
        self._settle()

    def nodes(self) -> list[EngineNode]:
        """Return the nodes that are ready; see `Engine`. A node on this machine is reached without a network."""
        # Read once, without the lock: other threads replace the view, but never change it.
        view = self._view
        return [
            EngineNode(node.addresses[-1 if node.machine == self._machine else 0], node.workers)
            for node in (view.nodes if view is not None else ())
        ]

    def watch(self, changed: Callable[[], None]) -> Callable[[], object]:
        """Have `changed` called when `nodes` has changed; see `Engine`."""
        key = object()
        self._watching[key] = changed
        return partial(self._watching.pop, key, None)

    # ------------------------------------------------------------------------------------------ the fleet

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        try:
            with self._lock:
                yield
        finally:
            # After the lock is released: a loader that left until then found it taken, and left its entry to this call.
            self._settle()

    def _settle(self) -> None:
        """Count the loaders that have left. If the lock is taken, its holder does that next."""
        # The outer loop: an entry that is added after the last `pop` finds the lock taken until it is released.
        while self._gone and self._lock.acquire(blocking=False):
            try:
                while self._gone:
                    self._gone.pop()
                    self._loaders -= 1
                    if not self._loaders and not self._copied:
                        self._give_up()
            finally:
                self._lock.release()

    def _ensure_fleet(self) -> Any:
        """Return the fleet; start it if this job has none. With the lock."""
        if not _ray().is_initialized():
            raise RuntimeError(f"{self!r} needs a Ray cluster: call ray.init() before")
        # After another `ray.init` the fleet is that of an earlier job, and has ended with it.
        if self._fleet is None or self._job != _job():
            _warn_if_open()
            credentials = Credentials("")
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):  # encrypt batches where Ray encrypts
                names = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")
                credentials = Credentials("", *(os.environ.get(name) for name in names))
            # On this machine, without which the loader has ended, too: no other machine's loss ends the fleet.
            here = placed_at(_ray().get_runtime_context().get_node_id())
            options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
            self._fleet = _ray().remote(Fleet).options(**options).remote(self._options, credentials)
            self._job, self._view, self._pending = _job(), None, None
        return self._fleet

    def _ask(self, fleet: Any) -> Any:
        """Ask for the next change. With the lock. The caller then calls `_receive` without it."""
        assert self._view is not None
        self._pending = fleet.view.remote(self._view.number)
        return self._pending

    def _receive(self, question: Any) -> None:
        """Take the answer when it comes."""
        if question is not None:
            # Not with the lock, which `_take` needs: a callback for an answer that has come is called here, at once.
            question.future().add_done_callback(partial(_on_answer, weakref.ref(self), question))

    def _take(self, question: Any, view: FleetView) -> None:
        with self._locked():
            if self._pending is not question or self._view is None:
                return  # it was closed, and perhaps used again: the answer is that of an earlier fleet
            restarted, self._view, fleet = view.life != self._view.life, view, self._fleet
            question = self._ask(fleet)
            if restarted:  # Ray has started the fleet's actor again, which does not know what it served
                for each in list(self._served):
                    fleet.serve.remote(each.name, each.data, self._machine)
        # Without the lock, for these are the loaders' functions, which may call `nodes` or `left`.
        # A copy of the list, for other threads may add to it.
        for changed in list(self._watching.values()):
            changed()
        self._receive(question)

    def close(self) -> None:
        """Give up the nodes. Nodes that no other process uses end; loaders that use them have to wait for new nodes."""
        with self._locked():
            self._give_up()

    def _give_up(self) -> None:
        """Drop the fleet. With the lock, or in the finalizer."""
        # Without the last reference to it, Ray ends the fleet's actor, and with it the agents and their nodes. The open
        # question is cancelled, because the fleet may take 30 seconds to answer it.
        pending, self._pending = self._pending, None
        self._fleet = self._view = None
        if pending is not None and _ray().is_initialized() and self._job == _job():
            _ray().cancel(pending)

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # Without the lock: no other thread has a reference any more.
        if not exiting() and getattr(self, "_pending", None) is not None:
            self._give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _restore(options: FleetOptions, fleet: Any) -> RayWorkers:
    copy = RayWorkers.__new__(RayWorkers)
    copy._options = options
    copy._begin(fleet)
    return copy


def _on_answer(workers: weakref.ref[RayWorkers], question: Any, answer: Future[FleetView]) -> None:
    """Called in a thread of Ray's. The reference is weak, so that a pending question keeps neither object nor nodes."""
    this = workers()
    if this is None or answer.cancelled():
        return
    if answer.exception() is None:
        this._take(question, answer.result())
    elif this._pending is question:  # else `_give_up` has cancelled it
        _log.warning("%r does not learn of its nodes any more: %r", this, answer.exception())


def _job() -> str:
    context = _ray().get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"


@functools.cache
def _warn_if_open() -> None:
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        _log.warning(
            "Ray's authentication is off: whoever reaches its ports can run code in this cluster, and read what the "
            "loader's workers read. Set RAY_AUTH_MODE=token"
        )


def _ray() -> Any:
    try:
        return import_module("ray")
    except ImportError:
        raise ImportError("RayWorkers needs Ray, which is not installed: pip install 'asyncloader[ray]'") from None

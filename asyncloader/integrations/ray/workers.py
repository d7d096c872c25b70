"""`RayWorkers`: a loader's workers on the machines of a Ray cluster.

Data path: none; before a node of a service is there. Batches do not pass through Ray.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Literal, Self

from asyncloader.errors import ServiceUnavailable
from asyncloader.integrations.ray.actors import Fleet, FleetOptions, FleetView, placed_at
from asyncloader.service.pickled import PickledDefinition
from asyncloader.service.placement.engine import Credentials, EngineNode

_log = logging.getLogger("asyncloader")
_SAY_AFTER_S = 60.0
_START_S = 240.0


class RayWorkers:
    """Workers on the machines of a Ray cluster, for `workers=` of any number of loaders.

    Each machine gets a node, a process beside Ray with worker processes of its own, which an actor keeps. Loaders
    connect to the nodes: batches do not pass through Ray. Any dataset and any functions will do that cloudpickle packs.

    Copies that reach other processes of the job, as in the configuration of a `TorchTrainer`, use the same nodes. These
    end with the last loader, closed or collected; if there are copies, once no process has a copy any more. `close`
    lets go of this one.

    Args:
        nodes: machines to use; with fewer, it runs on these, and a warning says so. "auto": all that have a free CPU.
            Those where loaders are come first.
        cpus_per_node: worker processes of each node, which are CPUs that it reserves with Ray; None: half of the CPUs
            that are free when it starts, and at least one.
        resources: Ray's custom resources that each node reserves, and so, which machines have one; None: none.
        max_nodes: if given, their number follows the load: at least `nodes`, which are then 1 by default, and at most
            so many. Processes should be at tasks for 80 % of the time; a node comes at once, and goes once the load
            was lower for five minutes, after it has finished its work. The load of async datasets is not known: they
            keep `nodes`. None: it stays as it is.

    Raises:
        ValueError: a number is below 1, or `max_nodes` below `nodes`.
    """

    def __init__(
        self,
        nodes: int | Literal["auto"] = "auto",
        *,
        cpus_per_node: int | None = None,
        resources: Mapping[str, float] | None = None,
        max_nodes: int | None = None,
    ) -> None:
        if nodes != "auto" and not (type(nodes) is int and nodes >= 1):
            raise ValueError(f"nodes should be 'auto' or a number, at least 1, but got nodes={nodes!r}")
        if cpus_per_node is not None and not (type(cpus_per_node) is int and cpus_per_node >= 1):
            raise ValueError(f"cpus_per_node should be at least 1, but got cpus_per_node={cpus_per_node!r}")
        fewest = None if nodes == "auto" else nodes
        if max_nodes is not None and not (type(max_nodes) is int and max_nodes >= (fewest or 1)):
            raise ValueError(
                f"max_nodes should be at least {fewest or 1}, as nodes is, but got max_nodes={max_nodes!r}"
            )
        self._options = FleetOptions(fewest, cpus_per_node, dict(resources or {}), max_nodes)
        self._begin(None)

    def _begin(self, fleet: Any) -> None:
        self._lock = threading.Lock()  # finalizers do not wait for it: see `_settle`
        self._gone: deque[None] = deque()  # loaders that have left, and are to be counted
        self._fleet: Any = fleet
        self._copied = fleet is not None  # whether other processes have copies, as far as is known
        self._loaders = 0
        self._job = _job() if fleet is not None else None
        self._view: FleetView | None = None
        self._pending: Any = None  # the question to the fleet that is not answered yet
        self._machine = ""
        self._served: weakref.WeakSet[PickledDefinition] = weakref.WeakSet()
        self._watching: dict[object, Callable[[], None]] = {}

    def __repr__(self) -> str:
        return f"RayWorkers(nodes={'auto' if self._options.nodes is None else self._options.nodes})"

    def __reduce__(self) -> tuple[Any, ...]:
        with self._locked():
            self._copied = True
            return _copied, (self._options, self._started())

    # ------------------------------------------------------------------------------------------ as an `Engine`

    def serve(self, what: PickledDefinition) -> Credentials:
        """As `Engine`.

        Raises:
            RuntimeError: this process is not connected to a Ray cluster.
        """
        with self._locked():
            fleet = self._started()
            self._loaders += 1
            self._machine = _ray().get_runtime_context().get_node_id()
        self._served.add(what)
        try:
            view: FleetView = self._answer(fleet.serve.remote(what.name, what.data, self._machine))
        except BaseException:
            self.left()
            raise
        wanted = self._options.nodes
        if wanted is not None and view.machines < wanted:
            text = "%r: %d of %d machines have a free CPU, and the resources asked for; it runs on these"
            _log.warning(text, self, view.machines, wanted)
        with self._locked():
            if self._view is None or self._view.life != view.life or self._view.number < view.number:
                self._view = view
            question = self._ask(fleet) if self._pending is None else None
        self._hear(question)
        return view.credentials

    def _answer(self, question: Any) -> FleetView:
        """Wait for the fleet, which may be starting.

        Raises:
            ServiceUnavailable: it did not answer in time.
        """
        try:
            if not _ray().wait([question], timeout=_SAY_AFTER_S)[0]:
                _log.warning("%r waits for the actor that keeps its nodes, which Ray has not started yet", self)
            view: FleetView = _ray().get(question, timeout=_START_S)
        except _ray().exceptions.GetTimeoutError:
            _ray().cancel(question)
            raise ServiceUnavailable(
                f"{self!r}: the actor that keeps its nodes has not answered for {_SAY_AFTER_S + _START_S:.0f} seconds. "
                "`ray list actors` says whether Ray could start it"
            ) from None
        return view

    def left(self) -> None:
        """As `Engine`. With the last loader the nodes end, unless this was copied. Waits for nothing."""
        self._gone.append(None)
        self._settle()

    def nodes(self) -> list[EngineNode]:
        """As `Engine`. A node on this machine is reached without a network."""
        view = self._view
        return [
            EngineNode(node.addresses[-1 if node.machine == self._machine else 0], node.workers)
            for node in (view.nodes if view is not None else ())
        ]

    def watch(self, changed: Callable[[], None]) -> Callable[[], object]:
        """As `Engine`."""
        key = object()
        self._watching[key] = changed
        return partial(self._watching.pop, key, None)

    # ------------------------------------------------------------------------------------------ the fleet

    @contextmanager
    def _locked(self) -> Generator[None]:
        try:
            with self._lock:
                yield
        finally:
            self._settle()

    def _settle(self) -> None:
        """Count the loaders that have left. If the lock is taken, who has it does so next."""
        while self._gone and self._lock.acquire(blocking=False):
            try:
                while self._gone:
                    self._gone.pop()
                    self._loaders -= 1
                    if not self._loaders and not self._copied:
                        self._let_go()
            finally:
                self._lock.release()

    def _started(self) -> Any:
        """The fleet, which is made if there is none. With the lock."""
        if not _ray().is_initialized():
            raise RuntimeError(f"{self!r} needs a Ray cluster: call ray.init() before")
        if self._fleet is None or self._job != _job():
            _warn_if_open()
            credentials = Credentials("")
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):  # where Ray's traffic is secret, so is ours
                names = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")
                credentials = Credentials("", *(os.environ.get(name) for name in names))
            here = placed_at(_ray().get_runtime_context().get_node_id())  # if this machine goes, so does the loader
            options = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1, "scheduling_strategy": here}
            self._fleet = _ray().remote(Fleet).options(**options).remote(self._options, credentials)
            self._job, self._view, self._pending = _job(), None, None
        return self._fleet

    def _ask(self, fleet: Any) -> Any:
        """Ask for the next change. With the lock; `_hear` follows, without it."""
        assert self._view is not None
        self._pending = fleet.view.remote(self._view.number)
        return self._pending

    def _hear(self, question: Any) -> None:
        """Take the answer when it comes; that may be at once, and in this thread."""
        if question is not None:
            question.future().add_done_callback(partial(_answered, weakref.ref(self), question))

    def _take(self, question: Any, view: FleetView) -> None:
        with self._locked():
            if self._pending is not question or self._view is None:
                return  # it was closed
            anew, self._view, fleet = view.life != self._view.life, view, self._fleet
            question = self._ask(fleet)
            if anew:
                for each in list(self._served):
                    fleet.serve.remote(each.name, each.data, self._machine)
        for changed in list(self._watching.values()):
            changed()
        self._hear(question)

    def close(self) -> None:
        """Let go of the nodes. Those that no other process uses end; loaders that use them have to wait for others."""
        with self._locked():
            self._let_go()

    def _let_go(self) -> None:
        """With the lock, or once nobody else has this object."""
        pending, self._pending = self._pending, None
        self._fleet = self._view = None
        if pending is not None and _ray().is_initialized() and self._job == _job():
            _ray().cancel(pending)

    def __del__(self, *, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not exiting() and getattr(self, "_pending", None) is not None:
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _copied(options: FleetOptions, fleet: Any) -> RayWorkers:
    copy = RayWorkers.__new__(RayWorkers)
    copy._options = options
    copy._begin(fleet)
    return copy


def _answered(workers: weakref.ref[RayWorkers], question: Any, answer: Future[FleetView]) -> None:
    """In a thread of Ray's."""
    this = workers()
    if this is None or answer.cancelled():
        return
    if answer.exception() is None:
        this._take(question, answer.result())
    elif this._pending is question:  # it was not taken back
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

"""`RayWorkers`: a loader's workers on the machines of a Ray cluster.

Data path: none; it starts the nodes of a service. Batches do not pass through Ray.

An actor on each machine runs a node. A loader that looks for a node asks Ray for the machines, starts the actors that
are missing, and has each serve its dataset: so an actor that Ray has started again gets it, too. Loaders notice the end
of a node by their own connections.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Literal, Self

from asyncloader.errors import ServiceUnavailable
from asyncloader.service.node.agent import AgentNode
from asyncloader.service.protocol.address import Service
from asyncloader.service.protocol.definition import PickledDefinition

_log = logging.getLogger("asyncloader")
_FIRST_S = 300.0
"""Seconds in which a first node must be ready."""
_OTHERS_S = 0.3
"""Seconds for the other nodes to answer, once one has: a node that starts does not hold up a search for long."""
_PAUSE_S = 1.0


class RayNode:
    """Runs a node on its machine. If the node dies, the actor's process ends, and Ray starts the actor again.

    Args:
        workers: processes for each dataset.
        credentials: the node's token, and the files of its certificates.
    """

    def __init__(self, workers: int, credentials: tuple[str | None, ...]) -> None:
        self._served: set[str] = set()
        try:
            self._node = AgentNode(_ray().util.get_node_ip_address(), workers, credentials)
        except Exception:
            # Not raised: Ray starts an actor again if its process has ended, but not if its constructor has raised.
            # After a pause, so that it does not do so all the time.
            _log.exception("the node cannot be started")
            time.sleep(_PAUSE_S)
            os._exit(1)
        # In a thread, because the node may die while no method of the actor is called.
        threading.Thread(target=self._end_with_node, name="asyncloader-agent", daemon=True).start()

    def _end_with_node(self) -> None:
        self._node.process.wait()
        os._exit(1)

    def serve(self, name: str, data: bytes) -> tuple[str, ...]:
        """Have the node serve a pickled definition. Returns the node's addresses; a node that hangs is ended."""
        if name in self._served:
            self._node.check()
        else:
            self._node.serve(data)
            self._served.add(name)
        return self._node.addresses


class RayWorkers:
    """Workers on the machines of a Ray cluster, for `workers=` of any number of loaders.

    Each machine gets a node: a process beside Ray, with worker processes of its own, which an actor watches. Loaders
    connect to the nodes: batches do not pass through Ray. Datasets and functions must be such that cloudpickle packs.

    Copies that reach other processes of the job, as in the configuration of a `TorchTrainer`, use the same nodes. The
    nodes end with the program, or once no process has a copy, or a loader with one, any more. `close` gives up this
    copy.

    Args:
        nodes: number of machines to use; with fewer it runs on these, and logs a warning. "auto": all machines with a
            free CPU. The machine of the loader is taken first.
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
        self._nodes = None if nodes == "auto" else nodes
        self._cpus_per_node = cpus_per_node
        self._resources = dict(resources or {})
        self._token = secrets.token_hex(32)
        self._name = f"asyncloader-{secrets.token_hex(8)}"
        self._job = ""
        self._actors: dict[str, Any] = {}
        """By machine. The nodes end when no process has these any more."""
        self._asked: dict[tuple[str, str], Any] = {}  # (machine, dataset) -> the question that has no answer yet
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RayWorkers(nodes={self._nodes or 'auto'})"

    def __getstate__(self) -> dict[str, Any]:
        # The nodes are started now, so that they belong to this process, and the copies share them.
        with self._lock:
            self._start()
            return self.__dict__ | {"_lock": None, "_asked": {}, "_actors": dict(self._actors)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_lock": threading.Lock()}

    def serve(self, definition: PickledDefinition) -> Service:
        """Return the service whose nodes serve this definition.

        Raises:
            RuntimeError: this process is not connected to a Ray cluster.
            ServiceUnavailable: no node was ready within five minutes.
        """
        with self._lock:
            self._start()
        data = _ray().put(definition.data)  # in Ray's store, once for all machines
        token, ca, cert, key = _credentials(self._token)
        ask = partial(self._ask, definition.name, data)
        service = RayService(repr(self), token, tls_ca=ca, tls_cert=cert, tls_key=key, ask=ask)
        deadline = time.monotonic() + _FIRST_S
        while not self._ask(definition.name, data, _PAUSE_S):
            if time.monotonic() > deadline:
                raise ServiceUnavailable(
                    f"{self!r}: no node was ready within {_FIRST_S:.0f} seconds. `ray list actors` says what Ray waits "
                    "for"
                )
            time.sleep(_OTHERS_S)  # also where no machine has a free CPU yet
        if len(self._actors) < (self._nodes or 0):
            text = "%r: %d of %d machines have a free CPU, and the resources asked for; it runs on these"
            _log.warning(text, self, len(self._actors), self._nodes)
        return service

    def _ask(self, name: str, data: Any, seconds: float = _OTHERS_S) -> tuple[str, ...]:
        """Have the nodes serve a dataset, and return the addresses of those that are ready: one for each."""
        with self._lock:
            self._start()
            here = _ray().get_runtime_context().get_node_id()
            for machine, actor in self._actors.items():
                # An actor that Ray has not placed yet keeps its question, and gets no further one.
                if (machine, name) not in self._asked:
                    self._asked[machine, name] = actor.serve.remote(name, data)
            asked = {question: machine for (machine, each), question in self._asked.items() if each == name}
        questions = list(asked)
        if questions:
            _ray().wait(questions, num_returns=1, timeout=seconds)
        ready = _ray().wait(questions, num_returns=len(questions), timeout=_OTHERS_S)[0] if questions else []
        found = []
        for question in ready:
            machine = asked[question]
            with self._lock:
                if self._asked.get((machine, name)) is question:
                    del self._asked[machine, name]
            try:
                addresses = _ray().get(question)
            except Exception as error:  # of Ray's, or of the node: it is asked again by the next search
                _log.warning("the node at machine %s is not ready: %r", machine, error)
                continue
            found.append(addresses[-1 if machine == here else 0])  # on this machine without a network
        return tuple(found)

    def _start(self) -> None:
        """Forget the actors of machines that are lost, and start those that are missing. With the lock."""
        if not _ray().is_initialized():
            raise RuntimeError(f"{self!r} needs a Ray cluster: call ray.init() before")
        context = _ray().get_runtime_context()
        job, here = f"{context.gcs_address} {context.get_job_id()}", context.get_node_id()
        if job != self._job:  # the actors of an earlier `ray.init` have ended with it
            _warn_if_open()
            self._job = job
            self._actors.clear()
        alive = _machines(self._resources)
        for machine in [each for each in self._actors if each not in alive]:
            del self._actors[machine]
        self._asked = {key: question for key, question in self._asked.items() if key[0] in self._actors}
        for machine in sorted(alive, key=lambda each: (each != here, -alive[each])):
            workers = self._cpus_per_node or max(1, alive[machine] // 2)
            full = self._nodes is not None and len(self._actors) >= self._nodes
            if machine not in self._actors and not full and alive[machine] >= workers:
                # By its name the copies in other processes find an actor that one of them has started.
                actor = (
                    _ray()
                    .remote(RayNode)
                    .options(
                        name=f"{self._name}-{machine}",
                        get_if_exists=True,
                        num_cpus=workers,
                        resources=self._resources,
                        max_restarts=-1,
                        scheduling_strategy=_placed_at(machine),
                    )
                )
                self._actors[machine] = actor.remote(workers, _credentials(self._token))

    def close(self) -> None:
        """Give up the nodes. Nodes that no other process uses end; loaders that look for a node start new ones."""
        with self._lock:
            self._actors.clear()
            self._asked.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class RayService(Service):
    """The service that `RayWorkers` run. Its addresses change.

    Attributes:
        ask: returns the addresses of the nodes that are ready. It keeps the nodes.
    """

    ask: Callable[[], tuple[str, ...]] = field(kw_only=True)

    def __post_init__(self) -> None:
        """Check nothing: `url` is the name of the `RayWorkers` here."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the nodes that are ready. Blocks."""
        return self.ask()

    @property
    def remote(self) -> bool:
        """True: nodes that come later may be on other machines."""
        return True

    def __repr__(self) -> str:
        return self.url


def _credentials(token: str) -> tuple[str, str | None, str | None, str | None]:
    """Return the token and the files of certificates: batches are encrypted where Ray encrypts."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return token, None, None, None
    found = os.environ.get
    return token, found("RAY_TLS_CA_CERT"), found("RAY_TLS_SERVER_CERT"), found("RAY_TLS_SERVER_KEY")


@functools.cache
def _warn_if_open() -> None:
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        _log.warning(
            "Ray's authentication is off: whoever reaches its ports can run code in this cluster, and read what the "
            "loader's workers read. Set RAY_AUTH_MODE=token"
        )


def _machines(resources: Mapping[str, float]) -> dict[str, int]:
    """Return the cluster's machines with their free CPUs; 0 for a machine that lacks one of the resources."""
    free = import_module("ray._private.state").available_resources_per_node()  # Ray has no public function for this
    found = {}
    for each in _ray().nodes():
        if each["Alive"]:
            has = free.get(each["NodeID"], {})
            enough = all(has.get(name, 0) >= amount for name, amount in resources.items())
            found[each["NodeID"]] = int(has.get("CPU", 0)) if enough else 0
    return found


def _placed_at(machine: str) -> Any:
    """Return Ray's `scheduling_strategy` for this machine alone."""
    return import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy(machine, soft=False)


def _ray() -> Any:
    try:
        return import_module("ray")  # imported late, as it is optional; it has no types
    except ImportError:
        raise ImportError("RayWorkers needs Ray, which is not installed: pip install 'asyncloader[ray]'") from None

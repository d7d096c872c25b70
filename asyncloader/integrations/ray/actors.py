"""Ray's part of `RayWorkers`: an actor on each machine, which runs a node there, and an actor that keeps these actors.

Data path: none; it starts the nodes of a service.

The fleet asks Ray for its machines once a second, because Ray sends no notice of changes. Loaders notice the end of a
node by their own connections, long before Ray does; the fleet's list is for loaders that look for another node.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Awaitable, Coroutine, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from asyncloader.bridge import in_thread
from asyncloader.service.placement.agent import AgentNode
from asyncloader.service.placement.engine import Credentials

_log = logging.getLogger("asyncloader")
_T = TypeVar("_T")
_LOOK_S = 1.0
_ANSWER_S = 5.0
_CHECK_S = 10.0
_START_S = 120.0
"""Seconds after which a node that does not start, or does not take a definition, is logged, and started again."""
_MOST_WAIT_S = 30.0


class FleetOptions(NamedTuple):
    """The arguments of `RayWorkers`."""

    nodes: int | None
    cpus_per_node: int | None
    resources: dict[str, float]


class FleetNode(NamedTuple):
    """A node that is ready.

    Attributes:
        machine: Ray's identifier of the machine.
        addresses: where loaders reach it; see `AgentNode`.
        workers: processes for each dataset.
    """

    machine: str
    addresses: tuple[str, ...]
    workers: int


class FleetView(NamedTuple):
    """A fleet's state at one time.

    Attributes:
        life: differs after Ray has started the fleet's actor again, which then knows no definitions.
        number: grows with each change.
        nodes: the nodes that are ready.
        machines: number of machines with a node that is ready or starting.
        credentials: the nodes' token and certificates.
    """

    life: str
    number: int
    nodes: tuple[FleetNode, ...]
    machines: int
    credentials: Credentials


class Agent:
    """Runs a node on its machine. If the node dies, the agent ends itself, and Ray starts it again.

    Args:
        workers: processes for each dataset.
        credentials: the node's token and certificates.
    """

    def __init__(self, workers: int, credentials: Credentials) -> None:
        try:
            self._node = AgentNode(_ray().util.get_node_ip_address(), workers, credentials)
        except Exception:
            # Not raised: Ray starts an actor again if its process has ended, but not if its constructor has raised.
            # After a second, so that it does not do so all the time.
            _log.exception("the node cannot be started")
            time.sleep(_LOOK_S)
            os._exit(1)
        # In a thread, because the node may die while no method of the actor is called.
        threading.Thread(target=self._end_with_node, name="asyncloader-agent", daemon=True).start()

    def _end_with_node(self) -> None:
        self._node.process.wait()
        os._exit(1)

    def addresses(self) -> tuple[str, ...]:
        """Return the node's addresses."""
        return self._node.addresses

    def serve(self, data: bytes) -> None:
        """Have the node serve this pickled definition."""
        self._node.serve(data)

    def run_until_end(self) -> None:
        """Never return: the caller gets an error when the actor ends."""
        while True:
            time.sleep(_CHECK_S)
            # A node that hangs does not end by itself. `AgentNode` kills a node that does not answer in time.
            self._node.check()


class Fleet:
    """Keeps an agent on each machine that it uses. Its methods and tasks all run in one event loop.

    Args:
        options: the number and the kind of machines to use.
        credentials: files of certificates; the token is made here.
    """

    def __init__(self, options: FleetOptions, credentials: Credentials) -> None:
        self._options = options
        self._credentials = credentials._replace(token=secrets.token_hex(32))
        self._life = secrets.token_hex(8)
        self._number = 0
        self._served: dict[str, Any] = {}  # the definitions, in Ray's store, once for all machines
        self._near: dict[str, None] = {}  # the loaders' machines, which get nodes first
        self._agents: dict[str, Any] = {}
        self._taking: dict[asyncio.Task[None], str] = {}  # tasks that give a further definition to a machine's node
        self._late: dict[str, FleetNode] = {}  # nodes that take long for it, and are not ready until they have it
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._ready: dict[str, FleetNode] = {}
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    async def serve(self, name: str, data: bytes, machine: str) -> FleetView:
        """Have all nodes serve a pickled definition, for a loader on `machine`. Waits 30 s at most for a first node."""
        self._near[machine] = None
        if name not in self._served:
            self._served[name] = _ray().put(data)
        if self._looking is None:
            self._looking = _start_task(self._look())
        taking = {_start_task(self._serve_at(each, self._served[name])): each for each in self._ready}
        self._taking |= taking
        if taking:
            _, late = await asyncio.wait(taking, timeout=_ANSWER_S)
            # A dataset may be large, so these go on. Until they are done no loader is sent to their nodes.
            for task in late:
                # It may have ended during the wait: then `_keep` has taken it out.
                if (node := self._ready.pop(taking[task], None)) is not None:
                    self._late[node.machine] = node
                    self._announce()
        if not self._ready:
            await self._change(_MOST_WAIT_S)
        return self._view()

    async def _serve_at(self, machine: str, stored: Any) -> None:
        """Have a node that is ready serve a further definition."""
        agent = self._agents[machine]
        try:
            await _within(_START_S, agent.serve.remote(stored))
            # Several loaders may have begun at once. The last of their tasks for this machine makes it ready.
            others = [each for task, each in self._taking.items() if task is not asyncio.current_task()]
            if machine in self._late and machine not in others:
                self._ready[machine] = self._late.pop(machine)
                self._announce()
        except Exception as error:
            # Else the machine was lost during the wait, and there is nothing to start again.
            if self._agents.get(machine) is agent:
                _log.warning("the node at machine %s does not take a dataset, and is begun anew: %r", machine, error)
                # Killed, and not asked again from here: `_keep` notices that, and gives it everything again. A second
                # `run_until_end` beside that of `_keep` would occupy both threads of the agent.
                with contextlib.suppress(Exception):
                    _ray().kill(agent, no_restart=False)
        finally:
            del self._taking[asyncio.current_task()]  # type: ignore[arg-type]

    async def view(self, number: int) -> FleetView:
        """Return the fleet's state once its number is not `number`, or after 30 seconds."""
        if number == self._number:
            await self._change(_MOST_WAIT_S)
        return self._view()

    def _view(self) -> FleetView:
        ready = tuple(self._ready.values())
        return FleetView(self._life, self._number, ready, len(self._agents), self._credentials)

    async def _change(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _announce(self) -> None:
        self._number += 1
        # A new event for later waiters: tasks that wait for the old event may not have run yet, and must see it set.
        self._changed.set()
        self._changed = asyncio.Event()

    async def _look(self) -> None:
        """Follow the cluster: start agents on new machines, and drop those of lost machines. Never returns."""
        logged = ""
        while True:
            try:
                await self._look_once()
                logged = ""
            except Exception as error:  # any error of Ray's: without this task no new machine would ever be used
                if logged != repr(error):  # and not each second
                    logged = repr(error)
                    _log.warning("Ray does not say which machines there are, and is asked again", exc_info=error)
            await asyncio.sleep(_LOOK_S)

    async def _look_once(self) -> None:
        # Ray's functions block, and would hold up all loaders' questions.
        alive = await in_thread(partial(_machines, self._options.resources))
        for machine in [each for each in self._agents if each not in alive]:
            self._keeping.pop(machine).cancel()
            self._set_not_ready(machine)
            del self._agents[machine]
        wanted = self._options.nodes
        for machine in sorted(alive, key=lambda each: (each not in self._near, -alive[each])):
            if machine in self._agents or (wanted is not None and len(self._agents) >= wanted):
                continue
            workers = self._options.cpus_per_node or max(1, alive[machine] // 2)
            if alive[machine] >= workers:
                self._start_agent(machine, workers)

    def _set_not_ready(self, machine: str) -> None:
        self._late.pop(machine, None)
        if self._ready.pop(machine, None) is not None:
            self._announce()

    def _start_agent(self, machine: str, workers: int) -> None:
        # Two threads: one is occupied by `run_until_end`.
        options = {"num_cpus": workers, "resources": self._options.resources, "max_restarts": -1, "max_concurrency": 2}
        actor = _ray().remote(Agent).options(scheduling_strategy=placed_at(machine), **options)
        self._agents[machine] = actor.remote(workers, self._credentials)
        self._keeping[machine] = _start_task(self._keep(machine, workers))

    async def _keep(self, machine: str, workers: int) -> None:
        """Have the agent serve all definitions whenever it has started, then announce its node."""
        agent, logged, placed = self._agents[machine], "", False
        while True:
            try:
                addresses = await _within(_START_S, agent.addresses.remote())
                placed = True
                served: set[str] = set()
                # Again and again, because `serve` may add a definition during each wait, and gives it only to nodes
                # that are ready. Between the last look and `_ready` there is no wait.
                while len(served) < len(self._served):
                    for name, stored in list(self._served.items()):
                        await _within(_START_S, agent.serve.remote(stored))
                        served.add(name)
                self._ready[machine] = FleetNode(machine, addresses, workers)
                self._announce()
                logged = ""
                await agent.run_until_end.remote()
            except Exception as error:  # of Ray's, or of the agent's node: after any error the agent is tried again
                self._set_not_ready(machine)
                if logged != type(error).__name__:
                    logged = type(error).__name__
                    _log.warning("the node at machine %s is not ready, and is tried again: %r", machine, error)
                # An agent that Ray could not place yet is left waiting: a new agent would be placed no sooner.
                if placed and isinstance(error, TimeoutError):
                    placed = False
                    with contextlib.suppress(Exception):
                        _ray().kill(agent, no_restart=False)
                await asyncio.sleep(_LOOK_S)


def _start_task(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task that no code awaits. Its error is logged."""
    task = asyncio.get_running_loop().create_task(coroutine)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("a part of the fleet has failed", exc_info=task.exception())


async def _within(seconds: float, answer: Awaitable[_T]) -> _T:
    """Await an agent's answer for this long. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        return await answer


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


def placed_at(machine: str) -> Any:
    """Return Ray's `scheduling_strategy` for this machine alone."""
    return import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy(machine, soft=False)


def _ray() -> Any:
    return import_module("ray")  # imported late, as it is optional; it has no types

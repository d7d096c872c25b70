"""Ray's part of `RayWorkers`: an actor on each machine that keeps a node there, and one that keeps these actors.

Data path: none; before a node of a service is there.

The fleet asks Ray once a second which machines there are, as Ray tells nobody. Of the end of a node loaders learn from
their own connections, long before Ray does; what the fleet learns is for those that look for a node next.
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
from asyncloader.service.node.server import DRAIN_S
from asyncloader.service.placement.agent import AgentNode, AgentSetup
from asyncloader.service.placement.engine import Credentials
from asyncloader.service.placement.scaling import Load, Scaling

_log = logging.getLogger("asyncloader")
_T = TypeVar("_T")
_LOOK_S = 1.0
_ANSWER_S = 5.0
_CHECK_S = 10.0
_START_S = 120.0
"""Seconds after which a node that does not come, or does not take what it should serve, is reported, and begun anew."""
_MOST_WAIT_S = 30.0


class FleetOptions(NamedTuple):
    """As the arguments of `RayWorkers`; and for how many seconds the load must have been lower before a node goes."""

    nodes: int | None
    cpus_per_node: int | None
    resources: dict[str, float]
    max_nodes: int | None
    calm_s: float = 300.0


class FleetNode(NamedTuple):
    """A node that is ready.

    Attributes:
        machine: Ray's name for the machine.
        addresses: where it is; see `AgentNode`.
        workers: processes for each dataset.
    """

    machine: str
    addresses: tuple[str, ...]
    workers: int


class FleetView(NamedTuple):
    """What a fleet says of itself.

    Attributes:
        life: another one after the fleet was started anew: it has forgotten what it served.
        number: grows with each change.
        nodes: those that are ready.
        machines: how many there are on which a node is, or is starting.
        credentials: what the nodes ask for.
    """

    life: str
    number: int
    nodes: tuple[FleetNode, ...]
    machines: int
    credentials: Credentials


class Agent:
    """Keeps a node on its machine. If the node dies, so does the agent, and Ray starts it anew.

    Args:
        workers: processes for each dataset.
        credentials: what loaders must have.
    """

    def __init__(self, workers: int, credentials: Credentials) -> None:
        try:
            self._node = AgentNode(AgentSetup(_ray().util.get_node_ip_address(), workers, credentials))
        except Exception:  # Ray starts an actor anew whose process has ended, and none whose constructor raised
            _log.exception("the node cannot be started")
            time.sleep(_LOOK_S)
            os._exit(1)
        threading.Thread(target=self._end_with_node, name="asyncloader-agent", daemon=True).start()

    def _end_with_node(self) -> None:
        self._node.process.wait()
        os._exit(1)

    def addresses(self) -> tuple[str, ...]:
        """Where the node is."""
        return self._node.addresses

    def serve(self, data: bytes) -> None:
        """Have the node serve this pickled definition."""
        self._node.serve(data)

    def load(self) -> Load:
        """What the node's processes have done so far."""
        return self._node.load()

    def drain(self) -> None:
        """Have the node finish what is in work, and send its loaders elsewhere."""
        self._node.drain()

    def lives(self) -> None:
        """Return never: the caller gets an error at the end. A node that has stopped is ended: see `AgentNode`."""
        while True:
            time.sleep(_CHECK_S)
            self._node.load()


class Fleet:
    """Keeps an agent on each machine that is wanted.

    Args:
        options: which these are.
        credentials: files of certificates; the token is made here.
    """

    def __init__(self, options: FleetOptions, credentials: Credentials) -> None:
        self._options = options
        self._credentials = credentials._replace(token=secrets.token_hex(32))
        self._life = secrets.token_hex(8)
        self._number = 0
        self._served: dict[str, Any] = {}  # each in Ray's store, once for all machines
        self._near: dict[str, None] = {}  # machines of loaders, where nodes are wanted first
        self._agents: dict[str, Any] = {}
        self._taking: dict[asyncio.Task[None], str] = {}  # machines whose nodes are given one more definition
        self._late: dict[str, FleetNode] = {}  # those that take long for it
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        fewest, most = options.nodes or 1, options.max_nodes
        self._scaling = None if most is None else Scaling(fewest, most, options.calm_s)
        self._ready: dict[str, FleetNode] = {}
        self._changed = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    async def serve(self, name: str, data: bytes, machine: str) -> FleetView:
        """Have all nodes serve a pickled definition, for a loader on this machine. Returns once one does, or soon."""
        self._near[machine] = None
        if name not in self._served:
            self._served[name] = _ray().put(data)
        if self._looking is None:
            self._looking = _begun(self._look())
        taking = {_begun(self._serve_at(each, self._served[name])): each for each in self._ready}
        self._taking |= taking
        if taking:
            _, late = await asyncio.wait(taking, timeout=_ANSWER_S)
            for task in late:  # they go on, for a dataset may be large; loaders go elsewhere meanwhile
                if (node := self._ready.pop(taking[task], None)) is not None:
                    self._late[node.machine] = node
                    self._tell()
        if not self._ready:
            await self._change(_MOST_WAIT_S)
        return self._view()

    async def _serve_at(self, machine: str, stored: Any) -> None:
        """Have a node that is ready serve one more definition."""
        agent = self._agents[machine]
        try:
            await _within(_START_S, agent.serve.remote(stored))
            others = [each for task, each in self._taking.items() if task is not asyncio.current_task()]
            if machine in self._late and machine not in others:
                self._ready[machine] = self._late.pop(machine)
                self._tell()
        except Exception as error:
            if self._agents.get(machine) is agent:
                _log.warning("the node at machine %s does not take a dataset, and is begun anew: %r", machine, error)
                # `_keep` notices its end. To begin anew beside a `lives` that goes on would take both of its threads.
                with contextlib.suppress(Exception):
                    _ray().kill(agent, no_restart=False)
        finally:
            del self._taking[asyncio.current_task()]  # type: ignore[arg-type]

    async def view(self, number: int) -> FleetView:
        """What is there, once it is another than this one; or after some seconds."""
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

    def _tell(self) -> None:
        self._number += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _look(self) -> None:
        """Begin with machines that come, and let go of those that go, for ever."""
        said = ""
        while True:
            try:
                await self._look_once()
                said = ""
            except Exception as error:  # whatever Ray answers once: without this task no machine would be used any more
                if said != repr(error):  # and not each second
                    said = repr(error)
                    _log.warning("Ray does not say which machines there are, and is asked again", exc_info=error)
            await asyncio.sleep(_LOOK_S)

    async def _look_once(self) -> None:
        alive = await in_thread(partial(_machines, self._options.resources))
        for machine in [each for each in self._agents if each not in alive]:
            self._forget(machine)
        wanted = self._options.nodes if self._scaling is None else await self._scaled(self._scaling)
        for machine in sorted(alive, key=lambda each: (each not in self._near, -alive[each])):
            if machine in self._agents or (wanted is not None and len(self._agents) >= wanted):
                continue
            workers = self._options.cpus_per_node or max(1, alive[machine] // 2)
            if alive[machine] >= workers:
                self._begin(machine, workers)

    async def _scaled(self, scaling: Scaling) -> int:
        """How many nodes there should be. Those that came last go first, if there are too many."""
        before, wanted = scaling.wanted, scaling.look(asyncio.get_running_loop().time(), await self._loads())
        if wanted != before:
            _log.info("the load wants %d nodes; until now it wanted %d", wanted, before)
        staying = [machine for machine in self._agents if machine not in self._leaving]
        for machine in sorted(staying, key=lambda each: each not in self._near)[wanted:]:
            self._leaving[machine] = _begun(self._leave(machine))
        return wanted

    async def _loads(self) -> dict[str, Load]:
        async def ask(machine: str) -> None:
            with contextlib.suppress(
                _ray().exceptions.RayError, TimeoutError
            ):  # Ray notices late that a machine is gone
                loads[machine] = await _within(_ANSWER_S, self._agents[machine].load.remote())

        loads: dict[str, Load] = {}
        await asyncio.gather(*(ask(machine) for machine in self._ready))
        return loads

    async def _leave(self, machine: str) -> None:
        """Have its loaders go elsewhere, then end it."""
        agent = self._agents[machine]
        self._let_go(machine)
        with contextlib.suppress(_ray().exceptions.RayError, TimeoutError):
            await _within(DRAIN_S + _ANSWER_S, agent.drain.remote())
        _ray().kill(agent)
        del self._agents[machine], self._leaving[machine]

    def _let_go(self, machine: str) -> None:
        """No loader should go there any more."""
        self._keeping.pop(machine).cancel()
        self._late.pop(machine, None)
        if self._ready.pop(machine, None) is not None:
            self._tell()

    def _forget(self, machine: str) -> None:
        """It is not there any more."""
        if machine in self._leaving:
            self._leaving.pop(machine).cancel()
        else:
            self._let_go(machine)
        del self._agents[machine]

    def _begin(self, machine: str, workers: int) -> None:
        options = {"num_cpus": workers, "resources": self._options.resources, "max_restarts": -1, "max_concurrency": 2}
        actor = _ray().remote(Agent).options(scheduling_strategy=placed_at(machine), **options)
        self._agents[machine] = actor.remote(workers, self._credentials)
        self._keeping[machine] = _begun(self._keep(machine, workers))

    async def _keep(self, machine: str, workers: int) -> None:
        """Have the agent serve everything whenever it is there, and say where it is."""
        agent, said, there = self._agents[machine], "", False
        while True:
            try:
                addresses = await _within(_START_S, agent.addresses.remote())
                there = True
                served: set[str] = set()
                while len(served) < len(self._served):
                    for name, stored in list(self._served.items()):
                        await _within(_START_S, agent.serve.remote(stored))
                        served.add(name)
                self._ready[machine] = FleetNode(machine, addresses, workers)
                self._tell()
                said = ""
                await agent.lives.remote()
            except Exception as error:  # of Ray's, or of the agent's node: whatever it is, the agent is tried again
                self._late.pop(machine, None)
                if self._ready.pop(machine, None) is not None:
                    self._tell()
                if said != type(error).__name__:
                    said = type(error).__name__
                    _log.warning("the node at machine %s is not ready, and is tried again: %r", machine, error)
                if there and isinstance(error, TimeoutError):  # one that Ray has not placed yet is no worse than none
                    there = False
                    with contextlib.suppress(Exception):
                        _ray().kill(agent, no_restart=False)
                await asyncio.sleep(_LOOK_S)


def _begun(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Begin a task that is not awaited; what it raises is logged."""
    task = asyncio.get_running_loop().create_task(coroutine)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("a part of the fleet has failed", exc_info=task.exception())


async def _within(seconds: float, answer: Awaitable[_T]) -> _T:
    """Await an agent's answer for so long. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        return await answer


def _machines(resources: Mapping[str, float]) -> dict[str, int]:
    """The machines that are there, each with its free CPUs; none are free where one of the resources is not."""
    free = import_module("ray._private.state").available_resources_per_node()  # nothing public says it
    found = {}
    for each in _ray().nodes():
        if each["Alive"]:
            has = free.get(each["NodeID"], {})
            enough = all(has.get(name, 0) >= amount for name, amount in resources.items())
            found[each["NodeID"]] = int(has.get("CPU", 0)) if enough else 0
    return found


def placed_at(machine: str) -> Any:
    """For `scheduling_strategy`: this machine, and no other one."""
    return import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy(machine, soft=False)


def _ray() -> Any:
    return import_module("ray")  # which has no types, and is there only where it is used

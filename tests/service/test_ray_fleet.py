"""The fleet of `RayWorkers`, with agents that hang, are late, or fail in unforeseen ways. A stand-in replaces Ray here;
`tests/ray_cluster` starts a cluster.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from asyncloader.integrations.ray import actors
from asyncloader.integrations.ray.actors import Fleet, FleetOptions
from asyncloader.service.placement import agent as agents
from asyncloader.service.placement.agent import AgentNode
from asyncloader.service.placement.engine import Credentials
from tests.helpers.running import run_async


class RayError(Exception):
    """Stands for Ray's error."""


class Played:
    """A fake agent. `how` has the answer to each kind of question; "run_until_end" is answered through `ends`."""

    def __init__(self, machine: str) -> None:
        self.machine = machine
        self.how: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {}
        self.served: list[Any] = []
        self.ends: list[asyncio.Future[None]] = []
        self.killed = 0

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self._answer(name, *given))

    async def _answer(self, name: str, *given: Any) -> Any:
        if name in self.how:
            return await self.how[name]()
        if name == "serve":
            self.served.append(given[0])
        if name == "run_until_end":
            self.ends.append(asyncio.get_running_loop().create_future())
            await self.ends[-1]
        return (f"tcp://{self.machine}:1",)


class Cluster:
    """A fake of Ray, with these machines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *machines: str) -> None:
        self.machines = dict.fromkeys(machines, 2)
        self.agents: dict[str, Played] = {each: Played(each) for each in machines}
        self.failing: list[Exception] = []
        monkeypatch.setattr(actors, "_ray", lambda: self)
        monkeypatch.setattr(actors, "_machines", self.alive)
        monkeypatch.setattr(actors, "placed_at", lambda machine: machine)
        for name, seconds in {"_LOOK_S": 0.01, "_ANSWER_S": 0.05, "_START_S": 0.2}.items():
            monkeypatch.setattr(actors, name, seconds)
        self.exceptions = SimpleNamespace(RayError=RayError)

    def alive(self, _: Any) -> dict[str, int]:
        if self.failing:
            raise self.failing.pop()
        return self.machines

    def put(self, data: bytes) -> bytes:
        return data

    def remote(self, _: Any) -> Any:
        def options(scheduling_strategy: str, **_: Any) -> Any:
            return SimpleNamespace(remote=lambda *_: self.agents[scheduling_strategy])

        return SimpleNamespace(options=options)

    def kill(self, agent: Played, *, no_restart: bool) -> None:
        assert not no_restart
        agent.killed += 1
        agent.how.clear()  # Ray starts it again
        for end in agent.ends:
            if not end.done():
                end.set_exception(RayError("killed"))


async def for_ever() -> None:
    await asyncio.Event().wait()


async def until(true: Callable[[], bool]) -> None:
    """Wait until a condition holds that tasks of this loop bring about."""
    while not true():  # noqa: ASYNC110 - the fleet's tasks set no event
        await asyncio.sleep(0)


def run(play: Callable[[Fleet], Coroutine[Any, Any, None]]) -> None:
    """Run `play` with a fleet, and end the fleet's tasks."""

    async def live() -> None:
        fleet = Fleet(FleetOptions(None, 1, {}), Credentials(""))
        try:
            await play(fleet)
        finally:
            tasks = [
                *fleet._keeping.values(),
                *fleet._taking,
                *([fleet._looking] if fleet._looking is not None else []),
            ]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run_async(live())


def ready(fleet: Fleet) -> set[str]:
    return set(fleet._ready)


def test_an_agent_that_is_stuck_holds_up_no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not offered to loaders until it serves all datasets that the others serve."""
    cluster = Cluster(monkeypatch, "one", "two")

    async def play(fleet: Fleet) -> None:
        await fleet.serve("first", b"1", "one")
        await until(lambda: ready(fleet) == {"one", "two"})
        stuck = asyncio.Event()
        cluster.agents["two"].how["serve"] = stuck.wait
        view = await fleet.serve("second", b"2", "one")
        assert [node.machine for node in view.nodes] == ["one"]
        del cluster.agents["two"].how["serve"]
        stuck.set()
        await until(lambda: ready(fleet) == {"one", "two"})
        assert cluster.agents["two"].served == [b"1"]  # and the definition at which it was stuck
        assert not cluster.agents["two"].killed

    run(play)


def test_an_agent_that_takes_no_dataset(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is killed, and Ray starts it again. At most one call waits for its end: each such call occupies a thread."""
    cluster = Cluster(monkeypatch, "one")
    agent = cluster.agents["one"]

    async def play(fleet: Fleet) -> None:
        await fleet.serve("first", b"1", "one")
        for name, data, killed in [("second", b"2", 1), ("third", b"3", 2)]:
            await until(lambda: ready(fleet) == {"one"})
            agent.how["serve"] = for_ever
            await fleet.serve(name, data, "one")
            while agent.killed < killed:  # noqa: ASYNC110 - as in `until`
                await asyncio.sleep(0)
        await until(lambda: ready(fleet) == {"one"})
        assert agent.served[-3:] == [b"1", b"2", b"3"]
        assert sum(not end.done() for end in agent.ends) == 1

    run(play)
    assert "does not take a dataset" in caplog.text


@pytest.mark.parametrize("question", ["addresses", "serve"])
def test_an_agent_that_hangs_at_its_start(
    question: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This is logged. An agent that had started is started again; an agent that Ray has not placed yet is left
    alone.
    """
    cluster = Cluster(monkeypatch, "one")
    agent = cluster.agents["one"]
    agent.how[question] = for_ever

    async def play(fleet: Fleet) -> None:
        serving = asyncio.ensure_future(fleet.serve("first", b"1", "one"))
        await until(lambda: "the node at machine one is not ready" in caplog.text)
        if question == "addresses":
            assert not agent.killed
            agent.how.clear()
        assert [node.machine for node in (await serving).nodes] == ["one"]

    run(play)
    assert agent.killed == (question == "serve")
    assert "the node at machine one is not ready" in caplog.text


@pytest.mark.parametrize("error", [RayError("gone"), KeyError("of no kind that was foreseen"), OSError("broken")])
def test_whatever_fails_once_is_tried_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The list of machines fails once, and so does an agent that is ready."""
    cluster = Cluster(monkeypatch, "one")
    cluster.failing += [error]

    async def play(fleet: Fleet) -> None:
        await fleet.serve("first", b"1", "one")
        await until(lambda: ready(fleet) == {"one"})
        agent = cluster.agents["one"]
        await until(lambda: bool(agent.ends))
        agent.ends[0].set_exception(error)
        await until(lambda: not ready(fleet))
        await until(lambda: ready(fleet) == {"one"})
        cluster.machines = {}
        await until(lambda: not fleet._agents)

    run(play)
    assert "Ray does not say which machines there are" in caplog.text


def test_a_node_that_has_stopped_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question to it raises an error, so that the engine can start another node."""
    node = AgentNode("127.0.0.1", 1, Credentials("token"))
    try:
        node.check()
        os.kill(node.process.pid, signal.SIGSTOP)
        monkeypatch.setattr(agents, "_ANSWER_S", 0.2)
        with pytest.raises(ConnectionError, match="did not answer for 0 seconds, and was ended"):
            node.check()
        assert node.process.returncode == -signal.SIGKILL
        with pytest.raises(ConnectionError):
            node.check()
    finally:
        node.close()

"""`RayWorkers` over a stand-in for Ray: which machines get nodes, and nodes that are late, lost, or begun again.
`tests/ray_cluster` starts a cluster.
"""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from asyncloader import ServiceUnavailable
from asyncloader.integrations.ray import workers as ray_workers
from asyncloader.integrations.ray.workers import RayWorkers
from asyncloader.service.node import agent as agents
from asyncloader.service.node.agent import AgentNode
from asyncloader.service.protocol.definition import PickledDefinition

DATASET = PickledDefinition(b"dataset")


class Question:
    """A call of an actor: answered, failed, or open."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor


class Actor:
    """An actor on a machine, which answers unless it is late or broken."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.asked = options, 0
        self.late = self.broken = False
        self.serve = SimpleNamespace(remote=self._serve)

    def _serve(self, *_: Any) -> Question:
        self.asked += 1
        return Question(self)


class Cluster:
    """A fake of Ray, with these machines and their free CPUs. This process is on the machine "here"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **machines: int) -> None:
        self.machines, self.job = machines, "1"
        self.actors: dict[str, Actor] = {}
        monkeypatch.setattr(ray_workers, "_ray", lambda: self)
        monkeypatch.setattr(ray_workers, "_machines", lambda _: self.machines)
        monkeypatch.setattr(ray_workers, "_placed_at", str)

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="gcs", get_job_id=lambda: self.job, get_node_id=lambda: "here")

    def put(self, data: bytes) -> bytes:
        return data

    def wait(self, questions: list[Question], num_returns: int, timeout: float) -> tuple[list[Question], None]:
        del timeout
        return [each for each in questions if not each.actor.late][:num_returns], None

    def get(self, question: Question) -> tuple[str, ...]:
        if question.actor.broken:
            raise RuntimeError("the actor has died")
        machine = question.actor.options["scheduling_strategy"]
        return f"tcp://{machine}:1", f"unix:@{machine}"

    def remote(self, _: Any) -> Any:
        def options(**given: Any) -> Any:
            made = self.actors[given["scheduling_strategy"]] = Actor(given)
            return SimpleNamespace(remote=lambda *_: made)

        return SimpleNamespace(options=options)


def test_the_machines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The loader's own comes first, then those with most free CPUs; half of these are reserved. A lost machine is
    replaced, and the loader's own is reached without a network.
    """
    cluster = Cluster(monkeypatch, one=4, here=2, full=0, two=8)
    workers = RayWorkers(2)
    service = workers.serve(DATASET)
    assert service.remote
    assert list(service.addresses) == ["unix:@here", "tcp://two:1"]
    assert {name: each.options["num_cpus"] for name, each in cluster.actors.items()} == {"here": 1, "two": 4}
    del cluster.machines["two"]
    assert list(service.addresses) == ["unix:@here", "tcp://one:1"]
    assert "of 2 machines" not in caplog.text
    del cluster.machines["one"]
    workers.serve(DATASET)
    assert "RayWorkers(nodes=2): 1 of 2 machines have" in caplog.text


def test_nodes_that_are_late_or_begun_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """They are left out meanwhile. A node that is late has one open question for a dataset."""
    cluster = Cluster(monkeypatch, here=2, one=2)
    service = RayWorkers(cpus_per_node=1).serve(DATASET)
    late, broken = cluster.actors["one"], cluster.actors["here"]
    late.late, asked = True, late.asked
    for _ in range(3):
        assert list(service.addresses) == ["unix:@here"]
    assert late.asked == asked + 1
    late.late, broken.broken = False, True
    assert list(service.addresses) == ["tcp://one:1"]
    assert "the node at machine here is not ready" in caplog.text
    broken.broken = False
    assert list(service.addresses) == ["unix:@here", "tcp://one:1"]


def test_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose CPUs are free later is waited for; then it is an error, which says where to look."""
    cluster = Cluster(monkeypatch)
    monkeypatch.setattr(f"{ray_workers.__name__}.time.sleep", lambda _: cluster.machines.update(one=2))
    assert list(RayWorkers().serve(DATASET).addresses) == ["tcp://one:1"]
    cluster.machines.clear()
    monkeypatch.setattr(f"{ray_workers.__name__}.time.sleep", lambda _: None)
    monkeypatch.setattr(ray_workers, "_FIRST_S", 0.0)
    with pytest.raises(ServiceUnavailable, match="no node was ready within 0 seconds"):
        RayWorkers().serve(DATASET)


def test_copies_and_further_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy has the token and the nodes, started at the latest when it is made; another `ray.init` has new nodes."""
    cluster = Cluster(monkeypatch, here=2)
    workers = RayWorkers(1)
    state = workers.__getstate__()
    (first,) = cluster.actors.values()
    assert state["_actors"] == {"here": first}
    copy = RayWorkers.__new__(RayWorkers)  # Ray's own pickles handles of actors
    copy.__setstate__(state)
    assert copy.serve(DATASET).secret() == workers.serve(DATASET).secret()
    assert cluster.actors["here"] is first
    cluster.job = "2"
    assert list(workers.serve(DATASET).addresses) == ["unix:@here"]
    assert cluster.actors["here"] is not first
    workers.close()


def test_arguments() -> None:
    """Numbers below one, and an option that was removed, are errors at once."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"nodes": 0}, "nodes=0"),
        ({"cpus_per_node": 0}, "cpus_per_node=0"),
        ({"max_nodes": 3}, r"max_nodes=3\) was removed"),
    ]
    for arguments, text in wrong:
        with pytest.raises(ValueError, match=text):
            RayWorkers(**arguments)


def test_a_node_that_has_stopped_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question to it raises an error, so that Ray can start another node."""
    node = AgentNode("127.0.0.1", 1, ("token", None, None, None))
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

"""Failures of the network and of nodes do not change the batches of an epoch."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from asyncloader import AsyncDataLoader, DataLoader, LoaderClosed, Recovery, Service, ServiceUnavailable
from tests.helpers.comparing import assert_same
from tests.helpers.running import LOOPS, run_async
from tests.service import definitions
from tests.service.certificates import make_authority
from tests.service.proxy import fruitless, proxied
from tests.service.serving import NodeProcess, serving

OPTIONS: dict[str, Any] = {"batch_size": 2, "seed": 5, "num_workers": 2, "shuffle": True}
LENGTH = 400


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with serving(tmp_path_factory.mktemp("node"), ["numbers", "stream"], "--open", "numbers") as made:
        yield made


def numbers() -> Any:
    return definitions.numbers(n=LENGTH)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with DataLoader[Any](numbers(), **OPTIONS) as loader:
        return list(loader)


def test_a_node_that_is_killed(node: NodeProcess, expected: list[Any], tmp_path: Path) -> None:
    """Its workers go on at other nodes, a stream's from where they were. No restart is charged."""
    for defined, names in ((numbers(), ["numbers"]), (definitions.stream(), ["stream"])):
        flags = ["--open", "numbers"] if names == ["numbers"] else []
        options: dict[str, Any] = {**OPTIONS, "shuffle": None} if names == ["stream"] else OPTIONS
        with DataLoader[Any](defined, **options) as loader:
            whole = expected if names == ["numbers"] else list(loader)
        with serving(tmp_path, names, *flags, listen=["127.0.0.1:0"]) as other:
            both = f"{other.tcp},{node.tcp}"
            with DataLoader[Any](defined, **options, max_worker_restarts=0, workers=both) as loader:
                batches = iter(loader)
                head = [next(batches) for _ in range(3)]
                other.kill()
                assert_same([*head, *batches], whole)
                stats = loader.stats()
            counts = [stats[f"node/{each.tcp}/batches"] for each in (other, node)]
            assert min(counts) > 0
            assert sum(counts) >= len(whole)
            assert [stats[f"node/{each.tcp}/workers"] for each in (other, node)] == [0, 2]


@pytest.mark.thorough
def test_a_node_that_is_asked_to_end(node: NodeProcess, expected: list[Any], tmp_path: Path) -> None:
    """It finishes the tasks that its processes have; the loader gives the others to other nodes."""
    with serving(tmp_path, ["numbers"], "--open", "numbers", listen=["127.0.0.1:0"]) as other:
        both = f"{other.tcp},{node.tcp}"
        with DataLoader[Any](numbers(), **OPTIONS, max_worker_restarts=0, workers=both) as loader:
            batches = iter(loader)
            head = [next(batches) for _ in range(3)]
            other.process.terminate()
            assert_same([*head, *batches], expected)
        assert other.process.wait(30) == 0


def test_a_node_that_is_replaced_between_epochs(expected: list[Any], tmp_path: Path) -> None:
    """Persistent workers connect to the new node."""
    where = f"unix:{tmp_path}/node.sock"
    with serving(tmp_path, ["numbers"], "--open", "numbers", listen=[where]) as first:
        loader = DataLoader[Any](numbers(), **OPTIONS, persistent_workers=True, workers=where)
        assert_same(list(loader), expected)
        loader.set_epoch(0)
        first.kill()
    with serving(tmp_path, ["numbers"], "--open", "numbers", listen=[where]), loader:
        assert_same(list(loader), expected)


@pytest.mark.parametrize("silent", ["to_node", "to_loader", "both"])
def test_a_network_that_goes_silent(silent: str, node: NodeProcess, expected: list[Any]) -> None:
    """It drops bytes in one direction or both without an error: within seconds the loader uses another node."""

    async def run() -> None:
        with proxied(node.tcp) as proxy:
            both = f"{proxy.address},{node.tcp}"
            async with AsyncDataLoader[Any](numbers(), **OPTIONS, max_worker_restarts=0, workers=both) as loader:
                batches = aiter(loader)
                got = [await anext(batches) for _ in range(3)]
                for direction in ("to_node", "to_loader") if silent == "both" else (silent,):
                    getattr(proxy, direction).clear()
                proxy.refuse()
                began = monotonic()
                got += [batch async for batch in batches]
                assert monotonic() - began < 15
                assert_same(got, expected)

    run_async(run())


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["ends", "announces"])
def test_nodes_that_never_deliver(how: str, node: NodeProcess) -> None:
    """When `wait` is over, the epoch ends with an error that reports each node. The number of attempts is limited."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nothing = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
    with fruitless(node.tcp, how) as proxy:
        service = Service(f"{proxy.address},{nothing}", wait=3)
        with (
            DataLoader[Any](numbers(), **OPTIONS, workers=service) as loader,
            pytest.raises(ServiceUnavailable) as caught,
        ):
            list(loader)
        assert proxy.opened < 30
    text = str(caught.value)
    assert f"{nothing}: not connected (Connection refused)" in text
    assert f"{proxy.address}: connected " in text
    assert "0 batches" in text
    assert ("the node did not answer" if how == "announces" else "the node closed the connection") in text


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["ends", "announces"])
def test_a_node_that_never_delivers_beside_one_that_does(how: str, node: NodeProcess, expected: list[Any]) -> None:
    """The node that delivers gets the work, after a try or two."""
    with fruitless(node.tcp, how) as proxy:
        service = Service(f"{proxy.address},{node.tcp}", wait=3)
        with DataLoader[Any](numbers(), **OPTIONS, workers=service) as loader:
            assert_same(list(loader), expected)
        assert 1 <= proxy.opened <= 4


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "tls"), [("asyncio", True), (list(LOOPS)[-1], False)])
def test_a_trainer_that_blocks_its_loop(kind: str, tls: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It blocks for longer than a connection may be silent, during a batch larger than all buffers: no connection is
    lost.
    """
    files = make_authority(tmp_path)
    flags = ["--tls-cert", files["node_cert"], "--tls-key", files["node_key"]] if tls else []

    async def run(service: Service) -> None:
        async with AsyncDataLoader[Any](definitions.wide(n=5), 1, seed=1, num_workers=2, workers=service) as loader:
            got = 0
            async for batch in loader:
                got += 1
                assert batch.shape == (1, 16 << 20)
                if got == 2:
                    sleep(3.5)  # noqa: ASYNC251 - the step
            assert got == 5

    with serving(tmp_path, ["wide"], *flags, "--open", "wide", listen=["127.0.0.1:0"]) as node:
        run_async(run(Service(node.tcp, tls_ca=files["ca"] if tls else None)), kind)
    assert "goes on elsewhere" not in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["tcp", "unix"])
def test_a_task_of_another_loader_that_hangs(place: str, expected: list[Any], tmp_path: Path) -> None:
    """A loader that waits behind it is not blamed, and goes on once the other has exited; the task never ends."""
    hanging = definitions.hanging(n=LENGTH, marks=str(tmp_path))
    one: dict[str, Any] = {**OPTIONS, "num_workers": 1}
    with serving(tmp_path, ["hanging"], "--open", "hanging", workers=1) as node:
        workers = getattr(node, place)
        hung = DataLoader[Any](hanging, **one, workers=workers)
        batches = iter(hung)
        with ThreadPoolExecutor(1) as thread:
            reading = thread.submit(list, batches)
            while not (tmp_path / "hung").exists():
                pass
            recovery = Recovery(worker_timeout=1)
            with DataLoader[Any](
                hanging, **OPTIONS, recovery=recovery, max_worker_restarts=0, workers=workers
            ) as loader:
                second = iter(loader)
                hung.close()
                with pytest.raises(LoaderClosed):
                    reading.result()
                assert_same(list(second), expected)


# ------------------------------------------------------------------------ which loaders and nodes are accepted


def refused(workers: Any) -> str:
    with pytest.raises(ServiceUnavailable) as caught:
        iter(DataLoader[Any](numbers(), **OPTIONS, workers=workers))
    return str(caught.value)


@pytest.mark.thorough
def test_connections_that_send_nothing(node: NodeProcess, expected: list[Any]) -> None:
    """They do not keep loaders out: the oldest connection without a proof is closed first."""
    host, port = node.tcp.removeprefix("tcp://").split(":")
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(200)]
        with DataLoader[Any](numbers(), **OPTIONS, workers=Service(node.tcp, wait=3)) as loader:
            assert_same(list(loader), expected)
        assert silent[0].recv(1) == b""


@pytest.mark.thorough
def test_more_datasets_than_a_node_holds(node: NodeProcess) -> None:
    """A node ends the processes of a dataset that no loader reads. Datasets that are read stay."""
    for length in range(1, 12):
        with DataLoader[Any](definitions.numbers(n=length), 1, seed=1, num_workers=1, workers=node.tcp) as loader:
            assert len(list(loader)) == length
    with ExitStack() as stack:
        open_loaders = []
        for length in range(1, 10):
            defined = definitions.numbers(n=100 + length)
            made = DataLoader[Any](defined, 1, seed=1, num_workers=1, workers=node.tcp)
            batches = iter(stack.enter_context(made))
            next(batches)
            open_loaders.append(batches)
        service = Service(node.tcp, wait=1)
        with pytest.raises(ServiceUnavailable, match="datasets are read here, and it makes no more now"):
            iter(DataLoader[Any](definitions.numbers(n=99), 1, seed=1, num_workers=1, workers=service))
        assert [len(list(each)) for each in open_loaders] == [100 + number for number in range(9)]


@pytest.mark.thorough
def test_tokens(tmp_path: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides must have the same token; a loader without it, or with another token, is refused at once."""
    token = tmp_path / "token"
    token.write_text("correct horse\n")
    with serving(
        tmp_path, ["numbers"], "--open", "numbers", "--token-file", str(token), listen=["127.0.0.1:0"]
    ) as node:
        assert "it asks for a token" in refused(node.tcp)
        assert "the token is wrong" in refused(Service(node.tcp, token="battery staple"))
        assert "battery" not in repr(Service(node.tcp, token="battery staple"))
        with DataLoader[Any](numbers(), **OPTIONS, workers=Service(node.tcp, token="correct horse")) as loader:
            assert_same(list(loader), expected)
        monkeypatch.setenv("ASYNCLOADER_TOKEN_FILE", str(token))
        assert len(DataLoader[Any](numbers(), **OPTIONS, workers=node.tcp)) == LENGTH // 2

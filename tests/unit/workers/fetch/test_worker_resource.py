"""`worker_resource` by itself: who gets which object, when it is closed, and what errors say."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from asyncloader import worker_resource
from asyncloader.workers.fetch.worker_resource import close_idle
from tests.helpers.forking import fork


class Log:
    """Opens and closes objects, which are lists with their key, and counts those that are open."""

    def __init__(self) -> None:
        self.open = self.most = 0
        self.events: list[str] = []
        self.lock = threading.Lock()

    def opener(self, key: str) -> list[str]:
        with self.lock:
            self.open += 1
            self.most = max(self.most, self.open)
            self.events.append(f"+{key}")
        return [key]

    def closer(self, value: list[str]) -> None:
        assert value, "closed twice"
        with self.lock:
            self.open -= 1
            self.events.append(f"-{value.pop()}")


@pytest.fixture
def log() -> Log:
    return Log()


def test_kept_used_again_and_closed_in_order(log: Log) -> None:
    """The least recently used is closed before another is opened; the rest at the end, which may be repeated."""
    files = worker_resource(log.opener, log.closer, max=2)
    for key in "abacab":
        with files(key) as file:
            assert file == [key]
    assert log.events == ["+a", "+b", "-b", "+c", "-c", "+b"]
    close_idle()
    close_idle()
    assert log.events[6:] == ["-a", "-b"]
    assert log.most == 2


def test_in_use_is_not_closed(log: Log) -> None:
    """More than `max` may be in use, and they outlive the end of a worker until they are given back."""
    files = worker_resource(log.opener, log.closer, max=1)
    with ExitStack() as stack:
        held = [stack.enter_context(files(key)) for key in "aab"]
        close_idle()
        assert held == [["a"], ["a"], ["b"]]
        assert held[0] is not held[1]
    assert log.events == ["+a", "+a", "+b", "-b", "-a", "-a"]


def test_threads(log: Log) -> None:
    """Eight threads never have a closed object, nor another thread's."""
    files = worker_resource(log.opener, log.closer, max=3)
    users: dict[int, int] = {}
    wrong: list[str] = []

    def work(seed: int) -> None:
        for step in range(300):
            key = "abcde"[(seed * 7 + step * step) % 5]
            with files(key) as file:
                users[id(file)] = users.get(id(file), 0) + 1
                if file != [key] or users[id(file)] > 1:
                    wrong.append(f"{key}: {file}")
                users[id(file)] -= 1

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert log.most <= 8 + 3  # in use, and idle
    assert log.open <= 3
    close_idle()
    assert log.open == 0


def test_errors_name_the_key(log: Log) -> None:
    """What `open` raises reaches the caller, and takes no place; what `close` raises is a warning."""

    def opener(key: str) -> list[str]:
        if key == "bad":
            raise FileNotFoundError("no such video")
        return log.opener(key)

    def closer(value: list[str]) -> None:
        raise OSError("disk full")

    files = worker_resource(opener, closer, max=1)
    with pytest.raises(FileNotFoundError, match="no such video") as caught, files("bad"):
        pass
    assert "while opening 'bad' by " in caught.value.__notes__[0]
    with files("a"):
        pass
    with pytest.warns(RuntimeWarning, match="closing 'a', which .* had opened, raised OSError: disk full"), files("b"):
        pass
    with pytest.warns(RuntimeWarning, match="closing 'b'"):
        close_idle()


def test_the_objects_own_close() -> None:
    """Without `close` the object's own method is called; an object without one is dropped."""
    closed = []

    class File:
        def close(self) -> None:
            closed.append(self)

    files: Any = worker_resource(lambda key: File() if key else object(), max=1)
    for key in (1, 0, 1, 0):
        with files(key):
            pass
    assert len(closed) == 2


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"open": "a.mp4"}, TypeError, "open must be a function, not 'a.mp4'"),
        ({"open": open, "close": 3}, TypeError, "close must be a function"),
        ({"open": open, "max": 0}, ValueError, "at least 1, not 0"),
        ({"open": open, "max": True}, ValueError, "not True"),
        ({"open": open, "shared": True}, TypeError, "no longer takes shared=True"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    """Refused at once, with the value."""
    with pytest.raises(error, match=said):
        worker_resource(**arguments)


def test_what_would_have_to_be_awaited_is_refused() -> None:
    """At once where the definition shows it, else at the first use; no coroutine is left unawaited."""

    async def opener(key: str) -> str:
        return key

    refused: list[dict[str, Any]] = [{"open": opener}, {"open": open, "close": opener}]
    for arguments in refused:
        with pytest.raises(TypeError, match="no longer awaits: open clients in the dataset's `__aenter__`"):
            worker_resource(**arguments)

    def hidden(key: Any) -> Any:
        return opener(key)

    late: Any = worker_resource(hidden)
    with pytest.raises(TypeError, match="returned a coroutine, which worker_resource"), late("a"):
        pass


@pytest.mark.parametrize("again", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_have_nothing_open(again: Callable[[Any], Any]) -> None:
    """Only the functions and numbers travel."""
    files: Any = worker_resource(os.listdir, len, max=3)
    with files("/") as names:
        other = again(files)
        with other("/") as others:
            assert others == names
            assert others is not names
    assert repr(other) == repr(files) == "<WorkerResource of listdir, max=3>"


def test_a_fork_shares_nothing(log: Log) -> None:
    """A child opens its own objects, and neither closes nor frees those of its parent, also those in use."""
    freed = []

    class File:
        def __init__(self) -> None:
            self.pid = os.getpid()

        def __del__(self) -> None:
            if self.pid != os.getpid():
                freed.append(self.pid)

        def close(self) -> None:
            assert self.pid == os.getpid()

    files: Any = worker_resource(lambda key: File(), max=2)
    with files("b"):
        pass

    def child() -> None:
        with files("b") as mine:
            assert mine.pid == os.getpid()
        lease.__exit__(None, None, None)
        close_idle()
        gc.collect()
        assert not freed

    lease = files("a")
    with lease as parents:
        fork(child).wait()
        assert parents.pid == os.getpid()


def test_a_generator_freed_by_the_collector(log: Log) -> None:
    """It gives its object back wherever the collector runs: while another is taken or closed, too."""
    freed: list[str] = []

    def collecting(value: list[str]) -> None:
        gc.collect()
        log.closer(value)
        freed.append("closed")

    files = worker_resource(log.opener, collecting, max=1)

    def reading() -> Iterator[int]:
        with files("a"):
            yield 1

    for _ in range(50):
        stream = reading()
        next(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        with files("b"):
            pass
    gc.collect()
    close_idle()
    assert log.open == 0
    assert freed

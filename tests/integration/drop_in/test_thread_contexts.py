"""A multiprocessing context whose `Process` is a thread with a process's interface, with the queues of threads.

torch's loader works with such a context, and libraries have it for datasets that cannot leave the process.
"""

from __future__ import annotations

import os
import queue
import threading
from functools import partial
from multiprocessing.context import SpawnContext
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.comparing import assert_same


class _Thread(threading.Thread):
    """A thread with a `pid`; the other parts of a process's interface are those that threads have, too."""

    @property
    def pid(self) -> int:
        return id(self)


class _Queue(queue.Queue[Any]):
    def close(self) -> None: ...

    def cancel_join_thread(self) -> None: ...


class _ThreadContext(SpawnContext):
    Process = _Thread  # type: ignore[assignment]
    Queue = _Queue  # type: ignore[assignment]


class _Factory(_ThreadContext):
    """A context whose `Process` is a function."""

    Process = staticmethod(partial(_Thread))  # type: ignore[assignment]


class _Here(Dataset[Any]):
    """Samples are squares, and the process and thread that computed them. It cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            in_main = threading.current_thread() is threading.main_thread()
            return torch.tensor([index**2, os.getpid(), in_main])


@pytest.fixture(autouse=True)
def _settings_kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Keep the settings that torch's worker changes, because it takes this process for its own: threads, worker info.

    Its signal handlers are not installed: its handler of SIGTERM would end this process, and every child that is forked
    from it, with exit code 0.
    """
    monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", lambda: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch_worker._worker_info = None


def _batches(make: Any, **options: Any) -> list[Any]:
    # A generator of its own: torch's worker threads seed the process's generator at any moment.
    order = torch.Generator().manual_seed(3)
    options = {"batch_size": 3, "shuffle": True, "num_workers": 2, "generator": order} | options
    loader = make(_Here(), **options)
    batches = [list(loader) for _ in range(2)]
    loader._iterator = None
    return batches


@pytest.mark.parametrize(
    ("context", "persistent"), [(_ThreadContext, False), (_ThreadContext, True), (_Factory, False)]
)
def test_thread_workers_give_torchs_batches(context: Any, persistent: bool) -> None:
    """Thread workers run in this process, outside its main thread, with a warning that names the alternative."""
    options = {"multiprocessing_context": context(), "persistent_workers": persistent}
    expected = _batches(torch.utils.data.DataLoader, **options)
    with pytest.warns(RuntimeWarning, match="makes threads, so torch's own workers serve it.*with concurrency="):
        found = _batches(DataLoader, **options)
    assert_same(found, expected)
    assert all((batch[:, 1:] == torch.tensor([os.getpid(), 0])).all() for epoch in found for batch in epoch)


def test_thread_workers_have_no_position_and_say_so() -> None:
    """The state is empty, never a wrong position; a state of another loader is refused."""
    state = DataLoader(_Here(), batch_size=3).state_dict()
    with DataLoader(_Here(), batch_size=3, num_workers=1, multiprocessing_context=_ThreadContext()) as loader:
        with pytest.warns(RuntimeWarning, match="state_dict"):
            next(iter(loader))
        assert loader.state_dict() == {}
        loader.load_state_dict({})
        with pytest.raises(ValueError, match="cannot begin from a state: use processes"):
            loader.load_state_dict(state)


@pytest.mark.parametrize("options", [{"seed": 1}, {"decode": torch.neg}], ids=["seed", "decode"])
def test_thread_workers_know_no_options_of_ours(options: dict[str, Any]) -> None:
    """Options that torch's workers would ignore are an error that names them."""
    loader = DataLoader(_Here(), num_workers=1, multiprocessing_context=_ThreadContext(), **options)
    with pytest.raises(ValueError, match=next(iter(options)) + r"=.*num_workers=0 with concurrency="):
        iter(loader)


async def test_async_loader_refuses_thread_workers() -> None:
    """The async loader cannot use torch's workers."""
    async with AsyncDataLoader(_Here(), num_workers=1, multiprocessing_context=_ThreadContext()) as loader:
        with pytest.raises(ValueError, match=r"makes threads.*`async for` cannot read: use processes"):
            aiter(loader)

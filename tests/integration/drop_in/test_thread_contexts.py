"""A multiprocessing context whose `Process` is a thread with a process's interface, with the queues of threads.

torch's loader works with such a context, and libraries have it for datasets that cannot leave the process.
"""

from __future__ import annotations

import os
import queue
import threading
from multiprocessing.context import SpawnContext
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from asyncloader import DataLoader


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


@pytest.mark.parametrize("persistent", [False, True])
def test_thread_workers_give_torchs_batches(persistent: bool) -> None:
    """They are those of `workers="threads"`: in this process, outside its main thread."""
    loader = DataLoader[Any](
        _Here(),
        batch_size=3,
        num_workers=2,
        multiprocessing_context=_ThreadContext(),
        persistent_workers=persistent,
    )
    with loader:
        for _ in range(2):
            rows = torch.cat(list(loader))
            assert rows[:, 0].tolist() == [index**2 for index in range(10)]
            assert (rows[:, 1:] == torch.tensor([os.getpid(), 0])).all()
    with pytest.raises(ValueError, match="a trial in threads"):
        loader.clone(num_workers="auto")

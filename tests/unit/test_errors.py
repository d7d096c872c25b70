from __future__ import annotations

import pickle
import signal

import pytest

from asyncloader.errors import (
    LoaderClosed,
    LoaderError,
    LoaderTimeout,
    RingMemoryError,
    UnsupportedPlatform,
    WorkerDied,
)

ALL = [
    WorkerDied(3, 4711, -9),
    LoaderTimeout(2.5),
    LoaderClosed("this iterator was closed"),
    RingMemoryError(1 << 30, 1 << 20, "memory limit of control group /a"),
    UnsupportedPlatform("no workers here"),
]


@pytest.mark.parametrize("error", ALL, ids=lambda e: type(e).__name__)
def test_error_pickles(error: LoaderError) -> None:
    """An error comes out of pickle with its type, attributes, text and notes."""
    error = pickle.loads(pickle.dumps(error))
    error.add_note("seen in a worker")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))
    assert copy.__notes__ == ["seen in a worker"]


@pytest.mark.parametrize("error", ALL, ids=lambda e: type(e).__name__)
def test_error_is_a_loader_error_and_a_builtin_one(error: LoaderError) -> None:
    """One `except` catches all of ours, and torch's users find the type they wait for."""
    assert isinstance(error, LoaderError)
    assert isinstance(error, MemoryError if isinstance(error, RingMemoryError) else RuntimeError)


def test_killed_worker_reads_as_torch_says_it() -> None:
    """The text begins in torch's words, then names the worker and, for SIGKILL, the usual reason."""
    text = str(WorkerDied(3, 4711, -signal.SIGKILL))
    assert text.startswith("DataLoader worker (pid 4711) is killed by signal: Killed. ")
    assert "worker 3" in text
    assert "memory" in text


def test_segfault_is_not_blamed_on_memory() -> None:
    """Only SIGKILL is explained by the kernel's memory shortage."""
    text = str(WorkerDied(0, 12, -signal.SIGSEGV))
    assert text.startswith("DataLoader worker (pid 12) is killed by signal: Segmentation fault. ")
    assert "memory" not in text


@pytest.mark.parametrize(("exitcode", "words"), [(3, "exit code 3"), (0, "exit code 0"), (None, "exit code unknown")])
def test_exited_worker_reads_as_torch_says_it(exitcode: int | None, words: str) -> None:
    """An exit without a signal is torch's other wording, with worker and code."""
    text = str(WorkerDied(1, 99, exitcode))
    assert text.startswith("DataLoader worker (pid(s) 99) exited unexpectedly")
    assert "worker 1" in text
    assert words in text


def test_real_time_signal_has_a_text() -> None:
    """A signal without a common name does not break the message."""
    assert "is killed by signal" in str(WorkerDied(0, 1, -signal.SIGRTMIN))


def test_timeout_reads_as_torch_says_it() -> None:
    """The text is torch's."""
    assert str(LoaderTimeout(5)) == "DataLoader timed out after 5 seconds"


def test_memory_error_names_sizes_and_options() -> None:
    """What was wanted, what there is, why, and which options to change."""
    text = str(RingMemoryError(1_234_567, 1_000_000, "memory limit of control group /a"))
    for words in ("1,234,567 bytes", "1,000,000 bytes", "control group /a", "ring_bytes", "num_workers"):
        assert words in text
    assert "unknown limit" in str(RingMemoryError(1, None, "mmap"))

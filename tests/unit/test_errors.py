from __future__ import annotations

import importlib
import pickle
import pkgutil
import signal
from collections.abc import Iterator

import pytest
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe

import asyncloader
from asyncloader.errors import (
    DeviceUnavailable,
    LoaderClosed,
    LoaderError,
    LoaderTimeout,
    PageLockError,
    RanksDisagree,
    RingMemoryError,
    ShardError,
    ShardWriteError,
    StateError,
    TaskQuarantined,
    TooManySkippedSamples,
    UnsupportedPlatform,
    WorkerDied,
    ending,
    shortened,
)

ALL = [
    WorkerDied(3, 4711, -9),
    WorkerDied(3, 4711, None, "It was killed.", "Do this.", "a stack"),
    TaskQuarantined([1, 2], [(0, 11, -9), (1, 12, None)], "last words"),
    TaskQuarantined(3, [(0, 11, -9), (1, 12, 3)], advice="The epoch ends with it."),
    TooManySkippedSamples(10, "index 3, ValueError: bad"),
    LoaderTimeout(2.5),
    LoaderClosed("this iterator was closed"),
    RingMemoryError(1 << 30, 1 << 20, "memory limit of control group /a"),
    RingMemoryError(1 << 30, None, "mmap", "Share less."),
    DeviceUnavailable("cuda:7", "torch sees 2 CUDA devices"),
    PageLockError(1 << 30, None, "CUDA_ERROR_OUT_OF_MEMORY"),
    ShardError("the block is cut", url="memory://a", offset=12, resume=3),
    ShardWriteError("it is no dictionary", number=3, key="a"),
    UnsupportedPlatform("no workers here"),
    StateError("of another loader"),
    RanksDisagree("one of them left"),
]
BUILTIN: dict[type[LoaderError], type[Exception]] = {
    RingMemoryError: MemoryError,
    PageLockError: MemoryError,
    StateError: ValueError,
    ShardError: ValueError,
    ShardWriteError: ValueError,
}
# Values of attributes of an error that was made from a text.
NOTHING = ("", 0, -1, (), None)


def every_error() -> list[type[LoaderError]]:
    """Every subclass of the root, in all modules of the package."""
    for module in pkgutil.walk_packages(asyncloader.__path__, "asyncloader."):
        if not module.name.startswith("asyncloader.integrations."):  # each imports its framework; none defines an error
            importlib.import_module(module.name)
    found: list[type[LoaderError]] = []
    todo = [LoaderError]
    while todo:
        found.append(todo.pop())
        todo += (kind for kind in found[-1].__subclasses__() if kind.__module__.startswith("asyncloader."))
    return found


@pytest.mark.parametrize("error", ALL, ids=lambda e: type(e).__name__)
def test_error_pickles(error: LoaderError) -> None:
    """Type, attributes, text and notes survive."""
    error = pickle.loads(pickle.dumps(error))
    error.add_note("seen in a worker")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))
    assert copy.__notes__ == ["seen in a worker"]


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_error_is_made_from_a_text(kind: type[LoaderError]) -> None:
    """torch's `ExceptionWrapper` raises it so: with its type, the unchanged text, harmless attributes; it pickles."""

    def wrapped() -> ExceptionWrapper:
        made = next((error for error in ALL if type(error) is kind), None) or kind("what happened")
        try:
            raise made
        except LoaderError:
            return ExceptionWrapper(where="in a thread")

    with pytest.raises(kind, match=r"^Caught .* in a thread") as caught:
        wrapped().reraise()
    assert type(caught.value) is kind
    attributes = {name for error in ALL if type(error) is kind for name in vars(error)}
    for error in (kind("what\nhappened"), pickle.loads(pickle.dumps(kind("what\nhappened")))):
        assert (str(error), error.args) == ("what\nhappened", ("what\nhappened",))
        assert [name for name in attributes if getattr(error, name) not in NOTHING] == []


@pytest.mark.parametrize("error", [error for error in ALL if error._has_parts], ids=lambda e: type(e).__name__)
def test_error_passes_through_a_datapipe(error: LoaderError) -> None:
    """torch's datapipes replace arguments that are no text. The error's own text stays, also in a copy."""

    class Raising(IterDataPipe[None]):
        def __iter__(self) -> Iterator[None]:
            raise copied
            yield

    copied = pickle.loads(pickle.dumps(error))
    with pytest.raises(type(error)) as caught:
        list(Raising())
    assert caught.value.args != error.args
    for each in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert str(each) == str(error)


@pytest.mark.parametrize("error", ALL, ids=lambda e: type(e).__name__)
def test_error_is_a_loader_error_and_a_builtin_one(error: LoaderError) -> None:
    """One `except` catches all of ours, and torch's users find the builtin type they expect."""
    assert isinstance(error, LoaderError)
    assert isinstance(error, BUILTIN.get(type(error), RuntimeError))


DIED, EXITED = "DataLoader worker (pid 99) ", "DataLoader worker (pid(s) 99) exited unexpectedly: worker 1, "
TEXTS: list[tuple[LoaderError, str]] = [  # torch's words come first
    (WorkerDied(1, 99, -9), f"{DIED}is killed by signal: Killed. It was worker 1 of the loader; the kernel does this"),
    (WorkerDied(1, 99, -11, "", "Set it."), "Segmentation fault. It was worker 1 of the loader. Set it."),
    (WorkerDied(1, 99, -9, "We killed it.", "Set it."), "Killed. It was worker 1 of the loader. We killed it. Set it."),
    (WorkerDied(1, 99, -signal.SIGRTMIN), f"{DIED}is killed by signal: "),
    (WorkerDied(1, 99, 3, "", "Set it."), f"{EXITED}exit code 3. Set it."),
    (WorkerDied(1, 99, 0), f"{EXITED}exit code 0."),
    (WorkerDied(1, 99, None), f"{EXITED}exit code unknown."),
    (
        TooManySkippedSamples(10, "index 3, bad jpeg"),
        "max_skipped_samples=10 samples of this epoch raised",
    ),
    (LoaderTimeout(5), "DataLoader timed out after 5 seconds"),
    (
        RingMemoryError(1_234_567, 1_000_000, "group /a"),
        "wants 1,234,567 bytes of shared memory but is bounded by",
    ),
    (RingMemoryError(1, None, "mmap"), "an unknown limit (mmap). Make the batches smaller, lower num_workers"),
    (RingMemoryError(1, None, "mmap", "Share less."), "an unknown limit (mmap). Share less."),
]


@pytest.mark.parametrize(("error", "words"), TEXTS, ids=lambda each: type(each).__name__)
def test_texts(error: LoaderError, words: str) -> None:
    """What happened, where, the reason if it is known, and what to do."""
    assert words in str(error)
    assert str(error).endswith((".", "(see dmesg).", "seconds"))


def test_what_to_do_comes_last() -> None:
    """Stacks and stderr stand in lines of their own, before the advice; without them there is no heading."""
    error = WorkerDied(1, 99, -signal.SIGSEGV, "A reason.", "An advice.", "Fatal error\n  File a.py")
    sentence, heading, *trace, last = str(error).splitlines()
    assert sentence == "DataLoader worker (pid 99) is killed by signal: Segmentation fault."
    assert heading == "What it wrote last:"
    assert last == "It was worker 1 of the loader. A reason. An advice."
    assert trace == ["Fatal error", "  File a.py"]
    assert "wrote last" not in str(WorkerDied(1, 99, -signal.SIGSEGV))


def test_advice_is_given_to_a_death_that_is_known() -> None:
    """The death with an advice is otherwise equal, and the original is unchanged."""
    error = WorkerDied(1, 99, -9, "A reason.", "", "a stack")
    advised = error.with_advice("Do this.")
    assert vars(advised) == {**vars(error), "advice": "Do this."}
    assert error.advice == ""


def test_quarantine_names_indices_and_deaths() -> None:
    """The text has the samples, the workers, how each died, their last lines, and the remedy."""
    text = str(TaskQuarantined([17, 4], [(0, 11, -signal.SIGSEGV), (1, 12, 3)], "free(): invalid pointer"))
    for words in (
        "indices [17, 4]",
        "killed 2 workers",
        "worker 0 (pid 11, killed by signal: Segmentation fault)",
        "worker 1 (pid 12, exit code 3)",
        'on_error="skip"',
    ):
        assert words in text
    assert text.splitlines()[1:-1] == ["The last lines of standard error:", "free(): invalid pointer"]
    assert 'on_error="skip"' in text.splitlines()[-1]


def test_quarantine_of_a_task_that_hung_threads() -> None:
    """Threads are lost, not killed, and have a stack in place of standard error."""
    text = str(TaskQuarantined([17], [(0, 0, None), (1, 0, None)], "a stack"))
    assert "indices [17] took 2 workers and is not tried again: worker 0 (a thread), worker 1 (a thread)." in text
    assert text.splitlines()[1:-1] == ["The last was here:", "a stack"]


def test_quarantine_of_many_indices_stays_readable() -> None:
    """A batch of thousands is shortened in the text, and whole in the attribute."""
    indices = list(range(10_000))
    error = TaskQuarantined(indices, [(0, 11, -9), (0, 12, -9)])
    assert error.indices == indices
    assert len(str(error)) < 800


@pytest.mark.parametrize(
    ("exitcode", "words"), [(None, "exit code unknown"), (0, "exit code 0"), (-9, "killed by signal: Killed")]
)
def test_endings_in_a_few_words(exitcode: int | None, words: str) -> None:
    """How a process ended, in a list of several."""
    assert ending(exitcode) == words


def test_long_values_are_cut_in_the_middle() -> None:
    """Long values are shown with beginning, end and length, short values unchanged."""
    assert shortened([1, 2]) == "[1, 2]"
    assert shortened("x" * 198) == repr("x" * 198)
    text = shortened(list(range(1000)))
    assert text.startswith("[0, 1, 2")
    assert "998, 999] (4,890 characters)" in text
    assert len(text) < 200

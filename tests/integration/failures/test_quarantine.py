"""A task that kills three workers is not tried again: its error has all known facts, or `on_error` decides. A task
whose workers are killed from outside is tried as long as restarts are left.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, cast

import pytest

from asyncloader import (
    DataLoader,
    LoaderError,
    Recovery,
    TaskQuarantined,
    TooManySkippedSamples,
    WorkerDied,
)
from tests.helpers.faulty import AsyncFaulty, Faults, Faulty, FaultyStream
from tests.helpers.running import BOTH, run_script
from tests.integration.failures.test_on_error import indices, run


def poison(folder: Path, places: dict[int, str]) -> Faults:
    """Places that kill every worker that reads them."""
    return Faults(folder, places, times=1000)


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
def test_error_has_the_facts(workers: int, tmp_path: Path) -> None:
    """Indices, signal, pids, and the stack of the crash; the epoch continues."""
    dataset = Faulty(12, poison(tmp_path, {5: "SIGABRT"}))
    batches = iter(DataLoader[Any](dataset, batch_size=2, num_workers=workers, seed=1))
    got: list[Any] = []
    errors: list[TaskQuarantined] = []
    while True:
        try:
            got.append(next(batches)["index"].tolist())
        except StopIteration:
            break
        except TaskQuarantined as caught:
            errors.append(caught)
    assert got == [[0, 1], [2, 3], [6, 7], [8, 9], [10, 11]]
    (error,) = errors
    assert error.indices == [4, 5]
    assert [code for _, _, code in error.deaths] == [-signal.SIGABRT] * 3
    assert len({pid for _, pid, _ in error.deaths}) == 3
    text = str(error)
    assert "indices [4, 5] killed 3 workers" in text
    assert all(str(pid) in text for _, pid, _ in error.deaths)
    assert "killed by signal: Aborted" in text
    assert "__getitem__" in text  # faulthandler's stack
    assert isinstance(error, LoaderError)
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize("kind", BOTH)
def test_innocent_companions_of_an_async_task(kind: str, tmp_path: Path) -> None:
    """Of a worker's outstanding tasks only the task that kills is given up: suspects are tried alone."""
    dataset = AsyncFaulty(24, poison(tmp_path, {9: "SIGSEGV"}))
    got, errors, _ = run(
        kind, dataset, batch_size=2, num_workers=2, prefetch_factor=4, seed=1, on_error="skip", max_worker_restarts=4
    )
    assert indices(got) == [[i, i + 1] for i in range(0, 24, 2) if i != 8]
    assert [bad.index for bad in errors] == [8, 9]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
def test_skip_leaves_out_the_batch(kind: str, tmp_path: Path) -> None:
    """With ``on_error="skip"`` all samples of the batch are dropped, and each index is recorded with the reason."""
    dataset = Faulty(20, poison(tmp_path, {5: "SIGSEGV", 14: "exit"}))
    got, errors, stats = run(kind, dataset, batch_size=2, num_workers=2, seed=1, on_error="skip", max_worker_restarts=6)
    assert indices(got) == [[i, i + 1] for i in range(0, 20, 2) if i not in (4, 14)]
    assert [(bad.index, bad.position, bad.action) for bad in errors] == [(i, i, "skipped") for i in (4, 5, 14, 15)]
    assert all("killed 3 workers" in bad.error for bad in errors)
    assert stats["data/worker_restarts"] in (5, 6)  # after the last death no task may be left


def test_records_that_are_too_many_end_the_epoch(tmp_path: Path) -> None:
    """A run that resumes there makes the batch of the task again."""
    dataset = Faulty(8, poison(tmp_path, {5: "exit"}))
    recovery = Recovery(max_skipped_samples=1)
    loader = DataLoader[Any](dataset, batch_size=2, num_workers=1, seed=1, on_error="skip", recovery=recovery)
    batches = cast("Any", iter(loader))
    assert indices([next(batches), next(batches)]) == [[0, 1], [2, 3]]
    with pytest.raises(TooManySkippedSamples):
        next(batches)
    state = loader.state_dict()
    assert (state["step"], state["beyond"]) == (2, [])


def test_last_restart_spent_on_a_poisoned_task(tmp_path: Path) -> None:
    """If no restart is left, the epoch ends with the error that explains the deaths."""
    dataset = Faulty(12, poison(tmp_path, {5: "exit"}))
    with pytest.raises(TaskQuarantined) as caught:
        list(DataLoader[Any](dataset, num_workers=1, seed=1, max_worker_restarts=2))
    assert caught.value.indices == [5]


def test_stream_ends_where_it_cannot_pass(tmp_path: Path) -> None:
    """A sample of a stream that kills its readers cannot be skipped: the epoch ends there."""
    dataset = FaultyStream(12, poison(tmp_path, {5: "exit"}))
    with pytest.raises(TaskQuarantined, match="the next batch of a stream killed 3 workers"):
        run("sync", dataset, num_workers=1, seed=1, recovery=Recovery(allow_replay=True), on_error="skip")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("dataset", [Faulty, AsyncFaulty])
def test_kills_from_outside_convict_nobody(kind: str, dataset: Any, tmp_path: Path) -> None:
    """A task whose workers were killed six times by SIGKILL and SIGTERM is done in the seventh attempt."""
    faults = Faults(tmp_path, {4: "SIGTERM", 5: "SIGKILL"}, times=3)
    got, errors, stats = run(kind, dataset(12, faults), batch_size=2, num_workers=1, seed=1, max_worker_restarts=6)
    assert indices(got) == [[i, i + 1] for i in range(0, 12, 2)]
    assert not errors
    assert 3 <= stats["data/worker_restarts"] <= 6


@pytest.mark.parametrize("dataset", [Faulty, AsyncFaulty])
def test_a_sample_that_kills_without_a_trace_is_named_at_last(dataset: Any, tmp_path: Path) -> None:
    """SIGKILL may come from outside: when no restart is left, the error names the worker's task."""
    batches = DataLoader[Any](
        dataset(12, poison(tmp_path, {5: "SIGKILL"})), batch_size=2, num_workers=1, seed=1, on_error="skip"
    )
    with pytest.raises(WorkerDied, match=r"at the task for indices \[4, 5\]\. Worker 0 had been replaced 3 times"):
        list(batches)


@pytest.mark.thorough
def test_our_own_kill_counts(tmp_path: Path) -> None:
    """A task on which workers hang is quarantined when `worker_timeout` has ended three of them."""
    dataset = Faulty(6, poison(tmp_path, {3: "hang"}))
    got, errors, _ = run("sync", dataset, num_workers=1, seed=1, recovery=Recovery(worker_timeout=1), on_error="skip")
    assert indices(got) == [[i] for i in range(6) if i != 3]
    assert "The loader killed it" in errors[0].error


OUT_OF_MEMORY = """
import os, sys
from pathlib import Path
import torch
from asyncloader import DataLoader, TaskQuarantined
from asyncloader.workers.ipc.segment import memory_groups

try:
    group = memory_groups(os.getpid())[0] / f"asyncloader-{os.getpid()}"
    group.mkdir()
except (IndexError, OSError):
    sys.exit("no group")
try:
    try:
        limit = next(path for name in ("memory.max", "memory.limit_in_bytes") if (path := group / name).exists())
        limit.write_text(str(192 << 20))
        (group / "cgroup.procs").write_text(str(os.getpid()))  # what it has so far stays in the old group's account
    except (StopIteration, OSError):
        sys.exit("no group")

    class Hungry(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            if index == 5:
                Path("/proc/self/oom_score_adj").write_text("1000")  # the worker, and not its parent
                torch.ones(4 << 30, dtype=torch.uint8)
            return index

    with DataLoader(Hungry(), num_workers=1, seed=1) as loader:
        try:
            list(loader)
        except TaskQuarantined as error:
            print(error.indices, error.deaths, error.advice)
finally:
    (group.parent / "cgroup.procs").write_text(str(os.getpid()))
    group.rmdir()
"""


@pytest.mark.thorough
def test_a_task_that_takes_all_memory_is_quarantined(tmp_path: Path) -> None:
    """The kernel sends SIGKILL, as the memory control group's counter shows."""
    done = run_script(tmp_path, OUT_OF_MEMORY)
    if "no group" in done.stderr:
        pytest.skip("this user may not make control groups with a memory limit")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[5] "), (done.stdout, done.stderr)
    assert done.stdout.count(", -9)") == 3  # exit codes, not part of a process id
    assert "Memory ran out: " in done.stdout

from __future__ import annotations

from typing import Any

import pytest

from asyncloader import AsyncDataLoader, DataLoader
from asyncloader.explain import verdict
from asyncloader.statistics import Statistics
from tests.integration.datasets import Numbers


def statistics(*, wait: float, busy: float = 0.0, copies: int = 0) -> Statistics:
    """Ten batches in ten seconds, of which `wait` was waited and `busy` of the workers' time worked."""
    s = Statistics()
    s.batches, s.elapsed_s, s.wait_s = 10, 10.0, 10.0 * wait
    s.worker_s, s.busy_s, s.ring_copies = 20.0, 20.0 * busy, copies
    return s


def test_nothing_loaded() -> None:
    """Without a batch there is nothing to judge."""
    assert verdict(Statistics(), 2, 8) == "Nothing was loaded yet."


def test_consumer_bound() -> None:
    """A consumer that hardly waits is the bound itself."""
    assert verdict(statistics(wait=0.02, busy=0.9), 2, 8).startswith("Consumer-bound: it waited for data 2%")


def test_no_workers_are_proposed_workers() -> None:
    """In-process loading that is waited for wants workers, as many as the CPUs allow and no more than 4."""
    assert "set num_workers to 4" in verdict(statistics(wait=0.9), 0, 64)
    assert "set num_workers to 1" in verdict(statistics(wait=0.9), 0, 1)


def test_busy_workers_want_more_workers() -> None:
    """Busy workers and free CPUs: more workers, with the numbers."""
    text = verdict(statistics(wait=0.5, busy=0.95), 2, 8)
    assert "waited 50%" in text
    assert "95% busy" in text
    assert "raise num_workers from 2 to 8" in text


def test_busy_cpus_want_cheaper_samples() -> None:
    """With every CPU busy, more workers would not help."""
    text = verdict(statistics(wait=0.5, busy=0.95), 8, 8)
    assert "__getitem__" in text
    assert "raise num_workers" not in text


def test_copies_want_fewer_held_batches() -> None:
    """Idle workers and many copies point at a consumer that hoards."""
    assert "hold fewer batches" in verdict(statistics(wait=0.5, busy=0.1, copies=8), 2, 8)


def test_idle_workers_want_larger_batches() -> None:
    """Workers that are idle while the consumer waits are held up by overhead or order."""
    text = verdict(statistics(wait=0.5, busy=0.1), 2, 8)
    assert "10% busy" in text
    assert "prefetch_factor" in text


def test_verdict_is_one_sentence() -> None:
    """One line, one full stop at its end."""
    for wait, busy, workers in [(0.0, 0.0, 2), (0.9, 0.0, 0), (0.9, 0.9, 2), (0.9, 0.9, 8), (0.9, 0.1, 2)]:
        text = verdict(statistics(wait=wait, busy=busy), workers, 8)
        assert "\n" not in text
        assert text.endswith(".")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "faults: a worker's death ends the epoch; a sample that raises fails its batch"),
        ({"seed": 1}, "a worker that dies is replaced, 3 times an epoch at most; "),
        (
            {"max_worker_restarts": 5, "worker_timeout": 2.5},
            "replaced, 5 times an epoch at most, one that is at a task",
        ),
        ({"worker_timeout": 2.5}, "for 2.5 s is killed"),
        ({"on_error": "skip"}, "a sample that raises is left out"),
        ({"on_error": "skip", "bad_samples": "refill", "seed": 1}, "a sample that raises is replaced by another one"),
        ({"on_error": lambda index, error: 0}, "a sample that raises is replaced by on_error"),
    ],
)
def test_faults_are_explained(options: dict[str, Any], words: str) -> None:
    """What becomes of workers that die and samples that raise is in the text."""
    assert words in DataLoader[Any](Numbers(4), num_workers=1, **options).explain()


class Silent(Numbers):
    """Must not be asked for anything by a `repr`."""

    def __len__(self) -> int:
        raise AssertionError

    __repr__ = __len__  # type: ignore[assignment]


def test_the_repr_shows_dataset_order_and_place() -> None:
    """Before, within and after an epoch, and of a loader that is closed; nothing is asked of the dataset for it."""
    loader = DataLoader[Any](Numbers(6), batch_size=3, seed=5)
    head = "<DataLoader of Numbers: batch_size=3, sampler=SeededSampler, num_workers=0, seed=5; "
    assert repr(loader) == f"{head}not iterated yet>"
    batches = iter(loader)
    next(batches)
    assert repr(loader) == f"{head}epoch 0, 1 of 2 batches delivered>"
    list(batches)
    assert repr(loader) == f"{head}epoch 0, finished>"
    loader.close()
    assert repr(loader) == f"{head}closed>"
    silent = AsyncDataLoader[Any](Silent(3), batch_sampler=[[0, 1]])
    assert repr(silent).startswith("<AsyncDataLoader of Silent: batch_size=None, batch_sampler=list, num_workers=0")


@pytest.mark.parametrize("loader", [DataLoader, AsyncDataLoader])
def test_a_loader_that_is_not_constructed_has_a_repr(loader: type[Any]) -> None:
    """A debugger shows it while the constructor runs."""
    assert f"{loader.__name__} object at" in repr(object.__new__(loader))


def test_the_table_for_notebooks_is_escaped() -> None:
    """It has the same words."""

    class Odd(Numbers):
        pass

    Odd.__name__ = "<b>"
    table = AsyncDataLoader[Any](Odd(3), batch_size=2)._repr_html_()
    assert "<td>&lt;b&gt;</td>" in table
    assert "<tr><th>batch_size</th><td>2</td></tr>" in table

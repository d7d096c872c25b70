"""States of DataLoader2: exact in the middle of an epoch, between epochs, and from the epoch's beginning."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data.datapipes.map import SequenceWrapper

from asyncloader.dataloader2 import (
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    ReadingServiceInterface,
    SequentialReadingService,
)
from asyncloader.dataloader2.adapter import Shuffle
from asyncloader.dataloader2.dataloader2 import (
    RANDOMNESS_STATE_KEY_NAME,
    READING_SERVICE_STATE_KEY_NAME,
    SERIALIZED_DATAPIPE_KEY_NAME,
)
from asyncloader.dataloader2.iterator import DataLoader2Iterator
from asyncloader.errors import StateError
from tests import script_server
from tests.dataloader2.parts import GRAPHS, MP, OnlyHere, Seeded, drawn, fails_at_5, numbers, plain
from tests.helpers.interrupting import Interruption
from tests.helpers.running import ROOT, environment

pytestmark = [pytest.mark.filterwarnings("ignore:This DataLoader will create")]

LENGTH = 23
SOURCES = {
    "shuffled": lambda: Seeded(numbers(LENGTH).shuffle().sharding_filter()),
    "dispatched": lambda: Seeded(numbers(LENGTH).shuffle().sharding_round_robin_dispatch(MP)),
}


def service(workers: int) -> ReadingServiceInterface:
    """Return a service with forked workers, as drawn cases start many of them."""
    return MultiProcessingReadingService(workers, "fork") if workers else InProcessReadingService()


def split(graph: Any, workers: int, taken: int, *, seed: int | None = None, epochs: int = 0) -> tuple[Any, Any, Any]:
    """Return a state after `epochs` epochs and `taken` items, the rest of that epoch, and the next epoch."""
    with DataLoader2[Any](graph, reading_service=service(workers)) as loader:
        if seed is not None:
            loader.seed(seed)
        for _ in range(epochs):
            list(loader)
        iterator = iter(loader)
        for _ in range(taken):
            next(iterator)
        state = loader.state_dict()
        return state, [plain(x) for x in iterator], [plain(x) for x in loader]


@settings(max_examples=25, deadline=None)
@given(
    source=st.sampled_from(sorted(SOURCES)),
    workers=st.sampled_from([0, 0, 0, 1, 2]),
    taken=st.integers(0, LENGTH),
    more=st.integers(0, LENGTH),
    epochs=st.integers(0, 2),
    seed=st.sampled_from([None, 0, 77]),
)
def test_the_rest_of_the_epoch_is_exact(
    source: str, workers: int, taken: int, more: int, epochs: int, seed: int | None
) -> None:
    """It is exact from any moment of any epoch, also if resumed twice, whatever was drawn from the global generator;
    with a seed, the epoch after it is exact, too.
    """
    state, rest, after = split(SOURCES[source](), workers, taken, seed=seed, epochs=epochs)
    torch.rand(1)
    with DataLoader2.from_state(state, service(workers)) as loader:
        assert loader.state_dict()["position"] == taken
        iterator = iter(loader)
        more = min(more, len(rest))
        assert [plain(next(iterator)) for _ in range(more)] == rest[:more]
        again = loader.state_dict()
        assert again["position"] == taken + more
        assert [plain(x) for x in iterator] == rest[more:]
        if seed is not None:
            assert [plain(x) for x in loader] == after
    with DataLoader2.from_state(again, service(workers)) as loader:
        assert [plain(x) for x in loader] == rest[more:]


@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph_resumes(name: str) -> None:
    """Each graph resumes in the middle of the second epoch, in this process and with two workers."""
    length = len(list(GRAPHS[name]()))
    for workers in (0, 2):
        state, rest, after = split(GRAPHS[name](), workers, length // 2, seed=5, epochs=1)
        with DataLoader2.from_state(state, service(workers)) as loader:
            assert [plain(x) for x in loader] == rest
            assert [plain(x) for x in loader] == after


def test_numbers_of_the_workers_generators() -> None:
    """They follow from the seed, so the numbers after the position are drawn again."""
    state, rest, _ = split(numbers(11).sharding_filter().map(drawn), 2, 4, seed=1)
    with DataLoader2.from_state(state, service(2)) as loader:
        assert [plain(x) for x in loader] == rest


def test_a_state_between_epochs_is_the_next_epoch() -> None:
    """With a seed its stream continues; a state before the first epoch keeps the unused seed."""
    graph = numbers(15).shuffle()
    loader = DataLoader2[int](graph, reading_service=service(0))
    loader.seed(8)
    states = []
    epochs = []
    for _ in range(3):
        states.append(loader.state_dict())
        epochs.append(list(loader))
    assert [state["position"] for state in states] == [None] * 3
    for state, epoch in zip(states, epochs, strict=True):
        assert list(DataLoader2.from_state(state, service(0))) == epoch


def test_layout() -> None:
    """A state has the documented keys and types, and our keys."""
    loader = DataLoader2[int](numbers(4), reading_service=service(0))
    loader.seed(3)
    next(iter(loader))
    state = loader.state_dict()
    assert list(state) == [
        SERIALIZED_DATAPIPE_KEY_NAME,
        READING_SERVICE_STATE_KEY_NAME,
        RANDOMNESS_STATE_KEY_NAME,
        "position",
        "read_by",
        "shuffle_seeds",
    ]
    assert (SERIALIZED_DATAPIPE_KEY_NAME, READING_SERVICE_STATE_KEY_NAME, RANDOMNESS_STATE_KEY_NAME) == (
        "serialized_datapipe",
        "reading_service_state",
        "randomness_state",
    )
    assert type(state["serialized_datapipe"]) is bytes
    assert state["reading_service_state"] is None
    seed, reset, now, initial = state["randomness_state"]
    assert (seed, reset, type(now), type(initial)) == (3, False, bytes, bytes)


@pytest.mark.parametrize(
    "graph", [numbers(12).shuffle().map(str).shuffle(buffer_size=3), SequenceWrapper("abcdefgh").shuffle()]
)
def test_without_a_service(graph: Any) -> None:
    """Shuffles draw their seeds as without a loader, a new seed in each epoch, and resume exactly."""
    torch.manual_seed(3)
    expected = [list(graph) for _ in range(3)]
    assert expected[0] != expected[1]
    torch.manual_seed(3)
    loader = DataLoader2[Any](graph)
    assert [list(loader), list(loader)] == expected[:2]
    iterator = iter(loader)
    begun = [next(iterator) for _ in range(4)]
    state = loader.state_dict()
    torch.rand(5)
    resumed = DataLoader2.from_state(state, None)  # type: ignore[arg-type]
    assert begun + list(iterator) == begun + list(resumed) == expected[2]


def test_another_reading_service() -> None:
    """Another reader refuses a position, but can begin the epoch again."""
    state, _, _ = split(numbers(24).sharding_filter().batch(3), 2, 3, seed=2)
    words = "the position is one of MultiProcessingReadingService with 2 workers, and this is "
    for other in (service(1), service(0), None, SequentialReadingService(service(2), service(0))):
        loader = DataLoader2.from_state(state, other)  # type: ignore[arg-type]
        with pytest.raises(StateError, match=words):
            iter(loader)
        loader.shutdown()
    with DataLoader2.from_state(state, service(1)) as loader:
        loader._restore_checkpoint_beginning_of_epoch()
        assert [x for batch in loader for x in batch] == list(range(24))


class _Late(InProcessReadingService):
    """A service that cannot begin before `time` is set."""

    time = False

    def initialize_iteration(self, seed_generator: Any, iter_reset_fn: Any = None) -> Any:
        seed_generator.generate_seed()
        if not _Late.time:
            raise ConnectionError("not there yet")
        return super().initialize_iteration(seed_generator, iter_reset_fn)


def test_an_epoch_that_cannot_begin_yet() -> None:
    """A second attempt has the loaded position and the same seeds; the older iterator is no longer valid."""
    _Late.time = True
    loader = DataLoader2[int](numbers(12).shuffle(), reading_service=_Late())
    loader.seed(5)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    between = loader.state_dict()
    following = list(loader)
    for saved, expected, position in ((state, rest, 4), (between, following, None)):
        loader = DataLoader2.from_state(saved, _Late())
        _Late.time = False
        for _ in range(2):
            with pytest.raises(ConnectionError):
                iter(loader)
            assert loader.state_dict()["position"] == position
        _Late.time = True
        again = loader.state_dict()
        assert list(loader) == list(DataLoader2.from_state(again, _Late())) == expected
    iterator = iter(loader)
    next(iterator)
    _Late.time = False
    with pytest.raises(ConnectionError):
        iter(loader)
    with pytest.raises(RuntimeError, match="invalidated"):
        next(iterator)


class _Interrupting:
    """Raises KeyboardInterrupt in its process, once, at an item."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, x: int) -> int:
        if x == self.at:
            self.at = -1
            raise KeyboardInterrupt
        return x


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_and_on(workers: int) -> None:
    """After a KeyboardInterrupt in `next` the same iterator continues where it was."""
    graph = OnlyHere(numbers(15).sharding_filter()).map(_Interrupting(6))
    read = MultiProcessingReadingService(workers, main_prefetch_cnt=0) if workers else service(0)
    with DataLoader2[int](graph, reading_service=read) as loader:
        iterator = iter(loader)
        found = [next(iterator) for _ in range(6)]
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert loader.state_dict()["position"] == 6
        assert found + list(iterator) == list(range(15))
        assert list(loader) == list(range(15))
        iterator = iter(loader)
        loader._interrupted = True
    assert list(iterator) == []  # it is shut down


WATCHED = [DataLoader2Iterator.__next__, DataLoader2._before_read, DataLoader2._drop_one, DataLoader2._end_epoch]


@pytest.mark.parametrize("workers", [0, 1])
def test_ctrl_c_at_every_place(workers: int) -> None:
    """Whether or not the item was read already: it comes, once and in order, and is counted once."""
    with DataLoader2[int](numbers(400).sharding_filter(), reading_service=service(workers)) as loader:
        items, found = iter(loader), list[int]()
        struck = at = 0
        while struck == at:
            at += 1
            try:
                with Interruption(at, WATCHED):
                    item = next(items)
            except KeyboardInterrupt:
                struck += 1
                item = next(items)
            found.append(item)
            assert found == list(range(at))
            assert loader.state_dict()["position"] == at
        assert struck > 3
        assert found + list(items) == list(range(400))


def test_the_last_epoch_from_its_beginning() -> None:
    """`_restore_checkpoint_beginning_of_epoch` works from the middle and the end, with and without a seed."""
    for seed in (None, 4):
        for taken in (3, 12):
            loader = DataLoader2[int](numbers(12).shuffle(), reading_service=service(0))
            if seed is not None:
                loader.seed(seed)
            iterator = iter(loader)
            begun = [next(iterator) for _ in range(taken)]
            state = loader.state_dict()
            whole = begun + list(iterator)
            torch.rand(1)
            other = DataLoader2.from_state(state, service(0))
            other._restore_checkpoint_beginning_of_epoch()
            assert list(other) == whole


def test_a_state_without_a_position_begins_the_next_epoch() -> None:
    """States of torchdata's layout have a graph and random numbers, but no position."""
    state, _, after = split(numbers(9).shuffle(), 0, 4, seed=6)
    del state["position"]
    assert [plain(x) for x in DataLoader2.from_state(state, service(0))] == after


def test_a_new_seed_begins_a_new_epoch() -> None:
    """`seed` after `load_state_dict` forgets the position."""
    state, _, _ = split(numbers(9).shuffle(), 0, 4, seed=6)
    loader = DataLoader2.from_state(state, service(0))
    loader.seed(6)
    assert len(list(loader)) == 9


def add_shuffle(datapipe: Any) -> Any:
    return datapipe.shuffle()


def test_adapters_are_applied_to_the_loaded_graph() -> None:
    """The graph of the state goes through the constructor's adapters."""
    state, _, _ = split(numbers(20).shuffle(), 0, 0, seed=6)
    loader = DataLoader2[int](None, Shuffle(False), service(0))
    loader.load_state_dict(state)
    assert list(loader) == list(range(20))


@pytest.mark.parametrize(("graph", "adapter"), [(numbers(6), add_shuffle), (numbers(6).shuffle(), Shuffle(False))])
def test_a_position_with_other_shuffles(graph: Any, adapter: Any) -> None:
    """It is refused where the rest of the epoch would be another; the epoch can begin anew."""
    saved = DataLoader2[int](graph)
    next(iter(saved))
    loader = DataLoader2[int](None, adapter)
    loader.load_state_dict(saved.state_dict())
    with pytest.raises(StateError, match=r"an epoch with . shuffles, and the graph has .,"):
        iter(loader)
    loader._restore_checkpoint_beginning_of_epoch()
    assert sorted(loader) == list(range(6))


def test_reading_on_after_an_error() -> None:
    """It gives nothing, and the position stays: a loader that goes on from there has the item that failed."""
    loader = DataLoader2[int](numbers(9).map(fails_at_5), reading_service=service(0))
    items = iter(loader)
    assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="five"):
        next(items)
    assert list(items) == []
    with (
        DataLoader2.from_state(loader.state_dict(), service(0)) as resumed,
        pytest.raises(ValueError, match="five"),
    ):
        next(iter(resumed))


def test_too_late_to_load() -> None:
    """The documented RuntimeError is raised once an iterator was made."""
    loader = DataLoader2[int](numbers(3))
    state = loader.state_dict()
    iter(loader)
    with pytest.raises(RuntimeError, match=r"iterator has already been created, `load_state_dict\(\)` can.t be called"):
        loader.load_state_dict(state)


def test_a_graph_that_does_not_fit_its_position() -> None:
    """A StateError is raised when the graph ends before the position."""
    state, _, _ = split(numbers(9), 0, 4, seed=6)
    state["position"] = 12
    with pytest.raises(StateError, match="the graph ended 3 items before the position to resume from"):
        list(DataLoader2.from_state(state, service(0)))


def test_a_limit_is_a_position() -> None:
    """A state taken at a pause resumes after it."""
    loader = DataLoader2[int](numbers(9).shuffle(), reading_service=SequentialReadingService(service(0)))
    iterator = iter(loader)
    iterator.limit(4)
    list(iterator)
    with pytest.warns(UserWarning, match="has no checkpoint"):
        state = loader.state_dict()
    iterator.limit(None)
    iterator.resume()
    rest = list(iterator)
    with pytest.warns(UserWarning, match="has no restore"):
        assert list(DataLoader2.from_state(state, SequentialReadingService(service(0)))) == rest
    loader.shutdown()


@pytest.mark.thorough
def test_another_process_resumes(tmp_path: Path) -> None:
    """The state is saved by `torch.save` here, and resumed by another program."""
    state, rest, _ = split(numbers(LENGTH).shuffle().sharding_filter(), 2, 9)
    torch.save(state, tmp_path / "state")
    script = (
        "import sys, torch\n"
        "from asyncloader.dataloader2 import DataLoader2, MultiProcessingReadingService\n"
        "state = torch.load(sys.argv[1], weights_only=False)\n"
        "with DataLoader2.from_state(state, MultiProcessingReadingService(2)) as loader:\n"
        "    print(list(loader))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "state")]
    found = script_server.run(command, env=environment(), cwd=ROOT, timeout=100)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == repr(rest)

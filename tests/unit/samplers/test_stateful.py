"""The samplers with a state: resumed anywhere they go on as if never stopped; other states are refused."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from asyncloader import DataLoader
from asyncloader.samplers.stateful import StatefulDistributedSampler, StatefulRandomSampler

SIZES = st.integers(1, 70)
COUNTS = st.none() | st.integers(1, 200)


def make(size: int = 10, replacement: bool = False, num_samples: int | None = None, seed: int = 5) -> Any:
    """A sampler whose own generator is seeded as after ``torch.manual_seed(seed)``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return StatefulRandomSampler(range(size), replacement, num_samples)


def read(iterator: Iterator[int], count: int) -> list[int]:
    return list(itertools.islice(iterator, count))


class TestRandom:
    """`StatefulRandomSampler` and its iterators."""

    @given(SIZES, st.booleans(), COUNTS, st.integers(0, 2**63), st.data())
    def test_resumed_anywhere(
        self, size: int, replacement: bool, num_samples: int | None, seed: int, data: st.DataObject
    ) -> None:
        """Resumed at any position of any epoch, by a sampler with another generator: the rest and later epochs."""
        options = (size, replacement, num_samples)
        sampler = make(*options, seed=seed)
        epochs = [list(sampler) for _ in range(4)]
        epoch = data.draw(st.integers(0, 2), label="epoch")
        stop = data.draw(st.integers(0, len(sampler)), label="stop")

        stopped = make(*options, seed=seed)
        for _ in range(epoch):
            list(stopped)
        iterator = iter(stopped)
        read(iterator, stop)
        state = iterator.state_dict()

        resumed = make(*options, seed=1)
        for _ in range(data.draw(st.integers(0, 2), label="epochs before loading")):
            list(resumed)
        iterator = iter(resumed)
        read(iterator, data.draw(st.integers(0, 3), label="indices before loading"))
        iterator.state_dict()  # it keeps the generator's text, which loading must renew
        iterator.load_state_dict(state)
        assert iterator.state_dict() == state
        assert list(iterator) == epochs[epoch][stop:]
        assert [list(resumed) for _ in range(3 - epoch)] == epochs[epoch + 1 :]

    def test_draws_from_the_global_generator(self) -> None:
        """One number is drawn when the sampler is made; none in epochs, states and loading."""
        torch.manual_seed(3)
        sampler = StatefulRandomSampler(range(50))
        here = torch.get_rng_state()
        torch.manual_seed(3)
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        assert torch.equal(torch.get_rng_state(), here)
        assert torch.equal(sampler.generator.get_state(), torch.Generator().manual_seed(seed).get_state())

        iterator = iter(sampler)
        read(iterator, 7)
        iterator.load_state_dict(iterator.state_dict())
        list(iterator)
        assert torch.equal(torch.get_rng_state(), here)

    def test_state_is_plain_small_and_detached(self) -> None:
        """The state survives JSON and weights-only pickles, does not change in later steps, and has a constant size."""
        iterator = iter(make(100_000))
        read(iterator, 60_000)
        state = iterator.state_dict()
        text = json.dumps(state)
        assert len(text) < 8000
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert torch.load(file, weights_only=True) == state
        following = read(iterator, 5)
        assert json.dumps(state) == text
        resumed = iter(make(100_000, seed=6))
        resumed.load_state_dict(json.loads(text))
        assert read(resumed, 5) == following

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"length": 11}, "length=11, but this one has length=10"),
            ({"replacement": True}, "replacement=True, but this one has replacement=False"),
            ({"yielded": 11}, "between 0 and 10 in the state, but is 11"),
            ({"yielded": True}, "yielded should be of type int, but is True"),
            ({"generator": b"AAAA"}, "generator should be of type str"),
            ({"generator": "AAAA"}, "no state of a torch.Generator"),
            ({"generator": "\u00e9"}, "no state of a torch.Generator"),
        ],
    )
    def test_refused(self, change: dict[str, Any], message: str) -> None:
        """Other states are refused with the values, and the sampler is unchanged."""
        sampler = make()
        expected = [list(epoch) for epoch in itertools.repeat(make(), 2)]
        iterator = iter(sampler)
        start = read(iterator, 4)
        with pytest.raises(ValueError, match=message):
            iterator.load_state_dict({**iterator.state_dict(), **change})
        assert [start + list(iterator), list(sampler)] == expected

    def test_refused_if_cut_or_incomplete(self) -> None:
        """A truncated or extended generator, zeros in its place, missing entries, and other types than dictionaries."""
        iterator = iter(make())
        state = iterator.state_dict()
        text = state["generator"]
        for generator in (text[:-4], text + "AAAA", "A" * len(text)):
            with pytest.raises(ValueError, match=r"no state of a torch\.Generator"):
                iterator.load_state_dict({**state, "generator": generator})
        for name in state:
            with pytest.raises(ValueError, match=f"Invalid state_dict: without {name}"):
                iterator.load_state_dict({key: value for key, value in state.items() if key != name})
        nothing: list[Any] = [None, [], "state", 3]
        for junk in nothing:
            with pytest.raises(ValueError, match="should be a dictionary, but is"):
                iterator.load_state_dict(junk)


class TestDistributed:
    """`StatefulDistributedSampler`."""

    @given(st.integers(1, 60), st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 2**40), st.data())
    def test_resumed_anywhere(
        self, size: int, replicas: int, shuffle: bool, drop_last: bool, seed: int, data: st.DataObject
    ) -> None:
        """The order is torch's on every rank; a resumed pass is the rest of it, and the next pass is whole."""
        if drop_last and size < replicas:
            size = replicas
        rank = data.draw(st.integers(0, replicas - 1), label="rank")
        epoch = data.draw(st.integers(0, 5), label="epoch")
        arguments = (range(size), replicas, rank, shuffle, seed, drop_last)
        plain: Any = DistributedSampler(*arguments)  # type: ignore[arg-type]
        plain.set_epoch(epoch)
        expected = list(plain)

        sampler = StatefulDistributedSampler(*arguments)
        sampler.set_epoch(epoch)
        stop = data.draw(st.integers(0, len(expected)), label="stop")
        assert read(iter(sampler), stop) == expected[:stop]
        state = json.loads(json.dumps(sampler.state_dict()))
        assert state == {"yielded": stop}

        resumed = StatefulDistributedSampler(*arguments)
        resumed.set_epoch(epoch)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert list(resumed) == expected[stop:]
        assert list(resumed) == expected

    @pytest.mark.parametrize("batch_size", [None, 2])
    @pytest.mark.parametrize("loader", [torch.utils.data.DataLoader, DataLoader])
    def test_loaded_by_hand_under_a_loader(self, loader: Any, batch_size: int | None) -> None:
        """A loader with workers calls ``iter()`` twice before it reads: the position is for the iterator it reads."""
        sampler = StatefulDistributedSampler(range(8), 1, 0, shuffle=False)
        sampler.load_state_dict({"yielded": 4})
        made = loader(range(8), batch_size, sampler=sampler, num_workers=1)
        for expected in ([4, 5, 6, 7], list(range(8))):
            assert [int(index) for batch in made for index in torch.as_tensor(batch).view(-1)] == expected

    def test_a_finished_pass(self) -> None:
        """The state of a finished pass gives an empty pass; the next is whole, even if the empty was never read."""
        sampler = StatefulDistributedSampler(range(6), 2, 0, shuffle=False)
        whole = list(sampler)
        state = sampler.state_dict()
        sampler.load_state_dict(state)
        assert list(sampler) == []
        assert list(sampler) == whole
        sampler.load_state_dict(state)
        iter(sampler)
        assert list(sampler) == whole

    def test_epoch_may_be_set_until_the_first_index(self) -> None:
        """Frameworks call ``iter()`` first and `set_epoch` then."""
        sampler = StatefulDistributedSampler(range(50), 1, 0)
        sampler.set_epoch(3)
        expected = list(sampler)
        sampler.set_epoch(0)
        sampler.load_state_dict({"yielded": 8})
        iterator = iter(sampler)
        sampler.set_epoch(3)
        assert list(iterator) == expected[8:]

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            ({"other": 1}, "^Invalid state_dict: without yielded"),
            (None, "^Invalid state_dict: it should be a dictionary, but is NoneType"),
            ({"yielded": False}, "^Invalid state_dict: yielded should be of type int, but is False"),
            ({"yielded": -1}, "^Cannot load state_dict with negative yielded value$"),
            ({"yielded": 6}, "yielded value 6: an epoch of this sampler has 5"),
        ],
    )
    def test_refused(self, state: Any, message: str) -> None:
        """Other states are refused, and the sampler is unchanged."""
        sampler = StatefulDistributedSampler(range(10), 2, 0, shuffle=False)
        sampler.load_state_dict({"yielded": 3})
        with pytest.raises(ValueError, match=message):
            sampler.load_state_dict(state)
        assert list(sampler) == [6, 8]

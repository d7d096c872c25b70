"""States with arbitrary values in any field are refused with a `StateError`, or loaded and resumed from.

Data path: schema -> checkpoint -> the next iterator. A state may come from a file that was truncated, edited, or
written by another program, so it may hold anything that JSON, pickle or ``torch.load`` can give.
"""

from __future__ import annotations

import base64
import copy
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from asyncloader import AsyncDataLoader, DataLoader, StateError
from asyncloader.samplers.generators import generator_state
from asyncloader.state.schema import VERSION, check_state

LENGTH = 12
HUGE = 10**5000  # more digits than Python will write
DEEP = 10_000  # deeper than Python recurses


class Indices(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """A stream of numbers that can save its place."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < LENGTH:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        at = state_dict["at"] if isinstance(state_dict, dict) and "at" in state_dict else None
        if not isinstance(at, int) or not 0 <= at <= LENGTH:
            raise ValueError("no state of this stream")
        self.at = at


MAKERS: dict[str, Callable[[Any], Any]] = {
    "seeded": lambda make: make(Indices(), batch_size=2, shuffle=True, seed=5),
    "torch": lambda make: make(Indices(), batch_size=2, shuffle=True, generator=torch.Generator()),
    "stream": lambda make: make(Stream(), batch_size=2),
}


def state_of(name: str) -> dict[str, Any]:
    """Return the state after two batches."""
    with MAKERS[name](DataLoader) as loader:
        batches = iter(loader)
        next(batches)
        next(batches)
        found: dict[str, Any] = loader.state_dict()
        return found


STATES = {name: state_of(name) for name in MAKERS}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def changed(name: str, path: str, value: Any) -> dict[str, Any]:
    """Return that loader's state with another value at the path (keys and numbers, with dots)."""
    state = copy.deepcopy(STATES[name])
    *inner, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place: Any = state
    for key in inner:
        place = place[key]
    place[last] = value
    return state


def generator_text(left: int, place: int) -> str:
    """Return the text of a torch generator that stands at this place in its block of 624 numbers."""
    content = bytearray(torch.Generator().get_state().numpy().tobytes())
    struct.pack_into("=QiiQ", content, 0, 5, left, 1, place)
    return base64.b64encode(content).decode()


# -------------------------------------------------------------------------------------------------- findings

FOUND: dict[str, tuple[dict[str, Any], str]] = {
    "a version of very many digits": (changed("seeded", "version", HUGE), "version should be .* but is <int>"),
    "true for a version": (changed("seeded", "version", True), "version should be .* but is True"),
    "a step of very many digits": (changed("seeded", "step", HUGE), "step is <int>"),
    "a step beyond 64 bits": (changed("seeded", "step", 1 << 64), "step=18446744073709551616"),
    "steps beyond of very many digits": (changed("seeded", "beyond", [HUGE]), "beyond=<list>"),
    "true beyond": (changed("seeded", "beyond", [5, True]), r"beyond=\[5, True\]"),
    "a length of very many digits": (changed("seeded", "length", HUGE), "length is <int>"),
    "a batch size of very many digits": (changed("seeded", "batch_size", -HUGE), "batch_size is <int>"),
    "a seed nested too deep": (changed("seeded", "seed", nested(DEEP)), r"seed is \[+\.\.\.\]+$"),
    "a mode of a million letters": (changed("seeded", "mode", "s" * 1_000_000), r"mode='s{1,99}\.\.\.s{1,99}', but"),
    "a drop_last of a million letters": (
        changed("seeded", "drop_last", "s" * 1_000_000),
        r"drop_last is 's{1,99}\.\.\.s{1,99}'$",
    ),
    "a sampler's state nested too deep": (
        changed("seeded", "sampler", {"at": 0, "ended": False, "sampler": nested(DEEP), "iterator": None}),
        "cannot be copied: RecursionError",
    ),
    "a key of others nested too deep": (
        changed("seeded", "other", nested(DEEP)),
        "cannot be copied: RecursionError",
    ),
    "a cursor nested too deep": (changed("stream", "workers.cursors.0.dataset", nested(DEEP)), "cannot be copied"),
    "a sampler of very many steps": (
        changed("seeded", "sampler", {"at": HUGE, "ended": False, "sampler": None, "iterator": None}),
        "at is <int>",
    ),
    "a stream without its workers": (changed("stream", "workers", None), "does not say where the workers stood"),
    "a number of workers of very many digits": (changed("stream", "workers.num_workers", HUGE), "num_workers is <int>"),
    "a negative base seed": (changed("stream", "seeds.base", -1), "base=-1"),
    "a base seed that torch does not take": (changed("stream", "seeds.base", 1 << 64), "base=184467"),
    "a shared seed that torch does not take": (changed("stream", "seeds.shared", 1 << 90), "shared=1237"),
    "true batches": (changed("stream", "workers.given", [True]), "a worker gave True batches"),
    "batches beyond 64 bits": (changed("stream", "workers.given", [1 << 63]), "a worker gave 9223372036854775808"),
    "a rank of very many digits": (changed("stream", "workers.rank", HUGE), "rank is <int>"),
    "a generator that stands beyond its block": (
        changed("torch", "generators.own", generator_text(624, 624)),
        "generator 'own' is none of torch's",
    ),
    "a generator that stands far beyond its block": (
        changed("torch", "generators.own", generator_text(1, (1 << 40) + 1)),
        "generator 'own' is none of torch's",
    ),
    "a generator's name nested too deep": (
        changed("torch", "generators", {"ä" * 9999: "!!"}),
        r"generator 'ä{1,99}\.\.\.ä{1,99}'",
    ),
}


@pytest.mark.parametrize("make", [DataLoader, AsyncDataLoader])
@pytest.mark.parametrize("what", FOUND)
def test_what_was_found(what: str, make: Any) -> None:
    """Each state is refused with a message of bounded length, and the loader is unchanged."""
    state, words = FOUND[what]
    name = next(
        name
        for name, known in STATES.items()
        if known["kind"] == state["kind"]
        and known["order"] == state["order"]
        and (known["mode"] == state["mode"] or len(state["mode"]) > 9)
    )
    with MAKERS[name](make) as loader:
        before = loader.state_dict()
        with pytest.raises(StateError, match=words) as caught:
            loader.load_state_dict(state)
        assert len(str(caught.value)) < 1000
        assert loader.state_dict() == before


@settings(deadline=None)
@given(st.integers(-3, 700), st.one_of(st.integers(0, 700), st.integers(0, (1 << 64) - 1)))
@example(624, 624)
@example(624, 1)
@example(2, 624)
@example(1, 624)
@example(1, (1 << 32) + 5)
def test_a_generators_place_is_in_its_block(left: int, place: int) -> None:
    """An accepted generator draws its `left` numbers from within torch's block of 624, whatever the two numbers are."""
    text = generator_text(left, place)
    try:
        generator_state(text)
    except ValueError:
        assert not (1 <= left <= 624 and left + place in (1, 625))  # where torch's own generators stand
    else:
        assert 1 <= left <= 624
        assert place + left - 1 <= 624


@settings(deadline=None)
@given(st.integers(0, 3000))
def test_every_place_of_a_true_generator_is_accepted(drawn: int) -> None:
    """However many numbers were drawn, and of whichever kind."""
    generator = torch.Generator().manual_seed(drawn)
    torch.rand(drawn, generator=generator)
    torch.randn(drawn % 7, generator=generator)
    text = base64.b64encode(generator.get_state().numpy().tobytes())
    assert torch.equal(generator_state(text), generator.get_state())


# ------------------------------------------------------------------------------------------------- any value

numbers = st.one_of(
    st.integers(-3, 15),
    st.integers(),
    st.sampled_from([1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), 1 << 2000]),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.floats(), st.text(max_size=4), st.binary(max_size=4))
texts = st.sampled_from([generator_text(624, 1), generator_text(624, 624), generator_text(0, 0), "", "!!", "AAAA"])
values = st.recursive(
    st.one_of(scalars, texts),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [path] if path else []
    parts: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in parts:
        found += paths(inner, (*path, key))
    return found


@st.composite
def hostile_states(draw: st.DrawFn) -> tuple[str, Any]:
    """Draw a loader's state with one to three values replaced, left out or added, anywhere; or any value."""
    name = draw(st.sampled_from(list(STATES)))
    if not draw(st.integers(0, 30)):
        return name, draw(values)
    state = copy.deepcopy(STATES[name])
    for _ in range(draw(st.integers(1, 3))):
        *inner, last = draw(st.sampled_from(paths(state)))
        place: Any = state
        for key in inner:
            place = place[key]
        action = draw(st.integers(0, 9))
        if action == 0:
            del place[last]
        elif action == 1 and isinstance(place, dict):
            place[draw(st.text(max_size=3))] = draw(values)
        else:
            place[last] = draw(st.one_of(values, numbers))
    return name, state


@settings(deadline=None)
@given(hostile_states())
@example(("stream", changed("stream", "step", 3)))
@example(("seeded", changed("seeded", "step", 6)))
@example(("seeded", STATES["seeded"] | {"epoch": 1, "step": 8}))
@example(("torch", changed("torch", "sampler", {"at": 1, "ended": True, "sampler": None, "iterator": None})))
def test_any_state_is_refused_or_gone_on_from(drawn: tuple[str, Any]) -> None:
    """`load_state_dict` raises `StateError` and changes nothing, or accepts the state: then two epochs end, each
    with samples of the dataset only, or with an error.
    """
    name, state = drawn
    given_state = copy.copy(state)
    with MAKERS[name](DataLoader) as loader:
        before = loader.state_dict()
        try:
            loader.load_state_dict(state)
        except StateError as error:
            assert 5 < len(str(error)) < 2000  # noqa: PT017 - either outcome will do
            assert loader.state_dict() == before
            return
        if not state:
            return
        assert state.keys() == given_state.keys()
        for _ in range(2):
            try:
                seen = [int(index) for batch in loader for index in batch]
            except (ValueError, TypeError, AttributeError, KeyError, RuntimeError):
                continue  # raised by the user's own sampler or dataset for a state of its own
            assert set(seen) <= set(range(LENGTH))
            assert len(seen) == len(set(seen)) or name == "torch"


@settings(deadline=None)
@given(values)
@example({"version": VERSION})
def test_no_value_is_a_state_by_chance(value: Any) -> None:
    """Every value raises a `StateError` with a text of bounded length."""
    with pytest.raises(StateError) as caught:
        check_state(value)
    assert 5 < len(str(caught.value)) < 1000

"""States from outside are accepted if they are complete, in this layout and of an equal loader; others are refused.

The error says why.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncloader.base.events import Cursor
from asyncloader.errors import StateError
from asyncloader.state.schema import (
    VERSION,
    check_exact,
    check_length,
    check_state,
    check_workers,
    compare,
)

GENERATOR = base64.b64encode(torch.Generator().get_state().numpy().tobytes()).decode()


def cursor(**changes: Any) -> dict[str, Any]:
    plain = {
        "batches": 2,
        "samples": 8,
        "ended": False,
        "dataset": {"at": 8},
        "iterator": None,
        "problem": "",
        "itself": "",
    }
    return {**plain, **changes}


def workers(**changes: Any) -> dict[str, Any]:
    plain = {
        "num_workers": 2,
        "rank": 0,
        "world_size": 1,
        "next": 1,
        "given": [3, 2],
        "cursors": [cursor(), None],
    }
    return {**plain, **changes}


def state(**changes: Any) -> dict[str, Any]:
    plain = {
        "version": VERSION,
        "mode": "seeded",
        "kind": "map",
        "seed": 7,
        "length": 100,
        "batch_size": 8,
        "drop_last": False,
        "order": "shuffled",
        "arguments": {"seed": 1, "lengths": "0123456789abcdef"},
        "data_digest": "0123456789abcdef",
        "world_size": 1,
        "epoch": 3,
        "step": 5,
        "beyond": [7, 9],
        "finished": False,
        "sampler": {"at": 4, "ended": False, "sampler": {"n": 1}, "iterator": None},
        "generators": {"global": GENERATOR},
        "seeds": {"rank": 0, "base": 1 << 62, "shared": None},
        "workers": workers(),
    }
    return {**plain, **changes}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in state().items() if key != name}


@pytest.mark.parametrize(
    "through",
    [
        lambda s: json.loads(json.dumps(s)),
        lambda s: pickle.loads(pickle.dumps(s)),
        lambda s: {**s, "beyond": tuple(s["beyond"]), "workers": workers(given=(3, 2), cursors=(cursor(), None))},
    ],
    ids=["json", "pickle", "tuples"],
)
def test_a_state_survives_its_storage(through: Callable[[Any], Any]) -> None:
    """States survive JSON, pickle, and savers that turn lists into tuples."""
    checked = check_state(through(state()))
    assert list(checked["beyond"]) == [7, 9]
    assert list(checked["workers"]["given"]) == [3, 2]


def test_keys_of_others_are_left_out() -> None:
    """Frameworks add keys to states: these are ignored at every level and left out of the copy."""
    extra = {"extra": 1}
    given_state = state(workers=workers(cursors=[cursor(**extra), None], **extra), **extra)
    checked = check_state(given_state)
    assert "extra" not in checked
    assert Cursor(**checked["workers"]["cursors"][0]) == Cursor(**cursor())


def test_accelerates_way_to_say_that_an_epoch_is_over() -> None:
    """``_iterator_finished=True`` means that the epoch is over; False or any other value changes nothing."""
    checked = check_state(state(_iterator_finished=True))
    assert (checked["finished"], checked["cut"]) == (True, True)
    for value in (False, None, "yes"):
        assert check_state(state(_iterator_finished=value))["finished"] is False
    for value in (False, True):
        checked = check_state(state(finished=True, _iterator_finished=value))
        assert (checked["finished"], checked["cut"]) == (True, False)


def test_other_loaders_states_are_told_apart() -> None:
    """A dictionary without a version is not asyncloader's; torchdata's states are recognised."""
    with pytest.raises(StateError, match=r"not a state of asyncloader: it has no 'version'; give what"):
        check_state({"epoch": 1})
    for name in ("_snapshot", "_num_yielded"):
        with pytest.raises(StateError, match="looks like one of torchdata's"):
            check_state({name: 1})


@pytest.mark.parametrize("version", [0, -1, "1", None, 1.0])
def test_version_is_a_positive_integer(version: Any) -> None:
    """The error shows the value."""
    with pytest.raises(StateError, match=f"version should be a positive integer, but is {version!r}"):
        check_state(state(version=version))


def test_newer_states_name_both_versions() -> None:
    """The error for a state of a newer version names that version and the version that can be read."""
    with pytest.raises(StateError, match=f"version {VERSION + 1}, but .* reads version {VERSION};"):
        check_state(state(version=VERSION + 1, mode=None))


@pytest.mark.parametrize("name", sorted(state().keys() - {"version", "world_size", "arguments", "data_digest"}))
def test_a_truncated_state_names_what_is_missing(name: str) -> None:
    """Every key is needed except the number of ranks, which states of earlier versions do not have."""
    with pytest.raises(StateError, match=f"incomplete: '{name}' missing"):
        check_state(without(name))


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "seed": (state(seed="7"), "seed is '7'"),
    "drop_last": (state(drop_last=0), "drop_last is 0"),
    "true is no number": (state(step=True), "step is True"),
    "epoch": (state(epoch=-1), "epoch=-1"),
    "epoch beyond 64 bits": (state(epoch=1 << 64), "epoch=18446744073709551616"),
    "step": (state(step=-2, beyond=[]), "step=-2"),
    "beyond the step": (state(beyond=[6, 5]), r"step=5 but beyond=\[6, 5\]"),
    "beyond of words": (state(beyond=["6"]), r"beyond=\['6'\]"),
    "sampler after the step": (
        state(sampler={"at": 6, "ended": False, "sampler": 1, "iterator": 1}),
        "step=5 but the sampler's is 6",
    ),
    "sampler before the start": (
        state(sampler={"at": -1, "ended": False, "sampler": 1, "iterator": 1}),
        "sampler's is -1",
    ),
    "generators": (state(generators={"global": 3}), "generator 'global'"),
    "generators of noise": (state(generators={"global": "!!"}), "generator 'global'"),
    "generators cut short": (state(generators={"global": GENERATOR[:100]}), "generator 'global'"),
    "generators of zeros": (state(generators={"own": base64.b64encode(bytes(5056)).decode()}), "generator 'own'"),
    "counts": (state(workers=workers(given=[1])), "num_workers=2, but 1 counts and 2 cursors"),
    "next": (state(workers=workers(next=2)), "next"),
    "negative count": (state(workers=workers(given=[3, -1])), "a worker gave -1 batches"),
    "count of truths": (state(workers=workers(given=[3, True])), "a worker gave True batches"),
    "count of words": (state(workers=workers(given=[3, "x"])), "a worker gave 'x' batches"),
    "cursor": (state(workers=workers(cursors=[3, None])), "a cursor is int"),
    "cursor after the end": (state(workers=workers(cursors=[cursor(batches=4), None])), "after 4 of 3 batches"),
    "cursor of a dataset that iterates nobody": (
        state(workers=workers(cursors=[cursor(itself="often"), None])),
        "'itself' is 'often'",
    ),
    "seeds of words": (state(seeds={"rank": 0, "base": "1", "shared": None}), "'seeds' is broken: base is '1'"),
    "seeds below zero": (state(seeds={"rank": -1, "base": 1, "shared": None}), "rank=-1 of the seeds"),
    "cursor of words": (state(workers=workers(cursors=[cursor(ended="no"), None])), "ended is 'no'"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_state_names_what_is_wrong(what: str) -> None:
    """Impossible values are refused; the error has the name and the value."""
    given_state, words = BROKEN[what]
    with pytest.raises(StateError, match=words):
        check_state(given_state)


# ------------------------------------------------------------------------------------------ comparing


def test_the_number_of_ranks() -> None:
    """States of earlier versions do not have it."""
    assert check_state(without("world_size"))["world_size"] is None
    for broken in (0, -1, True, "4"):
        with pytest.raises(StateError, match="broken: world_size="):
            check_state(state(world_size=broken))


def test_batch_samplers_want_as_many_ranks() -> None:
    """With a user's batch sampler a step is one batch per rank: no batch size makes up for other ranks."""
    of_batches = state(order="batch_sampler", batch_size=4)
    with pytest.raises(StateError, match="a step is 4 batches, one a rank, but this loader has world_size=2"):
        compare(of_batches, {**of_batches, "batch_size": 2}, 2)
    with pytest.raises(StateError, match=r"global batch of 4 samples, but this loader.s is 8"):
        compare(of_batches, state(batch_size=8), 2)


def test_another_ranks_stream_is_refused() -> None:
    """The error names both ranks; a different number of workers is named, too."""
    with pytest.raises(StateError, match="rank 0 of 1, but this is rank 1 of 2"):
        check_workers(workers(), 2, 1, 2)
    with pytest.raises(StateError, match="rank 0 of 1, but this is rank 0 of 2"):
        check_workers(workers(), 2, 0, 2)
    with pytest.raises(StateError, match="num_workers=2, but this loader has num_workers=3"):
        check_workers(workers(), 3, 0, 1)
    check_workers(workers(), 2, 0, 1)


def test_exact_resuming_needs_a_place_in_every_stream() -> None:
    """A copy that gave batches but has no cursor is refused, and the error says how to resume without.

    A copy that gave no batches resumes at its start.
    """
    with pytest.raises(StateError, match=r"Recovery\(allow_replay=True\).*5 batches"):
        check_exact(workers(), stream=True)
    check_exact(workers(given=[3, 0]), stream=True)
    check_exact(workers(given=[2, 0]), stream=False)


def test_a_map_datasets_state_must_be_that_of_the_last_batch() -> None:
    """A cursor before the last batch is refused: later batches cannot be read again without their indices."""
    with pytest.raises(StateError, match=r"worker 0 had made 3 batches, but .* after 2: with snapshot_every_n_steps=0"):
        check_exact(workers(given=[3, 0]), stream=False)
    with pytest.raises(StateError, match="snapshot_every_n_steps=0"):
        check_exact(workers(given=[2, 1], cursors=[None, None]), stream=False)


def test_a_position_beyond_the_epochs_end_is_refused() -> None:
    """The error has the number of delivered batches and the epoch's length; an unknown length refuses nothing."""
    for checked, steps in ((state(), 10), (state(), None), (state(step=5, beyond=[]), 5)):
        check_length(checked, steps)
    with pytest.raises(StateError, match="10 batches of an epoch were delivered that has 9"):
        check_length(state(), 9)
    with pytest.raises(StateError, match="5 batches of an epoch were delivered that has 4"):
        check_length(state(beyond=[]), 4)

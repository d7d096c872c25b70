"""Defines the layout of a loader's state, and checks states that come from outside. Pure.

Data path: none.

A state is a dictionary of plain values (safe for ``torch.load(weights_only=True)``, and for JSON if the user's own
states are):

    version        this layout's number
    mode           "seeded" or "torch"
    kind           "map" or "iterable"
    seed, length, batch_size, drop_last, order
                   must agree with the loader; `batch_size` is that of all ranks together, and may differ where
                   `in_batches_of` finds the position in other batches
    arguments      those of the sampler from which its order follows, by name; None: it does not name them. They must
                   agree within an epoch. Not in states of earlier versions
    data_digest    digest of the data that a map dataset reads; None: it does not know. It must agree within an epoch.
                   Not in states of earlier versions
    world_size     number of ranks that shared a batch. Not read; not in states of earlier versions
    epoch          the epoch's number
    step           batches of each rank that were delivered, without a gap
    beyond         numbers of those delivered after a gap (out of order), ascending
    finished       whether the user has seen the epoch's end
    sampler        {at, ended, sampler, iterator}: a stateful sampler's own states after `at` steps, and whether it had
                   seen its end by then; or None
    generators     {global, own}: generators that the sampler drew its order from (base64); of a stream, in torch mode
                   with `generator=`, {own}: that generator, from which later epochs are drawn; or None
    seeds          {rank, base, shared}: the epoch's base seed, from which the workers' seeds count, and the datapipes'
                   shared seed, or None; both of the rank that saved them. After the end of an epoch: the next's.
                   None in seeded mode, and where they are unknown
    workers        for datasets that are read as streams or have a state: {num_workers, rank, world_size, next, given,
                   cursors}, or None. `given` and `cursors` have an entry for each worker; or, with another key
                   `loader_streams`, for each stream. See `workers/fetch/dataset_state.py`

All ranks of a map dataset in seeded mode have the same state. Keys that are not listed are ignored: Accelerate adds
some. Only its key ``_iterator_finished`` is read: it says that the epoch is over.

In seeded mode a sample's random numbers follow from its place in the epoch's order, not from its batch. Where that
order is computed from the seed, the position is the number of delivered samples: a loader with other batches, by
`batch_size` or by the number of ranks, goes on from it if one of its own batches begins there (`in_batches_of`).
"""

from __future__ import annotations

import copy
import reprlib
from typing import Any

from asyncloader.errors import StateError
from asyncloader.samplers.generators import generator_state

VERSION = 2

EXPECTED = ("mode", "kind", "seed", "length", "batch_size", "drop_last", "order")
"""Keys whose values must be the same in state and loader."""

_TYPES: dict[str, tuple[type, ...]] = {
    "mode": (str,),
    "kind": (str,),
    "seed": (int, type(None)),
    "length": (int, type(None)),
    "batch_size": (int, type(None)),
    "drop_last": (bool,),
    "order": (str,),
    "epoch": (int,),
    "step": (int,),
    "beyond": (list, tuple),
    "finished": (bool,),
    "sampler": (dict, type(None)),
    "generators": (dict, type(None)),
    "seeds": (dict, type(None)),
    "workers": (dict, type(None)),
}
_SAMPLER: dict[str, tuple[type, ...]] = {"at": (int,), "ended": (bool,), "sampler": (object,), "iterator": (object,)}
_WORKERS: dict[str, tuple[type, ...]] = {
    "num_workers": (int,),
    "rank": (int,),
    "world_size": (int,),
    "next": (int,),
    "given": (list, tuple),
    "cursors": (list, tuple),
}
_SEEDS: dict[str, tuple[type, ...]] = {"rank": (int,), "base": (int,), "shared": (int, type(None))}
_CURSOR: dict[str, tuple[type, ...]] = {
    "batches": (int,),
    "samples": (int,),
    "ended": (bool,),
    "dataset": (object,),
    "iterator": (object,),
    "problem": (str,),
    "itself": (str,),
}
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 200
_MOST = 1 << 63  # bound of numbers that torch and the workers' frames accept


def check_state(given: Any) -> dict[str, Any]:
    """Check a state. Returns a copy with the known keys, and `cut`: whether only Accelerate's key says that it is
    finished.

    Raises:
        StateError: it is not a state, is incomplete or damaged, or is of another version.
    """
    if not isinstance(given, dict):
        raise StateError(f"a loader's state is a dictionary, but got {type(given).__name__}")
    if "version" not in given:
        torchdatas = "_snapshot" in given or "_num_yielded" in given
        other = "it looks like one of torchdata's" if torchdatas else "give what a loader's state_dict() returned"
        raise StateError(f"this is not a state of asyncloader: it has no 'version'; {other}")
    version = given["version"]
    if not _is_count(version) or not version:
        raise StateError(f"the state's version should be a positive integer, but is {_show(version)}")
    if version > VERSION:
        raise StateError(
            f"the state is of version {version}, but this asyncloader reads version {VERSION}; "
            "load it with the version of asyncloader that saved it, or a newer one"
        )
    if version < VERSION:
        raise StateError(
            f"the state is of version {version}, which this asyncloader does not read any more: it reads version "
            f"{VERSION}. Finish the epoch with the version of asyncloader that saved it, or begin it anew"
        )
    _check_fields(given, _TYPES, "the state")
    ranks, arguments, step, beyond = given.get("world_size"), given.get("arguments"), given["step"], given["beyond"]
    _require(ranks is None or (_is_count(ranks) and ranks), f"world_size={_show(ranks)}")
    _require(arguments is None or _has_names(arguments), f"arguments={_show(arguments)}")
    _require(isinstance(given.get("data_digest"), str | None), f"data_digest={_show(given.get('data_digest'))}")
    for name in ("epoch", "step"):
        _require(_is_count(given[name]), f"{name}={given[name]}")
    _require(all(_is_count(each) and each > step for each in beyond), f"step={step} but beyond={_show(list(beyond))}")
    if (sampler := given["sampler"]) is not None:
        _check_fields(sampler, _SAMPLER, "the state's 'sampler'")
        _require(0 <= sampler["at"] <= step, f"step={step} but the sampler's is {sampler['at']}")
    for name, text in (given["generators"] or {}).items():
        _check_generator(name, text)
    if (seeds := given["seeds"]) is not None:
        _check_fields(seeds, _SEEDS, "the state's 'seeds'")
        for name in _SEEDS:
            _require(seeds[name] is None or _is_count(seeds[name]), f"{name}={seeds[name]} of the seeds")
    if given["workers"] is not None:
        _check_worker_part(given["workers"])
    _require(
        given["workers"] is not None or given["kind"] != "iterable",
        "it is a stream's, but does not say where the workers stood",
    )
    try:
        # The user's own states, too: the caller may change them after this call.
        whole = copy.deepcopy(given)
    except Exception as error:  # the user's own states may be any objects
        raise StateError(f"the state cannot be copied: {type(error).__name__}: {error}") from error
    state = {name: whole[name] for name in ("version", *_TYPES)}
    state |= {"world_size": ranks, "arguments": whole.get("arguments"), "data_digest": whole.get("data_digest")}
    if state["workers"] is not None:  # only the keys of a cursor
        cursors = [cursor and {name: cursor[name] for name in _CURSOR} for cursor in state["workers"]["cursors"]]
        state["workers"]["cursors"] = cursors
    state["cut"] = given.get("_iterator_finished") is True and not state["finished"]
    if state["cut"]:
        state["finished"] = True
        state["seeds"] = None  # these are not the next epoch's
    return state


def _check_generator(name: Any, text: Any) -> None:
    try:
        generator_state(text)  # now, and not when it is used: with damaged states torch would read beyond their end
    except ValueError:
        raise StateError(f"the state is broken: that of the generator {_show(name)} is none of torch's") from None
    _require(name in ("global", "own"), f"there is no generator {_show(name)}")


def _check_worker_part(workers: dict[str, Any]) -> None:
    _check_fields(workers, _WORKERS, "the state's 'workers'")
    streams, counts, cursors = workers.get("loader_streams"), workers["given"], workers["cursors"]
    _require(streams is None or (_is_count(streams) and streams), f"loader_streams={_show(streams)}")
    # Without workers a single copy of the dataset is read, in the main process.
    expected, of = max(1, workers["num_workers"]), f"num_workers={workers['num_workers']}"
    if streams is not None:
        expected, of = streams, f"loader_streams={streams}"
    _require(0 <= workers["next"] < expected, f"{of}, but next={workers['next']}")
    entries = f"{of}, but {len(counts)} counts and {len(cursors)} cursors"
    _require(len(counts) == len(cursors) == expected, entries)
    for given, cursor in zip(counts, cursors, strict=True):
        _require(_is_count(given), f"a worker gave {_show(given)} batches")
        if cursor is None:
            continue
        _require(isinstance(cursor, dict), f"a cursor is {type(cursor).__name__}")
        _check_fields(cursor, _CURSOR, "a cursor of the state")
        _require(0 <= cursor["batches"] <= given, f"a cursor after {cursor['batches']} of {given} batches")
        places = ("", "within", "before", "ended")
        _require(cursor["itself"] in places, f"a cursor's 'itself' is {_show(cursor['itself'])}")


def _require(holds: object, problem: str) -> None:
    if not holds:
        raise StateError(f"the state is broken: {problem}")


def _has_names(arguments: Any) -> bool:
    return isinstance(arguments, dict) and all(isinstance(name, str) for name in arguments)


def _is_count(value: Any) -> bool:
    # True and False are integers to Python, but not here.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _show(value: Any) -> str:
    """Return a value as text for an error. `repr` fails for numbers of too many digits, and takes for ever for lists
    that have the same lists twice, many levels deep.
    """
    try:
        text = _REPR.repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _check_fields(given: Any, types: dict[str, tuple[type, ...]], what: str) -> None:
    missing = [name for name in types if name not in given]
    if missing:
        raise StateError(f"{what} is incomplete: {', '.join(map(repr, missing))} missing")
    for name, allowed in types.items():
        value = given[name]
        right = isinstance(value, allowed)
        if right and allowed[0] is int and value is not None:
            # Bounded, because errors show these numbers, and Python refuses to format integers of thousands of digits.
            right = not isinstance(value, bool) and value.bit_length() <= 128
        if not right:
            raise StateError(f"{what} is broken: {name} is {_show(value)}")


def compare(state: dict[str, Any], expected: dict[str, Any], world_size: int) -> None:
    """Check that the state was saved by a loader with the same options. `world_size`: the ranks that share its batches.

    Raises:
        StateError: an option differs; the text names both values.
    """
    for name in EXPECTED:
        saved, here = state[name], expected[name]
        if saved == here:
            continue
        if name == "batch_size" and state["order"] == expected["order"] == "batch_sampler":
            raise StateError(
                f"the state was saved where a step is {saved} batches, one a rank, but this loader has "
                f"world_size={here}; resume with as many ranks"
            )
        if name == "batch_size" and isinstance(saved, int) and isinstance(here, int):
            raise StateError(explain_batch_change(state, here, world_size))
        raise StateError(
            f"the state was saved with {name}={_show(saved)}, but this loader has {name}={here!r}; make the loader as "
            "it was, or begin anew without the state"
        )
    # At an epoch's beginning and end a sampler may be replaced, and the data: no sample is lost.
    if not state["finished"] and (state["step"] or state["beyond"]):
        _compare_arguments(state["arguments"], expected.get("arguments"))
        saved, here = state["data_digest"], expected.get("data_digest")
        if None not in (saved, here) and saved != here:
            raise StateError(
                "the state was saved within an epoch of other data: the dataset's files, their sizes, numbers of "
                "samples or version have changed. Give the dataset the data as it was (of the Hugging Face Hub the "
                "commit: hf://datasets/owner/name@commit; of Lance the version), or begin anew without the state"
            )


def _compare_arguments(saved: dict[str, Any] | None, here: dict[str, Any] | None) -> None:
    if saved is None or here is None:
        return
    for name in [*here, *saved]:
        if (name in saved, saved.get(name)) != (name in here, here.get(name)):
            raise StateError(
                f"the state was saved within an epoch of a sampler with {name}={_show(saved.get(name))}, but this "
                f"loader's has {name}={here.get(name)!r}, and another order; make the sampler as it was, or begin anew "
                "without the state"
            )


def check_generators(generators: dict[str, Any] | None, *, own: bool) -> None:
    """Check that the sampler draws from the same generators. `own`: whether it has a generator of its own here.

    Raises:
        StateError: it does not, so its order would differ.
    """
    if generators is None or ("own" in generators) == own:
        return
    if own:
        raise StateError(
            "the state's order was drawn from torch's global generator, but this loader's sampler has one of its own; "
            "leave generator= out, as before"
        )
    raise StateError(
        "the state was saved by a loader whose sampler had a generator of its own, and here it has none: pass "
        "generator= as before"
    )


def check_length(state: dict[str, Any], steps: int | None) -> None:
    """Check that an epoch of `steps` steps (None: unknown) contains the state's position.

    Raises:
        StateError: the position is beyond the end.
    """
    last = max([state["step"], *(step + 1 for step in state["beyond"])])
    if steps is not None and last > steps:
        raise StateError(f"the state is broken: {last} batches of an epoch were delivered that has {steps}")


def check_workers(
    workers: dict[str, Any], num_workers: int, rank: int, world_size: int, loader_streams: int | None = None
) -> None:
    """Check that this loader has the workers, or the streams, and the rank whose dataset positions were saved.

    Args:
        workers: the checked part of a state.
        num_workers: of this loader.
        rank: of this loader.
        world_size: of this loader.
        loader_streams: of its dataset; None: each worker reads a copy.

    Raises:
        StateError: the number of workers or streams differs, or it is another rank's state.
    """
    of_shards = "leases" in workers
    instead = ". A RemoteIterableDataset with streams= has states that fit any number of workers and ranks"
    if (workers["rank"], workers["world_size"]) != (rank, world_size):
        raise StateError(
            f"the state is that of rank {workers['rank']} of {workers['world_size']}, but this is rank {rank} of "
            f"{world_size}: where a rank stands in its own stream is of no use to another. Save and load one state a "
            f"rank, with as many ranks{instead if of_shards else ''}"
        )
    saved_streams = workers.get("loader_streams")
    if saved_streams != loader_streams:
        raise StateError(explain_streams(saved_streams, loader_streams, workers["num_workers"]))
    if saved_streams is None and workers["num_workers"] != num_workers:  # else whichever worker goes on with them
        why = (
            f"each worker goes on with the shards that were assigned to it{instead}"
            if of_shards
            else "each worker has read its own copy of the dataset, and only as many can go on. An "
            "IterableDataset with an attribute loader_streams is that number of copies on any number of workers, and "
            "its states fit any number"
        )
        raise StateError(
            f"the state was saved with num_workers={workers['num_workers']}, but this loader has "
            f"num_workers={num_workers}: {why}"
        )


def explain_streams(saved: int | None, here: int | None, num_workers: int) -> str:
    """Return the error's text for a state of another number of streams. None: the dataset had, or has, no
    `loader_streams`. `num_workers`: of the loader that saved the state.
    """
    if saved is None:
        return (
            f"the state was saved with num_workers={num_workers}, where the dataset had no loader_streams and each "
            f"worker read a copy, but here the dataset has loader_streams={here}: load it without the attribute and "
            f"with num_workers={num_workers}, or begin anew without the state"
        )
    return (
        f"the state was saved with loader_streams={saved} on the dataset, but here "
        + ("it has no such attribute" if here is None else f"it has loader_streams={here}")
        + ": where a stream stands is of no use to another. "
        f"Have the dataset say loader_streams={saved} again, or begin anew without the state"
    )


def check_exact(workers: dict[str, Any], *, stream: bool) -> None:
    """Check that every copy of the dataset that was read can be resumed exactly.

    Raises:
        StateError: the position of a copy is unknown.
    """
    kind = "worker" if workers.get("loader_streams") is None else "stream"
    for worker, (given, cursor) in enumerate(zip(workers["given"], workers["cursors"], strict=True)):
        if cursor is not None and cursor["problem"]:
            raise StateError(f"the dataset's state could not be saved in {kind} {worker}: {cursor['problem']}")
        taken = None if cursor is None else cursor["batches"]
        if not stream and given and taken != given:
            raise StateError(
                f"worker {worker} had made {given} batches, but its dataset's state "
                f"{'was never taken' if taken is None else f'is that after {taken}'}: "
                "with snapshot_every_n_steps=0 a map dataset's state cannot be found again"
            )
        if stream and given and cursor is None:
            raise StateError(
                "neither the dataset nor its iterator has state_dict and load_state_dict, so its position cannot be "
                "found again exactly. With recovery=Recovery(allow_replay=True) the loader reads the stream anew and "
                f"drops what was delivered ({sum(workers['given'])} batches here), which is exact if the dataset gives "
                "the same samples again"
            )


def in_batches_of(expected: dict[str, Any], state: dict[str, Any], samples: int | None) -> dict[str, Any]:
    """Return the state with its position counted in the loader's global batches; unchanged where that is impossible.

    Args:
        expected: the part of a state that must agree with the loader.
        state: a checked state.
        samples: number of samples in the epoch's order; None if unknown.
    """
    saved, size = state["batch_size"], expected["batch_size"]
    differing = [name for name, value in expected.items() if state[name] != value]
    if differing != ["batch_size"] or saved is None or size is None or saved <= 0:
        return state
    if samples is None or not _is_computed(state):
        return state
    delivered = state["step"] * saved
    if state["finished"]:
        step = 0  # the next epoch begins at its first sample
    elif delivered - saved < samples <= delivered:
        step = -(-samples // size)  # the epoch's last batch, which need not be full, was delivered
    # A batch of this loader begins at the first sample that was not delivered.
    elif delivered < samples and delivered % size == 0:
        step = delivered // size
    else:
        return state
    return {**state, "step": step, "batch_size": size}


def explain_batch_change(state: dict[str, Any], size: int, ranks: int) -> str:
    """Return the error's text for a state whose global batch is not the loader's, with the settings that would fit.

    Args:
        state: a checked state with a batch size.
        size: the loader's global batch.
        ranks: the number of ranks that share the loader's batches.
    """
    saved = state["batch_size"]
    text = f"the state was saved with a global batch of {saved} samples, but this loader's is {size}; "
    if saved % ranks:
        text += f"world_size={ranks} does not divide {saved}: resume with a number of ranks that does"
    else:
        text += f"use batch_size={saved // ranks}" + (f" on {ranks} ranks" if ranks > 1 else "")
    if _is_computed(state) and state["step"]:
        text += f", or a global batch that divides the {state['step'] * saved} samples that were delivered"
    return text


def _is_computed(state: dict[str, Any]) -> bool:
    """Whether the position is a number of samples alone: neither the sampler, nor a generator that it draws from, nor
    the dataset has a state, and batches were delivered in order.
    """
    return (
        (state["mode"], state["kind"]) == ("seeded", "map")
        and state["order"] in ("sequential", "shuffled")
        and not state["beyond"]
        and all(state[name] is None for name in ("sampler", "generators", "workers"))
    )

"""Where a loader stands, as a plain dictionary: saved at any batch, loaded by another process.

Data path: consumer -> [checkpoint]. Only what was *delivered* counts; what was fetched ahead is forgotten.

A `Progress` follows one iterator: a few additions a batch. The loader's `StateKeeper` holds that of the newest one,
reads it out (`state_dict`), and begins the next epoch from a state that was loaded. The dictionary's layout is
described in `state_layout.py`, which also checks one that comes from outside.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

from asyncloader.agreement import Agreement, make_group
from asyncloader.epoch import EpochClock
from asyncloader.index_stream import IndexStream, StateLog, base_sampler, own_generator, set_generators
from asyncloader.options import LoaderSpec, async_index_source, is_iterable
from asyncloader.rank_view import RankView
from asyncloader.sampler import AsyncIndexSource
from asyncloader.seeded_mode import expectations, topology
from asyncloader.state_layout import VERSION, check_exact, check_state, check_workers, compare
from asyncloader.stateful_samplers import StatefulRandomSampler
from asyncloader.workers.cursor import Cursor, is_stateful
from asyncloader.workers.info import EpochStart

__all__ = ["Progress", "StateKeeper"]


class Tally:
    """Samples that were left out, or came twice, for the ranks' evenness: over all ranks and completed epochs."""

    def __init__(self) -> None:
        self.dropped = 0
        self.repeated = 0

    def snapshot(self) -> dict[str, float]:
        """For `stats()`."""
        return {"data/dropped": float(self.dropped), "data/repeated": float(self.repeated)}


class Progress:
    """The position of one iterator: which steps were delivered, and where the parts with a state of their own stood.

    Made by `StateKeeper.begin`. The iterator tells it what it delivers; everything happens in its thread.
    """

    def __init__(
        self,
        clock: EpochClock,
        expects: dict[str, Any],
        streams: dict[str, Any] | None,
        resumed: dict[str, Any] | None,
        total: int | None,
        every: int,
        tally: Tally,
    ) -> None:
        self.epoch = clock.value
        self._clock = clock
        self._expects = expects
        self._resumed = resumed
        self._total = total
        self.every = every
        self._finished = False
        self._step = 0 if resumed is None else resumed["step"]
        self._beyond: set[int] = set() if resumed is None else set(resumed["beyond"])
        self._failed: list[int] = []
        self._steps: dict[int, int] = {}  # task -> step, for tasks that are outstanding
        self._stream: IndexStream | None = None
        self.log: StateLog | None = None
        """States of an async sampler, by its reader."""
        self.drained: dict[str, Any] | None = None
        """The state of an async sampler that has ended its epoch, after which this one follows."""
        self.view: RankView | None = None
        """This rank's share of the order, in seeded mode."""
        self._tally = tally
        self._tallied = False
        self._streams = streams
        self._cursors: list[bytes] = []
        self._given: list[int] = []
        self._turn = 0
        self.agreement: Agreement | None = None
        """With the other ranks, on when the epoch ends; None where there is nothing to agree on."""
        self.base_seed: int | None = None
        self.shared_seed: int | None = None
        self.padding = 0
        """Samples at the end of the batch delivered last that are there for evenness only."""

    # ------------------------------------------------------------------------------------------- beginning

    @property
    def first_step(self) -> int:
        """Steps that were delivered before this iterator, without a gap."""
        return 0 if self._resumed is None else int(self._resumed["step"])

    @property
    def skipped(self) -> frozenset[int]:
        """Steps beyond `first_step` that were delivered before, too."""
        return frozenset() if self._resumed is None else frozenset(self._resumed["beyond"])

    @property
    def saved_sampler(self) -> dict[str, Any] | None:
        """The sampler's state to begin with; None: from the beginning."""
        return None if self._resumed is None else self._resumed["sampler"]

    @property
    def turn(self) -> int:
        """The worker that made the next batch of an iterable dataset."""
        return self._turn

    def stream(self, index_sampler: Any, made: Any) -> IndexStream:
        """The index stream from the delivered position on; `made` is the index sampler's iterator, just made."""
        self.view = index_sampler if isinstance(index_sampler, RankView) else None
        self._stream = IndexStream(
            index_sampler,
            made,
            step=self.first_step,
            beyond=self.skipped,
            every=self.every,
            saved=self.saved_sampler,
            generators=None if self._resumed is None else self._resumed["generators"],
        )
        return self._stream

    def starts(self, workers: int, base_seed: int, shared_seed: int | None) -> tuple[int, list[EpochStart]]:
        """The base seed, and what each worker begins the epoch with. Without workers: ``workers=1``."""
        self.base_seed, self.shared_seed = base_seed, shared_seed
        self._cursors, self._given, self._turn = [b""] * workers, [0] * workers, 0
        saved = None if self._resumed is None else self._resumed["workers"]
        if saved is None:
            return base_seed, [EpochStart(shared_seed, self.epoch) for _ in range(workers)]
        self._given, self._turn = list(saved["given"]), saved["next"]
        starts: list[EpochStart] = []
        for worker, (given, place) in enumerate(zip(saved["given"], saved["cursors"], strict=True)):
            # One that could not be taken tells nothing but that the stream must be read again.
            cursor = None if place is None or place["problem"] else Cursor(**place)
            if cursor is not None:
                self._cursors[worker] = pickle.dumps(tuple(cursor), 5)
            starts.append(
                EpochStart(saved["shared_seed"], self.epoch, cursor, given - (cursor.batches if cursor else 0))
            )
        if self._expects["kind"] == "iterable":
            # The random numbers that the workers begin with are needed to read the same stream again.
            self.base_seed, self.shared_seed = saved["base_seed"], saved["shared_seed"]
        return self.base_seed, starts

    # ----------------------------------------------------------------------------------------- for each batch

    def pulled(self, task: int, step: int) -> None:
        """The task is that step's."""
        self._steps[task] = step

    def delivered(self, task: int, worker: int = 0, cursor: bytes = b"") -> None:
        """The user gets the task's batch now."""
        if self._streams is not None:
            self._given[worker] += 1
            self._turn = (worker + 1) % len(self._given)
            if cursor:
                self._cursors[worker] = cursor
        if self._failed:
            for failed in self._failed:
                self._mark(failed)
            self._failed.clear()
        if self.view is not None:
            padding = self.view.cutter.padding
            self.padding = 0 if padding is None or padding[0] != self._steps.get(task) else padding[1]
        self._mark(task)
        if self._step == self._total:
            self._complete()

    def _mark(self, task: int) -> None:
        step = self._steps.pop(task, None)
        if step is None:  # a step of a stream, which has no numbers of its own
            step = self._step
        if step == self._step and not self._beyond:
            self._step += 1
            return
        self._beyond.add(step)
        while self._step in self._beyond:
            self._beyond.remove(self._step)
            self._step += 1

    def failed(self, task: int) -> None:
        """The user gets an error in the batch's place: if the next batch is taken, this one is past."""
        self._failed.append(task)

    def finish(self) -> None:
        """The user was told that there are no more batches."""
        self._finished = True
        self._complete()

    def _complete(self) -> None:
        self._clock.completed(self.epoch)
        if self.view is not None and not self._tallied:
            self._tallied = True
            _, dropped, repeated = self.view.tail()
            self._tally.dropped += dropped
            self._tally.repeated += repeated

    # ------------------------------------------------------------------------------------------------ reading

    def state(self) -> dict[str, Any]:
        """A fresh dictionary; see `state_layout.py`."""
        stream = self._stream
        generators = None if stream is None or stream.generators is None else dict(stream.generators)
        if self._finished and stream is not None and generators is not None and "own" in generators:
            generators["own"] = stream.own_state() or generators["own"]  # the next epoch goes on from there
        log = self.log if stream is None else stream.log
        sampler = self.saved_sampler if log is None else log.at(self._step)
        return {
            "version": VERSION,
            **self._expects,
            "epoch": self.epoch,
            "step": self._step,
            "beyond": sorted(self._beyond),
            "finished": self._finished,
            "sampler": copy.deepcopy(sampler),
            "generators": generators,
            "workers": None if self._streams is None else self._worker_states(self._streams),
        }

    def _worker_states(self, streams: dict[str, Any]) -> dict[str, Any]:
        cursors = [None if not data else Cursor(*pickle.loads(data))._asdict() for data in self._cursors]
        return {
            **streams,
            "next": self._turn,
            "base_seed": self.base_seed,
            "shared_seed": self.shared_seed,
            "given": list(self._given),
            "cursors": cursors,
        }


class StateKeeper:
    """A loader's epochs and states. Its iterators each have a `Progress`; the newest one speaks for the loader."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._group: Any = None
        self._clock: EpochClock | None = None
        self._newest: Progress | None = None
        self._loaded: dict[str, Any] | None = None  # as it was given, until an iterator begins from it
        self._pending: dict[str, Any] | None = None  # checked, ditto

    def _clock_of(self, spec: LoaderSpec[Any]) -> EpochClock:
        if self._clock is None:
            samplers = [getattr(spec, "sampler", None), spec.batch_sampler]
            self._clock = EpochClock(samplers, spec.dataset, seeded=spec.seed is not None)
        return self._clock

    def set_epoch(self, spec: LoaderSpec[Any], epoch: int) -> None:
        """See `DataLoader.set_epoch`."""
        self._clock_of(spec).set(epoch)

    @property
    def padding(self) -> int:
        """Samples at the end of the newest batch that are there for evenness only."""
        return 0 if self._newest is None else self._newest.padding

    @property
    def batches_to_replay(self) -> int:
        """Batches of a stream without a state that the next iterator will read again, and drop."""
        workers = None if self._pending is None or self._pending["kind"] == "map" else self._pending["workers"]
        if workers is None:
            return 0
        pairs = zip(workers["given"], workers["cursors"], strict=True)
        return sum(given for given, cursor in pairs if cursor is None)

    def begin(self, spec: LoaderSpec[Any]) -> Progress:
        """The position of a new iterator: that of the state that was loaded, else the beginning of the epoch.

        A state's position belongs to its epoch. If another epoch was set since it was loaded, that one begins at its
        beginning.
        """
        clock = self._clock_of(spec)
        resumed, self._pending, self._loaded = self._pending, None, None
        clock.begin()
        finished = resumed if resumed is not None and resumed["finished"] else None
        if resumed is not None and (finished or clock.value != resumed["epoch"]):
            resumed = None
        progress = self._newest = self._progress(spec, clock, resumed)
        progress.agreement = self._agreement(spec)
        if finished is not None:
            _follow(spec, progress, finished)
        return progress

    def _agreement(self, spec: LoaderSpec[Any]) -> Agreement | None:
        here = topology(spec)
        if spec.seed is None or not is_iterable(spec) or here.world_size == 1:
            return None
        if self._group is None:
            self._group = make_group(here)
        # Several workers' copies may end with a short batch each, or drop it: the length says nothing exact then.
        count = None
        if spec.num_workers <= 1 and hasattr(spec.dataset, "__len__"):
            count = len(spec)
        return Agreement(self._group, count, uneven_is_error=spec.on_uneven == "error")

    def _progress(self, spec: LoaderSpec[Any], clock: EpochClock, resumed: dict[str, Any] | None) -> Progress:
        iterable = is_iterable(spec)
        streams = None
        if iterable or (spec.seed is None and is_stateful(spec.dataset)):
            streams = {"num_workers": spec.num_workers, **topology(spec)._asdict()}
        total = None
        if spec.seed is not None and not iterable:
            try:
                total = len(spec._index_sampler)
            except TypeError:
                total = None
        every = spec.snapshot_every_n_steps or 0
        return Progress(clock, expectations(spec, iterable=iterable), streams, resumed, total, every, self.tally)

    def state(self, spec: LoaderSpec[Any]) -> dict[str, Any]:
        """See `DataLoader.state_dict`."""
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        if self._newest is not None:
            return self._newest.state()
        fresh = self._progress(spec, self._clock_of(spec), None)
        fresh.starts(max(1, spec.num_workers), 0, None)
        state = fresh.state()
        if not is_iterable(spec):
            state["sampler"] = _fresh_sampler_state(spec)
        return state

    def load(self, spec: LoaderSpec[Any], given: dict[str, Any]) -> None:
        """See `DataLoader.load_state_dict`."""
        if not given:
            self._loaded = self._pending = self._newest = None
            return
        state = check_state(given)
        here = topology(spec)
        compare(state, expectations(spec, iterable=is_iterable(spec)), here.world_size)
        workers = state["workers"]
        if workers is not None and (state["finished"] or not any(workers["given"])):
            workers = state["workers"] = None
        if workers is not None:
            check_workers(workers, spec.num_workers, here.rank, here.world_size)
            if spec.resume == "exact" and not spec._replays:
                check_exact(workers, stream=state["kind"] == "iterable")
        self._clock_of(spec).restore(state["epoch"], finished=state["finished"])
        self._loaded, self._pending = copy.deepcopy(given), state


def _fresh_sampler_state(spec: LoaderSpec[Any]) -> dict[str, Any] | None:
    """A stateful sampler's state before anything was asked of it."""
    sampler = base_sampler(spec._index_sampler)
    if isinstance(sampler, AsyncIndexSource):
        sampler = sampler.sampler
    if is_stateful(sampler):
        return {"at": 0, "ended": False, "sampler": copy.deepcopy(sampler.state_dict()), "iterator": None}
    if type(sampler) is not StatefulRandomSampler:
        return None
    # Its state is its iterator's, and making one draws from the generator, which must not be seen here.
    before = sampler.generator.get_state()
    try:
        if spec.num_workers:
            spec._workers_begin()
        return {"at": 0, "ended": False, "sampler": None, "iterator": iter(sampler).state_dict()}
    finally:
        sampler.generator.set_state(before)


def _follow(spec: LoaderSpec[Any], progress: Progress, finished: dict[str, Any]) -> None:
    """Bring the sampler to the end of its last epoch: the next one follows from there."""
    saved, generators = finished["sampler"], finished["generators"]
    if async_index_source(spec) is not None:
        progress.drained = saved
        return
    index_sampler = spec._index_sampler
    if saved is not None:
        IndexStream(index_sampler, iter(()), step=saved["at"], saved=saved).end_of_epoch()
    if generators is not None and "own" in generators:
        set_generators({"own": generators["own"]}, own_generator(base_sampler(index_sampler)))

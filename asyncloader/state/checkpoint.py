"""Saves and loads a loader's position as a plain dictionary, at any batch and for any process.

Data path: consumer -> progress -> [checkpoint]. Only *delivered* batches count; batches fetched ahead are ignored.

A `Progress` (`progress.py`) tracks one iterator. The loader's `StateKeeper` keeps that of the newest one, makes a state
of it (`state_dict`), and begins the next epoch from a state that was loaded. `schema.py` describes the dictionary's
layout and checks states that come from outside.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from asyncloader.errors import StateError
from asyncloader.options import LoaderSpec, async_index_source, is_iterable
from asyncloader.ranks.agreement import Agreement
from asyncloader.ranks.process_group import RankGroup, make_group
from asyncloader.remote.assignment_state import new_key
from asyncloader.samplers.distributed import RankView, plain_sampler, replicas, topology
from asyncloader.samplers.generators import own_generator, set_generators
from asyncloader.samplers.index_stream import IndexStream, base_sampler
from asyncloader.samplers.seeded import SeededSampler
from asyncloader.state.epoch_counter import EpochClock
from asyncloader.state.next_epoch import Prospect, after_an_epoch, of_a_first_epoch
from asyncloader.state.progress import Progress, Tally
from asyncloader.state.schema import check_exact, check_generators, check_length, check_state, check_workers, compare
from asyncloader.workers.fetch.assignment_client import assigns_shards
from asyncloader.workers.fetch.dataset_kinds import is_concurrent
from asyncloader.workers.fetch.dataset_state import is_stateful

__all__ = ["StateKeeper", "expectations"]


class StateKeeper:
    """A loader's epochs and states. Each iterator has a `Progress`; the newest one determines the loader's state."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._group: RankGroup | None = None
        self._clock: EpochClock | None = None
        self._newest: Progress | None = None
        self._read_before = False  # an epoch before the newest one gave a batch
        self._loaded: dict[str, Any] | None = None  # the loaded state as given, until an iterator begins from it
        self._pending: dict[str, Any] | None = None  # the same, checked

    @property
    def grouped(self) -> bool:
        """Whether `retire_group` has something to do."""
        return self._group is not None

    def retire_group(self) -> None:
        """Destroy the ranks' process group, because the loader is closed. Takes some seconds at most."""
        group, self._group = self._group, None
        if group is not None:
            group.retire()

    def _clock_of(self, spec: LoaderSpec[Any]) -> EpochClock:
        if self._clock is None:
            samplers = [plain_sampler(spec), spec.batch_sampler, getattr(spec.batch_sampler, "sampler", None)]
            self._clock = EpochClock(samplers, spec.dataset, seeded=spec._asyncloader_options.seed is not None)
        return self._clock

    def set_epoch(self, spec: LoaderSpec[Any], epoch: int) -> None:
        """See `DataLoader.set_epoch`."""
        self._clock_of(spec).set(epoch)

    @property
    def padding(self) -> int:
        """Samples at the end of the newest batch that only keep the ranks even."""
        return 0 if self._newest is None else self._newest.padding

    @property
    def batches_to_replay(self) -> int:
        """Number of batches that the next iterator will read again and drop, of a stream without a state."""
        workers = None if self._pending is None or self._pending["kind"] == "map" else self._pending["workers"]
        if workers is None:
            return 0
        pairs = zip(workers["given"], workers["cursors"], strict=True)
        return sum(given for given, cursor in pairs if cursor is None)

    def begin(self, spec: LoaderSpec[Any]) -> Progress:
        """The position of a new iterator: that of the loaded state, else the beginning of the epoch.

        A state's position belongs to its epoch. If another epoch was set since the state was loaded, that epoch begins
        from its start.
        """
        clock = self._clock_of(spec)
        resumed, self._pending, self._loaded = self._pending, None, None
        clock.begin()
        finished = resumed if resumed is not None and resumed["finished"] else None
        if resumed is not None and (finished or clock.value != resumed["epoch"]):
            resumed = None
        before = self._newest
        self._read_before = self._read_before or (before is not None and before.touched)
        progress = self._newest = self._progress(spec, clock, resumed)
        if before is not None and spec.persistent_workers and resumed is None and finished is None:
            progress.inherit(before)
        source = async_index_source(spec)
        if source is not None and resumed is None and finished is None:
            progress.log = source.first_log(progress.every)
        progress.agreement = self._agreement(spec, progress.first_step)
        if assigns_shards(spec.dataset) and progress.saved_assignment is None:
            progress.assignment_key = new_key(spec._asyncloader_options.seed, spec.generator, progress.epoch)
        seeds = None if (loaded := resumed or finished) is None else loaded["seeds"]
        if seeds is not None and seeds["rank"] == topology(spec).rank:  # another rank's numbers must not be repeated
            progress.seeds = seeds
        if finished is not None:
            progress.follows = True
            progress.carried = finished["workers"]
            _follow(spec, progress, finished)
            if not is_iterable(spec):
                _keep_generator(spec, progress)
        return progress

    @contextlib.contextmanager
    def making_iterator(self) -> Generator[None]:
        """Context that keeps a loaded position for the next iterator if making this one fails."""
        before = self._newest, self._loaded, self._pending
        try:
            yield
        except BaseException:
            self._newest, self._loaded, self._pending = before
            raise

    def _agreement(self, spec: LoaderSpec[Any], first_step: int) -> Agreement | None:
        here = topology(spec)
        assigned = assigns_shards(spec.dataset)  # its shards are shared by all ranks in torch mode, too
        if here.world_size == 1 or not is_iterable(spec) or (spec._asyncloader_options.seed is None and not assigned):
            return None
        self._group = make_group(here, self._group)
        # The length gives no exact number of batches if several workers may each end with a short batch or drop it, or
        # if shards differ in size.
        exact = spec.num_workers <= 1 and hasattr(spec.dataset, "__len__") and not assigned
        count = _length(spec) if exact else None
        if count is not None:
            count = max(0, count - first_step)
        return Agreement(self._group, count, uneven_is_error=spec._asyncloader_options.on_uneven == "error")

    def _progress(self, spec: LoaderSpec[Any], clock: EpochClock, resumed: dict[str, Any] | None) -> Progress:
        iterable = is_iterable(spec)
        streams = None
        if iterable or (is_stateful(spec.dataset) and not _reads_by_chance(spec)):
            streams = {"num_workers": spec.num_workers, **topology(spec)._asdict()}
        total = _length(spec._index_sampler) if spec._asyncloader_options.seed is not None and not iterable else None
        every = spec._asyncloader_options.snapshot_every_n_steps or 0
        rank = topology(spec).rank
        return Progress(clock, expectations(spec, iterable=iterable), streams, resumed, total, every, self.tally, rank)

    def state(self, spec: LoaderSpec[Any], *, before_last: bool = False, finished: bool = False) -> dict[str, Any]:
        """See `DataLoader.state_dict`. `before_last`: as it was before the last delivery; `finished`: as if the epoch
        had ended here.
        """
        elsewhere = not (before_last or finished) and self._elsewhere(spec)
        if self._loaded is not None and not elsewhere:
            return copy.deepcopy(self._loaded)
        newest = self._newest
        if newest is not None and not elsewhere:
            if is_stateful(spec.dataset) and _reads_by_chance(spec):
                self._check_exact(spec, newest, finished=finished or newest.finished)
            if before_last:
                return newest.state_before_last()
            state = newest.state(finished=finished)
            if finished or newest.finished:
                _foretell(state, after_an_epoch(spec, itself=newest.iterates_itself))
            return state
        fresh = self._progress(spec, self._clock_of(spec), None)
        fresh.starts(max(1, spec.num_workers), 0, None)
        state, prospect = fresh.state(), of_a_first_epoch(spec)
        if not is_iterable(spec):
            state |= {"sampler": prospect.sampler, "generators": prospect.generators}
        _foretell(state, prospect)
        return state

    def _check_exact(self, spec: LoaderSpec[Any], newest: Progress, *, finished: bool) -> None:
        """Refuse to save if the dataset's state cannot be found again. Not if new workers will begin with the dataset
        as it is in this process.
        """
        lives_on = not spec.num_workers or spec.persistent_workers
        if not (lives_on if finished else newest.touched or (lives_on and self._read_before)):
            return
        reads = "several of its samples are read at a time"
        if spec.num_workers > 1:
            reads = f"which of its {spec.num_workers} workers reads a batch is chance"
        raise StateError(
            f"the dataset has a state of its own (state_dict and load_state_dict), but with seed= {reads}: where it "
            "stands cannot be found again. Use num_workers=0 or 1 with a blocking dataset and without fetch_threads; "
            "or leave seed= out; or, if its state is of no use to the run, pass "
            "torch.utils.data.Subset(dataset, range(len(dataset))), which has none"
        )

    def _elsewhere(self, spec: LoaderSpec[Any]) -> bool:
        """Whether `set_epoch` chose another epoch than the one that follows from the last position."""
        if spec._asyncloader_options.seed is None or is_iterable(spec):
            return False
        epoch = self._clock_of(spec).value
        if self._pending is not None:
            return bool(epoch != self._pending["epoch"] + self._pending["finished"])
        return self._newest is not None and self._newest.finished and epoch != self._newest.epoch + 1

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
            # Between epochs any loader can begin; only one with the same workers and ranks restores its datasets.
            same = here._asdict() | {"num_workers": spec.num_workers}
            if any(workers[name] != value for name, value in same.items()):
                workers = None
        if state["finished"] and spec.num_workers and not spec.persistent_workers:
            workers = None  # each epoch's workers begin with the dataset as it is in this process
        state["workers"] = workers
        if workers is not None:
            check_workers(workers, spec.num_workers, here.rank, here.world_size)
            if spec._asyncloader_options.resume == "exact" and not spec._asyncloader_replays and not state["finished"]:
                check_exact(workers, stream=state["kind"] == "iterable")
        if not is_iterable(spec):
            own = own_generator(base_sampler(spec._index_sampler)) is not None
            check_generators(state["generators"], own=own)
        take_back = self._clock_of(spec).restore(state["epoch"], finished=state["finished"])
        try:
            if not is_iterable(spec) and not state["finished"]:  # an epoch's length may depend on its number
                check_length(state, _most_steps(spec._index_sampler))
        except BaseException:
            take_back()
            raise
        self._loaded, self._pending = copy.deepcopy(given), state


def _reads_by_chance(spec: LoaderSpec[Any]) -> bool:
    """Whether it is not determined which samples a copy of the map dataset reads, and in which order."""
    if spec._asyncloader_options.seed is None or is_iterable(spec):
        return False
    return bool(spec.num_workers > 1 or is_concurrent(spec.dataset, spec._asyncloader_options.fetch_threads))


def _length(index_sampler: Any) -> int | None:
    try:
        return len(index_sampler)
    except TypeError:
        return None


def _foretell(state: dict[str, Any], prospect: Prospect) -> None:
    """Add the next epoch's seeds and dataset state to a state that is saved between epochs."""
    state["seeds"] = prospect.seeds
    if state["workers"] is not None and prospect.cursor is not None:
        state["workers"]["cursors"] = [prospect.cursor._asdict()]


def _keep_generator(spec: LoaderSpec[Any], progress: Progress) -> None:
    own = own_generator(base_sampler(spec._index_sampler))
    if own is not None and spec.persistent_workers:
        progress.generator_then = own, own.get_state()


def _most_steps(index_sampler: Any) -> int | None:
    """Most steps that an epoch can have, on any number of ranks; None if unknown."""
    if not isinstance(index_sampler, RankView):
        return _length(index_sampler)
    items = _length(index_sampler.sampler)
    return None if items is None else items // index_sampler.cutter.stride + 1


def _follow(spec: LoaderSpec[Any], progress: Progress, finished: dict[str, Any]) -> None:
    """Advance the sampler to the end of its last epoch, from where the next one continues."""
    saved, generators = finished["sampler"], finished["generators"]
    if async_index_source(spec) is not None:
        progress.drained = saved
        progress.undrained = {name: value for name, value in finished.items() if name != "cut"}
        return
    index_sampler = spec._index_sampler
    if saved is not None:
        IndexStream(index_sampler, iter(()), step=saved["at"], saved=saved).end_of_epoch()
    if generators is not None and "own" in generators and finished["cut"]:
        # Saved before the end, with the generator's state at the epoch's beginning.
        for _ in IndexStream(index_sampler, iter(index_sampler), step=finished["step"], generators=generators):
            pass
    elif generators is not None and "own" in generators:
        set_generators({"own": generators["own"]}, own_generator(base_sampler(index_sampler)))


def expectations(spec: Any, *, iterable: bool) -> dict[str, Any]:
    """The part of a state that must agree with the loader that it is loaded into."""
    size, drop_last = spec.batch_size, spec.drop_last
    if type(spec.batch_sampler) is BatchSampler:
        size, drop_last = spec.batch_sampler.batch_size, spec.batch_sampler.drop_last
    if not iterable:
        own = replicas(plain_sampler(spec)) or replicas(spec.batch_sampler)
        if own is None and spec._asyncloader_options.seed is not None:
            size = (size or 1) * topology(spec).world_size  # without a batch size: the items of one step
        elif own is not None and size is not None:
            size *= own.world_size
    return {
        "mode": "torch" if spec._asyncloader_options.seed is None else "seeded",
        "kind": "iterable" if iterable else "map",
        "seed": spec._asyncloader_options.seed,
        "length": None if iterable else _dataset_length(spec.dataset),
        "batch_size": size,
        "drop_last": bool(drop_last),
        "order": "stream" if iterable else _order(spec),
    }


def _order(spec: Any) -> str:
    if spec.batch_sampler is not None and type(spec.batch_sampler) is not BatchSampler:
        return "batch_sampler"
    sampler = plain_sampler(spec)
    if isinstance(sampler, SequentialSampler) or (type(sampler) is SeededSampler and not sampler.shuffle):
        return "sequential"
    if type(sampler) is SeededSampler and sampler.seed != spec._asyncloader_options.seed:
        return f"shuffled by seed {sampler.seed}"
    if isinstance(sampler, RandomSampler) or type(sampler) is SeededSampler:
        return "shuffled"
    return "sampler"


def _dataset_length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # torch does not call `len` if a sampler was given, so an error must not surface
        return None

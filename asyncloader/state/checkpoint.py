"""Saves and loads a loader's position as a plain dictionary, at any batch and for any process.

Data path: consumer -> progress -> [checkpoint]. Only *delivered* batches count; batches fetched ahead are ignored.

A `Progress` (`progress.py`) tracks one iterator. The loader's `StateKeeper` keeps the newest iterator's, makes a state
of it (`state_dict`), and begins the next epoch from a state that was loaded. `schema.py` describes the dictionary's
layout and checks states that come from outside.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Generator
from typing import Any

from asyncloader.errors import StateError
from asyncloader.options.declaration import LoaderSpec
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.ranks.agreement import Agreement, length_is_exact
from asyncloader.ranks.exchange import RankExchange
from asyncloader.ranks.process_group import RankGroup, has_group, make_group
from asyncloader.samplers.async_sampler import PositionSource
from asyncloader.samplers.distributed import RankView
from asyncloader.samplers.generators import own_generator, set_generators
from asyncloader.samplers.index_stream import IndexStream, base_sampler
from asyncloader.samplers.positions import AS_A_SET, as_a_set
from asyncloader.state.cursors import (
    Prospect,
    after_an_epoch,
    continue_generator,
    described_options,
    expectations,
    length_or_none,
    of_a_first_epoch,
    reads_by_chance,
    sharing_ranks,
)
from asyncloader.state.epoch_counter import EpochClock, Tally
from asyncloader.state.progress import Progress
from asyncloader.state.schema import (
    check_exact,
    check_generators,
    check_length,
    check_state,
    check_workers,
    compare,
    in_batches_of,
)
from asyncloader.workers.fetch.dataset_kinds import MessagedDataset

# Why ranks must read the same, for the error of those that do not.
_SHARED = (
    "the ranks share the samples of one dataset, so give all of them the same dataset and num_workers. Ranks that each "
    "have a dataset of their own need group="
)
_NUMBERED = (
    "with seed= a stream has its random numbers by its number among the streams of all ranks, so give each rank the "
    "same num_workers; or datasets with the same loader_streams"
)


class StateKeeper:
    """A loader's epochs and states. Each iterator has a `Progress`; the newest one determines the loader's state."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.alone = False
        """Whether the iterators plan without the other ranks, which begin none."""
        self._group: RankGroup | None = None
        self._exchange: RankExchange | None = None  # over this group
        self._clock: EpochClock | None = None
        self._counted = 0, False  # the clock's, when it is made
        self._newest: Progress | None = None
        self._read_before = False  # an iterator before the newest gave a batch
        self._loaded: dict[str, Any] | None = None  # the loaded state as given, until an iterator begins from it
        self._pending: dict[str, Any] | None = None  # the same, checked
        self._unchecked = False  # it was checked for the loader of which this is a copy's
        self._taken: tuple[dict[str, Any] | None, dict[str, Any] | None] = None, None  # both, of the newest iterator
        self._old: Progress | None = None  # the newest iterator of the moment when a state was loaded
        self._moment: tuple[Any, ...] = ()  # and where it was then

    def for_copy(self) -> StateKeeper:
        """Return the keeper of a copy of the loader: it has the loaded state and the epoch. Calls nothing of the
        user's.
        """
        copied, clock = StateKeeper(), self._clock
        copied._counted = self._counted if clock is None else (clock.counted, clock.sets_dataset)
        copied._loaded, copied._pending = self._standing
        copied._unchecked = True
        return copied

    @property
    def grouped(self) -> bool:
        """Whether `retire_group` has something to do."""
        return self._group is not None

    def retire_group(self) -> None:
        """Destroy the ranks' process group, because the loader is closed. Takes some seconds at most."""
        group, self._group, self._exchange = self._group, None, None
        if group is not None:
            group.retire()

    def _clock_of(self, config: EpochConfig) -> EpochClock:
        if self._clock is None:
            samplers = [config.sampler, config.batch_sampler, getattr(config.batch_sampler, "sampler", None)]
            clock = self._clock = EpochClock(samplers, config.dataset, seeded=config.seeded)
            clock.counted, sets_dataset = self._counted
            clock.sets_dataset |= sets_dataset
        return self._clock

    def set_epoch(self, spec: LoaderSpec[Any], epoch: int) -> None:
        """Set the epoch of the next iterator. See `DataLoader.set_epoch`."""
        self._clock_of(EpochConfig.of(spec)).set(epoch)

    @contextlib.contextmanager
    def lent_dataset(self, spec: LoaderSpec[Any]) -> Generator[None]:
        """Within it, another loader reads the same dataset, in an epoch of its own."""
        try:
            yield
        finally:
            self._clock_of(EpochConfig.of(spec)).set_dataset_again()

    @property
    def place(self) -> str:
        """Where the newest iterator stands, in words."""
        newest = self._late or self._newest
        return "not iterated yet" if newest is None else f"epoch {newest.epoch}, {newest.place}"

    def epoch(self, spec: LoaderSpec[Any]) -> int:
        """Return the current epoch's number. See `DataLoader.epoch`."""
        newest, late = self._newest, self._late
        if late is not None:
            return late.epoch
        if newest is not None and not newest.finished and self._loaded is None:
            return newest.epoch
        return self._clock_of(EpochConfig.of(spec)).value

    @property
    def _late(self) -> Progress | None:
        """The newest iterator from before a state was loaded, if it has delivered since: its position is the loader's
        then.
        """
        old = self._old
        return None if old is None or old.finished or old.moment == self._moment else old

    @property
    def padding(self) -> int:
        """Samples at the end of the newest batch that only keep the ranks even."""
        newest = self._late or self._newest
        return 0 if newest is None else newest.padding

    @property
    def batches_to_replay(self) -> int:
        """Number of batches that the next iterator will read again and drop, of a stream without a state."""
        pending = self._pending
        if pending is None or pending["finished"] or pending["kind"] == "map" or pending["workers"] is None:
            return 0
        workers = pending["workers"]
        pairs = zip(workers["given"], workers["cursors"], strict=True)
        return sum(given for given, cursor in pairs if cursor is None)

    @property
    def _standing(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The loaded state from which the next iterator begins, as given and checked: again, if the iterator that began
        from it could not give its first batch.
        """
        if self._pending is None and self._newest is not None and self._newest.unbegun:
            return self._taken
        return self._loaded, self._pending

    def begin(self, spec: LoaderSpec[Any], config: EpochConfig | None = None) -> Progress:
        """The position of a new iterator: that of the loaded state, else the beginning of the epoch. It has the epoch's
        options: as they are now, or `config` if the same iterator begins once more.

        A state's position belongs to its epoch. If another epoch was set since the state was loaded, that epoch begins
        from its start.
        """
        config = config or EpochConfig.of(spec)
        clock = self._clock_of(config)
        if self._unchecked and self._loaded is not None:
            epoch = clock.value
            self.load(spec, self._loaded)
            if clock.value != epoch:  # it was set since the state was loaded
                clock.set(epoch)
        # A state begins one iterator only. If the iterator cannot be made, the function of `mark` restores it.
        self._taken = self._standing if self._taken[1] is not None else (self._loaded, self._pending)
        resumed, self._pending, self._loaded = self._taken[1], None, None
        clock.begin()
        finished = resumed if resumed is not None and resumed["finished"] else None
        if resumed is not None and (finished or clock.value != resumed["epoch"]):
            resumed = None
        before, self._old = self._newest, None
        self._read_before = self._read_before or (before is not None and before.touched)
        progress = self._newest = self._progress(config, clock, resumed)
        if before is not None and config.persistent_workers and resumed is None and finished is None:
            progress.inherit(before)
        if config.source is not None and resumed is None and finished is None:
            progress.log = config.source.first_log(progress.every)
        if isinstance(config.source, PositionSource):
            config.source.ranks = self._ranks(config)
        progress.agreement = self._agreement(spec, config, progress.first_step)
        if finished is not None and not config.persistent_workers:
            continue_generator(config, finished)  # before the epoch draws from it
        if config.assigns_shards and progress.saved_assignment is None:
            from asyncloader.remote.assignment_state import new_key  # for streams of shards alone

            progress.assignment_key = new_key(config.seed, config.generator, progress.epoch)
        seeds = None if (loaded := resumed or finished) is None else loaded["seeds"]
        if seeds is not None and seeds["rank"] == config.topology.rank:  # another rank's numbers must not be repeated
            progress.seeds = seeds
        if finished is not None:
            progress.follows = True
            progress.carried = finished["workers"]
            _follow(progress, finished)
            # After `_follow`, which sets the generator, and before the base seed is drawn from it.
            _keep_generator(progress, finished)
        return progress

    def mark(self) -> Callable[[], None]:
        """Return a function that undoes `begin`: if making the iterator fails, the next has the loaded position."""
        before = self._newest, self._loaded, self._pending, self._taken, self._old

        def undo() -> None:
            self._newest, self._loaded, self._pending, self._taken, self._old = before

        return undo

    def _ranks(self, config: EpochConfig) -> RankExchange | None:
        # The other ranks with which this one plans; None: there are none, or this process has no group with them.
        here = config.topology
        if self.alone or here.world_size == 1 or not has_group(here, config.group):
            return None
        group = make_group(here, config.group, self._group)
        if self._exchange is None or group is not self._group:
            self._group, self._exchange = group, RankExchange(group, here)
        return self._exchange

    def _agreement(self, spec: LoaderSpec[Any], config: EpochConfig, first_step: int) -> Agreement | None:
        assigned = config.assigns_shards  # its shards are shared by all ranks in torch mode, too
        if config.topology.world_size == 1 or not config.iterable or not (config.seeded or assigned):
            return None
        self._group = make_group(config.topology, config.group, self._group)
        steps = None
        if length_is_exact(config.dataset, config.loader_streams or config.num_workers, assigns_shards=assigned):
            steps = length_or_none(spec)
            if steps is not None:
                steps = max(0, steps - first_step)  # the ranks count the batches of their iterators, not of the epoch
        advice = _SHARED if assigned else _NUMBERED
        is_error = config.on_uneven == "error"
        agreement = Agreement(self._group, steps, uneven_is_error=is_error, advice=advice, lists=assigned)
        if not assigned:
            streams = config.loader_streams or max(1, config.num_workers)
            agreement.reads = f"{streams} streams" if streams > 1 else "1 stream"
        return agreement

    def _progress(self, config: EpochConfig, clock: EpochClock, resumed: dict[str, Any] | None) -> Progress:
        streams = None
        if config.iterable or (config.stateful and not reads_by_chance(config)):
            streams = {"num_workers": config.num_workers, **config.topology._asdict()}
            if config.loader_streams is not None:
                streams["loader_streams"] = config.loader_streams
        total = length_or_none(config.index_sampler) if config.seeded and not config.iterable else None
        every, rank = config.snapshot_every, config.topology.rank
        progress = Progress(clock, described_options(config), streams, resumed, total, every, self.tally, rank)
        progress.config = config
        if isinstance(config.source, PositionSource) and (saved := progress.saved_sampler) is not None:
            before = saved["sampler"].get("before") if isinstance(saved["sampler"], dict) else None
            progress.message = json.dumps(before).encode() if before else b""
        if isinstance(config.dataset, MessagedDataset):
            progress.message = config.dataset.epoch_message()
        return progress

    def state(self, spec: LoaderSpec[Any], *, before_last: bool = False, finished: bool = False) -> dict[str, Any]:
        """Return the loader's position. See `DataLoader.state_dict`.

        Args:
            spec: the loader's options.
            before_last: return the position before the last delivery.
            finished: return the position as if the epoch had ended here.
        """
        late = self._late
        newest = late or self._newest
        running = newest is not None and not (finished or newest.finished)
        config = newest.config if newest is not None and running else EpochConfig.of(spec)
        elsewhere = not (before_last or finished) and self._elsewhere(config)
        loaded = self._standing[0]
        if loaded is not None and late is None and not elsewhere:
            # As it was given, with the keys that other libraries have added.
            return _with_feedback(config, copy.deepcopy(loaded))
        if newest is not None and not elsewhere:
            if config.stateful and reads_by_chance(config):
                self._check_exact(config, newest, finished=not running)
            if before_last:
                return newest.state_before_last()
            state = _with_feedback(config, newest.state(finished=finished))
            if not running:
                _foretell(state, after_an_epoch(config, itself=newest.iterates_itself))
            return state
        fresh = self._progress(config, self._clock_of(config), None)
        fresh.starts(max(1, config.num_workers), 0, None)
        state, prospect = fresh.state(), of_a_first_epoch(config, spec._asyncloader_workers_begin)
        state["generators"] = prospect.generators  # of a stream: None, as nothing was drawn yet
        if not config.iterable:
            state["sampler"] = prospect.sampler
        _foretell(state, prospect)
        return state

    def _check_exact(self, config: EpochConfig, newest: Progress, *, finished: bool) -> None:
        """Refuse to save if the dataset's state cannot be found again. Not if new workers will begin with the dataset
        as it is in this process.
        """
        lives_on = not config.num_workers or config.persistent_workers
        if not (lives_on if finished else newest.touched or (lives_on and self._read_before)):
            return
        reads = "several of its samples are read at a time"
        if config.num_workers > 1:
            reads = f"which of its {config.num_workers} workers reads a batch is chance"
        raise StateError(
            f"the dataset has a state of its own (state_dict and load_state_dict), but with seed= {reads}: where it "
            "stands cannot be found again. Use num_workers=0 or 1 with a blocking dataset and without concurrency=; "
            "or leave seed= out; or, if its state is of no use to the run, pass "
            "torch.utils.data.Subset(dataset, range(len(dataset))), which has none"
        )

    def _elsewhere(self, config: EpochConfig) -> bool:
        """Whether `set_epoch` chose another epoch than the epoch that follows from the last position."""
        epoch, pending = self._clock_of(config).value, self._standing[1]
        if pending is not None and not pending["finished"]:
            return bool(epoch != pending["epoch"])  # in all modes, as `begin` drops the position
        # The state of a dataset that is iterated goes on from epoch to epoch; shards have none.
        if not config.seeded or (config.iterable and not config.assigns_shards):
            return False
        if pending is not None:
            return bool(epoch != pending["epoch"] + 1)
        return self._newest is not None and self._newest.finished and epoch != self._newest.epoch + 1

    def load(self, spec: LoaderSpec[Any], given: dict[str, Any]) -> None:
        """Let the next iterator begin at a saved position. See `DataLoader.load_state_dict`."""
        if not given:
            self._note_old()
            self._loaded = self._pending = self._newest = None
            return
        state = check_state(given)
        config = EpochConfig.of(spec)
        here = config.topology
        expected = expectations(config)
        if isinstance(config.source, PositionSource):
            state = as_a_set(state, config.source.sampler.dataset, expected["batch_size"])
        state = in_batches_of(expected, state, _samples(config.index_sampler))
        try:
            compare(state, expected, sharing_ranks(config))
        except StateError as error:
            if isinstance(config.source, PositionSource) and state["batch_size"] != expected["batch_size"]:
                raise StateError(f"{error}; {AS_A_SET}") from None
            raise
        workers = state["workers"]
        if config.iterable and (workers is None or workers["rank"] != here.rank):
            state["generators"] = None  # another rank's numbers must not be repeated
        if workers is not None and (state["finished"] or not any(workers["given"])):
            # Between epochs any loader can begin, but only a loader with the same workers and ranks restores datasets.
            same = here._asdict() | {"loader_streams": config.loader_streams}
            if config.loader_streams is None:
                same["num_workers"] = config.num_workers
            if any(workers.get(name) != value for name, value in same.items()):
                workers = None
        copied = config.num_workers or config.loader_streams is not None
        if state["finished"] and copied and not (config.num_workers and config.persistent_workers):
            workers = None  # each epoch's workers begin with the dataset as it is in this process
        state["workers"] = workers
        if workers is not None:
            check_workers(workers, config.num_workers, here.rank, here.world_size, config.loader_streams)
            if config.exact and not state["finished"]:
                check_exact(workers, stream=state["kind"] == "iterable")
        if not config.iterable:
            own = own_generator(base_sampler(config.index_sampler)) is not None
            check_generators(state["generators"], own=own)
        take_back = self._clock_of(config).restore(state["epoch"], finished=state["finished"])
        try:
            if not config.iterable and not state["finished"]:  # an epoch's length may depend on its number
                check_length(state, _most_steps(config))
        except BaseException:
            # `restore` has called the samplers' `set_epoch`: a refused state must not leave its epoch behind.
            take_back()
            raise
        # Last: a state that is refused above leaves the loader's position as it was.
        self._note_old()
        if isinstance(config.source, PositionSource) and given is not self._loaded:  # else `feedback` has followed it
            begun = not state["finished"] and (state["step"] or state["beyond"])
            config.source.sampler.loaded(state["epoch"] if begun else None)
        self._loaded, self._pending, self._unchecked = copy.deepcopy(given), state, False

    def _note_old(self) -> None:
        # `_newest` is None after an empty state was loaded; the iterator from before may still deliver.
        self._old = self._newest or self._old
        self._moment = () if self._old is None else self._old.moment


def _with_feedback(config: EpochConfig, state: dict[str, Any]) -> dict[str, Any]:
    """Add to a mixture's state the weights that `feedback` has given and no batch has followed yet. In place."""
    if isinstance(config.source, PositionSource):
        saved, order = state["sampler"], config.source.sampler
        if saved is not None and isinstance(saved["sampler"], dict):
            saved["sampler"] = order.resumed(saved["sampler"])
        elif saved is None and order.changed:
            state["sampler"] = {"at": 0, "ended": False, "sampler": order.state_dict(), "iterator": None}
    return state


def _foretell(state: dict[str, Any], prospect: Prospect) -> None:
    """Add the next epoch's seeds and dataset state to a state that is saved between epochs."""
    state["seeds"] = prospect.seeds
    if state["workers"] is not None and prospect.cursor is not None:
        state["workers"]["cursors"] = [prospect.cursor._asdict()]


def _keep_generator(progress: Progress, finished: dict[str, Any]) -> None:
    """Keep the state from which persistent workers' next epochs draw: they have their base seed already."""
    config = progress.config
    own = config.generator if config.iterable else own_generator(base_sampler(config.index_sampler))
    if own is not None and config.persistent_workers:
        before = own.get_state()
        continue_generator(config, finished)
        progress.generator_then = own, own.get_state()
        own.set_state(before)  # the base seed is that of the beginning


def _samples(index_sampler: Any) -> int | None:
    """Number of items in the order that ranks share; None if unknown."""
    return length_or_none(index_sampler.sampler) if isinstance(index_sampler, RankView) else None


def _most_steps(config: EpochConfig) -> int | None:
    """Most steps that an epoch can have, on any number of ranks; None if unknown."""
    index_sampler, source = config.index_sampler, config.source
    if isinstance(source, PositionSource):
        samples = length_or_none(source.sampler)
        return None if samples is None else source.most_steps(samples)
    if not isinstance(index_sampler, RankView):
        return length_or_none(index_sampler)
    items = _samples(index_sampler)
    return None if items is None else items // index_sampler.cutter.stride + 1


def _follow(progress: Progress, finished: dict[str, Any]) -> None:
    """Advance the sampler to the end of its last epoch, where its next epoch begins."""
    saved, generators = finished["sampler"], finished["generators"]
    index_sampler = progress.config.index_sampler
    if progress.config.iterable:
        return
    if progress.config.source is not None:
        progress.drained = saved
        progress.undrained = {name: value for name, value in finished.items() if name != "cut"}
        return
    if saved is not None:
        IndexStream(index_sampler, iter(()), step=saved["at"], saved=saved).end_of_epoch()
    if generators is not None and "own" in generators and finished["cut"]:
        # Saved before the end, with the generator's state at the epoch's beginning.
        for _ in IndexStream(index_sampler, iter(index_sampler), step=finished["step"], generators=generators):
            pass
    elif generators is not None and "own" in generators:
        set_generators({"own": generators["own"]}, own_generator(base_sampler(index_sampler)))

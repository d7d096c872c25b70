"""Tracks the position of one iterator: the batches that were delivered, and the states of sampler and dataset there.

Data path: consumer -> [progress] -> checkpoint. Costs a few additions per batch, in the iterator's thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from asyncloader.base.events import Cursor, PackedCursor
from asyncloader.errors import StateError
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.ranks.agreement import Agreement
from asyncloader.samplers.distributed import RankView
from asyncloader.samplers.index_stream import IndexStream, StateLog
from asyncloader.state import cursors as parts
from asyncloader.state.epoch_counter import EpochClock, Tally
from asyncloader.state.position import Position, done, ranges
from asyncloader.state.schema import VERSION, explain_streams
from asyncloader.workers.fetch.dataset_state import pickle_cursor
from asyncloader.workers.fetch.setup import EpochStart, by_worker

if TYPE_CHECKING:
    from asyncloader.remote.assignment_state import EpochAssignment

PendingBatch: TypeAlias = tuple[int | None, int, PackedCursor | None, Any]
"""A batch that was begun without workers, and that the user does not have yet: its task's number, once it counts as
delivered or soon does, until then None; its stream, or 0; the dataset's cursor after it; and the batch.
"""


class Progress:
    """The position of one iterator: the steps that were delivered, and the states of sampler and dataset there.

    Made by `StateKeeper.begin`. The iterator reports its deliveries, in its own thread.

    A worker here is a copy of the dataset. Of a dataset with `loader_streams`, its number is that of the stream.
    """

    config: EpochConfig
    """The options of the epoch."""
    message = b""
    """The main process's message to the workers' copies of the dataset; see `EpochStart`."""

    def __init__(
        self,
        clock: EpochClock,
        expects: dict[str, Any],
        streams: dict[str, Any] | None,
        resumed: dict[str, Any] | None,
        total: int | None,
        every: int,
        tally: Tally,
        rank: int = 0,
    ) -> None:
        self.epoch = clock.value
        self._clock = clock
        self._restored = clock.restored
        self._expects = expects
        self._resumed = resumed
        self.total = total
        """Number of steps in the epoch; None if unknown."""
        self.every = every
        self.finished = False
        """Whether the user has seen the end of the epoch."""
        self.asked = False  # the first batch was asked for
        self.first_step: int = 0 if resumed is None else resumed["step"]
        """Number of steps that were delivered before this iterator, without a gap."""
        self.skipped = frozenset[int](() if resumed is None else resumed["beyond"])
        """Numbers of later steps that were delivered before this iterator, too."""
        self.saved_sampler: dict[str, Any] | None = None if resumed is None else resumed["sampler"]
        """The sampler's state to resume from; None: begin at the start."""
        self._first = self._position = Position(self.first_step, ranges(self.skipped) if self.skipped else ())
        self._before: Position | None = None  # before the last delivery
        self._steps: dict[int, int] = {}  # task -> step, for tasks that are outstanding
        self._stream: IndexStream | None = None
        self.log: StateLog | None = None  # the states of an async sampler, saved by its reader
        self.follows = False
        """Whether a state was loaded that was saved at the end of an epoch, which this epoch follows."""
        self.carried: dict[str, Any] | None = None
        """The `workers` part of that state, where the dataset continues from it."""
        self.generator_then: tuple[torch.Generator, torch.Tensor] | None = None
        """The sampler's generator, and its state at the end of the epoch before."""
        self._inherited: list[PackedCursor | None] = []
        self.ends: dict[int, PackedCursor | None] = {}
        """The cursors of the workers whose copies of the dataset have ended. Any thread may add a cursor."""
        self.drained: dict[str, Any] | None = None
        """The state of an async sampler at the end of the epoch before."""
        self.undrained: dict[str, Any] | None = None
        """The loader's state at that end, which is still valid until the sampler has been advanced to it."""
        self.view: RankView | None = None
        """This rank's share of the order, in seeded mode."""
        self._rank = rank
        self._tally = tally
        self._tallied = False
        self._streams = streams
        self.agreement: Agreement | None = None
        """The agreement with the other ranks on the end of the epoch; None if none is needed."""
        self.assignment: EpochAssignment | None = None
        """The epoch's shard assignment, for datasets that have one; None: not planned yet."""
        self.assignment_key: int | None = None
        """Chooses their order, if this epoch is not resumed; None for other datasets."""
        self.pending: PendingBatch | None = None
        """The batch that was begun. The iterator sets it to None when the user has it; else a call was interrupted,
        which the next continues.
        """
        self.delivery: Any = None
        """The delivery of the consumer of workers' batches."""
        self.interrupted = False
        """Whether a batch was begun since the last, and interrupted: the dataset may have read on."""
        self.cut_short = False
        """Whether the sampler raised and has given no index since: its end then is not the epoch's."""
        self._astray = False  # indices did not come from the stream
        self.seeds: dict[str, Any] | None = None
        """The seeds of a loaded state; once the epoch has begun, those that it uses."""
        self.live: Callable[[], Callable[[], PackedCursor | None] | None] | None = None
        """A weak reference to a function that takes the dataset's current cursor, where nothing is read ahead."""

    # ------------------------------------------------------------------------------------------- beginning

    @property
    def outdated(self) -> bool:
        """Whether another epoch was set before this epoch gave a batch. In seeded mode the iterator then has that.
        An iterator that resumes from a loaded position keeps it, as Lightning needs, which counts epochs itself.
        """
        if self._position.delivered is not None or self._resumed is not None or self._expects["mode"] != "seeded":
            return False
        return self._clock.value != self.epoch

    @property
    def unbegun(self) -> bool:
        """Whether the first batch was asked for, and the position is still that of the beginning."""
        moved = self.finished or (self._position.step, self._position.beyond) != (self._first.step, self._first.beyond)
        return self.asked and not moved and self._position.delivered is None

    @property
    def touched(self) -> bool:
        """Whether a batch was delivered, in this iterator or before the position that it resumed from."""
        return self._position.delivered is not None or (self._resumed is not None and self._resumed["step"] > 0)

    @property
    def moment(self) -> tuple[Any, ...]:
        """Differs after each delivery, of a batch or of an error."""
        return self._position[2:5]

    @property
    def place(self) -> str:
        """The number of batches that were delivered without a gap, in words."""
        if self.finished:
            return "finished"
        return f"{self._position.step}{'' if self.total is None else f' of {self.total}'} batches delivered"

    @property
    def iterates_itself(self) -> bool:
        """Whether the dataset is its own iterator, as far as its states show."""
        return any(cursor.value.itself for cursor in self._position.cursors if cursor is not None)

    @property
    def padding(self) -> int:
        """Samples at the end of the last batch that only keep the ranks even."""
        return self._position.padding

    @property
    def saved_assignment(self) -> Any:
        """The shard assignments to resume from; None: begin at the start."""
        workers = None if self._resumed is None else self._resumed["workers"]
        return None if workers is None else workers.get("leases")

    @property
    def sampler_log(self) -> StateLog | None:
        """The states of the sampler, async or not; None for a sampler without a state."""
        return self.log if self._stream is None else self._stream.log

    @property
    def next_worker(self) -> int:
        """The worker whose turn it is for the next batch of an iterable dataset."""
        return self._position.next_worker

    def stream(self, index_sampler: Any, made: Any, drawn: dict[str, str] | None = None) -> IndexStream:
        """The index stream from the delivered position on. `made` is a new iterator of the index sampler; `drawn` holds
        the generators' states from before it was made (see `IndexStream`).
        """
        self.view = index_sampler if isinstance(index_sampler, RankView) else None
        self._stream = IndexStream(
            index_sampler,
            made,
            step=self.first_step,
            beyond=self.skipped,
            every=self.every,
            saved=self.saved_sampler,
            generators=None if self._resumed is None else self._resumed["generators"],
            drawn=drawn,
        )
        return self._stream

    def starts(
        self, workers: int, base_seed: int, shared_seed: int | None, *, new_workers: bool = False
    ) -> tuple[int, list[EpochStart]]:
        """The base seed, and where each worker begins the epoch. Without workers: ``workers=1``. `new_workers`: the
        workers are new, though persistent, and begin where their predecessors ended.

        Seeds from a loaded state replace the drawn ones, so that the workers draw the same numbers again.

        Raises:
            StateError: the dataset says that it has another number of streams than when the state was loaded.
        """
        streams = self.config.loader_streams
        copies = streams or workers
        if self.seeds is not None:
            base_seed = int(self.seeds["base"])
            shared_seed = shared_seed if self.seeds["shared"] is None else self.seeds["shared"]
        if self._expects["mode"] == "torch":
            # Only in torch mode: in seeded mode the workers' random numbers follow from `seed`.
            self.seeds = {"rank": self._rank, "base": base_seed, "shared": shared_seed}
        saved = None if self._resumed is None else self._resumed["workers"]
        inherited = self._inherited if saved is None and len(self._inherited) == copies else None
        if saved is None:
            given, next_worker = [0] * copies, 0
            carried = None if self.carried is None else self.carried["cursors"]
            # Another length: its streams are counted anew since the state was loaded, and begin anew, too.
            saved_cursors = carried if carried is not None and len(carried) == copies else [None] * copies
            found = [None if each is None else Cursor(**each) for each in saved_cursors]
            # Persistent workers still have their datasets: they go on without a cursor.
            if new_workers and inherited is not None:
                found = [None if each is None else each.value for each in inherited]
            assigned = self.carried is not None and "leases" in self.carried
            found = [parts.later_cursor(each, assigned) for each in found]
        else:
            if saved.get("loader_streams") != streams:
                raise StateError(explain_streams(saved.get("loader_streams"), streams, saved["num_workers"]))
            given, next_worker = saved["given"], saved["next"]
            # A cursor with a problem cannot be used: the stream must be read again.
            found = [None if each is None or each["problem"] else Cursor(**each) for each in saved["cursors"]]
        cursors = inherited or [None if each is None else pickle_cursor(each) for each in found]
        self._position = self._position._replace(next_worker=next_worker, given=tuple(given), cursors=tuple(cursors))
        options = shared_seed, self.epoch, self._clock.sets_dataset
        starts = [
            EpochStart(*options, cursor, batches - (cursor.batches if cursor and saved else 0), message=self.message)
            for cursor, batches in zip(found, given, strict=True)
        ]
        return base_seed, starts if streams is None else by_worker(starts, workers)

    def inherit(self, before: Progress) -> None:
        """Let persistent workers continue with their datasets from the end of the epoch before, if it was completed."""
        if before.finished and before._streams is not None:
            assigned = before.assignment is not None
            values = (None if each is None else each.value for each in before._position.cursors)
            later = (parts.later_cursor(each, assigned) for each in values)
            self._inherited = [None if each is None else pickle_cursor(each) for each in later]

    def base_seed_drawn(self) -> None:
        """Undo the draw of the base seed if this epoch follows another: persistent workers would have kept their first
        one, so the sampler's generator is restored.
        """
        if self.generator_then is not None:
            generator, state = self.generator_then
            generator.set_state(state)

    def drawn(self) -> None:
        """The epoch's numbers were drawn, as in the loaded position within it. Of a stream."""
        if self._resumed is not None:
            parts.continue_generator(self.config, self._resumed)

    def begun(self, worker: int, cursor: PackedCursor | None) -> None:
        """Record the cursor of a worker's copy of the dataset when it began, if it has a state."""
        # Only the first cursor: the consumer may process a notice twice, the second time behind a newer cursor.
        if cursor is not None and self._streams is not None and self._position.cursors[worker] is None:
            before = self._before
            self._before = None if before is None else before.with_cursor(worker, cursor)
            self._position = self._position.with_cursor(worker, cursor)

    # ----------------------------------------------------------------------------------------- per batch

    def pulled(self, task: int, step: int | None) -> None:
        """Record the step of a task; None: its index did not come from the stream."""
        self.cut_short = False
        if step is None:
            self._astray = True
        else:
            self._steps[task] = step

    def given(self, copy: int) -> int:
        """The number of batches of this copy of the dataset that were answered; 0 where none are counted."""
        unread = self._position.unread
        read = unread is not None and unread[1] == copy
        return 0 if self._streams is None else self._position.given[copy] + read

    def _pass_over(self) -> None:
        """Skip the steps that code outside the loader took from the sampler's iterator."""
        stream = self._stream
        if stream is not None and stream.unclaimed:
            before = None if self._before is None else self._before.past(stream.unclaimed)
            position = self._position.past(stream.unclaimed)
            # Without a call, so that Ctrl-C cannot have the steps passed over twice.
            self._before, self._position, stream.unclaimed = before, position, []

    def delivered(self, task: int, worker: int = 0, cursor: PackedCursor | None = None) -> None:
        """Record that the user gets the task's batch. A repeated call, as after Ctrl-C, has no effect."""
        before = self._position
        if task != before.delivered:
            failed = before.failed
            if before.unread is not None:
                before = self._after(before, *before.unread)
            # After Ctrl-C, which comes within calls alone, the position is the old one or the new one.
            self._before, self._position, self.interrupted = before, self._after(before, task, worker, cursor), False
            if failed is not None:
                self._steps.pop(failed, None)
        # Also in a repeated call: Ctrl-C may have struck just before.
        self._steps.pop(task, None)
        stream = self._stream
        if stream is not None and stream.unclaimed:
            self._pass_over()
        log = self.log if stream is None else stream.log
        if log is not None:
            log.forget(self._position.step)
        # Also without a further `next()`: a loop that stops after the last batch has completed the epoch.
        if self._position.step == self.total:
            self._complete()

    def _after(self, before: Position, task: int, worker: int, cursor: PackedCursor | None) -> Position:
        """The position once a task was delivered, and the error before it counts as done."""
        number = self._steps.get(task)
        padding = None if self.view is None else self.view.cutter.padding
        step, beyond = before.step, before.beyond
        if number == step and not beyond and before.failed is None:  # the usual case
            step += 1
        else:
            step, beyond = self._passed(before, before.failed, task)
        given, cursors, next_worker = before.given, before.cursors, before.next_worker
        if self._streams is not None:
            next_worker = (worker + 1) % len(given)
            given = (*given[:worker], given[worker] + 1, *given[worker + 1 :])
            if cursor is not None:
                cursors = (*cursors[:worker], cursor, *cursors[worker + 1 :])
        padded = padding[1] if padding is not None and padding[0] == number else 0
        return Position(step, beyond, task, None, None, next_worker, given, cursors, padded)

    def _passed(self, before: Position, *tasks: int | None) -> tuple[int, tuple[range, ...]]:
        """`Position.step` and `Position.beyond` once these tasks are done."""
        step, beyond = before.step, before.beyond
        for task in tasks:
            number = None if task is None else self._steps.get(task)
            # A stream's steps have no numbers of their own; of a map dataset the sampler raised, and no step was taken.
            if number is None and task is not None and self._expects["kind"] != "map":
                number = step
            if number is not None:
                step, beyond = done(step, beyond, number)
        return step, beyond

    def failed(self, task: int, worker: int = 0, cursor: PackedCursor | None = None) -> None:
        """Record that the user gets an error instead of the batch. Idempotent.

        The batch counts as done once the next batch or error is taken, or the end: a run that ends with the error, and
        resumes, asks for the samples again.
        """
        before = self._position
        if task in (before.failed, before.delivered) or (before.unread is not None and task == before.unread[0]):
            return
        # With assigned shards an error is no batch, as for `Reader.failed`; also where their plan has failed.
        if self._expects["kind"] == "iterable" and not self.config.assigns_shards:
            self._settle_unread()
            self._position = self._position._replace(unread=(task, worker, cursor))
            return
        step, beyond = self._passed(before, before.failed)
        self._position = before._replace(step=step, beyond=beyond, failed=task)
        if before.failed is not None:
            self._steps.pop(before.failed, None)

    def _settle_unread(self) -> None:
        """Count the error that the user of a stream got last as done."""
        before = self._position
        if before.unread is not None:
            self._before, self._position, self.interrupted = before, self._after(before, *before.unread), False

    def finish(self) -> None:
        """Record that the user has seen the end of the epoch; not where an error of the sampler ended it."""
        if self.cut_short or (self._position.unread is not None and self.unbegun):
            return
        self._settle_unread()
        self.finished = True
        # A copy: the loop's thread may add another worker's end while the ranks have already agreed on the epoch's.
        for worker, cursor in self.ends.copy().items():
            if cursor is not None:
                self._position = self._position.with_cursor(worker, cursor)
        self._complete()

    def _complete(self) -> None:
        # Else a state was loaded since: this iterator must not advance the restored epoch.
        if self._clock.restored == self._restored:
            self._clock.completed(self.epoch)
        # Called twice for some epochs: with the last batch, and at the end.
        if not self._tallied:
            self._tallied = True
            self._tally.add(self.view, self.assignment, self._position.step, self._expects["batch_size"] or 1)

    # ------------------------------------------------------------------------------------------------ reading

    def state_before_last(self) -> dict[str, Any]:
        """`state` as it was before the last delivery, for callers that read one batch ahead."""
        self._pass_over()
        return self.state() if self._before is None else self._state(self._before, finished=False)

    def state(self, *, finished: bool = False) -> dict[str, Any]:
        """A new dictionary; see `schema.py`. `finished`: as if the epoch had ended here."""
        self._pass_over()
        last = self._position.delivered
        if last is not None and last == self._undelivered():
            # Ctrl-C came after the batch was counted, and before the user had it.
            return self.state_before_last()
        return self._state(self._position, finished=finished or self.finished)

    def _state(self, position: Position, *, finished: bool) -> dict[str, Any]:
        # An async sampler is advanced to the end of the epoch before only when it is read. Until then, its own state is
        # of an earlier place than the loaded state.
        if self.undrained is not None and self.log is None and self._position.delivered is None:
            return copy.deepcopy(self.undrained)
        if self._astray and not finished:
            raise StateError(
                "this epoch's batches did not all come from its sampler: the loader's iterator was given "
                "another _sampler_iter, so there is no position to save. Advance the one that it had instead of "
                "replacing it, or save between epochs"
            )
        stream = self._stream
        if stream is not None:
            sampler = stream.state(position.step)
        else:
            sampler = self.saved_sampler if self.log is None else self.log.at(position.step)
        return {
            "version": VERSION,
            **self._expects,
            "arguments": copy.copy(self._expects.get("arguments")),
            **parts.described_data(self.config),
            "epoch": self.epoch,
            "step": position.step,
            "beyond": [number for each in position.beyond for number in each],
            "finished": finished,
            "sampler": copy.deepcopy(sampler),
            "generators": parts.generators(self.config, stream, finished),
            "seeds": None if self.seeds is None else dict(self.seeds),
            "workers": None if self._streams is None else self._worker_states(self._streams, position, finished),
        }

    def _undelivered(self) -> int | None:
        if self.pending is not None:
            return self.pending[0]
        item = None if self.delivery is None else self.delivery.item
        return None if item is None else int(item.seq)

    def _worker_states(self, streams: dict[str, Any], position: Position, finished: bool) -> dict[str, Any]:
        cursors: list[dict[str, Any] | None] = [
            None if cursor is None else cursor.value._asdict() for cursor in position.cursors
        ]
        # Not after an error: the dataset has passed the batch that a resumed run asks for again.
        behind = finished or self.interrupted or (self._position.failed, self._position.unread) != (None, None)
        take = None if behind or self.live is None else self.live()
        if take is not None and (live := take()) is not None:
            # In the consumer's process the dataset may share its generators with the consumer, which has drawn since.
            now = live.value
            if now.batches == position.given[0] and not now.problem:
                cursors = [now._asdict()]
        assignment = self.saved_assignment  # unchanged if the epoch was not planned yet
        if self.assignment is not None:
            assignment = self.assignment.state(cursors, position.given)
        elif assignment is None and self.assignment_key is not None:
            assignment = {"key": self.assignment_key, "plan": None, "done": 0, "back": [], "returned": []}
        return {
            **streams,
            **({} if assignment is None else {"leases": assignment}),
            "next": position.next_worker,
            "given": list(position.given),
            "cursors": cursors,
        }

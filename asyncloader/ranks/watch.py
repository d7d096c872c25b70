"""Gathers how long each rank waits for batches, and says on rank 0 which ranks starve, and why.

Data path: statistics -> [watch] -> explain, log.

Each rank writes its figures to the store of torch.distributed, through which the ranks found each other, and rank 0
reads them. This is no collective: no rank waits for another, so a rank that dies, ends early or never iterates this
loader delays none, and its figures are left out once they are old. It happens in a thread that ends with it, every
few seconds at most, while batches are delivered; without torch.distributed nothing of it exists.

The store is taken from torch.distributed each time and not kept: rank 0's process owns its server, whose port must be
free once the user has shut torch.distributed down.
"""

from __future__ import annotations

import logging
import os
import socket
import weakref
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

import torch

from asyncloader.ranks.agreement import join_at_exit, start_thread
from asyncloader.ranks.process_group import has_group
from asyncloader.ranks.topology import Topology, process_group, topology
from asyncloader.telemetry.counters import Stage
from asyncloader.telemetry.rank_waits import RankWait, WaitWindow, compare, pack, unpack
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.memory.live_objects import LiveObjects

_log = logging.getLogger("asyncloader")

_EVERY_S = 5.0
_REST = 50
"""The least ratio of the time between two exchanges to the time of one: reading from thousands of ranks takes long."""
_MOST_UNCHANGED = 6
"""Exchanges after which a rank's unchanged figures are left out: it has ended, or no longer reads this loader."""


def watch_ranks(spec: Any, statistics: Statistics) -> None:
    """Compare a loader's waiting with that on other ranks from now on, if torch.distributed connects them.

    To be called where torch.distributed is initialized, for each of the loader's iterators. In a worker, and in any
    other process that a rank has forked, nothing is compared: it shares the rank's connection to the store.

    Args:
        spec: the loader's options.
        statistics: of the loader.
    """
    watch = statistics.watch
    if isinstance(watch, RankWatch) and not watch.stale:
        return
    if torch.utils.data.get_worker_info() is not None or any(each.inherited and not each.stale for each in _watches):
        return
    here, members = topology(spec), process_group(spec._asyncloader_options.group)
    if here.world_size > 1 and has_group(here, members):
        kind = type(spec.dataset)
        name = f"{kind.__module__}.{kind.__qualname__}, {spec.batch_size}"
        statistics.watch = RankWatch(here, members, name)


class RankWatch:
    """One loader's part of the comparison.

    Args:
        here: this process's rank, and the number of ranks.
        members: a process group of these ranks; None: all ranks.
        name: of the loader, which is the same on all ranks. Loaders of one name that exist at the same time are
            numbered in the order of their first iterators.
    """

    def __init__(self, here: Topology, members: Any, name: str) -> None:
        self._world = weakref.ref(torch.distributed.group.WORLD)
        self._owner = os.getpid()
        self._here = here
        self._name = (
            "all" if members is None else "_".join(map(str, torch.distributed.get_process_group_ranks(members)))
        )
        self._name += f"/{name}"
        taken = {each._number for each in _watches if each._name == self._name and not each.stale}
        self._number: int = next(number for number in count() if number not in taken)
        self._window = WaitWindow()
        self._next = 0.0
        self._busy = False
        self._over = False
        # Each other rank's newest figures as they came, and the exchanges since they have changed; None: they have not
        # changed at all, and may be those of an earlier loader or run.
        self._received: dict[int, tuple[bytes, int | None]] = {}
        self._text = ""
        self._starving: tuple[tuple[int, Stage], ...] = ()
        self._logged: set[tuple[int, Stage]] = set()
        _watches.add(self)
        join_at_exit()

    @property
    def stale(self) -> bool:
        """Whether torch.distributed was shut down since, and perhaps initialized again."""
        return torch.distributed.group.WORLD is not self._world()

    @property
    def inherited(self) -> bool:
        """Whether this process is forked from the rank that it belongs to."""
        return os.getpid() != self._owner

    def look(self, now: float, statistics: Statistics) -> None:
        """Exchange figures, if that is due. Returns at once. In the consumer's thread."""
        if now < self._next or self._busy or self._over or self.inherited:
            return
        self._busy = True
        try:
            start_thread(partial(self._exchange, statistics))
        except RuntimeError:  # no thread can be started, as at exit
            self._over = True

    def lines(self) -> list[str]:
        """On rank 0 the comparison of the ranks in words; else empty."""
        return [f"ranks: {self._text}"] if self._text else []

    # ------------------------------------------------------------------------------------------- in a thread

    def _exchange(self, statistics: Statistics) -> None:
        begin = perf_counter()
        try:
            if self.stale:
                self._over = True
                return
            own = self._window.measure(
                socket.gethostname(),
                max(0.0, statistics.elapsed_s - statistics.startup_s),
                max(0.0, statistics.wait_s - statistics.startup_s),
                statistics.batches,
                statistics.arrays(),
            )
            from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

            store: Any = PrefixStore(f"asyncloader/waits/{self._name}/{self._number}", _get_default_store())
            if self._here.rank:
                if own is not None:
                    store.set(str(self._here.rank), pack(own))
            else:
                self._judge(own, store)
        except Exception as error:  # the store's process has ended, or torch.distributed is being shut down
            self._over = True
            _log.debug("the ranks' waiting is no longer compared: %s", error)
        finally:
            now = perf_counter()
            self._next = now + max(_EVERY_S, _REST * (now - begin))
            self._busy = False

    def _judge(self, own: RankWait | None, store: Any) -> None:
        waits = {} if own is None else {0: own}
        waits |= self._read(store)
        found = compare(waits)
        # Twice in a row: a hiccup of a second is not worth a line.
        confirmed = set(found.starving) & set(self._starving)
        text = found.text
        if text and len(waits) < self._here.world_size:
            text += f" ({len(waits)} of {self._here.world_size} ranks are known)"
        self._text, self._starving = text, found.starving
        if confirmed - self._logged:
            self._logged |= confirmed
            _log.warning("%s", text)

    def _read(self, store: Any) -> dict[int, RankWait]:
        """Return the other ranks' figures."""
        ranks = range(1, self._here.world_size)
        if not self._received:
            # Unlike `get`, this does not wait for a key that no rank has written: it writes an empty value.
            self._received = {rank: (bytes(store.compare_set(str(rank), "", "")), None) for rank in ranks}
            return {}
        found: dict[int, RankWait] = {}
        for rank, each in zip(ranks, store.multi_get([str(rank) for rank in ranks]), strict=True):
            before, unchanged = self._received[rank]
            data = bytes(each)
            age = 0 if data != before else None if unchanged is None else unchanged + 1
            self._received[rank] = data, age
            if age is not None and age <= _MOST_UNCHANGED and (wait := unpack(data)) is not None:
                found[rank] = wait
        return found


_watches: LiveObjects[RankWatch] = LiveObjects()

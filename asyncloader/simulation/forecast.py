"""Says what limits a run and what would help: each answer is a simulation with that setting changed.

Data path: contents, epoch_simulation -> [forecast] -> commands.run_plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from asyncloader.remote.assignment import Assignment
from asyncloader.remote.shard_splitting import RANGES_PER_WORKER, cut, group_ranges
from asyncloader.simulation.contents import Contents
from asyncloader.simulation.epoch_simulation import RunSetting, Simulated, WorkerCosts, simulate
from asyncloader.telemetry.prediction import WORTH

_ENOUGH = 1.05
"""More workers are not proposed for a smaller gain than this."""

_MOST_FACTOR = 8
"""The largest number of workers that is tried, as a multiple of the given number."""


class Limit(NamedTuple):
    """A part of the run.

    Attributes:
        name: "network", "latency", "processors", "decode", "reading" or "training step".
        gain: times as fast as the run would be if that part took no time, or had no limit.
    """

    name: str
    gain: float


class Help(NamedTuple):
    """A setting that makes the run faster.

    Attributes:
        option: as it is given to a loader or dataset, such as ``"num_workers=8"``.
        result: of the simulation with it.
        gain: times as fast.
    """

    option: str
    result: Simulated
    gain: float


class Forecast:
    """A run, and what would change it. Each method simulates.

    Args:
        contents: of the shards.
        assignments: of the epoch, as planned for `setting.workers`.
        setting: of the run.
        costs: of its computations.
    """

    def __init__(
        self, contents: Contents, assignments: Sequence[Assignment], setting: RunSetting, costs: WorkerCosts
    ) -> None:
        self._contents = contents
        self._assignments = assignments
        self._setting = setting
        self._costs = costs
        self.base = simulate(contents, assignments, setting, costs)
        """The run as it is."""

    def limits(self) -> list[Limit]:
        """Return what each part of the run costs, most first."""
        setting, costs = self._setting, self._costs
        without: dict[str, tuple[RunSetting, WorkerCosts]] = {
            "latency": (replace(setting, rtt_s=0.0), costs),
            "processors": (replace(setting, cpus=setting.workers + 1.0), costs),
            "decode": (setting, replace(costs, decoding=0.0)),
            "reading": (setting, replace(costs, requesting=0.0, receiving=0.0, parsing=0.0, collating=0.0)),
            "network": (replace(setting, bandwidth=None), costs),
            "training step": (replace(setting, step_s=0.0), costs),
        }
        found = [
            Limit(name, self._gain(simulate(self._contents, self._assignments, *other)))
            for name, other in without.items()
            if other != (setting, costs)
        ]
        return sorted(found, key=lambda limit: -limit.gain)

    def helps(self) -> list[Help]:
        """Return the settings of the loader that gain at least a tenth, most first."""
        setting = self._setting
        found: list[Help] = []
        factor, ahead = 4 * setting.prefetch_factor, 4 * setting.read_ahead
        for option, other in (
            (f"prefetch_factor={factor}", replace(setting, prefetch_factor=factor)),
            (f"read_ahead={ahead}", replace(setting, read_ahead=ahead)),
        ):
            found.append(self._help(option, other, self._assignments))
        best: Help | None = None
        times = 2
        while times <= _MOST_FACTOR:
            workers = times * setting.workers
            each = self._help(f"num_workers={workers}", replace(setting, workers=workers), self._planned(workers))
            if best is not None and each.gain < best.gain * _ENOUGH:
                break
            best, times = each, 2 * times
        found += [] if best is None else [best]
        return sorted((each for each in found if each.gain >= WORTH), key=lambda each: -each.gain)

    def _help(self, option: str, setting: RunSetting, assignments: Sequence[Assignment]) -> Help:
        result = simulate(self._contents, assignments, setting, self._costs)
        return Help(option, result, self._gain(result))

    def _gain(self, other: Simulated) -> float:
        return self.base.seconds / max(other.seconds, 1e-9)

    def _planned(self, workers: int) -> Sequence[Assignment]:
        """Return the plan for another number of workers, from the known sizes of the shards."""
        catalog, parts = self._contents.catalog, RANGES_PER_WORKER * workers
        # Not cut for more workers, and so not for fewer: there may be a million.
        whole = len(catalog) >= parts
        ranges = list(chain.from_iterable(self._assignments)) if whole else cut(catalog, parts)
        return group_ranges(ranges, catalog, workers)

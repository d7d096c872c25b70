"""Names what in a program's use of torch's loader gives wrong samples, or costs time. Pure.

Data path: records of a run with torch's loader -> [faults] -> findings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncloader.commands.findings import Finding

_COSTS = 0.05  # the share of the time from which on a cost is named
_LEAST_SINGLES = 3
_SEED = "in worker_init_fn, seed it by torch.initial_seed() % 2**32, which differs by worker and epoch"
_PART = "in its __iter__, take only this worker's part (torch.utils.data.get_worker_info())"

Values = Mapping[str, Any]
Fault = tuple[str, str, str]  # name, text, advice


def find_faults(processes: Sequence[Values], workers: Sequence[Values]) -> list[Finding]:
    """Return a finding for each fault of each loader of torch, from what the processes that iterated loaders recorded,
    and what torch's workers reported.
    """
    found: dict[tuple[str, str], Finding] = {}  # ranks have the same faults
    for process in processes:
        for place, record in process.items():
            mine = [each for each in workers if (each["place"], each["process"]) == (place, record["process"])]
            for name, text, advice in () if record["ours"] else (*_of_loader(record, mine), *_of_workers(mine)):
                found.setdefault((place, name), Finding(name, "note", f"{place}: {text}", advice))
    return [*found.values()]


def _of_loader(record: Values, reports: Sequence[Values]) -> Iterator[Fault]:
    points, start_s = record["points"] or [[0.0]], record["start_s"]
    seconds = points[-1][0] - points[0][0]
    if record["singles"] >= _LEAST_SINGLES and record["singles"] >= 0.8 * (record["begins"] - 1):
        text = f"iter() was called {record['begins']} times, and the iterator left after its first batch"
        yield "iter() for each step", text, "keep the iterator, and call iter() again when it has ended"
    elif record["workers"] and not record["persistent"] and start_s > _COSTS * seconds:
        text = f"workers were started {record['begins']} times; until their first batches came, {start_s:.2g} s passed"
        yield "workers start anew", f"{text} of {seconds:.2g} s", "set persistent_workers=True"
    orders = [tuple(each) for each in record["orders"] if each[0] > 1]
    if len(orders) > len(set(orders)):
        text = "two epochs had the same order: the sampler's set_epoch was not called between them"
        yield "same order in each epoch", text, "call sampler.set_epoch(epoch) before each epoch"
    if record["stale"]:
        changes = ", ".join(f"{path} to {value}" for path, value in record["stale"].items())
        text = f"persistent workers had begun before the program changed {changes}, and keep the former value"
        yield "stale workers", text, "set persistent_workers=False, or keep the value in a tensor in shared memory"
    share = max(each["state_s"] / max(each["seconds"], 1e-9) for each in ({**record, "seconds": seconds}, *reports))
    if share > _COSTS:
        yield "states cost time", f"state_dict() took {share:.0%} of the time", "save a state each some hundred steps"


def _of_workers(reports: Sequence[Values]) -> Iterator[Fault]:
    """Compare the workers of an iterator with one another, and each worker with that of the epoch before."""
    for key, name, words in (
        ("begun", "equal random numbers", "workers drew the same from"),
        ("worker", "random numbers restart", "each epoch drew the same from"),
    ):
        states: dict[tuple[int, str], list[int]] = defaultdict(list)
        for each in reports:
            for generator, state in each["drawn"].items():
                states[each[key], generator].append(state)
        same = sorted({generator for (_, generator), among in states.items() if len(among) > len(set(among))})
        if same:
            yield name, f"{words} {', '.join(same)}", _SEED
    epochs: dict[int, list[list[int]]] = defaultdict(list)
    for each in reports:
        if each["streams"] and len(set(each["batches"])) > 1:
            epochs[each["begun"]].append(each["batches"])
    for among in epochs.values():
        if len(among) > len({tuple(each[: min(map(len, among))]) for each in among}):
            text = "workers read the same samples of the IterableDataset, so that each came more than once"
            yield "duplicates", text, _PART

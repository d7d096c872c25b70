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

Values = Mapping[str, Any]
_SEED = "seed what a worker draws from by torch.initial_seed() % 2**32 in worker_init_fn; or set seed= of asyncloader"


def find_faults(processes: Sequence[Values], workers: Sequence[Values]) -> Iterator[Finding]:
    """Yield a finding for each fault.

    Args:
        processes: what each process that iterated loaders recorded.
        workers: the reports of torch's workers.
    """
    named: set[tuple[str, str]] = set()  # ranks have the same faults
    for process in processes:
        for place, record in process["loaders"].items():
            if record["ours"]:
                continue
            mine = [each for each in workers if each["place"] == place]
            for each in (*_of_loader(record), *_of_workers(mine), *_of_states(process, record, mine)):
                if (place, each.name) not in named:
                    named.add((place, each.name))
                    yield each._replace(text=f"{place}: {each.text}")


def _of_loader(record: Values) -> Iterator[Finding]:
    seconds = record["points"][-1][0] - record["points"][0][0] if record["points"] else 0.0
    if record["singles"] >= _LEAST_SINGLES and record["singles"] >= 0.8 * (record["begins"] - 1):
        text = f"iter() was called {record['begins']} times, and the iterator left after its first batch"
        advice = "keep the iterator, and call iter() again when it has ended; each call draws a new order"
        yield Finding("iter() for each step", "note", text, advice)
    elif record["workers"] and not record["persistent"] and record["start_s"] > _COSTS * max(seconds, 1e-9):
        text = f"workers were started {record['begins']} times; until the first batch came, "
        text += f"{record['start_s'] / seconds:.0%} of the time passed" if seconds else "all of the time passed"
        yield Finding("workers start anew", "note", text, "set persistent_workers=True")
    orders = [tuple(each) for each in record["orders"] if each[0] > 1]
    if len(orders) > len(set(orders)):
        text = "two epochs had the same order: the sampler's set_epoch was not called between them"
        yield Finding("same order in each epoch", "note", text, "call sampler.set_epoch(epoch) before each epoch")
    if record["stale"]:
        changes = ", ".join(f"{path} to {value}" for path, value in record["stale"].items())
        text = f"{changes} was changed after the persistent workers had begun, which keep the former value"
        advice = "set persistent_workers=False, or keep the value in shared memory (torch.Tensor.share_memory_)"
        yield Finding("stale workers", "note", text, advice)


def _of_workers(reports: Sequence[Values]) -> Iterator[Finding]:
    """Compare the workers with one another, and with those of the epoch before."""
    epochs: dict[int, list[Values]] = defaultdict(list)
    for each in reports:
        epochs[each["begun"]].append(each)
    for (_, name), among in _drawn(reports, "begun").items():
        if len(among) > len(set(among)):
            yield Finding("equal random numbers", "note", f"workers drew the same from {name}", _SEED)
    for (_, name), among in _drawn(reports, "worker").items():
        if len(among) > len(set(among)):
            yield Finding("random numbers restart", "note", f"each epoch drew the same from {name}", _SEED)
    for each in epochs.values():
        read = [tuple(one["batches"]) for one in each if one["streams"] and len(set(one["batches"])) > 1]
        shortest = min(map(len, read), default=0)
        if shortest > 1 and len(read) > len({one[:shortest] for one in read}):
            text = "workers read the same samples of the IterableDataset, so that each came more than once"
            advice = "in its __iter__, take only this worker's part (torch.utils.data.get_worker_info())"
            yield Finding("duplicates", "note", text, advice)


def _drawn(reports: Sequence[Values], key: str) -> dict[tuple[int, str], list[int]]:
    """Return the states with which drawing began, by the values of a key and the names of generators."""
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    for each in reports:
        for name, state in each.get("drawn", {}).items():
            found[each[key], name].append(state)
    return found


def _of_states(process: Values, record: Values, reports: Sequence[Values]) -> Iterator[Finding]:
    points = record["points"]
    spent = [(each["state_s"], each["seconds"]) for each in reports if each.get("seconds")]
    if points:
        spent.append((process["state_s"], points[-1][0] - points[0][0]))
    share = max((state / whole for state, whole in spent if whole), default=0.0)
    if share > _COSTS:
        advice = "save a state less often: snapshot_every_n_steps, or every some hundred steps"
        yield Finding("states cost time", "note", f"state_dict() took {share:.0%} of the time", advice)

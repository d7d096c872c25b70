"""`asyncloader plan`: predicts the rate, the requests and the cost of a run over shards, and says what limits it.

Data path: URLs -> simulation.shard_facts -> simulation.forecast -> [run_plan] -> findings.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from asyncloader.bridge import run_in_thread
from asyncloader.commands.findings import Finding, in_bytes
from asyncloader.commands.quantities import in_rate, in_time, seconds
from asyncloader.cpus import cpu_limit
from asyncloader.errors import error_line
from asyncloader.remote.reading import READ_AHEAD
from asyncloader.simulation.contents import Reads
from asyncloader.simulation.epoch_simulation import RunSetting, WorkerCosts
from asyncloader.simulation.forecast import Forecast, Limit
from asyncloader.simulation.shard_facts import ShardFacts, gather_facts
from asyncloader.telemetry.prediction import WORTH

_SHOWN = 5  # shards that cannot be read

# Each worker and batch is simulated, and so is an epoch with eight times the workers.
_MOST = {"workers": 1024, "batch_size": 1 << 20, "epochs": 1 << 40, "prefetch_factor": 1024}
_LEAST_CPUS, _MOST_CPUS = 0.01, 1 << 20

_MEANING = {
    "network": "the bandwidth",
    "latency": "the round trips, with as many requests in flight as the loader has",
    "processors": "the number of CPUs",
    "decode": "decoding, which each worker does for one sample after the other",
    "reading": "the CPU time of requests, receiving, parsing and collating",
    "training step": "the training step, which the loader keeps busy",
}


@dataclass(frozen=True)
class Prices:
    """What a run is charged for, in any currency; None: not given.

    Attributes:
        per_1000_requests: for 1,000 requests.
        per_gb: for 10^9 bytes.
        per_hour: for an hour of the machine.
    """

    per_1000_requests: float | None = None
    per_gb: float | None = None
    per_hour: float | None = None

    def cost(self, reads: Reads, run_s: float) -> float | None:
        """Return the price of a run; None: no price was given."""
        if self == Prices():
            return None
        return (
            reads.requests / 1000 * (self.per_1000_requests or 0.0)
            + reads.nbytes / 1e9 * (self.per_gb or 0.0)
            + run_s / 3600 * (self.per_hour or 0.0)
        )


@dataclass(frozen=True)
class Wanted:
    """The run that is asked about.

    Attributes:
        workers, batch_size: of the loader.
        rtt_s: to the first byte of an answer; None: it is measured.
        bandwidth: bytes per second; None: unlimited.
        decode: the time for a sample (``"2ms"``), or ``MODULE:FUNCTION`` to be measured; None: samples are not decoded.
        step_s: seconds of a training step.
        cpus: CPU seconds per second; None: those that this process may use.
        epochs: of the run.
        prefetch_factor: of the loader.
        prices: of the store and the machine.
    """

    workers: int
    batch_size: int
    rtt_s: float | None = None
    bandwidth: float | None = None
    decode: str | None = None
    step_s: float = 0.0
    cpus: float | None = None
    epochs: int = 1
    prefetch_factor: int = 2
    prices: Prices = Prices()


def plan_run(urls: Sequence[str], format: str | None, wanted: Wanted, *, read: bool) -> Iterator[Finding]:
    """Yield the prediction of a run.

    Args:
        urls: as `RemoteIterableDataset` takes them.
        format: of all shards; None: by the extension.
        wanted: the run.
        read: the first megabytes of a shard, to measure what its samples cost.

    Raises:
        ValueError: a number is out of range; there are no shards, or they have no samples; `decode` raised.
        ShardError, TransportError: the shards cannot be listed, or the first samples not be read.
    """
    _check(wanted)
    function, decoding = _decode(wanted.decode)
    if function is not None and not read:
        raise ValueError(f"--decode {wanted.decode} needs samples to decode: give a time, or leave out --no-read")
    facts = run_in_thread(
        gather_facts(
            urls,
            format,
            workers=wanted.workers,
            batch_size=wanted.batch_size,
            read_ahead=READ_AHEAD,
            read=read,
            ping=wanted.rtt_s is None,
            decode=function,
        )
    )
    setting = RunSetting(
        wanted.workers,
        wanted.batch_size,
        rtt_s=(facts.rtt_s or 0.0) if wanted.rtt_s is None else wanted.rtt_s,
        bandwidth=wanted.bandwidth,
        step_s=wanted.step_s,
        cpus=cpu_limit() if wanted.cpus is None else wanted.cpus,
        prefetch_factor=wanted.prefetch_factor,
        requests=facts.requests,
        range_requests=facts.range_requests,
    )
    costs = WorkerCosts() if facts.measured is None else facts.measured.costs
    if decoding is not None:
        costs = replace(costs, decoding=decoding)
    yield _shards(facts)
    yield from _unreadable(facts)
    if not facts.contents.total:
        raise ValueError("the shards have no samples")
    yield _setting(setting, measured_rtt=wanted.rtt_s is None)
    yield _costs(facts, costs)
    forecast = Forecast(facts.contents, facts.assignments, setting, costs)
    yield _rate(facts, forecast, setting)
    yield from _run(facts, forecast, wanted)
    yield from _limits(forecast)
    yield from _helps(forecast)


def _check(wanted: Wanted) -> None:
    for name, most in _MOST.items():
        if not 1 <= (number := getattr(wanted, name)) <= most:
            raise ValueError(f"--{name.replace('_', '-')} should be at least 1 and at most {most:,}, but got {number}")
    if wanted.cpus is not None and not _LEAST_CPUS <= wanted.cpus <= _MOST_CPUS:
        raise ValueError(f"--cpus should be from {_LEAST_CPUS} to {_MOST_CPUS:,}, but got {wanted.cpus}")
    for field, number in vars(wanted.prices).items():
        if number is not None and not 0 <= number < float("inf"):
            raise ValueError(f"the price {field} should be 0 or more, but got {number}")


def _decode(given: str | None) -> tuple[Callable[[Any], Any] | None, float | None]:
    """Return the function to be measured, or the seconds that were given.

    Raises:
        ValueError: it is neither.
    """
    if given is None:
        return None, None
    module, colon, name = given.rpartition(":")
    if not colon:
        return None, seconds(given)
    folder = Path.cwd()
    if module.endswith(".py"):
        file = Path(module).resolve()
        folder, module = file.parent, file.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part, None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # it is the user's code, and may even end Python
        raise ValueError(f"--decode {given}: importing {module} raised {error_line(error)}") from error
    function = found if callable(found) else None
    if function is None:
        raise ValueError(f"--decode {given}: {module} has no function {name!r}")
    return function, None


def _shards(facts: ShardFacts) -> Finding:
    contents = facts.contents
    formats = sorted({shard.format.name for shard in contents.catalog})
    about = "" if not facts.estimated else f"; of {facts.estimated:,} shards this is estimated from others"
    return Finding(
        "shards",
        "ok",
        f"{len(contents.catalog):,} of format {', '.join(formats)}, {in_bytes(float(contents.sizes.sum()))}, "
        f"{contents.total:,} samples{about}",
        figures={
            "shards": len(contents.catalog),
            "bytes": int(contents.sizes.sum()),
            "samples": contents.total,
            "estimated_shards": facts.estimated,
        },
    )


def _unreadable(facts: ShardFacts) -> Iterator[Finding]:
    if facts.unreadable:
        count = len(facts.unreadable)
        more = "" if count <= _SHOWN else f"\nand {count - _SHOWN:,} more"
        yield Finding(
            "unreadable shards",
            "problem",
            "\n".join(facts.unreadable[:_SHOWN]) + more,
            "asyncloader inspect names all of them; their numbers are estimated here",
            figures={"unreadable": count},
        )


def _setting(setting: RunSetting, *, measured_rtt: bool) -> Finding:
    how = " (measured)" if measured_rtt else ""
    band = "unlimited bandwidth" if setting.bandwidth is None else in_rate(setting.bandwidth)
    step = f", a step of {in_time(setting.step_s)}" if setting.step_s else ""
    return Finding(
        "setting",
        "ok",
        f"num_workers={setting.workers}, batch_size={setting.batch_size} on {setting.cpus:g} CPUs; round trip "
        f"{in_time(setting.rtt_s)}{how}, {band}{step}",
        figures={
            "num_workers": setting.workers,
            "batch_size": setting.batch_size,
            "cpus": setting.cpus,
            "rtt_s": setting.rtt_s,
            "bandwidth": setting.bandwidth,
            "step_s": setting.step_s,
        },
    )


def _costs(facts: ShardFacts, costs: WorkerCosts) -> Finding:
    contents = facts.contents
    each, requests = contents.sample_bytes(), contents.reads(chain.from_iterable(facts.assignments)).requests
    parts = {
        "request": costs.requesting * requests / contents.total,
        "receive": costs.receiving * each,
        "parse": costs.parsing * each,
        "decode": costs.decoding,
        "collate": costs.collating,
    }
    words = ", ".join(f"{name} {in_time(number)}" for name, number in parts.items() if number) or "none is counted"
    figures = {f"{name}_s": number for name, number in parts.items()}
    measured = facts.measured
    if measured is None:
        advice = "what reading costs was not measured: the rate is a bound that it lowers"
        return Finding("a sample's CPU time", "note", words, advice, figures)
    text = f"{words}; of {in_bytes(measured.nbytes)} and {measured.samples:,} samples"
    if measured.uncollated:
        text += f"; not collated: {measured.uncollated}"
    return Finding("a sample's CPU time", "ok", text, figures=figures)


def _rate(facts: ShardFacts, forecast: Forecast, setting: RunSetting) -> Finding:
    base, each = forecast.base, facts.contents.sample_bytes()
    text = (
        f"{base.rate:,.0f} samples/s, {in_rate(base.rate * each)}, {base.rate / setting.batch_size:,.3g} batches/s; "
        f"the first batch after {in_time(base.first_s)}, without the start of workers"
    )
    figures = {
        "samples_per_s": base.rate,
        "bytes_per_s": base.rate * each,
        "first_batch_s": base.first_s,
        "simulated_whole": base.whole,
    }
    if setting.step_s:
        busy = min(1.0, base.rate / setting.batch_size * setting.step_s)
        text += f"; the training step runs {busy:.0%} of the time"
        figures["step_share"] = busy
    return Finding("rate", "ok", text, figures=figures)


def _run(facts: ShardFacts, forecast: Forecast, wanted: Wanted) -> Iterator[Finding]:
    epoch, base = facts.contents.reads(chain.from_iterable(facts.assignments)), forecast.base
    if base.whole and not facts.estimated:
        # With those for samples that another worker reads again, because they do not fill a batch of the first.
        epoch = Reads(base.requests, base.nbytes)
    reads = Reads(facts.planning + wanted.epochs * epoch.requests, wanted.epochs * epoch.nbytes)
    run_s = wanted.epochs * base.seconds
    epochs = "an epoch" if wanted.epochs == 1 else f"{wanted.epochs:,} epochs"
    figures: dict[str, Any] = {
        "seconds": run_s,
        "requests": reads.requests,
        "planning_requests": facts.planning,
        "epoch_requests": epoch.requests,
        "bytes": reads.nbytes,
    }
    yield Finding(
        "run",
        "ok",
        f"{epochs}: {in_time(run_s)}, {reads.requests:,} requests ({facts.planning:,} of them before the first epoch), "
        f"{in_bytes(reads.nbytes)}",
        figures=figures,
    )
    if (cost := wanted.prices.cost(reads, run_s)) is not None:
        yield Finding("cost", "ok", f"{cost:,.4g}, at the given prices", figures={"cost": cost})


def _limits(forecast: Forecast) -> Iterator[Finding]:
    limits = forecast.limits()
    figures = {limit.name: limit.gain for limit in limits}
    first = limits[0] if limits else None
    if first is None or first.gain < WORTH:
        text = f"several at a time: none alone costs a tenth ({_list(limits)})"
        yield Finding("limit", "note", text, figures=figures)
        return
    state: Any = "ok" if first.name == "training step" else "note"
    text = f"{first.name}: without it the run would be {first.gain:.2f} times as fast; it is {_MEANING[first.name]}"
    others = [limit for limit in limits[1:] if limit.gain >= _least_shown(first)]
    if others:
        text += f"\nalone, others would gain less: {_list(others)}"
    yield Finding("limit", state, text, figures=figures)


def _least_shown(first: Limit) -> float:
    return 1.0 + (first.gain - 1.0) / 20


def _list(limits: Sequence[Limit]) -> str:
    return ", ".join(f"{limit.name} {limit.gain:.2f} times" for limit in limits) or "nothing is counted"


def _helps(forecast: Forecast) -> Iterator[Finding]:
    found = forecast.helps()
    for each in found:
        yield Finding(
            "would help",
            "note",
            f"{each.option}: {each.gain:.2f} times as fast, {each.result.rate:,.0f} samples/s",
            f"set {each.option}",
            figures={"option": each.option, "gain": each.gain, "samples_per_s": each.result.rate},
        )
    if not found:
        yield Finding("would help", "ok", "no other num_workers, prefetch_factor or read_ahead gains a tenth")

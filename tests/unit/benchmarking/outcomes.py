"""Makes outcomes of benchmarks, for tests of their words and charts."""

from __future__ import annotations

from typing import Any

from asyncloader.benchmarking.comparison import Judgement, RateRatio
from asyncloader.benchmarking.outcome import Compared, Contender, MeasuredRun, Outcome
from asyncloader.benchmarking.search_settings import Setting

FACTS: dict[str, Any] = {
    "name": "asyncloader.DataLoader",
    "ours": True,
    "iterable": False,
    "assigned": False,
    "stateful": False,
    "asynchronous": False,
    "auto": False,
    "threads": False,
    "context": False,
    "batch_size": 16,
    "batches": 100,
    "not_torch": "",
}
CONTROL = RateRatio(1.0, 0.98, 1.02, 5)


def outcome(best: Setting, found: RateRatio, judgement: Judgement, **facts: Any) -> tuple[Outcome, Compared]:
    """Make the outcome for a loader with 2 workers, 40 batches/s, and a setting that is `found.ratio` times as fast."""
    facts = {**FACTS, **facts}
    base = Setting(2)
    given = Contender("given", base)
    chosen = Contender("asyncloader", best)
    made = Outcome(facts, base, given, best=chosen, control=CONTROL)
    for rate in (10.0, 40.0):
        made.runs.append(MeasuredRun(given, "first", rate, 8, 0.2))
    made.runs.append(MeasuredRun(chosen, "search", 41.0 * found.ratio, 8, 0.1))
    made.runs.append(MeasuredRun(Contender("asyncloader", Setting(2, threads=True)), "search", 0.0, error="<b>&\x1b"))
    for number in range(5):
        made.runs += [MeasuredRun(given, "rounds", 40.0 + number / 10, 40, 1.0) for _ in range(2)]
        made.runs.append(MeasuredRun(chosen, "rounds", (40.0 + number / 10) * found.ratio, 40, 1.0))
    made.result = {
        "bound": "fetch",
        "verdict": "Input-bound: the consumer waited 99% of the time.",
        "stages": {"fetch": [100, 2.5, 0.024, 0.03, 0.04], "collate": [100, 0.03, 0.0003, 0.0004, 0.0005]},
        "gaps": [0.02, 0.03, 0.02],
    }
    compared = Compared(chosen, found, judgement)
    made.compared.append(compared)
    return made, compared

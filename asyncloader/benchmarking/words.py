"""Describes the measurements of a benchmark in words, and their certainty.

Data path: outcome -> [words] -> findings.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median, quantiles
from typing import Any

from asyncloader.benchmarking.comparison import RateRatio, is_no_slower
from asyncloader.benchmarking.outcome import Compared, Outcome
from asyncloader.benchmarking.search_settings import needs_thread_safety
from asyncloader.commands.findings import Finding
from asyncloader.telemetry.tuner import WORTH

_NOISY = 0.2  # the noise from which a machine is called busy
_COLD = 0.67  # the share of the later runs' rate below which the first run is mentioned
STAGES = ("sampler", "fetch", "decode", "collate", "write", "transfer", "order", "pin", "h2d")
"""The stages in which a batch is made and delivered, in order."""


def loader(outcome: Outcome) -> Finding:
    """Describe the loader that is measured."""
    facts = outcome.facts
    kind = "iterable" if facts["iterable"] else "map"
    text = f"{facts['name']}, {kind} dataset, {outcome.given.setting}"
    if facts["batch_size"]:
        text += f", batch_size={facts['batch_size']}"
    if facts["batches"] is not None:
        text += f", {facts['batches']} batches"
    if facts["auto"]:
        text += '; num_workers="auto" has chosen the number'
    return Finding("loader", "ok", text, figures=dict(facts))


def rate(outcome: Outcome) -> Finding:
    """Describe the rate of the user's loader."""
    rates = outcome.rates(outcome.given, "rounds")
    counted = [each for each in outcome.runs if each.contender == outcome.given and each.phase == "rounds"]
    middle, (low, _, high) = median(rates), quantiles(rates, n=4)
    seconds = median(each.seconds for each in counted)
    text = f"{_rate(middle)}{_samples(outcome, middle)}, a batch each {_duration(1 / middle)}: "
    text += f"median of {len(rates)} runs of {seconds:.2g} s, "
    text += f"half of which lie between {low:.3g} and {high:.3g}"
    figures = {"batches_per_sec": middle, "low": low, "high": high, "runs": len(rates), "seconds": seconds}
    return Finding("rate", "ok", text, figures=figures)


def stages(outcome: Outcome) -> Finding | None:
    """Describe the time that a batch spends in each stage, if asyncloader's loader was measured."""
    found = {name: outcome.result["stages"][name] for name in STAGES if name in outcome.result.get("stages", {})}
    if not found:
        return None
    parts = [f"{name} {_duration(times[1] / times[0])}" for name, times in found.items() if times[1] / times[0] > 1e-6]
    figures = {
        name: {"mean_s": times[1] / times[0], "p50_s": times[2], "p95_s": times[3], "p99_s": times[4]}
        for name, times in found.items()
    }
    return Finding("stages", "ok", f"of a batch, on average: {', '.join(parts)}", figures=figures)


def verdict(outcome: Outcome) -> Finding | None:
    """Describe the bottleneck, if asyncloader's loader was measured."""
    if "verdict" not in outcome.result:
        return None
    text = f"{outcome.result['verdict']} (The consumer does nothing but take batches.)"
    return Finding("verdict", "note", text, figures={"bound": outcome.result["bound"]})


def first_run(outcome: Outcome) -> Finding | None:
    """Describe a first run that was slower than the later runs, which read from caches; None if it was not."""
    first = next(each for each in outcome.runs if each.contender == outcome.given)
    later = outcome.rate(outcome.given)
    if not first.rate or first.rate > _COLD * later:
        return None
    text = f"had {first.rate / later:.0%} of the later runs' rate: the later runs read the same samples from caches"
    advice = "expect the first run's rate for data that is not in a cache yet"
    return Finding("first run", "note", text, advice, {"batches_per_sec": first.rate})


def noise(control: RateRatio) -> Finding:
    """Describe the difference that a loader seems to have from itself."""
    figures = {**control._asdict(), "noise": control.noise}
    text = f"your loader against itself, in {control.rounds} rounds: differences below {control.noise:.1%} are noise"
    if control.noise < _NOISY:
        return Finding("noise", "ok", text, figures=figures)
    return Finding("noise", "note", text, "stop other programs on this machine, or give more --seconds", figures)


def search(outcome: Outcome) -> Finding:
    """Describe the settings that were measured."""
    runs = [each for each in outcome.runs if each.contender.kind != "torch" and each.phase != "rounds"]
    tried = dict.fromkeys(each.contender for each in runs if each.phase == "search")
    rated = sorted(((outcome.rate(each), each) for each in tried), key=lambda each: -each[0])
    failed = {each.contender: each.error for each in runs if each.error}
    text = f"{len(tried)} other settings in {len(runs)} runs"
    if rated:
        text += "; fastest first: " + "; ".join(f"{each.setting}: {_rate(it)}" for it, each in rated[:3] if it)
    if failed:
        text += f"; {len(failed)} of them failed, such as {next(iter(failed)).setting}: {next(iter(failed.values()))}"
    figures = {str(each.setting): it for it, each in rated}
    if not outcome.left_out:
        return Finding("search", "ok", text, figures=figures)
    text += f"; no time was left for {outcome.left_out} more"
    return Finding("search", "note", text, "give more --seconds", figures)


def same_options(outcome: Outcome, compared: Compared) -> Finding:
    """Describe the speed of the other package's loader with the user's options."""
    state: Any = "note" if compared.judgement == ("faster" if outcome.facts["ours"] else "slower") else "ok"
    return Finding(
        "same options", state, f"{outcome.name(compared.contender)}: {_ratio(outcome, compared)}",
        figures=_figures(outcome, compared),
    )  # fmt: skip


def not_torch(why: str) -> Finding:
    """Say why torch's DataLoader was not compared."""
    return Finding("same options", "note", f"torch's DataLoader was not measured: {why}")


def setting(outcome: Outcome, compared: Compared | None) -> Finding:
    """Recommend a setting.

    Args:
        outcome: measurements of the benchmark.
        compared: comparison of the chosen setting; None if the user's own setting is chosen.
    """
    if compared is None:
        others = len({each.contender for each in outcome.runs if each.phase == "search"} - {outcome.given})
        if not others:
            return Finding("setting", "note", "yours; no other setting was measured")
        return Finding("setting", "ok", f"yours: none of {others} other settings was more than {WORTH:.0%} faster")
    name, figures = outcome.name(compared.contender), _figures(outcome, compared)
    text = f"{name}: {_ratio(outcome, compared)}"
    if compared.judgement == "faster":
        return Finding("setting", "problem", text, _advice(outcome, compared), figures)
    lesser = compared.contender.setting.cost < outcome.given.setting.cost
    if lesser and is_no_slower(compared.found):
        return Finding("setting", "note", f"{text}, and it uses less", _advice(outcome, compared), figures)
    if compared.judgement == "unsure":
        return Finding("setting", "note", f"{text}: no gain is sure", "give more --seconds", figures)
    return Finding("setting", "ok", f"yours; the best other setting was not faster: {text}", figures=figures)


def _advice(outcome: Outcome, compared: Compared) -> str:
    chosen = compared.contender.setting
    change = chosen.change_from(outcome.base)
    words = ", ".join(f"{name}={value!r}" for name, value in change.items())
    if outcome.facts["ours"]:
        advice = f"set {words}"
    else:
        advice = f"use asyncloader.DataLoader{f' with {words}' if words else ''}"
    cautions = []
    if needs_thread_safety(chosen, outcome.base, outcome.facts):
        cautions.append("the dataset must be safe to call from several threads")
    if "num_workers" in change and outcome.facts["assigned"] and outcome.facts["iterable"]:
        cautions.append("the samples come in another order")
    return "; ".join([advice, *cautions])


def _ratio(outcome: Outcome, compared: Compared) -> str:
    found = compared.found
    text = f"{found.ratio:.2f} times as fast as yours"
    match compared.judgement:
        case "faster":
            text += f", at least {found.low:.2f} times"
        case "slower":
            text += f", at most {found.high:.2f} times"
        case "same":
            text = f"as fast as yours, within {max(found.high, 1 / found.low) - 1:.1%}"
        case "unsure":
            text += f", but {found.low:.2f} to {found.high:.2f} times is possible"
    return f"{text} ({_rate(outcome.rate(compared.contender))}; {found.rounds} rounds in turns, 95 % confidence)"


def _figures(outcome: Outcome, compared: Compared) -> dict[str, Any]:
    return {
        "setting": compared.contender.setting._asdict(),
        "change": compared.contender.setting.change_from(outcome.base),
        "batches_per_sec": outcome.rate(compared.contender),
        "judgement": compared.judgement,
        **compared.found._asdict(),
    }


def describe(outcome: Outcome) -> Iterator[Finding]:
    """Yield the findings on the user's loader, the noise and the search; all but the comparisons and the answer."""
    assert outcome.control is not None
    found = [rate(outcome), stages(outcome), verdict(outcome), first_run(outcome), noise(outcome.control)]
    yield from (each for each in found if each is not None)
    yield search(outcome)


def _samples(outcome: Outcome, rate: float) -> str:
    size = outcome.facts["batch_size"]
    return f" ({rate * size:,.0f} samples/s)" if size else ""


def _rate(rate: float) -> str:
    return f"{rate:,.0f} batches/s" if rate >= 1000 else f"{rate:.3g} batches/s"


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"

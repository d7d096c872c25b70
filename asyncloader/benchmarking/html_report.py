"""Formats a benchmark as a self-contained HTML page of findings, charts and all runs. Pure but for the style, which
comes from the loaders' page.

Data path: outcome, findings -> [html_report: charts] -> a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from statistics import median

from asyncloader.benchmarking.charts import Row, line, rows
from asyncloader.benchmarking.outcome import Contender, Outcome
from asyncloader.benchmarking.words import STAGES
from asyncloader.commands.findings import Finding, printable
from asyncloader.live.page import STYLE
from asyncloader.version import __version__

_MARKS = {"ok": ("good", "ok"), "note": ("", "note"), "problem": ("bad", "to be mended")}
_MOST_ROWS = 40

_OWN_STYLE = """
svg.chart { height: auto; } svg.chart text { fill: var(--text); font-size: 13px; }
svg.chart .label { text-anchor: end; }
svg.chart .scale { fill: var(--faint); font-size: 12px; } svg.chart rect { fill: var(--line); }
svg.chart circle { fill: var(--faint); } svg.chart path { stroke: var(--faint); stroke-width: 1.6; }
svg.chart .marked rect { fill: var(--accent); opacity: .45; } svg.chart .marked circle { fill: var(--accent); }
svg.chart .marked path { stroke: var(--accent); } svg.chart .marked text { font-weight: 600; }
td.good { color: var(--good); } td.bad { color: var(--bad); } td.words { white-space: normal; }
"""


def as_html(target: str, outcome: Outcome | None, findings: Sequence[Finding]) -> str:
    """Format a benchmark as a page.

    Args:
        target: name of the user's function.
        outcome: measurements of the benchmark; None if it ended before the loader's options were known.
        findings: findings of the benchmark; the last finding is the answer.
    """
    answer = findings[-1]
    head = f"<h1>{_text(target)}</h1><p>asyncloader bench, version {escape(__version__)}</p>"
    sections = [
        _section("Answer", f'<p id="text">{_text(answer.text)}</p>' + _note(answer.advice)),
        _section("Findings", _findings(findings)),
    ]
    if outcome is not None:
        sections += [*_charts(outcome), _section("All runs", _runs(outcome))]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(target)}: asyncloader bench</title>\n<style>{STYLE}{_OWN_STYLE}</style>\n</head>\n"
        f"<body>\n<header>{head}</header>\n<main>\n{''.join(sections)}</main>\n</body>\n</html>\n"
    )


def _charts(outcome: Outcome) -> Iterable[str]:
    tried = list(dict.fromkeys(each.contender for each in outcome.runs if each.contender.kind != "torch"))
    found = [
        _row(outcome, each, outcome.rates(each, "first", "search"))
        for each in tried
        if outcome.rates(each, "first", "search")
    ]
    if found:
        found.sort(key=lambda each: -max(each.values))
        note = (
            "Single short runs, to choose a setting. The fastest is partly the luckiest, so it is measured again below."
        )
        yield _section("Search", rows(found[:_MOST_ROWS], "Batches per second by setting", "batches/s") + _note(note))
    compared = [outcome.given, *(each.contender for each in outcome.compared)]
    if outcome.control is not None:
        again = [_row(outcome, each, outcome.rates(each, "rounds")) for each in compared]
        note = "A point is a run. Each round has a run of each loader, and two of yours; bars end at the median."
        yield _section("Measured in turns", rows(again, "Batches per second", "batches/s") + _note(note))
        pairs = [("yours against itself: noise", outcome.control, False)]
        pairs += [
            (outcome.name(each.contender), each.found, each.contender == outcome.best) for each in outcome.compared
        ]
        ratios = [
            Row(name, [found.ratio], (found.low, found.high), f"{found.ratio:.2f}", marked)
            for name, found, marked in pairs
        ]
        note = (
            "The true ratio lies beyond each end of a line with a probability of 5 %. "
            "A gain must exceed the noise, and 5 %."
        )
        yield _section(
            "How many times as fast as yours", rows(ratios, "Ratios of rates", "times", line=1.0) + _note(note)
        )
    stages = [
        Row(name, [times[1] / times[0] * 1e3], None, f"{times[1] / times[0] * 1e3:.3g} ms")
        for name, times in outcome.result.get("stages", {}).items()
        if name in STAGES
    ]
    if stages:
        note = "Means of asyncloader's loader with your options. Stages of several workers run at the same time."
        yield _section("Stages", rows(stages, "Milliseconds by stage", "ms") + _note(note))
    gaps = [each * 1e3 for each in outcome.result.get("gaps", ())]
    if len(gaps) > 1:
        note = "From each batch to the next, in the order of the batches. An even line is good; high points are waits."
        yield _section("Time between batches", line(gaps, "Milliseconds between batches", "ms") + _note(note))


def _row(outcome: Outcome, contender: Contender, rates: Sequence[float]) -> Row:
    marked = contender in (outcome.given, outcome.best)
    return Row(outcome.name(contender), rates, None, f"{median(rates):.3g}", marked)


def _findings(findings: Sequence[Finding]) -> str:
    body = ""
    for each in findings:
        colour, mark = _MARKS[each.state]
        advice = f'<br><span class="note">{_text(each.advice)}</span>' if each.advice else ""
        body += f'<tr><th scope="row">{_text(each.name)}</th><td class="{colour}">{mark}</td>'
        body += f'<td class="words">{_text(each.text)}{advice}</td></tr>'
    return f'<div class="scroll"><table><tbody>{body}</tbody></table></div>'


def _runs(outcome: Outcome) -> str:
    head = "".join(
        f'<th scope="col"{place}>{name}</th>'
        for name, place in (
            ("loader", ""), ("part", ""), ("batches/s", ' class="n"'), ("batches", ' class="n"'), ("s", ' class="n"'),
            ("", ""),
        )
    )  # fmt: skip
    body = "".join(
        f'<tr><th scope="row">{_text(outcome.name(each.contender))}</th><td>{each.phase}</td>'
        f'<td class="n">{each.rate:.4g}</td><td class="n">{each.batches}</td><td class="n">{each.seconds:.3g}</td>'
        f"<td>{_text(each.error)}</td></tr>"
        for each in outcome.runs
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n"


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>' if text else ""


def _text(text: str) -> str:
    return escape(printable(text))

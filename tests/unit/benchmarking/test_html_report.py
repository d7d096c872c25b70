"""The report is a self-contained, well-formed page of the measurements."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from asyncloader.benchmarking import words
from asyncloader.benchmarking.comparison import RateRatio
from asyncloader.benchmarking.html_report import as_html
from asyncloader.benchmarking.search_settings import Setting
from asyncloader.commands.findings import Finding
from tests.unit.benchmarking.outcomes import outcome


def page() -> str:
    made, compared = outcome(Setting(8), RateRatio(2.5, 2.4, 2.6, 5), "faster")
    return as_html("pipeline:make_loader", made, [*words.describe(made), words.setting(made, compared)])


def test_charts_are_whole() -> None:
    """Each chart is well-formed SVG, has a title for screen readers, and places everything within its edges."""
    charts = re.findall(r"<svg.*?</svg>", page(), re.DOTALL)
    assert len(charts) == 5
    for text in charts:
        chart = ET.fromstring(text)
        assert chart.get("aria-label")
        _, _, width, height = map(float, (chart.get("viewBox") or "").split())
        for each in chart.iter():
            for name, most in (("x", width), ("cx", width), ("y", height), ("cy", height)):
                assert 0 <= float(each.get(name, 0)) <= most


def test_points_are_at_their_values() -> None:
    """The bar of a setting that is 2.5 times as fast is 2.5 times as long, and each run has a point."""
    search, again, ratios, *_ = [ET.fromstring(each) for each in re.findall(r"<svg.*?</svg>", page(), re.DOTALL)]
    bars = [float(each.get("width", 0)) for each in again.iter("rect")]
    assert 2.49 < bars[1] / bars[0] < 2.51
    assert len(list(again.iter("circle"))) == 15
    assert len(list(search.iter("circle"))) == 3
    one = next(float(each.get("x1", 0)) for each in ratios.iter("line"))
    control, faster = (float(each.get("cx", 0)) for each in ratios.iter("circle"))
    assert abs(control - one) < 0.2 < faster - one


def test_nothing_comes_from_elsewhere() -> None:
    """The page has no address, script or unescaped text, and its policy forbids loading any."""
    text = page()
    assert not re.findall(r"https?:|src=|href=|<script|@import|url\(|<b>|\x1b", text)
    assert "default-src 'none'" in text
    assert "&lt;b&gt;&amp;" in text


def test_a_benchmark_that_failed() -> None:
    """A benchmark that ended early has a page of the measurements so far."""
    problem = Finding("rate", "problem", "reading the loader raised ValueError")
    assert "raised ValueError" in as_html("pipeline:make_loader", None, [problem])
    made, _ = outcome(Setting(8), RateRatio(2.5, 2.4, 2.6, 5), "faster")
    made.control = None
    made.runs, made.result = [], {}
    assert "<svg" not in as_html("pipeline:make_loader", made, [problem])


def test_the_answer_comes_first() -> None:
    """The answer comes before the findings, each of which has a mark."""
    text = page()
    assert text.index("2.50 times as fast as yours") < text.index("<h2>Findings</h2>")
    assert 'class="bad">to be mended' in text

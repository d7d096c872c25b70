"""Rows and lines are drawn to scale."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from asyncloader.benchmarking.charts import Row, line, rows


@pytest.mark.parametrize("values", [[0.0, 0.0], [1e-9, 5.0], [3.0, 3.0]])
def test_values_of_any_size(values: list[float]) -> None:
    """Equal values, zeros and values far apart make well-formed charts without NaN."""
    spans = [Row("a", [each], (each, each)) for each in values]
    for text in (rows([Row("a", values)], "t", "s"), rows(spans, "t", "s", line=1.0), line(values, "t", "s")):
        ET.fromstring(text)
        assert "nan" not in text


def test_long_labels_are_cut() -> None:
    """The whole label is in the row's title."""
    chart = ET.fromstring(rows([Row("x" * 200, [1.0])], "t", "s"))
    labels = [each.text or "" for each in chart.iter("text")]
    assert max(map(len, labels)) < 50
    assert next(chart.iter("title")).text == "x" * 200

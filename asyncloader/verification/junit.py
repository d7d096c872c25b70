"""Findings as JUnit XML, which continuous integration shows. Pure.

Data path: findings -> [junit] -> a file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.sax.saxutils import escape, quoteattr

from asyncloader.commands.findings import Finding

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_junit(suite: str, findings: Sequence[Finding], seconds: float) -> str:
    """Return a test suite: a test for each finding. Problems have failed, and notes have an output."""
    failed = sum(each.state == "problem" for each in findings)
    counts = f'tests="{len(findings)}" failures="{failed}" errors="0" skipped="0" time="{seconds:.3f}"'
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f'<testsuites><testsuite name="asyncloader verify" {counts}>']
    for each in findings:
        place = each.figures.get("file")
        where = f" file={_quoted(place)} line={_quoted(str(each.figures.get('line')))}" if place else ""
        lines.append(f"<testcase classname={_quoted(suite)} name={_quoted(each.name)}{where}>")
        text = each.text + (f"\n{each.advice}" if each.advice else "")
        if each.state == "problem":
            lines.append(f"<failure message={_quoted(each.text)}>{_escaped(text)}</failure>")
        else:
            lines.append(f"<system-out>{_escaped(text)}</system-out>")
        lines.append("</testcase>")
    return "\n".join([*lines, "</testsuite></testsuites>\n"])


def _quoted(text: str) -> str:
    return quoteattr(_FORBIDDEN.sub("?", text))


def _escaped(text: str) -> str:
    return escape(_FORBIDDEN.sub("?", text))

"""Findings as JUnit XML, which continuous integration shows. Pure.

Data path: findings -> [junit] -> a file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from asyncloader.commands.findings import Finding

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_junit(name: str, findings: Sequence[Finding], seconds: float) -> str:
    """Return a test suite: a test for each finding. Problems have failed, and notes have an output."""
    failed = sum(each.state == "problem" for each in findings)
    counts = {"tests": f"{len(findings)}", "failures": f"{failed}", "errors": "0", "skipped": "0"}
    root = ET.Element("testsuites")
    suite = ET.SubElement(root, "testsuite", {"name": "asyncloader verify", **counts, "time": f"{seconds:.3f}"})
    for each in findings:
        place = {key: _allowed(f"{each.figures[key]}") for key in ("file", "line") if key in each.figures}
        case = ET.SubElement(suite, "testcase", {"classname": _allowed(name), "name": _allowed(each.name), **place})
        problem = each.state == "problem"
        text = {"message": _allowed(each.text)} if problem else {}
        ET.SubElement(case, "failure" if problem else "system-out", text).text = _allowed(
            each.text + (f"\n{each.advice}" if each.advice else "")
        )
    return ET.tostring(root, encoding="unicode") + "\n"


def _allowed(text: str) -> str:
    return _FORBIDDEN.sub("?", text)

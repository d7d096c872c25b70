"""The sections of the page `docs/reference/benchmarks.md` that are measured by commands of their own."""

from __future__ import annotations

import re

NEXT = "## Memory bandwidth"
"""The section before which new sections are put."""


def find(page: str, title: str) -> str:
    """The section under this title, the title included; empty if the page has none."""
    found = _pattern(title).search(page)
    return found[0].rstrip() if found else ""


def insert(page: str, text: str) -> str:
    """The page with this section, whose first line is its title: in place of its old section, or before `NEXT`."""
    cut = _pattern(text.partition("\n")[0])
    if cut.search(page):
        return cut.sub(lambda _: text + "\n\n", page, count=1)
    before, heading, after = page.partition(NEXT)
    return f"{before}{text}\n\n{heading}{after}" if heading else f"{page.rstrip()}\n\n{text}\n"


def _pattern(title: str) -> re.Pattern[str]:
    return re.compile(rf"^{re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)

"""The documentation is true: every Python block in it runs.

A page's blocks, in their order, are one program. It runs in a process of its own, in an empty folder, with
warnings as errors. A block that cannot run is preceded by a comment that says why:

    <!-- not run: needs a GPU -->
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import script_server
from tests.integration.running import environment
from tests.pairwise import quickly

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = re.compile(r"<!--\s*not run:\s*(?P<reason>.*?)\s*-->")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, first line (counted from 1), text, and the line above it."""

    language: str
    line: int
    text: str
    above: str


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page. A fence is three or more backticks or colons, ended by as many."""
    found: list[Block] = []
    lines = page.splitlines()
    number = 0
    while number < len(lines):
        opened = re.match(r"^(\s*)(`{3,}|:{3,})\s*(\S*)", lines[number])
        if opened is None:
            number += 1
            continue
        margin, fence, language = opened.groups()
        start = number + 1
        number = next((n for n in range(start, len(lines)) if lines[n].strip() == fence), len(lines))
        text = "\n".join(line.removeprefix(margin) for line in lines[start:number])
        above = next((line for line in reversed(lines[: start - 1]) if line.strip()), "")
        found.append(Block(language, start + 1, text, above))
        number += 1
    return found


def program(page: str) -> str:
    """Join the blocks that run. Each stands at its line of the page, so a traceback names the right one."""
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and not NOT_RUN.search(block.above):
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
    return "\n".join(lines) + "\n"


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


RUN = [page for page in PAGES if program(page.read_text()).strip()]
SLOW = [
    page
    for page in RUN
    if page.stem in {"train-from-a-bucket", "use-with-frameworks", "resume-a-run", "survive-failures", "feed-a-gpu"}
]


@pytest.mark.parametrize("page", quickly(RUN, *({*RUN} - {*SLOW})), ids=page_id)
def test_blocks_of_the_page_run(page: Path, tmp_path: Path) -> None:
    """The page's program ends without an error or a warning."""
    text = program(page.read_text())
    for framework in re.findall(r"^(?:from|import) (accelerate|lightning|ray)\b", text, re.MULTILINE):
        pytest.importorskip(framework)
    script = tmp_path / (page.stem.replace("-", "_") + ".py")
    script.write_text(text)
    ran = script_server.run([sys.executable, str(script)], cwd=tmp_path, env=environment(), timeout=100)
    assert ran.returncode == 0, f"{page_id(page)}:\n{ran.stdout}{ran.stderr}"
    assert "Traceback" not in ran.stderr, ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_blocks_that_do_not_run_say_why(page: Path) -> None:
    """No block escapes: Python has one spelling, and an exception gives a reason and stands above a block."""
    text = page.read_text()
    for block in blocks(text):
        assert block.language not in {"py", "python3", "Python", "{code-block}", "{code}"}, (
            f"{page_id(page)}:{block.line}: write ```python"
        )
        if not block.language:
            assert not re.search(r"^\s*(import|from) \w+", block.text, re.MULTILINE), f"{page_id(page)}:{block.line}"
    comments = re.findall(r"<!--\s*not run\b.*?-->", text, re.DOTALL)
    excused = [block for block in blocks(text) if block.language == "python" and NOT_RUN.search(block.above)]
    assert len(comments) == len(excused)
    for block in excused:
        match = NOT_RUN.search(block.above)
        assert match
        assert len(match["reason"]) > 10, f"{page_id(page)}:{block.line}: give the reason"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_of_the_page_lead_somewhere(page: Path) -> None:
    """A relative link or picture names a file of the repository, so that the pages also read well there."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).is_file(), f"{page_id(page)} links to {target}"


def test_program_keeps_the_lines_of_the_page() -> None:
    """Blocks are found in order, at their lines; an excused one and other languages are left out."""
    excused = "<!-- not run: needs a GPU here -->\n```python\nb\n```\n"
    page = f"text\n```python\na = 1\n```\n\n{excused}```text\nc\n```\n```python\nd = 2\n```\n"
    assert program(page).splitlines() == ["", "", "a = 1", *[""] * 10, "d = 2"]


def test_every_page_is_found() -> None:
    """The search covers the README and all four kinds of page."""
    kinds = {page.relative_to(ROOT).parts[1] for page in PAGES[1:]}
    assert {"tutorials", "how-to", "reference", "explanation"} <= kinds

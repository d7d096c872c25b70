"""The documentation is true: every Python block in it runs.

A page's blocks, in their order, are one program. It runs in a process of its own, in an empty folder, with warnings as
errors: as a script, because workers that are not forked import it. Most pages leave out the guard that such a script
needs, and say so (`UNGUARDED`); here the guard is added. The program of the page on notebooks runs as cells do, in a
`__main__` that no worker can import.

A block that cannot run is preceded by a comment that says why:

    <!-- not run: needs a GPU -->
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import script_server
from tests.helpers.running import environment
from tests.pairwise import quickly

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
UNGUARDED = 'In a script, all but imports, classes and functions goes under `if __name__ == "__main__":`'
GUARD = 'if __name__ == "__main__":'
AT_THE_TOP = "# at the top of a script"
NOT_RUN = re.compile(r"<!--\s*not run:\s*(?P<reason>.*?)\s*-->")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, first line (counted from 1), text, and the line above it."""

    language: str
    line: int
    text: str
    above: str


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page. A fence is three or more backticks or colons, closed by the same fence."""
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


def program(page: str, without: Collection[str] = ()) -> str:
    """Join the blocks that run, up to the first block that imports a module of `without`.

    Each block stands at its line of the page, so that a traceback names the page's line.
    """
    lines: list[str] = []
    for block in blocks(page):
        if block.language == "python" and not NOT_RUN.search(block.above):
            if {*re.findall(r"^(?:from|import) (\w+)", block.text, re.MULTILINE)} & {*without}:
                break
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
    return "\n".join(lines) + "\n"


def guarded(page: Sequence[str]) -> list[str]:
    """Indent the statements that do something, under guards put into empty lines before them: every line keeps its
    number.

    Imports, classes, functions, lines with `AT_THE_TOP`, and statements that are guarded already are not indented.
    """
    lines = [*page]
    last, in_guard = 0, False
    for statement in ast.parse("\n".join(lines)).body:
        assert statement.end_lineno is not None
        first, above, last = statement.lineno - 1, last, statement.end_lineno
        defines = isinstance(
            statement, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        if defines or AT_THE_TOP in lines[first] or lines[first].startswith(GUARD):
            in_guard = False
            continue
        if not in_guard:
            empty = next((number for number in range(first - 1, above - 1, -1) if not lines[number]), None)
            assert empty is not None, f"no empty line above {lines[first]!r}"
            lines[empty] = GUARD
            in_guard = True
        texts = [node for node in ast.walk(statement) if isinstance(node, ast.Constant | ast.JoinedStr)]
        within = {number for each in texts for number in range(each.lineno, each.end_lineno or 0)}
        lines[first:last] = ["    " * (n not in within) + lines[n] for n in range(first, last)]
    return lines


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


RUN = [page for page in PAGES if program(page.read_text()).strip()]
FRAMEWORKS = ["accelerate", "av", "lightning", "opentelemetry", "prometheus_client", "ray"]
NO_OTHER_WORKERS = {
    "find-out-why-training-waits",  # the verdict that it finds may be the start of a fork server
    "move-workers-off-the-trainer",  # a node's processes come from a fork server in any event
    "several-ranks-on-one-host",  # is a part of another program
    "train-from-a-bucket",  # a remote dataset's workers come from a fork server in any event
    "verify-your-pipeline",  # loaders are made in interpreters that do not run the page
}
WITH_WORKERS = [
    page
    for page in RUN
    if re.search(r"num_workers|MultiProcessingReadingService\(", program(page.read_text(), FRAMEWORKS))
    and page.stem not in NO_OTHER_WORKERS
]
SLOW = {
    "feed-a-gpu",
    "find-out-why-training-waits",
    "resume-a-run",
    "several-ranks-on-one-host",  # five interpreters
    "survive-failures",
    "train-from-a-bucket",
    "use-with-frameworks",
}


def run_page(page: Path, folder: Path, without: Collection[str], first_line: str = "") -> None:
    """Run the page's program, which must end without an error or a warning. `first_line` replaces the page's title."""
    text = page.read_text()
    without = [name for name in FRAMEWORKS if name in without or find_spec(name) is None]
    lines = program(text, without).splitlines()
    if not any(lines):
        pytest.skip(f"without {', '.join(without)} nothing of it runs")
    if UNGUARDED in " ".join(text.split()):
        lines = guarded(lines)
    source = "\n".join([first_line, *lines[1:], ""])
    script = folder / (page.stem.replace("-", "_") + ".py")
    script.write_text(source)
    command = ["-c", source] if page.stem == "notebooks" else [str(script)]
    ran = script_server.run([sys.executable, *command], cwd=folder, env=environment(), timeout=100)
    if "PyTorch was built without libuv support" in ran.stderr:
        pytest.skip("torchrun's store needs a torch with libuv, and Debian's has none")
    assert ran.returncode == 0, f"{page_id(page)}:\n{ran.stdout}{ran.stderr}"
    assert "Traceback" not in ran.stderr, ran.stderr
    assert " HTTP/1." not in ran.stderr, f"a server's log is around the page's own output:\n{ran.stderr}"


@pytest.mark.parametrize("page", quickly(RUN, *(page for page in RUN if page.stem not in SLOW)), ids=page_id)
def test_blocks_of_the_page_run(page: Path, tmp_path: Path) -> None:
    """They run with the platform's start method."""
    run_page(page, tmp_path, without=[])


@pytest.mark.thorough
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="a fork server is the default there: the test above uses it")
@pytest.mark.parametrize("page", WITH_WORKERS, ids=page_id)
def test_blocks_of_the_page_run_on_a_fork_server(page: Path, tmp_path: Path) -> None:
    """This is the default from Python 3.14 on: workers import the program, and get everything else by pickle.

    Frameworks are left out: before 3.14 each worker imports them itself, which takes minutes.
    """
    run_page(
        page, tmp_path, FRAMEWORKS, f"{GUARD} import multiprocessing; multiprocessing.set_start_method('forkserver')"
    )


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_blocks_that_do_not_run_say_why(page: Path) -> None:
    """No block escapes the search: Python has one spelling, and an exception has a reason and stands above a block."""
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
    """A relative link or picture names a file of the repository, so that the pages can be read there, too."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).is_file(), f"{page_id(page)} links to {target}"


def test_program_keeps_the_lines_of_the_page() -> None:
    """Blocks are found in order, at their lines; excused blocks and other languages are left out."""
    excused = "<!-- not run: needs a GPU here -->\n```python\nb\n```\n"
    page = f"text\n```python\na = 1\n```\n\n{excused}```text\nc\n```\n```python\nd = 2\n```\n"
    assert program(page).splitlines() == ["", "", "a = 1", *[""] * 10, "d = 2"]
    assert program(page + "```python\nimport e\n```\n```python\nf\n```\n", without=["e"]) == program(page)


def test_guarded_program_keeps_its_lines() -> None:
    """Statements are guarded; definitions and lines marked as top-level are not; lines of a string stay unchanged."""
    does = 'x = f("""\na\n""")\nfor y in x:\n    g(\n        y\n    )\n'
    guards = 'x = f("""\na\n""")\n    for y in x:\n        g(\n            y\n        )\n'
    text = f"import a\n\na.b()  {AT_THE_TOP}\nimport c\n\n\ndef f():\n    pass\n\n\n# why\n{does}"
    wanted = text.replace("\n# why\n" + does, f"\n# why\n    {guards}").replace("\n\n# why", f"\n{GUARD}\n# why")
    assert guarded(text.splitlines()) == wanted.splitlines()
    assert guarded(wanted.splitlines()) == wanted.splitlines()


def test_every_page_is_found() -> None:
    """The search covers the README and all four kinds of page."""
    kinds = {page.relative_to(ROOT).parts[1] for page in PAGES[1:]}
    assert {"tutorials", "how-to", "reference", "explanation"} <= kinds

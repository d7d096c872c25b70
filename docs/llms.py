"""Writes the pages for language models: `llms.txt`, and beside each HTML page its text in plain Markdown.

    make docs     calls `write` after the HTML pages were built

`llms.txt` lists all pages by the captions of the index, with the first sentences of each. A page's twin is its source
without what only Sphinx understands: navigation is left out, and entries of the API are replaced by signature and
docstring. Links between pages lead from twin to twin.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from pathlib import Path
from typing import Any

__all__ = ["DOCS", "pages", "twin", "write"]

DOCS = Path(__file__).parent
_DIRECTIVE = re.compile(r"^```\{(?P<name>[\w-]+)\}(?P<title>[^\n]*)\n(?P<text>.*?)^```\n", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"^ *\.\. (?P<kind>auto\w+|currentmodule):: (?P<name>\S+)$", re.MULTILINE)


def pages() -> dict[str, list[Path]]:
    """The pages by the caption under which the index lists them, in its order."""
    found: dict[str, list[Path]] = {}
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```", (DOCS / "index.md").read_text(), re.MULTILINE | re.DOTALL):
        caption, *names = [line for line in block.splitlines() if line and line != ":hidden:"]
        found[caption.removeprefix(":caption: ")] = [DOCS / f"{name}.md" for name in names]
    return found


def twin(page: Path) -> str:
    """The page's text in plain Markdown."""
    text = re.sub(r"^\([\w-]+\)=\n", "", page.read_text(), flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", _DIRECTIVE.sub(_plain, text)).strip() + "\n"


def _plain(directive: re.Match[str]) -> str:
    if directive["name"] == "toctree":
        return ""
    if directive["name"] == "eval-rst":
        return _entries(directive["text"])
    # A note, a warning and the like.
    return f"**{directive['title'].strip() or directive['name'].capitalize()}**: {directive['text']}"


def _entries(text: str) -> str:
    """The entries of autodoc's directives, with the members that autodoc would add."""
    parts: list[str] = []
    module, current = "", ""
    for entry in _ENTRY.finditer(text):
        kind, name = entry["kind"], entry["name"]
        if kind == "currentmodule":
            module = name
        elif kind == "automodule":
            holder: Any = importlib.import_module(name)
            found = [each for each in vars(holder).values() if getattr(each, "__module__", None) == name]
            for each in filter(inspect.isclass, found):
                parts += [_entry(f"### {name}.{each.__name__}", each)]
        elif kind in ("automethod", "autoproperty", "autoattribute"):
            parts.append(_entry(f"#### {current.rpartition('.')[2]}.{name}", _member(_named(current), name)))
        else:
            current = name if "." in name else f"{module}.{name}"
            found = _named(current)
            parts.append(_entry(f"### {current}", found))
            if inspect.isclass(found) and ":no-members:" not in text[entry.end() :].partition("\n\n")[0]:
                documented = [each for each in vars(found) if not each.startswith("_") and _member(found, each).__doc__]
                parts += [_entry(f"#### {found.__name__}.{each}", _member(found, each)) for each in documented]
    return "\n".join(parts)


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _member(holder: Any, name: str) -> Any:
    found = inspect.getattr_static(holder, name)
    return getattr(found, "__func__", found)


def _entry(heading: str, found: Any) -> str:
    return f"{heading}{_signature(found)}\n\n{inspect.getdoc(found) or ''}\n"


def _signature(found: Any) -> str:
    if not callable(found):
        return ""
    try:
        text = str(inspect.signature(found))
    except (TypeError, ValueError):
        return ""
    return "" if " at 0x" in text else f"`{text}`"


def write(folder: Path) -> None:
    """Write `llms.txt` and the twins into the folder of the built pages."""
    listed = ["# asyncloader", "", f"> {_summary(DOCS / 'index.md')}"]
    for caption, files in pages().items():
        listed += ["", f"## {caption}", ""]
        for page in files:
            place = page.relative_to(DOCS).as_posix()
            listed.append(f"- [{_title(page)}]({place}): {_summary(page)}")
    (folder / "llms.txt").write_text("\n".join(listed) + "\n")
    for page in [DOCS / "index.md", *(page for files in pages().values() for page in files)]:
        target = folder / page.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(twin(page))
    for linked in [*DOCS.rglob("*.svg"), *DOCS.rglob("*.png"), *(DOCS / "examples").glob("*.py")]:
        target = folder / linked.relative_to(DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(linked, target)


def _title(page: Path) -> str:
    return re.search(r"^# (.+)$", page.read_text(), re.MULTILINE)[1]  # type: ignore[index]


def _summary(page: Path) -> str:
    """The page's first sentences, up to about 60 characters."""
    paragraphs = re.split(r"\n\s*\n", page.read_text().partition("# ")[2].partition("\n")[2])
    text = next(each for each in map(str.strip, paragraphs) if re.match(r"(?!In a script)[A-Z`\[*\"]", each))
    first, *more = re.split(r"(?<=[.:])\s", re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(text.split())))
    while more and len(first) < 60:
        first += f" {more.pop(0)}"
    return first.rstrip(":.") + "."

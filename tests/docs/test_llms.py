"""The pages for language models: complete, in plain Markdown, with links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from docs.llms import DOCS, pages, write


def test_every_page_has_a_twin_that_is_listed(tmp_path: Path) -> None:
    """`llms.txt` names all pages, each with a sentence. Twins have no directive of Sphinx; their links lead to twins
    and pictures that exist; the API's twin has signatures and docstrings.
    """
    write(tmp_path)
    listed = (tmp_path / "llms.txt").read_text()
    assert listed.startswith("# asyncloader\n\n> ")
    entries = re.findall(r"^- \[([^\]]+)\]\(([^)]+)\): (.{20,})$", listed, re.MULTILINE)
    sources = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"index.md"}
    assert {place for _, place, _ in entries} == sources
    assert len(entries) == sum(map(len, pages().values())) == listed.count("\n- ")
    for twin in tmp_path.rglob("*.md"):
        text = twin.read_text()
        assert text.startswith("# "), twin
        assert not re.search(r"^(```|:::)\{|^\([\w-]+\)=$|^ *\.\. auto", text, re.MULTILINE), twin
        outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", outside):
            assert link.startswith("https://") or (twin.parent / link).exists(), (twin, link)
    api = (tmp_path / "reference" / "api.md").read_text()
    assert "#### DataLoader.state_dict`(self) -> 'dict[str, Any]'`" in api
    assert "The newest iterator's position" in api

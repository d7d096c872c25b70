"""The tables of the options page: each option's default, and the first sentence of what its docstring says about it.

    python docs/options.py     writes docs/reference/options.md

`tests/docs/test_reference.py` holds that the page is of today's constructors.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from asyncloader.options.declaration import OPTION_NAMES, OUR_OPTION_NAMES, LoaderOptions
from asyncloader.options.objects import OPTION_OBJECTS

__all__ = ["NEEDED", "PAGE", "filled", "meanings"]

NEEDED = ("seed", "concurrency", "decode", "on_error", "device")
"""Those of asyncloader's options that most runs need, in the order of the constructor."""

PAGE = Path(__file__).parent / "reference" / "options.md"


def meanings(documented: Any = LoaderOptions.__init__) -> dict[str, str]:
    """The first sentence about each argument in the docstring of a function or class."""
    doc = inspect.getdoc(documented) or ""
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", doc.partition("Args:")[2], re.MULTILINE)
    texts = {name: re.sub(r"\s+", " ", text) for name, text in entries}
    return {name: re.split(r"\.(?: (?=[A-Z])|$)", text)[0] for name, text in texts.items()}


def filled(page: str) -> str:
    """The page with its tables as they should be: of torch's options, of those of asyncloader's that most runs need, of
    the others, and of each option object.
    """
    torchs = [name for name in OPTION_NAMES if name not in OUR_OPTION_NAMES]
    rare = [name for name in OUR_OPTION_NAMES if name not in NEEDED]
    tables = [_table(names, LoaderOptions, LoaderOptions.__init__) for names in (torchs, NEEDED, rare)]
    tables += [_table(inspect.signature(kind).parameters, kind, kind) for kind in OPTION_OBJECTS.values()]
    found = iter(tables)
    return re.sub(r"(?:^\|.*\n)+", lambda _: next(found), page, flags=re.MULTILINE)


def _table(names: Any, constructor: Any, documented: Any) -> str:
    parameters, found = inspect.signature(constructor).parameters, meanings(documented)
    lines = ["| argument | default | meaning |", "|---|---|---|"]
    for name in names:
        given = parameters[name].default
        default = "" if given is inspect.Parameter.empty else f"`{given!r}`".replace("'", '"')
        lines.append(f"| `{name}` | {default}{' ' if default else ''}| {found[name][0].lower()}{found[name][1:]} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))

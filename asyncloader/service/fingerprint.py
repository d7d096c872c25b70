"""The fingerprint of a definition: equal on two machines if the code that makes the dataset is equal.

It covers the whole module that contains the definition, because helpers and the dataset's class are usually defined
there, and the modules of the same package that this module imports, directly or through others. Other packages are not
covered: an environment has too many of them, and most have nothing to do with the data.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from typing import Any


def fingerprint(function: Callable[..., Any]) -> str:
    """Compute the fingerprint of the code that this function is part of: 16 hexadecimal digits.

    Raises:
        ValueError: the code has no source.
    """
    module = inspect.unwrap(function).__module__
    name = import_name(module)
    parts = _sources(name, _source_of_module(function, module))
    if not parts:
        raise ValueError(f"the module {name} has no source, by which a service compares its definitions")
    whole = hashlib.sha256()
    # Sources, and neither bytecode nor syntax trees: those differ between versions of Python. Lines are joined again
    # because a checkout may convert line endings. Each part is hashed with its length, or parts could run together.
    for part in (parts.pop(name, ""), *(f"{each}\n{text}" for each, text in sorted(parts.items()))):
        data = "\n".join(part.splitlines()).encode(errors="surrogatepass")
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.hexdigest()[:16]


def import_name(module: str) -> str:
    """The name under which another process imports this module."""
    # The program that was started is "__main__" here, and a node imports it by the name of its file.
    if module != "__main__":
        return module
    main: Any = sys.modules[module]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return Path(path or module).stem if spec is None else str(spec.name)


def _source_of_module(function: Callable[..., Any], module: str) -> str | None:
    # A notebook's module has no source; the cell that defines the function has.
    for thing in (sys.modules.get(module), inspect.unwrap(function)):
        try:
            return inspect.getsource(thing)  # type: ignore[arg-type]
        except (OSError, TypeError):
            continue
    return None


def _sources(module: str, source: str | None) -> dict[str, str]:
    """Return the sources of a module and of the modules of the same package that its imports lead to, by name.

    A package's own `__init__` is included only if it is imported by name: it often imports the whole package.
    """
    # Files are found and read, not imported: a function may import a module late, or never on this machine.
    top = module.partition(".")[0]
    found: dict[str, str] = {}
    if source is None:
        return found
    left = [(module, source, hasattr(sys.modules.get(module), "__path__"))]
    while left:
        name, text, is_package = left.pop()
        found[name] = text
        for imported in _imported_names(text, name if is_package else name.rpartition(".")[0]):
            if imported.partition(".")[0] == top and imported not in found:
                spec = _spec(imported)
                more = _text(spec, imported)
                if spec is not None and more is not None:
                    # Noted before its own imports are read: modules may import each other.
                    found[imported] = more
                    left.append((imported, more, spec.submodule_search_locations is not None))
    return found


# A statement at the beginning of a line, or behind a colon or a semicolon. Not with `ast` or `tokenize`: a notebook's
# cell may be no Python, and CPython 3.11 cannot build syntax trees in two threads at a time.
_IMPORT = re.compile(
    r"(?:^|[:;])[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]*(\([^()]*\)|[^;\n]+)|import[ \t]+([^;\n]+))", re.MULTILINE
)


def _imported_names(source: str, package: str) -> Iterator[str]:
    """Yield the names that this source imports. Some may be functions or classes instead of modules, or in texts."""
    source = re.sub(r"#[^\n]*", "", source.replace("\\\n", " "))
    for base, members, modules in _IMPORT.findall(source):
        names = [" ".join(each.split()).partition(" as ")[0] for each in (members or modules).strip("() ").split(",")]
        if modules:
            yield from names
            continue
        # A relative import that leads out of the package raises ImportError; it would raise when executed, too.
        try:
            within = resolve_name(base, package) if base.startswith(".") else base
        except ImportError:
            continue
        yield from (within, *(f"{within}.{name}" for name in names if name))


def _spec(module: str) -> Any:
    """Find a module's file without importing the module; None: no such file exists."""
    # `importlib.util.find_spec("a.b")` would import `a`. The path of a package that is imported already is taken from
    # there, because the package may have extended it.
    parts = module.split(".")
    top = sys.modules.get(parts[0])
    places = list(getattr(top, "__path__", ())) or None
    spec: Any = getattr(top, "__spec__", None) or PathFinder.find_spec(parts[0])
    for end in range(2, len(parts) + 1):
        places = places if end == 2 and places else getattr(spec, "submodule_search_locations", None)
        if places is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[:end]), places)
    return spec


def _text(spec: Any, module: str) -> str | None:
    try:
        text = spec.loader.get_source(module)
    except (AttributeError, ImportError, OSError, SyntaxError, UnicodeError):
        return None
    return text if isinstance(text, str) else None

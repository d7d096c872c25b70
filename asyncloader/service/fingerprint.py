"""The fingerprint of a definition: equal on two machines if the code that makes the dataset is.

Data path: none; before a worker of a service is there.

It covers the whole module that has the definition, as its helpers and its dataset's class stand there, and the modules
of the same package that it imports, and those that these import. Other packages are not covered: an environment has too
many of them, and most have nothing to do with the data.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import sys
import tokenize
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from pathlib import Path
from types import CodeType
from typing import Any


def fingerprint(function: Callable[..., Any]) -> str:
    """The fingerprint of the code that this function is part of.

    Sources are compared as texts with any line endings, for bytecode and syntax trees differ between versions of
    Python. Where there is no source, as in an installation of .pyc files, the function's bytecode stands for it.
    """
    module = inspect.unwrap(function).__module__
    name = _imported_as(module)
    parts = _sources(name, _source_of_module(function, module))
    if not parts:
        parts[""] = f"bytecode of Python {sys.hexversion:x}: {_bytecode(inspect.unwrap(function).__code__)}"
    whole = hashlib.sha256()
    for part in (parts.pop(name, ""), *(f"{each}\n{text}" for each, text in sorted(parts.items()))):
        data = "\n".join(part.splitlines()).encode(errors="surrogatepass")
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.hexdigest()[:16]


def _imported_as(module: str) -> str:
    """A module's name where it is imported: a program's main module has another one there."""
    if module != "__main__":
        return module
    main: Any = sys.modules[module]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return Path(path or module).stem if spec is None else str(spec.name)


def _source_of_module(function: Callable[..., Any], module: str) -> str | None:
    for thing in (sys.modules.get(module), inspect.unwrap(function)):  # of a notebook there is the function's cell only
        try:
            return inspect.getsource(thing)  # type: ignore[arg-type]
        except (OSError, TypeError):
            continue
    return None


def _sources(module: str, source: str | None) -> dict[str, str]:
    """The source of a module, and of those of the same package that it leads to, by name.

    Nothing is imported for this: a module that is imported late, or never on this machine, is part of it, too. A
    package's own `__init__` is part of it if it is imported by name, for others often import the whole package there.
    """
    top = module.partition(".")[0]
    found: dict[str, str] = {}
    if source is None:
        return found
    left = [(module, source, False)]
    while left:
        name, text, is_package = left.pop()
        found[name] = text
        for imported in _imported(text, name if is_package else name.rpartition(".")[0]):
            if imported.partition(".")[0] == top and "." in module and imported not in found:
                spec = _spec(imported)
                more = _text(spec, imported)
                if spec is not None and more is not None:
                    found[imported] = more
                    left.append((imported, more, spec.submodule_search_locations is not None))
    return found


def _imported(source: str, package: str) -> Iterator[str]:
    """The names that this source imports, of which some may be no modules."""
    # Not by `ast`: CPython 3.11 counts its depth for all threads together, and raises SystemError in two that parse.
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):  # of a cell that has a magic command
        return
    words: list[str] = []
    for token in tokens:
        if token.type not in _BETWEEN and token.string not in (";", ":"):
            words += [token.string] if token.type not in (tokenize.NL, tokenize.COMMENT) else []
            continue
        statement, words = words, []
        if statement[:1] == ["import"]:
            yield from _listed(statement[1:])
        elif statement[:1] == ["from"] and "import" in statement:
            at = statement.index("import")
            base = "".join(statement[1:at])
            try:
                base = resolve_name(base, package) if base.startswith(".") else base
            except ImportError:
                continue
            yield base
            yield from (f"{base}.{name}" for name in _listed(statement[at + 1 :]))


_BETWEEN = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
"""Tokens between statements."""


def _listed(words: list[str]) -> Iterator[str]:
    """The names in ``a.b as c, d``, with parentheses around it or without."""
    text = " ".join(word for word in words if word not in "()")
    names = ("".join(each.partition(" as ")[0].split()) for each in text.split(","))
    return filter(None, names)  # the last comma may have nothing behind it


def _spec(module: str) -> Any:
    """Find a module's file without importing the module; None: no such file exists."""
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


def _bytecode(code: CodeType) -> str:
    constants = [_bytecode(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return repr((code.co_code, constants, code.co_names, code.co_varnames))

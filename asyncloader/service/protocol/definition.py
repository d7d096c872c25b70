"""Definitions: functions that make a dataset, and that both the loader and the service import by name.

    @asyncloader.definition
    def train(root: str = "/data"):
        return Images(root)

Calling a definition only stores the arguments. A loader without `workers=` then makes the dataset itself; a loader
with `workers=` sends the name and the arguments, and the service, where the same module is installed, makes it.

The *fingerprint* of a definition is equal on two machines if the code that makes the dataset is equal. It covers the
whole module that contains the definition, because helpers and the dataset's class are usually defined there, and the
modules of the same package that this module imports, directly or through others. Other packages are not covered: an
environment has too many of them, and most have nothing to do with the data.

An engine's nodes get a `PickledDefinition`, which contains its code, over the engine's own channel, which it trusts as
much as the program that it runs. No pickle travels over a service's connections.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import pickle
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

FUNCTIONS = ("collate_fn", "worker_init_fn", "decode")
"""The loader's arguments that run in workers, so a definition returns them beside the dataset."""


class Made(NamedTuple):
    """The result of a definition: the dataset, and the functions that run in workers, by the names of the loader's
    arguments.
    """

    dataset: Any
    functions: Mapping[str, Any]


class Defined:
    """A definition with its arguments. A loader takes it in the place of a dataset."""

    def __init__(self, made_by: Definition, arguments: dict[str, Any]) -> None:
        self.definition = made_by
        self.arguments = arguments

    def make(self) -> Made:
        """Make the dataset in this process.

        Raises:
            TypeError: the definition returned neither a dataset, nor a dataset and a dictionary of functions.
        """
        made = self.definition.function(**self.arguments)
        functions: Mapping[str, Any] = {}
        # Nothing but such a pair is taken apart: a tuple of samples is a dataset, too.
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict):
            made, functions = made
        unknown = sorted(set(functions) - set(FUNCTIONS))
        if unknown:
            raise TypeError(
                f"{self.definition.name} returned {unknown[0]!r} beside its dataset: {', '.join(FUNCTIONS)} can be"
            )
        if made is None:
            raise TypeError(f"{self.definition.name} returned None, and not a dataset")
        return Made(made, functions)

    def packed_arguments(self) -> str:
        """The arguments as JSON.

        Raises:
            TypeError: an argument is no plain value.
        """
        # One by one, so that the error names the argument. NaN is refused because it equals nothing: a node could not
        # compare it with its own argument.
        for name, value in self.arguments.items():
            try:
                json.dumps(value, allow_nan=False)
                _check_keys(value)
            except (TypeError, ValueError):
                raise TypeError(
                    f"{self.definition.name}({name}={value!r:.60}) cannot be sent to a service: arguments are numbers, "
                    "texts, lists and dictionaries of these, with texts as keys"
                ) from None
        return json.dumps(self.arguments, sort_keys=True)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return f"{self.definition.name}({given})"


class Definition:
    """A function that makes a dataset, known to a service by its name. Calling it makes a `Defined`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        self._fingerprint: str | None = None
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Store the arguments.

        Raises:
            TypeError: the function does not take these arguments, or has parameters without names.
        """
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        if any(
            kind.kind in (kind.VAR_POSITIONAL, kind.POSITIONAL_ONLY) for kind in bound.signature.parameters.values()
        ):
            raise TypeError(f"{self.name}: the parameters of a definition have names, by which they are sent")
        arguments = dict(bound.arguments)
        for kind in bound.signature.parameters.values():
            if kind.kind is kind.VAR_KEYWORD:  # each of these is an argument of its own
                arguments |= arguments.pop(kind.name, {})
        return Defined(self, arguments)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(inspect.signature(self.function).parameters)

    def fingerprint(self) -> str:
        """Identify the code of this definition."""
        # Kept from the first call: a later edit of the files does not change the code that this process has imported.
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.function)
        return self._fingerprint

    def check(self, fingerprint: str, where: str) -> None:
        """Raise ValueError if this code has another fingerprint. `where` is the place of the other fingerprint."""
        if fingerprint != self.fingerprint():
            raise ValueError(
                f"the definition {self.name} differs: its source has the fingerprint {fingerprint:.16} {where}, and "
                f"{self.fingerprint()} where the dataset is made. Install the same module, and the same modules of its "
                "package, everywhere, and start again what was started before"
            )

    def convert(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Check arguments against the signature and annotations, and convert texts to the annotated types.

        Raises:
            ValueError: an argument is unknown, missing or of another type. The text names the argument.
        """
        signature = inspect.signature(self.function)
        try:
            hints = typing.get_type_hints(self.function)
        except Exception:  # a name that only a type checker knows
            hints = {}
        try:
            signature.bind(**given)
        except TypeError as error:
            raise ValueError(f"{self.name}{signature}: {error}") from None
        return {name: _convert(self.name, name, value, hints.get(name, Any)) for name, value in given.items()}

    def __repr__(self) -> str:
        return f"<definition {self.function.__module__}.{self.name}>"


def definition(function: Callable[..., Any]) -> Definition:
    """Turn a function that returns a dataset into a `Definition`. For use as decorator.

    The function returns the dataset, or the dataset and a dictionary of functions that run in workers (`collate_fn`,
    `worker_init_fn`, `decode`). It stands at the top level of a module that is installed where the workers run, and its
    arguments are plain values: numbers, texts, and lists and dictionaries of these.
    """
    return Definition(function)


def load_definition(target: str) -> Definition:
    """Return the definition that ``"module:name"`` names. Modules are also searched in the current folder.

    Raises:
        ValueError: no definition has this name.
    """
    module_name, _, name = target.partition(":")
    if not name:
        raise ValueError(f"{target!r} names no definition: give module:name, as in data:train")
    # A console script's path has the script's folder instead of the current one.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{target!r}: there is no module {error.name!r} in {Path.cwd()} or among the installed ones"
        ) from error
    found = getattr(module, name, None)
    if not isinstance(found, Definition):
        known = [key for key, value in vars(module).items() if isinstance(value, Definition)]
        what = f"it has {', '.join(known)}" if known else "decorate a function with @asyncloader.definition"
        raise ValueError(f"{target!r}: {module_name} has no definition {name!r}; {what}")  # noqa: TRY004
    # Now, while the files are those that were just imported: they may be edited before the first loader comes.
    found.fingerprint()
    return found


def _check_keys(value: Any) -> None:
    """Raise TypeError for a dictionary that JSON would give another key: 1 would become "1"."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            _check_keys(each)


def _convert(owner: str, name: str, value: Any, hint: Any) -> Any:
    import msgspec  # late: a loader without a service does not need it

    def path_of(kind: Any, given: Any) -> Path:
        if kind is Path and type(given) is str:
            return Path(given)
        raise TypeError

    # A text may come from a command line or a configuration, and stand for a number, a bool, a list or a dictionary.
    ways: list[tuple[Any, bool]] = [(value, True)]
    if type(value) is str:
        ways.append((value, False))
        with contextlib.suppress(ValueError, RecursionError):
            ways.append((json.loads(value), True))
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    kinds = typing.get_args(hint) if is_union else (hint,)
    for given, strict in ways:
        for kind in kinds:
            with contextlib.suppress(msgspec.ValidationError, TypeError):  # TypeError: not of plain values
                return msgspec.convert(given, kind, strict=strict, dec_hook=path_of)
    raise ValueError(f"{owner}({name}=): {value!r:.60} is no {getattr(hint, '__name__', hint)}")


def check_extra() -> None:
    """Check that the service's modules can be imported.

    Raises:
        ImportError: a requirement is not installed.
    """
    if importlib.util.find_spec("msgspec") is None:
        raise ImportError("a service needs msgspec, which is not installed: pip install 'asyncloader[service]'")


# ---------------------------------------------------------------------------------------------------- pickled


class PickledDefinition(Definition):
    """A definition that contains its code.

    Args:
        data: a pickled function without arguments, which returns the same as the function of a definition.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        # Named by its content, so a loader that pickles the same dataset again finds the processes that have it.
        self.name = f"pickled-{hashlib.sha256(data).hexdigest()[:32]}"
        self.function = self._make

    def _make(self) -> Any:
        return pickle.loads(self.data)()

    def fingerprint(self) -> str:
        """Return the name, which is a hash of the code."""
        return self.name

    def __repr__(self) -> str:
        return f"<{self.name}>"


def pickle_definition(dataset: Any, functions: Mapping[str, Any]) -> Defined:
    """Pack a dataset, or a definition with its arguments, and the loader's functions that run in workers.

    Of a definition each process makes its dataset. Code of `__main__`, which no node can import, is pickled with it.

    Raises:
        Exception: as `cloudpickle.dumps`: a part cannot be pickled.
    """
    import cloudpickle

    if isinstance(dataset, Defined) and isinstance(dataset.definition, PickledDefinition):
        if not functions:
            return dataset
        dataset, own = dataset.make()
        functions = {**own, **functions}
    return Defined(PickledDefinition(cloudpickle.dumps(partial(_made, dataset, dict(functions)))), {})


def _made(dataset: Any, functions: dict[str, Any]) -> Any:
    if isinstance(dataset, Defined):
        dataset, own = dataset.make()
        functions = {**own, **functions}
    return dataset, functions


# ------------------------------------------------------------------------------------------------ fingerprints


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
            within = importlib.util.resolve_name(base, package) if base.startswith(".") else base
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

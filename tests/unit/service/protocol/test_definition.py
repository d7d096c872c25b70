"""Definitions: the loader's argument in the place of a dataset, and how a node calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader, Service, definition
from asyncloader.service.protocol.definition import Definition, load_definition
from tests.service import definitions


@definition
def many(
    n: int, scale: float = 1.0, *, root: Path | None = None, flag: bool = False, names: list[str] | None = None
) -> Any:
    """Something with parameters."""
    return [n * scale] * n, {"collate_fn": sum}


def test_a_definition_without_a_service_is_its_dataset() -> None:
    """The dataset's functions are used, too; the same line of code runs both ways."""
    loader: Any = DataLoader(many(4, scale=2), batch_size=2)
    assert loader.dataset == [8] * 4
    assert list(loader) == [16, 16]
    assert list(loader.clone(batch_size=4)) == [32]
    assert repr(many(4, scale=2)) == "many(n=4, scale=2)"
    assert many.__doc__ == "Something with parameters."


@definition
def further(n: int, **options: Any) -> Any:
    return [n, options]


def test_a_definition_with_further_arguments() -> None:
    """They reach the function as they are given, here and on a node."""
    made = further(1, a=2, options=3)
    assert made.make().dataset == [1, {"a": 2, "options": 3}]
    assert further.convert(json.loads(made.packed_arguments())) == made.arguments


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"n": "4"}, {"n": 4}),
        ({"n": 4, "scale": 2}, {"n": 4, "scale": 2.0}),
        ({"n": 4, "scale": "0.5", "flag": "True"}, {"n": 4, "scale": 0.5, "flag": True}),
        ({"n": 4, "root": "/data"}, {"n": 4, "root": Path("/data")}),
        ({"n": 4, "root": None, "names": '["a"]'}, {"n": 4, "root": None, "names": ["a"]}),
    ],
)
def test_arguments_become_what_the_annotations_say(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """The arguments may be given on the command line, or in a loader's JSON."""
    found = many.convert(given)
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "missing a required argument: 'n'"),
        ({"n": 1, "m": 2}, "unexpected keyword argument 'm'"),
        ({"n": "four"}, r"many\(n=\): 'four' is no int"),
        ({"n": True}, r"many\(n=\): True is no int"),
        ({"n": 1, "flag": "yes"}, r"many\(flag=\): 'yes' is no bool"),
        ({"n": 1, "names": {"a": 1}}, r"many\(names=\)"),
        ({"n": 1, "names": '"a"'}, r"many\(names=\): '\"a\"' is no "),
    ],
)
def test_arguments_of_another_type(given: dict[str, Any], text: str) -> None:
    """The error names the argument."""
    with pytest.raises(ValueError, match=text):
        many.convert(given)


def test_mistakes_where_a_loader_is_made() -> None:
    """Each error says what to do."""
    options: dict[str, Any] = {"num_workers": 1, "seed": 1, "workers": "tcp://127.0.0.1:9"}
    mistakes: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"dataset": [1, 2]}, TypeError, "put what makes it into a function with @asyncloader.definition"),
        ({"seed": None}, ValueError, "needs seed="),
        ({"num_workers": 0}, ValueError, "needs num_workers, the number of logical workers"),
        ({"collate_fn": sum}, ValueError, "collate_fn runs in the service's workers: return it from numbers"),
        ({"worker_init_fn": print}, ValueError, "worker_init_fn runs in the service's workers"),
        ({"on_error": print}, ValueError, "use 'skip' or 'refill'"),
        ({"workers": "127.0.0.1:9"}, ValueError, "is no address: give tcp://host:port"),
        ({"dataset": [1], "workers": "processes"}, ValueError, "'processes' names no place. For processes of this"),
        ({"dataset": [1], "workers": "shared"}, ValueError, "It was removed: start asyncloader serve --listen unix:"),
        ({"dataset": [1], "workers": ""}, ValueError, "workers='' names no place"),
        ({"dataset": [1], "workers": 4}, TypeError, "Did you mean num_workers=4?"),
        ({"dataset": [1], "workers": True}, TypeError, "workers=True names no place. For processes"),
        ({"dataset": [1], "workers": []}, TypeError, "Several addresses are one text, with commas between them"),
        ({"dataset": [1], "workers": Service}, TypeError, "Service'> names no place"),
        ({"dataset": definitions.numbers(n=object())}, TypeError, r"numbers\(n=<object .*cannot be sent to a service"),
        ({"dataset": definitions.numbers(n=[{1: 2}])}, TypeError, r"numbers\(n=\[\{1: 2\}\]\) cannot.* texts as keys"),
    ]
    for change, kind, text in mistakes:
        with pytest.raises(kind, match=text):
            DataLoader[Any](**{"dataset": definitions.numbers(), **options, **change})
    with pytest.raises(ValueError, match="collate_fn comes from with_functions already"):
        DataLoader[Any](definitions.with_functions(), collate_fn=sum)
    with pytest.raises(ValueError, match="wait=0"):
        Service("unix:/x", wait=0)


def test_mistakes_in_a_definition() -> None:
    """The definition's return value is checked."""
    for made, text in [(None, "returned None"), (([1], {"collate": sum}), "returned 'collate' beside its dataset")]:
        with pytest.raises(TypeError, match=text):
            DataLoader[Any](Definition(lambda made=made: made)())
    with pytest.raises(TypeError):
        many(1, 2, 3)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("data", "give module:name"),
        ("no_such_module:train", "there is no module 'no_such_module'"),
        ("tests.service.definitions:train", "has no definition 'train'; it has numbers, with_functions"),
        ("json:dumps", "decorate a function with @asyncloader.definition"),
    ],
)
def test_names_of_definitions(target: str, text: str) -> None:
    """For a wrong name the error lists the existing names."""
    with pytest.raises(ValueError, match=text):
        load_definition(target)
    assert load_definition("tests.service.definitions:numbers") is definitions.numbers

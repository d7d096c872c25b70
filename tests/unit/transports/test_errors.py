from __future__ import annotations

import errno
import pickle

import pytest

from asyncloader.errors import LoaderError
from asyncloader.transports import errors

LEAVES: dict[type[errors.TransportError], type[Exception]] = {
    errors.UnknownScheme: ValueError,
    errors.InvalidPath: ValueError,
    errors.ObjectNotFound: FileNotFoundError,
    errors.AccessDenied: PermissionError,
    errors.ObjectTooLarge: ValueError,
    errors.RangeOutOfBounds: ValueError,
    errors.ReadFailed: OSError,
    errors.RangesIgnored: OSError,
    errors.SizeUnknown: OSError,
    errors.WriteFailed: OSError,
    errors.TransportClosed: RuntimeError,
}


def test_the_table_is_complete() -> None:
    """Every public error is the family's root or one of the classes tested here."""
    assert {getattr(errors, name) for name in errors.__all__} == {errors.TransportError, *LEAVES}


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaf_is_ours_and_the_builtin_error(leaf: type[errors.TransportError]) -> None:
    """The error can be caught as the package's root, the family's root, or the builtin."""
    assert issubclass(leaf, LoaderError)
    assert issubclass(leaf, errors.TransportError)
    assert issubclass(leaf, LEAVES[leaf])


@pytest.mark.parametrize("leaf", [errors.TransportError, *LEAVES])
def test_message_alone_makes_an_error(leaf: type[errors.TransportError]) -> None:
    """An error of a worker is rebuilt from its text alone, and shows only that."""
    error = leaf("what happened")
    assert str(error) == "what happened"
    assert error.path is None


@pytest.mark.parametrize("leaf", [errors.TransportError, *LEAVES])
def test_errors_pickle_with_their_attributes(leaf: type[errors.TransportError]) -> None:
    """Type, text, path and every further attribute survive."""
    error = leaf("what happened", path="a/b")
    error.add_note("worker 3")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is leaf
    assert str(copy) == "what happened"
    assert vars(copy) == vars(error)


def test_sizes_survive_pickling() -> None:
    """The sizes that explain an error are pickled with it."""
    large = pickle.loads(pickle.dumps(errors.ObjectTooLarge("m", path="a", size=5, max_bytes=4)))
    assert (large.path, large.size, large.max_bytes) == ("a", 5, 4)
    outside = pickle.loads(pickle.dumps(errors.RangeOutOfBounds("m", path="a", size=5)))
    assert (outside.path, outside.size) == ("a", 5)


def test_numbers_of_the_system() -> None:
    """Code that reads `errno` finds the expected number, also after a pickle."""
    numbers: dict[OSError, int] = {
        errors.ObjectNotFound("m"): errno.ENOENT,
        errors.AccessDenied("m"): errno.EACCES,
    }
    for error, number in numbers.items():
        assert error.errno == number
        assert pickle.loads(pickle.dumps(error)).errno == number
    failed = errors.ReadFailed("m")
    failed.errno = errno.EIO
    assert pickle.loads(pickle.dumps(failed)).errno == errno.EIO

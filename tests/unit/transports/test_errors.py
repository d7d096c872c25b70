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
    found = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, LoaderError)}
    assert found == {LoaderError, errors.TransportError, *LEAVES}


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaf_is_ours_and_the_builtin_error(leaf: type[errors.TransportError]) -> None:
    """The error can be caught as the package's root, the family's root, or the builtin."""
    assert issubclass(leaf, LoaderError)
    assert issubclass(leaf, errors.TransportError)
    assert issubclass(leaf, LEAVES[leaf])


@pytest.mark.parametrize("leaf", [errors.TransportError, *LEAVES])
def test_errors_pickle_with_their_attributes(leaf: type[errors.TransportError]) -> None:
    """Type, text, path and every further attribute survive."""
    error = leaf("what happened", path="a/b")
    error.add_note("worker 3")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is leaf
    assert str(copy) == "what happened"
    assert vars(copy) == vars(error)


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

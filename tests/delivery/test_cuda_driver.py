"""Page-locking with a fake libcuda that records its calls."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from typing import Any

import pytest
import torch

from asyncloader.delivery import cuda as driver
from asyncloader.delivery.cuda import Driver, LockingUnsupported, open_driver
from asyncloader.errors import PageLockError
from tests.delivery.fake_library import (
    CONTEXT,
    EXCHANGE,
    GET,
    OOM,
    POP,
    PUSH,
    REGISTER,
    RELEASE,
    RETAIN,
    STREAM,
    UNREGISTER,
    FakeLibrary,
)

ADDRESS, NBYTES = 0x7F12_3456_7000, 5 << 32


def test_locking_and_unlocking() -> None:
    """Both run in the device's primary context, which is left as it was found; addresses and sizes have 64 bits; the
    memory counts as page-locked for all devices.
    """
    library = FakeLibrary()
    undo = Driver(library, 3).lock(ADDRESS, NBYTES)
    assert library.calls == [
        (GET, (3,)),  # whether the device can lock memory
        (GET, (3,)),
        (RETAIN, (43,)),
        (PUSH, (CONTEXT,)),
        (REGISTER, (ADDRESS, NBYTES, 1)),
        (POP, ()),
        (RELEASE, (43,)),
    ]
    library.calls.clear()
    undo()
    assert library.calls == [
        (GET, (3,)),
        (RETAIN, (43,)),
        (PUSH, (CONTEXT,)),
        (UNREGISTER, (ADDRESS,)),
        (POP, ()),
        (RELEASE, (43,)),
    ]
    assert (library.retained, library.stack) == (0, [])


RELAXED = 2


@pytest.mark.parametrize("before", [0, 1, RELAXED])
@pytest.mark.parametrize("codes", [{}, {REGISTER: OOM}, {GET: OOM}], ids=["done", "refused", "refused at once"])
def test_captures_of_the_users_thread(before: int, codes: dict[str, int]) -> None:
    """Locking and unlocking spoil no CUDA graph that any thread is capturing; the capture mode of the thread in
    which they run is restored, also after a refusal.
    """
    library = FakeLibrary()
    undo = Driver(library, 0).lock(ADDRESS, NBYTES)
    library.mode, library.codes = before, codes
    library.modes.clear()
    with contextlib.suppress(PageLockError):
        Driver(library, 0).lock(ADDRESS + NBYTES, NBYTES)
    assert library.mode == before
    undo()
    assert library.mode == before
    assert library.modes == [RELAXED] * (0 if GET in codes else 2)


def test_modes_are_exchanged_with_the_gil() -> None:
    """The library that keeps the GIL exchanges them; the other library, which releases it, locks the pages."""
    slow, quick = FakeLibrary(), FakeLibrary()
    driver = Driver(slow, 0, quick)
    with driver.relaxed():
        assert (slow.mode, quick.mode) == (0, RELAXED)
    driver.lock(ADDRESS, NBYTES)()
    assert (slow.modes, quick.calls) == ([0, 0], [])


def test_a_driver_that_does_not_relax() -> None:
    """Memory is locked nevertheless, and the thread's mode is left alone."""
    library = FakeLibrary(**{EXCHANGE: 999})
    Driver(library, 0).lock(ADDRESS, NBYTES)()
    with Driver(library, 0).relaxed():
        pass
    assert (library.mode, library.modes) == (0, [0, 0])


STEPS = [
    (GET, [GET]),
    (RETAIN, [GET, RETAIN]),
    (PUSH, [GET, RETAIN, PUSH, RELEASE]),
    (REGISTER, [GET, RETAIN, PUSH, REGISTER, POP, RELEASE]),
]  # of locking, once the driver has answered that the device can lock memory


@pytest.mark.parametrize(("step", "calls"), STEPS)
def test_a_refusal_at_any_step(step: str, calls: list[str]) -> None:
    """The error has the driver's code; everything retained or pushed is released, and nothing else is called."""
    library = FakeLibrary(**{step: OOM})
    with pytest.raises(PageLockError) as caught:
        Driver(library, 0).lock(ADDRESS, NBYTES)
    assert library.names == [GET, *calls]
    assert (library.retained, library.stack) == (0, [])
    assert caught.value.nbytes == NBYTES
    assert caught.value.reason == "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"


@pytest.mark.parametrize(("step", "calls"), [*STEPS[:3], (UNREGISTER, [GET, RETAIN, PUSH, UNREGISTER, POP, RELEASE])])
def test_unlocking_never_raises(step: str, calls: list[str]) -> None:
    """At the interpreter's end the driver may be deinitialized, and no caller could handle an error."""
    library = FakeLibrary()
    undo = Driver(library, 0).lock(ADDRESS, NBYTES)
    library.calls.clear()
    library.codes = {step: 4}  # CUDA_ERROR_DEINITIALIZED
    undo()
    assert library.names == calls
    assert (library.retained, library.stack) == (0, [])


@pytest.mark.parametrize(("soft", "limit"), [(1 << 16, 1 << 16), (resource.RLIM_INFINITY, None)])
def test_the_limit_is_told(soft: int, limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the limit of this process, as ``ulimit -l`` prints it."""
    asked: list[int] = []

    def getrlimit(which: int) -> tuple[int, int]:
        asked.append(which)
        return soft, resource.RLIM_INFINITY

    monkeypatch.setattr(resource, "getrlimit", getrlimit)
    with pytest.raises(PageLockError) as caught:
        Driver(FakeLibrary(**{REGISTER: OOM}), 0).lock(ADDRESS, NBYTES)
    assert caught.value.limit == limit
    assert asked == [resource.RLIMIT_MEMLOCK]


@pytest.mark.parametrize("code", [1, 4, 712])
def test_the_limit_is_told_only_where_it_may_be_the_reason(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range that is locked already, for example, has nothing to do with ``ulimit -l``."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 16, 1 << 16))
    with pytest.raises(PageLockError) as caught:
        Driver(FakeLibrary(**{REGISTER: code}), 0).lock(ADDRESS, NBYTES)
    assert "ulimit" not in str(caught.value)
    assert f"({code})" in str(caught.value)


@pytest.mark.parametrize("library", [FakeLibrary(lockable=0), FakeLibrary(**{REGISTER: 801})])
def test_a_device_that_can_have_no_memory_locked(library: FakeLibrary) -> None:
    """Its attribute or an error code says so; the device is asked once, and the reason is kept."""
    asked = Driver(library, 0)
    with pytest.raises(LockingUnsupported, match=r"cudaDevAttrHostRegisterSupported|\(801\)"):
        asked.lock(ADDRESS, NBYTES)
    assert (library.retained, library.stack) == (0, [])
    library.calls.clear()
    with pytest.raises(LockingUnsupported):
        asked.lock(ADDRESS, NBYTES)
    assert library.calls == []
    assert asked.refusal


def test_streams() -> None:
    """Each call makes a new stream in the device's primary context, which stays retained; no thread's current
    context changes. The streams do not wait for the default stream.
    """
    library = FakeLibrary()
    asked = Driver(library, 2)
    assert [asked.new_stream(), asked.new_stream()] == [0x5010, 0x5020]
    assert (STREAM, (1,)) in library.calls
    assert (library.retained, library.stack) == (2, [])


@pytest.mark.parametrize("step", [GET, RETAIN, PUSH, STREAM])
def test_a_stream_that_cannot_be_had(step: str) -> None:
    """`new_stream` returns None and retains no context."""
    library = FakeLibrary(**{step: OOM})
    assert Driver(library, 0).new_stream() is None
    assert (library.retained, library.stack) == (0, [])


def test_a_forked_child_unlocks_nothing() -> None:
    """It may drop its copies of the parent's objects, but the parent's device still reads there: no call is made."""
    library = FakeLibrary()
    undo = Driver(library, 0).lock(ADDRESS, NBYTES)
    library.calls.clear()
    pid = os.fork()
    if pid == 0:
        try:
            undo()
        finally:
            os._exit(len(library.calls))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    undo()
    assert UNREGISTER in library.names


# --------------------------------------------------------------------------------------- loading the driver


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the library that `ctypes.CDLL` gives, or its error; torch appears to have CUDA."""

    def replace(result: Any) -> None:
        def load_library(name: str) -> Any:
            assert name == "libcuda.so.1"
            if isinstance(result, BaseException):
                raise result
            return result

        monkeypatch.setattr(ctypes, "CDLL", load_library)
        monkeypatch.setattr(ctypes, "PyDLL", load_library)

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    driver._load.cache_clear()
    driver._driver.cache_clear()
    yield replace
    driver._load.cache_clear()
    driver._driver.cache_clear()


@pytest.mark.parametrize(
    "trouble",
    [OSError("no such file"), FakeLibrary(cuInit=100), object()],
    ids=["no library", "no device", "another library"],
)
def test_without_a_driver(trouble: Any, load: Any) -> None:
    """`open_driver` returns None and raises nothing: batches take the pinned path."""
    load(trouble)
    assert open_driver(0) is None


def test_without_cuda_nothing_is_loaded(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for ROCm also names its devices "cuda", but has another driver."""
    load(AssertionError("must not be loaded"))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert open_driver(0) is None

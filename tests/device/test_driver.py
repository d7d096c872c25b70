"""Page-locking by a libcuda of our own, which writes down what it is asked."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from typing import Any

import pytest
import torch

from asyncloader.device import driver
from asyncloader.device.driver import Driver, open_driver
from asyncloader.errors import PageLockError

CONTEXT = 0xC0FFEE
OOM = 2
NAMES = {OOM: b"CUDA_ERROR_OUT_OF_MEMORY", 712: b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"}

GET, RETAIN, PUSH, POP, RELEASE = (
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuDevicePrimaryCtxRelease_v2",
)
EXCHANGE = "cuThreadExchangeStreamCaptureMode"
REGISTER, UNREGISTER = "cuMemHostRegister_v2", "cuMemHostUnregister"


class FakeLibrary:
    """Answers as CUDA's documentation says, with the error codes that it is told to give.

    Like the real one it is given C types: a plain Python integer would be cut to 32 bits.
    """

    def __init__(self, **codes: int) -> None:
        self.codes = codes
        self.calls: list[tuple[str, Any]] = []
        self.retained = 0
        self.stack: list[int | None] = []
        self.mode = 0
        self.modes: list[int] = []
        """The thread's mode at each locking and unlocking."""

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def _call(self, name: str, *arguments: Any) -> int:
        assert not any(isinstance(each, int) for each in arguments)
        self.calls.append((name, tuple(each.value for each in arguments if isinstance(each, ctypes._SimpleCData))))
        return self.codes.get(name, 0)

    def cuInit(self, flags: Any) -> int:  # noqa: N802
        return self._call("cuInit", flags)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        code = self.codes.get(EXCHANGE, 0)
        if code == 0:
            mode._obj.value, self.mode = self.mode, mode._obj.value
        return code

    def cuDeviceGet(self, device: Any, index: Any) -> int:  # noqa: N802
        code = self._call(GET, index)
        device._obj.value = 40 + index.value
        return code

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        code = self._call(RETAIN, device)
        if code == 0:
            context._obj.value = CONTEXT
            self.retained += 1
        return code

    def cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        code = self._call(PUSH, context)
        if code == 0:
            self.stack.append(context.value)
        return code

    def cuCtxPopCurrent_v2(self, popped: Any) -> int:  # noqa: N802
        popped._obj.value = self.stack.pop()
        return self._call(POP)

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:  # noqa: N802
        self.retained -= 1
        return self._call(RELEASE, device)

    def cuMemHostRegister_v2(self, address: Any, nbytes: Any, flags: Any) -> int:  # noqa: N802
        assert self.stack == [CONTEXT]
        self.modes.append(self.mode)
        return self._call(REGISTER, address, nbytes, flags)

    def cuMemHostUnregister(self, address: Any) -> int:  # noqa: N802
        assert self.stack == [CONTEXT]
        self.modes.append(self.mode)
        return self._call(UNREGISTER, address)

    def cuGetErrorName(self, code: Any, text: Any) -> int:  # noqa: N802
        text._obj.value = NAMES.get(code.value)
        return 0

    def cuGetErrorString(self, code: Any, text: Any) -> int:  # noqa: N802
        text._obj.value = b"out of memory" if code.value == OOM else None
        return 0


ADDRESS, NBYTES = 0x7F12_3456_7000, 5 << 32


def test_locking_and_unlocking() -> None:
    """Each in the device's primary context, which is left as it was found; addresses and sizes of 64 bits; the memory
    counts as page-locked for all devices.
    """
    library = FakeLibrary()
    undo = Driver(library, 3).lock(ADDRESS, NBYTES)
    assert library.calls == [
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
    """Locking and unlocking spoil no CUDA graph that is captured now, in whichever thread; the mode of the thread in
    which they happen is what it was, also after a refusal.
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
    """By the library that keeps it; pages are locked by the other, which does not."""
    slow, quick = FakeLibrary(), FakeLibrary()
    driver = Driver(slow, 0, quick)
    with driver.relaxed():
        assert (slow.mode, quick.mode) == (0, RELAXED)
    driver.lock(ADDRESS, NBYTES)()
    assert (slow.modes, quick.calls) == ([0, 0], [])


def test_a_driver_that_does_not_relax() -> None:
    """It locks all the same, and no mode is made up."""
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
]


@pytest.mark.parametrize(("step", "calls"), STEPS)
def test_a_refusal_at_any_step(step: str, calls: list[str]) -> None:
    """The error says which; what was taken is given back, nothing else is called."""
    library = FakeLibrary(**{step: OOM})
    with pytest.raises(PageLockError) as caught:
        Driver(library, 0).lock(ADDRESS, NBYTES)
    assert library.names == calls
    assert (library.retained, library.stack) == (0, [])
    assert caught.value.nbytes == NBYTES
    assert caught.value.reason == "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"


@pytest.mark.parametrize(("step", "calls"), [*STEPS[:3], (UNREGISTER, [GET, RETAIN, PUSH, UNREGISTER, POP, RELEASE])])
def test_unlocking_never_raises(step: str, calls: list[str]) -> None:
    """At the interpreter's end the driver may be gone; there is nobody to tell."""
    library = FakeLibrary()
    undo = Driver(library, 0).lock(ADDRESS, NBYTES)
    library.calls.clear()
    library.codes = {step: 4}  # CUDA_ERROR_DEINITIALIZED
    undo()
    assert library.names == calls
    assert (library.retained, library.stack) == (0, [])


def test_an_error_that_the_driver_has_no_words_for() -> None:
    """Its number is told."""
    with pytest.raises(PageLockError, match=r"an unknown error \(4711\)"):
        Driver(FakeLibrary(**{REGISTER: 4711}), 0).lock(ADDRESS, NBYTES)
    with pytest.raises(PageLockError, match=r"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED \(712\)"):
        Driver(FakeLibrary(**{REGISTER: 712}), 0).lock(ADDRESS, NBYTES)


@pytest.mark.parametrize(("soft", "limit"), [(1 << 16, 1 << 16), (resource.RLIM_INFINITY, None)])
def test_the_limit_is_told(soft: int, limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of this process, as ``ulimit -l`` has it."""
    asked: list[int] = []

    def getrlimit(which: int) -> tuple[int, int]:
        asked.append(which)
        return soft, resource.RLIM_INFINITY

    monkeypatch.setattr(resource, "getrlimit", getrlimit)
    with pytest.raises(PageLockError) as caught:
        Driver(FakeLibrary(**{REGISTER: OOM}), 0).lock(ADDRESS, NBYTES)
    assert caught.value.limit == limit
    assert asked == [resource.RLIMIT_MEMLOCK]


def test_a_forked_child_unlocks_nothing() -> None:
    """It has the parent's objects, and may lose them; the parent's device still reads there. No call is made."""
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


# ----------------------------------------------------------------------------------------------- loading it


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces what `ctypes.CDLL` gives or raises; torch is one with CUDA."""

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
    yield replace
    driver._load.cache_clear()


def test_the_library_is_loaded_once(load: Any) -> None:
    """And made ready, which does nothing where torch has done it."""
    library = FakeLibrary()
    load(library)
    for _ in range(2):
        assert open_driver(1) is not None
    assert library.calls == [("cuInit", (0,))]


@pytest.mark.parametrize(
    "trouble",
    [OSError("no such file"), FakeLibrary(cuInit=100), object()],
    ids=["no library", "no device", "another library"],
)
def test_without_a_driver(trouble: Any, load: Any) -> None:
    """None, and no error: batches take the pinned path."""
    load(trouble)
    assert open_driver(0) is None


def test_without_cuda_nothing_is_loaded(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for ROCm has devices of the name "cuda", and another driver."""
    load(AssertionError("must not be loaded"))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert open_driver(0) is None

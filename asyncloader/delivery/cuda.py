"""What is asked of CUDA's driver itself: a few functions of libcuda.so.1, called without the GIL if they take time.

Data path: ring -> locking -> cuda -> [driver].

The driver's own interface and not the runtime's, because a runtime call that fails leaves its error behind, and the
next call of anybody in the process reports it as its own. Memory that was locked here is page-locked for the runtime,
and for all devices (CU_MEMHOSTREGISTER_PORTABLE). Source: CUDA Driver API, "Memory Management" and "Primary Context
Management".

While a CUDA graph is captured in torch's default mode, "global", many calls of *other* threads fail, and spoil the
capture: memory that is locked, an event that is waited for. A thread whose own mode is "relaxed" is exempt. Source:
CUDA Driver API, `cuThreadExchangeStreamCaptureMode`.

Assumption: the mapping is shared memory. A private one would be copied page by page after a fork, and the device would
go on reading the old pages.

CUDA: copies in a side stream, from page-locked memory, ahead of the consumer.

Data path: delivery -> stage -> transfer -> [cuda] -> consumer.

The consumer's stream waits for the copies on the device, not the consumer for them in its thread. `record_stream` tells
torch's allocator that the consumer's stream uses memory that belongs to a side stream; without it the memory of a
batch that is dropped would be given to the next copy while kernels still read it.

Every call is made with the loader's device as the thread's current one. A thread begins on device 0, and a call made
there, or the return from a stream of another device, opens a context on it: some 0.5 GB for each process of a machine.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, TypeAlias

import torch

from asyncloader.delivery.accelerator import Accelerator, DoneEvent
from asyncloader.delivery.numa import node_of
from asyncloader.errors import DeviceUnavailable, PageLockError

__all__ = [
    "CudaAccelerator",
    "Driver",
    "LockingUnsupported",
    "open_driver",
]

_PORTABLE = 0x01
_SUCCESS = 0
_OUT_OF_MEMORY = 2
_NOT_SUPPORTED = 801
_RELAXED = 2
_NON_BLOCKING = 0x01
_HOST_REGISTER_SUPPORTED = 99  # CUdevice_attribute


class LockingUnsupported(Exception):
    """This device cannot read from memory of ours that is page-locked, whatever its size. It works all the same."""


class Driver:
    """The driver, for one device.

    Args:
        library: libcuda, loaded.
        index: of the device.
        quick: the same, for calls that keep the GIL; default None: there is only the one.
    """

    def __init__(self, library: Any, index: int, quick: Any = None) -> None:
        self._library = library
        self._quick = library if quick is None else quick
        self._index = index
        self.refusal = ""
        """Why this device can have no memory locked, once that is known."""

    def lock(self, address: int, nbytes: int) -> Callable[[], None]:
        """Page-lock a range; returns what unlocks it. Both take about 0.1 s for a GB whose pages are there.

        Raises:
            LockingUnsupported: this device can have no memory locked: its own attribute says so, or the driver does
                (CUDA_ERROR_NOT_SUPPORTED: under confidential computing, for one).
            PageLockError: the driver refuses this range.
        """
        if not self.refusal and not self._can_lock():
            self.refusal = "cudaDevAttrHostRegisterSupported is 0"
        if self.refusal:
            raise LockingUnsupported(self.refusal)
        with self.relaxed(), self._context() as refused:
            code = refused or self._library.cuMemHostRegister_v2(
                ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE)
            )
        if code == _NOT_SUPPORTED:
            self.refusal = self._text(code)
            raise LockingUnsupported(self.refusal)
        if code != _SUCCESS:
            raise PageLockError(nbytes, _memlock_limit() if code == _OUT_OF_MEMORY else None, self._text(code))
        return partial(self._unlock, os.getpid(), address)

    def _can_lock(self) -> bool:
        device, supported = ctypes.c_int(), ctypes.c_int(1)
        library = self._library
        if library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(self._index)) == _SUCCESS:
            # A driver that does not know the attribute leaves the answer as it is.
            library.cuDeviceGetAttribute(ctypes.byref(supported), ctypes.c_int(_HOST_REGISTER_SUPPORTED), device)
        return bool(supported.value)

    def pci_address(self) -> str:
        """As "0000:3B:00.0"; empty where the driver does not say."""
        device, text = ctypes.c_int(), ctypes.create_string_buffer(32)
        library = self._library
        if library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(self._index)) == _SUCCESS:
            library.cuDeviceGetPCIBusId(text, ctypes.c_int(len(text)), device)
        return text.value.decode()

    def new_stream(self) -> int | None:
        """The handle of a new stream that waits for no other by itself; None: the driver refuses.

        The stream is the process's for good, and so is the device's primary context, which is retained for it.
        """
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        library = self._library
        if library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(self._index)) != _SUCCESS:
            return None
        if library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) != _SUCCESS:
            return None
        with self.relaxed(), self._context() as refused:
            code = refused or library.cuStreamCreate(ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        if code != _SUCCESS:
            library.cuDevicePrimaryCtxRelease_v2(device)
            return None
        return stream.value

    @contextmanager
    def relaxed(self) -> Generator[None]:
        """In it, nothing that this thread asks of the device fails over a CUDA graph that is captured, or spoils it."""
        mode = ctypes.c_int(_RELAXED)
        exchanged = self._exchange_mode(mode)
        try:
            yield
        finally:
            if exchanged:
                self._exchange_mode(mode)

    def _exchange_mode(self, mode: ctypes.c_int) -> bool:
        """`mode` has the thread's former one then. A refusal costs graphs that are captured now, no batch.

        It only sets a variable of the thread: to give up the GIL for it, twice a batch, would be to wait for it.
        """
        return bool(self._quick.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == _SUCCESS)

    def _unlock(self, owner: int, address: int) -> None:
        if os.getpid() != owner:
            return  # a fork's copy: the parent's device still reads there
        with self.relaxed(), self._context() as refused:
            if not refused:
                # At the interpreter's end the driver may be gone already, and its locks with it: no error of ours.
                self._library.cuMemHostUnregister(ctypes.c_void_p(address))

    @contextmanager
    def _context(self) -> Generator[int]:
        """Makes the device's primary context, which is torch's as well, this thread's; gives an error code."""
        device, context, popped = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        library = self._library
        code: int = library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(self._index))
        if code == _SUCCESS:
            code = library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        if code != _SUCCESS:
            yield code
            return
        try:
            code = library.cuCtxPushCurrent_v2(context)
            try:
                yield code
            finally:
                if code == _SUCCESS:
                    library.cuCtxPopCurrent_v2(ctypes.byref(popped))
        finally:
            library.cuDevicePrimaryCtxRelease_v2(device)

    def _text(self, code: int) -> str:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(name))
        self._library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(text))
        return f"{(name.value or b'an unknown error').decode()} ({code}): {(text.value or b'').decode()}"


def open_driver(index: int) -> Driver | None:
    """The driver; None where there is none that we know: ROCm's, for one. A process has one for each device, so what
    it has learned of a device holds for all loaders.
    """
    return None if torch.version.cuda is None else _driver(index)


@cache
def _driver(index: int) -> Driver | None:
    library = _load()
    return None if library is None else Driver(library, index, ctypes.PyDLL("libcuda.so.1"))


@cache
def _load() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        if library.cuInit(ctypes.c_uint(0)) != _SUCCESS:  # a no-op where torch has called it
            return None
        _ = library.cuDevicePrimaryCtxRelease_v2  # CUDA 11's, the youngest of what is used here
    except (OSError, AttributeError):
        return None
    return library


def _memlock_limit() -> int | None:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


_Here: TypeAlias = Callable[[], AbstractContextManager[None]]
"""In it, the loader's device is the thread's current one, and CUDA graphs that others capture are left alone."""


class CudaAccelerator(Accelerator):
    """One CUDA device.

    Args:
        device: of type "cuda"; without an index the current one of the calling thread.

    Raises:
        DeviceUnavailable: torch sees no such device.
    """

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise DeviceUnavailable(str(device), f"torch {torch.__version__} sees no CUDA device, or was built without")
        index: int = torch.cuda.current_device() if device.type == str(device) else device.index
        if index >= torch.cuda.device_count():
            raise DeviceUnavailable(str(device), f"torch sees {torch.cuda.device_count()} CUDA devices")
        self.device = torch.device("cuda", index)
        self._driver = open_driver(index)
        self._kept = _kept(os.getpid(), index)
        self.lock = None
        if self._driver is None:
            self.unlocked_because = "torch's CUDA here has no driver that locks rings"
        elif self._driver.refusal:
            self.unlocked_because = self._driver.refusal
        else:
            self.lock = self._driver.lock
        self.node = None if self._driver is None else node_of(self._driver.pci_address())

    @contextmanager
    def _here(self) -> Generator[None]:
        relaxed = nullcontext() if self._driver is None else self._driver.relaxed()
        with relaxed, torch.cuda.device(self.device):
            yield

    @contextmanager
    def work(self) -> Generator[None]:
        """Makes the stream of copies this thread's current one."""
        with self._here(), torch.cuda.stream(self._kept.copies):
            yield

    @contextmanager
    def compute(self, copies: Sequence[torch.Tensor], copied: DoneEvent | None) -> Generator[None]:
        """Makes the stream of computations this thread's current one."""
        stream = self._kept.computations
        _use(stream, copies, copied)
        with torch.cuda.stream(stream):
            yield

    def sync_side_streams(self) -> None:
        """A transform may use tensors that the consumer's stream still computes."""
        with self._here():
            event = self.event()
            for stream in (self._kept.copies, self._kept.computations):
                stream.wait_event(event.raw)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Asks for the copy; from memory that is not page-locked, waits for it."""
        return tensor.to(self.device, non_blocking=True)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in memory of torch's page-locking allocator."""
        return tensor.pin_memory() if _can_be_pinned(tensor) else tensor

    def event(self) -> _Event:
        """See `_Event`."""
        return _Event(torch.cuda.current_stream(self.device), self._kept.events, self._here)

    def sync_current_stream(self, tensors: Sequence[torch.Tensor], event: DoneEvent | None) -> None:
        """See `Accelerator`. The consumer's stream is the current one of its thread."""
        with self._here():
            _use(torch.cuda.current_stream(self.device), tensors, event)


class _Kept:
    """What a process keeps of a device, for all loaders and for good.

    torch's allocator keeps freed memory for the stream that it was allocated in: with streams of its own each loader
    would leave the memory of its last batches to nobody. And the streams are not of torch's pool, of which there are
    32 in all: one of those is another user's as well, who may be capturing a graph in it.
    """

    def __init__(self, device: torch.device, driver: Driver | None) -> None:
        self.copies = _new_stream(device, driver)
        self.computations = _new_stream(device, driver)
        self.events: deque[torch.cuda.Event] = deque()
        """That nobody waits for. To destroy an event could spoil a graph that somebody captures, so none is."""


@cache
def _kept(owner: int, index: int) -> _Kept:  # noqa: ARG001 - a part of the key
    """Those of this process: `owner` is its number. A forked child has none of its parent's."""
    return _Kept(torch.device("cuda", index), open_driver(index))


def _new_stream(device: torch.device, driver: Driver | None) -> torch.cuda.Stream:
    handle = None if driver is None else driver.new_stream()
    return torch.cuda.Stream(device) if handle is None else torch.cuda.ExternalStream(handle, device)


class _Event:
    """The end of what a stream was given so far. Waiters sleep instead of spinning, and spoil no CUDA graph that the
    consumer captures meanwhile. It is used again when nobody refers to it.
    """

    def __init__(self, stream: torch.cuda.Stream, unused: deque[torch.cuda.Event], here: _Here) -> None:
        try:
            self.raw = unused.pop()
        except IndexError:
            self.raw = torch.cuda.Event(blocking=True)
        self._unused = unused
        self._here = here
        self.raw.record(stream)

    def synchronize(self) -> None:
        with self._here():
            self.raw.synchronize()

    def __del__(self) -> None:
        # In any thread, also within the garbage collector: no lock, and nothing is asked of the device.
        if hasattr(self, "_unused"):
            self._unused.append(self.raw)


def _use(stream: torch.cuda.Stream, tensors: Sequence[torch.Tensor], event: DoneEvent | None) -> None:
    """The stream waits for the event; what it does with the tensors is done before their memory is used again."""
    if event is not None:
        stream.wait_event(event.raw)  # type: ignore[attr-defined]
    for tensor in tensors:
        tensor.record_stream(stream)


def _can_be_pinned(tensor: torch.Tensor) -> bool:
    """Whether torch can copy it to page-locked memory: as it is, so that no element may be in two places of it."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return all(step or size < 2 for size, step in zip(tensor.shape, tensor.stride(), strict=True))

"""CUDA: copies in a side stream from page-locked rings, ahead of the consumer.

Data path: device_stage -> transfer -> [cuda] -> consumer.

`CudaAccelerator` works with streams and events. The consumer's *stream* waits for the copies, so the consumer's thread
does not. `Driver` calls libcuda.so.1 itself. Sources: CUDA Driver API, "Memory Management", "Primary Context
Management", and `cuThreadExchangeStreamCaptureMode`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, TypeAlias

import torch

from asyncloader.delivery.accelerator import Accelerator, DoneEvent
from asyncloader.errors import DeviceUnavailable, PageLockError

if sys.platform != "win32":
    import resource

# CU_MEMHOSTREGISTER_PORTABLE: the memory is page-locked for the runtime, too, and for all devices.
_PORTABLE = 0x01
_SUCCESS = 0
_OUT_OF_MEMORY = 2
_NOT_SUPPORTED = 801
_RELAXED = 2
_NON_BLOCKING = 0x01
_HOST_REGISTER_SUPPORTED = 99  # CUdevice_attribute


class LockingUnsupported(Exception):
    """This device cannot use memory that we page-lock, whatever its size. It works without."""


class Driver:
    """The CUDA driver, for one device.

    Args:
        library: libcuda, loaded.
        index: of the device.
        quick: libcuda, loaded so that calls keep the GIL; default None: `library` serves for these calls, too.
    """

    def __init__(self, library: Any, index: int, quick: Any = None) -> None:
        self._library = library
        self._quick = library if quick is None else quick
        self._index = index
        self.refusal = ""
        """Why no memory can be locked for this device, once that is known."""

    def lock(self, address: int, nbytes: int) -> Callable[[], None]:
        """Page-lock a range. Returns a function that unlocks it. Each takes about 0.1 s per GB of existing pages.

        Raises:
            LockingUnsupported: no memory can be locked for this device, according to its attribute or to the driver
                (CUDA_ERROR_NOT_SUPPORTED, for example under confidential computing).
            PageLockError: the driver refuses this range.
        """
        if not self.refusal and not self._can_lock():
            self.refusal = "cudaDevAttrHostRegisterSupported is 0"
        if self.refusal:
            raise LockingUnsupported(self.refusal)
        with self.relaxed(), self._context() as refused:
            # The mapping must be shared memory: a private mapping is copied page by page after a fork, and the device
            # would keep reading the old pages.
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
            # A driver that does not know the attribute leaves `supported` unchanged.
            library.cuDeviceGetAttribute(ctypes.byref(supported), ctypes.c_int(_HOST_REGISTER_SUPPORTED), device)
        return bool(supported.value)

    def new_stream(self) -> int | None:
        """The handle of a new non-blocking stream; None if the driver refuses.

        The stream lives as long as the process; so does the device's primary context, which is retained for it.
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
        """Context in which this thread's calls neither fail because of a CUDA graph capture nor invalidate it."""
        # While a graph is captured in torch's default mode, "global", many calls of other threads fail and invalidate
        # the capture, such as locking memory or waiting for an event. A thread in "relaxed" mode is exempt.
        mode = ctypes.c_int(_RELAXED)
        exchanged = self._exchange_mode(mode)
        try:
            yield
        finally:
            if exchanged:
                self._exchange_mode(mode)

    def _exchange_mode(self, mode: ctypes.c_int) -> bool:
        """Set the thread's capture mode; `mode` then holds the former one. If the driver refuses, a graph that is
        being captured may fail, but no batch is lost.

        The call only sets a thread-local variable, so it keeps the GIL: releasing it twice per batch costs more.
        """
        return bool(self._quick.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == _SUCCESS)

    def _unlock(self, owner: int, address: int) -> None:
        if os.getpid() != owner:
            return  # in a forked child: the parent's device still reads the memory
        with self.relaxed(), self._context() as refused:
            if not refused:
                # At interpreter exit the driver, and its locks, may be gone already; that is not an error.
                self._library.cuMemHostUnregister(ctypes.c_void_p(address))

    @contextmanager
    def _context(self) -> Generator[int]:
        """Make the device's primary context, which torch uses too, current in this thread; yields an error code."""
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
    """The driver of a device; None if there is no CUDA driver, as with ROCm. Cached per process and device, so that all
    loaders share the results of its first calls.
    """
    return None if torch.version.cuda is None else _driver(index)


@cache
def _driver(index: int) -> Driver | None:
    library = _load()
    # `CDLL` releases the GIL during a call, `PyDLL` keeps it.
    return None if library is None else Driver(library, index, ctypes.PyDLL("libcuda.so.1"))


@cache
def _load() -> Any:
    try:
        # The driver, and not the runtime: a failed call of the runtime leaves its error behind for the next call of any
        # code in the process.
        library = ctypes.CDLL("libcuda.so.1")
        if library.cuInit(ctypes.c_uint(0)) != _SUCCESS:  # a no-op if torch has called it
            return None
        _ = library.cuDevicePrimaryCtxRelease_v2  # from CUDA 11, the newest function used here
    except (OSError, AttributeError):
        return None
    return library


def _memlock_limit() -> int | None:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


_Here: TypeAlias = Callable[[], AbstractContextManager[None]]
"""Context in which the loader's device is current, and CUDA graph captures are not disturbed."""


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

    @contextmanager
    def _here(self) -> Generator[None]:
        relaxed = nullcontext() if self._driver is None else self._driver.relaxed()
        # A thread begins on device 0. A call made there, or the return from a stream of another device, opens a context
        # on it, which costs some 0.5 GB per process.
        with relaxed, torch.cuda.device(self.device):
            yield

    @contextmanager
    def work(self) -> Generator[None]:
        """Makes the copy stream this thread's current one."""
        with self._here(), torch.cuda.stream(self._kept.copies):
            yield

    @contextmanager
    def compute(self, copies: Sequence[torch.Tensor], copied: DoneEvent | None) -> Generator[None]:
        """Makes the compute stream this thread's current one."""
        stream = self._kept.computations
        _use(stream, copies, copied)
        with torch.cuda.stream(stream):
            yield

    def sync_side_streams(self) -> None:
        """Make both side streams wait for the consumer's: a transform may use tensors that this is still computing."""
        with self._here():
            event = self.event()
            for stream in (self._kept.copies, self._kept.computations):
                stream.wait_event(event.raw)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Starts the copy; from memory that is not page-locked, waits for it."""
        return tensor.to(self.device, non_blocking=True)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in torch's pinned memory."""
        return tensor.pin_memory() if _can_be_pinned(tensor) else tensor

    def event(self) -> _Event:
        """An event of the current stream's work so far."""
        return _Event(torch.cuda.current_stream(self.device), self._kept.events, self._here)

    def sync_current_stream(self, tensors: Sequence[torch.Tensor], event: DoneEvent | None) -> None:
        """Make the consumer's stream, which is its thread's current stream, wait for the tensors' event."""
        with self._here():
            _use(torch.cuda.current_stream(self.device), tensors, event)


class _KeptSource:
    """A device's streams and events, shared by all loaders of the process and never freed.

    torch's allocator keeps freed memory for the stream in which it was allocated, so the memory of a loader's last
    batches would be lost if each loader had streams of its own. They are not from torch's pool of 32 streams, which
    other code shares and may be capturing a graph in.
    """

    def __init__(self, device: torch.device, driver: Driver | None) -> None:
        self.copies = _new_stream(device, driver)
        self.computations = _new_stream(device, driver)
        self.events: deque[torch.cuda.Event] = deque()
        """Unused events. Destroying an event could invalidate a graph capture, so none is destroyed."""


@cache
def _kept(owner: int, index: int) -> _KeptSource:  # noqa: ARG001 - part of the cache key
    """The streams and events of the process `owner`. A forked child must not use its parent's."""
    return _KeptSource(torch.device("cuda", index), open_driver(index))


def _new_stream(device: torch.device, driver: Driver | None) -> torch.cuda.Stream:
    handle = None if driver is None else driver.new_stream()
    return torch.cuda.Stream(device) if handle is None else torch.cuda.ExternalStream(handle, device)


class _Event:
    """An event after all work that a stream has so far. Waiters sleep instead of spinning, and do not invalidate a
    graph that the consumer is capturing. The CUDA event is reused once this object is freed.
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
        # Runs in any thread, also inside the garbage collector: takes no lock and makes no device call.
        if hasattr(self, "_unused"):
            self._unused.append(self.raw)


def _use(stream: torch.cuda.Stream, tensors: Sequence[torch.Tensor], event: DoneEvent | None) -> None:
    """Make the stream wait for the event, and keep the tensors' memory until the stream's work with them is done."""
    if event is not None:
        stream.wait_event(event.raw)  # type: ignore[attr-defined]
    for tensor in tensors:
        # The memory belongs to another stream. Without this, torch's allocator would give a dropped batch's memory to
        # the next copy while kernels of this stream still read it.
        tensor.record_stream(stream)


def _can_be_pinned(tensor: torch.Tensor) -> bool:
    """Whether torch can pin the tensor with its strides, which needs elements that do not overlap."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return all(step or size < 2 for size, step in zip(tensor.shape, tensor.stride(), strict=True))

"""A fake libcuda that records its calls."""

from __future__ import annotations

import ctypes
from typing import Any

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
STREAM = "cuStreamCreate"
HOST_REGISTER_SUPPORTED = 99  # in cuda.h


class FakeLibrary:
    """Answers as CUDA's documentation says, with the error codes given to it (and with ``lockable=0`` as a device that
    can have no memory locked).

    Like the real library, it is given C types: a plain Python integer would be cut to 32 bits.
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

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, device: Any) -> int:  # noqa: N802
        assert attribute.value == HOST_REGISTER_SUPPORTED
        value._obj.value = self.codes.get("lockable", 1)
        return 0

    def cuStreamCreate(self, stream: Any, flags: Any) -> int:  # noqa: N802
        assert self.stack == [CONTEXT]
        code = self._call(STREAM, flags)
        if code == 0:
            stream._obj.value = 0x5000 + 16 * self.names.count(STREAM)
        return code

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

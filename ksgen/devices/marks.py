"""Places in a CUDA stream's work that other streams wait for: events, for both CUDA runtimes alike."""

import ctypes
import weakref
from contextlib import AbstractContextManager, suppress
from typing import Any

from ksgen.devices.base import Mark, Stream
from ksgen.devices.libcuda import beside_captures, call
from ksgen.errors import DeviceError

_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


class _Event:
    """Destroyed with its last reference."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        call("cuEventCreate", ctypes.byref(self.handle), _NO_TIMING)


class Marks:
    """A device of either runtime says how its context is entered, and tells what failed there, and in doing what."""

    name: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    def _inside(self, doing: str) -> AbstractContextManager[None]:
        raise NotImplementedError

    def mark(self, stream: Stream) -> Mark:
        with self._inside("marking a stream"):
            event = _Event()
            weakref.finalize(event, self._destroy, event.handle).atexit = False
            call("cuEventRecord", event.handle, _handle_of(stream))
        return event

    def is_reached(self, mark: Mark) -> bool:
        with self._inside("asking whether a mark is reached"), beside_captures():
            return call("cuEventQuery", mark.handle, accepted=(0, _NOT_READY)) == 0

    def finish(self, mark: Mark) -> None:
        with self._inside("waiting for a mark"), beside_captures():
            call("cuEventSynchronize", mark.handle)

    def wait(self, stream: Stream, mark: Mark) -> None:
        with self._inside("making a stream wait for a mark"):
            call("cuStreamWaitEvent", _handle_of(stream), mark.handle, 0)

    def _destroy(self, event: Any) -> None:
        with suppress(DeviceError), self._inside("releasing"), beside_captures():  # after a lost context nothing is left
            call("cuEventDestroy_v2", event)


def _handle_of(stream: Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(int(getattr(stream, "handle", stream) or 0))

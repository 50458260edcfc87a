"""Arrays on a CUDA device as other libraries show them: by CUDA's array interface, or DLPack.

Their memory is that of ksgen's devices.
"""

from operator import index
from typing import Any

import numpy as np

from ksgen.devices import Device
from ksgen.launch.dlpack import _capsule_pointer, _Unversioned

Array = np.ndarray[Any, Any]
_ON_CUDA = 2  # DLPack's number


class DeviceArray:
    """A copy of a host array, or unwritten memory if there is no content."""

    def __init__(self, device: Device, content: Array, *, is_written: bool = True) -> None:
        self.device, self.shape, self.dtype = device, content.shape, content.dtype
        self.memory = device.allocate(content.nbytes)
        if is_written:
            device.upload(self.memory, np.ascontiguousarray(content))
            device.synchronize()

    @property
    def pointer(self) -> int:
        return index(self.memory)

    def content(self, stream: Any = None) -> Array:
        """Return the content once the stream's work is done."""
        host = np.empty(self.shape, self.dtype)
        self.device.download(host, self.memory, stream)
        return host


class CudaArray(DeviceArray):
    """Like Numba's: `stream` is the one its owner works on."""

    stream: int | None = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        described = {"shape": self.shape, "typestr": self.dtype.str, "data": (self.pointer, False), "version": 3}
        return described | {"stream": self.stream}


class DlpackArray(DeviceArray):
    """Like JAX's. `asked` lists the streams that it was asked to be ready on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[int] = []

    def __dlpack__(self, stream: int) -> Any:
        """NumPy's capsule, of memory on the device."""
        self.asked.append(stream)
        capsule = np.empty(self.shape, self.dtype).__dlpack__()
        lent = _Unversioned.from_address(_capsule_pointer(capsule, b"dltensor")).tensor
        lent.data, lent.device_type, lent.device_index = self.pointer, _ON_CUDA, self.device.index
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _ON_CUDA, self.device.index

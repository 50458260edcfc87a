"""DLPack: read without a copy, told the stream, given back; and what is refused."""

import gc
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from ksgen.errors import LaunchError
from ksgen.launch.arrays import view
from ksgen.launch.memory import check_transposable

pytestmark = pytest.mark.usefixtures("forget_types")


class Shared:
    """Anything that speaks DLPack: lends NumPy's."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class SharedBeforeVersions(Shared):
    def __dlpack__(self, stream=None):
        return self.array.__dlpack__(stream=stream)


@pytest.mark.exhaustive
@pytest.mark.parametrize("producer", [Shared, SharedBeforeVersions])
def test_dlpack_is_read_without_a_copy_and_given_back(producer):
    x = np.zeros((3, 4))
    gone = weakref.ref(x)
    address, seen = x.ctypes.data, view(producer(x[1:]))
    assert (seen.kind, seen.pointer, seen.shape, seen.dtype) == ("dlpack", address + 32, (2, 4), "float64")
    assert (seen.device, seen.strides, seen.writeable) == ("host", None, True)
    del x
    gc.collect()
    assert gone() is not None
    del seen
    gc.collect()
    assert gone() is None


def test_dlpack_tells_gaps_and_read_only_memory():
    x = np.zeros((4, 4), np.float16)
    assert view(Shared(x.T)).strides == (2, 8)
    x.flags.writeable = False
    assert not view(Shared(x)).writeable
    with pytest.raises(LaunchError, match=r"x is .*SharedBeforeVersions that cannot be shared by DLPack: .*readonly"):
        view(SharedBeforeVersions(x), "x")


def test_arrays_of_jax_are_read_by_dlpack_and_read_only(monkeypatch):
    """JAX's other interface names no stream. Its arrays are immutable, but its capsules do not say so."""

    class OnAGpu(Shared):
        @property
        def __cuda_array_interface__(self):
            return {"shape": (2, 2), "typestr": "<f4", "data": (self.array.ctypes.data, False), "version": 2}

    given = [each(np.zeros((2, 2), np.float32)) for each in (Shared, OnAGpu)]
    assert [(view(x).kind, view(x).writeable) for x in given] == [("dlpack", True), ("cuda", True)]
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(Array=Shared))
    assert [(view(x).kind, view(x).writeable) for x in given] == [("dlpack", False)] * 2


def test_messages_name_the_type_of_the_array_and_not_of_its_capsule():
    on_a_gpu = view(Shared(np.zeros((2, 2), np.float32)))._replace(device=("cuda", 0))
    with pytest.raises(LaunchError, match="nothing transposes a Shared from one layout into the other"):
        check_transposable("ks", on_a_gpu)


def test_dlpack_of_integers_is_refused_and_given_back():
    x = np.zeros(3, np.int16)
    before = sys.getrefcount(x)
    with pytest.raises(LaunchError, match="x is of int16; give float32"):
        view(Shared(x), "x")
    gc.collect()
    assert sys.getrefcount(x) == before


def test_dlpack_on_other_hardware_is_refused():
    class OnMetal(Shared):
        def __dlpack_device__(self):
            return 8, 0

    with pytest.raises(LaunchError, match="x lies on DLPack device type 8; give one on a CUDA device or the host"):
        view(OnMetal(np.zeros(3)), "x")


@pytest.mark.parametrize(("given", "told"), [(None, 1), (0, 1), (77, 77)])
def test_a_cuda_producer_receives_the_stream_that_will_read(given, told):
    streams = []

    class OnCuda(Shared):
        def __dlpack__(self, stream, max_version):
            streams.append(stream)
            return self.array.__dlpack__(max_version=max_version)

        def __dlpack_device__(self):
            return 2, 1

    seen = view(OnCuda(np.zeros(3)), "x", given)
    assert (seen.device, streams) == (("cuda", 1), [told])


def test_a_capsule_of_something_else_is_refused():
    class Wrong(Shared):
        def __dlpack__(self, **options):
            capsule = self.array.__dlpack__()
            view(SimpleNamespaceWithDlpack(capsule))  # takes it
            return capsule

    class SimpleNamespaceWithDlpack:
        def __init__(self, capsule):
            self.capsule = capsule

        def __dlpack__(self, **options):
            return self.capsule

        def __dlpack_device__(self):
            return 1, 0

    with pytest.raises(LaunchError, match="x: its __dlpack__ returned a capsule called b'used_dltensor'"):
        view(Wrong(np.zeros(3)), "x")


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_are_identified_by_both_parts(dtype):
    seen = view(Shared(np.zeros((3, 4), dtype)), "x")
    assert (seen.dtype, seen.shape) == (dtype, (3, 4))

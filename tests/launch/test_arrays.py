"""Tests of `view`: what it reads from every kind of array, and what it refuses. Stand-ins replace missing libraries."""

import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from ksgen.errors import LaunchError
from ksgen.launch.arrays import common_device, stream_handle, view
from ksgen.quantized import quantize_inputs

pytestmark = pytest.mark.usefixtures("forget_types")


class CudaArray:
    """Anything that speaks CUDA's array interface, such as Numba's arrays."""

    def __init__(self, dtype=None, **described):
        self.__cuda_array_interface__ = {
            "shape": (2, 3),
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
        } | described
        if dtype is not None:
            self.dtype = dtype


class Tensor:
    """A PyTorch tensor, as much of it as is read."""

    shape, is_cuda, device = (4, 8), True, SimpleNamespace(type="cuda")

    def __init__(self, dtype="torch.bfloat16", **attributes):
        self.dtype = dtype
        self.__dict__.update(attributes)

    def get_device(self):
        return 1

    def data_ptr(self):
        return 8192

    def is_contiguous(self):
        return True

    def is_neg(self):
        return False

    def is_conj(self):
        return False

    def is_inference(self):
        return False

    def numel(self):
        return 32


@pytest.fixture
def torch(monkeypatch):
    stand_in = SimpleNamespace(Tensor=Tensor, _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: 70 + index))
    monkeypatch.setitem(sys.modules, "torch", stand_in)
    return stand_in


def test_numpy_arrays_are_read_without_a_copy():
    x = np.zeros((3, 4), np.float32)
    seen = view(x)
    assert seen.pointer == x.ctypes.data
    assert seen.owner is x
    assert (seen.kind, seen.shape, seen.dtype, seen.device) == ("numpy", (3, 4), "float32", "host")
    assert (seen.strides, seen.stream, seen.writeable) == (None, None, True)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ml_dtypes.bfloat16])
def test_every_precision_has_its_name(dtype):
    assert view(np.zeros(2, dtype)).dtype == np.dtype(dtype).name


def test_gaps_and_read_only_memory_are_reported():
    x = np.zeros((4, 4))
    assert view(x.T).strides == (8, 32)
    assert view(x[:, :2]).strides == (32, 8)
    x.flags.writeable = False
    assert not view(x).writeable


@pytest.mark.parametrize(
    ("array", "told"),
    [
        ([1.0, 2.0], "weights is a list; give np.asarray.*, or a NumPy array, a PyCUDA GPUArray"),
        (3.0, "weights is a float; give a NumPy array"),
        (None, "weights is None; give a NumPy array"),
        (np.float32(3), r"weights is a numpy\.float32; give a NumPy array"),
        (np.ma.zeros(3), r"weights is a numpy\.ma\.MaskedArray; give a NumPy array"),
        (
            np.zeros(3, np.clongdouble),
            "weights is of complex256; give float32, float64, float16, bfloat16, complex64, complex128",
        ),
        (np.zeros(3, int), "weights is of int64; give float32"),
        (np.zeros(3, ">f4"), "weights is of >f4; give float32"),
    ],
)
def test_what_is_no_array_of_reals_is_refused_by_name(array, told):
    with pytest.raises(LaunchError, match=told):
        view(array, "weights")


def test_x_in_eight_bits_says_where_its_values_are():
    with pytest.raises(LaunchError, match=r"^x is a ksgen.quantized.QuantizedInputs; give its values: x.values$"):
        view(quantize_inputs(np.ones((2, 3)), "int8"), "x")


def test_a_tensor_is_read_with_its_device_and_stream(torch):
    tensor = Tensor()
    assert view(tensor) == ("torch", 8192, (4, 8), "bfloat16", None, ("cuda", 1), 71, tensor, True)


def test_a_torch_without_the_raw_stream_is_asked_for_its_stream(torch):
    del torch._C._cuda_getCurrentRawStream
    torch.cuda = SimpleNamespace(current_stream=lambda index: SimpleNamespace(cuda_stream=80 + index))
    assert view(Tensor()).stream == 81


def test_a_tensor_on_the_cpu_lies_on_the_host(torch):
    seen = view(Tensor(is_cuda=False, device=SimpleNamespace(type="cpu")))
    assert (seen.device, seen.stream) == ("host", None)


def no_storage():
    raise RuntimeError("doesn't have storage")


@pytest.mark.parametrize(
    ("attributes", "told"),
    [
        (
            {"is_cuda": False, "device": SimpleNamespace(type="mps")},
            "x is a tensor on .*give one on a CUDA device or the CPU",
        ),
        ({"data_ptr": no_storage}, r"x is a tensor without plain memory \(doesn't have storage\); give a dense one"),
        ({"data_ptr": lambda: 0}, "x is a Tensor without memory, as tracing makes; give a real tensor"),
        ({"is_neg": lambda: True}, r"x is a lazily negated view; give x\.resolve_neg\(\)"),
        ({"is_conj": lambda: True}, r"x is a lazily conjugated view; give x\.resolve_conj\(\)"),
        ({"dtype": "torch.complex32"}, "x is of complex32; give float32"),
    ],
)
def test_tensors_that_are_not_plain_memory_are_refused(torch, attributes, told):
    with pytest.raises(LaunchError, match=told):
        view(Tensor(**attributes), "x")


def test_a_cupy_array_is_read_with_its_device_and_current_stream(monkeypatch):
    class ndarray:  # noqa: N801 (CuPy's own name)
        dtype, shape, strides = np.dtype("float16"), (5,), (4,)
        data, device = SimpleNamespace(ptr=512), SimpleNamespace(id=2)
        flags = SimpleNamespace(c_contiguous=False)

    current = SimpleNamespace(get_current_stream=lambda device: SimpleNamespace(ptr=31 + device))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=ndarray, cuda=current))
    assert view(ndarray())[:7] == ("cupy", 512, (5,), "float16", (4,), ("cuda", 2), 33)


def test_a_gpuarray_is_read_empty_or_not(monkeypatch):
    class GPUArray:
        dtype, shape, flags = np.dtype("float64"), (2, 2), SimpleNamespace(c_contiguous=True)

        def __init__(self, gpudata):
            self.gpudata = gpudata

    monkeypatch.setitem(sys.modules, "pycuda.gpuarray", SimpleNamespace(GPUArray=GPUArray))
    assert view(GPUArray(1024))[:7] == ("pycuda", 1024, (2, 2), "float64", None, ("cuda", None), None)
    assert view(GPUArray(None)).pointer == 0


def test_a_pyopencl_array_that_starts_inside_its_buffer_is_refused(monkeypatch):
    class Array:
        offset = 64

    monkeypatch.setitem(sys.modules, "pyopencl.array", SimpleNamespace(Array=Array))
    with pytest.raises(LaunchError, match=r"x starts 64 bytes into its buffer; give x\.copy\(\)"):
        view(Array(), "x")


def test_the_cuda_array_interface_is_read_with_its_stream():
    array = CudaArray(stream=2, data=(4096, True))
    assert view(array) == ("cuda", 4096, (2, 3), "float32", None, ("cuda", None), 2, array, False)
    assert view(CudaArray(version=2)).stream is None


@pytest.mark.parametrize(
    ("shape", "strides", "seen"),
    [
        ((2, 3), None, None),
        ((2, 3), (12, 4), None),
        ((2, 3), (4, 8), (4, 8)),
        ((2, 3), (16, 4), (16, 4)),
        ((1, 3), (999, 4), None),  # the only row there is can be any distance from the next one
        ((0, 3), (4, 4), None),
    ],
)
def test_strides_are_judged_by_the_memory_they_reach(shape, strides, seen):
    assert view(CudaArray(shape=shape, strides=strides)).strides == seen


def test_the_array_distinguishes_bfloat16_from_two_raw_bytes():
    assert view(CudaArray(typestr="<V2", dtype=np.dtype(ml_dtypes.bfloat16))).dtype == "bfloat16"
    with pytest.raises(LaunchError, match="x is of <V2; give float32"):
        view(CudaArray(typestr="<V2"), "x")


def test_masks_and_integers_are_refused():
    with pytest.raises(LaunchError, match="x is masked; give an array without a mask"):
        view(CudaArray(mask=CudaArray()), "x")
    with pytest.raises(LaunchError, match="x is of <i4; give float32"):
        view(CudaArray(typestr="<i4"), "x")


def test_arrays_must_lie_in_one_place():
    host, first, second = (view(np.zeros(3))._replace(device=place) for place in ("host", ("cuda", 0), ("cuda", 1)))
    untold = first._replace(device=("cuda", None))
    assert common_device({"x": host, "w": host}) == "host"
    assert common_device({"x": untold, "w": second}) == ("cuda", 1)
    assert common_device({"x": second, "w": untold}) == ("cuda", 1)
    with pytest.raises(LaunchError, match="x lies on the host and w on cuda:1; give both in one place"):
        common_device({"x": host, "w": second})
    with pytest.raises(LaunchError, match="x lies on cuda:0 and w on cuda:1"):
        common_device({"x": untold, "y": first, "w": second})


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (None, None),
        (0, 0),
        (140, 140),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 150)), 150),
        (SimpleNamespace(__cuda_stream__=(0, 151)), 151),
        (SimpleNamespace(cuda_stream=160), 160),
        (SimpleNamespace(ptr=170), 170),
        (SimpleNamespace(handle=180), 180),
    ],
)
def test_every_librarys_stream_has_a_handle(stream, handle):
    assert stream_handle(stream) == handle


def test_a_pyopencl_queue_passes_unchanged(monkeypatch):
    class CommandQueue:
        pass

    monkeypatch.setitem(sys.modules, "pyopencl", SimpleNamespace(CommandQueue=CommandQueue))
    queue = CommandQueue()
    assert stream_handle(queue) is queue


@pytest.mark.parametrize("stream", ["default", True, 1.0, SimpleNamespace(handle="x")])
def test_what_is_no_stream_is_refused(stream):
    with pytest.raises(
        LaunchError, match=r"stream is a .*; give a CUDA stream's handle, a PyTorch, CuPy or PyCUDA stream"
    ):
        stream_handle(stream)

"""Prepared calls on a GPU: PyTorch's tensors lie on a GPU here whose launches the emulator runs at once."""

import contextlib
import sys
import warnings
from dataclasses import replace
from operator import index
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ksgen  # noqa: E402
from ksgen import reference  # noqa: E402
from ksgen.devices.base import RefusedError  # noqa: E402
from ksgen.errors import KsgenError  # noqa: E402
from ksgen.launch import planner, streams  # noqa: E402
from ksgen.spec import Epilogue, KernelSpec  # noqa: E402
from ksgen.torch import KSLinear  # noqa: E402
from ksgen.torch.layer.group import KSLinears  # noqa: E402
from ksgen.torch.operators import choice, ops, prepared  # noqa: E402
from tests.emulator import TensorMap, is_installed  # noqa: E402
from tests.support.fake_gpu import FakeGpu  # noqa: E402
from tests.support.launching import plan_afresh  # noqa: E402
from tests.torch.layer import test_exchange as exchange  # noqa: E402

CHAIN = [(2, 8, 16, 2), (1, 24, 32, 1)]
MOST_FUNCTIONS = 60  # that a forward pass enters, without those of the device


class Memory(dict[int, Any]):
    """Arrays by their addresses. An address inside an array finds the rest of it, up to the launch's next address."""

    bounds: list[int]

    def get(self, pointer: int, default: Any = None) -> Any:
        for begin, array in reversed(self.items()):
            if begin <= pointer < begin + array.nbytes:
                end = min((each for each in self.bounds if each > pointer), default=begin + array.nbytes)
                return (
                    array if end - begin >= array.nbytes and pointer == begin else array[pointer - begin : end - begin]
                )
        return default


class EagerGpu(FakeGpu):
    """A GPU whose launches run at once, on tensors of the host."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = Memory()

    def launch(self, kernel: Any, grid: int, block: int, shared_bytes: int, args: Any, stream: Any) -> None:
        self._memory.bounds = [index(each) for each in args if each is not None and not isinstance(each, TensorMap)]
        given = [self._copied(each) if isinstance(each, TensorMap) else each for each in args]
        super().launch(kernel, grid, block, shared_bytes, tuple(given), stream)
        if self.graph is None:
            self.synchronize(stream)

    def _copied(self, described: TensorMap) -> TensorMap:
        """The map of the array that lies there now: each look at a tensor's address makes another one."""
        return replace(described, array=self._memory.get(described.array.ctypes.data))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> EagerGpu:
    if not is_installed("none"):
        pytest.skip("the emulator needs g++")
    found, address_of = EagerGpu(), torch.Tensor.data_ptr

    def data_ptr(tensor: Any) -> int:
        storage = tensor.untyped_storage()
        own = torch.empty(0, dtype=torch.uint8).set_(storage)
        found._memory.pop(begin := address_of(own), None)
        if begin:
            found._memory[begin] = own.detach().numpy()
        return int(address_of(tensor))

    for name, value in {
        "is_cuda": property(lambda _: True),
        "is_cpu": property(lambda _: False),
        "device": property(lambda _: torch.device("cuda:0")),
        "get_device": lambda _: 0,
        "data_ptr": data_ptr,
    }.items():
        monkeypatch.setattr(torch.Tensor, name, value)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: stream.cuda_stream, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.graph is not None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    for each in (streams, choice):
        monkeypatch.setattr(each, "device_for", lambda _: found)
    monkeypatch.setenv("KSGEN_COMPILE", "wait")
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    plan_afresh(monkeypatch)
    monkeypatch.setattr(prepared, "_calls", {})
    for each in (choice, prepared):
        monkeypatch.setattr(each, "PLANNER", planner.PLANNER)
    monkeypatch.setattr(choice, "choose", lambda *_: choice.BackendChoice("ksgen", "the test says so"))
    found.current = stream
    return found


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What prepared calls gave, None where the usual path was taken."""
    given: list[Any] = []
    multiply = prepared.multiply
    monkeypatch.setattr(prepared, "multiply", lambda *args: given.append(multiply(*args)) or given[-1])
    return given


def layer_of(**options: Any) -> KSLinear:
    torch.manual_seed(0)
    return KSLinear(CHAIN, **{"activation": "relu", "fuse": "no"} | options).eval()


def wanted(layer: KSLinear, x: Any, residual: Any = None) -> Any:
    """The layer's output in float64, without its kernels."""
    y = x.double().numpy()
    for weights in layer.weights:
        pattern = ksgen.Pattern(*weights.shape)
        y = reference.multiply(pattern, y, weights.detach().double().numpy(), layer.layout)
    y = torch.from_numpy(y) + layer.bias.detach().double()
    return (y if layer.activation == "none" else y.relu()) + (0 if residual is None else residual.double())


def check(layer: KSLinear, x: Any, *more: Any) -> None:
    with torch.no_grad():
        assert torch.allclose(layer(x, *more).double(), wanted(layer, x, *more), atol=1e-4)


def warmed(layer: KSLinear, batch: int = 3) -> Any:
    """x of a shape that the layer has prepared a call for."""
    x = torch.randn(batch, layer.in_features)
    for _ in range(2):
        check(layer, x)
    return x


def launched(gpu: EagerGpu, call: Any) -> list[str]:
    gpu.launches.clear()
    call()
    return [entry for entry, _ in gpu.launches]


def packs(entries: list[str]) -> int:
    return sum(each.endswith("_pack") for each in entries)


def functions_of(call: Any) -> int:
    """Python functions that a call enters, without those of the device that stands in."""
    entered: list[str] = []

    def enter(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_filename)

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sum("/tests/" not in each and ("/ksgen/" in each or "/torch/" in each) for each in entered)


@pytest.mark.parametrize("fuse", ["no", "yes"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_layer_takes_one_short_call(gpu: EagerGpu, served: list[Any], is_frozen: bool, fuse: str) -> None:
    """One launch per factor or one for all, and another to pack each weight that is not frozen."""
    layer = layer_of(fuse=fuse)
    if is_frozen:
        layer.freeze()
    x = warmed(layer)
    entries = launched(gpu, lambda: check(layer, torch.randn(3, layer.in_features)))
    assert [each is None for each in served] == [True, False, False]
    assert packs(entries) == (0 if is_frozen else 2)
    assert len(entries) - packs(entries) == (1 if fuse == "yes" else 2)
    gpu.launch = lambda *_: None
    with torch.no_grad():
        assert functions_of(lambda: layer(x)) <= MOST_FUNCTIONS


def test_a_residual_and_other_shapes(gpu: EagerGpu, served: list[Any]) -> None:
    layer = layer_of().freeze()
    for shape in ((1,), (2, 3)):
        x, residual = torch.randn(*shape, layer.in_features), torch.randn(*shape, layer.out_features)
        for _ in range(2):
            with torch.no_grad():
                y = layer(x, residual)
            flat = wanted(layer, x.view(-1, layer.in_features), residual.view(-1, layer.out_features))
            assert y.shape == residual.shape
            assert torch.allclose(y.double().view(flat.shape), flat, atol=1e-4)
        assert served[-1] is y


WRITES = {
    "in place": lambda layer: layer.weights[0].mul_(2),
    "other memory": lambda layer: setattr(layer.weights[0], "data", layer.weights[0].data * 2),
    "another tensor": lambda layer: layer.weights.__setitem__(0, torch.nn.Parameter(layer.weights[0] * 2)),
    "a load": lambda layer: layer.load_state_dict({name: each * 2 for name, each in layer.state_dict().items()}),
    "an optimizer": lambda layer: _stepped(layer),
}


def _stepped(layer: KSLinear) -> None:
    for each in layer.parameters():
        each.grad = torch.ones_like(each)
    torch.optim.SGD(layer.parameters(), lr=0.5).step()


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_frozen_weights_is_seen(gpu: EagerGpu, write: str) -> None:
    layer = layer_of().freeze()
    x = warmed(layer)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WRITES[write](layer)
        layer(x)
    assert any("frozen no more" in str(each.message) for each in caught)
    check(layer, x)


@pytest.mark.parametrize("write", [*WRITES, "unseen"])
def test_weights_that_are_not_frozen_are_read_at_each_call(gpu: EagerGpu, served: list[Any], write: str) -> None:
    layer = layer_of()
    x = warmed(layer)
    with torch.no_grad():
        if write == "unseen":
            layer.weights[0].data.numpy()[...] *= 2
        else:
            WRITES[write](layer)
    check(layer, x)
    assert served[-1] is not None


def test_equal_layers_share_a_call_and_no_weights(gpu: EagerGpu, served: list[Any]) -> None:
    layer = layer_of()
    x, other = warmed(layer), KSLinear(CHAIN, activation="relu", fuse="no").eval()
    check(other, x)
    assert served[-1] is not None
    assert not torch.equal(layer.weights[0], other.weights[0])


def test_each_stream_has_its_own_call(gpu: EagerGpu, served: list[Any]) -> None:
    layer = layer_of().freeze()
    x = warmed(layer)
    gpu.current.cuda_stream = 7
    for is_usual in (True, False):
        gpu.launches.clear()
        check(layer, x)
        assert (served[-1] is None) == is_usual
        assert {stream for _, stream in gpu.launches} == {7}


def test_a_capture_takes_the_usual_path(gpu: EagerGpu, served: list[Any]) -> None:
    """It notes that a graph reads the packed weights, which then outlive a thaw."""
    layer = layer_of().freeze()
    x = warmed(layer)
    gpu.begin_capture()
    with torch.no_grad():
        layer(x)
    assert served[-1] is None
    gpu.end_capture()


def test_what_a_gpu_reads_otherwise_takes_the_usual_path(gpu: EagerGpu, served: list[Any]) -> None:
    """Slices are read in place, and misaligned arrays by kernels of their own."""
    layer = layer_of().freeze()
    x = warmed(layer)
    wide = torch.randn(3, 2 * layer.in_features)
    apart = torch.randn(3 * layer.in_features + 1)[1:].view(3, -1)
    for given in (wide[:, : layer.in_features], apart):
        for _ in range(2):
            check(layer, given)
            assert served[-1] is None
    check(layer, x)
    assert served[-1] is not None


def test_a_context_that_is_gone_takes_the_usual_path(gpu: EagerGpu, served: list[Any]) -> None:
    layer = layer_of()
    x = warmed(layer)
    gpu.is_open = False
    with torch.no_grad(), contextlib.suppress(KsgenError):
        layer(x)
    assert served[-1] is None
    gpu.is_open = True
    check(layer, x)
    assert served[-1] is not None


def test_products_of_pytorch_take_the_usual_path(
    gpu: EagerGpu, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "choose", lambda *_: choice.BackendChoice("strided", "the test says so"))
    layer = layer_of()
    x = warmed(layer)
    check(layer, x)
    assert served == [None] * 3


def test_a_group_of_frozen_layers_takes_prepared_calls(gpu: EagerGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [layer_of(), KSLinear(CHAIN, activation="relu", fuse="no").eval()]
    group, served = KSLinear.group(layers).freeze(), list[Any]()
    own = prepared.of_group
    monkeypatch.setattr(prepared, "of_group", lambda *given: served.append(own(*given)) or served[-1])
    for _ in range(3):
        x = torch.randn(3, layers[0].in_features)
        expected = torch.cat([wanted(each, x) for each in layers], -1)
        with torch.no_grad():
            assert torch.allclose(group(x).double(), expected, atol=1e-4)
            assert torch.allclose(torch.cat(list(group.parts(x)), -1).double(), expected, atol=1e-4)
    assert served[0] is None
    assert None not in served[1:]


def refused_once(gpu: EagerGpu, call: Any) -> Any:
    """The result of a call whose first launch the GPU refuses."""
    launch, launches = gpu.launch, list[int]()

    def refuse_one(*given: Any) -> None:
        launches.append(0)
        if len(launches) == 1:
            raise RefusedError("CUDA, launching: no room for its clusters")
        launch(*given)

    gpu.launch = refuse_one
    try:
        return call()
    finally:
        del gpu.launch
        assert len(launches) > 1


def test_a_refused_launch_is_left_to_the_usual_path(gpu: EagerGpu, served: list[Any]) -> None:
    """The usual path launches again, and reports what it cannot launch either."""
    layer = layer_of().freeze()
    x = warmed(layer)
    refused_once(gpu, lambda: check(layer, x))
    assert [each is None for each in served] == [True, False, True]
    group = KSLinears([layer_of(), layer_of()]).freeze()
    with torch.no_grad():
        first, second = group(x), group(x)
        for call in (group, lambda x: torch.cat(list(group.parts(x)), -1)):
            assert torch.equal(refused_once(gpu, lambda call=call: call(x)), second)
    assert torch.equal(first, second)


def test_a_kernel_with_tensor_maps_that_is_refused_falls_back_to_another(
    gpu: EagerGpu, served: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Each launch in clusters is refused: the usual path takes another kernel, and later calls are prepared with it."""
    shape, batch = (3, 136, 200, 1), 300
    layer = KSLinear([shape], precision="tf32x3").eval().freeze()
    kernel = KernelSpec(ksgen.Pattern(*shape), "tf32x3", "bsf", Epilogue(True))
    x, before = warmed(layer, batch), planner.PLANNER.choice(gpu, kernel, batch)
    assert (before.family, before.constants.cluster_batch) == ("wgmma", 2)
    assert gpu.encoded
    launch, refused = gpu.launch, list[str]()

    def refuse(loaded: Any, *given: Any) -> None:
        if "__cluster_dims__" in loaded[0] and not loaded[1].endswith("_pack"):
            refused.append(loaded[1])
            raise RefusedError("CUDA, launching: no room for its clusters")
        launch(loaded, *given)

    gpu.launch = refuse
    for _ in range(3):
        check(layer, x)
    assert [each is None for each in served] == [True, False, True, True, False]
    assert len(refused) == 2  # by the prepared call and by the usual path
    after = planner.PLANNER.choice(gpu, kernel, batch)
    assert (after.family, after.constants.cluster_batch) == ("wgmma", 1)
    assert [each.getMessage().partition("; ")[2] for each in caplog.records] == [
        "launchers take wgmma without clusters"
    ]


@pytest.mark.parametrize(("chain", "layout"), [(exchange.CHAINS[4], "bsf"), (exchange.CHAINS[1], "bsl")])
def test_kernels_exchange_features_in_training(
    gpu: EagerGpu, chain: Any, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product forward and two backward per factor: PyTorch copies no exchanged features."""
    for copy in ("natural", "exchanged"):
        monkeypatch.setattr(ops, copy, lambda *_: pytest.fail("copied"))
    torch.manual_seed(0)
    layer = KSLinear(list(chain), layout=layout, between="relu" if len(chain) > 1 else "none")
    x = torch.randn(7, layer.in_features)
    x = (x if layout == "bsf" else x.t().contiguous()).requires_grad_()
    learned = [x, *layer.weights, layer.bias]
    y = exchange.truth(layer, x)
    wanted = [y, *torch.autograd.grad(y.square().sum(), learned)]

    def step() -> list[Any]:
        y = layer(x)
        return [y, *torch.autograd.grad(y.square().sum(), learned)]

    for each, true in zip(step(), wanted, strict=True):
        assert torch.allclose(each, true, rtol=1e-3, atol=1e-3)
    entries = [each for each in launched(gpu, step) if not each.endswith(("_pack", "_sum"))]
    assert len(entries) == 3 * len(chain)

"""Replays of prepared calls without Python code, by an extension of PyTorch that is compiled on this machine.

A layer's replay has an entry per prepared call. An entry lists what the call depends on, and `replay.cpp` checks it
before each launch. Calls that no entry matches run in Python. The background compiles the extension after prepared
calls have been repeated often (`OFTEN`). Without a compiler, all calls run in Python.
"""

import ctypes
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ksgen.build.background import PendingError, deferred, outcome
from ksgen.build.build import build, default_caches
from ksgen.build.host import HostCompiler, host_target
from ksgen.build.request import Binary, Request
from ksgen.devices.native import load_library, working_compiler
from ksgen.errors import KsgenError, ToolchainError
from ksgen.launch.planner import PLANNER
from ksgen.launch.weights import Seen
from ksgen.torch.operators import frozen, ops
from ksgen.torch.operators.factors import steps_of, tie_of
from ksgen.torch.operators.meanwhile import building, may_change

SOURCE = Path(__file__).with_name("replay.cpp")
ENTRY = "PyInit_ksgen_replay"
OFTEN = 500  # repeated calls of a process after which the extension is compiled; a cached one is loaded at once
APART = 32  # calls in Python between two attempts to add an entry, which takes as long as some calls
LAST = 3 * APART  # calls in Python after which no replay may replace another method
TURNS = 9  # calls of a replay, and as many in Python, to compare their times
LONG_NS = 10**6  # nanoseconds of a call whose times are not compared, since the turns would take too long
ABSENT = ...  # in place of the value of a dictionary without the key
# a layer's attributes that determine a prepared call; its class has those that it lacks
ATTRIBUTES = (
    "chain", "layout", "out_layout", "precision", "backend", "activation", "between", "fuse", "intermediates",
    "_exchanges", "_parallel", "_parameters", "_modules",
)  # fmt: skip
Fact = tuple[dict[Any, Any] | None, Any, Any]  # a dictionary (None: the layer's own), a key and its value

_loaded: list[Any] = []  # the extension
_is_early = False  # whether the extension was there from the first calls on
_refused: list[str] = []  # why there is none; never retried
_attempts, _sums = 0, 0  # attempts to add an entry, and calls of sums, while there is no extension


class Stored(NamedTuple):
    """A parameter that each call reads from a dictionary."""

    dict: dict[Any, Any]
    key: Any
    tensor: Any
    whole: Sequence[int] = ()  # shape to which calls repeat tied weights


class Snapshot(NamedTuple):
    """What a layer's calls depend on, apart from x, the residual and the state of PyTorch's modes."""

    facts: Sequence[Fact]
    parameters: Sequence[Stored]  # the bias, and weights that each call reads
    pinned: Sequence[tuple[Tensor, int, int]]  # weights that are packed once, as `Seen.pinned` describes them

    @property
    def has_bias(self) -> bool:
        return bool(self.parameters) and self.parameters[0].key == "bias"

    def repeating(self, wholes: Sequence[Sequence[int]]) -> "Snapshot":
        """The same snapshot, for calls that repeat the weights to these shapes, one per factor."""
        count = len(self.parameters) - len(wholes)
        pairs = zip(self.parameters[count:], wholes, strict=True)
        return self._replace(parameters=[*self.parameters[:count], *[each._replace(whole=to) for each, to in pairs]])


def snapshot(layer: Any) -> Snapshot | None:
    """Count a prepared call in Python, and describe the layer before the call if an entry is to be added after it.

    If another thread changes the layer during the call, the entry matches no call.
    """
    calls = layer.__dict__["_python_calls"] = layer._python_calls + 1
    if not (is_due(calls) or building.get()) or not may_repeat(layer) or _extension(is_new=calls < APART) is None:
        return None
    facts: list[Fact] = [(None, name, layer.__dict__.get(name, ABSENT)) for name in ATTRIBUTES]
    facts += [
        (vars(PLANNER), "generation", PLANNER.generation),
        (vars(forward_ad), "_current_level", forward_ad._current_level),
    ]
    own = _stored_of(layer) if layer.has_stored_type else _weights_of(layer)
    bias = Stored(layer._parameters, "bias", layer._parameters.get("bias"))
    if bias.tensor is None:
        return Snapshot([*facts, *own.facts, bias[:3]], own.parameters, own.pinned)
    return Snapshot([*facts, *own.facts], [bias, *own.parameters], own.pinned)


def is_due(calls: int) -> bool:
    """Whether to attempt to add an entry after that many calls in Python."""
    return calls % APART == 2


def may_repeat(layer: Any) -> bool:
    """Whether a replay can repeat calls of a layer.

    It can if no parametrization other than ties computes the weights, and if writes to stored weights are counted.
    Writes to tensors made in inference mode are not.
    """
    if layer.has_stored_type:
        return not any(each is not None and each.is_inference() for each in layer._buffers.values())
    return "weights" in layer._modules and all(map(tie_of, (steps_of(layer) or {}).values()))


def _weights_of(layer: Any) -> Snapshot:
    """Describe trainable weights."""
    weights = layer._modules["weights"]
    record, seen = frozen.record_of(layer)
    stored, steps, shapes = weights._parameters, steps_of(layer) or {}, layer.chain.shapes
    facts: list[Fact] = [
        (layer._modules, "weights", weights),
        (vars(weights), "_parameters", stored),
        (stored, str(len(shapes)), ABSENT),
        record,
    ]
    if steps:
        computed = weights._modules["parametrizations"]
        facts += [*_modules_of(weights, "parametrizations"), (vars(computed), "_modules", steps)]
    each = list[Stored]()
    for name, whole in zip(map(str, range(len(shapes))), shapes, strict=True):
        if name not in steps:
            each.append(Stored(stored, name, stored.get(name)))
            continue
        tie, slices = tie_of(steps[name]), steps[name]._parameters
        facts += [(steps, name, steps[name]), *_modules_of(steps[name], "0"), (steps[name]._modules, "1", ABSENT)]
        facts += [(vars(steps[name]), "_parameters", slices)]
        facts += [(vars(tie), option, vars(tie).get(option, ABSENT)) for option in ("axis", "count")]
        each.append(Stored(slices, "original", slices.get("original"), whole))
    if seen:
        return Snapshot([*facts, *[one[:3] for one in each]], [], [one.pinned for one in seen])
    return Snapshot(facts, each, [])


def _modules_of(module: Any, name: str) -> list[Fact]:
    """Facts that say which submodule a module has under a name."""
    return [(vars(module), "_modules", module._modules), (module._modules, name, module._modules[name])]


def _stored_of(layer: Any) -> Snapshot:
    """Describe stored weights."""
    buffers = {name: each for name, each in layer._buffers.items() if each is not None}
    facts: list[Fact] = [(None, name, layer.__dict__.get(name, ABSENT)) for name in ("_buffers", "_ready")]
    facts += [(layer._buffers, name, each) for name, each in buffers.items()]
    return Snapshot(facts, [], [Seen(each).pinned for each in buffers.values()])


class Replaceable:
    """A call from Python, which launches that a replay repeats may replace."""

    def __init__(self, methods: Sequence[Any], kind: type) -> None:
        """Run the first of the methods. The first of this kind are the launches."""
        self.step: Any = methods[0] if methods else None
        self.kernels: Any = next((each for each in methods if isinstance(each, kind)), None)

    @property
    def is_by_kernels(self) -> bool:
        """Whether calls from Python run the launches that a replay may repeat."""
        return self.kernels is self.step

    def settle(self, kernels: Any) -> None:
        """Run these launches in all later calls; None: keep the method, which no replay replaces.

        Launches that another thread has settled stay.
        """
        if not self.is_by_kernels:
            self.step, self.kernels = kernels or self.step, kernels


def add(
    layer: Any, seen: Snapshot, x: Tensor, residual: Tensor | None, call: Replaceable, kernels: Any,
    y_shape: Sequence[int], usual: Callable[..., Tensor] | None, second: Callable[..., Any] | None = None,
) -> None:  # fmt: skip
    """Add an entry for a call of a layer, if the numbers of threads of its launches, `kernels`, are settled.

    `usual` is the call in Python, if it does not use these launches. It takes x, the bias or None, and the weights that
    each call reads. An entry is then added only if it is faster. Then all calls use these launches, because an entry
    may expire. For training steps, `second` maps (gradient of y, x, weights) to the gradients of x and weights. It must
    not refer to the layer.
    """
    extension, is_faster = _extension(), None
    entry: Any = extension and _entry(layer, seen, x, residual, kernels, y_shape, second)
    if usual is not None and not may_decide():
        is_faster = False
    elif entry is not None:
        is_faster = usual is None or _is_replay_faster(extension.Replay(), seen, x, residual, entry, usual)
    if is_faster:
        for each in kernels.launches:
            each.launch.time_again()
        facts, parameters, pinned = map(tuple, seen)
        layer.__dict__.setdefault("_replay", extension.Replay()).add(facts, parameters, pinned, *entry)
        call.settle(kernels)
    elif is_faster is False or building.get() or layer._python_calls > LAST:
        call.settle(None)


def _entry(
    layer: Any, seen: Snapshot, x: Tensor, residual: Tensor | None, kernels: Any, y_shape: Sequence[int], second: Any
) -> tuple[Any, ...] | None:
    """Entry as `replay.cpp` reads it, without what it depends on; None while its launches are not settled."""
    given = (x, residual, *[each.tensor for each in seen.parameters])
    settled: list[Any] = [each.settled() for each in kernels.launches]
    if None in settled or not all(each is None or each.is_contiguous() for each in given):
        return None
    launches, calls = zip(*settled, strict=True)
    digits, axes = map(tuple, kernels.order)
    outputs = tuple(tuple(map(int, each)) for each in (*kernels.shapes[:-1], y_shape))
    return (
        x, residual, len(launches) > 1, seen.has_bias, kernels.sums_bias, layer.layout == "bsf",
        torch.get_num_threads(), min(calls), outputs, launches, digits, axes, second, kernels,
    )  # fmt: skip


def _is_replay_faster(
    alone: Any, seen: Snapshot, x: Tensor, residual: Tensor | None, entry: tuple[Any, ...], usual: Callable[..., Tensor]
) -> bool | None:
    """Whether a replay with only this entry is faster than the usual call; None if that cannot be decided now."""
    own, is_training = dict[Any, Any](bias=None), entry[2]
    numbered = enumerate(seen.parameters, 0 if seen.has_bias else 1)
    read = [each._replace(dict=own, key=number or "bias") for number, each in numbered]
    own |= {each.key: each.tensor for each in read}
    alone.add((), tuple(read), (), *entry)

    def replayed(x: Tensor, *parameters: Tensor | None) -> Tensor:
        own.update(zip(own, parameters, strict=True))
        return alone.run({}, x, residual)

    with torch.enable_grad() if is_training else torch.no_grad():
        begin = perf_counter_ns()
        # None: such as for a weight that repeats a slice by strides of zero
        if replayed(x, *own.values()) is None or perf_counter_ns() - begin > LONG_NS:
            return None
    once = ops._step if is_training else lambda method, given: method(*given)
    return _is_faster(*(partial(once, each, (x, *own.values())) for each in (replayed, usual)))


def _is_faster(first: Callable[[], object], second: Callable[[], object]) -> bool:
    """Whether the first function has the lower median time. Of two calls in a row, the second one counts."""
    times: tuple[list[int], list[int]] = [], []
    for turn in range(2 * TURNS):
        method = second if turn % 2 else first
        method()
        begin = perf_counter_ns()
        method()
        times[turn % 2].append(perf_counter_ns() - begin)
    return median(times[0]) < median(times[1])


def load_now() -> bool:
    """Compile the extension now unless it is cached, and load it. Returns whether it is there."""
    return _extension(at_once=True) is not None


def note() -> None:
    """Count a call of a sum, whose layers may be repeated once the extension is compiled."""
    global _sums
    _sums += 1
    if is_due(_sums):
        _extension(is_new=_sums < APART)


def may_decide() -> bool:
    """Whether a method may be chosen because its replay is faster.

    It may only if the extension was there from the first calls on. Otherwise the last bits of results would change
    after the first calls.
    """
    return _is_early and bool(_loaded) and may_change()


def _extension(at_once: bool = False, is_new: bool = False) -> Any:
    """The extension; None while it is not compiled, or if it cannot be.

    `at_once` waits for the compiler. `is_new` says that the caller has had too few calls to count as an attempt.
    """
    global _attempts, _is_early
    if _loaded or _refused:
        return _loaded[0] if _loaded else None
    if _attempts and (is_new or building.get()):  # `build` does not wait for this compiler
        return None
    _attempts += 1
    try:
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise ToolchainError("replays have no locks, and this Python has no global interpreter lock")
        compiler = _compiler()
        binary = default_caches().get(_request(), compiler) if _attempts == 1 else None
        if binary is None and (at_once or _attempts * APART >= OFTEN):
            with deferred(lambda: not at_once):
                # continuous calls suspend this compiler nearly always
                binary = outcome(_request(), "the extension that repeats calls of layers", _build, is_needed=False)
        if binary is not None:
            _is_early = _attempts == 1 or at_once
            _loaded.append(_load(binary))
            return _loaded[0]
    except PendingError:
        pass
    except (KsgenError, OSError, ImportError, AttributeError, RuntimeError, SystemError) as error:
        _refused.append(str(error))
    return None


@cache
def _request() -> Request:
    return Request(SOURCE.read_text(encoding="utf-8"), ENTRY, host_target())


@cache
def _compiler() -> "ExtensionCompiler":
    return ExtensionCompiler(working_compiler())


def _build() -> Binary:
    request = _request()
    return build(request.text, request.entry, request.target, _compiler())


def _load(binary: Binary) -> Any:
    library = load_library(binary.data, ENTRY)
    begin = ctypes.PyDLL(ENTRY, handle=library._handle).PyInit_ksgen_replay
    begin.restype = ctypes.py_object
    extension = begin()
    extension.library = library  # it is unloaded if nothing refers to it
    return extension


class ExtensionCompiler:
    """The host's compiler with PyTorch's headers and libraries."""

    name = "c++ torch"

    def __init__(self, compiler: HostCompiler) -> None:
        self._compiler = compiler
        self._own = "-O1", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        library = f"PyTorch {torch.__version__} {torch.version.git_version}"
        self.version = f"{compiler.version}, {library}, Python {sysconfig.get_config_var('SOABI')}"

    def options(self, target: str) -> tuple[str, ...]:
        return *self._compiler.options(target), *self._own

    def compile(self, text: str, entry: str, target: str) -> Binary:
        root = Path(torch.__file__).parent
        includes = root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]
        libraries = f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"
        more = *self._own, *(f"-isystem{each}" for each in includes), *libraries
        return Binary(self._compiler.compile_whole(text, entry, target, more), entry, target)

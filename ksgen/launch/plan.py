"""Plan of a loaded kernel: grid, block, shared memory, tensor maps, workspace and packing; and calls bound to operands.

Knows device buffers and the order of a kernel's arguments, but neither users' arrays nor how constants were chosen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import index, itemgetter
from typing import Any, NamedTuple, NewType, NoReturn

from ksgen.build.request import Binary
from ksgen.devices.base import (
    CONTEXT_LOST,
    MAP_BYTES,
    Buffer,
    Device,
    KernelHandle,
    Launch,
    Recording,
    RefusedError,
    Settled,
    Stream,
    recorder,
)
from ksgen.devices.threads import groups_for, wanted_threads
from ksgen.emit.render import Source
from ksgen.errors import DeviceError, LaunchError
from ksgen.families import Geometry, Pass, TensorMap, family_named
from ksgen.families.signature import each_chains, pitches_of, result_of, weights_of
from ksgen.launch.choice import Choice
from ksgen.spec import KernelSpec

MOST_BLOCKS = 2**31 - 1  # limit of a grid's first dimension
TRIED_BATCH = 128  # batch size of trial tensor maps: whole 16-byte chunks in every precision
MOST_ENCODED = 1024  # sets of addresses per plan whose encoded maps are cached
# outputs of at most this size stay in a processor's caches until the next launch (measured on one with 32 MB of cache)
CACHED_BYTES = 2**23
STREAMING = "streaming"  # name of a launch's constant: 1 if its outputs bypass the caches, else 0

Arguments = NewType("Arguments", tuple[Any, ...])
"""Arguments of a launch in order: `Plan.operands`, `Plan.at_launch`, the batch size.

They do not include tensor maps, which precede them in the kernel's signature.
"""


class Step(NamedTuple):
    """One of several launches with the same operands; only the multiplying launch also takes tensor maps."""

    kernel: KernelHandle
    grid: int
    block: int
    shared_bytes: int


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that a launch needs except the arrays."""

    device: Device
    kernel: KernelSpec
    batch: int
    choice: Choice
    loaded: "Loaded"
    multiply: KernelHandle
    grid: int
    block: int
    shared_bytes: int
    # second entry: packs the weights of one factor, or adds the parts of a gradient; None for a chain
    pack_handle: KernelHandle
    pack_grid: int
    pack_block: int
    adjoint_handle: KernelHandle  # packs the weights from those of the adjoint factor, on the same grid; or None
    packed_bytes: int
    packing: str  # key of the packed weights: plans with equal keys pack the same weights into the same bytes
    operands: tuple[str, ...]  # operands of a launch in order, without tensor maps and the numbers that follow
    at_launch: tuple[int, ...] = ()  # constants that the launch passes after its operands
    maps: tuple[TensorMap, ...] = ()
    workspace_bytes: int = 0  # for partial results that several launches exchange, and memory per launched block
    steps: tuple[Step, ...] = ()  # the launches in order, if there are several
    is_persistent: bool = False  # whether blocks are persistent: any number of them loop over the tiles
    packers: tuple["Plan", ...] = ()  # plans that pack each factor's weights, if this one does not
    result: str = field(init=False)  # the operand that a launch writes for its caller
    weights: tuple[str, ...] = field(init=False)  # operands that hold packed weights
    outs: tuple[str, ...] = field(init=False)  # names of a call's outputs: "out", or the operands of a group's chains
    # operands that are a call's arrays, each with the array's name
    arrays: tuple[tuple[str, str], ...] = field(init=False)
    # operands that are row pitches of a call's arrays, each with the array's name
    pitches: tuple[tuple[str, str], ...] = field(init=False)
    out_shape: tuple[int, ...] = field(init=False)  # shape of one array that holds all outputs
    out_dtype: str | None = field(init=False)  # None if it is that of x
    _ordered: Callable[[Mapping[str, Any]], tuple[Any, ...]] = field(init=False)  # the operands in order
    _described: tuple[int, ...] = field(init=False)  # indices of the operands that the maps describe
    # encoded maps, by the addresses of these operands
    _encoded: dict[tuple[int, ...], tuple[bytes, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kernel = self.kernel
        result, weights, pitches = result_of(kernel), weights_of(kernel), pitches_of(kernel)
        others = {*weights, *pitches.values(), "workspace"}
        arrays = {each: "out" if each == result else each for each in self.operands if each not in others}
        features = kernel.out_features
        derived = {
            "result": result,
            "weights": weights,
            "outs": each_chains(kernel, "y") if kernel.is_group else ("out",),
            "arrays": tuple(arrays.items()),
            "pitches": tuple((pitch, arrays[array]) for array, pitch in pitches.items()),
            "out_shape": (self.batch, features) if kernel.y_layout == "bsf" else (features, self.batch),
            "out_dtype": kernel.dtype if kernel.has_bytes_in else None,
            "_ordered": itemgetter(*self.operands),
            "_described": tuple(self.operands.index(each.operand) for each in self.maps),
        }
        if kernel.job == "gradient":
            derived["out_shape"] = kernel.pattern.shape
        # plain attributes: a cached property reads the instance's __dict__, which slows all later attribute look-ups
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"Plan({self})"

    def __str__(self) -> str:
        return f"{self.kernel.name} at batch {self.batch} by {self.choice.family} on {self.device.name}"

    def __reduce__(self) -> NoReturn:
        raise LaunchError(f"{self!r} belongs to this process, where its kernel is loaded: copy or send the launcher")

    @property
    def source(self) -> Source:
        return self.loaded.source

    @property
    def binary(self) -> Binary:
        return self.loaded.binary

    def pack(self, weights: Buffer, stream: Stream, into: Buffer = None, is_adjoint: bool = False) -> Buffer:
        """Enqueue the packing of weights (a, b, c, d); the packed weights are complete in stream order.

        `is_adjoint`: the weights are those of the adjoint factor.
        """
        packed = self.device.allocate(self.packed_bytes) if into is None else into
        handle = self.adjoint_handle if is_adjoint else self.pack_handle
        self.device.launch(handle, self.pack_grid, self.pack_block, 0, (weights, packed), stream)
        return packed

    def arguments(self, operands: Mapping[str, Any]) -> Arguments:
        """Arguments in order: the operands, constants of the launch, and the batch size.

        `operands` may hold more than the kernel takes. A workspace that the plan does not need is None.
        """
        ordered: Any = (*self._ordered(operands), *self.at_launch, self.batch)
        arguments: Arguments = ordered  # a plain assignment, because NewType costs a call
        return arguments

    def without_streaming(self, arguments: Arguments) -> Arguments:
        """Arguments whose launch stores its outputs into the caches, if a cache can hold them."""
        names = self.choice.constants.at_launch
        if STREAMING not in names or prod(self.out_shape) * self.kernel.item_bytes > CACHED_BYTES:
            return arguments
        changed: Any = list(arguments)
        changed[len(self.operands) + names.index(STREAMING)] = 0
        return Arguments(tuple(changed))

    def launch(self, arguments: Arguments, stream: Stream) -> None:
        """Enqueue all launches of the plan with these arguments."""
        if self.steps:
            for each in self.launches(arguments):
                self.device.launch(*each, stream)
            return
        with_maps = (*self._encode(arguments), *arguments) if self.maps else arguments
        self.device.launch(self.multiply, self._blocks(), self.block, self.shared_bytes, with_maps, stream)

    def launches(self, arguments: Arguments) -> list[Launch]:
        """Launches that `launch` enqueues."""
        multiply = Launch(
            self.multiply, self._blocks(), self.block, self.shared_bytes, (*self._encode(arguments), *arguments)
        )
        return [multiply if each.kernel is self.multiply else Launch(*each, arguments) for each in self.steps] or [
            multiply
        ]

    def _blocks(self) -> int:
        """Number of blocks of the multiplying launch; `groups_for` limits persistent ones on a processor."""
        if self.is_persistent and self.device.limits.is_cpu:
            return groups_for(self.grid, self.device.limits.multiprocessors)
        return self.grid

    def workspace(self, stream: Stream = None) -> Buffer:
        """Workspace for launches on that stream; None if they need none.

        Freeing it waits for all launches.
        """
        return self.device.workspace(self.workspace_bytes, stream) if self.workspace_bytes else None

    def _encode(self, arguments: Arguments) -> tuple[bytes, ...]:
        """Encoded maps of the operands at these addresses, cached after the first launch."""
        addresses = tuple([index(arguments[position]) for position in self._described])
        encoded = self._encoded.get(addresses)
        if encoded is None:
            if len(self._encoded) >= MOST_ENCODED:
                self._encoded.clear()
            encoded = tuple(
                self.device.encode_map(each, address) for each, address in zip(self.maps, addresses, strict=True)
            )
            self._encoded[addresses] = encoded
        return encoded


@dataclass(eq=False, slots=True)
class Call:
    """A call with all its arguments: each `call()` launches again, on the memory that it was prepared with.

    Each launch reads the current contents of the arrays, including the weights. Not thread-safe.
    """

    plan: Plan
    arguments: Arguments
    stream: Stream
    out: Any
    before: Sequence[Callable[[], object]]  # steps that upload host arrays, and copy or check weights
    after: Callable[[], None] | None  # downloads the output to the host
    keep: tuple[Any, ...]  # owners of the memory behind the arguments, and of the stream
    packs: "Sequence[Packing]" = ()  # packing that precedes each launch
    launched: bool = field(default=False, init=False)
    # the number of threads, and the launches recorded for it
    again: tuple[int | None, Recording] | None = field(default=None, init=False)
    # prepares the call with another kernel, if the device refuses this one's tensor maps or clusters
    fallback: Callable[[RefusedError], "Call"] | None = field(default=None, init=False)
    copies: bool = field(default=False, init=False)  # whether `before` and `after` copy arrays to the device and back

    def __repr__(self) -> str:
        return f"Call(Launcher{self.plan.kernel.pattern.shape}: {self.plan})"

    def __reduce__(self) -> NoReturn:
        raise LaunchError(
            f"{self!r} belongs to this process, where its memory is: copy or send the launcher and the arrays"
        )

    def __call__(self) -> Any:
        for step in self.before:
            step()
        try:
            self._launch()
        except RefusedError as error:
            if self.fallback is None:
                raise
            self._become(self.fallback(error))
            return self()
        if self.after:
            self.after()
        return self.out

    def keep_output(self) -> None:
        """Let later launches store an output that fits the caches into them, because the next launch reads it."""
        self.arguments = self.plan.without_streaming(self.arguments)

    def _become(self, other: "Call") -> None:
        """Take the kernel and the memory of another call with the same arrays and output.

        A graph that recorded this call, or records it now, still reads its former memory.
        """
        is_recorded = self.launched or self.plan.device.is_capturing(self.stream)
        self.keep = (*self.keep, *other.keep) if is_recorded else other.keep
        self.plan, self.arguments, self.stream, self.before = other.plan, other.arguments, other.stream, other.before
        self.packs, self.after, self.fallback, self.copies = other.packs, other.after, other.fallback, other.copies
        self.launched, self.again = False, None

    def _launch(self) -> None:
        """Launch; from the second call on by a recording, if the device supports that."""
        if self.launched and recorder(self.plan.device):
            self.again = _repeated([self], self.again)
            return
        for plan, weights, packed, _ in self.packs:
            plan.pack(weights, self.stream, packed)
        self.plan.launch(self.arguments, self.stream)
        self.launched = True


def _repeated(calls: "Sequence[Call]", again: tuple[int | None, Recording] | None) -> tuple[int | None, Recording]:
    """Launch the recording of `calls`, and return the number of its threads and the recording.

    The calls are recorded first, if there is no recording for the current number of threads.
    """
    threads = wanted_threads()  # determines the work groups
    if again is None or again[0] != threads:
        launches = list[Launch]()
        for each in calls:
            launches += [pack.launch for pack in each.packs] + each.plan.launches(each.arguments)
        again = threads, recorder(calls[0].plan.device)(launches, calls[0].stream)
    again[1]()
    return again


@dataclass(eq=False, slots=True)
class CallSequence:
    """Prepared calls that add to one array, launched sequentially: `call()` launches all, and returns the array.

    From the second call on, a device that records launches repeats them all by one call.
    """

    calls: tuple[Call, ...]
    checks: Sequence[Callable[[], object]] = ()  # of packed weights
    again: tuple[int | None, Recording] | None = field(default=None, init=False)

    @property
    def out(self) -> Any:
        return self.calls[-1].out

    def __call__(self) -> Any:
        first = self.calls[0]
        if not first.launched or recorder(first.plan.device) is None or any(each.copies for each in self.calls):
            for check in self.checks:  # before the first launch writes y
                check()
            for each in self.calls:
                each()
            return self.out
        for each in self.calls:
            for step in each.before:
                step()
        self.again = _repeated(self.calls, self.again)
        return self.out

    def __reduce__(self) -> NoReturn:
        self.calls[0].__reduce__()


class Packing(NamedTuple):
    """Weights that are packed before a launch: the plan that packs them, and both arrays.

    In `RepeatedCalls`, `weights` and `packed` are indices into the addresses that a call passes.
    """

    plan: Plan
    weights: Any
    packed: Any
    is_adjoint: bool = False  # whether `weights` are those of the adjoint of the plan's factor

    @property
    def launch(self) -> Launch:
        handle = self.plan.adjoint_handle if self.is_adjoint else self.plan.pack_handle
        return Launch(handle, self.plan.pack_grid, self.plan.pack_block, 0, (self.weights, self.packed))


class RepeatedCall(NamedTuple):
    """A call that will run again on other arrays. Each array has an index, as in `Packing`."""

    plan: Plan
    stream: Stream
    arguments: Arguments  # None for those that change
    moved: Sequence[tuple[int, int]]  # position of each argument that changes, and the index of its array
    packs: Sequence[Packing]  # packing that precedes the call

    @classmethod
    def of(cls, call: Call, arrays: Mapping[str, int], packs: Sequence[Packing]) -> "RepeatedCall":
        """`arrays` has the indices of the arrays, by operand."""
        operands, arguments = call.plan.operands, list[Any](call.arguments)
        moved = [(operands.index(name), number) for name, number in arrays.items() if name in operands]
        for position, _ in moved:
            arguments[position] = None
        return cls(call.plan, call.stream, Arguments(tuple(arguments)), moved, packs)


class RepeatedCalls:
    """Launch prepared calls sequentially on other arrays, which are given by their addresses.

    The arrays must have the shapes and strides that the calls were prepared with. Nothing is checked, and no array is
    kept. On a GPU the launches are enqueued on the stream of the calls. Thread-safe.
    """

    __slots__ = ("_calls", "_device", "_owners", "_recording", "_stream")

    def __init__(self, calls: Sequence[RepeatedCall], owners: Sequence[object]) -> None:
        """Record the launches if the device can. `owners` keep the memory of packed weights."""
        self._calls, self._owners = calls, owners
        self._device, self._stream = calls[0].plan.device, calls[0].stream
        self._recording = self._recorded() if recorder(self._device) else None

    def _recorded(self) -> Recording:
        launches, begin = list[Launch](), 0
        moves: list[tuple[int, int]] = []  # index of an argument among all launches, and of its array
        for plan, _, arguments, moved, packs in self._calls:
            for pack in packs:
                launches.append(pack.launch._replace(args=(None, None)))
                moves += ((begin, pack.weights), (begin + 1, pack.packed))
                begin += 2
            for each in plan.launches(arguments):
                launches.append(each)
                moves += [(begin + position, number) for position, number in moved]
                begin += len(each.args)
        recording: Recording = recorder(self._device)(launches, self._stream, moves)
        return recording

    @property
    def is_open(self) -> bool:
        """Whether the device still works: a user may have detached its CUDA context."""
        return self._device.is_open

    def settled(self) -> Settled | None:
        """How native code repeats the launches; None if it cannot, or not yet."""
        return None if self._recording is None else self._recording.settled()

    def time_again(self) -> None:
        """Let the next calls be timed again, on all threads and on one thread, to find which is faster."""
        if self._recording is not None:
            self._recording.time_again()

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch on the arrays at these addresses, in the order of their indices."""
        if self._recording is not None:
            self._recording(addresses)
        elif self._device.shares_host:
            self._enqueue_and_wait(addresses)
        else:
            self._enqueue(addresses)

    def _enqueue_and_wait(self, addresses: Sequence[int]) -> None:
        try:
            self._enqueue(list(map(self._device.shared, addresses)))
        finally:  # launches may still write to the caller's memory
            self._device.synchronize(self._stream)

    def _enqueue(self, addresses: Sequence[Buffer]) -> None:
        for plan, _, arguments, moved, packs in self._calls:
            for packer, weights, packed, is_adjoint in packs:
                packer.pack(addresses[weights], self._stream, addresses[packed], is_adjoint)
            relocated: Any = list(arguments)
            for position, number in moved:
                relocated[position] = addresses[number]
            plan.launch(Arguments(tuple(relocated)), self._stream)


@dataclass(eq=False)
class Loaded:
    """One source loaded on one device. It serves all launches with this source, of any batch size."""

    source: Source
    binary: Binary
    handles: Mapping[str, KernelHandle]  # by entry
    is_used: bool = False  # since the planner last looked for kernels to drop
    is_refused: bool = False  # whether the device has refused a launch
    clusters: int | None = None  # clusters that the device runs at the same time, if known


def load(device: Device, source: Source, binary: Binary, early: bool = True) -> Loaded:
    """Load a source's binary on the device, with the shared memory that its constants require.

    With `early`, a kernel that supports programmatic dependent launch may start before the previous launch ends.
    """
    launched = family_named(source.family).geometry(source.kernel, source.constants, 1)
    others = {each: device.load(binary, each, 0) for each in source.entries if each != source.entry}
    multiply = device.load(binary, source.entry, launched.shared_bytes, early and launched.starts_early)
    return Loaded(source, binary, {source.entry: multiply, **others})


def check_launchable(device: Device, loaded: Loaded) -> None:
    """Raise `RefusedError` if the driver refuses the tensor maps of a source, or the GPU cannot run its clusters.

    Otherwise, note how many clusters run at the same time. A MIG instance may have too few multiprocessors per GPC for
    a cluster. Only NVIDIA GPUs have tensor maps and clusters.
    """
    source, family = loaded.source, family_named(loaded.source.family)
    batch = source.kernel.batch or TRIED_BATCH
    maps = family.maps(source.kernel, source.constants, batch)
    geometry = family.geometry(source.kernel, source.constants, batch)
    check_clusters = getattr(device, "check_clusters", None)
    if check_clusters is None or not (maps or geometry.cluster > 1):
        return
    buffer = device.allocate(MAP_BYTES)
    try:
        for each in maps:
            device.encode_map(each, int(buffer))
        if geometry.cluster > 1:
            loaded.clusters = check_clusters(loaded.handles[source.entry], geometry)
    except DeviceError as error:
        raise error if CONTEXT_LOST in str(error) else RefusedError(str(error)) from None


def check_grid(kernel: KernelSpec, family: str, constants: Any, batch: int) -> None:
    """Raise `LaunchError` if the batch needs more blocks than one launch can have."""
    if (grid := family_named(family).geometry(kernel, constants, batch).grid) > MOST_BLOCKS:
        raise LaunchError(f"{kernel.name}: a batch of {batch} needs {grid} blocks; a launch has at most {MOST_BLOCKS}")


def make_plan(device: Device, kernel: KernelSpec, batch: int, choice: Choice, loaded: Loaded) -> Plan:
    """Build the plan of a loaded kernel at a batch."""
    family = family_named(choice.family)
    geometry = family.geometry(kernel, choice.constants, batch)
    packing = family.pack_geometry(kernel, choice.constants)
    source = loaded.source

    def launched(passes: tuple[Pass, ...]) -> list[tuple[str, Geometry]]:
        return [(source.entry_of(each.name), each.geometry) for each in passes]

    at_once = device.limits.multiprocessors, loaded.clusters
    steps = tuple(
        Step(loaded.handles[entry], each.launched(*at_once), each.block, each.shared_bytes)
        for entry, each in (*launched(geometry.before), (source.entry, geometry), *launched(geometry.after))
    )
    multiply = steps[len(geometry.before)]
    packed_for = repr(family.packed_for(kernel, choice.constants))
    words = str(kernel.pattern), kernel.precision, kernel.weights, kernel.inputs, kernel.layout, choice.family
    return Plan(
        device=device,
        kernel=kernel,
        batch=batch,
        choice=choice,
        loaded=loaded,
        multiply=multiply.kernel,
        grid=multiply.grid,
        block=multiply.block,
        shared_bytes=multiply.shared_bytes,
        pack_handle=loaded.handles.get(source.second_entry),
        pack_grid=packing.grid,
        pack_block=packing.block,
        adjoint_handle=loaded.handles.get(source.entry_of("pack_adjoint")),
        packed_bytes=family.packed_bytes(kernel, choice.constants),
        packing=" ".join((*words, packed_for, *kernel.tied)),
        operands=family.operands(kernel, choice.constants),
        at_launch=tuple(getattr(choice.constants, name) for name in choice.constants.at_launch),
        maps=family.maps(kernel, choice.constants, batch),
        workspace_bytes=geometry.workspace_bytes + geometry.group_bytes * multiply.grid,
        steps=steps if len(steps) > 1 else (),
        is_persistent=bool(geometry.at_once),
    )

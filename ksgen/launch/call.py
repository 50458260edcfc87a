"""A call bound to all its operands. Launches, and does not know how it was prepared."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ksgen.devices.base import Launch, Recording, Stream, record, recorder
from ksgen.devices.threads import wanted_threads
from ksgen.errors import LaunchError
from ksgen.launch.plan import Arguments, Plan
from ksgen.launch.weights import Weights


@dataclass(eq=False, slots=True)
class Call:
    """A call with all its arguments: each `call()` launches again, on the memory that it was prepared with.

    The current contents of the arrays count, including the weights. Not thread-safe.
    """

    plan: Plan
    arguments: Arguments
    stream: Stream
    out: Any
    before: Callable[[], object] | None  # uploads host arrays, and packs or checks weights
    after: Callable[[], None] | None  # downloads the output to the host
    keep: tuple[Any, ...]  # owners of the memory behind the arguments, and of the stream
    launched: bool = field(default=False, init=False)
    again: tuple[int | None, Recording] | None = field(default=None, init=False)  # threads and recording

    def __repr__(self) -> str:
        return f"Call(Launcher{self.plan.kernel.pattern.shape}: {self.plan})"

    def __reduce__(self) -> NoReturn:
        raise LaunchError(f"{self!r} belongs to this process, where its memory is: copy or send the launcher and the arrays")

    def __call__(self) -> Any:
        if self.before:
            self.before()
        self._launch()
        if self.after:
            self.after()
        return self.out

    def _launch(self) -> None:
        """Launch; from the second call on by a recording, if the device supports that."""
        own = recorder(self.plan.device)
        if own is None or not self.launched:
            self.launched = True
            self.plan.launch(self.arguments, self.stream)
            return
        threads = wanted_threads()
        if self.again is None or self.again[0] != threads:  # the number of threads determines the work groups
            self.again = threads, own(self.plan.launches(self.arguments), self.stream)
        self.again[1](())


class Elsewhere:
    """Sequential launches of calls on other host arrays, for a device that shares host memory.

    Arrays are given by their addresses. Their shapes and strides are those that the calls were prepared with. Nothing
    is checked or packed. Packed weights stay cached, and no array does. Thread-safe.
    """

    __slots__ = ("_device", "_launch", "_moved", "_stream", "_weights")

    def __init__(self, calls: Sequence[Call], places: Sequence[Mapping[str, int]], weights: Sequence[Weights]) -> None:
        """Record the launches.

        `places` maps the operands of each call to indices of the arrays given later.
        """
        self._device, self._weights, self._stream = calls[0].plan.device, weights, calls[0].stream
        launches = list[Launch]()
        self._moved: list[tuple[int, int]] = []  # pairs of an argument's index and that of its array
        begin = 0
        for call, names in zip(calls, places, strict=True):
            plan = call.plan
            moved = {plan.operands.index(name): given for name, given in names.items() if name in plan.operands}
            own = plan.launches(Arguments(tuple([None if at in moved else arg for at, arg in enumerate(call.arguments)])))
            for each in own:
                self._moved += [(begin + at, given) for at, given in moved.items()]
                begin += len(each.args)
            launches += own
        self._launch = record(self._device, launches, self._stream)

    def __call__(self, given: Sequence[int]) -> None:
        try:
            self._launch([(at, given[place]) for at, place in self._moved])
        finally:  # launches may still write to the caller's memory
            self._device.synchronize(self._stream)

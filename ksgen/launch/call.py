"""A call with all its operands in their places: the end of the walk. Launches, and knows nothing of how it was made."""

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
    """A call with all its arguments: `call()` launches once more, on the memory that it was prepared with.

    What the arrays hold by then is what counts, the weights included. One thread at a time.
    """

    plan: Plan
    arguments: Arguments
    stream: Stream
    out: Any
    before: Callable[[], object] | None  # host arrays are uploaded, weights are packed, or packed ones checked
    after: Callable[[], None] | None  # the output comes back to the host
    keep: tuple[Any, ...]  # owners of the memory behind the arguments, and of the stream
    launched: bool = field(default=False, init=False)
    again: tuple[int | None, Recording] | None = field(default=None, init=False)  # from the second call on, for so many threads

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
        """Recorded where the device can, if it is not the only time."""
        own = recorder(self.plan.device)
        if own is None or not self.launched:
            self.launched = True
            self.plan.launch(self.arguments, self.stream)
            return
        threads = wanted_threads()
        if self.again is None or self.again[0] != threads:  # which say how many work groups there are
            self.again = threads, own(self.plan.launches(self.arguments), self.stream)
        self.again[1](())


class Elsewhere:
    """The launches of calls, one after the other, on other arrays of the host, for a device that shares its memory.

    The arrays are given by where they begin; their shapes and strides are those that the calls were prepared with. Nothing is checked
    and nothing packed. Packed weights are kept, and no array. Several threads may call at once.
    """

    __slots__ = ("_device", "_launch", "_moved", "_stream", "_weights")

    def __init__(self, calls: Sequence[Call], places: Sequence[Mapping[str, int]], weights: Sequence[Weights]) -> None:
        """`places`: for each call, which of the arrays given later each of its operands is."""
        self._device, self._weights, self._stream = calls[0].plan.device, weights, calls[0].stream
        launches = list[Launch]()
        self._moved: list[tuple[int, int]] = []  # of all arguments, and which of the places given each of them gets
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
        finally:  # what was launched may still write to memory of the caller's
            self._device.synchronize(self._stream)

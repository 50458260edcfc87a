"""A call with all its operands in their places: the end of the walk. Launches, and knows nothing of how it was made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ksgen.devices.base import Stream
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

    def __repr__(self) -> str:
        return f"Call(Launcher{self.plan.kernel.pattern.shape}: {self.plan})"

    def __reduce__(self) -> NoReturn:
        raise LaunchError(f"{self!r} belongs to this process, where its memory is: copy or send the launcher and the arrays")

    def __call__(self) -> Any:
        if self.before:
            self.before()
        self.plan.launch(self.arguments, self.stream)
        if self.after:
            self.after()
        return self.out


class Elsewhere:
    """The launches of a call on other arrays of the host, for a device that shares its memory. Keeps packed weights, and no array.

    The arrays are given by where they begin; their shapes and strides are those that the call was prepared with. Nothing is checked
    and nothing packed. Several threads may call at once.
    """

    __slots__ = ("_arguments", "_at", "_device", "_out_at", "_stream", "_weights", "plan")

    def __init__(self, call: Call, weights: Sequence[Weights]) -> None:
        plan = self.plan = call.plan
        self._at: dict[str, int] = {name: plan.operands.index(name) for name in ("x", "bias", "residual") if name in plan.operands}
        self._out_at = plan.operands.index(plan.result)
        moved = (self._out_at, *self._at.values())
        self._arguments = [None if at in moved else own for at, own in enumerate(call.arguments)]
        self._device, self._stream, self._weights = plan.device, call.stream, weights

    def __call__(self, *, out: int, **pointers: int) -> None:
        at, share, arguments = self._at, self._device.shared, self._arguments.copy()
        arguments[self._out_at] = share(out)
        for name, pointer in pointers.items():
            arguments[at[name]] = share(pointer)
        self.plan.launch(Arguments(tuple(arguments)), self._stream)
        self._device.synchronize(self._stream)

"""A call with all its operands in their places: the end of the walk. Launches, and knows nothing of how it was made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from ksgen.devices.base import Stream
from ksgen.errors import LaunchError
from ksgen.launch.plan import Arguments, Plan


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

"""The one error of the emulator. It finds nothing out itself."""


class SimtError(Exception):
    """What the emulator caught, and where: linear `block` and `thread`, None where there is none.

    `line` is the line of the emitted text, and `callers` the lines that its function was called from.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        line: int | None = None,
        block: int | None = None,
        thread: int | None = None,
        callers: tuple[int, ...] = (),
    ) -> None:
        self.kind = kind
        self.message = message
        self.line = line
        self.block = block
        self.thread = thread
        self.callers = callers
        named = {"line": line and describe_lines((line, *callers)), "block": block, "thread": thread}
        place = ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)
        super().__init__(f"{kind}: {message}" + (f" ({place})" if place else ""))


def describe_lines(lines: tuple[int, ...]) -> str:
    """A line and the lines it was called from, innermost first."""
    return " called from ".join(map(str, lines)) if lines else "unknown"

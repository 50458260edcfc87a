"""A progress bar on stderr for long work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(is_wanted: bool, title: str, total: int) -> Iterator[Callable[[], None]]:
    """A function to call after each step. The bar is shown if wanted, and if stderr is a terminal."""
    if not is_wanted:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)

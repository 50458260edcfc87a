"""A progress bar: shown on a terminal where it is wanted, and nowhere else."""

import sys

import pytest

from ksgen.build.background import progress_bar


class Terminal:
    """Notes what is written."""

    encoding = "utf-8"

    def __init__(self, is_terminal: bool) -> None:
        self.is_terminal, self.text = is_terminal, ""

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("is_wanted", "is_terminal", "is_shown"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_bar_is_shown_where_it_is_wanted_and_can_be_seen(
    is_wanted: bool, is_terminal: bool, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    for variable in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    with progress_bar(is_wanted, "factors", total=2) as advance:
        advance()
        advance()
    assert ("factors" in screen.text) is is_shown
    assert ("100%" in screen.text) is is_shown
    if not is_shown:
        assert screen.text == ""

"""A tutorial, a script in docs/tutorials, as a page: its comments are the text, and what its code prints follows the
code.
"""

import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

OPTIONAL = ("torch",)  # libraries that the site may be built without


@patch.dict(os.environ)  # which a script may change
def tutorial_page(script: Path) -> str:
    """Run a script, and give its page in Markdown. A paragraph of comments at the margin is text; a printed SVG is a
    picture.

    Where an optional library is missing, nothing more runs, and the page says so.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    parts: list[str] = []
    missing = ""
    for is_text, content in _cells(script.read_text(encoding="utf-8")):
        if is_text:
            parts.append(re.sub(r"^# ?", "", content, flags=re.MULTILINE))
            continue
        parts.append(f"```python\n{content}\n```")
        if missing:
            continue
        try:
            with redirect_stdout(io.StringIO()) as printed:
                exec(compile(content, str(script), "exec"), namespace)
            parts += _shown(printed.getvalue())
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing not in OPTIONAL:
                raise
            parts.append(f"*This page was built without {missing}, and so without what the code prints.*")
    return "\n\n".join(parts) + "\n"


def _cells(source: str) -> Iterator[tuple[bool, str]]:
    """Text and code in turn: whether it is text, and the lines."""
    paragraphs = re.split(r"\n\n+", source.strip())
    for is_text, alike in groupby(paragraphs, lambda each: all(line.startswith("#") for line in each.splitlines())):
        yield is_text, "\n\n".join(alike)


def _shown(printed: str) -> Iterator[str]:
    """What was printed: pictures, and the lines between them."""
    for part in re.split(r"(<svg.*?</svg>)", printed.strip("\n"), flags=re.DOTALL):
        if part.strip():
            yield f"<div>{part}</div>" if part.startswith("<svg") else f"```text\n{part.strip(chr(10))}\n```"

"""Loads a spec from a YAML file or from YAML text. Never renders."""

import re
from dataclasses import replace
from keyword import iskeyword
from pathlib import Path
from typing import Any

from ksgen.errors import SpecError
from ksgen.files import read
from ksgen.spec.spec import Spec
from ksgen.values import excerpt, shown

MOST_BYTES_OF_FILE = 2**22


def load(path: str | Path) -> Spec:
    """Load the spec in a YAML file. A `SpecError` names the file, and the line and key of wrong content."""
    try:
        path = Path(path)
    except TypeError:
        raise SpecError(f"spec={excerpt(path)}; accepted: the path of a YAML spec") from None
    file = shown(path)
    try:
        content = read(path, MOST_BYTES_OF_FILE)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{file}: cannot be read ({reason}); accepted: the path of a YAML spec") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{file}:{line}: byte 0x{content[error.start]:02x}; accepted: text in UTF-8") from error
    return parse(text, file)


def parse(text: str, file: str = "<text>") -> Spec:
    """Parse a spec from YAML text. Messages name `file`, and its stem becomes the spec's name."""
    from ksgen.spec.reader import read_spec  # imports PyYAML, which only this function needs

    title = Path(file).stem
    return replace(read_spec(text, file, _identifier(title)), title=title)


def schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a spec, which gives editors completion.

    It cannot express rules for several values, such as whether two patterns fit: only the reader checks those.
    """
    from ksgen.spec import reader

    return reader.schema()


def _identifier(stem: str) -> str:
    words = re.sub(r"[^0-9A-Za-z]+", "_", stem).strip("_")
    return words if words[:1].isalpha() and not iskeyword(words) else f"spec_{words}".rstrip("_")

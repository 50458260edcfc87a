"""Small kernels over the functions of `templates/include/ptx`: the emulator runs them, nvcc compiles them, a GPU agrees.

`render` makes a text of a kernel in `kernels.py`; `layouts.py` says where the elements of wgmma's operands lie.
"""

from typing import Any

from ksgen.emit.render import _environment
from ksgen.families.ptx import Box

DIALECT = '{% include "include/cuda/dialect.j2" %}\n'


def render(kernel: str, includes: tuple[str, ...], **words: Any) -> str:
    """The kernel's text behind the includes that it needs, each by its name in `include/ptx`, or that and an operand."""
    words = {"boxes": [Box(3), Box(4)]} | words
    return _environment().from_string(DIALECT + "".join(map(_include, includes))).render(**words) + kernel


def _include(name: str) -> str:
    stem, _, operand = name.partition(" ")
    return f'{{% with operand = "{operand}" %}}{{% include "include/ptx/{stem}.j2" %}}{{% endwith %}}\n'

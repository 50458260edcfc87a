"""Small kernels over the functions of `templates/include/snippets/ptx.j2`: the emulator runs them, nvcc compiles
them, a GPU agrees.

`render` makes a text of a kernel in `kernels.py`; `layouts.py` says where the elements of wgmma's operands lie.
"""

from typing import Any

from ksgen.emit.render import LIBRARIES
from ksgen.emit.templates import environment, fill
from ksgen.families.ptx import Box
from tests.emulator.build import KERNEL_FILE

# a text takes the snippets of the libraries that it uses
TEXT = "{{ snippet_lines }}\n{{ kernel }}"


def render(kernel: str, **words: Any) -> str:
    """The kernel's text behind the words that it uses."""
    words = {"boxes": (boxes := [Box(3), Box(4)]), "stored_boxes": boxes, "kernel": kernel} | words
    return fill(environment().from_string(TEXT), words, LIBRARIES["cuda"], ("float32",))


def with_snippets(text: str) -> str:
    """The text behind the functions that it uses. Its lines are counted from its own first one."""
    return render(f'#line 1 "{KERNEL_FILE}"\n{text}')

"""Imported by the tuner's child processes in tests: breaks the emitted OpenCL text of candidates, by their
`min_blocks`, which changes nothing on a processor."""

import os
import time
from dataclasses import replace
from platform import machine
from typing import Any

from ksgen.emit.render import Source, render
from ksgen.tuning import worker

HANGS, CRASHES, WRONG, REFUSED, CRASHES_COMPILER, HANGS_COMPILER = range(11, 17)

_BODY = "    const extent batch = BATCH > 0"
# the system call pause: threads that spin would take seconds from other tests
_PAUSE = '__asm__ volatile("movl $34, %eax; syscall");' if machine() == "x86_64" else ""
_FIRST = {
    HANGS: f"    volatile int forever = 1;\n    while (forever) {{ {_PAUSE} }}\n",
    CRASHES: "    *(volatile GLOBAL int*)(size_t)8 = 1;\n",
    REFUSED: "    this is no C;\n",
}


def broken(kernel: Any, constants: Any, **options: Any) -> Source:
    source = render(kernel, constants, **options)
    if not hasattr(constants, "min_blocks"):
        return source
    if constants.min_blocks == CRASHES_COMPILER:
        os.abort()
    while constants.min_blocks == HANGS_COMPILER:
        time.sleep(1)
    text = source.text.replace(_BODY, _FIRST.get(constants.min_blocks, "") + _BODY, 1)
    if constants.min_blocks == WRONG:
        text = text.replace("    return value;\n}", "    return value * 1.001f;\n}", 1)
    return replace(source, text=text)


worker.render = broken

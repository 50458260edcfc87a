"""A compiler that waits until a test lets it go on, and programs that run over it in another process."""

import os
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

from ksgen.build.host import find_host_compiler
from tests.support.compilers import write_program

# Notes its process for each library, waits for the gate, then compiles hastily.
GATED = """#!/bin/sh
case "$*" in *" -o "*) ;; *) exec {real} "$@";; esac
echo $$ >> {folder}/started
while [ ! -e {folder}/gate ]; do sleep 0.02; done
{action}
for each; do
    shift
    case "$each" in -O2|-O3) each=-O0;; esac
    set -- "$@" "$each"
done
exec {real} "$@"
"""
START = """
import os, sys, threading, time, warnings
from pathlib import Path
import torch
from ksgen.build import background
from ksgen.torch import KSLinear
from ksgen.torch.operators import choice
from ksgen.launch.plan import RepeatedCalls
from ksgen.launcher import Launcher

folder = Path(sys.argv[1])
torch.manual_seed(0)
launched = []
def count(kind, name):
    own = getattr(kind, name)
    def counted(self, *given, **options):
        y = own(self, *given, **options)
        launched.append(name)
        return y
    setattr(kind, name, counted)
count(Launcher, "__call__")
count(RepeatedCalls, "__call__")
count(Launcher, "gradient")

def started():
    return len((folder / "started").read_text().split()) if (folder / "started").exists() else 0

def until(is_done):
    end = time.monotonic() + 100
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.05)  # calls suspend compilers, and a program may call between two looks

def open_gate():
    (folder / "gate").touch()

def finish():
    until(lambda: not background.unfinished())

"""


def run_gated(folder: Path, program: str, action: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that starts with `START`, with an empty cache and a compiler that waits for the file "gate"."""
    compiler = write_program(
        folder / "c++",
        GATED.format(real=shlex.join(find_host_compiler().command), folder=shlex.quote(str(folder)), action=action),
    )
    own = {name: value for name, value in os.environ.items() if name != "KSGEN_COMPILE"}
    own |= {
        "KSGEN_CACHE_DIR": str(folder / "cache"),
        "KSGEN_CXX": shlex.quote(str(compiler)),
        "KSGEN_DEVICE": "native",
    } | environment
    command = [sys.executable, "-c", START + textwrap.dedent(program), str(folder)]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=200, check=False)

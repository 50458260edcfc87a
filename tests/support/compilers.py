"""A program that stands in for nvcc, one that stands before the host's compiler, and a search for compilers that finds
nothing known before.
"""

import os
import shlex
import subprocess
from pathlib import Path

from ksgen.build.host import find_host_compiler

SOURCE = """
extern "C" __global__ void scale(float* y, const float* x) {
    __shared__ float tile[32];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = 2.0f * tile[31 - threadIdx.x];
}
extern "C" __global__ void scale_pack(float* y) { y[0] = 0.0f; }
"""
# Stands in for nvcc: prints its messages, keeps a journal of its calls, and runs the behaviour on its last line.
FAKE_NVCC = """#!/bin/sh
echo "$*" >> {journal}
case "$1" in
--version) echo "Cuda compilation tools, release {release}, V{release}.88"; exit 0;;
--list-gpu-code) printf '{targets}'; exit 0;;
esac
{action}
"""
HASTY = """#!/bin/sh
case "$1" in --version) {real} --version | sed '1s/$/ by {level}/'; exit;; esac
for each; do
    shift
    case "$each" in -O2|-O3) each={level};; esac
    set -- "$@" "$each"
done
exec {real} "$@"
"""
# What nvcc says where it, and not the source, is to blame.
NEW_HOST = (
    "In file included from <command-line>:\n"
    "/usr/include/crt/host_config.h:139:2: error: #error -- unsupported GNU version! gcc versions later than 11 are "
    "not supported!"
)
OLD_LIBRARY = "/usr/include/c++/11/bits/std_function.h:435:145: error: parameter packs not expanded with '...'"
NO_GPP = "gcc: fatal error: cannot execute 'cc1plus': execvp: No such file or directory"
NO_OPTION = "nvcc fatal   : Unknown option '-Werror'"
OF_THE_MACHINE = [NEW_HOST, OLD_LIBRARY, NO_GPP, NO_OPTION]
MAKE = 'while [ "$1" != -o ]; do shift; done; printf "\\0.text.scale\\0" > "$2"'  # what passes for a binary


def fake_nvcc(
    folder: Path, action: str = "exit 0", release: str = "13.0", targets: str = "sm_75\\nsm_90\\nsm_100\\ncompute_90\\n"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write_program(
        folder / "nvcc", FAKE_NVCC.format(journal=folder / "journal", action=action, release=release, targets=targets)
    )


def says(text: str) -> str:
    return f"echo {shlex.quote(text)}; exit 1"


def hasty(folder: Path, level: str = "-O1") -> Path:
    """The host's compiler with -O1 in place of more, which takes two thirds as long: for tests of what calls kernels,
    not of kernels. Its version separates its binaries from others in caches.
    """
    real = shlex.join(find_host_compiler().command)
    return write_program(folder / "hasty-c++", HASTY.format(real=real, level=level))


def program(folder: Path, name: str, said: str) -> Path:
    """A program that says this, whatever it is asked."""
    return write_program(folder / name, f"#!/bin/sh\necho '{said}'\n")


def write_program(path: Path, text: str) -> Path:
    """Write a program by another process: one that a thread of this process starts meanwhile would keep the file open
    for writing, and the system refuses to run such a file.
    """
    command = ["/bin/sh", "-c", 'cat > "$0" && chmod +x "$0"', str(path)]
    # tests replace `run`
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, env={"PATH": os.defpath}) as shell:
        shell.communicate(text)
    assert shell.returncode == 0
    return path

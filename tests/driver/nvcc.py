"""What stands in for nvcc on the stand-in machine: the real one, whose every cubin is registered with the driver.

The driver emulates the source. It takes from a cubin how many registers and how much memory it needs, so that the
real one optimizes little: it takes two thirds of the time.

python -m tests.driver.nvcc NVCC ARGUMENT...
"""

import subprocess
import sys
from pathlib import Path

from tests.driver.registry import register
from tests.emulator.errors import SimtError

HASTY = ("-Xcicc", "-O1", "-Xptxas", "-O1")


def main(nvcc: str, *arguments: str) -> int:
    makes_cubin = bool({"-cubin", "--cubin"} & set(arguments))  # ksgen's word for it, and PyCUDA's
    done = subprocess.run([nvcc, *arguments, *(HASTY if makes_cubin else ())], check=False)
    if done.returncode == 0 and makes_cubin:
        source = next(argument for argument in arguments if argument.endswith(".cu"))
        binary = arguments[arguments.index("-o") + 1] if "-o" in arguments else Path(source).with_suffix(".cubin").name
        try:
            register(Path(binary).read_bytes(), Path(source).read_text(encoding="utf-8"))
        except SimtError as error:
            print(f"{source}: error: the emulator does not take it: {error}", file=sys.stderr)
            return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

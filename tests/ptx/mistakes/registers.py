"""Registers that warpgroups take from each other."""

from tests.ptx.mistakes.mistake import EITHER, Mistake

REGISTERS = [
    Mistake(
        "more registers than there are",
        "batched",
        "registers_increase<232>();",
        "registers_increase<240>();",
        "deadlock",
        r"registers_increase at line \d+ called from \d+ \(to 240 a thread; the block holds \d+ of 64512\)",
    ),
    Mistake(
        "registers of two blocks",
        "batched",
        "__launch_bounds__(384, 1)",
        "__launch_bounds__(384, 2)",
        "deadlock",
        r"\(to 232 a thread; the block holds \d+ of 30720\)",
    ),
    Mistake(
        "bounds that do not say how many blocks",
        "batched",
        "__launch_bounds__(384, 1)",
        "__launch_bounds__(384)",
        "registers",
        "registers_.* in a kernel whose __launch_bounds__ do not say threads and blocks",
    ),
    Mistake(
        "an odd number of registers",
        "batched",
        "registers_increase<232>();",
        "registers_increase<230>();",
        "registers",
        "registers_increase<230>: multiples of 8",
    ),
    Mistake(
        "a warp with a number of its own",
        "batched",
        "registers_increase<232>();",
        "if (threadIdx.x / 32 == 2) registers_increase<224>();\n    else registers_increase<232>();",
        "registers",
        "where another warp of the warpgroup came to registers_increase",
        orders=EITHER,
    ),
    Mistake(
        "a warp that keeps what it has",
        "batched",
        "registers_increase<232>();",
        "if (threadIdx.x / 32 != 2) registers_increase<232>();",
        "collective",
        "setmaxnreg: warp 2 came to 0 of the 1 that its warpgroup did",
        orders=EITHER,
    ),
]

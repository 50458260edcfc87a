"""The amx family's constants before any search: by rule, since no processor with tiles has measured them."""

from dataclasses import replace

from ksgen.families.amx.shape import INPUTS, LINE_BYTES, PAIR, AmxConstants, Shape, products_of
from ksgen.families.base import Limits
from ksgen.families.tiles import divide_up
from ksgen.families.vector.defaults import MANY, PAST_BYTES, alike
from ksgen.families.vector.planes import round_up
from ksgen.spec import KernelSpec

MOST_ROWS = 128  # batch entries a block: weights, which come from the second-level cache, are multiplied by so many
KEPT_BYTES = 768 * 1024  # of what a work group keeps: with a group's weights it stays in the second-level cache
ROWS_BYTES = 24 * 1024  # of a j's inputs, that stay in the first-level cache while outputs are gone through
MOST_OUTPUTS = 128  # of a j, whose sums wait
TASKS = 4  # work groups a core, at least


def reads_in_place(kernel: KernelSpec) -> bool:
    """Whether rows of X are operands where they lie: 16-bit, and neighbours in memory."""
    return kernel.layout == "bsf" and kernel.pattern.d == 1 and products_of(kernel).parts == 1 and kernel.pattern.c >= INPUTS


def default(kernel: KernelSpec, limits: Limits, batch: int | None) -> AmxConstants:
    batch = kernel.batch or alike(batch or MANY)
    outputs = PAIR if kernel.layout == "bsl" or kernel.pattern.d == 1 else min(MOST_OUTPUTS, round_up(kernel.pattern.b, PAIR))
    found = AmxConstants(PAIR, outputs, 1, int(not reads_in_place(kernel)), _past(kernel, batch))
    rows = max((rows for rows in (32, 64, 96, 128) if rows <= MOST_ROWS and _fits(Shape(kernel, replace(found, block=rows)))), default=PAIR)
    found = replace(found, block=min(rows, round_up(batch, PAIR)))
    while found.outputs > PAIR and not _fits(Shape(kernel, found)):
        found = replace(found, outputs=found.outputs - PAIR)
    return _with_parts(Shape(kernel, found), limits, batch)


def _fits(shape: Shape) -> bool:
    """Whether a block stays in the caches: all of it in the second-level one, and where j take turns, each one's inputs in the first."""
    inputs = shape.constants.block * shape.steps * INPUTS * 2
    return shape.slot * 4 <= KEPT_BYTES and (not shape.is_bsf or inputs <= 2 * ROWS_BYTES)


def _past(kernel: KernelSpec, batch: int) -> int:
    """Whether outputs are stored past the caches: many, unless a vector of them is a piece of a line, each of which memory would merge."""
    is_whole = kernel.item_bytes * LINE_BYTES // 4 % LINE_BYTES == 0
    return int(is_whole and batch * kernel.pattern.out_features * kernel.item_bytes >= PAST_BYTES)


def _with_parts(shape: Shape, limits: Limits, batch: int) -> AmxConstants:
    """Groups of outputs shared out among work groups, where blocks of the batch are too few for all cores or planes lie far apart."""
    blocks, few = divide_up(batch, shape.constants.block), limits.multiprocessors * TASKS
    parts = min(divide_up(few, blocks), shape.columns) if blocks < few else 1
    return replace(shape.constants, parts=parts if shape.is_bsf else max(parts, shape.planes))

"""The amx family's constants before any search: by what its model expects, since no processor with tiles has measured them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ksgen.families.amx.cycles import multiply_cycles
from ksgen.families.amx.shape import INPUTS, LINE_BYTES, PAIR, AmxConstants, Shape, products_of
from ksgen.families.base import Limits
from ksgen.families.tiles import divide_up
from ksgen.families.vector.defaults import MANY, PAST_BYTES, alike
from ksgen.families.vector.planes import round_up
from ksgen.spec import KernelSpec

BLOCKS = (128, 96, 64, 32)  # batch entries: weights, which come from the second-level cache, are multiplied by so many
MOST_OUTPUTS = 256  # of a j, whose sums wait
DEPTHS = (1, 2, 3, 4, 5, 6, 8)  # tiles along the inputs
SETS_BYTES, WAYS = 4096, 4  # of a first-level cache: lines so many bytes apart meet, and so many of them may
LEAST_REUSE = 64  # multiply-adds for each input and output, from which weights are worth keeping: counted, as docs/kernels/amx.md says
TASKS = 4  # work groups a core, at least


def reads_in_place(kernel: KernelSpec) -> bool:
    """Whether rows of X can be operands where they lie: 16-bit, and neighbours in memory."""
    return kernel.layout == "bsf" and kernel.pattern.d == 1 and products_of(kernel).parts == 1 and kernel.pattern.c >= INPUTS


def least_of(kernel: KernelSpec) -> Shape:
    """What does not depend on constants may be asked of it."""
    return Shape(kernel, AmxConstants(PAIR, PAIR, 1, 1, 0, 1))


def default(kernel: KernelSpec, limits: Limits, batch: int | None) -> AmxConstants:
    batch = kernel.batch or alike(batch or MANY)
    found = min(_options(kernel, batch), key=lambda constants: multiply_cycles(Shape(kernel, constants), batch))
    return _with_parts(Shape(kernel, found), limits, batch)


def in_place(kernel: KernelSpec, found: AmxConstants) -> AmxConstants:
    """The same, with rows that are read where they lie if they can be."""
    return replace(found, panel=0) if _lie_ready(kernel, found.block) else found


def _options(kernel: KernelSpec, batch: int) -> Iterator[AmxConstants]:
    """Rows that can be read where they lie are, if they do not meet in the cache."""
    past, parts = past_of(kernel, batch), _planes_apart(kernel)
    for block in dict.fromkeys(min(block, round_up(batch, PAIR)) for block in BLOCKS):
        panels = (0,) if _lie_ready(kernel, block) else (2, 1)
        for (outputs, depth), panel in product(outputs_and_depths(kernel), panels):
            yield AmxConstants(block, outputs, parts, panel, past, depth)


def outputs_and_depths(kernel: KernelSpec) -> Iterator[tuple[int, int]]:
    """As equal groups of outputs, and of tiles along the inputs, as there can be."""
    b, steps = kernel.pattern.b, divide_up(kernel.pattern.c, INPUTS)
    depths = dict.fromkeys(divide_up(steps, divide_up(steps, depth)) for depth in DEPTHS)
    outputs = dict.fromkeys(round_up(divide_up(b, groups), PAIR) for groups in range(divide_up(b, MOST_OUTPUTS), divide_up(b, PAIR) + 1))
    return product(outputs, depths)


def _lie_ready(kernel: KernelSpec, block: int) -> bool:
    """Whether rows of X can be read where they lie, and do not drive each other out of the first-level cache there."""
    apart = kernel.in_features * kernel.item_bytes
    sets = next(SETS_BYTES // step for step in (4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1) if apart % step == 0)
    return reads_in_place(kernel) and block <= WAYS * sets


def past_of(kernel: KernelSpec, batch: int) -> int:
    """Whether outputs are stored past the caches: many. Of those whole lines alone are: memory would merge each piece."""
    return int(batch * kernel.pattern.out_features * kernel.item_bytes >= PAST_BYTES)


def _with_parts(shape: Shape, limits: Limits, batch: int) -> AmxConstants:
    """Groups of outputs shared out among work groups, where blocks of the batch are too few for all cores or planes lie far apart."""
    blocks, few = divide_up(batch, shape.constants.block), limits.multiprocessors * TASKS
    parts = min(divide_up(few, blocks), shape.columns) if blocks < few else 1
    return replace(shape.constants, parts=max(parts, shape.constants.parts))


def _planes_apart(kernel: KernelSpec) -> int:
    """Parts of whole planes, each for all of the batch, so that a plane's weights stay in the cache. In batch-size-first one part where
    memory bounds, which is read in one direction then, and where several planes have pieces of one line.
    """
    shape, pattern = least_of(kernel), kernel.pattern
    is_bound = pattern.b * pattern.c < LEAST_REUSE * (pattern.b + pattern.c)
    shares_lines = shape.planes_j > 1 and pattern.d * kernel.item_bytes % LINE_BYTES > 0
    return 1 if shape.is_bsf and (is_bound or shares_lines) else shape.planes

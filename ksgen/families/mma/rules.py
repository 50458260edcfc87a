"""Rules of the tensor-core family's constants for one factor."""

from ksgen.families.gpu_chain import rules_of_blocks
from ksgen.families.mma.shape import COLUMNS, ROWS, MmaConstants, MmaTiling
from ksgen.families.operands import FREE_OF_CONFLICTS, has_products, multiplies_bytes
from ksgen.families.rules import Rule, at_most, multiple
from ksgen.families.tiles import MOST_THREADS
from ksgen.spec import KernelSpec
from ksgen.spec.precision import on_tensor_cores

MOST_SUMS = 192  # accumulators per thread that leave registers for fragments


def _plane_rule(kernel: KernelSpec, constants: MmaConstants) -> bool:
    tile_d, d = constants.tile_d, kernel.pattern.d
    return kernel.layout == "bsl" or tile_d == d or (tile_d < d and tile_d % MmaTiling(kernel, constants).vector == 0)


def _warps_d_rule(kernel: KernelSpec, constants: MmaConstants) -> bool:
    return constants.warps_d in (1, constants.tile_d / MmaTiling(kernel, constants).vector)


def _batch_unit(kernel: KernelSpec, constants: MmaConstants) -> int:
    """Rows of the batch of which a tile has a whole multiple."""
    at_once = 1 if kernel.layout == "bsf" else MmaTiling(kernel, constants).vector
    return constants.warps_batch * COLUMNS * at_once


def _resident_rule(kernel: KernelSpec, constants: MmaConstants) -> bool:
    has_passes = kernel.layout == "bsf" and constants.tile_out < kernel.pattern.b
    return constants.resident == 0 or (has_passes and constants.resident == 1)


RULES: tuple[Rule[MmaConstants], ...] = (
    Rule("job is multiply", lambda k, c: k.job == "multiply"),
    Rule(
        "precision is one that tensor cores multiply",
        lambda k, c: k.has_bytes_in or has_products(k),
        lambda k, c: ", ".join(on_tensor_cores()),
    ),
    Rule("X is not in eight bits, or is in an eight-bit float", lambda k, c: not k.has_bytes_in or multiplies_bytes(k)),
    Rule(
        "every constant but promote and resident is at least 1",
        lambda k, c: all(v >= 1 for n, v in vars(c).items() if n not in ("promote", "resident")),
    ),
    Rule("tile_d is 1 in bsl", lambda k, c: k.layout == "bsf" or c.tile_d == 1),
    Rule("tile_d is d, or less and a multiple of 16 bytes", _plane_rule),
    Rule("tile_d is at most 16 for each of warps_d", lambda k, c: c.tile_d <= 16 * c.warps_d),
    Rule("warps_d is 1, or each warp has 16 bytes of the tile's j", _warps_d_rule),
    Rule("resident is 0, or 1 in bsf with tile_out less than b", _resident_rule),
    multiple("tile_out", "16 * warps_out", lambda k, c: ROWS * c.warps_out),
    multiple("tile_batch", "8 * warps_batch (in bsl of as many 16-byte chunks)", _batch_unit),
    multiple("tile_in", "the inputs after which the lanes' order starts again", lambda k, c: MmaTiling(k, c).super_in),
    at_most("a block has at most 1024 threads", MOST_THREADS, lambda k, c: MmaTiling(k, c).threads),
    at_most("a thread has at most 192 sums", MOST_SUMS, lambda k, c: MmaTiling(k, c).promoted_sums),
    *rules_of_blocks(MmaTiling),
    Rule("promote is 0, or a multiple of tile_in", lambda k, c: c.promote >= 0 and c.promote % c.tile_in == 0),
    Rule(
        "X is read from shared memory with no bank conflicts",
        lambda k, c: MmaTiling(k, c).x_wavefronts == FREE_OF_CONFLICTS,
    ),
)

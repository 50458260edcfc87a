"""Rules of the SIMT family's constants for one factor."""

from ksgen.families.rules import Rule
from ksgen.families.simt.shape import LANES_BATCH, LANES_OUT, SimtConstants, SimtTiling, is_narrow
from ksgen.families.tiles import MOST_THREADS

RULES: tuple[Rule[SimtConstants], ...] = (
    Rule("job is multiply", lambda k, c: k.job == "multiply"),
    Rule("copy is async or registers", lambda k, c: c.copy in ("async", "registers")),
    Rule("every constant is at least 1", lambda k, c: all(v >= 1 for v in vars(c).values() if not isinstance(v, str))),
    Rule(
        "thread_batch is a multiple of a 16-byte group",
        lambda k, c: c.thread_batch % SimtTiling(k, c).group == 0,
        lambda k, c: SimtTiling(k, c).group,
    ),
    Rule("thread_batch is at most 16", lambda k, c: c.thread_batch <= 16),
    Rule("thread_out is at most 16", lambda k, c: c.thread_out <= 16),
    Rule(
        "tile_batch is a multiple of 8 * thread_batch",
        lambda k, c: c.tile_batch % (LANES_BATCH * c.thread_batch) == 0,
        lambda k, c: LANES_BATCH * c.thread_batch,
    ),
    Rule(
        "tile_out is a multiple of 4 * thread_out",
        lambda k, c: c.tile_out % (LANES_OUT * c.thread_out) == 0,
        lambda k, c: LANES_OUT * c.thread_out,
    ),
    Rule(
        "a block has at most 1024 threads",
        lambda k, c: SimtTiling(k, c).threads <= MOST_THREADS,
        lambda k, c: SimtTiling(k, c).threads,
    ),
    Rule("tile_d is 1 in bsl", lambda k, c: k.layout == "bsf" or c.tile_d == 1),
    Rule("tile_d is at most d", lambda k, c: c.tile_d <= k.pattern.d),
    Rule("stages is at least 2", lambda k, c: c.stages >= 2),
    Rule("stages is 2 with copy=registers", lambda k, c: c.copy != "registers" or c.stages == 2),
    Rule(
        "copy is registers in a 16-bit precision, and with X in eight bits",
        lambda k, c: c.copy != "async" or not is_narrow(k),
    ),
)

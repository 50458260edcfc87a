"""Rules of the SIMT family's constants for one factor."""

from ksgen.families.rules import Rule, at_most, multiple
from ksgen.families.simt.shape import LANES_BATCH, LANES_OUT, SimtConstants, SimtTiling, is_narrow
from ksgen.families.tiles import MOST_THREADS

RULES: tuple[Rule[SimtConstants], ...] = (
    Rule("job is multiply", lambda k, c: k.job == "multiply"),
    Rule("copy is async or registers", lambda k, c: c.copy in ("async", "registers")),
    Rule("every constant is at least 1", lambda k, c: all(v >= 1 for v in vars(c).values() if not isinstance(v, str))),
    multiple("thread_batch", "a 16-byte group", lambda k, c: SimtTiling(k, c).group),
    Rule("thread_batch is at most 16", lambda k, c: c.thread_batch <= 16),
    Rule("thread_out is at most 16", lambda k, c: c.thread_out <= 16),
    multiple("tile_batch", "8 * thread_batch", lambda k, c: LANES_BATCH * c.thread_batch),
    multiple("tile_out", "4 * thread_out", lambda k, c: LANES_OUT * c.thread_out),
    at_most("a block has at most 1024 threads", MOST_THREADS, lambda k, c: SimtTiling(k, c).threads),
    Rule("tile_d is 1 in bsl", lambda k, c: k.layout == "bsf" or c.tile_d == 1),
    Rule("tile_d is at most d", lambda k, c: c.tile_d <= k.pattern.d),
    Rule("stages is at least 2", lambda k, c: c.stages >= 2),
    Rule("stages is 2 with copy=registers", lambda k, c: c.copy != "registers" or c.stages == 2),
    Rule(
        "copy is registers in a 16-bit precision, and with X in eight bits",
        lambda k, c: c.copy != "async" or not is_narrow(k),
    ),
)

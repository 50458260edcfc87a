"""The SIMT family: plain fused multiply-adds, for every pattern, batch, layout and device.

Decides the tiles of `simt.cu.j2`; its design is docs/kernels.md. Never renders, compiles or runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from math import gcd
from typing import Any

from ksgen.errors import ConstantsError
from ksgen.families.base import Constexpr, Geometry, Limits, Rule
from ksgen.spec import PRECISIONS, KernelSpec

WARP = 32
LANES_BATCH, LANES_OUT = 8, 4  # a warp's lanes along the batch and along the outputs
PACK_THREADS = 256
PORTABLE_SHARED_BYTES = 99 * 1024  # what a block may use on every GPU since sm_80


@dataclass(frozen=True)
class SimtConstants:
    """The constants that a search may change."""

    tile_batch: int  # batch entries a block
    tile_out: int  # outputs k a block, for each of its j
    tile_in: int  # inputs l a stage
    tile_d: int  # neighbouring j a block (1 in bsl)
    thread_batch: int  # sums a thread, along the batch
    thread_out: int  # sums a thread, along the outputs
    stages: int  # stages of X and W in shared memory
    min_blocks: int  # blocks that must fit a multiprocessor: bounds the registers
    copy: str  # "async": cp.async (sm_80 and later, 32 and 64-bit types); "registers": loads, then stores

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())


def _divide_up(value: int, by: int) -> int:
    return -(-value // by)


def _power_of_two_in(value: int, most: int) -> int:
    """The largest power of two that divides `value`, and is at most `most`."""
    return gcd(value, most)


@dataclass(frozen=True)
class CopyPlan:
    """How the block's warps walk over `lines` x `run` elements, `vector` neighbours of a run at a time."""

    lines: int
    run: int
    vector: int
    lane_run: int  # lanes of a warp along the run; the others stand on further lines
    warps: int

    @property
    def lane_lines(self) -> int:
        return WARP // self.lane_run

    @property
    def warps_run(self) -> int:
        return gcd(self.warps, self.run // (self.lane_run * self.vector))

    @property
    def run_step(self) -> int:
        return self.warps_run * self.lane_run * self.vector

    @property
    def line_step(self) -> int:
        return self.warps // self.warps_run * self.lane_lines

    @property
    def run_rounds(self) -> int:
        return self.run // self.run_step

    @property
    def line_rounds(self) -> int:
        return _divide_up(self.lines, self.line_step)


@dataclass(frozen=True)
class Shape:
    """Everything that follows from a kernel and its constants: sizes in elements of the sums' type."""

    kernel: KernelSpec
    constants: SimtConstants

    @property
    def stored_bytes(self) -> int:
        return PRECISIONS[self.kernel.precision].item_bytes

    @property
    def real_bytes(self) -> int:
        return max(4, self.stored_bytes)

    @property
    def group(self) -> int:
        """Elements of a 16-byte access to shared memory."""
        return 16 // self.real_bytes

    @property
    def group_out(self) -> int:
        return gcd(self.group, self.constants.thread_out)

    @property
    def warps_batch(self) -> int:
        return self.constants.tile_batch // (LANES_BATCH * self.constants.thread_batch)

    @property
    def warps_out(self) -> int:
        return self.constants.tile_out // (LANES_OUT * self.constants.thread_out)

    @property
    def warps(self) -> int:
        return self.constants.tile_d * self.warps_batch * self.warps_out

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def steps(self) -> int:
        return _divide_up(self.kernel.pattern.c, self.constants.tile_in)

    @property
    def tiles_out(self) -> int:
        return _divide_up(self.kernel.pattern.b, self.constants.tile_out)

    @property
    def tiles_d(self) -> int:
        return _divide_up(self.kernel.pattern.d, self.constants.tile_d)

    def _padded(self, size: int, remainder: int) -> int:
        """The least number from `size` up that is `remainder` modulo the 128 bytes of shared memory's banks."""
        banks = 128 // self.real_bytes
        return size + (remainder - size) % banks

    @property
    def x_pitch(self) -> int:
        if self.kernel.layout == "bsl":
            return self.constants.tile_batch
        return self._padded(self.constants.tile_batch, self.group * self.constants.tile_d)

    @property
    def x_plane(self) -> int:
        rows = self.constants.tile_in * self.x_pitch
        return rows if self.kernel.layout == "bsl" else self._padded(rows, self.group)

    @property
    def y_plane(self) -> int:
        return self._padded(self.slice_out * self.x_pitch, self.group)

    @property
    def slice_out(self) -> int:
        """Outputs that one slice of the store takes through shared memory."""
        return self.warps_out * LANES_OUT * self.group_out

    @property
    def w_base(self) -> int:
        return self.constants.tile_d * self.x_plane

    @property
    def w_stage(self) -> int:
        return self.constants.tile_d * self.constants.tile_in * self.constants.tile_out

    @property
    def stage(self) -> int:
        return self.w_base + self.w_stage

    @property
    def shared_reals(self) -> int:
        store = self.constants.tile_d * self.y_plane if self.kernel.layout == "bsf" else 0
        return max(self.constants.stages * self.stage, store)

    @property
    def w_rounds(self) -> int:
        return _divide_up(self.w_stage, self.group * self.threads)

    @property
    def packed_reals(self) -> int:
        return self.kernel.pattern.a * self.tiles_d * self.tiles_out * self.steps * self.w_stage

    @property
    def x_plan(self) -> CopyPlan:
        constants = self.constants
        if self.kernel.layout == "bsl":
            lane_run = _power_of_two_in(constants.tile_batch // self.group, WARP)
            return CopyPlan(constants.tile_in, constants.tile_batch, self.group, lane_run, self.warps)
        run = constants.tile_d * constants.tile_in
        vector = self.group if constants.copy == "registers" and self._rows_are_aligned(run) else 1
        lane_run = _power_of_two_in(run // vector, 8 if vector == 1 else 4)
        return CopyPlan(constants.tile_batch, run, vector, lane_run, self.warps)

    def _rows_are_aligned(self, run: int) -> bool:
        """Whether groups of neighbours of a batch-size-first row never straddle a run, an i or a ragged edge."""
        _, _, c, d = self.kernel.pattern.shape
        whole = c * d if self.constants.tile_d == d else gcd(d, self.constants.tile_d)
        return whole % self.group == 0 and run % self.group == 0

    @property
    def y_plan(self) -> CopyPlan:
        run = self.slice_out * self.constants.tile_d
        return CopyPlan(self.constants.tile_batch, run, 1, _power_of_two_in(run, 8 if self.stored_bytes > 2 else 16), self.warps)


def _is_sixteen_bit(kernel: KernelSpec) -> bool:
    return PRECISIONS[kernel.precision].item_bytes == 2


_RULES: tuple[Rule[SimtConstants], ...] = (
    Rule("copy is async or registers", lambda k, c: c.copy in ("async", "registers")),
    Rule("every constant is at least 1", lambda k, c: all(v >= 1 for v in asdict(c).values() if not isinstance(v, str))),
    Rule("thread_batch is a multiple of a 16-byte group", lambda k, c: c.thread_batch % Shape(k, c).group == 0),
    Rule("thread_batch and thread_out are at most 16", lambda k, c: max(c.thread_batch, c.thread_out) <= 16),
    Rule("8 thread_batch divides tile_batch", lambda k, c: c.tile_batch % (LANES_BATCH * c.thread_batch) == 0),
    Rule("4 thread_out divides tile_out", lambda k, c: c.tile_out % (LANES_OUT * c.thread_out) == 0),
    Rule("a block has at most 1024 threads", lambda k, c: Shape(k, c).threads <= 1024),
    Rule("tile_d is 1 in bsl", lambda k, c: k.layout == "bsf" or c.tile_d == 1),
    Rule("tile_d is at most d", lambda k, c: c.tile_d <= k.pattern.d),
    Rule("stages is at least 2", lambda k, c: c.stages >= 2),
    Rule("copy=registers has 2 stages", lambda k, c: c.copy != "registers" or c.stages == 2),
    Rule("copy=async needs a 32 or 64-bit precision", lambda k, c: c.copy != "async" or not _is_sixteen_bit(k)),
)


class Simt:
    """Fused multiply-adds on CUDA cores, or on any OpenCL device."""

    name = "simt"

    def serves(self, kernel: KernelSpec) -> bool:
        return True

    def rules(self) -> tuple[Rule[SimtConstants], ...]:
        return _RULES

    def constants(self, values: Mapping[str, Any]) -> SimtConstants:
        names = [field.name for field in fields(SimtConstants)]
        if set(values) != set(names):
            raise ConstantsError(f"simt constants are {', '.join(names)}; got {', '.join(map(str, values))}")
        for name, value in values.items():
            wanted = str if name == "copy" else int
            if type(value) is not wanted:
                raise ConstantsError(f"simt constant {name}={value!r} must be {'a word' if wanted is str else 'an integer'}")
        return SimtConstants(**values)

    def default(self, kernel: KernelSpec, limits: Limits) -> SimtConstants:
        chosen = _cpu_default(kernel) if limits.is_cpu else _gpu_default(kernel, limits)
        budget = min(limits.shared_bytes, PORTABLE_SHARED_BYTES)
        while self.shared_bytes(kernel, chosen) > budget or self.geometry(kernel, chosen, 1).block > limits.threads:
            chosen = _smaller(kernel, chosen, budget)
        return chosen

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[SimtConstants]:
        """Every combination that the rules, the shared memory and the registers allow."""
        copies = ["registers"] if _is_sixteen_bit(kernel) or not limits.async_copies else ["async", "registers"]
        planes = [1] if kernel.layout == "bsl" else sorted({1, 2, 3, 4, 6, 8, 12, 16, _planes(kernel.pattern.d)})
        for tile_batch, tile_out, tile_in, tile_d, thread_batch, thread_out, stages, min_blocks, copy in product(
            (32, 64, 128, 256),
            (4, 8, 16, 32, 48, 64, 96, 128),
            (4, 8, 16, 32),
            planes,
            (4, 8, 16),
            (1, 2, 4, 8, 12),
            (2, 3, 4),
            (1, 2, 3),
            copies,
        ):
            constants = SimtConstants(tile_batch, tile_out, tile_in, tile_d, thread_batch, thread_out, stages, min_blocks, copy)
            if all(rule.holds(kernel, constants) for rule in _RULES) and self.fits(kernel, constants, limits):
                yield constants

    def fits(self, kernel: KernelSpec, constants: SimtConstants, limits: Limits) -> bool:
        shape = Shape(kernel, constants)
        if shape.threads > limits.threads or self.shared_bytes(kernel, constants) > limits.shared_bytes // constants.min_blocks:
            return False
        return not limits.registers or self.registers(kernel, constants) * shape.threads * constants.min_blocks <= limits.registers

    def registers(self, kernel: KernelSpec, constants: SimtConstants) -> int:
        """An estimate: the sums, two sets of operands, what is held on its way, and addresses."""
        shape = Shape(kernel, constants)
        words = shape.real_bytes // 4
        sums = constants.thread_batch * constants.thread_out
        held = 0
        if constants.copy == "registers":
            plan = shape.x_plan
            held = plan.line_rounds * plan.run_rounds * plan.vector * shape.stored_bytes // 4 + shape.w_rounds * 4
        addresses = 32 if kernel.layout == "bsl" or constants.thread_out < 12 else 72  # the transposing copy takes more
        return words * (sums + 2 * (constants.thread_batch + constants.thread_out)) + held + addresses + (16 if words > 1 else 0)

    def shared_bytes(self, kernel: KernelSpec, constants: SimtConstants) -> int:
        shape = Shape(kernel, constants)
        return shape.shared_reals * shape.real_bytes

    def packed_bytes(self, kernel: KernelSpec, constants: SimtConstants) -> int:
        shape = Shape(kernel, constants)
        return shape.packed_reals * shape.real_bytes

    def geometry(self, kernel: KernelSpec, constants: SimtConstants, batch: int) -> Geometry:
        shape = Shape(kernel, constants)
        grid = kernel.pattern.a * shape.tiles_d * shape.tiles_out * _divide_up(batch, constants.tile_batch)
        return Geometry(grid, shape.threads, shape.shared_reals * shape.real_bytes)

    def pack_geometry(self, kernel: KernelSpec, constants: SimtConstants) -> Geometry:
        return Geometry(_divide_up(Shape(kernel, constants).packed_reals, PACK_THREADS), PACK_THREADS, 0)

    def constexprs(self, kernel: KernelSpec, constants: SimtConstants) -> list[Constexpr]:
        shape = Shape(kernel, constants)
        a, b, c, d = kernel.pattern.shape
        x, y = shape.x_plan, shape.y_plan
        tuned = [
            Constexpr("A", a, "blocks on the diagonal, index i"),
            Constexpr("B", b, "outputs of a block, index k"),
            Constexpr("C", c, "inputs of a block, index l"),
            Constexpr("D", d, "interleaved matrices of a block, index j"),
            Constexpr("BATCH", kernel.batch or 0, "batch entries, index s; 0: known at the call", "long long"),
            Constexpr("TILE_BATCH", constants.tile_batch, "batch entries a thread block"),
            Constexpr("TILE_OUT", constants.tile_out, "outputs k a thread block, for each of its j"),
            Constexpr("TILE_IN", constants.tile_in, "inputs l a stage"),
            Constexpr("TILE_D", constants.tile_d, "neighbouring j a thread block: one plane of shared memory each"),
            Constexpr("THREAD_BATCH", constants.thread_batch, "sums a thread, along the batch"),
            Constexpr("THREAD_OUT", constants.thread_out, "sums a thread, along the outputs"),
            Constexpr("STAGES", constants.stages, "stages of X and W in shared memory"),
            Constexpr("MIN_BLOCKS", constants.min_blocks, "thread blocks that must fit a multiprocessor"),
        ]
        derived = [
            Constexpr("GROUP", shape.group, "elements of a 16-byte access to shared memory"),
            Constexpr("GROUP_OUT", shape.group_out, "the same for weights, where a thread has fewer outputs"),
            Constexpr("THREADS", shape.threads, "threads a block"),
            Constexpr("WARPS_BATCH", shape.warps_batch, "warps of a plane along the batch"),
            Constexpr("WARPS_PER_PLANE", shape.warps_batch * shape.warps_out, "warps of a plane"),
            Constexpr("STEPS", shape.steps, "stages until all C inputs are read"),
            Constexpr("TILES_OUT", shape.tiles_out, "tiles along the outputs"),
            Constexpr("TILES_D", shape.tiles_d, "tiles along j"),
            Constexpr("X_PITCH", shape.x_pitch, "reals from one l of a plane to the next, free of bank conflicts"),
            Constexpr("X_PLANE", shape.x_plane, "reals from one plane to the next"),
            Constexpr("W_BASE", shape.w_base, "where a stage's weights begin"),
            Constexpr("W_STAGE", shape.w_stage, "reals of weights a stage"),
            Constexpr("STAGE", shape.stage, "reals a stage"),
            Constexpr("SHARED_REALS", shape.shared_reals, "reals of shared memory a block"),
            Constexpr("X_LINES", x.lines, "lines of the X tile"),
            Constexpr("X_VECTOR", x.vector, "neighbours that one copy of X moves"),
            Constexpr("X_LANE_RUN", x.lane_run, "lanes of a warp along a line"),
            Constexpr("X_LANE_LINES", x.lane_lines, "lines that a warp copies at once"),
            Constexpr("X_WARPS_RUN", x.warps_run, "warps along a line"),
            Constexpr("X_LINE_STEP", x.line_step, "lines that the block copies at once"),
            Constexpr("X_LINE_ROUNDS", x.line_rounds, "rounds until all lines are copied"),
            Constexpr("X_RUN_STEP", x.run_step, "elements of a line that the block copies at once"),
            Constexpr("X_RUN_ROUNDS", x.run_rounds, "rounds until a line is copied"),
            Constexpr("W_ROUNDS", shape.w_rounds, "copies of weights a thread and stage"),
            Constexpr("PACK_THREADS", PACK_THREADS, "threads a block of the packing kernel"),
        ]
        if constants.copy == "registers":
            derived.append(Constexpr("X_HELD", x.line_rounds * x.run_rounds * x.vector, "elements of X that a thread holds on their way"))
        if kernel.layout == "bsf":
            derived += [
                Constexpr("Y_PLANE", shape.y_plane, "reals from one plane of a stored slice to the next"),
                Constexpr("Y_LANE_RUN", y.lane_run, "lanes of a warp along a line of Y"),
                Constexpr("Y_LANE_LINES", y.lane_lines, "batch entries that a warp stores at once"),
                Constexpr("Y_WARPS_RUN", y.warps_run, "warps along a line"),
                Constexpr("Y_LINE_STEP", y.line_step, "batch entries that the block stores at once"),
                Constexpr("Y_LINE_ROUNDS", y.line_rounds, "rounds until all batch entries are stored"),
                Constexpr("Y_RUN_STEP", y.run_step, "elements of a line that the block stores at once"),
                Constexpr("Y_RUN_ROUNDS", y.run_rounds, "rounds until a line is stored"),
            ]
        return tuned + derived


def _planes(d: int) -> int:
    """Neighbouring j a block: few enough for its warps, and dividing d with the least rest."""
    return min(range(1, min(d, 8) + 1), key=lambda planes: (_divide_up(d, planes) * planes, -planes))


def _outputs(b: int, most: int, threads: tuple[int, ...] = (1, 2, 4, 8, 12)) -> tuple[int, int]:
    """(tile_out, thread_out): the least work, padding and loads of operands counted; then the widest tile."""
    choices = [(LANES_OUT * thread_out * warps, thread_out) for thread_out in threads for warps in (1, 2, 3, 4)]

    def work(choice: tuple[int, int]) -> tuple[float, ...]:
        tile_out, thread_out = choice
        loads = 1 + 2 / min(thread_out, 8)
        return (_divide_up(b, tile_out) * tile_out * loads, -tile_out, abs(thread_out - 8), -thread_out)

    return min((choice for choice in choices if choice[0] <= most), key=work)


def _gpu_default(kernel: KernelSpec, limits: Limits) -> SimtConstants:
    """Wide tiles of square threads; as many blocks a multiprocessor as the registers allow, so that one multiplies
    while another waits."""
    pattern = kernel.pattern
    copy = "registers" if _is_sixteen_bit(kernel) or not limits.async_copies else "async"
    doubles = kernel.precision == "float64"
    tile_d = 1 if kernel.layout == "bsl" else _planes(pattern.d)
    thread_batch = 4 if doubles else 8
    small_batch = kernel.batch is not None and kernel.batch <= 64
    warps_batch = 1 if small_batch or tile_d > 4 else 2
    warps = 8 if doubles else 12 if copy == "registers" else 16  # a block: as many as the registers of a multiprocessor serve
    most = min(128, LANES_OUT * 8 * max(1, warps // (tile_d * warps_batch)))
    tile_out, thread_out = _outputs(pattern.b, most, threads=(1, 2, 4, 8) if doubles else (1, 2, 4, 8, 12))
    tile_in = 16 if kernel.layout == "bsl" and pattern.c > 8 and tile_out < 128 else 8
    stages = 3 if copy == "async" else 2
    chosen = SimtConstants(LANES_BATCH * thread_batch * warps_batch, tile_out, tile_in, tile_d, thread_batch, thread_out, stages, 1, copy)
    registers = Simt().registers(kernel, chosen) * Shape(kernel, chosen).threads
    return replace(chosen, min_blocks=max(1, min(2 if doubles else 3, limits.registers // registers)))


def _cpu_default(kernel: KernelSpec) -> SimtConstants:
    """A thread of 4 x 8 sums keeps a processor's vector registers full; larger ones spill."""
    tile_d = 1 if kernel.layout == "bsl" else _planes(kernel.pattern.d)
    tile_out, thread_out = _outputs(kernel.pattern.b, 64, threads=(1, 2, 4, 8))
    return SimtConstants(2 * LANES_BATCH * 4, tile_out, 8, tile_d, 4, thread_out, 2, 1, "registers")


def _smaller(kernel: KernelSpec, constants: SimtConstants, budget: int) -> SimtConstants:
    """The same with one thing less of what takes shared memory; the smallest tile there is fits every device."""
    shape = Shape(kernel, constants)
    if constants.stages > 2:
        return replace(constants, stages=constants.stages - 1)
    if constants.tile_in > 8:
        return replace(constants, tile_in=constants.tile_in // 2)
    if shape.warps_batch > 1:
        return replace(constants, tile_batch=constants.tile_batch // shape.warps_batch)
    if shape.warps_out > 1:
        return replace(constants, tile_out=constants.tile_out // shape.warps_out)
    if constants.tile_d > 1:
        return replace(constants, tile_d=constants.tile_d // 2)
    if constants.tile_in > 1:
        return replace(constants, tile_in=max(1, constants.tile_in // 2))
    raise ConstantsError(f"{kernel.name}: no tile fits {budget} bytes of shared memory")

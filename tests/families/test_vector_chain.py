"""All factors of a layer in one launch on a processor: right, the same as one by one, within its arrays; what it
does not serve.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from ksgen.devices.base import Device
from ksgen.errors import ConstantsError, LaunchError
from ksgen.families import Limits, check, cuda_limits, families_for
from ksgen.families.chains import factor_kernels
from ksgen.families.vector.chain import VectorChainConstants
from ksgen.families.vector.family import Vector
from ksgen.families.vector.shape import VectorConstants, VectorTiling, lie_in_pairs
from ksgen.launch.fused import LEAST_ROWS
from ksgen.launch.plan import Plan
from ksgen.launcher import ChainLauncher, Launcher
from ksgen.measure.verify import tolerance
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from tests.measure.test_verify import needs_opencl
from tests.support.host_launches import agrees, agrees_between_fences, is_right, launch, one_by_one, plans_of
from tests.support.host_memory import (
    Array,
    processor,
    stay_within_their_arrays,
)
from tests.support.products import ALL, arrays_of, chain_of, truth_of

FAMILY = Vector()
CPU = Limits(2**18, registers=0, is_cpu=True, vector_bytes=64, multiprocessors=2, async_copies=False)
TWO = (Pattern(3, 5, 4, 2), Pattern(1, 7, 10, 3))  # 24 -> 30 -> 21
THREE = (Pattern(2, 6, 5, 1), Pattern(1, 3, 2, 6), Pattern(3, 9, 6, 1))  # 10 -> 12 -> 18 -> 27
EXCHANGED = (Pattern(4, 20, 15, 1, "k1:5.i.k2", "l1:5.i.l2"), Pattern(5, 8, 16, 1))  # 60 -> 80 -> 40
WIDE = (Pattern(2, 3, 2, 16), Pattern(6, 5, 4, 4), Pattern(1, 2, 5, 24))  # 64 -> 96 -> 120 -> 48


def constants_of(kernel: KernelSpec, ways: str, lanes: int = 8, pairs: int = 0) -> VectorChainConstants:
    """Choose ragged tiles in blocks of two units, along outputs (`o`) or the batch (`b`) per factor. Inputs are read in
    place if possible.
    """
    tiles = []
    for factor, way in zip(factor_kernels(kernel), ways, strict=True):
        along, height, width = ("outputs", 3, 2) if way == "o" else ("batch", 2, 1)
        are_wide = factor.item_bytes >= 4 or (pairs and lie_in_pairs(factor) and kernel.stride == "dense")
        panel = int(way == "b" or factor.layout == "bsl" or not are_wide or factor.pattern.d > lanes)
        tiles.append(f"{along} {lanes} {height} {width} {panel}")
    return VectorChainConstants(2 * 3 * lanes, ", ".join(tiles), len(ways) % 2, pairs)


CASES = [
    # rows of the intermediates are no multiple of a line: streaming stores of them would fault
    ((Pattern(2, 36, 8, 1), Pattern(1, 24, 72, 1), Pattern(1, 10, 24, 1)), "bfloat16", "bsf", "ooo", 8, Epilogue()),
    (TWO, "float32", "bsf", "ob", 8, ALL),
    (TWO, "float32", "bsl", "bb", 16, Epilogue()),
    (TWO, "float64", "bsf", "bb", 4, Epilogue(bias=True)),
    (TWO, "bfloat16", "bsl", "ob", 8, ALL),
    (THREE, "float32", "bsl", "bob", 4, Epilogue(activation="relu", residual=True)),
    (THREE, "float16", "bsf", "bbo", 8, ALL),
    (WIDE, "float32", "bsf", "ooo", 8, Epilogue()),
    (WIDE, "bfloat16", "bsf", "obo", 16, Epilogue(residual=True)),
    (WIDE, "float64", "bsl", "ooo", 4, ALL),
]


@pytest.mark.optimized
@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(("patterns", "precision", "layout", "ways", "lanes", "epilogue"), CASES)
def test_agrees_with_float64(
    patterns: tuple[Pattern, ...], precision: str, layout: str, ways: str, lanes: int, epilogue: Epilogue
) -> None:
    """The batches lie around a tile, a unit, and a block of two units."""
    kernel = chain_of(patterns, precision, layout, epilogue)
    constants = constants_of(kernel, ways, lanes)
    for batch in (1, 2, lanes, 3 * lanes - 1, 3 * lanes + 1, 6 * lanes - 1, 6 * lanes, 6 * lanes + 1, 100, 333):
        agrees(kernel, constants, batch)


BETWEEN = [  # every method of storing intermediates; the last factor's activation is another one, or the same
    (THREE, "float32", "bsl", "bob", 4, Epilogue(activation="relu"), "gelu", 0),
    (WIDE, "bfloat16", "bsf", "obo", 16, ALL, "relu", 0),
    (TWO, "float64", "bsf", "bb", 4, Epilogue(), "gelu", 0),
    (TWO, "float32", "bsf", "ob", 8, Epilogue(), "gelu_tanh", 0),
    (THREE, "bfloat16", "bsf", "obo", 16, Epilogue(True), "silu", 1),
    (TWO, "bfloat16", "bsl", "bb", 16, ALL, "gelu", 1),
]


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(("patterns", "precision", "layout", "ways", "lanes", "epilogue", "between", "pairs"), BETWEEN)
def test_an_activation_between_factors(
    patterns: tuple[Pattern, ...],
    precision: str,
    layout: str,
    ways: str,
    lanes: int,
    epilogue: Epilogue,
    between: str,
    pairs: int,
) -> None:
    kernel = chain_of(patterns, precision, layout, epilogue, between=between)
    for batch in (1, 3 * lanes + 1, 100):
        agrees(kernel, constants_of(kernel, ways, lanes, pairs), batch)


# the factor that turns is the last, one between or the only one; of several blocks on the diagonal at a time, and
# several j
TURNS = [
    (TWO, "float32", "bb", 8, 0),
    (TWO, "float64", "ob", 4, 0),
    (THREE, "float32", "obb", 4, 0),
    (THREE, "bfloat16", "bbb", 16, 1),
    (WIDE, "bfloat16", "obo", 16, 0),
    (THREE[::-1][:1], "float32", "b", 8, 0),
]


def turning(patterns: tuple[Pattern, ...], precision: str, layout: str, epilogue: Epilogue) -> KernelSpec:
    """Y has the other layout."""
    return chain_of(patterns, precision, layout, epilogue, out_layout={"bsf": "bsl", "bsl": "bsf"}[layout])


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("patterns", "precision", "ways", "lanes", "pairs"), TURNS)
def test_x_in_one_layout_and_y_in_the_other(
    patterns: tuple[Pattern, ...], precision: str, ways: str, lanes: int, pairs: int, layout: str
) -> None:
    kernel = turning(patterns, precision, layout, ALL)
    for batch in (1, 3 * lanes + 1, 6 * lanes, 100):
        agrees(kernel, constants_of(kernel, ways, lanes, pairs), batch)


PAIRS = [  # inputs of one j lie in pairs already; odd c; a factor of one input
    (CASES[0][0], "bsf", "ooo", 8, Epilogue()),
    (TWO, "bsf", "ob", 8, ALL),
    (TWO, "bsl", "bb", 16, ALL),
    (THREE, "bsf", "obo", 16, Epilogue(activation="relu", residual=True)),
    (THREE, "bsl", "bbb", 4, Epilogue()),
    (THREE, "bsl", "obo", 16, ALL),
    (WIDE, "bsf", "obo", 16, Epilogue(residual=True)),
    ((Pattern(3, 5, 1, 2), Pattern(1, 7, 10, 3), Pattern(7, 4, 3, 1)), "bsf", "bbo", 8, Epilogue(bias=True)),
    *((EXCHANGED, layout, ways, 8, ALL) for layout, ways in product(LAYOUTS, ("ob", "bo"))),
]


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(("patterns", "layout", "ways", "lanes", "epilogue"), PAIRS)
def test_two_inputs_at_a_time_give_the_bits_of_one_launch_per_factor(
    patterns: tuple[Pattern, ...], layout: str, ways: str, lanes: int, epilogue: Epilogue
) -> None:
    """The intermediate has X's type, and is rounded as in separate launches."""
    kernel, device = chain_of(patterns, "bfloat16", layout, epilogue), processor()
    constants = constants_of(kernel, ways, lanes, pairs=1)
    for batch in (1, 2, lanes, 3 * lanes + 1, 6 * lanes, 6 * lanes + 1, 100):
        agrees(kernel, constants, batch)
        arrays = arrays_of(kernel, batch)
        launch(device, plans_of(device, kernel, constants, batch), arrays)
        rows = one_by_one(device, kernel, constants.parsed, batch, arrays)
        np.testing.assert_array_equal(arrays["y"].view(np.uint16), rows.view(np.uint16))


def test_pairs_are_the_default_where_all_factors_can_take_them() -> None:
    able = replace(CPU, dots=("bf16",))
    kernel = chain_of(((Pattern(6, 64, 64, 1), Pattern(1, 768, 192, 2))), "bfloat16")
    found = FAMILY.default(kernel, able, 1568)
    check(FAMILY, kernel, found)
    assert found.pairs == 1
    assert [each.panel for each in found.parsed] == [0, 1]
    strided = replace(kernel, stride="any")  # whose rows may begin within a pair
    check(FAMILY, strided, FAMILY.default(strided, able, 1568))
    assert [each.panel for each in FAMILY.default(strided, able, 1568).parsed] == [1, 1]
    with pytest.raises(ConstantsError, match="pairs=1 must be 0 if X is strided and tiles reads it in place"):
        check(FAMILY, strided, found)
    for other, limits in ((kernel, CPU), (replace(kernel, precision="float16"), able)):
        found = FAMILY.default(other, limits, 1568)
        check(FAMILY, other, found)
        assert found.pairs == 0
    last = replace(kernel, layout="bsl")
    assert [FAMILY.default(last, able, batch).pairs for batch in (1, 1568)] == [1, 1]
    assert FAMILY.default(chain_of((Pattern(4, 2, 1, 3), Pattern(6, 3, 1, 4)), "bfloat16"), able, 1568).pairs == 0


def test_blocks_are_whole_tiles_of_every_factor() -> None:
    """Unless the batch is short.

    In batch-size-last they are no shorter where features are many: their rows would be pieces of lines.
    """
    limits = replace(CPU, vector_bytes=32)

    def block(layout: str, batch: int, *patterns: tuple[int, int, int, int]) -> int:
        kernel = chain_of(tuple(Pattern(*each) for each in patterns), layout=layout)
        found = FAMILY.default(kernel, limits, batch)
        tiles = [
            VectorTiling(factor, own).tile_rows
            for factor, own in zip(factor_kernels(kernel), found.parsed, strict=True)
        ]
        assert batch < MANY or all(found.block % each == 0 for each in tiles), (found, tiles)
        return found.block

    # 2560 -> 3072: along the outputs, six entries a tile, and along the batch, sixteen
    wide = ((40, 64, 64, 1), (1, 192, 160, 16))
    assert block("bsf", 1568, *wide) == 48
    assert block("bsl", 1568, *wide) == 48
    assert block("bsl", 1568, (32, 96, 24, 1), (1, 32, 32, 96)) == 48
    assert block("bsf", 1568, (32, 96, 24, 1), (1, 32, 32, 96)) == 18
    assert block("bsl", 64, *wide) == 16


def run_fenced() -> None:
    for patterns, precision, layout, ways, lanes, epilogue in CASES:
        kernel = chain_of(patterns, precision, layout, epilogue)
        for pairs in (0, 1) if precision == "bfloat16" else (0,):
            agrees_between_fences(kernel, constants_of(kernel, ways, lanes, pairs), (1, 37))
    for (patterns, precision, ways, lanes, pairs), layout in product(TURNS[2:4], LAYOUTS):
        kernel = turning(patterns, precision, layout, Epilogue())
        agrees_between_fences(kernel, constants_of(kernel, ways, lanes, pairs), (1, 37))
    print("all within their arrays")


@pytest.mark.second
@needs_opencl
def test_no_access_beyond_the_ends_of_arrays() -> None:
    """A process of its own runs the binaries of the cache."""
    processor()
    stay_within_their_arrays(__name__)


# ---- launchers

MANY = 100  # rows of the batch: enough for any machine that these tests run on, see `few_cores`


@pytest.fixture
def few_cores(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The processor as a machine of two cores, for which the batches here are enough."""
    device = processor()
    monkeypatch.setenv("KSGEN_DEVICE", device.runtime)
    monkeypatch.setattr(device, "limits", replace(device.limits, multiprocessors=2))
    return device


class Watched:
    """Counts what launchers launch: jobs of factors alone, and of chains."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.jobs: list[str] = []
        launched = Plan.launch

        def watched(plan: Plan, arguments: tuple[Any, ...], stream: Any) -> None:
            self.jobs.append(plan.kernel.job)
            launched(plan, arguments, stream)

        monkeypatch.setattr(Plan, "launch", watched)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def layer(patterns: tuple[Pattern, ...], fuse: str = "auto") -> ChainLauncher:
    return ChainLauncher(*(Launcher(*each.shape) for each in patterns), fuse=fuse)


def called(
    kernel: KernelSpec, arrays: dict[str, Array], weights: list[Any] | None = None, fuse: str = "auto", **options: Any
) -> Any:
    own = weights or [arrays[f"weights {number}"] for number in range(len(kernel.factors))]
    added = {name: arrays[name] for name in ("bias", "residual") if name in arrays}
    named = {"layout": kernel.layout, "activation": kernel.epilogue.activation, **added, **options}
    return layer(tuple(kernel.factors), fuse)(arrays["x"], own, **named)


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_launchers_take_it_and_it_is_what_one_by_one_gives(
    few_cores: Device, watched: Watched, layout: str, precision: str
) -> None:
    kernel = chain_of(TWO, precision, layout, ALL)
    arrays = arrays_of(kernel, MANY)
    fuse = "yes" if layout == "bsl" else "auto"
    y = called(kernel, arrays, fuse=fuse)
    assert watched.jobs == ["chain"]
    assert is_right(kernel, y, truth_of(kernel, arrays))
    first, last = (Launcher(*each.shape) for each in TWO)
    between = first(arrays["x"], arrays["weights 0"], layout=layout)
    alone = last(
        between, arrays["weights 1"], layout=layout, bias=arrays["bias"], activation="gelu", residual=arrays["residual"]
    )
    # one of them rounds the intermediate
    near = 4 * tolerance(precision, 14) * np.linalg.norm(alone.astype(np.float64))
    assert np.linalg.norm(y.astype(np.float64) - alone.astype(np.float64)) <= near
    assert called(kernel, arrays, out=arrays["residual"], fuse=fuse) is arrays["residual"]
    np.testing.assert_array_equal(arrays["residual"], y)


@needs_opencl
def test_in_batch_size_last_factors_go_one_by_one_unless_one_launch_is_asked_for(
    few_cores: Device, watched: Watched
) -> None:
    kernel = chain_of(TWO, layout="bsl", epilogue=ALL)
    arrays = arrays_of(kernel, MANY)
    assert is_right(kernel, called(kernel, arrays), truth_of(kernel, arrays))
    assert watched.jobs == ["multiply"] * 2


@needs_opencl
def test_changed_weights_are_packed_again_and_unchanged_ones_are_not(few_cores: Device, watched: Watched) -> None:
    kernel = chain_of(TWO)
    arrays = arrays_of(kernel, MANY)
    ks = layer(TWO)
    kept = ks.factors[1].pack(arrays["weights 1"])
    for weights in ([arrays["weights 0"], arrays["weights 1"]], [arrays["weights 0"], kept]):
        for _ in range(2):
            arrays["weights 0"] *= 2
            assert is_right(kernel, ks(arrays["x"], weights), truth_of(kernel, arrays))
    assert watched.jobs == ["chain"] * 4


@needs_opencl
def test_what_it_does_not_serve_goes_one_by_one(
    few_cores: Device, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ksgen.launch.fused.SMALL_BYTES", 0)
    kernel = chain_of(TWO)
    few, many = arrays_of(kernel, LEAST_ROWS * 2 - 1), arrays_of(kernel, MANY)
    shifted = {
        **many,
        "x": np.frombuffer(bytes(1) + many["x"].tobytes(), np.uint8)[1:].view(np.float32).reshape(many["x"].shape),
    }
    for arrays in (few, shifted):
        assert is_right(kernel, called(kernel, arrays), truth_of(kernel, arrays))
    monkeypatch.setattr(few_cores, "shares_host", False)
    assert is_right(kernel, called(kernel, many), truth_of(kernel, many))
    assert watched.jobs == ["multiply"] * 6
    assert [each.name for each in families_for(kernel, CPU)] == ["vector"]
    assert [each.name for each in families_for(kernel, cuda_limits("sm_90a"))] == ["simt"]
    assert not list(families_for(kernel, cuda_limits("sm_75")))
    assert not list(families_for(kernel, replace(CPU, is_cpu=False)))


@needs_opencl
def test_precisions_of_tensor_cores_are_plain_float32(few_cores: Device, watched: Watched) -> None:
    kernel = chain_of(TWO)
    arrays = arrays_of(kernel, MANY)
    for precision in ("tf32x3", "tf32"):
        assert is_right(kernel, called(kernel, arrays, precision=precision), truth_of(kernel, arrays))
    assert watched.jobs == ["chain"] * 2


@needs_opencl
def test_arrays_that_do_not_fit_are_refused_before_anything_runs(few_cores: Device, watched: Watched) -> None:
    kernel = chain_of(TWO)
    arrays = arrays_of(kernel, MANY)
    with pytest.raises(LaunchError, match="out"):
        called(kernel, arrays, out=arrays["x"][:, :21])
    with pytest.raises(LaunchError, match=r"overlap|memory"):
        called(kernel, arrays, out=arrays["x"].reshape(-1)[: MANY * 21].reshape(MANY, 21))
    assert not watched.jobs


# ---- constants

GOOD = VectorChainConstants(24, "batch 8 2 1 1, outputs 8 3 2 1", 0)
BAD = {
    "tiles holds what each factor's own rules allow": (
        "batch 8 2 1 1", "batch 8 2 1 1, outputs 8 3 2 1, batch 8 2 1 1", "batch 8 2 1 0, batch 8 2 1 1",
    ),
    "tiles has the same lanes for all factors; got tiles=": ("batch 8 2 1 1, batch 4 2 1 1",),
}  # fmt: skip


def test_rules() -> None:
    kernel = chain_of((Pattern(3, 5, 4, 2), Pattern(3, 7, 10, 1)))
    check(FAMILY, kernel, GOOD)
    with pytest.raises(
        ConstantsError,
        match=r"tiles holds what each factor's own rules allow: of factor 2, block=64 must be .* = 3; try 63 or 66; "
        r"got tiles=",
    ):
        check(FAMILY, kernel, replace(GOOD, block=64))  # not made of the second one's tiles
    for says, listed in BAD.items():
        for tiles in listed:
            with pytest.raises(ConstantsError, match=says):
                check(FAMILY, kernel, replace(GOOD, tiles=tiles))
    for tiles in ("", "batch 8 2 1", "batch eight 2 1 1, batch 8 2 1 1", "batch 8 2 1 1,outputs 8 3 2 1"):
        with pytest.raises(ConstantsError, match="must be along, lanes, height, width and panel"):
            check(FAMILY, kernel, replace(GOOD, tiles=tiles))


def test_the_factor_that_transposes_has_lanes_along_the_batch() -> None:
    kernel = turning(WIDE, "float32", "bsf", ALL)
    check(FAMILY, kernel, constants_of(kernel, "obo"))
    with pytest.raises(ConstantsError, match="tiles has lanes along the batch in the factor that transposes; got"):
        check(FAMILY, kernel, constants_of(kernel, "ooo"))
    for layout, batch, patterns in product(LAYOUTS, (1, 100, 1568), (TWO, THREE, WIDE, WIDE[:1])):
        kernel = turning(patterns, "bfloat16", layout, ALL)
        for limits in (CPU, replace(CPU, dots=("bf16",)), replace(CPU, vector_bytes=32)):
            check(FAMILY, kernel, FAMILY.default(kernel, limits, batch), limits)


def test_rules_of_the_job() -> None:
    with pytest.raises(ConstantsError, match="job=multiply must be chain"):
        check(FAMILY, KernelSpec(Pattern(1, 2, 3, 1)), GOOD)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("patterns", [TWO, THREE, WIDE, (Pattern(6, 64, 64, 1), Pattern(1, 768, 192, 2))])
def test_defaults_and_the_space_keep_the_rules_on_every_processor(patterns: tuple[Pattern, ...], layout: str) -> None:
    for precision, vector_bytes, cores, batch in product(
        ("float32", "float64", "bfloat16"), (16, 32, 64), (1, 64), (None, 1, 100, 25088)
    ):
        kernel = chain_of(patterns, precision, layout)
        limits = replace(CPU, vector_bytes=vector_bytes, multiprocessors=cores)
        check(FAMILY, kernel, FAMILY.default(kernel, limits, batch), limits)
        assert FAMILY.registers(kernel, FAMILY.default(kernel, limits, batch)) <= (32 if vector_bytes == 64 else 16)
    found = list(FAMILY.space(kernel, limits))
    assert len(set(found)) == len(found) > 1
    for constants in found:
        check(FAMILY, kernel, constants, limits)


def test_the_factors_alone_are_the_layers_own() -> None:
    kernel = chain_of(THREE, epilogue=ALL)
    alone = factor_kernels(kernel)
    assert [each.pattern for each in alone] == list(THREE)
    assert [each.epilogue for each in alone] == [Epilogue(), Epilogue(), ALL]
    parsed = constants_of(kernel, "bob").parsed
    assert parsed[1] == VectorConstants("outputs", 8, 3, 2, 48, 1, 0, 0)
    assert [each.streaming for each in parsed] == [0, 0, 1]  # intermediates stay in the cache

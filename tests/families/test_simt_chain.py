"""All factors of a layer in one launch on CUDA cores: right, the same as one by one, within its arrays; what it does
not serve.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ksgen.errors import ConstantsError
from ksgen.families import Limits, check, cuda_limits, family_for, meant_for
from ksgen.families.simt import chain as simt_chain
from ksgen.families.simt.chain import SimtChainConstants, SimtChainTiling, SimtFactor
from ksgen.families.simt.family import Simt
from ksgen.families.simt.shape import SimtConstants
from ksgen.launch.fused import family_of_chain
from ksgen.measure.verify import slice_of
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.emulator import Counts, is_installed
from tests.families.test_gpu_chain import GOOD
from tests.support.counting import Counting, compared
from tests.support.gpu_chains import (
    EVEN,
    LIMITS,
    NARROW,
    PLANES,
    RAGGED,
    group_of,
    is_right,
    run_chain,
    run_group,
    source_of,
)
from tests.support.kernels import Array, in_emulator
from tests.support.products import ALL, arrays_of, chain_of, truth_of

FAMILY = Simt()


@pytest.mark.parametrize(
    ("patterns", "layout", "tied"),
    [(RAGGED, "bsf", ("d", "a", "")), (PLANES, "bsf", ("d", "ad", "d")), (RAGGED, "bsl", ("ad", "", ""))],
)
def test_tied_weights_are_packed_once(patterns: tuple[Pattern, ...], layout: str, tied: tuple[str, ...]) -> None:
    """Each stage reads the slice that its tile shares with others; the bits are those of whole weights."""
    kernel, run = chain_of(patterns, "float32", layout, ALL, tied=tied), in_emulator()
    constants = FAMILY.default(kernel.untied, LIMITS)
    source, whole = source_of("simt", kernel, constants), source_of("simt", kernel.untied, constants)
    assert source.kernel == kernel
    shapes = (SimtChainTiling(each.kernel, constants).factors for each in (source, whole))
    for own, other, tie in zip(*shapes, tied, strict=True):
        tiles = (own.kernel.pattern.a if "a" in tie else 1) * (own.tiles_d if "d" in tie else 1)
        assert own.packed_bytes * tiles == other.packed_bytes
    of_tied, of_whole = (FAMILY.work(each.kernel, constants, 37) for each in (source, whole))
    assert of_tied.memory_bytes < of_whole.memory_bytes
    assert of_tied.cache_bytes == of_whole.cache_bytes  # each stage is copied
    arrays = repeated(kernel, arrays_of(kernel, 37))
    got = run_chain(source, arrays, run)
    assert is_right(kernel, got, truth_of(kernel, arrays))
    np.testing.assert_array_equal(got, run_chain(whole, arrays, run))


def repeated(kernel: KernelSpec, arrays: dict[str, Array]) -> dict[str, Array]:
    """The arrays, with weights that are equal along the kernel's ties."""
    slices = {f"weights {number}": tie for number, tie in enumerate(kernel.tied)}
    whole = {name: np.broadcast_to(slice_of(arrays[name], tie), arrays[name].shape) for name, tie in slices.items()}
    return arrays | {name: array.copy() for name, array in whole.items()}


def test_a_group_reads_tied_weights_of_all_its_chains() -> None:
    chains, run = (NARROW[:2], (Pattern(2, 7, 20, 6),)), in_emulator()
    kernel = replace(group_of(chains, "float32", "bsf"), tied=("d", "a", "ad"))
    constants, arrays = FAMILY.default(kernel.untied, LIMITS), repeated(kernel, arrays_of(kernel, 9))
    got, whole = (run_group(source_of("simt", each, constants), arrays, run) for each in (kernel, kernel.untied))
    for chain, (y, other) in enumerate(zip(got, whole, strict=True)):
        assert is_right(kernel, y, truth_of(kernel, arrays, chain), chain)
        np.testing.assert_array_equal(y, other)


def test_a_tile_of_j_of_the_first_factor_that_ends_within_d() -> None:
    """Sums beyond d belong to no intermediate."""
    kernel = chain_of(NARROW[:2], "float32", "bsf")
    source, arrays = (
        source_of("simt", kernel, SimtChainConstants(32, "4 8 2 4 1, 32 6 1 4 4", 2, 1)),
        arrays_of(kernel, 37),
    )
    assert is_right(kernel, run_chain(source, arrays, in_emulator()), truth_of(kernel, arrays))


# ---- rules, and what is served


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"tiles": "48 8 1 4 3"},
            "tiles holds what each factor's own rules allow: factors per chain are 1 in tiles, and 2 in the kernel",
        ),
        (
            {"tiles": "48 8 1 4 3, 64 8 1 4"},
            "'64 8 1 4' must be 5 integers: tile_out, tile_in, tile_d, thread_batch, thread_out",
        ),
        ({"tiles": "48 8 1 4 3, 60 8 1 4 4"}, r"of factor 2, tile_out=60 must be a multiple of 4 \* thread_out = 16"),
        ({"tiles": "48 8 1 4 3, 32 8 1 4 4"}, "tiles has the same number of warps for all factors"),
        (
            {"tiles": "48 8 1 4 3, 64 9 1 4 4"},
            "tiles has a tile_in that divides c and a tile_d that divides d, from a chain's factor 2 on",
        ),
        ({"stages": 1}, "stages=1 must be at least 2; try 2"),
        ({"min_blocks": 0}, "min_blocks=0 must be at least 1; try 1"),
        ({"min_blocks": 13}, "min_blocks blocks have at most 1536 threads: 1664"),
    ],
)
def test_each_rule_has_two_sides(changes: dict[str, Any], says: str) -> None:
    kernel = chain_of(EVEN, "float32", "bsf")
    check(FAMILY, kernel, GOOD["simt"], LIMITS)
    with pytest.raises(ConstantsError, match=says):
        check(FAMILY, kernel, replace(GOOD["simt"], **changes), LIMITS)


def test_what_it_serves() -> None:
    def supports(precision: str, patterns: tuple[Pattern, ...] = EVEN, target: str = "sm_80", **changes: Any) -> bool:
        return FAMILY.supports(replace(chain_of(patterns, precision, "bsf"), **changes), cuda_limits(target))

    assert all(map(supports, ("float32", "float64", "tf32", "tf32x3", "fp16x3")))
    assert not supports("float16")
    assert not supports("complex64")
    assert not supports("float32", target="sm_75")
    assert supports("float32", chains=(EVEN, EVEN))
    assert not supports("float32", (Pattern(1, 4096, 4096, 1), Pattern(1, 4096, 4096, 1)))  # 4096 features have no room
    assert not FAMILY.supports(chain_of(EVEN, "float32", "bsf"), Limits(2**18, is_cpu=True))
    kernel = chain_of(EVEN, "float32", "bsf")
    assert [each.name for each in meant_for(kernel, LIMITS)] == ["simt"]
    both = replace(kernel, precision="tf32")
    assert [each.name for each in meant_for(both, LIMITS)] == ["mma", "simt"]
    assert family_for(both, LIMITS).name == "mma"


@pytest.mark.parametrize(("target", "family"), [("sm_80", "mma"), ("sm_86", "simt")])
def test_where_both_serve_the_cost_decides(target: str, family: str) -> None:
    """An RTX 3090's three products on tensor cores are slower than one on its CUDA cores."""
    found = family_of_chain(chain_of(EVEN, "tf32x3", "bsf"), cuda_limits(target), 25088)
    assert found is not None
    assert found.name == family


def test_shared_memory_is_two_halves_and_a_ring() -> None:
    """The halves hold the intermediates alternately, and sums on their way to rows of Y."""
    kernel = chain_of((*EVEN, *EVEN), "float32", "bsf")
    shape = SimtChainTiling(kernel, FAMILY.default(kernel, LIMITS))
    between, tile = [96, 128, 96], shape.constants.tile_batch
    [held] = shape.buffer_sizes
    assert held[:3] == [features * tile for features in between]
    assert shape.ping_pong_sizes == (96 * tile, max(128 * tile, shape.factors[-1].transposed_elements))
    assert [shape.place(at) for at in range(3)] == [0, 96 * tile, 0]
    assert shape.shared_reals == sum(shape.ping_pong_sizes) + shape.constants.stages * max(
        each.stage for each in shape.factors
    )
    first, second = shape.factors[:2]
    assert (first.stage > first.w_stage, second.stage) == (True, second.w_stage)


@pytest.mark.exhaustive
@pytest.mark.skipif(not is_installed("counts"), reason="the emulator needs g++")
@pytest.mark.parametrize(
    ("precision", "layout"), [("float32", "bsf"), ("float32", "bsl"), ("float64", "bsf"), ("float64", "bsl")]
)
def test_what_the_cost_model_says_moved_is_what_moves(precision: str, layout: str) -> None:
    kernel = chain_of(EVEN, precision, layout)
    source, run, batch = source_of("simt", kernel), Counting(timeout_s=300), 256
    run_chain(source, arrays_of(source.kernel, batch), run, behind=0)
    rows = compared(source, batch, run.by_entry[source.entry], Counts())
    assert {name for name, (expected, counted) in rows.items() if expected == counted} >= {
        "blocks",
        "bytes of memory",
        "bytes of the cache",
    }
    for name, (expected, counted) in rows.items():
        assert expected == pytest.approx(counted, rel=0.02), (name, source.constants, rows)


def test_inputs_beyond_the_largest_stage_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage grows with its inputs. To try all of them would take a sixth of the time of `propose`."""
    tried: dict[tuple[int, ...], list[int]] = {}

    def factor(kernel: KernelSpec, own: SimtConstants, is_first: bool) -> SimtFactor:
        shape = SimtFactor(kernel, own, is_first)
        key = (own.tile_out, own.tile_d, own.thread_batch, own.thread_out)
        tried.setdefault(key, []).append(shape.stage * kernel.real_bytes)
        return shape

    monkeypatch.setattr(simt_chain, "SimtFactor", factor)
    assert simt_chain._tiles_of_factor.__wrapped__(KernelSpec(Pattern(1, 64, 64, 4)), True, False, 64, 16)
    assert any(stages[-1] > simt_chain.MOST_STAGE[-1] for stages in tried.values())
    for stages in tried.values():
        assert stages == sorted(stages)
        assert all(stage <= simt_chain.MOST_STAGE[-1] for stage in stages[:-1])

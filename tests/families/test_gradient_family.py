"""What a gradient's launch asks of a device: tiles, padding and parts counted."""

from dataclasses import replace

import pytest

from ksgen.families.gradient.family import Gradient
from ksgen.families.gradient.mma import GradientMmaConstants
from ksgen.families.gradient.plain import GradientConstants
from ksgen.spec import LAYOUTS
from tests.support.gradients import kernel

FAMILY, TENSOR_CORES = Gradient(GradientConstants), Gradient(GradientMmaConstants)
GOOD = GradientConstants(32, 32, 1, 16, 8, 4, 3, 2, 1, "async")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_work_counts_tiles_padding_and_parts(layout: str) -> None:
    spec = kernel((2, 96, 96, 4), layout=layout)
    constants = replace(GOOD, parts=4)
    work = FAMILY.work(spec, constants, 512)
    assert work.memory_bytes == spec.bytes(512)
    assert 2 * work.multiply_adds == spec.flops(512)  # every tile is full
    assert work.blocks == FAMILY.geometry(spec, constants, 512).grid == 2 * 9 * 4 * 4
    rows = spec.pattern.in_features + spec.pattern.out_features
    weights = spec.pattern.weight_count
    apart = 4  # that share a sector: one j of a batch entry's is read at a time, and one j of the weights written
    read = 3 * 512 * rows * (apart if layout == "bsf" else 1)  # by three tiles
    assert work.cache_bytes == 4 * (read + weights * (4 + 4 + apart))  # parts are written, read, added
    assert work.shared_bytes > 4 * 512 * rows * 3

"""Parts of the batch: all of it, none empty, and enough to fill a device."""

from dataclasses import replace

from ksgen.families.gradient.plain import GradientConstants, GradientTiling
from tests.support.gradients import kernel

GOOD = GradientConstants(32, 32, 1, 16, 8, 4, 3, 2, 1, "async")


def test_parts_cover_the_batch_and_none_is_empty() -> None:
    for parts in (1, 2, 3, 7, 64):
        shape = GradientTiling(kernel(), replace(GOOD, parts=parts))
        for batch in (1, 15, 16, 17, 127, 128, 255, 256, 257, 300, 1000, 1024, 25088, 25089):
            steps, count = shape.part_steps(batch), shape.parts(batch)
            assert count <= parts
            assert (count - 1) * steps * GOOD.tile_batch < batch <= count * steps * GOOD.tile_batch
            assert count == 1 or steps >= shape.least_steps

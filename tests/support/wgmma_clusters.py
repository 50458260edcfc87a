"""Kernels whose blocks share what they load."""

from dataclasses import replace

from ksgen.emit.render import Source, render
from ksgen.families import check, cuda_limits, family_named
from ksgen.families.wgmma.registers import RegistersConstants
from ksgen.families.wgmma.shared import SharedConstants
from ksgen.spec import Epilogue
from tests.support.kernels import PLAIN, kernel_of

GPU = cuda_limits("sm_90a")
KINDS = {  # every image of X and every store of Y
    "shared bsl": ("wgmma_shared", "float16", "bsl", (2, 20, 24, 2), SharedConstants(128, 16, 16, 2, 2)),
    "shared bsf": ("wgmma_shared", "bfloat16", "bsf", (2, 40, 72, 1), SharedConstants(128, 24, 64, 2, 2)),
    "registers flat": (
        "wgmma_registers",
        "float16",
        "bsf",
        (2, 20, 24, 5),
        RegistersConstants(64, 16, 64, 5, 1, 1, 2, 0),
    ),
    "registers slab": (
        "wgmma_registers",
        "tf32x3",
        "bsf",
        (1, 20, 24, 16),
        RegistersConstants(64, 16, 8, 8, 1, 2, 2, 32),
    ),
    "registers bsl": ("wgmma_registers", "tf32", "bsl", (1, 20, 24, 2), RegistersConstants(256, 16, 16, 1, 2, 1, 3, 0)),
}


def source_of(kind: str, cluster: tuple[int, int], epilogue: Epilogue = PLAIN) -> Source:
    family, precision, layout, pattern, constants = KINDS[kind]
    along_batch, along_out = cluster
    kernel, own = (
        kernel_of(pattern, precision, layout, epilogue),
        replace(constants, cluster_batch=along_batch, cluster_out=along_out),
    )
    check(family_named(family), kernel, own, GPU)
    return render(kernel, own, family=family)

"""A SIMT kernel's constants that hold all rules."""

from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec

PLAIN = Epilogue()


def kernel(pattern=(2, 37, 13, 5), precision="float32", layout="bsf", epilogue=PLAIN, batch=None) -> KernelSpec:
    return KernelSpec(Pattern(*pattern), precision, layout, epilogue, batch)

"""What a child process of a search imports first on the stand-in machine: it has no cache that arrays would have to be larger than."""

from ksgen.measure import verify

verify.GPU_ROTATED = 2

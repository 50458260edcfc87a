"""Imported first by a search's child processes on the stand-in machine: it has no cache, so few arrays are enough."""

from ksgen.measure import verify

verify.GPU_ROTATED = 2

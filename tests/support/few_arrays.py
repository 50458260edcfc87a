"""Imported first by a search's child processes on the stand-in machine. It has no cache, so few arrays are enough, and
emulates each row of the batches by which a search checks its candidates.
"""

from ksgen.measure import verify
from ksgen.tuning import worker

verify.GPU_ROTATED = 2
worker.RAGGED_BATCHES = (37, 48)

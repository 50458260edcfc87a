"""Tests mirror the modules of ksgen. `emulator/` emulates GPUs on the processor. A compiler warning is an error."""

import os

os.environ.setdefault("KSGEN_WARNINGS", "error")  # for the processes that tests start, too

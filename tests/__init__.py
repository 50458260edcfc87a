"""Tests mirror the modules of ksgen; `emulator/` is the GPU that is played on the processor. A warning of a compiler is an error here."""

import os

os.environ.setdefault("KSGEN_WARNINGS", "error")  # for the processes that tests start, too

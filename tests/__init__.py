"""Tests mirror the modules of ksgen; `simt/` is the emulator that plays the GPU."""

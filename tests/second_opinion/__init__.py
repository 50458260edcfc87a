"""Emitted texts, as nvcc compiles them to PTX, on a simulator that nobody here wrote: `python -m tests.second_opinion`."""

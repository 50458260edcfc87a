"""The search for the fastest constants of a kernel on a device. Measures; never chooses what a launcher runs: wisdom does."""

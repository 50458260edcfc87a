"""Run emitted sources, compiled to PTX by nvcc, on an independent simulator: `python -m tests.second_opinion`."""

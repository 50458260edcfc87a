"""Proofs and trials are tested, not kernels: these are compiled hastily."""

from tests.support.hasty import compiles_hastily

__all__ = ["compiles_hastily"]

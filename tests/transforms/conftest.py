"""What tests of transforms start from."""

from tests.support.hasty import compiles_hastily

__all__ = ["compiles_hastily"]

"""Turns a kernel source into a binary: compilers, their processes, the cache and bundles of binaries."""

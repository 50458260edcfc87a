"""From a text to a binary: compilers, their processes, the cache and bundles of binaries."""

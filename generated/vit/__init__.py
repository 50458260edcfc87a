"""Launchers of vit. Written by `ksgen emit`."""

from .launchers import (
    ks_2_48_192_1,
    ks_1_192_48_2,
    ks_6_64_64_1,
    ks_1_768_192_2,
    ks_6_64_256_1,
    ks_1_128_128_3,
    layer_attention,
    layer_up,
    layer_down,
)

__all__ = [
    "ks_2_48_192_1",
    "ks_1_192_48_2",
    "ks_6_64_64_1",
    "ks_1_768_192_2",
    "ks_6_64_256_1",
    "ks_1_128_128_3",
    "layer_attention",
    "layer_up",
    "layer_down",
]

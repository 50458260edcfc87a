"""Launchers of vit: y = ks_a_b_c_d(x, weights, layout="bsf"). Written by `ksgen emit`: edit the spec, not this file."""

from ksgen.launcher import ChainLauncher, Launcher

ks_2_48_192_1 = Launcher(2, 48, 192, 1)
ks_1_192_48_2 = Launcher(1, 192, 48, 2)
ks_6_64_64_1 = Launcher(6, 64, 64, 1)
ks_1_768_192_2 = Launcher(1, 768, 192, 2)
ks_6_64_256_1 = Launcher(6, 64, 256, 1)
ks_1_128_128_3 = Launcher(1, 128, 128, 3)
layer_attention = ChainLauncher(ks_2_48_192_1, ks_1_192_48_2)
layer_up = ChainLauncher(ks_6_64_64_1, ks_1_768_192_2)
layer_down = ChainLauncher(ks_6_64_256_1, ks_1_128_128_3)

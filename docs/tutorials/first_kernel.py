# # Tutorial: a first kernel
#
# A Kronecker-sparse matrix K has the support I_a ⊗ 1_{b×c} ⊗ I_d. The pattern (a, b, c, d) = (2, 4, 3, 2) makes it 16 x
# 12:

import numpy as np

import ksgen
from ksgen.figures.charts import chain_svg
from ksgen.reference import to_dense

print(chain_svg(ksgen.Chain([(2, 4, 3, 2)])))

# The weights are the values on the support, an array of shape (a, b, c, d). A launcher multiplies by K, but never
# forms it:

rng = np.random.default_rng(0)
x = rng.standard_normal((100, 12), dtype=np.float32)  # (batch, a*c*d)
weights = rng.standard_normal((2, 4, 3, 2), dtype=np.float32)
multiply = ksgen.Launcher(2, 4, 3, 2)
y = multiply(x, weights)
print(y.shape, y.dtype)

# The first call writes a kernel for this pattern, compiles it and stores the binary in a cache. Later calls only launch
# it. The result equals that of the dense matrix:

dense = to_dense(ksgen.Pattern(2, 4, 3, 2), weights)
print(dense.shape, "matrix,", np.count_nonzero(dense), "non-zero entries")
difference = np.abs(y - x @ dense.T).max()
print("the largest difference is below 1e-5:", bool(difference < 1e-5))

# Bias, activation and residual are part of the same kernel:

bias = rng.standard_normal(16, dtype=np.float32)
z = multiply(x, weights, bias=bias, activation="relu")
separate = np.maximum(x @ dense.T + bias, 0)
print("the same as separate steps:", np.allclose(z, separate, atol=1e-5))

# A chain of patterns is a layer. Functions such as `ksgen.monarch` make chains of known matrix families from their
# sizes. This one is a Monarch matrix:

monarch = ksgen.monarch(16, 16, 4, 4)
print(monarch, "with", monarch.weight_count, "weights instead of", 16 * 16)
print(chain_svg(monarch))

# A chain's launcher takes one array of weights per factor, in the order in which they multiply x:

layer = ksgen.ChainLauncher(monarch)
factors = [rng.standard_normal(each.shape, dtype="f4") for each in monarch]
print(layer(rng.standard_normal((100, 16), dtype="f4"), factors).shape)

# # Tutorial: tune and compare
#
# ksgen chooses the constants of a kernel, such as the size of a tile, by rules. A search measures other constants on
# this machine, and stores the fastest as *wisdom*. On this page, wisdom goes to a temporary folder.

import os
import tempfile
from statistics import median
from time import perf_counter

import numpy as np

os.environ["KSGEN_WISDOM_DIR"] = tempfile.mkdtemp()

import ksgen
from ksgen.figures.charts import Bars, picture

pattern = ksgen.Pattern(1, 192, 48, 2)
print(ksgen.Launcher(pattern).explain(392))

# This search may look at eight candidates. Without a budget, it ends when its model expects no candidate to be faster.
# On the command line, `ksgen tune 1,192,48,2 --batch 392` starts a search. Ctrl-C saves the best candidate so far, and
# the same command resumes it.

found = ksgen.tune(pattern, batch=392, budget=8)
print("candidates:", found.looked)
print("the default won" if found.default_won else f"the winner: {found.best.constants}")

# Launchers use wisdom at once, and in later processes. `explain` says so:

multiply = ksgen.Launcher(pattern)
print(multiply.explain(392))

# Is it faster than another method? A fair comparison uses the same arrays, and checks that results agree. The
# contenders take turns, so that other programs on the machine disturb all of them alike. NumPy permutes,
# multiplies in a batch, and permutes back:

rng = np.random.default_rng(0)
x = rng.standard_normal((392, 96), dtype=np.float32)
weights = rng.standard_normal(pattern.shape, dtype=np.float32)
packed = multiply.pack(weights)
matrices = np.ascontiguousarray(weights.transpose(0, 3, 2, 1))  # (a, d, c, b)


def by_numpy():
    blocks = x.reshape(392, 1, 48, 2).transpose(1, 3, 0, 2)
    return np.ascontiguousarray((blocks @ matrices).transpose(2, 0, 3, 1)).reshape(392, 384)


contenders = {"ksgen": lambda: multiply(x, packed), "NumPy": by_numpy}
print("they agree:", np.allclose(multiply(x, packed), by_numpy(), atol=1e-4))


def microseconds(run):
    begun = perf_counter()
    run()
    return 1e6 * (perf_counter() - begun)


turns = [{name: microseconds(run) for name, run in contenders.items()} for _ in range(50)]
times = {name: median(turn[name] for turn in turns) for name in contenders}
bars = Bars(f"{pattern}, batch 392, float32", tuple(times.items()), frozenset({"ksgen"}))
print(picture("ksgen compared with NumPy", [bars]))

# These are whole calls from Python, including the cost of checking the arguments. `ksgen bench` measures more
# carefully: kernels and PyTorch's products on arrays that no cache holds. Times that other processes disturbed are
# marked and left out, and a floor says how fast any kernel could be. The command takes the layers of a spec:
#
#     ksgen bench mine.yaml
#
# and writes `mine.html`. Up to ten layers have a bar chart each. For more layers, the page shows the speed-ups in
# ascending order. [Tuning](../tuning.md) describes the search, and [benchmarks](../benchmarks.md) the comparison.

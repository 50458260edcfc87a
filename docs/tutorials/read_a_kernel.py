# # Tutorial: read a kernel
#
# ksgen writes one source file per pattern, precision and layout. This spec asks for one kernel:

import tempfile
from pathlib import Path

from ksgen.emit.render import emit
from ksgen.spec import parse

spec = parse("kernels: ['6,64,64,1']", "tutorial.yaml")
folder = Path(tempfile.mkdtemp())
for source in emit(spec, folder, "cuda", None):
    print(source.entry, "by the family", source.family)

# On the command line, `ksgen emit tutorial.yaml` does the same. The head of the file says where it comes from:

(path,) = folder.glob("*.cu")
lines = path.read_text().splitlines()
print("\n".join(lines[:3]))
print(len(lines), "lines")

# All sizes are constants, each explained in a comment. The first four are the pattern:

constants = [line for line in lines if line.startswith("constexpr int")]
print("\n".join(constants[:12]))

# Comments show how to launch it by hand, in CUDA's notation. One kernel packs the weights, the other multiplies:

print("\n".join(line for line in lines if "<<<" in line))

# The code of the kernel has the order place, load, multiply, store. [How it works](../how-it-works.md) explains this
# very file.

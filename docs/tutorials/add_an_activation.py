# # Tutorial: add an activation
#
# Activations are part of the kernels: y = activation(x Kᵀ + bias) + residual. This page adds `quick_gelu` of CLIP,
# in a copy of the sources. In a [checkout](../setup.md) the steps are the same.

import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ksgen

copy = Path(tempfile.mkdtemp())
for folder in ("ksgen", "templates", "specs"):
    shutil.copytree(
        Path(ksgen.__file__).parents[1] / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__")
    )


def edit(name, old, new):
    """Replace text that occurs once in a file, and show the difference."""
    before = (copy / name).read_text()
    assert before.count(old) == 1, name
    (copy / name).write_text(before.replace(old, new))
    lines = difflib.unified_diff(
        before.splitlines(), before.replace(old, new).splitlines(), name, name, lineterm="", n=1
    )
    print("\n".join(list(lines)[2:]))


#
# **1. Its name.** Specs, `--activation` and launchers read this list:

edit("ksgen/spec/kernel.py", '"gelu_tanh", "silu"]', '"gelu_tanh", "silu", "quick_gelu"]')

# **2. Its definition in float64**, which every kernel is checked against:

edit(
    "ksgen/reference.py",
    '    "silu": _silu,\n',
    '    "silu": _silu,\n    "quick_gelu": lambda values: _silu(values, 1.702 * values),\n',
)

# **3. Its function in the C that CUDA and OpenCL share.** `type` is a number or a
# vector of numbers, so the function uses only arithmetic, `exp`, `erf` and `tanh`:

MACRO = """{% macro quick_gelu(name, type) %}
DEVICE {{ type }} {{ name }}({{ type }} value) { return value / (({{ type }})1 + exp(({{ type }})-1.702 * value)); }
{% endmacro %}
"""
SILU = "{% macro silu(name, type) %}"
edit("templates/include/snippets/activations.j2", SILU, MACRO + SILU)

# **4. Where kernels use it**: after the last factor, and between the factors of a layer:

IMPORT = '{% import "include/snippets/activations.j2" as activations %}\n'
BLOCKS = "".join(
    f'{{% block {block} %}}\n{IMPORT}{{{{ activations.quick_gelu("{function}", accumulator) }}}}{{% endblock %}}\n'
    for block, function in (
        ("activate__quick_gelu", "activate"),
        ("activate_between__between_quick_gelu", "activate_between"),
    )
)
edit("templates/include/snippets/epilogue.j2", "{% block finish %}", BLOCKS + "{% block finish %}")

# **5. Its function and derivative in PyTorch**, for `KSLinear` and the backends that call PyTorch's functions:

LINES = """    "silu": Activation(functional.silu, _aten.silu_backward),
    "quick_gelu": Activation(lambda values: values * torch.sigmoid(1.702 * values), _quick_gelu_backward),
"""
edit("ksgen/torch/operators/products.py", '    "silu": Activation(functional.silu, _aten.silu_backward),\n', LINES)

BACKWARD = """
def _quick_gelu_backward(gradient: Tensor, values: Tensor) -> Tensor:
    gate = torch.sigmoid(1.702 * values)
    return gradient * gate * (1 + 1.702 * values * (1 - gate))
"""
edit("ksgen/torch/operators/products.py", "\n\nACTIVATIONS = {", BACKWARD + "\n\nACTIVATIONS = {")

# **6. Its function in JAX**, for `ksgen.jax`:

JAX = '    "silu": jax.nn.silu,\n'
edit("ksgen/jax.py", JAX, f'{JAX}    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),\n')

# That is all. `ksgen run` compiles a kernel with it, and checks it against step 2:


def run(*arguments):
    command = [sys.executable, "-m", "ksgen", *arguments]
    return subprocess.run(
        command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True, check=False
    )


done = run("run", "6,64,64,1", "--batch", "300", "--bias", "--activation", "quick_gelu")
print("\n".join(line.partition(";")[0] for line in done.stdout.splitlines() if "float64" in line) or done.stderr)
print("the kernel agrees with float64:", done.returncode == 0)

# The emitted CUDA source has the new function:

(copy / "own.yaml").write_text("defaults: {activation: quick_gelu}\nkernels: ['6,64,64,1']\n")
run("emit", "own.yaml")
(source,) = (copy / "generated" / "own").glob("*.cu")
print("\n".join(line for line in source.read_text().splitlines() if "activate(" in line))

# In a checkout, add it to the tests' lists of activations too. Then the emulator's tests run it as CUDA on a processor.
# [Contributing](../../CONTRIBUTING.md#how-to-add-an-activation) names the files.
#

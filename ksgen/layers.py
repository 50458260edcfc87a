"""The layers: every module and package of ksgen in order. Each imports from itself and from those above it, never from
below.

`tests/test_layers.py` checks every import, and that docs/design.md prints this table.
"""

from typing import NamedTuple


class Package(NamedTuple):
    """One module or package of `ksgen`."""

    name: str
    task: str
    never: str = ""


LAYERS = (
    Package("layers", "lists the modules and packages in order"),
    Package("errors", "defines the exceptions that users see", "decides what is correct"),
    Package("install", "finds the command that installs an extra, given how ksgen was installed"),
    Package("values", "reads users' values as numbers, and writes values and numbers in messages"),
    Package("locks", "creates locks that a forked child finds free"),
    Package("paths", "names the folders of what ksgen ships and stores", "creates a folder"),
    Package(
        "ownership",
        "checks whether another user can have written a file; creates private temporary folders",
        "reads a file",
    ),
    Package("files", "reads and writes users' files atomically", "interprets their content"),
    Package("order", "orders the digits of a feature's index in memory", "touches arrays"),
    Package(
        "pattern",
        "defines which entries of K may be non-zero: sizes, index maps, named chains",
        "touches arrays or GPUs",
    ),
    Package("structures", "orders parameters of other libraries' layers as weights of a chain", "computes a factor"),
    Package("spec", "describes kernels, and reads them from YAML files", "renders"),
    Package("reference", "computes reference results in float64", "runs fast"),
    Package("quantized", "quantizes weights and x to eight bits with scales", "launches"),
    Package(
        "families", "chooses valid and good constants, predicts their cost, describes launches", "compiles or runs"
    ),
    Package("emit", "renders the source of a kernel with its constants: same input, same bytes", "chooses constants"),
    Package("build", "compiles a source to a binary, and caches it", "calls a GPU"),
    Package(
        "devices", "loads, launches and times with PyCUDA, cuda-bindings, the processor and OpenCL", "knows templates"
    ),
    Package("wisdom", "stores the fastest constants that searches found on a device", "renders"),
    Package("passport", "records which families are proven on a device, and disables the others", "proves"),
    Package(
        "launch", "turns a call's arrays into a launch: views, checks, device and stream, plan, memory", "searches"
    ),
    Package("launcher", "exports the launchers that users and emitted modules import", "searches"),
    Package("jax", "makes products for JAX programs, with gradients", "searches"),
    Package("transforms", "builds fast transforms as chains with exact weights", "computes a factor"),
    Package("measure", "checks and times kernels, and measures a device's ceilings", "chooses constants"),
    Package("figures", "draws figures for pages and terminals"),
    Package("tuning", "searches the fastest constants: trials, cost model, strategies, processes, a cluster"),
    Package("calibration", "proves families on a device, and tries a few candidates of each kernel"),
    Package("torch", "integrates PyTorch: the layer, factorisation, whole models"),
    Package("bench", "compares ksgen with other libraries on this machine"),
    Package("commands", "implements the commands of `ksgen`"),
    Package("cli", "registers the commands, and reports users' mistakes"),
    Package("__main__", "runs `python -m ksgen`"),
)

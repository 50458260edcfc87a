"""The layers: every module and package of ksgen in order. Each imports from itself and from those above it, never from below.

`tests/test_layers.py` checks every import, and that docs/design.md prints this table.
"""

from typing import NamedTuple


class Room(NamedTuple):
    """One module or package of `ksgen`."""

    name: str
    answers: str
    never: str = ""


LAYERS = (
    Room("layers", "this table"),
    Room("errors", "which errors users see", "decides what is right"),
    Room("install", "which command installs an extra, the way ksgen itself was installed"),
    Room("values", "how users' values are read as numbers, and quoted in messages"),
    Room("words", "how numbers are written in messages"),
    Room("locks", "which locks there are, and that a forked child finds them free"),
    Room("paths", "where ksgen finds what it ships and keeps what it makes", "creates a folder"),
    Room("ownership", "whether another user can have written a file; private folders for temporary files", "reads a file"),
    Room("files", "how users' files are read and written whole", "knows their content"),
    Room("pattern", "which entries of K are free: sizes, index maps, chains, named families", "knows arrays or GPUs"),
    Room("spec", "what one kernel is, and which kernels a YAML file asks for", "renders"),
    Room("reference", "what the right result is, in float64", "is fast"),
    Room("quantized", "which values in eight bits, and scales, stand for weights", "launches"),
    Room("families", "which constants are valid and good, what they cost, how a launch looks", "compiles or runs"),
    Room("emit", "which text a kernel with its constants becomes: same input, same bytes", "chooses constants"),
    Room("build", "which binary a text becomes, and where it is kept", "calls a GPU"),
    Room("devices", "how to load, launch and time on PyCUDA, cuda-bindings, the processor and OpenCL", "knows templates"),
    Room("wisdom", "which constants searches found to be the fastest on a device", "renders"),
    Room("launch", "how a call's arrays become a launch: views, checks, device and stream, plan, memory", "searches"),
    Room("launcher", "which calls users make, and emitted modules import", "searches"),
    Room("transforms", "which chains are fast transforms, with their exact weights, called on arrays", "computes a factor"),
    Room("measure", "whether a kernel is right, how long it takes, what the device can do at most", "chooses constants"),
    Room("figures", "how pictures are drawn for pages and terminals"),
    Room("tuning", "which constants are the fastest here: trials, cost model, strategies, processes, a cluster"),
    Room("torch", "how PyTorch uses all this: the layer, factorisation, whole models"),
    Room("bench", "how ksgen compares with other libraries on this machine"),
    Room("commands", "what each command of `ksgen` does, one module per command"),
    Room("cli", "which commands there are, and how they report mistakes"),
    Room("__main__", "`python -m ksgen`"),
)

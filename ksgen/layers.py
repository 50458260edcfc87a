"""The rooms of the house, from the ground up: a room imports from those above it in this table, and from itself, never from below.

`tests/test_layers.py` reads every import and holds them to it; docs/design.md prints the table.
"""

from typing import NamedTuple


class Room(NamedTuple):
    """One module or package of `ksgen`."""

    name: str
    answers: str
    never: str = ""


LAYERS = (
    Room("layers", "this table"),
    Room("errors", "what is raised", "decides what is right"),
    Room("install", "which line installs an extra, the way ksgen itself was installed"),
    Room("values", "what users give, read as numbers, and quoted in messages"),
    Room("words", "numbers in words"),
    Room("paths", "where ksgen finds what it ships and keeps what it makes", "creates a folder"),
    Room("files", "how users' files are read and written whole", "knows what is in them"),
    Room("pattern", "which entries of K are free: sizes, index maps, chains, named families", "knows arrays or GPUs"),
    Room("spec", "what one kernel is, and which kernels a YAML file asks for", "renders"),
    Room("reference", "what is right, in float64", "is fast"),
    Room("families", "which constants are valid and good, what they cost, how a launch looks", "compiles or runs"),
    Room("emit", "which text a kernel and its constants are: same input, same bytes", "chooses constants"),
    Room("build", "which binary a text is, and where it is kept", "calls a GPU"),
    Room("devices", "how to load, launch and time on PyCUDA, cuda-bindings and OpenCL", "knows templates"),
    Room("wisdom", "which constants were found to be the fastest on a device", "renders"),
    Room("launch", "how a call's arrays become a launch: views, checks, device and stream, plan, memory", "searches"),
    Room("launcher", "the calls that users make, and that emitted modules import", "searches"),
    Room("measure", "whether a kernel is right, how long it takes, what the device allows", "chooses constants"),
    Room("figures", "pictures for pages and terminals"),
    Room("tuning", "which constants are the fastest here: trials, cost model, strategies, processes, a cluster"),
    Room("torch", "the PyTorch layer, factorisation, whole models"),
    Room("bench", "how ksgen compares with everyone else on this machine"),
    Room("commands", "the command line, one module per command"),
    Room("cli", "the command `ksgen`"),
    Room("__main__", "`python -m ksgen`"),
)

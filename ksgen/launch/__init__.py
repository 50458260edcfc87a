"""Steps from a call's arguments to a launch: views of arrays, checks, the choice of a kernel, memory."""

"""From a call's arguments to a launch: what an array is, whether it fits, which kernel serves it, where its memory is."""

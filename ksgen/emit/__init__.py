"""From a kernel and its constants to a text; from a spec to a folder of them."""

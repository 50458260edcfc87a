"""Turns a kernel and its constants into a source, and a spec into a folder of sources."""

"""The subcommands of `ksgen`, one module each; `common.py` is what they share."""

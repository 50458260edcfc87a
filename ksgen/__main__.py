"""The console script `ksgen`, and `python -m ksgen`. Ctrl-C ends both quietly, even while Python still imports."""

import sys


def main() -> None:
    """Import the command line, and run it."""
    try:
        from ksgen import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
